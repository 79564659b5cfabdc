# SPDX-License-Identifier: Apache-2.0
"""A ring of stage processes on this host, for as long as a block runs."""

import contextlib
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from wanspec_jax import models
from wanspec_jax.worlds import Cluster, StageHost, StageShape

_STOP_S = 5.0


def free_ports(count: int) -> list[int]:
  """Returns ports of the loopback interface that nobody listens on now."""
  with contextlib.ExitStack() as stack:
    sockets = [
      stack.enter_context(socket.create_server(("127.0.0.1", 0)))
      for _ in range(count)
    ]
    return [s.getsockname()[1] for s in sockets]


def local_cluster(
  *,
  num_stages: int,
  model: str,
  dtype: str,
  codec: str,
  shape: StageShape,
  cuts: Sequence[tuple[int, int]] | None = None,
  **settings,
) -> Cluster:
  """Returns a cluster of `num_stages` stages on loopback, layers spread evenly.

  Args:
    num_stages: `P`.
    model: as for `resolve_model`.
    dtype: of the weights.
    codec: of the links between stages.
    shape: compiled sizes.
    cuts: `(first_layer, num_layers)` of each stage, to cut otherwise.
    **settings: further fields of `Cluster`.
  """
  config = models.load_config(model)
  if num_stages > config.num_layers:
    raise ValueError(
      f"stages = {num_stages}: {model} has {config.num_layers} layers"
    )
  cuts = cuts or models.even_cuts(config.num_layers, num_stages)
  return Cluster(
    stages=tuple(
      StageHost(
        name=f"stage-{i}", host="127.0.0.1", port=port, layers=tuple(cut)
      )
      for i, (port, cut) in enumerate(
        zip(free_ports(num_stages), cuts, strict=True)
      )
    ),
    model=model,
    dtype=dtype,
    codec=codec,
    shape=shape,
    **settings,
  )


@contextlib.contextmanager
def spawn(
  cluster: Cluster, directory: pathlib.Path
) -> Iterator[list[subprocess.Popen]]:
  """Starts the stages of a loopback cluster and stops them at the end.

  Args:
    cluster: see `local_cluster`.
    directory: gets the cluster file and each stage's log.

  Raises:
    RuntimeError: a stage ended or was not up within the cluster's
      `start_deadline_s`; the message ends with its log.
  """
  path = directory / "cluster.toml"
  path.write_text(cluster.to_toml())
  environment = os.environ | {
    # Several processes share one GPU, where there is one.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
  }
  processes: list[subprocess.Popen] = []
  logs = [directory / f"{stage.name}.log" for stage in cluster.stages]
  root = pathlib.Path(__file__).resolve().parent.parent
  try:
    for i, log in enumerate(logs):
      with log.open("w") as out:
        processes.append(
          subprocess.Popen(
            [
              sys.executable,
              "-m",
              "experiments.serve",
              "--cluster",
              str(path.resolve()),
              "--stage",
              str(i),
            ],
            stdout=out,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=root,
          )
        )
    _await_ready(processes, logs, cluster.start_deadline_s)
    yield processes
  finally:
    for process in processes:
      if process.poll() is None:
        process.send_signal(signal.SIGCONT)  # a stopped one must hear the next
        process.terminate()
    for process in processes:
      with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(_STOP_S)
      if process.poll() is None:
        process.kill()
        process.wait()


def _await_ready(
  processes: list[subprocess.Popen],
  logs: list[pathlib.Path],
  deadline_s: float,
) -> None:
  start_s = time.monotonic()
  waiting = list(range(len(processes)))
  while waiting:
    for i in list(waiting):
      text = logs[i].read_text()
      if any(line.startswith("ready ") for line in text.splitlines()):
        waiting.remove(i)
      elif processes[i].poll() is not None:
        raise RuntimeError(
          f"{logs[i].stem} ended with code {processes[i].returncode}:\n"
          f"{text[-2000:]}"
        )
      elif time.monotonic() - start_s > deadline_s:
        raise RuntimeError(
          f"{logs[i].stem} was not up within {deadline_s:g} s:\n{text[-2000:]}"
        )
    time.sleep(0.05)
