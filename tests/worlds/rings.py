# SPDX-License-Identifier: Apache-2.0
"""Rings of stage servers in one event loop, on loopback."""

import asyncio
import contextlib
import dataclasses
import gc
import time

import numpy as np

import drafters
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.messages import Open, Run, Sampling
from wanspec_jax.worlds import (
  Cluster,
  Driver,
  ReplayStage,
  SocketRing,
  StageHost,
  StageServer,
  StageShape,
)
from wanspec_jax.worlds._local import free_ports

SHAPE = StageShape(row_buckets=(4, 8), slot_buckets=(64, 128))
HASH = "0123456789abcdef"
TEXT = tuple(7 * i * i % 11 for i in range(120))
PROMPT = 3


class Recorded:
  """A stage server's stage without a model.

  Attributes:
    hook: called with every run, on the stage's thread.
    num_resets: sessions so far.
  """

  def __init__(self, *, texts=None, hook=None):
    self.shape = SHAPE
    self.num_traces = {}
    self.hook = hook
    self.num_resets = 0
    self._texts = texts
    self._fresh()

  def _fresh(self):
    row_bytes = 16 if self._texts is None else None
    self._stage = ReplayStage(
      capacity=SHAPE.capacity, row_bytes=row_bytes, texts=self._texts
    )

  def reset(self):
    self.num_resets += 1
    self._fresh()

  def process(self, run, payload=None):
    if self.hook is not None:
      self.hook(run)
    return self._stage.process(run, payload)

  def cancel(self, cancel):
    self._stage.cancel(cancel)

  def measure(self, *, num_slots, repeats):
    return {b: b * num_slots * repeats * 1e-6 for b in SHAPE.row_buckets}


def recorded(num_stages, texts=None):
  """Returns stages that draw from `{sequence: text}`."""
  if texts is None:
    texts = dict.fromkeys(range(8), TEXT)
  return [Recorded() for _ in range(num_stages - 1)] + [Recorded(texts=texts)]


def cluster_of(num_stages, **settings):
  """Returns a loopback ring of one layer per stage."""
  hosts = tuple(
    StageHost(name=f"stage-{i}", host="127.0.0.1", port=port, layers=(i, 1))
    for i, port in enumerate(free_ports(num_stages))
  )
  defaults = {
    "shape": SHAPE,
    "model": "random",
    "dtype": "float32",
    "codec": "raw:f32",
    "peer_deadline_s": 2.0,
    "start_deadline_s": 5.0,
  }
  return Cluster(stages=hosts, **defaults | settings)


def server_of(stage, cluster, index, model_hash=HASH):
  return StageServer(stage, cluster=cluster, index=index, model_hash=model_hash)


@contextlib.asynccontextmanager
async def listening(*servers):
  """Yields the tasks of servers that listen; they are cancelled at the end."""
  async with contextlib.AsyncExitStack() as stack:
    tasks = []
    for server in servers:
      ready = asyncio.get_running_loop().create_future()
      task = asyncio.create_task(server.serve(ready.set_result))
      stack.push_async_callback(cancel, task)
      await asyncio.wait(
        [task, ready], return_when=asyncio.FIRST_COMPLETED, timeout=5
      )
      if task.done():
        task.result()
      assert ready.done()
      tasks.append(task)
    yield tasks


@contextlib.asynccontextmanager
async def served(num_stages, stages=None, **settings):
  """Yields `(cluster, stages)` of a ring that is up."""
  cluster = cluster_of(num_stages, **settings)
  stages = stages or recorded(num_stages)
  servers = [server_of(stage, cluster, i) for i, stage in enumerate(stages)]
  async with listening(*servers):
    yield cluster, stages


async def cancel(task):
  task.cancel()
  await asyncio.gather(task, return_exceptions=True)


def ring_of(cluster, **settings):
  return SocketRing(cluster, **{"model_hash": HASH} | settings)


def driver_of(
  *, drafter=None, policy=None, max_nodes=0, shape=SHAPE, on_emit=None
):
  """Returns a fresh engine; lockstep without drafts by default."""
  policy = policy or sch.lockstep(max_nodes)
  engine = sch.init(
    policy,
    sch.Costs.constant(1.0, max_rows=shape.max_rows),
    capacity=shape.capacity,
    prefill_rows=shape.max_rows,
  )
  return Driver(engine, drafter or drafters.none(), on_emit=on_emit)


