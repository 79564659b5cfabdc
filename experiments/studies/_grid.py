# SPDX-License-Identifier: Apache-2.0
"""Points of a modelled WAN, and policies at all parameters worth trying.

Everything here is assumed, nothing published: a 64-layer-like model of which a
decode step takes 64 ms in all, cut into equal stages that are memory-bound up
to 32 rows and linear beyond; rows of 8192 bytes (4096 bfloat16 numbers); a
drafter that is right as often as its quality says, more often at some positions
than at others, and slightly less with each level ahead.
"""

import contextlib
import dataclasses
import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import drafters
import trees
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import (
  Driver,
  PassStage,
  Recording,
  ReplayStage,
  SessionResult,
  VirtualRing,
)

ROW_BYTES = 8192
STEP_S = 0.064
KNEE_ROWS = 32
MAX_ROWS = 64
_BUCKETS = (1, 2, 4, 8, 16, 32, 48, 64)
_PROMPT = 8
_VOCAB = 1000
_SLOTS = 2048


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
  """One ring with one drafter.

  Attributes:
    lap_s: sum of the one-way delays.
    mbps: bandwidth of every hop.
    stages: their number.
    level_s: drafting time per level.
    quality: mean probability that a node's likeliest child is right.
  """

  lap_s: float
  mbps: float
  stages: int
  level_s: float
  quality: float

  def name(self) -> str:
    return (
      f"lap {self.lap_s * 1e3:g} ms, {self.mbps:g} Mbps, {self.stages} stages, "
      f"{self.level_s * 1e3:g} ms/level, quality {self.quality:g}"
    )


LAPS_S = (0.02, 0.2, 0.8)
MBPS = (1.0, 30.0, 1000.0)
STAGES = (2, 8, 32)
LEVELS_S = (0.0, 0.01)
QUALITIES = (0.3, 0.6, 0.9)


def points(quick: bool) -> list[Point]:
  """Returns the grid; with `quick` twelve of its points: each pair of a lap and
  a bandwidth, each value of the other axes, and three corners, among them the
  one where most nodes are in flight."""
  if quick:
    chosen = [
      (
        LAPS_S[i],
        MBPS[j],
        STAGES[(i + j) % 3],
        LEVELS_S[(i + j) % 2],
        QUALITIES[(i + 2 * j) % 3],
      )
      for i, j in itertools.product(range(3), repeat=2)
    ]
    chosen += [
      (0.8, 1000.0, 8, 0.0, 0.9),
      (0.02, 1000.0, 8, 0.01, 0.9),
      (0.02, 1.0, 2, 0.0, 0.9),
    ]
    # The dear ones first, or a worker is left alone with the last of them.
    chosen.sort(key=lambda point: -point[0] * point[1] * point[4])
  else:
    axes = (LAPS_S, MBPS, STAGES, LEVELS_S, QUALITIES)
    chosen = list(itertools.product(*axes))
    # In no order, so that the first results tell of all axes.
    random.Random(0).shuffle(chosen)
  return [
    Point(lap_s=a, mbps=b, stages=c, level_s=d, quality=e)
    for a, b, c, d, e in chosen
  ]


def acceptance(
  quality: float, seed: int
) -> Callable[[int, int], tuple[float, ...]]:
  """Returns marginals by rank for `drafters.synthetic`: they vary with content,
  depth and rank."""
  draw = random.Random(seed)
  swings = [draw.uniform(-0.25, 0.25) for _ in range(4096)]

  def marginals(position: int, depth: int) -> tuple[float, ...]:
    first = (quality + swings[position % len(swings)]) * 0.985 ** (depth - 1)
    first = min(max(first, 0.02), 0.97)
    return (first, 0.4 * (1 - first), 0.15 * (1 - first))

  return marginals


def costs_of(point: Point) -> tuple[StageProfile, sch.Costs]:
  """Returns the ring's stage times and costs."""
  stage_s = STEP_S / point.stages
  profile = StageProfile(
    buckets=_BUCKETS,
    seconds=tuple(
      tuple(stage_s * max(1.0, rows / KNEE_ROWS) for rows in _BUCKETS)
      for _ in range(point.stages)
    ),
    dtype="bfloat16",
    device="modelled",
  )
  ring = Ring.uniform(
    num_stages=point.stages,
    lap_s=point.lap_s,
    bandwidth_bps=point.mbps * 1e6,
  )
  hop_bytes = hop_bytes_model(
    num_stages=point.stages,
    ids_bytes_per_node=4,
    row_bytes=ROW_BYTES,
    header_bytes=12,
    verdict_bytes=6,
  )
  return profile, sch.Costs.of_ring(
    ring,
    profile,
    hop_bytes,
    max_rows=MAX_ROWS,
    draft=sch.DraftCosts(per_level_s=point.level_s),
  )


