# SPDX-License-Identifier: Apache-2.0
"""DeepSeek-V4-Flash in `leyten/shard`: frames of one position, three rings."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from experiments.studies._measured import figures as base
from experiments.studies._measured.figures import Figure, Gain, Result
from experiments.studies._measured.policies import frames
from experiments.studies._measured.world import (
  Counters,
  MeasuredWorld,
  Quality,
  count,
  priced,
)
from experiments.studies._published.world import fixed
from wanspec_jax import schedules as sch

_HOP_S = 0.004  # of the authors' fit, on its lower bound


def _row_share(ring: dict[str, Any], path: str) -> float:
  """Returns what a further position costs a stage, in one-position frames."""
  cost = ring["compute"]["multi_position_frame_cost"]
  return (cost[f"6_positions_{path}_path"] - 1) / 5


def nordic(data: dict[str, Any], tokens: int) -> Result:
  """V4-Flash on six boxes, in-flight limits 2 to 16."""
  ring = data["v4flash-6stage-nordic-depth-sweep"]
  compute = ring["compute"]
  first_s = (5.6 + 7.3) / 2  # to the first token, as stated
  measured_plain = base.arm(ring, "greedy")["tokens_per_s"]
  lap_s = (48 / measured_plain - first_s) / 47
  shares = list(compute["stage_busy_s_per_frame"])
  shares[-1] -= compute["tail_draft_s"]
  busy_s = lap_s - 7 * _HOP_S

  def world(path: str) -> MeasuredWorld:
    return MeasuredWorld(
      stage_s=tuple(busy_s * t / sum(shares) for t in shares),
      delay_s=(_HOP_S,) * 7,
      draft=sch.DraftCosts(per_call_s=compute["tail_draft_s"]),
      drafter_stage=5,
      row_share=_row_share(ring, path),
    )

  def whole_rate(decoding: float) -> float:
    """48 tokens, the wait for the first among them."""
    return 48 / (first_s + 47 / decoding)

  where = world("loop")
  quality = Quality.block(ring["speculation"]["acceptance_by_index"])
  inputs = {
    "block 5": "published",
    "acceptance by index": "derived from the accepted and cancelled drafts of "
    "all limits",
    "lap 0.43 s": "derived from the plain arm",
    "stages' shares of the lap": "published (15-position frames)",
    "wire 4 ms a hop": "published (the authors' fit, on its lower bound)",
    "drafting 20 ms on the tail": "published; once per block is assumed",
    "a further position costs a stage 0.98 frames": "published (an earlier "
    "ring; by the chunk path 0.59)",
    "rates hold 6.45 s to the first token": "published 5.6 to 7.3 s; that they "
    "hold it is assumed",
  }
  limits = (2, 3, 4, 6, 8, 16)
  ours = {n: count(where, frames(5, n), quality, tokens=tokens) for n in limits}
  observables: tuple[tuple[str, str, Callable[[Counters], float], bool], ...]
  observables = (
    (
      "stale frames of 48 tokens",
      "discarded_frames",
      lambda c: 48 * c.stale_per_token,
      True,
    ),
    (
      "frames in flight, mean over verdicts",
      "frames_in_flight_mean",
      lambda c: c.alive_mean,
      True,
    ),
    (
      "most frames in flight",
      "frames_in_flight_max",
      lambda c: c.alive_max,
      True,
    ),
    (
      "tokens per cycle",
      "tokens_per_cycle",
      lambda c: c.tokens_per_cancel,
      False,
    ),
    (
      "tokens/s, first token included",
      "tokens_per_s",
      lambda c: whole_rate(c.tokens_per_s),
      True,
    ),
  )
  noise = _spread(ring, "depth 8", "depth 16")
  figures, orderings = [], []
  for name, key, of, counts in observables:
    both = {
      f"limit {n}": (base.arm(ring, f"depth {n}")[key], of(ours[n]))
      for n in limits
    }
    figures += _figures("Nordic", name, both, inputs, counts)
    if key == "tokens_per_s":
      chunk = count(where, fixed(5), quality, tokens=tokens).tokens_per_s
      chunk_arm = base.arm(ring, "one 6-position chunk per round")
      extra = {
        "a 6-position chunk per round": (
          chunk_arm["tokens_per_s"],
          whole_rate(chunk),
        )
      }
      figures += _figures("Nordic", name, extra, inputs)
      alone = count(where, sch.lockstep(0), quality, tokens=48).tokens_per_s
      both |= extra | {"plain": (measured_plain, whole_rate(alone))}
    orderings.append(base.ordered("Nordic", name, both, noise))
  orderings.append(
    base.identical(
      "Nordic",
      "all counters",
      {f"limit {n}": ours[n] for n in (8, 16)},
    )
  )
  best = max(c.tokens_per_s for c in ours.values())
  return Result(
    figures=figures,
    orderings=orderings,
    gains=[
      Gain(
        case="Nordic",
        where="decoding",
        best=best,
        priced=priced(where, quality, tokens),
      )
    ],
  )


def _spread(ring: dict[str, Any], slow: str, fast: str) -> float:
  """Returns by how much two runs with identical counters differ: the noise."""
  rates = [base.arm(ring, label)["tokens_per_s"] for label in (slow, fast)]
  return rates[1] / rates[0] - 1


def _figures(
  case: str,
  what: str,
  arms: dict[str, tuple[float, float]],
  inputs: dict[str, str],
  counts: bool = True,
) -> list[Figure]:
  """Returns the figures of a sweep's arms: `(measured, ours)` each."""
  return [
    Figure(
      case=case,
      name=f"{name}: {what}",
      measured=measured,
      ours=ours,
      inputs=inputs,
      counts=counts,
    )
    for name, (measured, ours) in arms.items()
  ]


