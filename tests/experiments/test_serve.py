# SPDX-License-Identifier: Apache-2.0
"""Stage processes that are killed, stopped and told nonsense."""

import asyncio
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time

import pytest

from experiments import _local, _setup, serve
from tests.worlds import rings
from wanspec_jax import models, wire
from wanspec_jax.worlds import (
  Cluster,
  SessionFault,
  SocketRing,
  StageShape,
  local_cluster,
)

REPOSITORY = pathlib.Path(__file__).parents[2]
MODEL = REPOSITORY / "tests" / "golden" / "families" / "llama_llama3"
SHAPE = StageShape(row_buckets=(8,), slot_buckets=(128,))
PEER_DEADLINE_S = 1.5
# The coordinator waits another second for the word of whoever saw it first.
NAMED_S = PEER_DEADLINE_S + 2.5


def make_cluster(num_stages=3):
  return local_cluster(
    num_stages=num_stages,
    model=str(MODEL),
    dtype="float32",
    codec="raw:f32",
    shape=SHAPE,
    peer_deadline_s=PEER_DEADLINE_S,
    start_deadline_s=60.0,
  )


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
  """Yields `(cluster, directory, processes)` of three stages that are up."""
  directory = tmp_path_factory.mktemp("ring")
  cluster = make_cluster()
  with pytest.MonkeyPatch.context() as patch:
    patch.setenv(_setup.CACHE_VARIABLE, str(directory / "cache"))
    with _local.spawn(cluster, directory) as processes:
      yield cluster, directory, processes
    assert [process.returncode for process in processes] == [0, 0, 0]
  for stage in cluster.stages:
    log = (directory / f"{stage.name}.log").read_text()
    assert "Traceback" not in log
    assert "never retrieved" not in log


async def decode(cluster, num_tokens, on_emit=None):
  """Returns the tokens of one request in a session of its own."""
  hops = [wire.LinkShaper(delay_s=0.005)] * 4
  async with SocketRing(
    cluster, model_hash=models.model_hash(MODEL), hops=hops
  ) as session:
    driver = rings.driver_of(shape=SHAPE, on_emit=on_emit)
    request = rings.request_of(num_tokens)
    result = await session.run(driver, [(0.0, request)])
    return result.outcomes[0].tokens


@pytest.fixture(scope="module")
def expected(ring):
  tokens = asyncio.run(decode(ring[0], 8))
  assert len(tokens) == 8
  return tokens


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL])
@pytest.mark.parametrize("index", [0, 1, 2])
def test_a_stage_that_dies_or_freezes_mid_decode_is_named(
  ring, expected, how, index
):
  """In time, whichever it is; those that are left serve the next session."""
  cluster, directory, processes = ring
  hit_s = []

  def hit(sequence, tokens):
    del sequence, tokens
    emitted.append(1)
    if len(emitted) == 5:
      os.kill(processes[index].pid, how)
      hit_s.append(time.monotonic())

  emitted = []
  with pytest.raises(SessionFault) as caught:
    asyncio.run(decode(cluster, 100, hit))
  assert time.monotonic() - hit_s[0] < NAMED_S
  assert caught.value.stage == f"stage-{index}"
  cause = caught.value.cause
  if how == signal.SIGSTOP:  # its socket stays open
    assert f"no answer for {PEER_DEADLINE_S:g} s" in cause
    os.kill(processes[index].pid, signal.SIGCONT)
    time.sleep(0.3)  # it finds out that it was given up
  else:
    assert "connection" in cause
    processes[index].wait()
    log = directory / f"stage-{index}.log"
    processes[index] = _local.start_stage(
      directory / "cluster.toml", index, log
    )
    _local.await_ready([processes[index]], [log], 60.0)
  assert asyncio.run(decode(cluster, 8)) == expected