def request_of(num_tokens=10, *, text=TEXT, prompt=PROMPT, **sampling):
  return sch.Request(
    prompt=tuple(text[:prompt]),
    max_new_tokens=num_tokens,
    sampling=Sampling(**sampling),
  )


async def decode(ring, num_tokens=10, **settings):
  """Returns the tokens of one request of the recorded text."""
  result = await ring.run(
    driver_of(**settings), [(0.0, request_of(num_tokens))]
  )
  return tuple(result.outcomes[0].tokens)


async def works(cluster):
  """Asserts that a ring serves a session of its own."""
  async with ring_of(cluster) as ring:
    assert await decode(ring, 5) == TEXT[PROMPT : PROMPT + 5]


def run(main):
  """Runs a coroutine function; nothing may be left over or go unnoticed."""
  unnoticed = []

  async def watched():
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: unnoticed.append(context))
    result = await main()
    gc.collect()  # an exception that nobody fetched is told on collection
    await asyncio.sleep(0)
    return result, asyncio.all_tasks() - {asyncio.current_task()}

  gc.freeze()  # what was there before is none of this run's
  result, left = asyncio.run(watched())
  gc.collect()
  gc.unfreeze()
  assert not unnoticed
  assert not left
  return result


async def until(condition, deadline_s=3.0):
  """Waits for a condition that must come true."""
  start_s = time.monotonic()
  while not condition():
    assert time.monotonic() - start_s < deadline_s, "never came true"
    await asyncio.sleep(0.01)


def hello_of(cluster, index=0, **changes):
  """Returns a coordinator's introduction to a stage."""
  return {
    "name": "coordinator",
    "session": "0011223344556677",
    "hops": None,
    "role": "ring",
    **cluster.agreement(index, HASH),
  } | changes


@contextlib.asynccontextmanager
async def introduced(cluster, index=0, **changes):
  """Yields a channel to a stage that has accepted an introduction."""
  there = cluster.stages[index]
  async with await wire.connect(
    there.host, there.port, peer=there.name, link="test"
  ) as channel:
    await wire.offer(channel, hello_of(cluster, index, **changes))
    yield channel


async def ready(channel):
  """Takes frames until the ring is ready."""
  while True:
    frame = await channel.recv(deadline_s=5)
    message = wire.decode_control(frame)
    assert frame.kind == wire.Kind.CONTROL, message
    if message["op"] == "ready":
      return message["stages"]


async def fault_on(channel, deadline_s=5):
  """Returns `(stage, cause)` of the FAULT that comes."""
  while True:
    frame = await channel.recv(deadline_s=deadline_s)
    if frame.kind == wire.Kind.FAULT:
      message = wire.decode_control(frame)
      return message["stage"], message["cause"]


def without(cluster, *names):
  """Returns the cluster with its stages at other ports: nobody is there."""
  ports = free_ports(cluster.num_stages)
  return dataclasses.replace(
    cluster,
    stages=tuple(
      dataclasses.replace(host, port=port) if host.name in names else host
      for host, port in zip(cluster.stages, ports, strict=True)
    ),
  )


def chain_run(
  *, run_id=0, num_rows=3, sequence=0, opens=True, ids=None, parents=None
):
  """Returns a run of a chain, or of anything else that is asked for."""
  ids = list(range(num_rows)) if ids is None else ids
  parents = [max(i - 1, 0) for i in ids] if parents is None else parents
  return Run(
    run_id=run_id,
    opens=(Open(sequence=sequence, sampling=Sampling()),) if opens else (),
    sequences=np.full(len(ids), sequence, np.int32),
    ids=np.asarray(ids, np.int64),
    parents=np.asarray(parents, np.int64),
    tokens=np.zeros(len(ids), np.int32),
    committed=np.zeros(len(ids), bool),
  )


def control(**fields):
  """Returns a CONTROL frame."""
  return wire.encode_control(wire.Kind.CONTROL, fields)


@contextlib.asynccontextmanager
async def fake_next(handler, **settings):
  """Yields a cluster of three whose middle stage runs `handler(channel)`."""
  cluster = cluster_of(
    3, **{"peer_deadline_s": 0.5, "start_deadline_s": 1.0} | settings
  )
  there = cluster.stages[1]
  first, _, last = recorded(3)
  async with (
    listening(server_of(first, cluster, 0), server_of(last, cluster, 2)),
    await wire.listen(handler, port=there.port),
  ):
    yield cluster
