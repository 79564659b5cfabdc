# SPDX-License-Identifier: Apache-2.0
"""Scenarios of the chaos study over sockets on loopback, wall clock.

Every stage is a `StageServer` behind a relay that can hold its bytes back (a
stall, a black hole) or break off (a kill). Links are emulated as ever. So that
a scenario takes seconds, all its times are scaled to a lap of at most 40 ms,
and texts end at 64 tokens; stages take what they take. A killed stage is broken
off, black-holed or shut down, and its standby takes over; a lost coordinator is
a ring that is left in mid-flight and opened anew from the client's mirror.
"""

import asyncio
import contextlib
import dataclasses
import logging
import random
from collections.abc import Sequence
from typing import Any

from experiments.studies import _scenarios
from experiments.studies._scenarios import Scenario
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import (
  Cluster,
  Driver,
  Mirror,
  SocketRing,
  StageHost,
  StageServer,
  StageShape,
  Standby,
  ToyStage,
)
from wanspec_jax.worlds._local import free_ports

_LAP_S = 0.04
_MAX_TOKENS = 64
_STALL_S = 0.4  # longest, below the deadline
_DEADLINE_S = 1.0
_LIMIT_S = 60.0  # a scenario that takes longer hangs
_HASH = "0" * 16
_KILLS = ("broken off", "black-holed", "shut down")


class _Served:
  """What a `StageServer` asks of a stage, of a toy."""

  def __init__(self, stage: ToyStage, shape: StageShape):
    self.shape = shape
    self.num_traces: dict[str, int] = {}
    self.reset = stage.reset
    self.cancel = stage.cancel
    self.process = stage.process

  def measure(self, *, num_slots: int, repeats: int) -> dict[int, float]:
    del num_slots, repeats
    return dict.fromkeys(self.shape.row_buckets, 0.0)


