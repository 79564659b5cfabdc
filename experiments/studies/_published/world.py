# SPDX-License-Identifier: Apache-2.0
"""A published set-up as a virtual ring, and how fast a policy decodes on it."""

import dataclasses
import random
from typing import Any

import drafters
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing

_VOCAB = 64
_MAX_ROWS = 64
_TINY = 1e-9


@dataclasses.dataclass(frozen=True, kw_only=True)
class World:
  """Where a published system ran, as far as its time is concerned.

  Attributes:
    stage_s: time of each target stage for a run of one row.
    row_s: what each further row adds to that, per stage.
    delay_s: one-way delay of each of the P + 1 hops; nothing by default.
    draft: what the drafter's answers cost.
    drafter_stage: stage whose device the drafter shares; None for its own.
  """

  stage_s: tuple[float, ...]
  row_s: float = 0.0
  delay_s: tuple[float, ...] = ()
  draft: sch.DraftCosts = dataclasses.field(default_factory=sch.DraftCosts)
  drafter_stage: int | None = None

  @property
  def delays_s(self) -> tuple[float, ...]:
    """One-way delays of all hops."""
    return self.delay_s or (0.0,) * (len(self.stage_s) + 1)

  @property
  def lap_s(self) -> float:
    """Time of a lap of one row with nothing else in flight."""
    return sum(self.stage_s) + sum(self.delays_s)

  def profile(self) -> StageProfile:
    """Returns the stages' times by number of rows."""
    buckets = tuple(range(1, _MAX_ROWS + 1)) if self.row_s else (_MAX_ROWS,)
    extra = [self.row_s * (rows - 1) * bool(self.row_s) for rows in buckets]
    return StageProfile(
      buckets=buckets,
      seconds=tuple(tuple(t + x for x in extra) for t in self.stage_s),
      dtype="none",
      device="published times",
    )

  def costs(self) -> sch.Costs:
    """Returns what the ring costs, as a policy sees it."""
    profile = self.profile()
    known: dict[int, tuple[float, ...]] = {}

    def busy_s(rows: int) -> tuple[float, ...]:
      if rows not in known:
        stages = profile.stage_s(rows).tolist()
        known[rows] = (0.0, *(x for t in stages for x in (t, 0.0)))
      return known[rows]

    return sch.Costs(
      delay_s=self.delays_s,
      busy_s=busy_s,
      max_rows=_MAX_ROWS,
      draft=self.draft,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speed:
  """What a simulation yields.

  Attributes:
    token_s: seconds per token of one sequence.
    tokens_per_s: of all sequences together.
    tokens_per_verdict: emitted tokens per verdict.
    acceptance: accepted share of the drafted tokens that were tested.
  """

  token_s: float
  tokens_per_s: float
  tokens_per_verdict: float
  acceptance: float


def fixed(num_nodes: int) -> sch.Policy:
  """Returns lockstep with a chain of so many nodes per lap; 0 is plain."""
  return sch.lockstep(num_nodes, levels=num_nodes)


def in_shares(acceptance: float, length: int, seed: int):
  """Returns marginals for `drafters.synthetic` under which a chain is right at
  ⌊α T + ½⌋ of T positions, at random.

  Runs of hits are as long as independent draws make them, up to terms in 1 / T,
  but their number does not scatter: short texts give steady rates.
  """
  count = int(acceptance * length + 0.5)
  right = [True] * count + [False] * (length - count)
  random.Random(seed).shuffle(right)
  hit, miss = (1 - _TINY,), (_TINY,)
  return lambda position, depth: hit if right[position % length] else miss


def simulate(
  world: World,
  policy: sch.Policy,
  acceptance: Any,
  *,
  tokens: int,
  seed: int = 0,
  sequences: int = 1,
) -> Speed:
  """Decodes on the virtual ring, with a drafter of the given acceptance.

  Args:
    world: where.
    policy: how.
    acceptance: a number, met as exactly as `in_shares` says, or marginals as
      `drafters.synthetic` takes them.
    tokens: length of each text.
    seed: of texts and acceptance.
    sequences: texts decoded at once, all submitted at the start.
  """
  texts = {
    s: tuple(
      random.Random(seed * 1009 + s).choices(range(_VOCAB), k=tokens + 9)
    )
    for s in range(sequences)
  }
  capacity = sequences * (tokens + 1 + 16 * _MAX_ROWS)
  stages: list[Any] = [
    ReplayStage(capacity=capacity, row_bytes=0) for _ in world.stage_s[:-1]
  ]
  stages.append(ReplayStage(capacity=capacity, texts=texts))
  ring = VirtualRing(
    stages=stages,
    hops=[wire.LinkShaper(delay_s=d) for d in world.delays_s],
    profile=world.profile(),
    draft=world.draft,
    drafter_stage=world.drafter_stage,
    trace=False,
  )

  def make(s: int):
    key = seed * 1009 + s
    marginals = acceptance
    if isinstance(acceptance, float):
      marginals = in_shares(acceptance, tokens, key)
    return drafters.synthetic(
      texts[s][1:], acceptance=marginals, vocab_size=_VOCAB, seed=key
    )

  engine = sch.init(policy, world.costs(), capacity=capacity, prefill_rows=1)
  drafter = drafters.by_request({s: make(s) for s in range(sequences)})
  driver = Driver(engine, drafter)
  requests = [
    (
      0.0,
      sch.Request(
        prompt=texts[s][:1], max_new_tokens=tokens, sampling=Sampling(seed=s)
      ),
    )
    for s in range(sequences)
  ]
  result = ring.run(driver, requests)
  for s in range(sequences):
    if tuple(result.outcomes[s].tokens) != texts[s][1 : tokens + 1]:
      raise RuntimeError(f"{policy.name}: text {s} is not that of the target")
  outcomes = list(result.outcomes.values())
  end_s = max(o.finished_s for o in outcomes)
  rounds = [r for o in outcomes for r in o.rounds]
  tested = sum(r.tested for r in rounds)
  return Speed(
    token_s=sum(o.total_s for o in outcomes) / (tokens * sequences),
    tokens_per_s=tokens * sequences / end_s,
    tokens_per_verdict=tokens * sequences / len(rounds),
    acceptance=sum(r.accepted for r in rounds) / tested if tested else 0.0,
  )


# Closed forms of lockstep. ---------------------------------------------------


def tokens_per_round(acceptance: float, drafted: int) -> float:
  """Returns Ω(γ, α) = (1 − α^{γ+1}) / (1 − α), the target's token included."""
  return sum(acceptance**i for i in range(drafted + 1))


def acceptance_for(tokens: float, drafted: int) -> float:
  """Returns the α with Ω(γ, α) = tokens.

  Raises:
    ValueError: no α in [0, 1] yields that many.
  """
  if not 1.0 <= tokens <= drafted + 1:
    raise ValueError(
      f"tokens = {tokens}: a chain of {drafted} yields 1 to {drafted + 1}"
    )
  low, high = 0.0, 1.0
  for _ in range(80):
    middle = (low + high) / 2
    if tokens_per_round(middle, drafted) < tokens:
      low = middle
    else:
      high = middle
  return (low + high) / 2
