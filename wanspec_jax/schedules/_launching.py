# SPDX-License-Identifier: Apache-2.0
"""From a policy's answers to runs: admission, slots, what rides on what."""

from collections.abc import Sequence

import numpy as np

from wanspec_jax.messages import Commit, Open, Run
from wanspec_jax.schedules import _events as ev
from wanspec_jax.schedules._speculation import Flight, Speculation, start
from wanspec_jax.schedules._state import (
  EngineState,
  Grow,
  Hold,
  Send,
  SequenceState,
)
from wanspec_jax.schedules._verdicts import stop_reason


def _budget(state: EngineState, request: ev.Request) -> int:
  return min(request.max_new_tokens, state.capacity - len(request.prompt))


def _reserved(state: EngineState) -> int:
  """Returns the slots set aside for texts, prompts included."""
  return sum(s.spec.prompt_length + s.budget for s in state.sequences.values())


def _held(state: EngineState) -> int:
  """Returns the slots of launched nodes that are not text, dead or alive."""
  return sum(
    s.spec.num_launched + s.spec.dead_held for s in state.sequences.values()
  )


def admit(state: EngineState, actions: list[ev.Action], now_s: float) -> None:
  """Takes requests from the queue, first come first served, while they fit.

  Nodes hold slots until a commit frees them, so a request waits for those as
  well; `_free_for_speculation` lets them drain.

  A request whose prompt and budget exceed the whole capacity gets the budget
  that fits: it ends with `length`, decided here and nowhere else. A resumed
  text that had come to its end already ends again, for the same reason.
  """
  while state.queue:
    sequence, request = state.queue[0]
    budget = _budget(state, request)
    need = len(request.prompt) + budget
    if _reserved(state) + _held(state) + need > state.capacity:
      break
    state.queue.popleft()
    emitted = list(request.emitted)
    reason = stop_reason(request, emitted, budget)
    if reason is not None:
      actions.append(ev.Finish(sequence=sequence, reason=reason))
      continue
    tokens = request.prompt + request.emitted
    left = budget - len(emitted)
    state.sequences[sequence] = SequenceState(
      request=request,
      spec=start(sequence, tokens, left, prompt_length=len(request.prompt)),
      budget=budget,
      emitted=emitted,
      rounds=[],
    )
    state.pipe.num_sequences = len(state.sequences)
    actions.append(ev.Admit(sequence=sequence, request=request))
    actions += begin(state, sequence, now_s)


def begin(state: EngineState, sequence: int, now_s: float) -> list[ev.Action]:
  """Launches a text but its last token, as committed rows in chunks."""
  entry = state.sequences[sequence]
  state.opens[sequence] = Open(
    sequence=sequence,
    sampling=entry.request.sampling,
    log_probs=entry.request.log_probs,
  )
  tokens = entry.spec.tokens
  return [
    _launch(
      state,
      sequence,
      [
        (i, max(i - 1, 0), tokens[i], True)
        for i in range(low, min(low + state.prefill_rows, len(tokens) - 1))
      ],
      now_s,
    )
    for low in range(0, len(tokens) - 1, state.prefill_rows)
  ]


def _free_for_speculation(state: EngineState, spec: Speculation) -> int:
  """Returns the slots that a sequence's next run may fill with nodes.

  Those of its own dead are among them: the commit that frees them rides on that
  very run. Sequences share what is left evenly. Where only nodes keep the first
  request of the queue from being admitted, its slots are left to it.
  """
  pool = state.capacity - _reserved(state)
  free = pool - _held(state) + spec.dead_held
  if state.queue:
    _, request = state.queue[0]
    need = len(request.prompt) + _budget(state, request)
    if need <= pool:
      pool -= need
      free -= need
  share = pool // len(state.sequences) - spec.num_launched
  return min(free, share)


def ask_policy(
  state: EngineState, sequence: int, now_s: float
) -> list[ev.Action]:
  """Carries out all that the policy wants of one sequence now.

  Text must always progress: if nothing of the sequence is under way and no
  draft is awaited, the root is launched whatever the policy says.
  """
  actions: list[ev.Action] = []
  entry = state.sequences[sequence]
  spec = entry.spec
  while True:
    free = _free_for_speculation(state, spec)
    spec.max_new_nodes = max(
      0, min(free, state.pipe.costs.max_rows - (not spec.root_launched))
    )
    answer = state.policy.decide(spec, state.pipe, now_s)
    match answer:
      case Grow():
        actions.append(_grow(state, spec, answer))
      case Send(ids=ids):
        actions.append(_send(state, spec, ids, now_s))
      case _:
        if not spec.root_launched and not spec.flights and not spec.drafting:
          actions.append(_send(state, spec, (), now_s))
          continue
        if isinstance(answer, Hold):
          actions += _hold(entry, answer.until_s, now_s)
        return actions


