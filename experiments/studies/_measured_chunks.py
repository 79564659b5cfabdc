# SPDX-License-Identifier: Apache-2.0
"""Rings that verify chunks of several positions, and plain ones."""

import itertools
import statistics
from collections.abc import Sequence
from typing import Any

from experiments.studies import _measured_figure as base
from experiments.studies._measured_figure import Figure, Ordering, Result
from experiments.studies._measured_world import chunks, count, plain
from experiments.studies._published_world import World, acceptance_for
from wanspec_jax import schedules as sch


def paper_bench(data: dict[str, Any], tokens: int) -> Result:
  """MiniMax-M2.5 on five boxes: plain against the synchronous chain."""
  ring = data["m25-5stage-eu-paper-bench"]

  def per_round(arm: dict[str, Any], name: str) -> float:
    s = arm["settings"]
    return statistics.median(
      total / n for total, n in zip(s[name], s["rounds"], strict=True)
    )

  def spans(arm: dict[str, Any]) -> tuple[float, ...]:
    rows = arm["settings"]["stage_span_s_per_frame"]
    return tuple(
      statistics.median(column) for column in zip(*rows, strict=True)
    )

  plains = [a for a in ring["arms"] if a["label"].endswith("/ ar")]
  chains = [a for a in ring["arms"] if a["label"].endswith("/ chain")]
  inputs = {
    "stage times, transport and draft time per round": (
      "published, medians of the other jobs of this arm"
    ),
    "tokens per round": "published",
  }
  figures, rates = [], {}
  best: tuple[World, float] | None = None
  for kind, arms in (("plain", plains), ("chain", chains)):
    for arm in arms:
      others = [a for a in arms if a is not arm]
      wire_s = statistics.median(per_round(a, "transport_s") for a in others)
      stage_s = tuple(
        statistics.median(column)
        for column in zip(*map(spans, others), strict=True)
      )
      draft_s = statistics.median(per_round(a, "draft_s") for a in others)
      world = World(
        stage_s=stage_s,
        delay_s=(wire_s / 6,) * 6,
        draft=sch.DraftCosts(per_call_s=draft_s),
      )
      cell = arm["label"].split(" / ")[0]
      if kind == "plain":
        mine = count(world, plain(), 0.5, tokens=min(tokens, 200))
      else:
        alpha = acceptance_for(arm["tokens_per_round"], 8)
        mine = count(world, chunks(8, 1), alpha, tokens=tokens)
        best = (world, alpha)
      rates[kind, cell] = mine.tokens_per_s
      figures.append(
        Figure(
          case="M2.5 paper bench",
          name=f"{cell}, {kind}: tokens/s",
          measured=statistics.median(arm["tokens_per_s"]),
          ours=mine.tokens_per_s,
          inputs=inputs,
        )
      )
  measured = {}
  for (kind, cell), rate in list(rates.items()):
    if kind == "chain" and ("plain", cell) in rates:
      speedup = {
        k: statistics.median(base.arm(ring, f"{cell} / {k}")["tokens_per_s"])
        for k in ("ar", "chain")
      }
      measured[cell] = speedup["chain"] / speedup["ar"]
      figures.append(
        Figure(
          case="M2.5 paper bench",
          name=f"{cell}: speed-up of the chain",
          measured=measured[cell],
          ours=rate / rates["plain", cell],
          inputs=inputs,
        )
      )
  ours = {c: rates["chain", c] / rates["plain", c] for c in measured}
  orderings = [
    Ordering(
      case="M2.5 paper bench",
      claim="the chain gains most on mathematics, then on 8k quotes, least on "
      "chat and retrieved quotes",
      holds=ours["reason-math"]
      > ours["ctx-8k-quote"]
      > max(ours["open-chat"], ours["rag-quote"]),
    ),
    Ordering(
      case="M2.5 paper bench",
      claim="it gains everywhere",
      holds=min(ours.values()) > 1,
    ),
  ]
  assert best is not None
  world, alpha = best
  return Result(
    figures=figures,
    orderings=orderings,
    best=count(world, chunks(8, 1), alpha, tokens=tokens).tokens_per_s,
    priced=base.priced(world, alpha, tokens),
  )


def depth_pair(data: dict[str, Any], tokens: int) -> Result:
  """gpt-oss-120b on three stages at two laps: how deep to pipeline chunks."""
  short = data["gptoss120b-3stage-us-depth"]
  long = data["gptoss120b-3stage-us-185ms"]
  alpha = acceptance_for(
    statistics.mean(long["speculation"]["tokens_per_round"]), 4
  )

  def world(rtt_s: float) -> World:
    return World(
      stage_s=(2 * 0.0035,) * 3,
      delay_s=(rtt_s / 2 / 4,) * 4,
      draft=sch.DraftCosts(per_level_s=0.028 / 4),
    )

  ours: dict[tuple[str, int], float] = {}
  figures = []
  for name, ring, rtt_s, depths in (
    ("102 ms", short, 0.102, (1, 2, 4)),
    ("185 ms", long, 0.185, (1, 2, 4, 8)),
  ):
    for depth in depths:
      mine = count(world(rtt_s), chunks(4, depth), alpha, tokens=tokens)
      ours[name, depth] = mine.tokens_per_s
      measured = statistics.mean(
        arm["tokens_per_s"]
        for arm in ring["arms"]
        if arm.get("settings", {}).get("depth") == depth
      )
      figures.append(
        Figure(
          case="gpt-oss depth pair",
          name=f"RTT {name}, depth {depth}: tokens/s",
          measured=measured,
          ours=mine.tokens_per_s,
          inputs={
            "RTT": "published; a lap pays half of it",
            "stage time": "published (3.5 ms per 6 layers)",
            "drafting 28 ms per chunk": "published (another ring, same models)",
            "tokens per round": "published at 185 ms, assumed at 102 ms",
          },
          counts=name == "185 ms",
        )
      )
  orderings = [
    Ordering(
      case="gpt-oss depth pair",
      claim="at 102 ms depth 2 beats 1 and 4",
      holds=ours["102 ms", 2] > max(ours["102 ms", 1], ours["102 ms", 4]),
    ),
    Ordering(
      case="gpt-oss depth pair",
      claim="at 185 ms depth 4 beats 2, and 2 beats 1",
      holds=ours["185 ms", 4] > ours["185 ms", 2] > ours["185 ms", 1],
    ),
    Ordering(
      case="gpt-oss depth pair",
      claim="depth 8 gains nothing over 4",
      holds=ours["185 ms", 8] <= 1.06 * ours["185 ms", 4],
    ),
  ]
  return Result(
    figures=figures,
    orderings=orderings,
    best=max(rate for (name, _), rate in ours.items() if name == "185 ms"),
    priced=base.priced(world(0.185), alpha, tokens),
  )