class Relay:
  """Passes the bytes of one port on to another, until it does not."""

  def __init__(self, port: int, target: int):
    self._ports = port, target
    self._flows = asyncio.Event()
    self._flows.set()
    self._writers: list[asyncio.StreamWriter] = []
    self._tasks: set[asyncio.Task[Any]] = set()

  async def __aenter__(self) -> "Relay":
    self._server = await asyncio.start_server(
      self._serve, "127.0.0.1", self._ports[0]
    )
    return self

  async def __aexit__(self, *exc_info: object) -> None:
    self.break_off()
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  async def _serve(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    task = asyncio.current_task()
    assert task is not None
    self._tasks.add(task)
    self._writers.append(writer)
    try:
      there, back = await asyncio.open_connection("127.0.0.1", self._ports[1])
      self._writers.append(back)
      await asyncio.gather(self._pump(reader, back), self._pump(there, writer))
    except (OSError, asyncio.CancelledError):
      pass  # a task of the server's making: nobody else waits for it
    finally:
      writer.close()
      self._tasks.discard(task)

  async def _pump(
    self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
  ) -> None:
    with contextlib.suppress(OSError):
      while data := await reader.read(2**16):
        await self._flows.wait()
        writer.write(data)
        await writer.drain()
    writer.close()

  def hold(self) -> None:
    """Holds everything back from now on."""
    self._flows.clear()

  def release(self) -> None:
    """Lets everything pass again."""
    self._flows.set()

  def break_off(self) -> None:
    """Resets all connections and takes no more."""
    self._server.close()
    for writer in self._writers:
      writer.transport.abort()


def scaled(case: Scenario) -> Scenario:
  """Returns the scenario at a lap of at most 40 ms."""
  factor = min(1.0, _LAP_S / sum(case.delays_s))
  weather = case.weather
  return dataclasses.replace(
    case,
    delays_s=tuple(t * factor for t in case.delays_s),
    bandwidth_bps=case.bandwidth_bps / factor,
    jitter_s=case.jitter_s * factor,
    level_s=case.level_s * factor,
    tokens=min(case.tokens, _MAX_TOKENS),
    lost_at_s=None if case.lost_at_s is None else case.lost_at_s * factor,
    weather=dataclasses.replace(
      weather,
      stalls=tuple(
        stall._replace(
          start_s=stall.start_s * factor,
          end_s=stall.start_s * factor
          + min(_STALL_S, stall.end_s - stall.start_s),
        )
        for stall in weather.stalls
      ),
      kills=tuple(
        kill._replace(time_s=kill.time_s * factor) for kill in weather.kills
      ),
    ),
  )


def play(seed: int) -> dict[str, Any]:
  """Returns what became of a scenario over sockets."""
  # Sessions that end on a fault say so: here that is the point.
  logging.getLogger("wanspec_jax.worlds").setLevel(logging.ERROR)
  return asyncio.run(_play(scaled(_scenarios.scenario(seed))))


async def _play(case: Scenario) -> dict[str, Any]:
  texts = _scenarios.texts_of(case)
  mirror = Mirror(_scenarios.requests_of(case, texts))
  policy = _scenarios.policy_of(case)
  kill = random.Random(case.seed + 3).choice(_KILLS)
  report: dict[str, Any] = {
    "seed": case.seed,
    "policy": policy.name,
    "kill": kill if case.weather.kills else None,
    "lost": case.lost_at_s is not None,
    "faults": [],
  }
  reasons: dict[int, str] = {}
  try:
    async with asyncio.timeout(_LIMIT_S), _stages(case) as (cluster, hosts):
      trouble = asyncio.create_task(_trouble(case, hosts, kill))
      try:
        for lost_s in (case.lost_at_s, None):
          result = await _coordinate(
            case, cluster, texts, policy, mirror, lost_s
          )
          if result is not None:
            report["faults"] = [
              f"{s}: {cause}" for _, s, cause in result.faults
            ]
            reasons = {i: o.reason for i, o in result.outcomes.items()}
            break
      finally:
        trouble.cancel()
        await asyncio.gather(trouble, return_exceptions=True)
  except TimeoutError:
    pass
  report["hung"] = sum(reasons.get(i) in (None, "") for i in range(len(texts)))
  report["diverged"] = sum(
    list(mirror.tokens(i)) != text[: case.tokens]
    or reasons.get(i, "length") != "length"
    for i, (_, text) in enumerate(texts)
    if reasons.get(i)
  )
  return report


async def _coordinate(
  case: Scenario,
  cluster: Cluster,
  texts: Any,
  policy: sch.Policy,
  mirror: Mirror,
  lost_s: float | None,
):
  """Returns what one coordinator made of it; None if it was lost."""
  _, costs = _scenarios.world_of(case)
  hops = _scenarios.hops_of(case)

  async def decode():
    async with SocketRing(
      cluster, model_hash=_HASH, hops=hops, lap_deadline_s=10.0, recover=True
    ) as ring:
      driver = Driver(
        sch.init(policy, costs, capacity=_scenarios.SLOTS, prefill_rows=16),
        _scenarios.drafter_of(case, texts),
        on_emit=mirror.on_emit,
      )
      return await ring.run(
        driver,
        [(0.0, request) for request in mirror.requests()],
        draft=sch.DraftCosts(per_level_s=case.level_s),
      )

  task = asyncio.create_task(decode())
  done, _ = await asyncio.wait([task], timeout=lost_s)
  if done:
    return task.result()
  task.cancel()
  await asyncio.gather(task, return_exceptions=True)
  return None


@contextlib.asynccontextmanager
async def _stages(case: Scenario):
  """Yields the cluster and, per stage, its relay and its server's task."""
  num = len(case.stage_s)
  shape = StageShape(row_buckets=(8, 16, 32), slot_buckets=(_scenarios.SLOTS,))
  targets = [kill.stage for kill in case.weather.kills]
  ports = free_ports(2 * num + len(targets))
  outside, inside = ports[:num], ports[num : 2 * num]
  stages = tuple(
    StageHost(name=f"stage-{i}", host="127.0.0.1", port=p, layers=(i, 1))
    for i, p in enumerate(outside)
  )
  cluster = Cluster(
    stages=stages,
    standbys=tuple(
      Standby(
        name=f"spare-{i}", host="127.0.0.1", port=port, stage=f"stage-{stage}"
      )
      for i, (stage, port) in enumerate(
        zip(targets, ports[2 * num :], strict=True)
      )
    ),
    model="random",
    dtype="float32",
    codec="raw:f32",
    shape=shape,
    peer_deadline_s=_DEADLINE_S,
    start_deadline_s=5.0,
  )
  async with contextlib.AsyncExitStack() as stack:
    hosts = []
    for i in range(num):
      relay = await stack.enter_async_context(Relay(outside[i], inside[i]))
      here = dataclasses.replace(stages[i], port=inside[i])
      own = dataclasses.replace(
        cluster, stages=(*stages[:i], here, *stages[i + 1 :])
      )
      hosts.append((relay, await _serve(stack, own, i, num, shape)))
    for standby in cluster.standbys:
      own = cluster.standing_in(standby.name)
      await _serve(stack, own, own.index(standby.name), num, shape)
    yield cluster, hosts


async def _serve(
  stack: contextlib.AsyncExitStack,
  cluster: Cluster,
  index: int,
  num: int,
  shape: StageShape,
) -> asyncio.Task[None]:
  toy = ToyStage(
    capacity=shape.capacity,
    is_first=index == 0,
    is_last=index == num - 1,
    vocab=_scenarios.VOCAB,
  )
  stage: Any = _Served(toy, shape)
  server = StageServer(stage, cluster=cluster, index=index, model_hash=_HASH)
  ready = asyncio.get_running_loop().create_future()
  task = asyncio.create_task(server.serve(ready.set_result))
  stack.push_async_callback(_stop, task)
  await asyncio.wait([task, ready], return_when=asyncio.FIRST_COMPLETED)
  if task.done():
    task.result()
  return task


async def _stop(task: asyncio.Task[None]) -> None:
  task.cancel()
  await asyncio.gather(task, return_exceptions=True)


async def _trouble(
  case: Scenario,
  hosts: Sequence[tuple[Relay, asyncio.Task[None]]],
  kill: str,
) -> None:
  """Stalls and kills stages when the scenario says so."""
  start_s = asyncio.get_running_loop().time()
  events: list[tuple[float, int, str]] = []
  for stall in case.weather.stalls:
    stage = min(stall.hop, len(hosts) - 1)
    events += [(stall.start_s, stage, "hold"), (stall.end_s, stage, "release")]
  events += [(k.time_s, k.stage, kill) for k in case.weather.kills]
  for time_s, stage, what in sorted(events):
    now_s = asyncio.get_running_loop().time() - start_s
    await asyncio.sleep(max(0.0, time_s - now_s))
    relay, server = hosts[stage]
    match what:
      case "hold" | "black-holed":
        relay.hold()
      case "release":
        relay.release()
      case "broken off":
        relay.break_off()
      case "shut down":
        server.cancel()
