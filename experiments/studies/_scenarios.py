# SPDX-License-Identifier: Apache-2.0
"""Random rings with random faults, by seed, for the chaos study."""

import contextlib
import dataclasses
import math
import random
from collections.abc import Callable
from typing import Any

import drafters
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.base import Drafter
from wanspec_jax.links import Link, Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import (
  Driver,
  Kill,
  Mirror,
  Outcome,
  Stall,
  ToyStage,
  VirtualRing,
  Weather,
  toy_text,
)

VOCAB = 12
SKIP = 33
_NEAR = 1.1
_REPEATS = 8
_JITTERS = 4
SLOTS = 512
_MAX_ROWS = 32
# A state of the toy target, which is what a row's frame carries.
_ROW_BYTES = 8

POLICIES: dict[str, Callable[[random.Random], sch.Policy]] = {
  "priced": lambda r: sch.priced(),
  "lockstep": lambda r: sch.lockstep(r.choice([1, 4, 16])),
  "continuous": lambda r: sch.continuous(
    nodes=r.choice([1, 2, 4]),
    width=r.choice([1, 2]),
    max_in_flight=r.choice([2, 8]),
    threshold=r.choice([0.0, 0.3]),
    recovery=r.choice([0.0, 0.1]),
  ),
  "hedged": lambda r: sch.hedged(
    depth=r.choice([2, 4]),
    fan_out=r.choice([1, 2]),
    launch_hedges=r.choice([0, 2]),
  ),
  "branched": lambda r: sch.branched(
    depth=r.choice([2, 5]), decay=r.choice([None, 0.7])
  ),
  "in_pipe": lambda r: sch.in_pipe(
    width=r.choice([1, 3, 8]), in_flight=r.choice([None, 4])
  ),
  "segments": lambda r: sch.segments(
    segment=r.choice([2, 8]), initial=r.choice([8, 24]), expand=12
  ),
  "rate_matched": lambda r: sch.rate_matched(
    nodes=r.choice([4, 16]), depth=r.choice([2, 5])
  ),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Scenario:
  """One ring, its faults, and what is asked of it.

  Attributes:
    seed: of everything.
    policy: name of the policy.
    has_floor: whether a floor is put under it.
    delays_s: one-way delay of each hop.
    bandwidth_bps: of every hop.
    jitter_s: of every hop.
    stage_s: time of each stage for up to 8 rows; proportional beyond.
    level_s: drafting time per level.
    quality: probability that a node's likeliest child is right.
    temperature: 0 or 0.8.
    prompts: lengths, one per sequence.
    tokens: budget of each.
    weather: see there.
    lost_at_s: when the coordinator is lost; None for never.
    jitter_seed: draws the jitter anew.
  """

  seed: int
  policy: str
  has_floor: bool
  delays_s: tuple[float, ...]
  bandwidth_bps: float
  jitter_s: float
  stage_s: tuple[float, ...]
  level_s: float
  quality: float
  temperature: float
  prompts: tuple[int, ...]
  tokens: int
  weather: Weather
  lost_at_s: float | None
  jitter_seed: int = 0

  @property
  def has_foul_weather(self) -> bool:
    """Whether any weather takes time; frames that come twice take none."""
    return bool(self.weather.loss or self.weather.stalls or self.weather.kills)

  @property
  def is_timed(self) -> bool:
    """Whether its time is held against plain decoding's."""
    return (
      not self.weather.kills
      and self.lost_at_s is None
      and (self.has_floor or self.policy == "priced")
    )


def scenario(seed: int) -> Scenario:
  """Returns the scenario of a seed."""
  r = random.Random(seed)
  stages = r.choice([1, 2, 3, 4, 6])
  lap_s = 10 ** r.uniform(-2, -0.1)
  shares = [r.uniform(0.3, 1.7) for _ in range(stages + 1)]
  delays = tuple(lap_s * s / sum(shares) for s in shares)
  stage_s = tuple(10 ** r.uniform(-3.3, -1.8) for _ in range(stages))
  hop = r.randrange(stages + 1)
  start_s = r.uniform(0.2, 20) * lap_s
  stalls = [Stall(hop, start_s, start_s + r.uniform(0.5, 3.0))]
  kills = [
    Kill(r.randrange(stages), r.uniform(0.5, 40) * lap_s, r.uniform(0.1, 2))
  ]
  policy = r.choice([*POLICIES, "priced", "priced"])
  return Scenario(
    seed=seed,
    policy=policy,
    has_floor=policy != "priced" and r.random() < 0.6,
    delays_s=delays,
    bandwidth_bps=10 ** r.uniform(5, 9),
    jitter_s=r.choice([0.0, 0.0, 0.05, 0.3]) * lap_s / (stages + 1),
    stage_s=stage_s,
    level_s=r.choice([0.0, 0.0, 0.002, 0.01]),
    quality=r.choice([0.0, 0.2, 0.5, 0.7, 0.9, 1.0]),
    temperature=r.choice([0.0, 0.8]),
    prompts=tuple(r.randint(1, 20) for _ in range(r.choice([1, 1, 1, 2, 3]))),
    tokens=r.choice([64, 96, 160]),
    weather=Weather(
      seed=seed,
      loss=r.choice([0.0, 0.0, 0.01, 0.05]),
      retransmit_s=r.uniform(0.05, 0.4),
      duplicates=r.choice([0.0, 0.1]),
      stalls=tuple(stalls) if r.random() < 0.3 else (),
      kills=tuple(kills) if r.random() < 0.25 else (),
    ),
    lost_at_s=r.uniform(2, 30) * lap_s if r.random() < 0.1 else None,
  )


def texts_of(case: Scenario) -> list[tuple[tuple[int, ...], list[int]]]:
  """Returns, per sequence, its prompt and the plain text, some beyond the
  budget for what a drafter may look ahead."""
  r = random.Random(case.seed + 1)
  texts = []
  for i, length in enumerate(case.prompts):
    prompt = tuple(r.randrange(VOCAB) for _ in range(length))
    text = toy_text(
      prompt,
      Sampling(temperature=case.temperature, seed=case.seed * 8 + i),
      case.tokens + 40,
      num_stages=len(case.stage_s),
      vocab=VOCAB,
    )
    texts.append((prompt, text))
  return texts


def drafter_of(case: Scenario, texts: Any) -> Drafter:
  """Returns the drafter of all sequences, as good as the scenario says."""
  first = min(case.quality, 0.97)
  rest = (1 - first) * 0.5 if case.quality else 0.0
  marginals = [max(first, 1e-3), max(rest, 1e-4)]
  return drafters.by_request(
    {
      case.seed * 8 + i: drafters.synthetic(
        text, acceptance=marginals, vocab_size=VOCAB, seed=case.seed
      )
      for i, (_, text) in enumerate(texts)
    }
  )


def hops_of(case: Scenario) -> list[wire.LinkShaper]:
  """Returns the emulated links."""
  return [
    wire.LinkShaper(
      delay_s=delay,
      bandwidth_bps=case.bandwidth_bps,
      jitter_s=case.jitter_s,
      seed=(case.seed + 10_000 * case.jitter_seed) * 16 + i,
    )
    for i, delay in enumerate(case.delays_s)
  ]


def requests_of(case: Scenario, texts: Any) -> list[sch.Request]:
  """Returns one request per sequence."""
  return [
    sch.Request(
      prompt=prompt,
      max_new_tokens=case.tokens,
      sampling=Sampling(temperature=case.temperature, seed=case.seed * 8 + i),
    )
    for i, (prompt, _) in enumerate(texts)
  ]


def policy_of(case: Scenario) -> sch.Policy:
  """Returns the policy of a scenario, with its floor if it has one."""
  policy = POLICIES[case.policy](random.Random(case.seed + 2))
  return sch.with_floor(policy) if case.has_floor else policy


def world_of(case: Scenario) -> tuple[VirtualRing, sch.Costs]:
  """Returns the virtual ring and what it costs."""
  num = len(case.stage_s)
  buckets = (8, 16, 32)
  profile = StageProfile(
    buckets=buckets,
    seconds=tuple(tuple(t * b / 8 for b in buckets) for t in case.stage_s),
    dtype="toy",
    device="modelled",
  )
  draft = sch.DraftCosts(per_level_s=case.level_s)
  ring = VirtualRing(
    stages=[
      ToyStage(
        capacity=SLOTS, is_first=i == 0, is_last=i == num - 1, vocab=VOCAB
      )
      for i in range(num)
    ],
    hops=hops_of(case),
    profile=profile,
    draft=draft,
    weather=case.weather,
    trace=False,
  )
  costs = sch.Costs.of_ring(
    Ring.from_links(
      [
        Link(
          rtt_s=2 * delay,
          bandwidth_bps=case.bandwidth_bps,
          jitter_s=case.jitter_s,
        )
        for delay in case.delays_s
      ]
    ),
    profile,
    hop_bytes_model(
      num_stages=num,
      ids_bytes_per_node=4,
      row_bytes=_ROW_BYTES,
      header_bytes=12,
      verdict_bytes=6,
    ),
    max_rows=_MAX_ROWS,
    draft=draft,
  )
  return ring, costs


def _driver_of(
  case: Scenario,
  texts: Any,
  policy: sch.Policy,
  costs: sch.Costs,
  on_emit: Callable[[int, tuple[int, ...]], None],
) -> Driver:
  return Driver(
    sch.init(policy, costs, capacity=SLOTS, prefill_rows=16),
    drafter_of(case, texts),
    on_emit=on_emit,
  )


def _decode(
  case: Scenario, texts: Any, policy: sch.Policy
) -> tuple[list[Outcome], int]:
  """Returns the outcomes and how many requests never came to an end.

  If the coordinator is lost, what there was by then and what a second one made
  of the client's mirror are one outcome.
  """
  ring, costs = world_of(case)
  mirror = Mirror(requests_of(case, texts))
  outcomes: list[Outcome] = []
  for until_s in (case.lost_at_s or math.inf, math.inf):
    driver = _driver_of(case, texts, policy, costs, mirror.on_emit)
    result = ring.run(
      driver, [(0.0, request) for request in mirror.requests()], until_s=until_s
    )
    outcomes = [result.outcomes[i] for i in sorted(result.outcomes)]
    if until_s == math.inf or all(outcome.reason for outcome in outcomes):
      break
  for i, outcome in enumerate(outcomes):
    outcome.tokens = list(mirror.tokens(i))
  done = [outcome for outcome in outcomes if outcome.reason]
  return done, len(texts) - len(done)


class _FoundError(Exception):
  """What was looked for is there: the rest of the run is not needed."""


def _start_s(case: Scenario, texts: Any, policy: sch.Policy) -> float:
  """Returns when the first of the sequences has 33 tokens in fair weather."""
  ring, costs = world_of(dataclasses.replace(case, weather=Weather()))
  mirror = Mirror(requests_of(case, texts))

  def on_emit(sequence: int, tokens: tuple[int, ...]) -> None:
    mirror.on_emit(sequence, tokens)
    if len(mirror.tokens(sequence)) >= SKIP:
      raise _FoundError

  driver = _driver_of(case, texts, policy, costs, on_emit)
  with contextlib.suppress(_FoundError):
    ring.run(driver, [(0.0, request) for request in mirror.requests()])
  return min(
    outcome.emitted_s[SKIP - 1]
    for outcome in driver.outcomes.values()
    if len(outcome.emitted_s) >= SKIP
  )


def play(seed: int) -> dict[str, Any]:
  """Returns what became of a scenario.

  Where its time counts, `speedup` is plain decoding's time over the policy's,
  from the verdict that brings each sequence's 33rd token to that of its last,
  summed over sequences; if that is no time at all, there is none. Both meet the
  same fault schedule from there on: the weather of either begins when the first
  of its sequences has 33 tokens. Chance decides single runs, so if the two are
  near each other where losses, stalls or jitter are drawn, `_REPEATS` schedules
  are drawn (`_JITTERS` if there is only jitter) and their times added.
  """
  case = scenario(seed)
  texts = texts_of(case)
  outcomes, hung = _decode(case, texts, policy_of(case))
  report: dict[str, Any] = {
    "seed": seed,
    "policy": policy_of(case).name,
    "quality": case.quality,
    "hung": hung,
    "diverged": _diverged(case, texts, outcomes),
  }
  if case.is_timed and not hung:
    spent_s, plain_s, count = 0.0, 0.0, 0
    num_repeats = 1
    while count < num_repeats:
      one = dataclasses.replace(
        case,
        weather=dataclasses.replace(case.weather, seed=seed + 10_000 * count),
        jitter_seed=count,
      )
      spent_s += _timed_s(one, texts, policy_of(case), report)
      plain_s += _timed_s(one, texts, sch.lockstep(0), report)
      count += 1
      if spent_s and plain_s / spent_s < _NEAR:
        if case.has_foul_weather:
          num_repeats = _REPEATS
        elif case.jitter_s:
          num_repeats = _JITTERS
    if spent_s:
      report["speedup"] = plain_s / spent_s
  return report


def _diverged(case: Scenario, texts: Any, outcomes: list[Outcome]) -> int:
  return sum(
    outcome.tokens != text[: case.tokens] or outcome.reason != "length"
    for outcome, (_, text) in zip(outcomes, texts, strict=False)
  )


def _timed_s(
  case: Scenario, texts: Any, policy: sch.Policy, report: dict[str, Any]
) -> float:
  """Returns the time from the 33rd token on, all sequences together, under
  weather that begins there."""
  if case.has_foul_weather:
    start_s = _start_s(case, texts, policy)
    case = dataclasses.replace(
      case, weather=dataclasses.replace(case.weather, start_s=start_s)
    )
  outcomes, hung = _decode(case, texts, policy)
  report["hung"] += hung
  report["diverged"] += _diverged(case, texts, outcomes)
  return sum(o.emitted_s[-1] - o.emitted_s[SKIP - 1] for o in outcomes)
