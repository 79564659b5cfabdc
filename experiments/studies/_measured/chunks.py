# SPDX-License-Identifier: Apache-2.0
"""Rings that verify chunks of several positions, and plain ones."""

import statistics
from collections.abc import Sequence
from typing import Any

from experiments.studies._measured import figures as base
from experiments.studies._measured.figures import Figure, Gain, Result
from experiments.studies._measured.policies import chunks
from experiments.studies._measured.world import (
  MeasuredWorld,
  Quality,
  count,
  priced,
)
from experiments.studies._published.world import acceptance_for
from wanspec_jax import schedules as sch

_DRIFT = 0.32  # of M2.5 within two hours; the largest stated of a whole rate
_NO_DRAFTS = Quality.chain(0.5)


def _per_round(arm: dict[str, Any], name: str) -> float:
  s = arm["settings"]
  return statistics.median(
    total / n for total, n in zip(s[name], s["rounds"], strict=True)
  )


def _paper_world(
  others: list[dict[str, Any]], position_s: float, positions: int
) -> MeasuredWorld:
  """Returns the M2.5 ring by the medians of some jobs of that many positions
  per frame, one more of which takes `position_s` on the wire."""
  rows = [
    tuple(
      statistics.median(column)
      for column in zip(*a["settings"]["stage_span_s_per_frame"], strict=True)
    )
    for a in others
  ]
  busy_s = [statistics.median(column) for column in zip(*rows, strict=True)]
  wire_s = statistics.median(_per_round(a, "transport_s") for a in others)
  draft_s = statistics.median(_per_round(a, "draft_s") for a in others)
  # A host sends once it has computed: bytes keep it as busy as layers do.
  row_s = position_s / 5
  more = 1 if positions > 1 else 0  # plain runs here have one row
  rest_s = wire_s - more * positions * position_s
  return MeasuredWorld(
    stage_s=tuple(t + more * row_s for t in busy_s),
    row_s=more * row_s,
    delay_s=(rest_s / 6,) * 6,
    draft=sch.DraftCosts(per_call_s=draft_s),
  )


def paper_bench(data: dict[str, Any], tokens: int) -> Result:
  """MiniMax-M2.5 on five boxes: plain against the synchronous chain."""
  case = "M2.5 paper bench"
  ring = data["m25-5stage-eu-paper-bench"]
  plains = [a for a in ring["arms"] if a["label"].endswith("/ ar")]
  chains = [a for a in ring["arms"] if a["label"].endswith("/ chain")]
  wire_s = [
    statistics.median(_per_round(a, "transport_s") for a in arms)
    for arms in (plains, chains)
  ]
  position_s = (wire_s[1] - wire_s[0]) / (9 - 2)
  inputs = {
    "stage times, transport and draft time per round": (
      "published, medians of the other jobs of this kind"
    ),
    "tokens per round": "published",
    "drafts per block: 8": "published",
    "transport of one more position": "derived from both kinds (matters to "
    "`priced` alone)",
    "a host sends after it has computed": "assumed",
  }
  rates: dict[str, tuple[float, float]] = {}
  spans: dict[str, list[float]] = {}
  gains = []
  for kind, arms in (("plain", plains), ("chain", chains)):
    for arm in arms:
      others = [a for a in arms if a is not arm]
      cell = arm["label"].split(" / ")[0]
      where = _paper_world(others, position_s, 1 if kind == "plain" else 9)
      if kind == "plain":
        policy, quality = sch.lockstep(0), _NO_DRAFTS
      else:
        policy = chunks(8, 1)
        quality = Quality.chain(acceptance_for(arm["tokens_per_round"], 8), 8)
      mine = count(where, policy, quality, tokens=tokens).tokens_per_s
      name = f"{cell}, {kind}"
      rates[name] = (statistics.median(arm["tokens_per_s"]), mine)
      spans[name] = arm["tokens_per_s"]
      if kind == "chain":
        gains.append(
          Gain(
            case=case,
            where=cell,
            best=mine,
            priced=priced(where, quality, tokens),
          )
        )
  speedups = {
    f"{cell}: speed-up of the chain": (
      rates[f"{cell}, chain"][0] / rates[f"{cell}, plain"][0],
      rates[f"{cell}, chain"][1] / rates[f"{cell}, plain"][1],
    )
    for cell in (a["label"].split(" / ")[0] for a in plains)
    if f"{cell}, chain" in rates
  }

  def differs(less: str, more: str) -> bool:
    if min(len(spans[less]), len(spans[more])) >= 3:
      return max(spans[less]) < min(spans[more])
    return rates[more][0] > (1 + _DRIFT) * rates[less][0]

  named = {f"{name}: tokens/s": pair for name, pair in rates.items()} | speedups
  return Result(
    figures=[
      Figure(
        case=case, name=name, measured=pair[0], ours=pair[1], inputs=inputs
      )
      for name, pair in named.items()
    ],
    orderings=[
      base.ordered(
        case,
        "tokens/s",
        rates,
        differs,
        "all repetitions of one beyond all of the other; with fewer than 3, "
        "more than 32%",
      )
    ],
    gains=gains,
  )


