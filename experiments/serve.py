# SPDX-License-Identifier: Apache-2.0
"""Runs one stage here: `python -m experiments.serve --cluster F --stage 0`.

Loads only this stage's layers, compiles every row bucket, then listens. Prints
one line `ready NAME HOST:PORT` when it does. Ends on SIGINT or SIGTERM.
"""

import asyncio
import contextlib
import dataclasses
import logging
import pathlib
import signal
import sys

import jax.numpy as jnp
import tyro

from experiments import _setup
from wanspec_jax import codecs, models, verify
from wanspec_jax.rollback import mask_rollback
from wanspec_jax.worlds import Cluster, Stage, StageServer


@dataclasses.dataclass(frozen=True, kw_only=True)
class Serve:
  """One stage of a ring.

  Attributes:
    cluster: cluster file (TOML).
    stage: index of the stage that runs here.
    warm_slots: cache sizes to compile for before listening; the first slot
      bucket by default.
  """

  cluster: pathlib.Path
  stage: int
  warm_slots: tuple[int, ...] = ()


def load(cluster: Cluster, index: int) -> Stage:
  """Returns the stage with its own layers loaded, nothing compiled yet."""
  config = models.load_config(cluster.model)
  total = sum(host.layers[1] for host in cluster.stages)
  if total != config.num_layers:
    raise ValueError(
      f"[[stage]] layers: {total} in all, {cluster.model} has "
      f"{config.num_layers}"
    )
  first, count = cluster.stages[index].layers
  params = models.load_stage(
    cluster.model,
    config,
    first_layer=first,
    num_layers=count,
    dtype=jnp.dtype(cluster.dtype),
  )
  verifiers = {"race": verify.race, "greedy": verify.greedy}
  return Stage(
    config=config,
    params=params,
    shape=cluster.shape,
    codec_in=None if params.embed is not None else codecs.parse(cluster.codec),
    codec_out=None if params.head is not None else codecs.parse(cluster.codec),
    rollback=mask_rollback(),
    verifier=verifiers[cluster.verifier](),
  )


async def _serve(args: Serve) -> None:
  cluster = Cluster.from_toml(args.cluster)
  if not 0 <= args.stage < cluster.num_stages:
    raise ValueError(
      f"--stage {args.stage}: the cluster file has stages 0 to "
      f"{cluster.num_stages - 1}"
    )
  stage = load(cluster, args.stage)
  for num_slots in args.warm_slots or cluster.shape.slot_buckets[:1]:
    if num_slots not in cluster.shape.slot_buckets:
      raise ValueError(
        f"--warm-slots {num_slots}: must be one of the slot_buckets "
        f"{cluster.shape.slot_buckets}"
      )
    stage.measure(num_slots=num_slots, repeats=0)
  server = StageServer(
    stage,
    cluster=cluster,
    index=args.stage,
    model_hash=models.model_hash(cluster.model),
  )
  here = cluster.stages[args.stage]

  def on_ready(port: int) -> None:
    print(f"ready {here.name} {here.host}:{port}", flush=True)

  task = asyncio.current_task()
  assert task is not None
  loop = asyncio.get_running_loop()
  for name in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(name, task.cancel)
  with contextlib.suppress(asyncio.CancelledError):
    await server.serve(on_ready)


def main() -> None:
  args = tyro.cli(Serve, description=__doc__)
  logging.basicConfig(
    level=logging.WARNING,
    format=f"%(asctime)s stage {args.stage}: %(message)s",
  )
  _setup.use_compilation_cache()
  try:
    asyncio.run(_serve(args))
  except (ValueError, OSError) as error:
    sys.exit(f"experiments.serve: {error}")


if __name__ == "__main__":
  main()
