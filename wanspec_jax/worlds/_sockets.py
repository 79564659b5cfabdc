# SPDX-License-Identifier: Apache-2.0
"""The sockets world: the coordinator of a ring of stages on real hosts."""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import itertools
import logging
import time
from collections.abc import Generator, Sequence
from typing import Any, Self

from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.messages import Run
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import _protocol as proto
from wanspec_jax.worlds._calibrate import calibration_laps, stage_seconds
from wanspec_jax.worlds._cluster import Cluster
from wanspec_jax.worlds._driver import Driver, SessionResult, Span
from wanspec_jax.worlds._job import Job
from wanspec_jax.worlds._joined import Joined, stop
from wanspec_jax.worlds._protocol import SessionFault

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.05  # between attempts at a ring whose members are not yet free


class SocketRing:
  """A session with a ring: opened, used for several runs, closed.

  After a fault that was not survived, or a run that was given up half-way, the
  session is over: leave the block and open another.

  Args:
    cluster: where the stages are and what all hosts agree upon.
    model_hash: `models.model_hash` of the coordinator's own copy.
    hops: emulated link of each of the P + 1 hops; None for the links as they
      are.
    lap_deadline_s: longest wait for the run that is due next, and for the
      drafter.
    recover: replace a stage that fails by a standby of the cluster and go on.

  Attributes:
    cluster: the members now; standbys that took over are among the stages.
    num_traces: compiled programs of each stage, by name, as last heard.
    lap_deadline_s: see above.
    recover: likewise.
    first_run: id on the wire of the next run's first run. Ids grow through a
      session, so that what is left of an earlier run is known by them.
    first_epoch: likewise, of its epochs.
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
    recover: bool = False,
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
    self.recover = recover
    self.first_run = 0
    self.first_epoch = 0
    self._client_ssl, _ = cluster.tls(proto.COORDINATOR)
    self._counted: dict[str, dict[str, int]] = {}
    self._lost_bytes = wire.ByteCounter()
    self._failed: set[str] = set()
    self._fault: SessionFault | None = None
    self._in_use = False
    self.is_dirty = False

  async def __aenter__(self) -> Self:
    # One thread: drafters keep state, and need not be safe in several.
    self.drafter_thread = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix="drafter"
    )
    self._events: asyncio.Queue[Any] = asyncio.Queue()
    self._joined = self._new(self.cluster)
    try:
      try:
        await self._joined.open()
      except SessionFault as fault:
        await self.replace(fault)
      self._note_infos()
    except BaseException:
      self.drafter_thread.shutdown(wait=False, cancel_futures=True)
      raise
    return self

  async def __aexit__(self, *exc_info: object) -> None:
    try:
      await self._joined.close()
    finally:
      self.drafter_thread.shutdown(wait=False, cancel_futures=True)

  def _new(self, cluster: Cluster) -> Joined:
    return Joined(
      cluster,
      model_hash=self._model_hash,
      hops=self._hops,
      client_ssl=self._client_ssl,
      events=self._events,
    )

  def _note_infos(self) -> None:
    infos = self._joined.infos
    self.num_traces = {i: info["traces"] for i, info in enumerate(infos)}

  async def replace(self, fault: SessionFault) -> list[SessionFault]:
    """Opens a new session with a standby in the place of whoever failed.

    The others leave the old one meanwhile, and are asked until they are free.
    A member that is busy has not failed, and nobody takes its place.

    Returns:
      What was survived: the fault given, and what failed on the way.

    Raises:
      SessionFault: the one given, with what failed on the way, if it may not be
        survived or no standby is left.
    """
    survived: list[SessionFault] = []
    until_s = self._free_by_s()
    while True:
      is_busy = proto.BUSY in fault.cause
      spare = None
      if not is_busy:
        self._failed.add(fault.stage)
        spare = self.cluster.spare(fault.stage, self._failed)
      if not self.recover or (
        time.monotonic() > until_s if is_busy else spare is None
      ):
        raise proto.first_of([*survived, fault])
      if spare is None:
        await asyncio.sleep(_RETRY_S)
      else:
        _LOG.warning("%s; %s takes its place", fault, spare)
        self.cluster = self.cluster.standing_in(spare)
        survived.append(fault)
        until_s = self._free_by_s()
      await self._leave(survived[0] if survived else None)
      self._joined = self._new(self.cluster)
      try:
        await self._joined.open()
      except SessionFault as again:
        fault = again
      else:
        self._note_infos()
        return survived

  def _free_by_s(self) -> float:
    """Returns by when all members have noticed that a session is over."""
    deadline_s = self.cluster.peer_deadline_s
    return time.monotonic() + 2 * deadline_s + 3 * proto.SETTLE_S

  async def _leave(self, fault: SessionFault | None) -> None:
    """Leaves a broken session; what it brought and nobody heard is void."""
    before = self._joined
    await before.close(fault)
    for event in self._pending():
      if event[0] not in ("frame", "lost"):
        self._events.put_nowait(event)
    fresh = self._fresh(before.counter)
    self._lost_bytes = self._lost_bytes.merge(fresh)
    self._counted = {}

  def _pending(self) -> list[Any]:
    return [self._events.get_nowait() for _ in range(self._events.qsize())]

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
      await self._joined.tell(message)
      # Each stage has as long as it has for any other piece of work.
      deadline_s = self.cluster.start_deadline_s * self.cluster.num_stages
      source, frame = await self._take(deadline_s, "no measurement")
      if frame.kind != Kind.CONTROL:
        raise proto.fault_of(frame, source.peer)
      shape = (self.cluster.num_stages, len(self.cluster.shape.row_buckets))
      return proto.read_seconds(frame, source.peer, shape)

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
    self._check_profile("profile", num_slots, repeats, 1)
    laps = calibration_laps(shape, num_slots=num_slots, repeats=repeats)
    elapsed_s: dict[int, float] = {}
    spans: list[list[Any]] = []
    with self._use():
      first = self.first_run
      for lap in laps:
        data = self._encode(lap.run, first)
        start_s = time.monotonic()
        arrival_s = await self.launch(data)
        source, frame = await self._take(self.lap_deadline_s, "no verdict")
        if frame.kind != Kind.RETURNED:
          raise proto.fault_of(frame, source.peer)
        elapsed_s[lap.run.run_id] = time.monotonic() - start_s
        self.first_run = first + lap.run.run_id + 1
        spans.append(["hop 0", "", start_s, arrival_s, lap.run.run_id])
      remote, _ = await self._collect()
      for span in remote:
        span[4] -= first
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

  async def spacing(self, *, num_slots: int, repeats: int) -> list[float]:
    """Returns the least seconds between two runs of each row bucket.

    Sends `repeats` runs of a bucket one behind the other and takes the mean
    time between their returns: what the busiest stage or link needs, or more
    where stages share a host. Compile with `measure` beforehand.

    Args:
      num_slots: cache size to measure at, a slot bucket.
      repeats: runs per bucket, at least 2.

    Raises:
      SessionFault: naming the stage that failed, and why.
    """
    shape = self.cluster.shape
    self._check_profile("spacing", num_slots, repeats, 2)
    laps = calibration_laps(
      shape, num_slots=num_slots, repeats=repeats, is_stream=True
    )
    found: dict[int, float] = {}
    with self._use():
      first = self.first_run
      for bucket, group in itertools.groupby(laps, lambda lap: lap.bucket):
        runs = [lap.run for lap in group]
        for run in runs:
          await self.launch(self._encode(run, first))
        back_s = []
        for _ in runs:
          source, frame = await self._take(self.lap_deadline_s, "no verdict")
          if frame.kind != Kind.RETURNED:
            raise proto.fault_of(frame, source.peer)
          back_s.append(time.monotonic())
          self.first_run += 1
        if bucket is not None:
          found[bucket] = (back_s[-1] - back_s[0]) / (len(runs) - 1)
      await self._collect()  # these spans and bytes are no session's
    return [found[bucket] for bucket in shape.row_buckets]

  def _encode(self, run: Run, first: int) -> bytes:
    """Returns the frame of a calibration's run."""
    return wire.encode_run(
      dataclasses.replace(
        run, run_id=first + run.run_id, epoch=self.first_epoch
      )
    )

  def _check_profile(
    self, name: str, num_slots: int, repeats: int, least: int
  ) -> None:
    buckets = self.cluster.shape.slot_buckets
    if num_slots not in buckets or repeats < least:
      raise ValueError(
        f"{name}(num_slots={num_slots}, repeats={repeats}): num_slots must be "
        f"one of {buckets}, repeats at least {least}"
      )

  async def run(
    self,
    driver: Driver,
    requests: Sequence[tuple[float, sch.Request]],
    *,
    draft: sch.DraftCosts | None = None,
  ) -> SessionResult:
    """Runs requests, each submitted at its time from now, until all have ended.

    Args:
      driver: a fresh engine with its drafter.
      requests: `(time_s, request)`; sequence numbers follow the order.
      draft: what the drafter's answers are to cost at least, one after the
        other; by default they come when they are there.

    Raises:
      SessionFault: naming the first stage that failed and why.
      ValueError: a request that can never be served.
      Exception: what the drafter raised.
    """
    with self._use():
      job = Job(self, driver, requests, draft)
      try:
        await job.run()
      finally:
        await stop(job.tasks)
        self._forget_answers()
        self.first_run = job.first_run + driver.engine.next_run
        self.first_epoch = job.first_epoch + driver.engine.epoch
      while True:
        try:
          remote, counter = await self._collect()
          break
        except SessionFault as fault:  # the texts are all there
          await job.survive(fault)
    spans = job.spans + [
      Span(
        lane,
        name,
        a - job.start_s,
        b - job.start_s,
        run - job.first_run if run >= 0 else -1,
      )
      for lane, name, a, b, run in remote
    ]
    spans.sort(key=lambda span: span.start_s)
    return SessionResult(
      world="sockets",
      outcomes=driver.outcomes,
      spans=spans,
      bytes=counter,
      faults=job.faults,
    )

  @property
  def back(self) -> wire.Channel:
    """Channel that brings the verdicts."""
    return self._joined.back

  async def launch(self, data: bytes) -> float:
    """Sends a frame round the ring; returns when the first hop delivers it."""
    self.is_dirty = True
    return await self._joined.launch(data)

  async def cancel(self, data: bytes) -> float:
    """Sends a frame against the ring; returns when the last hop delivers it."""
    return await self._joined.cancel(data)

  async def next_event(self, deadline_s: float | None) -> tuple[Any, Any, Any]:
    """Returns `(what, source, detail)`, a fault apart, which is raised.

    Raises:
      SessionFault: what a stage said, or the break of a channel.
      TimeoutError: if nothing happens in time.
    """
    async with asyncio.timeout(deadline_s):
      what, source, detail = await self._events.get()
    if what in ("frame", "lost"):
      self._joined.taken()
    if what == "lost":
      raise await self._joined.first_cause(source, detail) from detail
    if what == "frame" and detail.kind == Kind.FAULT:
      raise proto.fault_of(detail, source.peer)
    return what, source, detail

  def post(self, *event: Any) -> None:
    """Lets `next_event` return this."""
    self._events.put_nowait(event)

  def _forget_answers(self) -> None:
    """Keeps of what is not handled yet only what the channels brought."""
    for event in self._pending():
      if event[0] in ("frame", "lost"):
        self._events.put_nowait(event)

  async def _take(
    self, deadline_s: float, missing: str, whose: str = "ring"
  ) -> tuple[wire.Channel, wire.Frame]:
    """Returns the next frame of either channel that is not stale, and which."""
    until_s = time.monotonic() + deadline_s
    try:
      while True:
        _, source, frame = await self.next_event(until_s - time.monotonic())
        if not (source is self.back and self._is_stale(frame)):
          return source, frame
    except TimeoutError:
      raise SessionFault(whose, f"{missing} within {deadline_s:g} s") from None

  def _is_stale(self, frame: wire.Frame) -> bool:
    """Whether a frame is the answer to a run that was answered already."""
    if frame.kind != Kind.RETURNED:
      return False
    try:
      return wire.decode_returned(frame.body).run_id < self.first_run
    except wire.FrameError:
      return False  # whoever expects one says what is wrong with it

  async def _collect(self) -> tuple[list[list[Any]], wire.ByteCounter]:
    """Returns the stages' spans on this clock, and the bytes since then."""
    stages, head = self.cluster.stages, self._joined.head
    await self._joined.tell({"op": "trace"})
    spans: list[list[Any]] = []
    totals = self._joined.counter
    waiting = dict.fromkeys(range(len(stages)))
    while waiting:
      whose = stages[next(iter(waiting))].name
      source, frame = await self._take(
        self.cluster.peer_deadline_s, "no trace", whose
      )
      if source is not head or frame.kind != Kind.TRACE:
        raise proto.fault_of(frame, source.peer)
      offset_s = head.clock_offset_s or 0.0
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
    fresh = self._fresh(totals).merge(self._lost_bytes)
    self._counted = totals.as_dict()
    self._lost_bytes = wire.ByteCounter()
    return spans, fresh

  def _fresh(self, totals: wire.ByteCounter) -> wire.ByteCounter:
    """Returns the bytes of this session that were not counted yet."""
    fresh = wire.ByteCounter()
    for link, classes in totals.as_dict().items():
      before = self._counted.get(link, {})
      fresh.add(
        link, {k: max(0, v - before.get(k, 0)) for k, v in classes.items()}
      )
    return fresh
