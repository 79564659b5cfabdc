# SPDX-License-Identifier: Apache-2.0
"""One picture per policy on one ring, and where each of them wins and loses.

Virtual time, replayed tokens, everything assumed (see `studies/_grid.py`): four
stages of 16 ms, 200 ms of link delays a lap, 30 Mbps, 10 ms per drafted level,
a drafter whose likeliest guess is right 7 times in 10. Every policy is drawn at
the setting that a sweep finds to be its best there; `priced` has none. The
floor is drawn with a drafter that loses without one. Then the same sweep on
rings and with drafters that differ from that one in one thing each: tokens per
second over plain decoding.

  python -m experiments.study timelines --figures docs/figures

writes the figures of docs/schedules.md.
"""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import rich.console

from experiments import _fates, _timeline
from experiments._rundir import write_json
from experiments.studies import _grid, schedules
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import Recording, SessionResult, Span

HOME = _grid.Point(lap_s=0.2, mbps=30.0, stages=4, level_s=0.01, quality=0.7)
_HOME = "as drawn"
_CHANGES: dict[str, dict[str, Any]] = {
  "lap 20 ms": {"lap_s": 0.02},
  "lap 800 ms": {"lap_s": 0.8},
  "1 Mbps": {"mbps": 1.0},
  "1 Gbps": {"mbps": 1000.0},
  "1 stage": {"stages": 1},
  "16 stages": {"stages": 16},
  "free drafts": {"level_s": 0.0},
  "quality 0.3": {"quality": 0.3},
  "quality 0.9": {"quality": 0.9},
}
# What the floor is drawn over: it loses to plain decoding.
_USELESS = dataclasses.replace(HOME, quality=0.0)
_floored = sch.branched
_SKIP = 33  # tokens before the clock starts: the drafter is being calibrated
_WINDOW_S = 0.8  # of the figures


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The study.

  Attributes:
    tokens: of each text.
    texts: on which the best settings of the sweep are timed.
    workers: processes.
    figures: directory of the figures; by default the run's.
    quick: the one ring alone, one short text.
    out: run directory.
  """

  tokens: int = 160
  texts: int = 3
  workers: int = 2
  figures: pathlib.Path | None = None
  quick: bool = False
  out: pathlib.Path | None = None


class Drawn(NamedTuple):
  """A policy at work.

  Attributes:
    name: of its figure.
    setting: what it was run with.
    policy: itself.
    point: where.
  """

  name: str
  setting: str
  policy: sch.Policy
  point: _grid.Point


def best_settings(point: _grid.Point, tokens: int) -> dict[str, str]:
  """Returns each policy's fastest setting on one text."""
  best = {}
  for name, settings in schedules.sweeps(point).items():
    rates = {
      setting: _grid.rate(point, make(), tokens=tokens)
      for setting, make in settings.items()
    }
    best[name] = max(rates, key=lambda setting: rates[setting])
  return best


def drawn(best: Mapping[str, str]) -> list[Drawn]:
  """Returns what is drawn, given each policy's setting."""
  sweeps = schedules.sweeps(HOME)
  plain = sweeps["lockstep"]["0"]()
  return [
    Drawn("plain", "root alone", plain, HOME),
    *(
      Drawn(name, setting, sweeps[name][setting](), HOME)
      for name, setting in best.items()
    ),
    Drawn("priced", "nothing to set", sch.priced(), HOME),
    Drawn(
      "with_floor",
      "branched, drafts of quality 0",
      sch.with_floor(_floored()),
      _USELESS,
    ),
  ]


def transmissions(spans: Sequence[Span], point: _grid.Point) -> list[Span]:
  """Returns the stages' spans, and for each frame on a hop the time for which
  it keeps the link from taking another one: its bytes over the bandwidth, up to
  one delay before it arrives."""
  delay_s = point.lap_s / (point.stages + 1)
  out = []
  for span in spans:
    if span.lane.startswith("hop "):
      sent_s = span.end_s - delay_s
      busy_s = 8 * int(span.name.removesuffix(" B")) / (point.mbps * 1e6)
      out.append(span._replace(start_s=sent_s - busy_s, end_s=sent_s))
    elif span.lane.startswith("stage "):
      out.append(span)
  return out


def figures_of(
  result: SessionResult, runs: Mapping[int, _fates.RunRows], point: _grid.Point
) -> dict[str, Any]:
  """Returns the figures of a session, from token `_SKIP` on where timed.

  `bottleneck` is the stage or link that is taken for the largest part of the
  time, `idle` the rest of its time. Rows are counted where they were launched,
  prompt rows apart; `cancelled` of them were dropped by some stage.
  """
  times = result.outcomes[0].emitted_s
  within = times[_SKIP], times[-1]
  idle = _timeline.idle_shares(
    transmissions(result.spans, point), within=within
  )
  bottleneck = min(idle, key=lambda lane: idle[lane])
  rows = [row for run in runs.values() for row in run.rows]
  count = {
    fate: sum(row.fate == fate for row in rows)
    for fate in (_fates.ROOT, _fates.ACCEPTED, _fates.DEAD)
  }
  launched = sum(count.values())
  return {
    "tokens_per_s": (len(times) - 1 - _SKIP) / (within[1] - within[0]),
    "bottleneck": bottleneck,
    "idle": idle[bottleneck],
    "lanes_idle": _timeline.idle_shares(result.spans, within=within),
    "runs": len(runs),
    "rows": launched,
    "rows_per_token": launched / len(times),
    **count,
    "hedges": sum(row.is_hedge for row in rows),
    "cancelled": sum(map(_fates.num_dropped, result.spans)),
  }


