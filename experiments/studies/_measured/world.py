# SPDX-License-Identifier: Apache-2.0
"""Rings that others measured, and what a simulation on them counts."""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from typing import Any

import drafters
from experiments.studies._published.world import World
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.base import Drafter
from wanspec_jax.links import StageProfile
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
class MeasuredWorld(World):
  """A measured ring.

  Attributes:
    row_share: what each further row adds to a run at a stage, as a share of
      that stage's time for one row; on top of `row_s`.
  """

  row_share: float = 0.0

  def profile(self) -> StageProfile:
    """Returns the stages' times by number of rows."""
    flat = super().profile()
    rows = tuple(range(1, flat.buckets[-1] + 1))
    return dataclasses.replace(
      flat,
      buckets=rows,
      seconds=tuple(
        tuple(t + (n - 1) * (self.row_s + t * self.row_share) for n in rows)
        for t in self.stage_s
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Quality:
  """How often a drafter is right, given that all before it was.

  Attributes:
    by_index: of the drafts of one block, first to last; no block is longer.
    refilled: the same for drafts that extend what is in flight already. By
      default those of `block`, whose refills draft their whole prefix anew.
  """

  by_index: tuple[float, ...]
  refilled: tuple[float, ...]

  @classmethod
  def block(cls, by_index: Sequence[float]) -> "Quality":
    """Returns that of a drafter that makes one block from one hidden state.

    What a block adds behind tokens in flight follows from its own prefix, not
    from theirs. If it drafts that anew, its last draft fits with the product of
    all acceptances up to its index.
    """
    anew = itertools.accumulate(by_index, lambda a, b: a * b)
    return cls(by_index=tuple(by_index), refilled=tuple(anew))

  @classmethod
  def chain(cls, alpha: float, length: int = 64) -> "Quality":
    """Returns that of a model which drafts on from whatever is in flight."""
    return cls(by_index=(alpha,) * length, refilled=(alpha,) * length)

  def drafter(self, text: Sequence[int], seed: int) -> Drafter:
    """Returns such a drafter of a text."""

    def make(by_index: tuple[float, ...]) -> Drafter:
      return drafters.synthetic(
        text,
        # A table goes on with its last row: no block is longer.
        acceptance=[[a] for a in (*by_index, 0.0)],
        vocab_size=_VOCAB,
        seed=seed,
      )

    first, later = make(self.by_index), make(self.refilled)

    def expand(state, anchors, budget, levels=None):
      beyond = any(anchor.path for anchor in anchors)
      return (later if beyond else first).expand(state, anchors, budget, levels)

    return Drafter("measured", first.init, expand, first.rebase, first.observe)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counters:
  """What a run of a measured system reports.

  Attributes:
    tokens_per_s: after the first token.
    frames_per_token: launched runs ÷ tokens.
    stale_per_token: rows that did not become text ÷ tokens.
    tokens_per_cancel: tokens ÷ drafted tokens that were tested and wrong.
    in_flight_fill: runs in flight, stale ones among them, time average.
    alive_fill: runs in flight that are not stale, time average.
    alive_mean: the same, average over verdicts, right before each.
    alive_max: most of them at once.
    tokens_per_round: tokens ÷ verdicts that emitted any.
  """

  tokens_per_s: float
  frames_per_token: float
  stale_per_token: float
  tokens_per_cancel: float
  in_flight_fill: float
  alive_fill: float
  alive_mean: float
  alive_max: int
  tokens_per_round: float


def count(
  world: World,
  policy: sch.Policy,
  quality: Quality,
  *,
  tokens: int,
  seed: int = 0,
) -> Counters:
  """Decodes one text on the virtual ring and counts.

  Args:
    world: where.
    policy: how.
    quality: of the drafter.
    tokens: length of the text; the measured ones are short, and scatter.
    seed: of text and acceptance.

  Raises:
    RuntimeError: what was decoded is not the target's text.
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
    quality.drafter(text[1:], seed),
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
  in_flight, launched, rows = 0, 0, 0
  area, alive_area, before_s = 0.0, 0.0, outcome.emitted_s[0]
  seen: list[int] = []
  end_s = outcome.emitted_s[-1]
  verdicts = iter(outcome.rounds)
  for event, actions in recording.steps:
    if event.time_s > end_s:
      break
    if event.time_s > before_s:
      area += in_flight * (event.time_s - before_s)
      alive_area += len(alive) * (event.time_s - before_s)
      before_s = event.time_s
    if isinstance(event, sch.Arrived):
      in_flight -= 1
      if event.returned.run_id in alive:
        seen.append(len(alive))
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
  wrong = sum(r.tested > r.accepted for r in outcome.rounds)
  took_s = end_s - outcome.emitted_s[0]
  return Counters(
    tokens_per_s=(tokens - 1) / took_s,
    frames_per_token=launched / tokens,
    stale_per_token=(rows - tokens) / tokens,
    tokens_per_cancel=tokens / max(wrong, 1),
    in_flight_fill=area / took_s,
    alive_fill=alive_area / took_s,
    alive_mean=sum(seen) / len(seen),
    alive_max=max(seen),
    tokens_per_round=tokens / len(outcome.rounds),
  )


def priced(world: World, quality: Quality, tokens: int) -> float:
  """Returns the tokens/s of `priced` on a ring with the same drafter."""
  return count(world, sch.priced(), quality, tokens=tokens).tokens_per_s