def glm_ladder(data: dict[str, Any], tokens: int) -> Result:
  """GLM-5.2 744B on six stages: relay, direct return, chunks, faster drafts."""
  ring = data["glm52-744b-6stage-us"]
  edges = [edge["rtt_s"] / 2 for edge in ring["network"]["edges"]]
  busy = (0.19 / 6,) * 6
  back_s = sum(edges[:-1])  # relayed: the answer goes back the way it came
  relay, direct = (*edges[:-1], back_s), tuple(edges)
  steps = [a["tokens_per_s"] for a in ring["arms"]]
  alpha = 1.94 / 2

  def world(delays: Sequence[float], draft_s: float, extra_s: float = 0.0):
    return World(
      stage_s=busy,
      delay_s=tuple(d + extra_s / 7 for d in delays),
      draft=sch.DraftCosts(per_level_s=draft_s),
    )

  # What a frame of 7 positions takes on the wire, from the stated verify times.
  verify_relay_s = 1.55 - 0.19 - sum(relay)
  verify_direct_s = 0.96 - 0.19 - sum(direct)
  runs: list[tuple[str, World, sch.Policy, bool]] = [
    ("plain, relay", world(relay, 0.0497), plain(), True),
    (
      "chain of 6, relay",
      world(relay, 0.0497, verify_relay_s),
      chunks(6, 1),
      True,
    ),
    (
      "chain of 6, direct",
      world(direct, 0.0497, verify_direct_s),
      chunks(6, 1),
      True,
    ),
    ("chunks of 2, depth 6", world(direct, 0.0497), chunks(2, 6), True),
    ("the same, faster drafts", world(direct, 0.0131), chunks(2, 6), True),
  ]
  inputs = {
    "edges, compute, draft times, verify times": "published",
    "acceptance 0.97": "published (depth 6), assumed for the chains of 6",
    "chunks of 3 positions pay no more wire than one": "assumed",
  }
  ours, figures = [], []
  for (name, where, policy, counts), measured in zip(runs, steps, strict=True):
    rate = count(where, policy, alpha, tokens=tokens).tokens_per_s
    ours.append(rate)
    figures.append(
      Figure(
        case="GLM ladder",
        name=f"{name}: tokens/s",
        measured=measured,
        ours=rate,
        inputs=inputs,
        counts=counts,
      )
    )
  return Result(
    figures=figures,
    orderings=[
      Ordering(
        case="GLM ladder",
        claim="every step of the ladder is faster than the one before",
        holds=ours == sorted(ours),
      ),
      Ordering(
        case="GLM ladder",
        claim="chunks in flight gain most",
        holds=ours[3] / ours[2]
        == max(b / a for a, b in itertools.pairwise(ours)),
      ),
    ],
    best=ours[-1],
    priced=base.priced(world(direct, 0.0131), alpha, tokens),
  )


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
  figures, ours = [], {}
  for stages, measured in rounds.items():
    world = World(
      stage_s=(slope_s / 2,) * stages,
      delay_s=(base_s, *(slope_s / 2,) * stages),
    )
    ours[stages] = 1 / count(world, plain(), 0.5, tokens=40).tokens_per_s
    figures.append(
      Figure(
        case="hop series",
        name=f"{stages} stages: seconds per round",
        measured=measured,
        ours=ours[stages],
        inputs={"seconds per stage": "derived from 2 and 6 stages"},
        counts=stages in (3, 4),
      )
    )
  mesh = data["meshllm-latency-injection"]
  at = {
    (a["settings"]["n_devices"], a["settings"]["injected_delay_s"]): a[
      "tokens_per_s"
    ]
    for a in mesh["arms"]
  }
  for (devices, delay_s), measured in at.items():
    if not delay_s:
      continue
    calls = 2 * devices - 3
    world = World(
      stage_s=(1 / at[devices, 0.0] / devices,) * devices,
      delay_s=(delay_s * calls / (devices + 1),) * (devices + 1),
    )
    rate = count(world, plain(), 0.5, tokens=40).tokens_per_s
    figures.append(
      Figure(
        case="Mesh-LLM delays",
        name=f"{devices} devices, {1e3 * delay_s:g} ms: tokens/s",
        measured=measured,
        ours=rate,
        inputs={
          "rate without delay": "published",
          "2 N - 3 delays per token": "derived from 3 devices",
        },
        counts=devices > 3,
      )
    )
  return Result(
    figures=figures,
    orderings=[
      Ordering(
        case="hop series",
        claim="a round takes longer with every stage",
        holds=ours[2] < ours[3] < ours[4] < ours[6],
      )
    ],
  )