def _hold(
  entry: SequenceState, until_s: float, now_s: float
) -> list[ev.Action]:
  if until_s <= now_s:
    return []
  if entry.wake_s is not None and now_s < entry.wake_s <= until_s:
    return []  # it will be asked before that, and can ask again
  entry.wake_s = until_s
  return [ev.Wake(time_s=entry.wake_s)]


def _grow(state: EngineState, spec: Speculation, answer: Grow) -> ev.Action:
  if spec.drafting:
    raise RuntimeError(f"{state.policy.name}: two drafts of a sequence at once")
  spec.drafting = tuple(anchor.id for anchor in answer.anchors)
  spec.ticket = state.next_ticket
  spec.trail = [(spec.root, spec.tokens[-1])]
  state.next_ticket += 1
  for anchor in answer.anchors:
    spec.nodes[anchor.id].grown = answer.budget
  return ev.Draft(
    sequence=spec.sequence,
    ticket=spec.ticket,
    anchors=answer.anchors,
    budget=answer.budget,
    levels=answer.levels,
  )


def _send(
  state: EngineState, spec: Speculation, ids: Sequence[int], now_s: float
) -> ev.Action:
  name = state.policy.name
  if spec.in_flight >= state.policy.max_in_flight:
    raise RuntimeError(f"{name}: more than max_in_flight runs of a sequence")
  if len(ids) > spec.max_new_nodes:
    raise RuntimeError(
      f"{name}: {len(ids)} nodes launched, {spec.max_new_nodes} slots are free"
    )
  if not ids and spec.root_launched:
    raise RuntimeError(
      f"{name}: nothing to launch: the root of sequence {spec.sequence} is on "
      "its way and no node was named"
    )
  spec.drafted += len(ids)
  spec.num_launched += len(ids)
  spec.launches += 1
  if not spec.root_launched:
    ids = [spec.root, *ids]
    spec.launches = 1
  rows = []
  for node_id in ids:
    node = spec.nodes[node_id]
    parent = spec.nodes.get(node.parent)
    if node.run is not None or (
      node_id != spec.root and (parent is None or parent.run is None)
    ):
      raise RuntimeError(
        f"{name}: node {node_id} is launched already or before its parent"
      )
    node.run = state.next_run
    rows.append((node.id, node.parent, node.token, False))
  return _launch(state, spec.sequence, rows, now_s)


def free_slots(state: EngineState, now_s: float) -> list[ev.Action]:
  """Sends commits and closes alone, where nothing comes that they could ride
  on and a request waits for the slots that they free."""
  actions: list[ev.Action] = []
  for sequence, entry in state.sequences.items():
    spec = entry.spec
    if spec.commit_due and spec.root_launched and spec.dead_held:
      pool = state.capacity - _reserved(state) - _held(state)
      if state.queue or pool <= 0:
        actions.append(_launch(state, sequence, [], now_s))
  if state.closes:
    actions.append(_launch(state, None, [], now_s))
  return actions


def _launch(
  state: EngineState,
  sequence: int | None,
  rows: list[tuple[int, int, int, bool]],
  now_s: float,
) -> ev.Launch:
  """Builds a run and lets everything due ride on it."""
  commits = ()
  opens = ()
  tail_s, return_s = state.pipe.launch(len(rows), now_s)
  if sequence is not None:
    spec = state.sequences[sequence].spec
    opened = state.opens.pop(sequence, None)
    opens = () if opened is None else (opened,)
    if spec.commit_due and spec.root_launched:
      commits = (Commit(sequence=sequence, root=spec.root),)
      spec.commit_due = False
      spec.dead_held = 0
    if not all(row[3] for row in rows):  # prompt chunks bring no verdict
      spec.flights.append(
        Flight(
          run=state.next_run,
          ids=tuple(row[0] for row in rows),
          launched_s=now_s,
          tail_s=tail_s,
          return_s=return_s,
          others=len(state.runs),
        )
      )
      state.runs[state.next_run] = sequence
  ids, parents, tokens, committed = (
    zip(*rows, strict=True) if rows else ((), (), (), ())
  )
  run = Run(
    run_id=state.next_run,
    epoch=state.epoch,
    opens=opens,
    closes=tuple(state.closes),
    commits=commits,
    sequences=np.full(len(rows), sequence or 0, np.int32),
    ids=np.asarray(ids, np.int64),
    parents=np.asarray(parents, np.int64),
    tokens=np.asarray(tokens, np.int32),
    committed=np.asarray(committed, bool),
  )
  state.closes = []
  state.next_run += 1
  return ev.Launch(run=run)
