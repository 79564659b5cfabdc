# SPDX-License-Identifier: Apache-2.0
"""The engine: one growing tree per sequence, driven by events.

`step(state, event) -> (state, actions)` knows nodes, runs, verdicts, commits
and slots; a *policy* decides what to draft and what to launch. No sockets, no
clocks, no threads, no randomness: the same engine runs in every world. The
state passed to `step` is donated: use the one that comes back.
"""

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from wanspec_jax.base import Anchor
from wanspec_jax.messages import Commit, Open, Run, Verdict
from wanspec_jax.metrics import RoundRecord
from wanspec_jax.schedules import _events as ev
from wanspec_jax.schedules._speculation import (
  Speculation,
  add_nodes,
  commit_tokens,
  start,
)

_SPARE_TOKENS = 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """What a policy may know of the ring.

  Attributes:
    lap_s: `(rows) -> seconds` of one lap of a run of that many rows.
    max_rows: rows that one run may carry (the stages' largest bucket).
  """

  lap_s: Callable[[int], float]
  max_rows: int


class Grow(NamedTuple):
  """A policy asks the drafter for nodes below these anchors."""

  anchors: tuple[Anchor, ...]
  budget: int


class Send(NamedTuple):
  """A policy launches these nodes (with the root, if it is not launched).

  A node whose parent is neither launched nor listed before it is refused.
  """

  ids: tuple[int, ...]


class Policy(NamedTuple):
  """Decides which nodes are worth their time on the links now.

  Attributes:
    name: as in `--schedule`.
    decide: `(spec, costs, time_s) -> Grow | Send | None`; asked again after
      each answer until it returns None. Must not change `spec`.
    max_in_flight: runs of one sequence that it may have in flight.
  """

  name: str
  decide: Callable[[Speculation, Costs, float], "Grow | Send | None"]
  max_in_flight: int


@dataclasses.dataclass(slots=True)
class SequenceState:
  """One admitted sequence."""

  request: ev.Request
  spec: Speculation
  budget: int
  emitted: list[int]
  rounds: list[RoundRecord]


@dataclasses.dataclass(slots=True)
class EngineState:
  """All sequences of a session and the slots they hold.

  Attributes:
    policy: what to launch.
    costs: of the ring.
    capacity: slots per stage.
    prefill_rows: rows per prompt chunk.
    queue: requests that wait for slots.
    sequences: admitted ones.
    next_run: id of the next run.
    runs: sequences whose verdict each run in flight may bring.
    closes: sequences that ended since the last run.
    opens: sequences whose `Open` rides on their first run.
  """

  policy: Policy
  costs: Costs
  capacity: int
  prefill_rows: int
  queue: collections.deque
  sequences: dict[int, SequenceState]
  next_run: int
  runs: dict[int, tuple[int, ...]]
  closes: list[int]
  opens: dict[int, Open]


def init(
  policy: Policy, costs: Costs, *, capacity: int, prefill_rows: int
) -> EngineState:
  """Returns an engine with nothing to do.

  Args:
    policy: see `Policy`.
    costs: see `Costs`.
    capacity: KV slots that every stage has.
    prefill_rows: rows per prompt chunk; chunks follow each other through the
      pipe without waiting.
  """
  for field, value, high in (
    ("capacity", capacity, None),
    ("prefill_rows", prefill_rows, costs.max_rows),
  ):
    if value < 1 or (high is not None and value > high):
      raise ValueError(
        f"{field} = {value}: must be at least 1"
        + (f" and at most max_rows = {high}" if high is not None else "")
      )
  return EngineState(
    policy=policy,
    costs=costs,
    capacity=capacity,
    prefill_rows=prefill_rows,
    queue=collections.deque(),
    sequences={},
    next_run=0,
    runs={},
    closes=[],
    opens={},
  )


