# SPDX-License-Identifier: Apache-2.0
"""Measures stage times per row bucket: `python -m experiments.profile`.

Spawns the ring's stage processes, all loaded, and times each stage on its own:
back to back (the columns of the stages), and as it is in a lap, where threads
have slept and caches are cold (`in a lap`: what tree sizes are computed from,
kept in `profile-DTYPE.json`). Picks the dtype with the fastest plain step and
the smallest row bucket whose logits are bit-equal to the larger ones', and
keeps both for `experiments.decode`. Last line: `dtype=… smallest_bucket=…
step_ms=… ratio=… products_ratio=…`, where `ratio` is the whole model's time for
the largest bucket over that for the smallest, back to back, and
`products_ratio` the same of the model's matrix products alone.
"""

import asyncio
import dataclasses
import pathlib
import statistics
import sys
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import rich.console
import rich.table
import tyro

from experiments import _arms, _bits, _local, _rundir, _setup
from wanspec_jax import models, wire
from wanspec_jax.links import StageProfile
from wanspec_jax.worlds import (
  SessionFault,
  SocketRing,
  StageShape,
  local_cluster,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Profile:
  """What is measured.

  Attributes:
    model: as for decode.
    stages: stage processes.
    dtypes: candidates.
    row_buckets: candidates, ascending; those below the smallest bit-equal one
      are dropped.
    num_slots: cache size to measure at.
    repeats: timed calls per bucket and stage.
    rounds: times that the whole ring is measured; medians are taken.
    codec: of the links between stages.
    exact: attention and norms in float64 (docs/performance.md).
    out: run directory.
  """

  model: str = "smollm2"
  stages: int = 4
  dtypes: tuple[str, ...] = ("bfloat16", "float32")
  row_buckets: tuple[int, ...] = (4, 8, 16, 32, 64)
  num_slots: int = 256
  repeats: int = 9
  rounds: int = 3
  codec: str = "raw:bf16"
  exact: bool = True
  out: pathlib.Path | None = None


def smallest_equal_bucket(
  model: str, dtype: str, buckets: tuple[int, ...], num_slots: int
) -> int:
  """Returns the smallest bucket from which on logits are bit-equal.

  Raises:
    ValueError: not even the two largest agree: bits depend on the bucket here,
      and a flip rate must be measured (`experiments.study bit_equality`).
  """
  tokenizer = models.load_tokenizer(model)
  text = tokenizer.encode(_rundir.bundled_prompts()[0].text)[:64]
  prober = _bits.Prober(*_bits.load_whole(model, dtype))
  found = None
  reference, *others = _bits.ways(
    buckets=buckets, num_slots=(num_slots, 4 * num_slots)
  )
  want = prober.logits(text, reference)
  for bucket in reversed(buckets[:-1]):
    mine = [way for way in others if way.bucket == bucket]
    if any(
      _bits.compare(want, prober.logits(text, way)).different for way in mine
    ):
      break
    found = bucket
  if found is None:
    raise ValueError(
      f"row_buckets = {buckets}: logits in {dtype} depend on the bucket here"
    )
  return found


async def measure(
  settings: Profile, dtype: str, directory: pathlib.Path
) -> tuple[StageProfile, StageProfile]:
  """Returns a ring's stage times, medians: back to back, and as in laps."""
  cluster = local_cluster(
    num_stages=settings.stages,
    model=settings.model,
    dtype=dtype,
    codec=settings.codec,
    shape=StageShape(
      row_buckets=settings.row_buckets,
      slot_buckets=(settings.num_slots,),
      exact=settings.exact,
    ),
  )
  here = directory / dtype
  here.mkdir(parents=True, exist_ok=True)
  with _local.spawn(cluster, here):
    async with SocketRing(
      cluster,
      model_hash=models.model_hash(settings.model),
      hops=[wire.LinkShaper()] * (settings.stages + 1),
    ) as ring:
      rounds = [
        await ring.measure(
          num_slots=settings.num_slots, repeats=settings.repeats
        )
        for _ in range(settings.rounds)
      ]
      laps = await ring.profile(
        num_slots=settings.num_slots,
        repeats=settings.rounds * settings.repeats,
      )
  alone = np.median(np.asarray(rounds), axis=0).tolist()
  return _arms.profile_of(cluster, alone), _arms.profile_of(cluster, laps)


def whole_model_ms(profile: StageProfile) -> dict[int, float]:
  """Returns milliseconds through all stages by row bucket, links apart."""
  return {b: 1e3 * float(profile.stage_s(b).sum()) for b in profile.buckets}


def products_ms(
  model: str, dtype: str, buckets: tuple[int, ...], *, repeats: int
) -> dict[int, float]:
  """Returns milliseconds of the model's matrix products alone, in one process.

  What no other part of a stage can go below on this machine.
  """
  params, _ = _bits.load_whole(model, dtype)

  def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jax.lax.dot_general(
      x.astype(weight.dtype),
      weight,
      (((1,), (1,)), ((), ())),
      preferred_element_type=jnp.float32,
    )

  @jax.jit
  def products(params: models.StageParams, x: jax.Array) -> jax.Array:
    for layer in params.layers:
      heads = product(x, layer.wqkv)[:, : layer.wo.shape[1]]
      x = x + product(heads, layer.wo)
      wide = product(x, layer.w_gate_up)[:, : layer.w_down.shape[1]]
      x = x + product(wide, layer.w_down)
    assert params.head is not None
    return product(x, params.head)

  found = {}
  for bucket in buckets:
    x = jnp.full((bucket, params.layers[0].wqkv.shape[1]), 1e-3, jnp.float32)
    times = []
    for _ in range(repeats + 1):
      start_s = time.perf_counter()
      jax.block_until_ready(products(params, x))
      times.append(time.perf_counter() - start_s)
    found[bucket] = 1e3 * statistics.median(times[1:])
  return found


def run(settings: Profile) -> dict[str, Any]:
  """Measures, prints, keeps the choice; returns the figures."""
  directory = settings.out or _rundir.new_run_dir("profile")
  directory.mkdir(parents=True, exist_ok=True)
  console = rich.console.Console(width=110)
  chosen: dict[str, Any] = {}
  for dtype in settings.dtypes:
    smallest = smallest_equal_bucket(
      settings.model, dtype, settings.row_buckets, settings.num_slots
    )
    alone, laps = asyncio.run(measure(settings, dtype, directory))
    (directory / f"profile-{dtype}.json").write_text(laps.to_json())
    bare = products_ms(
      settings.model, dtype, settings.row_buckets, repeats=settings.repeats
    )
    totals, in_lap = whole_model_ms(alone), whole_model_ms(laps)
    table = rich.table.Table(
      title=f"{dtype}, {settings.num_slots} slots, {alone.device}: "
      "milliseconds, wall clock"
    )
    table.add_column("rows")
    columns = [f"stage {i}" for i in range(settings.stages)]
    columns += ["whole model", "÷ smallest", "products alone", "÷ smallest"]
    for column in [*columns, "in a lap", "bit-equal"]:
      table.add_column(column, justify="right")
    for bucket, total in totals.items():
      table.add_row(
        str(bucket),
        *(f"{1e3 * t:.1f}" for t in alone.stage_s(bucket)),
        f"{total:.1f}",
        f"{total / totals[smallest]:.2f}",
        f"{bare[bucket]:.1f}",
        f"{bare[bucket] / bare[smallest]:.2f}",
        f"{in_lap[bucket]:.1f}",
        "yes" if bucket >= smallest else "no",
      )
    console.print(table)
    step_ms = totals[smallest]
    if not chosen or step_ms < chosen["step_ms"]:
      chosen = {
        "dtype": dtype,
        "row_buckets": [b for b in settings.row_buckets if b >= smallest],
        "step_ms": step_ms,
        "ratio": totals[settings.row_buckets[-1]] / step_ms,
        "products_ratio": bare[settings.row_buckets[-1]] / bare[smallest],
      }
  path = _setup.choice_path(settings.model)
  _rundir.write_json(path, chosen)
  console.print(f"choice kept in {path}; run directory: {directory}")
  figures = {
    "dtype": chosen["dtype"],
    "smallest_bucket": chosen["row_buckets"][0],
    "step_ms": chosen["step_ms"],
    "ratio": chosen["ratio"],
    "products_ratio": chosen["products_ratio"],
  }
  _rundir.write_json(
    directory / "result.json",
    {
      "config": _rundir.config_dict(settings),
      "versions": _rundir.versions(),
      "figures": figures,
    },
  )
  return figures


def main() -> None:
  try:
    settings = tyro.cli(Profile, description=__doc__)
    _setup.keep_freed_memory()
    _setup.use_compilation_cache()
    figures = run(settings)
  except (ValueError, RuntimeError, OSError, SessionFault) as error:
    sys.exit(f"experiments.profile: {error}")
  print(_rundir.figures_line(**figures))


if __name__ == "__main__":
  main()
