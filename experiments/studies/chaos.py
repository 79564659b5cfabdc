# SPDX-License-Identifier: Apache-2.0
"""Any policy, ring and fault: plain decoding's text, and never far behind it.

Virtual time, but for the last part. Each scenario draws a ring, its weather
(jitter, losses, stalls, duplicates, kills, a lost coordinator), a drafter of
some quality and a policy. The target is a toy whose every draw depends on what
each stage's masks showed (`worlds.ToyStage`), so a fault in bookkeeping
anywhere changes the text.

Times are held against plain decoding's where no stage is killed, under `priced`
and under any policy with a floor (`_scenarios.play` says over what). Last, a
random subset is played over sockets, with stages that are killed for real.
"""

import collections
import concurrent.futures
import dataclasses
import math
import multiprocessing
import pathlib
import random
from typing import Any

import matplotlib.pyplot as plt
import rich.console
import rich.progress

from experiments._rundir import write_json
from experiments.studies import _chaos_sockets, _scenarios

_FLOOR = 0.95
_GOOD = 0.5


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The study.

  Attributes:
    scenarios: how many.
    first: seed of the first.
    workers: processes.
    sockets: how many of them are played over sockets as well.
    quick: 60 scenarios, 3 of them over sockets.
    out: run directory.
  """

  scenarios: int = 1000
  first: int = 0
  workers: int = 2
  sockets: int = 20
  quick: bool = False
  out: pathlib.Path | None = None


def run(config: Config) -> dict[str, Any]:
  assert config.out is not None
  count = min(60, config.scenarios) if config.quick else config.scenarios
  seeds = range(config.first, config.first + count)
  num_sockets = min(config.sockets, count, 3 if config.quick else count)
  subset = random.Random(config.first).sample(seeds, num_sockets)
  context = multiprocessing.get_context("spawn")
  with concurrent.futures.ProcessPoolExecutor(
    config.workers, mp_context=context
  ) as pool:
    reports = list(
      rich.progress.track(
        pool.map(_scenarios.play, seeds, chunksize=4),
        total=count,
        description="scenarios",
        console=rich.console.Console(stderr=True),
      )
    )
    over_sockets = list(
      rich.progress.track(
        pool.map(_chaos_sockets.play, subset),
        total=num_sockets,
        description="over sockets",
        console=rich.console.Console(stderr=True),
      )
    )
  timed = [r for r in reports if "speedup" in r]
  slow = [r for r in timed if r["speedup"] < _FLOOR]
  good = [r for r in timed if r["quality"] >= _GOOD]
  for report in [*reports, *over_sockets]:
    if report["diverged"] or report["hung"]:
      print("failed:", report)
  for report in slow:
    print("slower than plain:", report)
  write_json(
    config.out / "scenarios.json",
    {"virtual": reports, "sockets": over_sockets},
  )
  _draw(timed, config.out / "chaos.png")
  by_policy = collections.Counter(r["policy"] for r in reports)
  print("scenarios by policy:", dict(sorted(by_policy.items())))
  return {
    "scenarios": count,
    "timed": len(timed),
    "diverged": sum(r["diverged"] for r in [*reports, *over_sockets]),
    "hung": sum(r["hung"] for r in [*reports, *over_sockets]),
    "slower_than_plain": len(slow),
    "gain_good": _geometric_mean([r["speedup"] for r in good]),
    "gain_good_priced": _geometric_mean(
      [r["speedup"] for r in good if r["policy"] == "priced"]
    ),
    "sockets": f"{sum(not r['diverged'] + r['hung'] for r in over_sockets)}/"
    f"{num_sockets}",
  }


def _geometric_mean(values: list[float]) -> float:
  if not values:
    return math.nan
  return math.exp(sum(math.log(v) for v in values) / len(values))


def _draw(timed: list[dict[str, Any]], path: pathlib.Path) -> None:
  figure, axes = plt.subplots(figsize=(7, 4))
  for name, chosen in (
    ("priced", [r for r in timed if r["policy"] == "priced"]),
    ("with_floor(…)", [r for r in timed if r["policy"] != "priced"]),
  ):
    axes.plot(
      [r["quality"] + (0.015 if name == "priced" else -0.015) for r in chosen],
      [r["speedup"] for r in chosen],
      ".",
      label=name,
    )
  axes.axhline(_FLOOR, color="grey", linewidth=0.8)
  axes.set(
    xlabel="drafter quality",
    ylabel="speed-up over plain (virtual time)",
    yscale="log",
    title="scenarios without kills, from the 33rd token on",
  )
  axes.legend()
  figure.tight_layout()
  figure.savefig(path, dpi=120)
  plt.close(figure)
