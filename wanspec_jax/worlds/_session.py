# SPDX-License-Identifier: Apache-2.0
"""One coordinator's use of a stage: from its introduction to its goodbye."""

import asyncio
import collections
import contextlib
import logging
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from wanspec_jax import wire
from wanspec_jax.messages import Cancel, Returned, Run
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import _protocol as proto
from wanspec_jax.worlds._cluster import StageHost
from wanspec_jax.worlds._protocol import SessionFault
from wanspec_jax.worlds._stage import Output

if TYPE_CHECKING:
  from wanspec_jax.worlds._serving import StageServer

_LOG = logging.getLogger(__name__)
_MAX_CANCELLED = 2**17  # ids that are remembered; a cancel beyond is dropped


class Session:
  """One coordinator's use of the stage.

  Attributes:
    session: its name.
    before: channel from the stage before, or the coordinator.
    previous: the session before, if that is still ending.
    ended: set once nothing of it is left.
    is_back_claimed: whether the coordinator has asked for the verdicts.
  """

  def __init__(
    self,
    server: "StageServer",
    before: wire.Channel,
    hello: dict[str, Any],
    previous: "Session | None",
  ):
    cluster = proto.read_ring(hello.get("ring"), server.cluster)
    index = server.index
    self.session: str = hello["session"]
    self.before = before
    self.previous = previous
    self.ended = asyncio.Event()
    self.is_back_claimed = False
    self._server = server
    self._stage = server.stage
    self._cluster = cluster
    self._me = server.name
    self._agreement = {k: hello[k] for k in server.agreement}
    self._ring = hello.get("ring")
    self._hop_fields = hello.get("hops")
    self._hops = proto.read_hops(self._hop_fields, cluster.num_stages + 1)
    self._hop = f"hop {index + 1}"
    self._against = f"back {index}"
    if self._hops is not None and index:
      before.shape(self._hops[index])  # cancels cross it the other way
    is_last = index == cluster.num_stages - 1
    self._there = None if is_last else cluster.stages[index + 1]
    self._next: wire.Channel | None = None
    self._back: asyncio.Future[wire.Channel] = (
      asyncio.get_running_loop().create_future()
    )
    self._told_by: wire.Channel | None = None
    self._is_ready = False
    self._is_over = False
    # A frame that came before, or came twice, is not what is due.
    self._epoch = 0
    self._next_run = 0
    # Of the loop, for the worker: what was cancelled and it has not seen yet.
    self._cancels: collections.deque[Cancel] = collections.deque()
    self._cancelled: collections.deque[tuple[int, int]] = collections.deque()
    self._num_cancelled = 0
    self._num_spans = 0
    self._spans: collections.deque[list[Any]] = collections.deque(
      maxlen=proto.MAX_SPANS
    )

  @property
  def is_ending(self) -> bool:
    return self._is_over or self.before.lost is not None

  async def serve_return(self, channel: wire.Channel) -> None:
    """Lends a channel to the session, for the verdicts, until it ends."""
    if self._back.done():  # the session ended meanwhile
      return
    if self._hops is not None:
      channel.shape(self._hops[-1])
    channel.link = self._hop
    self._back.set_result(channel)
    await self.ended.wait()

  async def run(self) -> None:
    """Runs until the coordinator is done or something breaks."""
    fault: SessionFault | None = None
    try:
      async with asyncio.TaskGroup() as tasks:
        tasks.create_task(self._forward())
        tasks.create_task(self._attend())
    except BaseExceptionGroup as group:
      fault = await self._first_cause(group.exceptions)
    except asyncio.CancelledError:
      fault = SessionFault(self._me, "is shutting down")
      raise
    finally:
      self._is_over = True
      await self._end(fault)

  # Beginning and end. --------------------------------------------------------

  async def _attend(self) -> None:
    """Brings up the ring from here on, then hears what comes against it."""
    deadline_s = self._cluster.start_deadline_s
    if self.previous is not None:
      async with asyncio.timeout(deadline_s):
        await self.previous.ended.wait()
    await self._server.work(self._stage.reset)
    infos = [{"name": self._me, "traces": dict(self._stage.num_traces)}]
    if self._there is not None:
      infos += await self._connect_next(self._there)
    await self.before.send_now(
      wire.encode_control(Kind.CONTROL, {"op": "ready", "stages": infos})
    )
    self._is_ready = True
    if self._next is not None:
      await self._backward(self._next)
    else:
      await self._watch_back()

  async def _connect_next(self, there: StageHost) -> list[dict[str, Any]]:
    """Returns the infos of the stages behind, which are then ready."""
    deadline_s = self._cluster.peer_deadline_s
    index = self._server.index + 1
    await self.before.send_now(proto.waiting_frame(there.name))
    try:
      self._next = await wire.connect(
        there.host,
        there.port,
        peer=there.name,
        link=self._hop,
        ssl_context=self._server.client_ssl,
        options=self._server.options,
        shaper=None if self._hops is None else self._hops[index],
        retry=True,
        deadline_s=deadline_s,
      )
      hello = self._agreement | {
        "role": "ring",
        "name": self._me,
        "session": self.session,
        "hops": self._hop_fields,
        "ring": self._ring,
        "stage": index,
      }
      await wire.offer(self._next, hello, deadline_s=deadline_s)
      return await proto.await_ready(
        self._next,
        there.name,
        self._cluster.start_deadline_s,
        self.before.send_now,
      )
    except SessionFault:
      self._told_by = self._next
      raise
    except wire.WireError as error:
      raise proto.as_fault(error, there.name) from error

  async def _first_cause(
    self, errors: Sequence[BaseException]
  ) -> SessionFault | None:
    """Returns why the session ends; None if the coordinator is done."""
    for error in errors:
      if not isinstance(error, proto.Over) and not proto.is_goodbye(error):
        return proto.as_fault(error, self._me)
    lost = [e for e in errors if isinstance(e, wire.PeerLost)]
    if self._next is None or len(lost) < len(errors):
      return None
    # The next stage left, and its reason may still wait to be read.
    with contextlib.suppress(wire.WireError):
      while (frame := await self._next.recv(deadline_s=0)) is not None:
        if frame.kind == Kind.FAULT:
          self._told_by = self._next
          return proto.fault_of(frame, self._next.peer)
    return proto.as_fault(lost[0], self._me)

  async def _end(self, fault: SessionFault | None) -> None:
    """Tells the others why this session ends, and closes its channels."""
    reason = "session over"
    if fault is not None:
      reason = proto.clip(fault)
      _LOG.warning("%s: session ends: %s", self._me, reason)
    channels = [self.before]
    if self._next is not None:
      channels.append(self._next)
    if self._back.done() and not self._back.cancelled():
      channels.append(self._back.result())
    else:
      self._back.cancel()
    await asyncio.gather(*(self._part(c, fault, reason) for c in channels))

  async def _part(
    self, channel: wire.Channel, fault: SessionFault | None, reason: str
  ) -> None:
    """Leaves a neighbour; after a fault not before it could read the cause.

    A socket that is closed with unread bytes in it resets the connection, and
    what was sent last may be lost. So whoever tells of a fault reads on until
    the other side, which has nothing to add, closes.
    """
    if fault is not None and channel is not self._told_by:
      with contextlib.suppress(wire.WireError, TimeoutError):
        async with asyncio.timeout(proto.SETTLE_S):
          await channel.send_now(fault.frame())
          while (await channel.recv()).kind != Kind.FAULT:
            pass
    await channel.close(reason, deadline_s=1.0)

  # The ring's direction. -----------------------------------------------------

  async def _forward(self) -> None:
    """Takes frames from the stage before, in order, and passes results on."""
    while True:
      try:
        frame = await self.before.recv()
      except wire.PeerLost as error:
        if error.said_goodbye:
          raise proto.Over from error
        raise
      if frame.kind == Kind.FAULT:
        self._told_by = self.before
        raise proto.fault_of(frame, self.before.peer)
      if not self._is_ready:
        raise SessionFault(
          self._me, f"refused {frame.kind.name}: came before 'ready'"
        )
      if frame.kind == Kind.RUN:
        if self.before.lost is None:  # else nobody waits for it
          await self._run(frame)
      elif frame.kind == Kind.CONTROL:
        await self._control(proto.read_control(frame, self.before.peer))
      else:
        raise SessionFault(
          self._me, f"refused {frame.kind.name}: has no meaning here"
        )

  async def _run(self, frame: wire.Frame) -> None:
    try:
      run, payload = wire.decode_run(
        frame.body, max_rows=self._cluster.shape.max_rows
      )
    except wire.FrameError as error:
      raise SessionFault(
        self._me, f"refused a run of {self.before.peer}: {error}"
      ) from error
    if (payload is not None) != (self._server.index > 0):
      raise SessionFault(
        self._me,
        f"refused run {run.run_id}: hidden states belong to every run between "
        "two stages, and to no other",
      )
    if run.epoch < self._epoch or run.run_id < self._next_run:
      return
    self._epoch, self._next_run = run.epoch, run.run_id + 1
    start_s = time.monotonic()
    out = await self._server.work(self._compute, run, payload)
    end_s = time.monotonic()
    while self._cancelled and self._cancelled[0][0] <= run.run_id:
      self._num_cancelled -= self._cancelled.popleft()[1]
    name = f"{out.num_rows} rows"
    if out.num_rows < run.num_rows:
      name += f", {run.num_rows - out.num_rows} cancelled"
    self._note(f"stage {self._server.index}", name, start_s, end_s, run.run_id)
    await self._pass_on(out)

  def _compute(self, run: Run, payload: memoryview | None) -> Output:
    """Runs on the worker's thread, as all that touches the stage."""
    while self._cancels:
      self._stage.cancel(self._cancels.popleft())
    return self._stage.process(run, payload)

  def _note(self, *span: Any) -> None:
    self._num_spans += 1
    self._spans.append(list(span))

  async def _pass_on(self, out: Output) -> None:
    if isinstance(out.message, Returned):
      data = wire.encode_returned(out.message)
      channel = await self._return_channel()
      if proto.is_goodbye(channel.lost or proto.Over()):
        return  # the coordinator is leaving: its word comes round the ring
    else:
      data = wire.encode_run(out.message, out.payload)
      channel = self._next
      assert channel is not None
    handed_s = time.monotonic()
    try:
      arrival_s = await channel.send(data)
    except wire.DeadlineExceeded as error:
      raise proto.as_fault(error, channel.peer) from error
    self._note(
      self._hop, f"{len(data)} B", handed_s, arrival_s, out.message.run_id
    )

  async def _return_channel(self) -> wire.Channel:
    deadline_s = self._cluster.peer_deadline_s
    try:
      async with asyncio.timeout(deadline_s):
        return await asyncio.shield(self._back)
    except TimeoutError:
      raise SessionFault(
        proto.COORDINATOR,
        f"did not connect to {self._me} for the verdicts within "
        f"{deadline_s:g} s",
      ) from None

  async def _control(self, message: dict[str, Any]) -> None:
    match message.get("op"):
      case "measure":
        await self._measure(message)
      case "trace":
        await self._send_trace()
        if self._next is not None:
          await self._next.send_now(
            wire.encode_control(Kind.CONTROL, {"op": "trace"})
          )
      case op:
        raise SessionFault(
          self._me, f"refused control operation {proto.briefly(op)}: unknown"
        )

  async def _measure(self, message: dict[str, Any]) -> None:
    shape = self._cluster.shape
    num_slots, repeats = message.get("num_slots"), message.get("repeats")
    seconds = message.get("seconds")
    for field, value, holds, rule in (
      (
        "num_slots",
        num_slots,
        type(num_slots) is int and num_slots in shape.slot_buckets,
        f"must be one of {shape.slot_buckets}",
      ),
      (
        "repeats",
        repeats,
        type(repeats) is int and 0 <= repeats <= proto.MAX_REPEATS,
        f"must lie in [0, {proto.MAX_REPEATS}]",
      ),
      (
        "seconds",
        seconds,
        isinstance(seconds, list) and len(seconds) == self._server.index,
        f"must be {self._server.index} lists",
      ),
    ):
      if not holds:
        raise SessionFault(
          self._me, f"refused {field} = {proto.briefly(value)}: {rule}"
        )
    assert isinstance(seconds, list)
    times = await self._server.work(
      self._stage.measure, num_slots=num_slots, repeats=repeats
    )
    mine = [float(times[b]) for b in shape.row_buckets]
    channel = self._next or await self._return_channel()
    await channel.send_now(
      wire.encode_control(
        Kind.CONTROL,
        {
          "op": "measure",
          "num_slots": num_slots,
          "repeats": repeats,
          "seconds": [*seconds, mine],
        },
      )
    )

  # Against it. ---------------------------------------------------------------

  async def _send_trace(self) -> None:
    after = self._next or await self._return_channel()
    spans = list(self._spans)
    if self._num_spans > len(spans):
      _LOG.warning("%s: only its latest %d spans", self._me, len(spans))
    self._spans.clear()
    self._num_spans = 0
    size = proto.SPANS_PER_FRAME
    for low in range(0, len(spans) or 1, size):
      last = low + size >= len(spans)
      counter = wire.ByteCounter()
      if last:
        counter = self.before.counter.merge(after.counter)
      part = proto.Trace(
        stage=self._server.index,
        spans=spans[low : low + size],
        last=last,
        bytes=counter,
        traces=dict(self._stage.num_traces),
      )
      await self.before.send_now(part.frame())

  async def _backward(self, channel: wire.Channel) -> None:
    """Relays what comes from the stages behind: cancels, faults, and traces,
    these on this host's clock."""
    while True:
      frame = await channel.recv()
      if frame.kind == Kind.CANCEL:
        await self._cancel(frame, channel)
        continue
      if frame.kind != Kind.TRACE:
        self._told_by = channel
        raise proto.fault_of(frame, channel.peer)
      offset_s = channel.clock_offset_s or 0.0
      trace = proto.read_trace(frame, channel.peer, offset_s)
      await self.before.send_now(trace.frame())

  async def _cancel(self, frame: wire.Frame, source: wire.Channel) -> None:
    """Notes dead nodes for the runs not begun yet, and tells the stage before.

    Only an economy: what would take too much memory is forgotten. What comes
    too late is not even noted: the next text may bear the same ids.
    """
    try:
      cancel = wire.decode_cancel(frame.body)
    except wire.FrameError as error:
      raise SessionFault(
        self._me, f"refused a cancel of {source.peer}: {error}"
      ) from error
    if cancel.before_run <= self._next_run:
      return  # too late here, so for those before as well
    count = sum(len(ids) for _, ids in cancel.nodes)
    if self._num_cancelled + count <= _MAX_CANCELLED:
      self._num_cancelled += count
      self._cancelled.append((cancel.before_run, count))
      self._cancels.append(cancel)
    if not self._server.index:
      return
    handed_s = time.monotonic()
    try:
      arrival_s = await self.before.send(wire.encode_cancel(cancel))
    except wire.DeadlineExceeded as error:
      raise proto.as_fault(error, self.before.peer) from error
    self._note(self._against, "cancel", handed_s, arrival_s, -1)

  async def _watch_back(self) -> None:
    """Hears cancels; notices when the channel for the verdicts breaks, or never
    comes."""
    channel = await self._return_channel()
    try:
      while (frame := await channel.recv()).kind == Kind.CANCEL:
        await self._cancel(frame, channel)
      if frame.kind == Kind.FAULT:
        self._told_by = channel
      raise proto.fault_of(frame, channel.peer)
    except wire.PeerLost as error:
      if not error.said_goodbye:
        raise
    # The coordinator closes both its channels: the word comes round the ring.
    await asyncio.sleep(self._cluster.peer_deadline_s)
    raise SessionFault(
      proto.COORDINATOR, "closed the channel for the verdicts alone"
    )