@pytest.mark.parametrize(
  ("how", "stage", "cause"),
  [(signal.SIGKILL, 0, "connection"), (signal.SIGSTOP, 1, "no answer for")],
)
def test_a_standby_takes_over_mid_decode(
  monkeypatch, tmp_path, how, stage, cause
):
  """Processes and a model, T = 0.8: the text is that of an undisturbed ring."""
  cluster = local_cluster(
    num_stages=2,
    model=str(MODEL),
    dtype="float32",
    codec="raw:f32",
    shape=SHAPE,
    peer_deadline_s=PEER_DEADLINE_S,
    start_deadline_s=60.0,
    standbys=(stage,),
  )
  monkeypatch.setenv(_setup.CACHE_VARIABLE, str(tmp_path / "cache"))
  emitted = []

  async def text(on_emit=None):
    hops = [wire.LinkShaper(delay_s=0.005)] * 3
    async with SocketRing(
      cluster,
      model_hash=models.model_hash(MODEL),
      hops=hops,
      recover=True,
    ) as session:
      driver = rings.driver_of(shape=SHAPE, on_emit=on_emit)
      request = rings.request_of(40, temperature=0.8, seed=3)
      return await session.run(driver, [(0.0, request)])

  def hit(sequence, tokens):
    del sequence, tokens
    emitted.append(1)
    if len(emitted) == 9:
      os.kill(processes[stage].pid, how)

  with _local.spawn(cluster, tmp_path) as processes:
    assert len(processes) == 3
    expected = asyncio.run(text())
    disturbed = asyncio.run(text(hit))
  assert expected.faults == []
  assert len(expected.outcomes[0].tokens) == 40
  assert disturbed.outcomes[0].tokens == expected.outcomes[0].tokens
  ((_, name, why),) = disturbed.faults
  assert name == f"stage-{stage}"
  assert cause in why


def run_main(monkeypatch, *args):
  """Returns the message that `experiments.serve` ends with."""
  monkeypatch.setattr(sys, "argv", ["serve", *map(str, args)])
  monkeypatch.setattr(_setup, "use_compilation_cache", lambda: None)
  with pytest.raises(SystemExit) as caught:
    serve.main()
  message = str(caught.value.code)
  assert message.startswith("experiments.serve: ")
  return message


@pytest.mark.parametrize(
  ("old", "new", "args", "message"),
  [
    ("[ring]", "[ring]\ncodek = 1", (), "unknown ['codek']"),
    ("[0, 2]", "[0, 1]", (), "stage-1"),
    ("[2, 1]", "[2, 7]", (), "9 in all"),
    (str(MODEL), "no/such/model", (), "model 'no/such/model'"),
    (str(MODEL), str(MODEL.parent), (), "config.json is missing"),
    ("", "", ("--stage", 2), "--stage 2: the cluster file has stages 0 to 1"),
    ("", "", ("--stage", -1), "--stage -1: the cluster file has stages"),
    ("", "", ("--stage", 1, "--standby", "a"), "one of --stage and --standby"),
    ("", "", ("--standby", "a"), "standby 'a': must be one of []"),
    ("", "", ("--warm-slots", 5), "--warm-slots 5: must be one of"),
    ("[ring]", '[ring]\nkeys = "none"', (), "ca.pem: no such certificate"),
  ],
)
def test_what_is_wrong_is_said_at_once(
  monkeypatch, tmp_path, old, new, args, message
):
  text = make_cluster(2).to_toml()
  assert old in text
  path = tmp_path / "cluster.toml"
  path.write_text(text.replace(old, new))
  if "--stage" not in args and "--standby" not in args:
    args = ("--stage", 1, *args)
  assert message in run_main(monkeypatch, "--cluster", path, *args)


def test_a_port_that_is_taken(monkeypatch, tmp_path):
  cluster = make_cluster(2)
  path = tmp_path / "cluster.toml"
  path.write_text(cluster.to_toml())
  here = cluster.stages[1]
  with socket.create_server((here.host, here.port)):
    said = run_main(monkeypatch, "--cluster", path, "--stage", 1)
  assert f"stage-1 cannot listen on 127.0.0.1:{here.port}" in said
  assert "Address already in use" in said


def test_a_process_ends_with_a_message_and_no_traceback(tmp_path):
  done = subprocess.run(
    [
      *(sys.executable, "-m", "experiments.serve", "--stage", "0"),
      *("--cluster", str(tmp_path / "none.toml")),
    ],
    cwd=REPOSITORY,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 1
  assert done.stdout == ""
  (line,) = done.stderr.splitlines()
  assert line.startswith("experiments.serve: cluster file ")
  assert "none.toml: cannot be read" in line


def test_a_ring_that_does_not_come_up_says_why(tmp_path):
  """The log of the stage that failed is in the message; no process is left."""
  cluster = make_cluster(2)
  here = cluster.stages[1]
  with (
    socket.create_server((here.host, here.port)),
    pytest.raises(RuntimeError, match="Address already in use") as caught,
    _local.spawn(cluster, tmp_path),
  ):
    pass
  assert "stage-1 ended with code 1" in str(caught.value)
  assert Cluster.from_toml(tmp_path / "cluster.toml") == cluster
  with socket.create_server((cluster.stages[0].host, cluster.stages[0].port)):
    pass