def depth_pair(data: dict[str, Any], tokens: int) -> Result:
  """gpt-oss-120b on three stages at two laps: how deep to pipeline chunks."""
  case = "gpt-oss depth pair"
  short = data["gptoss120b-3stage-us-depth"]
  long = data["gptoss120b-3stage-us-185ms"]
  alpha = acceptance_for(
    statistics.mean(long["speculation"]["tokens_per_round"]), 4
  )
  quality = Quality.chain(alpha)
  figures, orderings, gains = [], [], []
  for name, ring, depths in (
    ("RTT 102 ms", short, (1, 2, 4)),
    ("RTT 185 ms", long, (1, 2, 4, 8)),
  ):
    where = MeasuredWorld(
      stage_s=(2 * 0.0035,) * 3,
      delay_s=(ring["network"]["loop_rtt_s"] / 2 / 4,) * 4,
      draft=sch.DraftCosts(per_level_s=0.028 / 4),
    )
    inputs = {
      "RTT": "published; a lap pays half of it",
      "stage time, flat in positions": "published (3.5 ms per 6 layers; flat: "
      "other rings)",
      "drafting 28 ms per chunk": "published (another ring, same models)",
      "tokens per round": "published at 185 ms, assumed at 102 ms",
    }
    both = {}
    for depth in depths:
      measured = statistics.mean(
        arm["tokens_per_s"]
        for arm in ring["arms"]
        if arm.get("settings", {}).get("depth") == depth
      )
      mine = count(where, chunks(4, depth), quality, tokens=tokens)
      both[f"{name}, depth {depth}"] = (measured, mine.tokens_per_s)
    figures += [
      Figure(
        case=case,
        name=f"{label}: tokens/s",
        measured=pair[0],
        ours=pair[1],
        inputs=inputs,
      )
      for label, pair in both.items()
    ]
    # "24 to 28 is WAN variance": one setting read so far apart.
    orderings.append(base.ordered(case, f"tokens/s, {name}", both, 28 / 24 - 1))
    gains.append(
      Gain(
        case=case,
        where=name,
        best=max(rate for _, rate in both.values()),
        priced=priced(where, quality, tokens),
      )
    )
  return Result(figures=figures, orderings=orderings, gains=gains)


def glm_ladder(data: dict[str, Any], tokens: int) -> Result:
  """GLM-5.2 744B on six stages: relay, direct return, chunks, faster drafts."""
  case = "GLM ladder"
  ring = data["glm52-744b-6stage-us"]
  edges = [edge["rtt_s"] / 2 for edge in ring["network"]["edges"]]
  busy_s = ring["compute"]["sum_stage_busy_s"]
  slow_s, fast_s = ring["compute"]["draft_s_per_token"]
  arms = ring["arms"]
  # Relayed, the answer goes back the way it came.
  delays = {"relay": (*edges[:-1], sum(edges[:-1])), "direct": tuple(edges)}
  verify_s = {
    path: arm["settings"]["verify_s_per_round"]
    for path, arm in zip(delays, arms[1:3], strict=True)
  }

  def world(path: str, draft_s: float) -> MeasuredWorld:
    # What 7 positions take beyond compute and delay, in equal shares; a host
    # sends once it has computed.
    beyond_s = verify_s[path] - busy_s - sum(delays[path])
    row_s = beyond_s / 7 / 6
    return MeasuredWorld(
      stage_s=(busy_s / 6 + row_s,) * 6,
      row_s=row_s,
      delay_s=delays[path],
      draft=sch.DraftCosts(per_level_s=draft_s),
    )

  relay_tokens = arms[1]["tokens_per_s"] * (verify_s["relay"] + 6 * slow_s)
  alone = Quality.chain(acceptance_for(relay_tokens, 6))
  easy = Quality.chain(arms[3]["settings"]["mean_accepted"] / 2)
  known = {
    "edges, compute, draft times": "published",
    "wire of a position": "derived from the published verify times of 7 "
    "positions; that it is the same for each is assumed",
    "a host sends after it has computed": "assumed",
  }
  chained = {
    "tokens per round of 6 drafts: 3.7": "derived from the relayed chain's rate"
  }
  accepted = {"acceptance 0.97": "published (1.94 of 2)"}
  runs = (
    ("plain, relay", ("relay", slow_s), sch.lockstep(0), alone, {}),
    ("chain of 6, relay", ("relay", slow_s), chunks(6, 1), alone, chained),
    ("chain of 6, direct", ("direct", slow_s), chunks(6, 1), alone, chained),
    ("chunks of 2, depth 6", ("direct", slow_s), chunks(2, 6), easy, accepted),
    ("same, faster drafts", ("direct", fast_s), chunks(2, 6), easy, accepted),
  )
  both, figures = {}, []
  for (name, (path, draft_s), policy, quality, more), arm in zip(
    runs, arms, strict=True
  ):
    mine = count(world(path, draft_s), policy, quality, tokens=tokens)
    both[name] = (arm["tokens_per_s"], mine.tokens_per_s)
    figures.append(
      Figure(
        case=case,
        name=f"{name}: tokens/s",
        measured=arm["tokens_per_s"],
        ours=mine.tokens_per_s,
        inputs=known | more,
        counts=name != "chain of 6, relay",
      )
    )
  return Result(
    figures=figures,
    orderings=[base.ordered(case, "tokens/s", both, _DRIFT)],
    gains=[
      Gain(
        case=case,
        where="direct, faster drafts",
        best=both["same, faster drafts"][1],
        priced=priced(world("direct", fast_s), easy, tokens),
      )
    ],
  )


