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

import tyro

from experiments import _setup
from wanspec_jax import models, wire
from wanspec_jax.worlds import Cluster, StageHost, StageServer, load_stage


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


async def _serve(args: Serve) -> None:
  cluster = Cluster.from_toml(args.cluster)
  if not 0 <= args.stage < cluster.num_stages:
    raise ValueError(
      f"--stage {args.stage}: the cluster file has stages 0 to "
      f"{cluster.num_stages - 1}"
    )
  here = cluster.stages[args.stage]
  buckets = cluster.shape.slot_buckets
  for num_slots in args.warm_slots:
    if num_slots not in buckets:
      raise ValueError(
        f"--warm-slots {num_slots}: must be one of the slot_buckets {buckets}"
      )
  # What would fail at the end is tried before minutes of loading.
  cluster.tls(here.name)
  await _try_port(here)
  stage = load_stage(cluster, args.stage)
  for num_slots in args.warm_slots or buckets[:1]:
    stage.measure(num_slots=num_slots, repeats=0)
  server = StageServer(
    stage,
    cluster=cluster,
    index=args.stage,
    model_hash=models.model_hash(cluster.model),
  )

  def on_ready(port: int) -> None:
    print(f"ready {here.name} {here.host}:{port}", flush=True)

  task = asyncio.current_task()
  assert task is not None
  loop = asyncio.get_running_loop()
  for name in (signal.SIGINT, signal.SIGTERM):
    loop.add_signal_handler(name, task.cancel)
  with contextlib.suppress(asyncio.CancelledError):
    await server.serve(on_ready)


async def _try_port(here: StageHost) -> None:
  """Raises `OSError` naming the address if it cannot be listened on."""

  async def ignore(channel: wire.Channel) -> None:
    del channel

  try:
    listener = await wire.listen(ignore, host=here.host, port=here.port)
  except OSError as error:
    raise OSError(
      f"{here.name} cannot listen on {here.host}:{here.port} ({error})"
    ) from error
  await listener.close()


def main() -> None:
  args = tyro.cli(Serve, description=__doc__)
  logging.basicConfig(
    level=logging.WARNING,
    format=f"%(asctime)s stage {args.stage}: %(message)s",
  )
  _setup.keep_freed_memory()
  _setup.use_compilation_cache()
  try:
    asyncio.run(_serve(args))
  except (ValueError, OSError) as error:
    sys.exit(f"experiments.serve: {error}")


if __name__ == "__main__":
  main()
