# SPDX-License-Identifier: Apache-2.0
"""The schedules of rings that others measured, and what a simulation counts."""

import dataclasses
import random
from typing import Any

import drafters
from experiments.studies._published_world import World
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import (
  Driver,
  PassStage,
  Recording,
  ReplayStage,
  VirtualRing,
)

_VOCAB = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
  """What a run of a measured system reports.

  Attributes:
    tokens_per_s: after the first token.
    frames_per_token: launched runs ÷ tokens.
    stale_per_token: runs whose nodes did not become text ÷ tokens.
    tokens_per_cancel: tokens ÷ drafted tokens that were tested and wrong.
    in_flight_fill: runs in flight, stale ones among them, time average.
    in_flight_max: most runs in flight that were not stale.
    tokens_per_round: tokens ÷ verdicts that emitted any.
  """

  tokens_per_s: float
  frames_per_token: float
  stale_per_token: float
  tokens_per_cancel: float
  in_flight_fill: float
  in_flight_max: int
  tokens_per_round: float


def frames(block: int, limit: int, *, floor: int = 1) -> sch.Policy:
  """Returns DeepSeek-V4's schedule in `leyten/shard`: single-position frames.

  One hidden state yields one block of drafts; root and block go out one node
  per frame, and the next block is drafted when the pipe has drained to the
  frontier.

  Args:
    block: drafts per block.
    limit: frames in flight that are not stale, at most.
    floor: more than 1 refills before the pipe drains: while fewer frames than
      this are alive, the drafter is asked again, from the newest hidden state
      that is back, and what goes beyond the frontier is one node.
  """

  def decide(spec, pipe, time_s):
    del pipe, time_s
    if spec.drafting:
      return None
    if not spec.root_launched:
      if spec.drafted_root != spec.root and spec.remaining > 1:
        return sch.Grow((spec.anchor(spec.root),), block, block)
      return sch.Send(())
    alive = sum(any(i in spec.nodes for i in f.ids) for f in spec.flights)
    if alive < limit and (ready := spec.launchable(1)):
      return sch.Send(tuple(ready))
    if alive < floor and floor > 1 and not spec.launchable(1):
      deepest = max(spec.nodes.values(), key=lambda node: node.position)
      if deepest.position - spec.nodes[spec.root].position < spec.remaining - 1:
        return sch.Grow((spec.anchor(deepest.id),), 1, 1)
    return None

  return sch.Policy(f"frames({block}, {limit}, {floor})", decide, 4096)


def chunks(length: int, depth: int) -> sch.Policy:
  """Returns `leyten/shard`'s chunk pipelining: chains of several positions.

  A chunk of `length` drafts follows the token before it; the next one follows
  the last draft. One that is not accepted in full voids all behind it. At depth
  1 it is the synchronous chain.

  Args:
    length: drafts per chunk; `length + 1` positions.
    depth: chunks in flight.
  """

  def decide(spec, pipe, time_s):
    del pipe, time_s
    if spec.drafting:
      return None
    ready = spec.launchable(length + 1)
    if not spec.root_launched:
      need = min(length, spec.remaining - 1)
      if len(ready) < need and spec.drafted_root != spec.root:
        return sch.Grow((spec.anchor(spec.root),), length, length)
      return sch.Send(tuple(ready[:length]))
    alive = sum(any(i in spec.nodes for i in f.ids) for f in spec.flights)
    if alive >= depth:
      return None
    deepest = max(spec.nodes.values(), key=lambda node: node.position)
    reach = deepest.position - spec.nodes[spec.root].position
    if len(ready) <= length and reach < spec.remaining - 1:
      return sch.Grow((spec.anchor(deepest.id),), length + 1, length + 1)
    return sch.Send(tuple(ready)) if ready else None

  return sch.Policy(f"chunks({length}, {depth})", decide, 4096)


def plain() -> sch.Policy:
  """Returns decoding without drafts."""
  return sch.lockstep(lambda gains, lap_s: 0, max_nodes=0)


def count(
  world: World,
  policy: sch.Policy,
  acceptance: Any,
  *,
  tokens: int,
  seed: int = 0,
) -> Counters:
  """Decodes one text on the virtual ring and counts.

  Args:
    world: where.
    policy: how.
    acceptance: marginals as `drafters.synthetic` takes them; by depth they are
      conditional on the node before.
    tokens: length of the text; the measured ones are short, and scatter.
    seed: of text and acceptance.
  """
  rng = random.Random(seed)
  text = tuple(rng.choices(range(_VOCAB), k=tokens + 300))
  capacity = tokens + 8192
  stages: list[Any] = [PassStage(0) for _ in world.stage_s[:-1]]
  stages.append(ReplayStage(capacity=capacity, texts={0: text}))
  ring = VirtualRing(
    stages=stages,
    hops=[wire.LinkShaper(delay_s=d) for d in world.delays_s],
    profile=world.profile(),
    draft=world.draft,
    drafter_stage=world.drafter_stage,
    trace=False,
  )
  recording = Recording()
  driver = Driver(
    sch.init(policy, world.costs(), capacity=capacity, prefill_rows=1),
    drafters.synthetic(
      text[1:], acceptance=acceptance, vocab_size=_VOCAB, seed=seed
    ),
    recording=recording,
  )
  request = sch.Request(
    prompt=text[:1], max_new_tokens=tokens, sampling=Sampling()
  )
  outcome = ring.run(driver, [(0.0, request)]).outcomes[0]
  if tuple(outcome.tokens) != text[1 : tokens + 1]:
    raise RuntimeError(f"{policy.name}: the text is not that of the target")
  return _counters(recording, outcome, tokens)


def _counters(recording: Recording, outcome: Any, tokens: int) -> Counters:
  alive: set[int] = set()
  in_flight, launched, rows, largest = 0, 0, 0, 0
  area, last_s = 0.0, outcome.emitted_s[0]
  end_s = outcome.emitted_s[-1]
  rounds = outcome.rounds
  verdicts = iter(rounds)
  for event, actions in recording.steps:
    if event.time_s > end_s:
      break
    if event.time_s > last_s:
      area += in_flight * (event.time_s - last_s)
      last_s = event.time_s
    if isinstance(event, sch.Arrived):
      in_flight -= 1
      alive.discard(event.returned.run_id)
    for action in actions:
      if isinstance(action, sch.Emit):
        verdict = next(verdicts)
        if verdict.tested > verdict.accepted:
          alive.clear()  # whatever is behind a wrong draft is stale
      if isinstance(action, sch.Launch):
        in_flight += 1
        if action.run.num_rows:
          launched += 1
          rows += action.run.num_rows
          alive.add(action.run.run_id)
          largest = max(largest, len(alive))
  wrong = sum(r.tested > r.accepted for r in rounds)
  return Counters(
    tokens_per_s=(tokens - 1) / (end_s - outcome.emitted_s[0]),
    frames_per_token=launched / tokens,
    stale_per_token=(rows - tokens) / tokens,
    tokens_per_cancel=tokens / max(wrong, 1),
    in_flight_fill=area / (end_s - outcome.emitted_s[0]),
    in_flight_max=largest,
    tokens_per_round=tokens / len(rounds),
  )
