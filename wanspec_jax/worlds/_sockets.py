# SPDX-License-Identifier: Apache-2.0
"""The sockets world: the coordinator of a ring of stages on real hosts."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Sequence
from typing import Any, Self

from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.wire import Kind
from wanspec_jax.worlds._cluster import Cluster
from wanspec_jax.worlds._driver import Driver, SessionResult, Span
from wanspec_jax.worlds._serving import (
  SessionFault,
  _cause,
  await_ready,
  channel_options,
  shaper_fields,
)

# A fault travels from stage to stage; the closing of the verdict channel may
# overtake it, and names the last stage instead of the first cause.
_FIRST_CAUSE_S = 1.0
_NAME = "coordinator"


class SocketRing:
  """A session with a ring: opened, used for several runs, closed.

  Args:
    cluster: where the stages are and what all hosts agree upon.
    model_hash: `models.model_hash` of the coordinator's own copy.
    hops: emulated link of each of the P + 1 hops; None for the links as they
      are.
    lap_deadline_s: longest wait for the run that is due next.
  """

  def __init__(
    self,
    cluster: Cluster,
    *,
    model_hash: str,
    hops: Sequence[wire.LinkShaper] | None = None,
    lap_deadline_s: float = 120.0,
  ):
    if hops is not None and len(hops) != cluster.num_stages + 1:
      raise ValueError(
        f"hops: {len(hops)} given, {cluster.num_stages} stages need "
        f"{cluster.num_stages + 1}"
      )
    if not lap_deadline_s > 0:
      raise ValueError(f"lap_deadline_s = {lap_deadline_s}: must be > 0")
    self.cluster = cluster
    self._hops = hops
    self._model_hash = model_hash
    self._lap_deadline_s = lap_deadline_s
    self._counted: dict[str, dict[str, int]] = {}
    self._next_sequence = 0
    self.num_traces: dict[int, dict[str, int]] = {}

  async def __aenter__(self) -> Self:
    cluster = self.cluster
    session = secrets.token_hex(8)
    ssl_context = None
    if cluster.keys is not None:
      ssl_context = wire.client_context(cluster.keys, _NAME)
    hello: dict[str, Any] = {
      "name": _NAME,
      "session": session,
      "hops": None
      if self._hops is None
      else [shaper_fields(hop) for hop in self._hops],
    }
    self._stack = contextlib.AsyncExitStack()

    async def join(index: int, role: dict[str, Any], link: str, shaper):
      there = cluster.stages[index]
      try:
        channel = await wire.connect(
          there.host,
          there.port,
          peer=there.name,
          link=link,
          ssl_context=ssl_context,
          options=channel_options(cluster),
          shaper=shaper,
          retry=True,
          deadline_s=cluster.peer_deadline_s,
        )
        self._stack.push_async_callback(channel.close, "session over")
        await wire.offer(
          channel, hello | role, deadline_s=cluster.peer_deadline_s
        )
        if role["role"] == "ring":
          await await_ready(channel, there.name, cluster.start_deadline_s)
      except wire.WireError as error:
        raise SessionFault(there.name, _cause(error)) from error
      return channel

    try:
      self._head = await join(
        0,
        {"role": "ring", **cluster.agreement(0, self._model_hash)},
        "hop 0",
        None if self._hops is None else self._hops[0],
      )
      last = cluster.num_stages - 1
      self._back = await join(
        last, {"role": "return"}, f"return {last}", None
      )
    except BaseException:
      await self._stack.aclose()
      raise
    return self

  async def __aexit__(self, *exc_info: object) -> None:
    await self._stack.aclose()

  async def measure(
    self, *, num_slots: int, repeats: int
  ) -> list[list[float]]:
    """Returns `[P][row buckets]` seconds, one stage after the other.

    All stage processes are up and idle but the one that is measured, as in a
    lap of a single run.
    """
    message = {
      "op": "measure",
      "num_slots": num_slots,
      "repeats": repeats,
      "seconds": [],
    }
    await self._head.send_now(wire.encode_control(Kind.CONTROL, message))
    frame = await self._take(self._back, self.cluster.start_deadline_s)
    return wire.decode_control(frame)["seconds"]

  async def run(
    self,
    driver: Driver,
    requests: Sequence[tuple[float, sch.Request]],
  ) -> SessionResult:
    """Runs requests, each submitted at its time from now, until all have ended.

    Args:
      driver: a fresh engine with its drafter.
      requests: `(time_s, request)`; sequence numbers follow the order.

    Raises:
      SessionFault: naming the first stage that failed and why.
    """
    start_s = time.monotonic()
    events: asyncio.Queue[Any] = asyncio.Queue()
    spans: list[Span] = []
    in_flight = 0

    async def submit() -> None:
      for sequence, (time_s, request) in enumerate(requests):
        await wire.sleep_until(start_s + time_s)
        await events.put(("submit", sequence, request))

    async def listen(channel: wire.Channel) -> None:
      try:
        while True:
          await events.put(("frame", channel, await channel.recv()))
      except wire.WireError as error:
        await events.put(("lost", channel, error))

    async def draft(action: sch.Draft) -> None:
      begin_s = time.monotonic()
      answer = await asyncio.to_thread(driver.draft, action, 0.0)
      end_s = time.monotonic()
      spans.append(
        Span("drafter", "draft", begin_s - start_s, end_s - start_s, -1)
      )
      await events.put(("drafted", action, answer))

    async def hear(event: sch.Event) -> None:
      nonlocal in_flight
      runs, drafts = driver.handle(event)
      for run in runs:
        data = wire.encode_run(run)
        handed_s = time.monotonic()
        arrival_s = await self._head.send(data)
        in_flight += 1
        spans.append(
          Span(
            "hop 0",
            f"{len(data)} B",
            handed_s - start_s,
            arrival_s - start_s,
            run.run_id,
          )
        )
      for action in drafts:
        # On a thread: heartbeats go on while a slow drafter thinks.
        tasks.append(asyncio.create_task(draft(action)))

    tasks = [
      asyncio.create_task(submit()),
      asyncio.create_task(listen(self._head)),
      asyncio.create_task(listen(self._back)),
    ]
    submitted = 0
    try:
      while submitted < len(requests) or not driver.done or in_flight:
        waits = in_flight > 0
        try:
          async with asyncio.timeout(self._lap_deadline_s if waits else None):
            what, source, detail = await events.get()
        except TimeoutError:
          raise SessionFault(
            "ring",
            f"no verdict within {self._lap_deadline_s:g} s although every "
            "stage answers",
          ) from None
        now_s = time.monotonic() - start_s
        if what == "submit":
          submitted += 1
          await hear(
            sch.Submitted(time_s=now_s, sequence=source, request=detail)
          )
        elif what == "drafted":
          if driver.knows(source.sequence):
            await hear(sch_at(detail, now_s))
        elif what == "lost":
          await self._raise_first_cause(source, detail, events)
        elif detail.kind == Kind.RETURNED:
          in_flight -= 1
          await hear(
            sch.Arrived(
              time_s=now_s, returned=wire.decode_returned(detail.body)
            )
          )
        else:
          _raise_fault(detail)
    finally:
      for task in tasks:
        task.cancel()
      await asyncio.gather(*tasks, return_exceptions=True)
    remote, counter = await self._collect()
    spans += [
      Span(lane, name, a - start_s, b - start_s, run)
      for lane, name, a, b, run in remote
    ]
    spans.sort(key=lambda span: span.start_s)
    return SessionResult(
      world="sockets", outcomes=driver.outcomes, spans=spans, bytes=counter
    )

  async def _raise_first_cause(
    self, channel: wire.Channel, error: wire.WireError, events: asyncio.Queue
  ) -> None:
    """Waits a moment for the word of a stage that saw the first cause."""
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_FIRST_CAUSE_S):
        while True:
          what, _, detail = await events.get()
          if what == "frame" and detail.kind == Kind.FAULT:
            _raise_fault(detail)
    raise SessionFault(channel.peer, _cause(error)) from error

  async def _take(
    self, channel: wire.Channel, deadline_s: float
  ) -> wire.Frame:
    """Returns the next frame of a channel while watching the other one."""
    try:
      frame = await channel.recv(deadline_s=deadline_s)
    except wire.WireError as error:
      with contextlib.suppress(wire.WireError):
        word = await self._head.recv(deadline_s=_FIRST_CAUSE_S)
        if word.kind == Kind.FAULT:
          _raise_fault(word)
      raise SessionFault(channel.peer, _cause(error)) from error
    if frame.kind == Kind.FAULT:
      _raise_fault(frame)
    return frame

  async def _collect(self) -> tuple[list[list[Any]], wire.ByteCounter]:
    """Returns the stages' spans on this clock, and the bytes since last time."""
    await self._head.send_now(
      wire.encode_control(Kind.CONTROL, {"op": "trace"})
    )
    spans: list[list[Any]] = []
    totals = wire.ByteCounter()
    for counter in (self._head.counter, self._back.counter):
      totals = totals.merge(counter)
    offset_s = self._head.clock_offset_s or 0.0
    waiting = self.cluster.num_stages
    while waiting:
      frame = await self._take(self._head, self.cluster.peer_deadline_s)
      message = wire.decode_control(frame)
      for lane, name, a, b, run in message["spans"]:
        spans.append([lane, name, a - offset_s, b - offset_s, run])
      if message["last"]:
        waiting -= 1
        self.num_traces[message["stage"]] = message["traces"]
        for counts in message["bytes"]:
          totals = totals.merge(wire.ByteCounter.from_dict(counts))
    now = totals.as_dict()
    fresh = wire.ByteCounter()
    for link, classes in now.items():
      before = self._counted.get(link, {})
      fresh.add(
        link, {k: v - before.get(k, 0) for k, v in classes.items()}
      )
    self._counted = now
    return spans, fresh


def sch_at(event: sch.Drafted, time_s: float) -> sch.Drafted:
  """Returns the event with the time at which it is heard."""
  return sch.Drafted(
    time_s=time_s,
    sequence=event.sequence,
    root=event.root,
    anchors=event.anchors,
    nodes=event.nodes,
  )


def _raise_fault(frame: wire.Frame) -> None:
  message = wire.decode_control(frame)
  if frame.kind == Kind.FAULT:
    raise SessionFault(str(message["stage"]), str(message["cause"]))
  raise SessionFault(_NAME, f"{frame.kind.name} came out of turn")