def ten_boxes(data: dict[str, Any], tokens: int) -> Result:
  """V4-Flash on ten boxes and on six: the cap, and what stages beyond it do."""
  ring = data["v4flash-10stage-depth-sweep"]
  day = data["v4flash-6stage-nordic-depth-sweep"]
  quality = Quality.block(ring["speculation"]["acceptance_by_index"])
  laps = {
    stages: 1 / arm["tokens_per_s"]
    for stages, arm in zip(
      (10, 6), [a for a in ring["arms"] if a["kind"] == "plain"], strict=True
    )
  }
  # Four boxes more made the lap so much longer: "pure added hop latency".
  stated_hop_s = (laps[10] - laps[6]) / 4

  def world(stages: int, hop_s: float) -> MeasuredWorld:
    busy_s = laps[stages] - (stages + 1) * hop_s
    return MeasuredWorld(
      stage_s=(busy_s / stages,) * stages,
      delay_s=(hop_s,) * (stages + 1),
      draft=sch.DraftCosts(per_call_s=day["compute"]["tail_draft_s"]),
      drafter_stage=stages - 1,
      row_share=_row_share(day, "loop"),
    )

  inputs = {
    "block 5": "published",
    "acceptance by index": "published (the authors' two-point fit)",
    "laps 0.61 and 0.44 s": "derived from the plain arms",
    "43 ms a hop": "derived from the two laps: the authors ascribe their "
    "difference to hops alone",
    "equal stages": "assumed",
    "drafting 20 ms on the tail": "published (the Nordic ring, same day)",
  }
  ten = world(10, stated_hop_s)
  limits = (4, 6, 8, 12)
  ours = {n: count(ten, frames(5, n), quality, tokens=tokens) for n in limits}
  labels = {n: f"10 stages, depth {n}" for n in limits}
  figures, orderings = [], []
  noise = _spread(ring, labels[6], labels[12])
  for name, key, of in (
    (
      "stale frames of 64 tokens",
      "discarded_frames",
      lambda c: 64 * c.stale_per_token,
    ),
    ("most frames in flight", "frames_in_flight_max", lambda c: c.alive_max),
    ("tokens per cycle", "tokens_per_cycle", lambda c: c.tokens_per_cancel),
    ("tokens/s", "tokens_per_s", lambda c: c.tokens_per_s),
  ):
    both = {
      f"limit {n}": (base.arm(ring, labels[n])[key], of(ours[n]))
      for n in limits
    }
    if key != "tokens_per_s":  # first token included, whose time is not stated
      figures += _figures("ten boxes", name, both, inputs)
    orderings.append(base.ordered("ten boxes", name, both, noise))
  orderings.append(
    base.identical(
      "ten boxes",
      "all counters",
      {f"limit {n}": ours[n] for n in (6, 8, 12)},
    )
  )

  def decode_only(hop_s: float) -> dict[str, tuple[float, float]]:
    out = {}
    for stages in (10, 6):
      where = world(stages, hop_s)
      for kind, policy in (
        ("plain", sch.lockstep(0)),
        ("block 5", frames(5, 16)),
      ):
        measured = next(
          a["tokens_per_s"]
          for a in ring["arms"]
          if a["label"] == f"{stages} stages, decode only"
          and (a["kind"] == "plain") == (kind == "plain")
        )
        mine = count(where, policy, quality, tokens=tokens).tokens_per_s
        out[f"{stages} boxes, {kind}"] = (measured, mine)
    return out

  rates = decode_only(stated_hop_s)
  name = "tokens/s, decoding"
  orderings.append(
    base.ordered(
      "ten boxes",
      name,
      rates,
      lambda less, more: (
        rates[more][0] > (1 + noise) * rates[less][0]
        and not (less.endswith("plain") and more.endswith("plain"))
      ),
      f"more than {100 * noise:.3g}%; the plain arms are the input",
    )
  )
  for label, pair in rates.items():
    counts = not label.endswith("plain")
    figures += _figures("ten boxes", name, {label: pair}, inputs, counts)
  for label, pair in decode_only(_HOP_S).items():
    if not label.endswith("plain"):
      figures += _figures(
        "ten boxes",
        name,
        {f"{label}, with the Nordic fit's 4 ms a hop": pair},
        {"4 ms a hop": "published (the Nordic ring's fit)"},
        counts=False,
      )
  return Result(
    figures=figures,
    orderings=orderings,
    gains=[
      Gain(
        case="ten boxes",
        where="decoding, ten boxes",
        best=max(c.tokens_per_s for c in ours.values()),
        priced=priced(ten, quality, tokens),
      )
    ],
  )


