# SPDX-License-Identifier: Apache-2.0
"""Runs one stage here: `python -m experiments.serve --cluster F --stage 0`.

With `--standby NAME` in place of `--stage` it waits to take the place of the
stage that this standby of the cluster file is for. Loads only this stage's
layers, compiles every row bucket, then listens. Prints one line `ready NAME
HOST:PORT` when it does. Ends on SIGINT or SIGTERM.
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
    standby: name of the standby that runs here instead.
    warm_slots: cache sizes to compile for before listening; the first slot
      bucket by default.
  """

  cluster: pathlib.Path
  stage: int | None = None
  standby: str | None = None
  warm_slots: tuple[int, ...] = ()


def place(cluster: Cluster, args: Serve) -> tuple[Cluster, int]:
  """Returns the ring as whoever runs here sees it, and the position there.

  Raises:
    ValueError: not exactly one of `stage` and `standby` is given, or there is
      none such.
  """
  if (args.stage is None) == (args.standby is None):
    raise ValueError("give one of --stage and --standby")
  if args.standby is not None:
    cluster = cluster.standing_in(args.standby)
    return cluster, cluster.index(args.standby)
  assert args.stage is not None
  if not 0 <= args.stage < cluster.num_stages:
    raise ValueError(
      f"--stage {args.stage}: the cluster file has stages 0 to "
      f"{cluster.num_stages - 1}"
    )
  return cluster, args.stage


async def _serve(args: Serve) -> None:
  cluster, index = place(Cluster.from_toml(args.cluster), args)
  here = cluster.stages[index]
  buckets = cluster.shape.slot_buckets
  for num_slots in args.warm_slots:
    if num_slots not in buckets:
      raise ValueError(
        f"--warm-slots {num_slots}: must be one of the slot_buckets {buckets}"
      )
  # What would fail at the end is tried before minutes of loading.
  cluster.tls(here.name)
  await _try_port(here)
  stage = load_stage(cluster, index)
  for num_slots in args.warm_slots or buckets[:1]:
    stage.measure(num_slots=num_slots, repeats=0)
  server = StageServer(
    stage,
    cluster=cluster,
    index=index,
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
    format=f"%(asctime)s {args.standby or f'stage {args.stage}'}: %(message)s",
  )
  _setup.keep_freed_memory()
  _setup.use_compilation_cache()
  try:
    asyncio.run(_serve(args))
  except (ValueError, OSError) as error:
    sys.exit(f"experiments.serve: {error}")


if __name__ == "__main__":
  main()
