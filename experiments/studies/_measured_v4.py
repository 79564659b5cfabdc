# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4-Flash in `leyten/shard`: frames of one position, three rings."""

from collections.abc import Callable, Sequence
from typing import Any

from experiments.studies import _measured_figure as base
from experiments.studies._measured_figure import Figure, Ordering, Result
from experiments.studies._measured_world import Counters, count, frames
from experiments.studies._published_world import World
from wanspec_jax import schedules as sch


def nordic(data: dict[str, Any], tokens: int) -> Result:
  """V4-Flash on six boxes, in-flight limits 2 to 16: counters."""
  ring = data["v4flash-6stage-nordic-depth-sweep"]
  lap_s = 0.44  # 47 tokens in 48 / 1.80 - 6.0 s
  busy = [t * 0.9 * lap_s for t in ring["compute"]["stage_busy_s_per_frame"]]
  total = sum(ring["compute"]["stage_busy_s_per_frame"])
  world = World(
    stage_s=tuple(t / total for t in busy), delay_s=(0.1 * lap_s / 7,) * 7
  )
  acceptance = base.table(ring["speculation"]["acceptance_by_index"])
  inputs = {
    "block 5": "published",
    "acceptance by index": "derived from the sweep's acceptance column",
    "stages' shares of the lap": "published (15-position frames)",
    "lap 0.44 s, a tenth of it wire": "derived from the plain arm",
  }
  limits = (2, 3, 4, 6, 8, 16)
  ours = {
    n: count(world, frames(5, n), acceptance, tokens=tokens) for n in limits
  }
  figures = []
  for n in limits:
    arm = base.arm(ring, f"depth {n}")
    for name, measured, mine, counts in (
      (
        "stale frames of 48 tokens",
        arm["discarded_frames"],
        48 * ours[n].stale_per_token,
        True,
      ),
      (
        "stale share, stale / (stale + accepted)",
        arm["discarded_fraction"],
        _stale_share(ours[n]),
        True,
      ),
      (
        "most frames in flight",
        arm["frames_in_flight_max"],
        ours[n].in_flight_max,
        True,
      ),
      (
        "tokens per cancel",
        arm["tokens_per_cycle"],
        ours[n].tokens_per_cancel,
        False,
      ),
      ("tokens/s", arm["tokens_per_s"], ours[n].tokens_per_s, False),
    ):
      figures.append(
        Figure(
          case="Nordic",
          name=f"limit {n}: {name}",
          measured=measured,
          ours=mine,
          inputs=inputs,
          counts=counts,
        )
      )
  stale = [ours[n].stale_per_token for n in limits]
  orderings = [
    Ordering(
      case="Nordic",
      claim="more frames go stale at every limit up to 6",
      holds=stale[0] < stale[1] < stale[2] < stale[3],
    ),
    Ordering(
      case="Nordic",
      claim="limits 8 and 16 are the same run: block + 1 caps what is alive",
      holds=ours[8] == ours[16],
    ),
    Ordering(
      case="Nordic",
      claim="limit 4 is faster than 2",
      holds=ours[4].tokens_per_s > ours[2].tokens_per_s,
    ),
    Ordering(
      case="Nordic",
      claim="limit 4 is faster than 16",
      holds=ours[4].tokens_per_s > ours[16].tokens_per_s,
    ),
  ]
  return Result(
    figures=figures,
    orderings=orderings,
    best=max(c.tokens_per_s for c in ours.values()),
    priced=base.priced(world, acceptance, tokens),
  )


def _stale_share(counters: Counters) -> float:
  """Returns stale / (stale + accepted drafts), each cancel's own token not
  among the accepted."""
  accepted = 1 - 1 / counters.tokens_per_cancel
  return counters.stale_per_token / (counters.stale_per_token + accepted)


def ten_boxes(data: dict[str, Any], tokens: int) -> Result:
  """V4-Flash on ten boxes and on six: the cap, and what stages beyond it do."""
  ring = data["v4flash-10stage-depth-sweep"]
  acceptance = base.table(ring["speculation"]["acceptance_by_index"])

  def world(stages: int, plain_rate: float) -> World:
    lap_s = 1 / plain_rate
    return World(
      stage_s=(0.7 * lap_s / stages,) * stages,
      delay_s=(0.3 * lap_s / (stages + 1),) * (stages + 1),
    )

  plains = [a for a in ring["arms"] if a["kind"] == "plain"]
  ten = world(10, plains[0]["tokens_per_s"])
  six = world(6, plains[1]["tokens_per_s"])
  inputs = {
    "block 5": "published",
    "acceptance by index": "published (the authors' two-point fit)",
    "laps 0.61 and 0.44 s": "derived from the plain arms",
    "equal stages, 30% of the lap wire": "assumed",
  }
  ours = {
    n: count(ten, frames(5, n), acceptance, tokens=tokens)
    for n in (4, 6, 8, 12)
  }
  wide = ours[12].tokens_per_s
  narrow = count(six, frames(5, 16), acceptance, tokens=tokens).tokens_per_s
  figures = []
  for n, mine in ours.items():
    arm = base.arm(ring, f"10 stages, depth {n}")
    figures += [
      Figure(
        case="ten boxes",
        name=f"limit {n}: {name}",
        measured=measured,
        ours=value,
        inputs=inputs,
        counts=counts,
      )
      for name, measured, value, counts in (
        (
          "stale frames of 64 tokens",
          arm["discarded_frames"],
          64 * mine.stale_per_token,
          True,
        ),
        (
          "most frames in flight",
          arm["frames_in_flight_max"],
          mine.in_flight_max,
          True,
        ),
        (
          "tokens per cancel",
          arm["tokens_per_cycle"],
          mine.tokens_per_cancel,
          True,
        ),
      )
    ]
  for name, measured, value in (
    ("10 boxes, decode only: tokens/s", 4.39, wide),
    ("6 boxes, decode only: tokens/s", 5.35, narrow),
  ):
    figures.append(
      Figure(
        case="ten boxes",
        name=name,
        measured=measured,
        ours=value,
        inputs=inputs,
      )
    )
  orderings = [
    Ordering(
      case="ten boxes",
      claim="limits 6, 8 and 12 are the same run",
      holds=ours[6] == ours[8] == ours[12],
    ),
    Ordering(
      case="ten boxes",
      claim="ten boxes are slower than six",
      holds=wide < narrow,
    ),
    Ordering(
      case="ten boxes",
      claim="limit 6 is faster than 4",
      holds=ours[6].tokens_per_s > ours[4].tokens_per_s,
    ),
  ]
  return Result(
    figures=figures,
    orderings=orderings,
    best=wide,
    priced=base.priced(ten, acceptance, tokens),
  )