def block_sweep(data: dict[str, Any], tokens: int) -> Result:
  """V4-Flash, block 5 to 10, and block 8 with forced refill."""
  ring = data["v4flash-6stage-eu-fill-sweep"]
  nordic_ring = data["v4flash-6stage-nordic-depth-sweep"]
  row_share = _row_share(nordic_ring, "loop")
  noise = _spread(nordic_ring, "depth 8", "depth 16")
  compute = ring["compute"]
  stages_s = tuple(compute["stage_busy_s_per_frame"])
  wire_s = compute["lap_s"] - sum(stages_s)

  where = MeasuredWorld(
    stage_s=stages_s, delay_s=(wire_s / 7,) * 7, row_share=row_share
  )
  known = list(ring["speculation"]["acceptance_by_index"])
  lists = {5: known}
  for block in (6, 8, 10):
    lists[block] = _extend(
      known,
      block,
      base.arm(ring, f"block {block}, floor 1")["frames_per_token"],
      functools.partial(_frames_per_token, where, block, tokens),
    )

  def run(block: int, limit: int, floor: int, tail_s: float = 0.0) -> Counters:
    busy_s = (*stages_s[:-1], tail_s or stages_s[-1])
    return count(
      dataclasses.replace(where, stage_s=busy_s),
      frames(block, limit, floor=floor),
      Quality.block(lists[block]),
      tokens=tokens,
    )

  settings = {
    "block 5": ("block 5, floor 1", 5, 64, 1),
    "block 6": ("block 6, floor 1", 6, 64, 1),
    "block 8": ("block 8, floor 1", 8, 64, 1),
    "block 10": ("block 10, floor 1", 10, 64, 1),
    "block 8, forced refill": ("block 8, floor 8", 8, 64, 8),
    "block 8, limit 4": ("block 8, depth 4", 8, 4, 1),
  }
  ours = {
    name: run(block, limit, floor)
    for name, (_, block, limit, floor) in settings.items()
  }
  inputs = {
    "stage times; the tail's 6.0 ms hold its drafting": "published",
    "lap 0.152 s": "derived from block 8's rate, fill and frames per token",
    "acceptance of indices 1 to 5": "published (block 5), assumed for the rest",
    "acceptance beyond": "derived from each block's frames per token; the "
    "arms of block 8 all use that of floor 1",
    "a refill drafts its whole prefix anew": "published (1496 disagreements), "
    "to what extent is assumed: all of it",
  }
  figures, orderings = [], []
  for name, key, of in (
    ("tokens/s", "tokens_per_s", lambda c: c.tokens_per_s),
    (
      "frames in flight, time average",
      "frames_in_flight_time_avg",
      lambda c: c.alive_fill,
    ),
    ("frames per token", "frames_per_token", lambda c: c.frames_per_token),
  ):
    both = {
      label: (base.arm(ring, settings[label][0])[key], of(mine))
      for label, mine in ours.items()
      if key in base.arm(ring, settings[label][0])
    }
    for label, pair in both.items():
      counts = label != "block 8" and (
        key != "frames_per_token" or label not in ("block 6", "block 10")
      )
      figures += _figures("block sweep", name, {label: pair}, inputs, counts)
    orderings.append(base.ordered("block sweep", name, both, noise))
  rate = {label: c.tokens_per_s for label, c in ours.items()}
  measured = {
    label: base.arm(ring, settings[label][0])["tokens_per_s"]
    for label in ("block 8", "block 8, forced refill")
  }
  share = rate["block 8, forced refill"] / rate["block 8"]
  halves = base.Ordering(
    case="block sweep",
    what="tokens/s",
    rule="forced refill halves the rate of block 8: at most 14.1 / 30.5, plus "
    "the noise",
    pairs=(("block 8, forced refill", "½ block 8"),),
    wrong=()
    if share
    <= (1 + noise) * measured["block 8, forced refill"] / measured["block 8"]
    else (("block 8, forced refill", "½ block 8"),),
  )
  costly = run(8, 64, 8, compute["tail_s_at_floor_3_before"]).tokens_per_s
  figures += _figures(
    "block sweep",
    "tokens/s",
    {
      "block 8, forced refill, tail at 28 ms a frame": (
        measured["block 8, forced refill"],
        costly,
      )
    },
    {"tail 28 ms": "published (floor 3 with the drafter before; another day)"},
    counts=False,
  )
  return Result(
    figures=figures,
    orderings=[*orderings, halves],
    gains=[
      Gain(
        case="block sweep",
        where="decoding",
        best=max(rate.values()),
        priced=priced(where, Quality.block(lists[8]), tokens),
      )
    ],
  )


def _frames_per_token(
  world: MeasuredWorld, block: int, tokens: int, by_index: Sequence[float]
) -> float:
  """Returns the frames per token of a block of that acceptance."""
  policy = frames(block, 64)
  return count(
    world, policy, Quality.block(by_index), tokens=tokens
  ).frames_per_token


def _extend(
  acceptance: Sequence[float],
  block: int,
  frames_per_token: float,
  run: Callable[[Sequence[float]], float],
) -> list[float]:
  """Returns the acceptance list filled up to `block` with the one value that
  gives so many frames per token."""
  missing = block - len(acceptance)
  low, high = 0.0, 1.0
  for _ in range(7):
    middle = (low + high) / 2
    if run([*acceptance, *[middle] * missing]) > frames_per_token:
      low = middle  # more of them must be right
    else:
      high = middle
  return [*acceptance, *[(low + high) / 2] * missing]
