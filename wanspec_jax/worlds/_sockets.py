# SPDX-License-Identifier: Apache-2.0
"""The sockets world: the coordinator of a ring of stages on real hosts."""

import asyncio
import concurrent.futures
import contextlib
import secrets
import time
from collections.abc import Generator, Sequence
from typing import Any, Self

from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import _protocol as proto
from wanspec_jax.worlds._calibrate import calibration_laps, stage_seconds
from wanspec_jax.worlds._cluster import Cluster
from wanspec_jax.worlds._driver import Driver, SessionResult, Span
from wanspec_jax.worlds._job import Job
from wanspec_jax.worlds._protocol import SessionFault

# A fault travels from stage to stage; the closing of another channel may
# overtake it, and would name a neighbour instead of the first cause.
_FIRST_CAUSE_S = 1.0
_MAX_BODY_BYTES = 16 * 2**20  # verdicts and traces are small
_MAX_EVENTS = 256  # heard and not yet handled; beyond it TCP holds them back


class SocketRing:
  """A session with a ring: opened, used for several runs, closed.

  After a fault, or a run that was given up half-way, the session is over: leave
  the block and open another.

  Args:
    cluster: where the stages are and what all hosts agree upon.
    model_hash: `models.model_hash` of the coordinator's own copy.
    hops: emulated link of each of the P + 1 hops; None for the links as they
      are.
    lap_deadline_s: longest wait for the run that is due next, and for the
      drafter.

  Attributes:
    num_traces: compiled programs of each stage, by name, as last heard.
    lap_deadline_s: see above.
    back: channel that brings the verdicts.
    drafter_thread: where drafters think.
    is_dirty: whether the call in progress has set something in motion.

  Raises:
    ValueError: a setting is out of range, or a certificate is missing.
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
    self.num_traces: dict[int, dict[str, int]] = {}
    self._hops = hops
    self._model_hash = model_hash
    self.lap_deadline_s = lap_deadline_s
    self._client_ssl, _ = cluster.tls(proto.COORDINATOR)
    self._counted: dict[str, dict[str, int]] = {}
    self._fault: SessionFault | None = None
    self._in_use = False
    self.is_dirty = False

  async def __aenter__(self) -> Self:
    cluster = self.cluster
    self._stack = contextlib.AsyncExitStack()
    # One thread: drafters keep state, and need not be safe in several.
    self.drafter_thread = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix="drafter"
    )
    self._stack.callback(
      self.drafter_thread.shutdown, wait=False, cancel_futures=True
    )
    self._events: asyncio.Queue[Any] = asyncio.Queue(_MAX_EVENTS)
    hello: dict[str, Any] = {
      "name": proto.COORDINATOR,
      "session": secrets.token_hex(8),
      "hops": None
      if self._hops is None
      else [proto.shaper_fields(hop) for hop in self._hops],
    }
    last = cluster.num_stages - 1
    try:
      self._head = await self._join(
        0,
        hello | {"role": "ring"} | cluster.agreement(0, self._model_hash),
        "hop 0",
      )
      name = cluster.stages[0].name
      try:
        infos = await proto.await_ready(
          self._head, name, cluster.start_deadline_s
        )
      except wire.WireError as error:
        raise proto.as_fault(error, name) from error
      self.num_traces = {i: info["traces"] for i, info in enumerate(infos)}
      try:
        self.back = await self._join(
          last, hello | {"role": "return"}, f"return {last}"
        )
      except SessionFault as fault:
        raise await self._word(self._head) or fault from fault
      for channel in (self._head, self.back):
        task = asyncio.create_task(self._listen(channel))
        self._stack.push_async_callback(_stop, [task])
    except BaseException:
      await self._stack.aclose()
      raise
    return self

  async def __aexit__(self, *exc_info: object) -> None:
    await self._stack.aclose()

  async def _join(
    self, index: int, hello: dict[str, Any], link: str
  ) -> wire.Channel:
    there = self.cluster.stages[index]
    deadline_s = self.cluster.peer_deadline_s
    is_head = hello["role"] == "ring"
    try:
      channel = await wire.connect(
        there.host,
        there.port,
        peer=there.name,
        link=link,
        ssl_context=self._client_ssl,
        options=proto.channel_options(
          self.cluster, max_body_bytes=_MAX_BODY_BYTES
        ),
        shaper=self._hops[0] if self._hops and is_head else None,
        retry=True,
        deadline_s=deadline_s,
      )
      self._stack.push_async_callback(
        channel.close, "session over", deadline_s=1.0
      )
      await wire.offer(channel, hello, deadline_s=deadline_s)
    except wire.WireError as error:
      raise proto.as_fault(error, there.name) from error
    return channel

  async def _word(self, channel: wire.Channel) -> SessionFault | None:
    """Returns the fault that a channel nobody listens to yet may bring."""
    try:
      frame = await channel.recv(deadline_s=_FIRST_CAUSE_S)
    except wire.WireError:
      return None
    return proto.fault_of(frame, channel.peer)

  async def _listen(self, channel: wire.Channel) -> None:
    try:
      while True:
        await self._events.put(("frame", channel, await channel.recv()))
    except wire.WireError as error:
      await self._events.put(("lost", channel, error))

  @contextlib.contextmanager
  def _use(self) -> Generator[None]:
    """Lets one run or measurement at a time use the session while it lives."""
    if self._fault is not None:
      raise SessionFault(
        self._fault.stage, f"{self._fault.cause} (the session is over)"
      )
    if self._in_use:
      raise RuntimeError("SocketRing: one run or measurement at a time")
    self._in_use = True
    self.is_dirty = False
    try:
      yield
    except BaseException as error:
      if isinstance(error, SessionFault):
        self._fault = error
      elif self.is_dirty:
        self._fault = SessionFault(
          proto.COORDINATOR, f"gave up half-way ({type(error).__name__})"
        )
      raise
    finally:
      self._in_use = False

  async def measure(self, *, num_slots: int, repeats: int) -> list[list[float]]:
    """Returns `[P][row buckets]` seconds, one stage after the other.

    All stage processes are up and idle but the one that is measured, as in a
    lap of a single run.

    Args:
      num_slots: cache size to measure at, a slot bucket.
      repeats: timed calls per bucket; 0 only compiles.

    Raises:
      SessionFault: naming the stage that failed or refused, and why.
    """
    with self._use():
      self.is_dirty = True
      message = {
        "op": "measure",
        "num_slots": num_slots,
        "repeats": repeats,
        "seconds": [],
      }
      await self._tell(message)
      # Each stage has as long as it has for any other piece of work.
      deadline_s = self.cluster.start_deadline_s * self.cluster.num_stages
      source, frame = await self._take(deadline_s, "no measurement")
      if frame.kind != Kind.CONTROL:
        raise proto.fault_of(frame, source.peer)
      seconds = proto.read_control(frame, source.peer).get("seconds")
      shape = (self.cluster.num_stages, len(self.cluster.shape.row_buckets))
      if not (
        isinstance(seconds, list)
        and len(seconds) == shape[0]
        and all(isinstance(s, list) and len(s) == shape[1] for s in seconds)
        and all(isinstance(x, float) and x >= 0 for s in seconds for x in s)
      ):
        raise SessionFault(source.peer, f"sent times that are not {shape}")
      return seconds

  async def profile(self, *, num_slots: int, repeats: int) -> list[list[float]]:
    """Returns `[P][row buckets]` seconds of stages in laps of one run.

    Sends runs of every bucket round the ring, links emulated as ever, so it
    takes `repeats` laps per bucket. Compile with `measure` beforehand.

    Args:
      num_slots: cache size to measure at, a slot bucket.
      repeats: laps per bucket, at least 1.

    Raises:
      SessionFault: naming the stage that failed, and why.
    """
    shape, num_stages = self.cluster.shape, self.cluster.num_stages
    if num_slots not in shape.slot_buckets or repeats < 1:
      raise ValueError(
        f"profile(num_slots={num_slots}, repeats={repeats}): num_slots must be "
        f"one of {shape.slot_buckets}, repeats at least 1"
      )
    laps = calibration_laps(shape, num_slots=num_slots, repeats=repeats)
    elapsed_s: dict[int, float] = {}
    spans: list[list[Any]] = []
    with self._use():
      for lap in laps:
        data = wire.encode_run(lap.run)
        start_s = time.monotonic()
        arrival_s = await self.launch(data)
        source, frame = await self._take(self.lap_deadline_s, "no verdict")
        if frame.kind != Kind.RETURNED:
          raise proto.fault_of(frame, source.peer)
        elapsed_s[lap.run.run_id] = time.monotonic() - start_s
        spans.append(["hop 0", "", start_s, arrival_s, lap.run.run_id])
      remote, _ = await self._collect()
    seconds = stage_seconds(
      laps,
      spans=spans + remote,
      elapsed_s=elapsed_s,
      num_stages=num_stages,
      is_emulated=self._hops is not None,
    )
    return [
      [seconds[bucket][i] for bucket in shape.row_buckets]
      for i in range(num_stages)
    ]

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
      ValueError: a request that can never be served.
      Exception: what the drafter raised.
    """
    with self._use():
      job = Job(self, driver, requests)
      try:
        await job.run()
      finally:
        await _stop(job.tasks)
        self._forget_answers()
      remote, counter = await self._collect()
    spans = job.spans + [
      Span(lane, name, a - job.start_s, b - job.start_s, run)
      for lane, name, a, b, run in remote
    ]
    spans.sort(key=lambda span: span.start_s)
    return SessionResult(
      world="sockets", outcomes=driver.outcomes, spans=spans, bytes=counter
    )

  async def launch(self, data: bytes) -> float:
    """Sends a frame round the ring; returns when the first hop delivers it."""
    self.is_dirty = True
    try:
      return await self._head.send(data)
    except wire.WireError as error:
      raise await self._first_cause(self._head, error) from error

  async def _tell(self, message: dict[str, Any]) -> None:
    try:
      await self._head.send_now(wire.encode_control(Kind.CONTROL, message))
    except wire.WireError as error:
      raise await self._first_cause(self._head, error) from error

  async def next_event(self, deadline_s: float | None) -> tuple[Any, Any, Any]:
    """Returns `(what, source, detail)`, a fault apart, which is raised.

    Raises:
      SessionFault: what a stage said, or the break of a channel.
      TimeoutError: if nothing happens in time.
    """
    async with asyncio.timeout(deadline_s):
      what, source, detail = await self._events.get()
    if what == "lost":
      raise await self._first_cause(source, detail) from detail
    if what == "frame" and detail.kind == Kind.FAULT:
      raise proto.fault_of(detail, source.peer)
    return what, source, detail

  async def post(self, *event: Any) -> None:
    """Lets `next_event` return this."""
    await self._events.put(event)

  def _forget_answers(self) -> None:
    """Keeps of what is not handled yet only what the channels brought."""
    for _ in range(self._events.qsize()):
      event = self._events.get_nowait()
      if event[0] in ("frame", "lost"):
        self._events.put_nowait(event)

  async def _first_cause(
    self, channel: wire.Channel, error: wire.WireError
  ) -> SessionFault:
    """Waits a moment for the word of a stage that saw the first cause.

    In its absence a channel that broke says more than one that was closed in
    good order. What others say of this side it knows better itself, unless it
    has nothing else to go by.
    """
    about_us = None
    with contextlib.suppress(TimeoutError):
      async with asyncio.timeout(_FIRST_CAUSE_S):
        while True:
          what, source, detail = await self._events.get()
          if what == "frame" and detail.kind == Kind.FAULT:
            fault = proto.fault_of(detail, source.peer)
            if fault.stage != proto.COORDINATOR:
              return fault
            about_us = fault
          elif what == "lost" and proto.is_goodbye(error):
            channel, error = source, detail
    if about_us is not None and proto.is_goodbye(error):
      return about_us
    return proto.as_fault(error, channel.peer)

  async def _take(
    self, deadline_s: float, missing: str, whose: str = "ring"
  ) -> tuple[wire.Channel, wire.Frame]:
    """Returns the next frame of either channel, and which."""
    try:
      _, source, frame = await self.next_event(deadline_s)
    except TimeoutError:
      raise SessionFault(whose, f"{missing} within {deadline_s:g} s") from None
    return source, frame

  async def _collect(self) -> tuple[list[list[Any]], wire.ByteCounter]:
    """Returns the stages' spans on this clock, and the bytes since then."""
    stages = self.cluster.stages
    await self._tell({"op": "trace"})
    spans: list[list[Any]] = []
    totals = wire.ByteCounter()
    for counter in (self._head.counter, self.back.counter):
      totals = totals.merge(counter)
    waiting = dict.fromkeys(range(len(stages)))
    while waiting:
      whose = stages[next(iter(waiting))].name
      source, frame = await self._take(
        self.cluster.peer_deadline_s, "no trace", whose
      )
      if source is not self._head or frame.kind != Kind.TRACE:
        raise proto.fault_of(frame, source.peer)
      offset_s = self._head.clock_offset_s or 0.0
      trace = proto.read_trace(frame, source.peer, offset_s)
      spans += trace.spans
      if trace.stage not in waiting or len(spans) > (
        proto.MAX_SPANS * len(stages)
      ):
        raise SessionFault(source.peer, "sent more traces than there can be")
      if trace.last:
        del waiting[trace.stage]
        self.num_traces[trace.stage] = trace.traces
        totals = totals.merge(trace.bytes)
    now = totals.as_dict()
    fresh = wire.ByteCounter()
    for link, classes in now.items():
      before = self._counted.get(link, {})
      fresh.add(
        link, {k: max(0, v - before.get(k, 0)) for k, v in classes.items()}
      )
    self._counted = now
    return spans, fresh


async def _stop(tasks) -> None:
  tasks = list(tasks)
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