def _plain_rate(stage_s: Sequence[float], delay_s: Sequence[float]) -> float:
  world = MeasuredWorld(stage_s=tuple(stage_s), delay_s=tuple(delay_s))
  return count(world, sch.lockstep(0), _NO_DRAFTS, tokens=40).tokens_per_s


def slopes(data: dict[str, Any], tokens: int) -> Result:
  """Round time by stage count (M2.5), and plain rate by delay (Mesh-LLM)."""
  del tokens
  hops = data["m25-hop-count-series"]
  rounds = {
    int(arm["label"].split()[0]): arm["tokens_per_round"] / arm["tokens_per_s"]
    for arm in hops["arms"]
  }
  slope_s = (rounds[6] - rounds[2]) / 4
  base_s = rounds[2] - 2 * slope_s
  figures = []
  both = {}
  for stages, measured in rounds.items():
    halves = (slope_s / 2,) * stages
    ours = 1 / _plain_rate(halves, (base_s, *halves))
    both[f"{stages} stages"] = (measured, ours)
    figures.append(
      Figure(
        case="hop series",
        name=f"{stages} stages: seconds per round",
        measured=measured,
        ours=ours,
        inputs={"seconds per stage": "derived from 2 and 6 stages"},
        counts=stages in (3, 4),
      )
    )
  orderings = [
    base.ordered(
      "hop series",
      "seconds per round",
      both,
      lambda less, more: (
        both[more][0] > (1 + _DRIFT) * both[less][0]
        and {less, more} != {"2 stages", "6 stages"}
      ),
      "more than 32%; 2 against 6 stages is the input",
    )
  ]
  mesh = data["meshllm-latency-injection"]
  at = {
    (a["settings"]["n_devices"], a["settings"]["injected_delay_s"]): a[
      "tokens_per_s"
    ]
    for a in mesh["arms"]
  }
  rates = {}
  for (devices, delay_s), measured in at.items():
    if not delay_s:
      continue
    calls = 2 * devices - 3
    links = devices + 1
    ours = _plain_rate(
      (1 / at[devices, 0.0] / devices,) * devices,
      (delay_s * calls / links,) * links,
    )
    rates[devices, delay_s] = (measured, ours)
    figures.append(
      Figure(
        case="Mesh-LLM delays",
        name=f"{devices} devices, {1e3 * delay_s:g} ms: tokens/s",
        measured=measured,
        ours=ours,
        inputs={
          "rate without delay": "published",
          "2 N - 3 delays per token": "derived from 3 devices",
        },
        counts=devices > 3,
      )
    )
  for what, arms in (
    ("4 devices, by delay", [k for k in rates if k[0] == 4]),
    ("5 ms, by devices", [k for k in rates if k[1] == 0.005]),
  ):
    orderings.append(
      base.ordered(
        "Mesh-LLM delays",
        f"tokens/s, {what}",
        {f"{n} devices, {1e3 * d:g} ms": rates[n, d] for n, d in arms},
        0.06,
        "more than 6% (none is stated)",
      )
    )
  return Result(figures=figures, orderings=orderings)