def step(
  state: EngineState, event: ev.Event
) -> tuple[EngineState, list[ev.Action]]:
  """Applies one event; returns the state and what the world must do, in order.

  Raises:
    ValueError: a request that can never be served, naming the field.
  """
  actions: list[ev.Action] = []
  match event:
    case ev.Submitted(sequence=sequence, request=request):
      _check_request(state, request)
      state.queue.append((sequence, request))
      touched = []
    case ev.Arrived(returned=returned):
      # A run of a closed sequence may still return: its verdicts are void.
      carried = state.runs.pop(returned.run_id, ())
      touched = [s for s in carried if s in state.sequences]
      for sequence in touched:
        state.sequences[sequence].spec.in_flight -= 1
      for verdict in returned.verdicts:
        if verdict.sequence in state.sequences:
          actions += _apply_verdict(state, verdict)
    case ev.Drafted(sequence=sequence):
      touched = [sequence] if sequence in state.sequences else []
      if touched:
        spec = state.sequences[sequence].spec
        spec.drafting = False
        add_nodes(spec, event.anchors, event.nodes)
        spec.drafted_root = event.root
    case ev.Aborted(sequence=sequence):
      touched = []
      waiting = [item for item in state.queue if item[0] != sequence]
      if len(waiting) < len(state.queue):
        state.queue = collections.deque(waiting)
        actions.append(ev.Finish(sequence=sequence, reason="aborted"))
      if sequence in state.sequences:
        actions += _finish(state, sequence, "aborted")
    case _:
      raise TypeError(f"not an event: {event!r}")
  touched += _admit(state, actions)
  while touched:
    for sequence in touched:
      if sequence in state.sequences:
        actions += _ask_policy(state, sequence, event.time_s)
    # What they sent may have freed the slots that a request waits for.
    touched = _admit(state, actions)
  if state.closes:  # nothing left to ride on
    actions.append(_launch(state, None, []))
  return state, actions


def _check_request(state: EngineState, request: ev.Request) -> None:
  if len(request.prompt) >= state.capacity:
    raise ValueError(
      f"Request.prompt of {len(request.prompt)} tokens: needs fewer than the "
      f"stages' capacity of {state.capacity} slots"
    )


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


def _admit(state: EngineState, actions: list[ev.Action]) -> list[int]:
  """Takes requests from the queue, first come first served, while they fit.

  Nodes hold slots until a commit frees them, so a request waits for those as
  well; `_free_for_speculation` lets them drain.

  A request whose prompt and budget exceed the whole capacity gets the budget
  that fits: it ends with `length`, decided here and nowhere else.
  """
  admitted = []
  while state.queue:
    sequence, request = state.queue[0]
    budget = _budget(state, request)
    need = len(request.prompt) + budget
    if _reserved(state) + _held(state) + need > state.capacity:
      break
    state.queue.popleft()
    if budget == 0:
      actions.append(ev.Finish(sequence=sequence, reason="length"))
      continue
    state.sequences[sequence] = SequenceState(
      request=request,
      spec=start(sequence, request.prompt, budget),
      budget=budget,
      emitted=[],
      rounds=[],
    )
    state.opens[sequence] = Open(
      sequence=sequence,
      sampling=request.sampling,
      log_probs=request.log_probs,
    )
    actions.append(ev.Admit(sequence=sequence, request=request))
    actions += _prefill(state, sequence)
    admitted.append(sequence)
  return admitted


def _prefill(state: EngineState, sequence: int) -> list[ev.Action]:
  """Launches the prompt but its last token, as committed rows in chunks."""
  prompt = state.sequences[sequence].request.prompt
  return [
    _launch(
      state,
      sequence,
      [
        (i, max(i - 1, 0), prompt[i], True)
        for i in range(low, min(low + state.prefill_rows, len(prompt) - 1))
      ],
    )
    for low in range(0, len(prompt) - 1, state.prefill_rows)
  ]


def _free_for_speculation(state: EngineState, spec: Speculation) -> int:
  """Returns the slots that a sequence's next run may fill with nodes.

  Those of its own dead are among them: the commit that frees them rides on that
  very run. Where only nodes keep the first request of the queue from being
  admitted, its slots are left to it.
  """
  free = state.capacity - _reserved(state) - _held(state) + spec.dead_held
  if state.queue:
    _, request = state.queue[0]
    need = len(request.prompt) + _budget(state, request)
    if _reserved(state) + need <= state.capacity:
      free -= need
  return free


def _ask_policy(
  state: EngineState, sequence: int, time_s: float
) -> list[ev.Action]:
  actions: list[ev.Action] = []
  spec = state.sequences[sequence].spec
  while True:
    free = _free_for_speculation(state, spec)
    spec.max_new_nodes = max(
      0, min(free, state.costs.max_rows - (not spec.root_launched))
    )
    answer = state.policy.decide(spec, state.costs, time_s)
    if answer is None:
      return actions
    if isinstance(answer, Grow):
      spec.drafting = True
      actions.append(
        ev.Draft(
          sequence=sequence,
          root=spec.root,
          anchors=answer.anchors,
          budget=answer.budget,
        )
      )
    else:
      actions.append(_send(state, spec, answer.ids))