class _TooSlow(Exception):
  """A text cannot be as fast any more as it has to be."""


def rate(
  point: Point,
  policy: sch.Policy,
  *,
  tokens: int,
  skip: int = 33,
  seed: int = 0,
  least: float = 0.0,
) -> float:
  """Returns virtual tokens per second from token `skip` on; see `session`.

  What turns out to be slower than `least` is given up: as soon as that is
  certain, or when it has half of the tokens and 0.7 of the pace. Its rate is
  then that of the part which was played, and less than `least`.
  """
  emitted_s: list[float] = []

  def note(times_s: list[float]) -> None:
    emitted_s[:] = times_s
    done = len(times_s) - 1 - skip
    if done <= 0 or not least:
      return
    spent_s = times_s[-1] - times_s[skip]
    due_s = (tokens - 1 - skip) / least
    is_hopeless = 2 * done >= tokens and done < 0.7 * least * spent_s
    if spent_s > due_s or is_hopeless:
      raise _TooSlow

  with contextlib.suppress(_TooSlow):
    session(point, policy, tokens=tokens, seed=seed, on_emit=note)
  return (len(emitted_s) - 1 - skip) / (emitted_s[-1] - emitted_s[skip])


def session(
  point: Point,
  policy: sch.Policy,
  *,
  tokens: int,
  seed: int = 0,
  trace: bool = False,
  recording: Recording | None = None,
  on_emit: Callable[[list[float]], None] | None = None,
) -> SessionResult:
  """Returns what one text of so many tokens leaves behind.

  All policies meet the same text and the same drafts. `on_emit` is told the
  times of all tokens so far, at each verdict that brings some.

  Raises:
    RuntimeError: if the text is not the target's.
  """
  draw = random.Random(seed + 1)
  # What a tail may draw beyond the end of the text, tree depth included.
  text = [draw.randrange(_VOCAB) for _ in range(_PROMPT + tokens + 160)]
  drafter = drafters.synthetic(
    text[_PROMPT:],
    acceptance=acceptance(point.quality, seed),
    vocab_size=_VOCAB,
    seed=seed,
  )
  profile, costs = costs_of(point)
  # Only the last stage needs books: it draws.
  stages: list[Any] = [PassStage(ROW_BYTES) for _ in range(point.stages - 1)]
  stages.append(ReplayStage(capacity=_SLOTS, texts={0: text}))
  hop = wire.LinkShaper(
    delay_s=point.lap_s / (point.stages + 1), bandwidth_bps=point.mbps * 1e6
  )
  world = VirtualRing(
    stages=stages,
    hops=[hop] * (point.stages + 1),
    profile=profile,
    draft=costs.draft,
    trace=trace,
  )
  engine = sch.init(policy, costs, capacity=_SLOTS, prefill_rows=MAX_ROWS)
  request = sch.Request(
    prompt=tuple(text[:_PROMPT]), max_new_tokens=tokens, sampling=Sampling()
  )

  def emitted(sequence: int, tokens: tuple[int, ...]) -> None:
    del tokens
    if on_emit is not None:
      on_emit(driver.outcomes[sequence].emitted_s)

  driver = Driver(engine, drafter, on_emit=emitted, recording=recording)
  result = world.run(driver, [(0.0, request)])
  if result.outcomes[0].tokens != text[_PROMPT : _PROMPT + tokens]:
    raise RuntimeError(f"{policy.name} on {point.name()}: the text differs")
  return result


def _sized(gains: Any, lap_s: Callable[[int], float]) -> int:
  return trees.best_prefix(gains, lap_s).num_nodes


def lockstep_policies(point: Point) -> list[tuple[str, sch.Policy]]:
  """Returns lockstep at every size (and depth, where levels cost time)."""
  out = [("0", sch.lockstep(0))]
  depths: Sequence[int | None] = (1, 2, 4, 8) if point.level_s else (None,)
  for depth in depths:
    suffix = "" if depth is None else f"/{depth}"
    out.append(
      (
        f"sized{suffix}",
        sch.lockstep(_sized, max_nodes=MAX_ROWS - 1, levels=depth),
      )
    )
    for size in (1, 2, 4, 8, 16, 32, 63):
      if depth is None or depth <= size:
        out.append((f"{size}{suffix}", sch.lockstep(size, levels=depth)))
  return out