_V4_STAGES_S = (0.0095, 0.0082, 0.0093, 0.0087, 0.0081, 0.0060)
_V4_LAP_S = 0.152
_V4_DRAFT_S = 0.02032


def block_sweep(data: dict[str, Any], tokens: int) -> Result:
  """V4-Flash, block 5 to 10, and block 8 with forced refill."""
  ring = data["v4flash-6stage-eu-fill-sweep"]
  wire_s = _V4_LAP_S - sum(_V4_STAGES_S)
  # The drafter is on the tail's device, and its time is paid there.
  world = World(
    stage_s=_V4_STAGES_S,
    delay_s=(wire_s / 7,) * 7,
    draft=sch.DraftCosts(per_call_s=_V4_DRAFT_S),
    drafter_stage=5,
  )
  known = list(ring["speculation"]["acceptance_by_index"])

  def run(block: int, acceptance: Sequence[float], floor: int = 1) -> Counters:
    return count(
      world,
      frames(block, 64, floor=floor),
      base.table(acceptance),
      tokens=tokens,
    )

  acceptance = known
  ours = {(5, 1): run(5, known)}
  for block in (6, 8, 10):
    target = base.arm(ring, f"block {block}, floor 1")["frames_per_token"]
    acceptance = _extend(acceptance, block, target, run)
    ours[block, 1] = run(block, acceptance)
  refilled = _extend(
    known,
    12,
    base.arm(ring, "block 8, floor 8")["frames_per_token"],
    lambda block, full: run(8, full, floor=8),
  )
  ours[8, 8] = run(8, refilled, floor=8)
  inputs = {
    "stage times": "published",
    "lap 0.152 s": "published",
    "drafting 20 ms on the tail": "published (of the Nordic ring, same GPUs)",
    "acceptance of indices 1 to 5": "published",
    "acceptance beyond": "derived from this arm's frames per token",
  }
  figures = []
  for (block, floor), mine in ours.items():
    arm = base.arm(ring, f"block {block}, floor {floor}")
    for name, measured, value, counts in (
      ("tokens/s", arm["tokens_per_s"], mine.tokens_per_s, True),
      (
        "frames in flight, time average",
        arm["frames_in_flight_time_avg"],
        mine.in_flight_fill,
        True,
      ),
      (
        "frames per token",
        arm["frames_per_token"],
        mine.frames_per_token,
        block == 5,
      ),
    ):
      figures.append(
        Figure(
          case="block sweep",
          name=f"block {block}{', forced refill' * (floor > 1)}: {name}",
          measured=measured,
          ours=value,
          inputs=inputs,
          counts=counts,
        )
      )
  rate = {key: mine.tokens_per_s for key, mine in ours.items()}
  orderings = [
    Ordering(
      case="block sweep",
      claim="block 8 is faster than 10",
      holds=rate[8, 1] > rate[10, 1],
    ),
    Ordering(
      case="block sweep",
      claim="forced refill collapses the rate: slower than any block",
      holds=rate[8, 8] < min(r for (_, floor), r in rate.items() if floor == 1),
    ),
    Ordering(
      case="block sweep",
      claim="forced refill fills the pipe more all the same",
      holds=ours[8, 8].in_flight_fill > ours[8, 1].in_flight_fill,
    ),
  ]
  return Result(
    figures=figures,
    orderings=orderings,
    best=max(rate.values()),
    priced=base.priced(world, base.table(acceptance), tokens),
  )


def _extend(
  acceptance: Sequence[float],
  block: int,
  frames_per_token: float,
  run: Callable[[int, Sequence[float]], Counters],
) -> list[float]:
  """Returns the acceptance list filled up to `block` with the one value that
  gives so many frames per token."""
  low, high = 0.0, 1.0
  for _ in range(7):
    middle = (low + high) / 2
    full = [*acceptance, *[middle] * (block - len(acceptance))]
    if run(block, full).frames_per_token > frames_per_token:
      low = middle  # more of them must be right
    else:
      high = middle
  return [*acceptance, *[(low + high) / 2] * (block - len(acceptance))]