def _send(
  state: EngineState, spec: Speculation, ids: Sequence[int]
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
  if not spec.root_launched:
    ids = [spec.root, *ids]
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
  return _launch(state, spec.sequence, rows)


def _launch(
  state: EngineState,
  sequence: int | None,
  rows: list[tuple[int, int, int, bool]],
) -> ev.Launch:
  """Builds a run and lets everything due ride on it."""
  commits = ()
  opens = ()
  if sequence is not None:
    spec = state.sequences[sequence].spec
    opened = state.opens.pop(sequence, None)
    opens = () if opened is None else (opened,)
    if spec.commit_due and spec.root_launched:
      commits = (Commit(sequence=sequence, root=spec.root),)
      spec.commit_due = False
      spec.dead_held = 0
    if not all(row[3] for row in rows):  # prompt chunks bring no verdict
      spec.in_flight += 1
      state.runs[state.next_run] = (sequence,)
  ids, parents, tokens, committed = (
    zip(*rows, strict=True) if rows else ((), (), (), ())
  )
  run = Run(
    run_id=state.next_run,
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


def _apply_verdict(state: EngineState, verdict: Verdict) -> list[ev.Action]:
  """Commits what the tail drew, cut at the first reason to stop."""
  entry = state.sequences[verdict.sequence]
  spec = entry.spec
  drafted, spec.drafted = spec.drafted, 0
  # All but the last draw were found among the nodes. The last one was tested if
  # its tip had launched children, and passed if one of them, still on its way,
  # bears it.
  found = len(verdict.tokens) - 1
  tip = spec.descend(verdict.tokens[:-1])
  tested = found + any(
    node.parent == tip and node.run is not None and node.id != spec.root
    for node in spec.nodes.values()
  )
  commit_tokens(spec, verdict.tokens)
  accepted = found + spec.root_launched
  kept, reason = 0, None
  while reason is None and kept < len(verdict.tokens):
    entry.emitted.append(verdict.tokens[kept])
    reason = _stop_reason(entry, verdict.tokens[kept])
    kept += 1
  if kept <= accepted:  # what lies behind the end was not decoded
    tested = accepted = kept
  entry.rounds.append(
    RoundRecord(drafted=drafted, tested=tested, accepted=accepted, emitted=kept)
  )
  spec.remaining = entry.budget - len(entry.emitted)
  actions: list[ev.Action] = [
    ev.Emit(
      sequence=verdict.sequence,
      tokens=verdict.tokens[:kept],
      log_probs=verdict.log_probs[:kept],
      margins=verdict.margins[:kept],
    )
  ]
  if reason is not None:
    return actions + _finish(state, verdict.sequence, reason)
  actions.append(
    ev.Observe(sequence=verdict.sequence, root=spec.root, tokens=verdict.tokens)
  )
  return actions


def _stop_reason(entry: SequenceState, token: int) -> str | None:
  stop = entry.request.stop
  if token in stop.ids:
    return "stop"
  if stop.strings:
    text = _last_text(stop, entry.emitted)
    if any(s in text for s in stop.strings):
      return "stop_string"
  if len(entry.emitted) >= entry.budget:
    return "length"
  return None


def _last_text(stop: ev.Stop, emitted: list[int]) -> str:
  """Returns the end of the text, as far back as a stop string may reach that
  the last token completes."""
  assert stop.text_of is not None
  longest = max(len(s.encode()) for s in stop.strings)
  # Most tokens are a byte or more. The spare ones cover a character that the
  # window's edge cuts; tokens without text make the window grow.
  window = longest + _SPARE_TOKENS
  while window < len(emitted):
    if len(stop.text_of(emitted[-window:-1])) >= longest + _SPARE_TOKENS // 2:
      break
    window *= 2
  return stop.text_of(emitted[-window:])


def _finish(state: EngineState, sequence: int, reason: str) -> list[ev.Action]:
  entry = state.sequences.pop(sequence)
  if state.opens.pop(sequence, None) is None:
    state.closes.append(sequence)  # the stages know it
  return [
    ev.Finish(sequence=sequence, reason=reason, rounds=tuple(entry.rounds))
  ]
