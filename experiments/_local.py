# SPDX-License-Identifier: Apache-2.0
"""A ring of stage processes on this host, for as long as a block runs."""

import contextlib
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Generator

from wanspec_jax.worlds import Cluster

_STOP_S = 5.0
_ROOT = pathlib.Path(__file__).resolve().parent.parent


@contextlib.contextmanager
def spawn(
  cluster: Cluster, directory: pathlib.Path
) -> Generator[list[subprocess.Popen]]:
  """Starts the stages of a loopback cluster and stops them at the end.

  Its standbys are started as well, behind the stages.

  Args:
    cluster: see `worlds.local_cluster`.
    directory: gets the cluster file and each process's log.

  Raises:
    RuntimeError: a stage ended or was not up within the cluster's
      `start_deadline_s`; the message ends with its log.
  """
  path = directory / "cluster.toml"
  path.write_text(cluster.to_toml())
  processes: list[subprocess.Popen] = []
  members = [*range(cluster.num_stages), *(s.name for s in cluster.standbys)]
  names = [s.name for s in (*cluster.stages, *cluster.standbys)]
  logs = [directory / f"{name}.log" for name in names]
  try:
    for who, log in zip(members, logs, strict=True):
      processes.append(start_stage(path, who, log))
    await_ready(processes, logs, cluster.start_deadline_s)
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


def start_stage(
  cluster: pathlib.Path, who: int | str, log: pathlib.Path
) -> subprocess.Popen:
  """Starts one stage or standby and returns at once.

  Args:
    cluster: cluster file.
    who: index of the stage, or name of the standby.
    log: gets what it prints; written anew.
  """
  environment = os.environ | {
    # Several processes share one GPU, where there is one.
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
    # From any working directory, which relative paths go on to mean.
    "PYTHONPATH": os.pathsep.join(
      filter(None, (str(_ROOT), os.environ.get("PYTHONPATH")))
    ),
  }
  with log.open("w") as out:
    return subprocess.Popen(
      [
        sys.executable,
        "-m",
        "experiments.serve",
        "--cluster",
        str(cluster.resolve()),
        "--stage" if isinstance(who, int) else "--standby",
        str(who),
      ],
      stdout=out,
      stderr=subprocess.STDOUT,
      env=environment,
    )


def await_ready(
  processes: list[subprocess.Popen],
  logs: list[pathlib.Path],
  deadline_s: float,
) -> None:
  """Returns once all stages listen.

  Raises:
    RuntimeError: one ended or was not up in time; its log is in the message.
  """
  start_s = time.monotonic()
  waiting = list(range(len(processes)))
  while waiting:
    for i in list(waiting):
      text = logs[i].read_text(errors="replace")
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