def draw(
  this: Drawn, tokens: int, directory: pathlib.Path, plain: float | None
) -> dict[str, Any]:
  """Runs a policy, draws it, and returns its figures.

  Args:
    this: the policy.
    tokens: of the text.
    directory: of the figure.
    plain: tokens per second of plain decoding; None for this one's.
  """
  recording = Recording()
  result = _grid.session(
    this.point, this.policy, tokens=tokens, trace=True, recording=recording
  )
  runs = _fates.fates(recording)
  figures = figures_of(result, runs, this.point)
  rate = figures["tokens_per_s"]
  figures["speedup"] = rate / (plain or rate)
  _timeline.draw_timeline(
    result.spans,
    directory / f"{this.name}.svg",
    world="virtual",
    title=f"{this.name} ({this.setting}): {figures['speedup']:.2f}x plain",
    runs=runs,
    window_s=_WINDOW_S,
    overview=False,
  )
  return {"setting": this.setting, **figures}


def speedups(
  point: _grid.Point, tokens: int, texts: int
) -> tuple[dict[str, str], dict[str, float]]:
  """Returns each policy's best setting, and its rate over plain decoding's.

  The setting is chosen on one text and the rate, a geometric mean, is that of
  others: else the largest of many noisy rates would win by its noise.
  `segments()` is at the paper's setting, without and with a floor.
  """
  best = best_settings(point, tokens)
  sweeps = schedules.sweeps(point)
  makes: dict[str, Callable[[], sch.Policy]] = {
    name: sweeps[name][setting] for name, setting in best.items()
  }
  makes |= {
    "priced": sch.priced,
    "segments()": sch.segments,
    "with_floor(segments())": lambda: sch.with_floor(sch.segments()),
  }
  found = dict.fromkeys(makes, 0.0)
  for seed in range(1, texts + 1):
    plain = _grid.rate(
      point, sweeps["lockstep"]["0"](), tokens=tokens, seed=seed
    )
    for name, make in makes.items():
      rate = _grid.rate(point, make(), tokens=tokens, seed=seed)
      found[name] += math.log(rate / plain) / texts
  return best, {name: math.exp(value) for name, value in found.items()}


def run(config: Config) -> dict[str, Any]:
  assert config.out is not None
  console = rich.console.Console()
  quick = config.quick
  tokens = min(config.tokens, 100) if quick else config.tokens
  texts = 1 if quick else config.texts
  directory = config.figures or config.out
  directory.mkdir(parents=True, exist_ok=True)
  context = multiprocessing.get_context("spawn")
  settings, table = {}, {}
  with concurrent.futures.ProcessPoolExecutor(
    config.workers, mp_context=context
  ) as pool:
    futures = {
      name: pool.submit(
        speedups, dataclasses.replace(HOME, **change), tokens, texts
      )
      for name, change in {_HOME: {}, **({} if quick else _CHANGES)}.items()
    }
    for name, future in futures.items():
      settings[name], table[name] = future.result()
      console.print(f"{name}: swept", markup=False)
  first, *rest = drawn(settings[_HOME])
  drawings = {first.name: draw(first, tokens, directory, None)}
  plain = drawings[first.name]["tokens_per_s"]
  for this in rest:
    drawings[this.name] = draw(this, tokens, directory, plain)
  inner = _grid.rate(_USELESS, _floored(), tokens=tokens, skip=_SKIP) / plain
  for name, figures in drawings.items():
    console.print(_line(name, figures), markup=False, soft_wrap=True)
  write_json(
    config.out / "timelines.json",
    {
      "drawn": drawings,
      "without_floor": inner,
      "settings": settings,
      "speedups": table,
    },
  )
  text = markdown(table)
  (config.out / "speedups.md").write_text(text)
  console.print(text, markup=False, soft_wrap=True)
  return {
    f"{name}_{figure}": value[figure]
    for name, value in drawings.items()
    for figure in ("speedup", "idle", "rows_per_token", "cancelled")
  } | {"without_floor_speedup": inner}


def _line(name: str, figures: Mapping[str, Any]) -> str:
  return (
    f"{name} ({figures['setting']}): {figures['speedup']:.2f}x plain, "
    f"{figures['bottleneck']} idle {figures['idle']:.0%}, "
    f"{figures['rows_per_token']:.2f} rows per token, "
    f"{figures['cancelled']} cancelled of {figures['rows']}"
  )


def markdown(table: Mapping[str, Mapping[str, float]]) -> str:
  """Returns a row per ring, a column per policy; the best of a row is bold."""
  policies = list(next(iter(table.values())))
  lines = [
    "| ring | " + " | ".join(f"`{name}`" for name in policies) + " |",
    "|---" * (len(policies) + 1) + "|",
  ]
  for name, speed in table.items():
    best = max(speed.values())
    cells = [
      f"**{speed[p]:.2f}**" if speed[p] == best else f"{speed[p]:.2f}"
      for p in policies
    ]
    lines.append(f"| {name} | " + " | ".join(cells) + " |")
  return "\n".join(lines) + "\n"
