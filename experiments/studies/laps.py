# SPDX-License-Identifier: Apache-2.0
"""Does the lap-time formula hold? Modelled against measured laps over sockets.

Spawns one ring of stage processes and decodes over emulated links at every lap
and bandwidth, plainly (one row) and with trees of a fixed size. The model is
`links.lap_model` on stage times measured in other laps, before and after; the
measurement is the median time from verdict to verdict, wall clock. Last line:
`within=k/n worst_ms=… worst_share=…`, where a point is within if the two differ
by at most 5% or 5 ms, whichever is more.
"""

import asyncio
import dataclasses
import itertools
import pathlib
import statistics
from typing import Any, NamedTuple

import matplotlib.figure
import rich.console
import rich.table

from experiments import _arms, _local, _rundir
from wanspec_jax import models
from wanspec_jax import schedules as sch
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import (
  Cluster,
  SocketRing,
  StageShape,
  local_cluster,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The grid.

  Attributes:
    model: as for decode.
    stages: stage processes.
    laps_ms: summed one-way delays.
    mbps: bandwidths.
    rows: rows per run, the root included.
    num_laps: laps per point.
    dtype: of the weights.
    codec: of the links between stages.
    row_buckets: compiled row counts.
    num_slots: cache size.
    repeats: calibration laps per row bucket.
    quick: 50 ms only, 12 laps.
    out: run directory.
  """

  model: str = "smollm2"
  stages: int = 4
  laps_ms: tuple[float, ...] = (50.0, 200.0, 800.0)
  mbps: tuple[float, ...] = (10.0, 100.0, 1000.0)
  rows: tuple[int, ...] = (1, 16)
  num_laps: int = 50
  dtype: str = "bfloat16"
  codec: str = "raw:bf16"
  row_buckets: tuple[int, ...] = (8, 16)
  num_slots: int = 256
  repeats: int = 5
  quick: bool = False
  out: pathlib.Path | None = None


class Point(NamedTuple):
  """One cell of the grid, seconds."""

  lap_ms: float
  mbps: float
  rows: int
  laps: int
  modelled_s: float
  measured_s: float
  low_s: float
  high_s: float

  @property
  def within(self) -> bool:
    gap_s = abs(self.measured_s - self.modelled_s)
    return gap_s <= max(0.05 * self.modelled_s, 5e-3)


def run(config: Config) -> dict[str, Any]:
  """Runs the study; returns its figures."""
  out = config.out
  assert out is not None
  if config.quick:
    config = dataclasses.replace(config, laps_ms=(50.0,), num_laps=12)
  cluster = local_cluster(
    num_stages=config.stages,
    model=config.model,
    dtype=config.dtype,
    codec=config.codec,
    shape=StageShape(
      row_buckets=config.row_buckets, slot_buckets=(config.num_slots,)
    ),
  )
  with _local.spawn(cluster, out):
    points = asyncio.run(_measure(config, cluster))
  _show(points)
  _draw(points, out / "laps.png")
  _rundir.write_json(
    out / "points.json",
    [p._asdict() | {"within": p.within} for p in points],
  )
  gaps = [(abs(p.measured_s - p.modelled_s), p.modelled_s) for p in points]
  return {
    "within": f"{sum(p.within for p in points)}/{len(points)}",
    "worst_ms": 1e3 * max(gap for gap, _ in gaps),
    "worst_share": max(gap / model for gap, model in gaps),
  }


async def _measure(config: Config, cluster: Cluster) -> list[Point]:
  tokenizer = models.load_tokenizer(config.model)
  prompt = tokenizer.apply_chat_template(
    [{"role": "user", "content": "Tell me about the tides of the sea."}]
  )
  points = []
  for lap_ms in config.laps_ms:
    for mbps in config.mbps:
      links = _arms.Links(lap_ms=lap_ms, mbps=mbps)
      async with SocketRing(
        cluster,
        model_hash=models.model_hash(config.model),
        hops=links.hops(config.stages),
      ) as ring:
        await ring.measure(num_slots=config.num_slots, repeats=0)
        before = await _profile(config, cluster, ring)
        for rows in config.rows:
          laps = await _laps(config, cluster, ring, prompt, rows)
          # The machine drifts: what the stages take now counts as well.
          after = await _profile(config, cluster, ring)
          modelled_s = statistics.mean(
            _arms.ring_costs(cluster, links, profile).lap_s(rows)
            for profile in (before, after)
          )
          before = after
          low, _, high = statistics.quantiles(laps, n=4)
          points.append(
            Point(
              lap_ms=lap_ms,
              mbps=mbps,
              rows=rows,
              laps=len(laps),
              modelled_s=modelled_s,
              measured_s=statistics.median(laps),
              low_s=low,
              high_s=high,
            )
          )
          last = points[-1]
          print(
            f"lap {lap_ms:g} ms, {mbps:g} Mbps, {rows} rows: modelled "
            f"{1e3 * last.modelled_s:.1f}, measured "
            f"{1e3 * last.measured_s:.1f} ms",
            flush=True,
          )
  return points


async def _profile(
  config: Config, cluster: Cluster, ring: SocketRing
) -> StageProfile:
  seconds = await ring.profile(
    num_slots=config.num_slots, repeats=config.repeats
  )
  return _arms.profile_of(cluster, seconds)


async def _laps(
  config: Config,
  cluster: Cluster,
  ring: SocketRing,
  prompt: list[int],
  rows: int,
) -> list[float]:
  """Returns the times from verdict to verdict of one text, in seconds."""
  settings = _arms.Speculate(
    drafter="suffix" if rows > 1 else "none",
    max_nodes=rows - 1,
    size=str(rows - 1),
  )
  drafter = _arms.make_drafter(
    settings,
    eos_ids=frozenset(),
    vocab_size=models.load_config(config.model).vocab_size,
  )
  driver = _arms.make_driver(
    cluster=cluster,
    costs=sch.Costs.constant(1.0, max_rows=cluster.shape.max_rows),
    settings=settings,
    drafter=drafter,
  )
  request = sch.Request(
    prompt=tuple(prompt),
    # Some laps bring several tokens; those beyond `num_laps` are not counted.
    max_new_tokens=(config.num_laps + 1) * (2 if rows > 1 else 1),
    sampling=Sampling(),
  )
  result = await ring.run(driver, [(0.0, request)])
  times = sorted(set(result.outcomes[0].emitted_s))
  laps = [b - a for a, b in itertools.pairwise(times)]
  return laps[: config.num_laps]


def _show(points: list[Point]) -> None:
  table = rich.table.Table(title="One lap, milliseconds (wall clock)")
  for column in (
    "lap",
    "Mbps",
    "rows",
    "laps",
    "modelled",
    "measured",
    "quartiles",
    "gap",
    "within",
  ):
    table.add_column(column, justify="right")
  for p in points:
    gap_s = p.measured_s - p.modelled_s
    table.add_row(
      f"{p.lap_ms:g}",
      f"{p.mbps:g}",
      str(p.rows),
      str(p.laps),
      f"{1e3 * p.modelled_s:.1f}",
      f"{1e3 * p.measured_s:.1f}",
      f"{1e3 * p.low_s:.1f}-{1e3 * p.high_s:.1f}",
      f"{1e3 * gap_s:+.1f} ({gap_s / p.modelled_s:+.1%})",
      "yes" if p.within else "NO",
    )
  rich.console.Console(width=100).print(table)


def _draw(points: list[Point], path: pathlib.Path) -> None:
  figure = matplotlib.figure.Figure(figsize=(5, 5), layout="constrained")
  axes = figure.subplots()
  for rows in sorted({p.rows for p in points}):
    mine = [p for p in points if p.rows == rows]
    axes.errorbar(
      [1e3 * p.modelled_s for p in mine],
      [1e3 * p.measured_s for p in mine],
      yerr=[
        [1e3 * (p.measured_s - p.low_s) for p in mine],
        [1e3 * (p.high_s - p.measured_s) for p in mine],
      ],
      fmt="o",
      label=f"{rows} rows",
    )
  ends = [1e3 * min(p.modelled_s for p in points)]
  ends.append(1e3 * max(p.modelled_s for p in points))
  axes.plot(ends, ends, color="grey", linewidth=0.8)
  axes.set(
    xscale="log",
    yscale="log",
    xlabel="modelled lap [ms]",
    ylabel="measured lap [ms], median and quartiles, wall clock",
  )
  axes.legend()
  figure.savefig(path)
