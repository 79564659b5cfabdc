# SPDX-License-Identifier: Apache-2.0
"""One connection between two hosts: frames in, frames out, and who died.

A channel is full duplex. What leaves it may be shaped as a WAN link would
(`LinkShaper`); heartbeats are not, and give round-trip time and clock offset.
"""

import asyncio
import collections
import contextlib
import dataclasses
import ssl
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from wanspec_jax.wire._accounting import ByteCounter
from wanspec_jax.wire._emulation import LinkShaper, ShaperState
from wanspec_jax.wire._errors import DeadlineExceeded, FrameError, PeerLost
from wanspec_jax.wire._frames import (
  MAX_BODY_BYTES,
  Frame,
  FrameDecoder,
  Kind,
  decode_control,
  encode_control,
)
from wanspec_jax.wire._heartbeat import ClockEstimate, estimate, pong_fields
from wanspec_jax.wire._returned import frame_classes

_READ_BYTES = 2**16
_MAX_ANSWER_BACKLOG_BYTES = 2**20  # beyond it, pings of a deaf peer are ignored
_GOODBYE_S = 1.0
# The event loop's own timers are 1-2 ms late (epoll counts whole
# milliseconds), so the rest is slept away in naps this short. Measured: median
# error 0.08 ms for 2% of a core, against 0.9 ms for a timer alone and 7% of a
# core for spinning.
_TIMER_SLACK_S = 2.5e-3
_NAP_S = 1e-4


async def sleep_until(when_s: float) -> None:
  """Returns at `when_s` of `time.monotonic`, late by well under a millisecond.

  The event loop runs on meanwhile, but for naps of 0.1 ms near the end.
  """
  while (left_s := when_s - time.monotonic()) > 0:
    if left_s > _TIMER_SLACK_S:
      await asyncio.sleep(left_s - _TIMER_SLACK_S)
    else:
      time.sleep(min(left_s, _NAP_S))
      await asyncio.sleep(0)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChannelOptions:
  """Bounds and deadlines of a channel.

  Attributes:
    max_body_bytes: longest body that is read.
    max_outgoing_bytes: frames accepted by `send` and not yet written.
    max_incoming_bytes: frames read and not yet taken by `recv`; beyond it the
      channel stops reading, so that TCP holds the sender back.
    peer_deadline_s: silence, pings notwithstanding, after which a peer is lost.
    ping_interval_s: between pings; at most half of `peer_deadline_s`.
    send_deadline_s: longest wait of `send` for room.
  """

  max_body_bytes: int = MAX_BODY_BYTES
  max_outgoing_bytes: int = 64 * 2**20
  max_incoming_bytes: int = 256 * 2**20
  peer_deadline_s: float = 10.0
  ping_interval_s: float = 2.0
  send_deadline_s: float = 30.0

  def __post_init__(self):
    for field in dataclasses.fields(self):
      if not getattr(self, field.name) > 0:
        raise ValueError(
          f"ChannelOptions.{field.name} = {getattr(self, field.name)}: "
          "must be > 0"
        )
    if self.ping_interval_s > self.peer_deadline_s / 2:
      raise ValueError(
        f"ChannelOptions.ping_interval_s = {self.ping_interval_s}: must be "
        f"<= peer_deadline_s / 2 = {self.peer_deadline_s / 2}"
      )


class Channel:
  """Sends and receives frames over one TCP connection, until it breaks.

  Made by `connect` and `listen`, inside a running event loop. The first cause
  of a break is kept: from then on `send` and, once the frames that came before
  are taken, `recv` raise `PeerLost` with it. Frames are counted when handed
  over, under `link`, prefix included.

  Attributes:
    peer: name of the other side, or its address until it is known.
    link: name of this direction in `counter`.
    counter: bytes sent.
    received_bytes: bytes of frames received.
    certificate_name: common name of the peer's certificate; None without TLS.
    clock: offset and round-trip time, see `ClockEstimate`.
  """

  def __init__(
    self,
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    *,
    peer: str,
    link: str = "",
    options: ChannelOptions | None = None,
    shaper: LinkShaper | None = None,
    counter: ByteCounter | None = None,
  ):
    self.peer = peer
    self.link = link
    self.counter = ByteCounter() if counter is None else counter
    self.received_bytes = 0
    self.certificate_name = _certificate_name(writer)
    self.clock: ClockEstimate | None = None
    secure = writer.get_extra_info("ssl_object")
    self._may_be_unwelcome = secure is not None and not secure.server_side
    self._options = ChannelOptions() if options is None else options
    self._shaper = shaper
    self._shaper_state = ShaperState()
    self._reader = reader
    self._writer = writer
    self._decoder = FrameDecoder(max_body_bytes=self._options.max_body_bytes)
    self._outbox: collections.deque[tuple[float, bytes]] = collections.deque()
    self._outbox_bytes = 0
    self._outbox_changed = asyncio.Event()
    self._outbox_room = asyncio.Event()
    self._inbox: collections.deque[Frame] = collections.deque()
    self._inbox_bytes = 0
    self._inbox_changed = asyncio.Event()
    self._inbox_room = asyncio.Event()
    self._reading_paused = False
    self._heard_s = time.monotonic()
    self._ping_sent_s: float | None = None
    self._loss: PeerLost | None = None
    self._tasks = [
      asyncio.create_task(self._guard(loop))
      for loop in (self._read_loop, self._write_loop, self._heartbeat_loop)
    ]

  @property
  def clock_offset_s(self) -> float | None:
    """Peer's `time.monotonic` minus ours; None until a ping was answered."""
    return None if self.clock is None else self.clock.offset_s

  @property
  def rtt_s(self) -> float | None:
    """Least recent round-trip time, emulated delays apart; None at first."""
    return None if self.clock is None else self.clock.rtt_s

  @property
  def lost(self) -> PeerLost | None:
    """The first cause of a break, or None."""
    if self._loss is None:
      return None
    lost = PeerLost(
      self.peer, self._loss.cause, said_goodbye=self._loss.said_goodbye
    )
    lost.__cause__ = self._loss.__cause__
    return lost

  def get_extra_info(self, name: str) -> Any:
    """Returns what asyncio knows of the connection, such as its `socket`."""
    return self._writer.get_extra_info(name)

  def shape(self, shaper: LinkShaper | None) -> None:
    """Puts an emulated link under the frames sent from now on.

    The side that listens learns from the introduction what its link is to be.
    """
    self._shaper = shaper
    self._shaper_state = ShaperState()

  async def send(
    self, frame: bytes, classes: Mapping[str, int] | None = None
  ) -> float:
    """Queues one frame, waiting for room if there is none.

    Returns:
      When the emulated link delivers it, on `time.monotonic`; now without one.

    Args:
      frame: as an `encode_` function returned it.
      classes: its bytes per traffic class, if known; else they are worked out.

    Raises:
      PeerLost: if the channel is or gets broken.
      DeadlineExceeded: if there is no room within `send_deadline_s`.
    """
    if not isinstance(frame, bytes):
      raise TypeError(f"frame: {type(frame).__name__}, must be bytes")
    if classes is None:
      classes = frame_classes(frame)
    limit = self._options.max_outgoing_bytes
    try:
      async with asyncio.timeout(self._options.send_deadline_s):
        while self._outbox and self._outbox_bytes + len(frame) > limit:
          self._raise_if_lost()
          self._outbox_room.clear()
          await self._outbox_room.wait()
    except TimeoutError:
      raise DeadlineExceeded(
        f"{self.peer}: no room to send within {self._options.send_deadline_s} s"
      ) from None
    self._raise_if_lost()
    deliver_at_s = time.monotonic()
    if self._shaper is not None:
      self._shaper_state, deliver_at_s = self._shaper.schedule(
        self._shaper_state, deliver_at_s, len(frame)
      )
    self.counter.add(self.link, classes)
    self._outbox.append((deliver_at_s, frame))
    self._outbox_bytes += len(frame)
    self._outbox_changed.set()
    return deliver_at_s

  async def send_now(self, frame: bytes) -> None:
    """Writes a control frame past the queue and the emulated link.

    Raises:
      PeerLost: if the channel is or gets broken.
    """
    self._raise_if_lost()
    self._write_control(frame)
    with contextlib.suppress(OSError):  # the read loop finds the cause
      await self._writer.drain()
    self._raise_if_lost()

  async def recv(self, *, deadline_s: float | None = None) -> Frame:
    """Returns the next frame; heartbeats never show up here.

    Args:
      deadline_s: longest wait; None to wait as long as the peer is alive.

    Raises:
      PeerLost: if the channel is or gets broken and no frame is left.
      DeadlineExceeded: if nothing came in time.
    """
    try:
      async with asyncio.timeout(deadline_s):
        while not self._inbox:
          self._raise_if_lost()
          self._inbox_changed.clear()
          await self._inbox_changed.wait()
    except TimeoutError:
      raise DeadlineExceeded(
        f"{self.peer}: no frame within {deadline_s} s"
      ) from None
    frame = self._inbox.popleft()
    self._inbox_bytes -= frame.num_bytes
    self._inbox_room.set()
    return frame

  def ping(self) -> None:
    """Sends a ping now, unless one is unanswered or the channel is broken."""
    if self._loss is None and self._ping_sent_s is None:
      self._ping_sent_s = time.monotonic()
      self._write_control(
        encode_control(Kind.PING, {"sent_s": self._ping_sent_s})
      )

  async def close(
    self, reason: str = "done", *, deadline_s: float = 5.0
  ) -> None:
    """Delivers what is queued, says goodbye and ends the connection."""
    if self._loss is None:
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(deadline_s):
          while self._outbox and self._loss is None:
            self._outbox_room.clear()
            await self._outbox_room.wait()
      self._lose(f"closed by this side ({reason})", goodbye=reason)
    await asyncio.gather(*self._tasks, return_exceptions=True)
    with contextlib.suppress(OSError, TimeoutError):
      async with asyncio.timeout(_GOODBYE_S):
        await self._writer.wait_closed()
    self._writer.transport.abort()

  async def __aenter__(self) -> "Channel":
    return self

  async def __aexit__(self, *exc_info: object) -> None:
    await self.close()

  def _raise_if_lost(self) -> None:
    if (lost := self.lost) is not None:
      raise lost

  def _write_control(self, frame: bytes) -> None:
    trace = frame[1] & 0x0F == Kind.TRACE  # the low half of the second byte
    self.counter.add(self.link, {"trace" if trace else "control": len(frame)})
    self._writer.write(frame)

  def _lose(
    self,
    cause: str,
    error: BaseException | None = None,
    *,
    goodbye: str | None = None,
    said_goodbye: bool = False,
  ) -> None:
    """Breaks the channel; the first cause stands, wakes whoever waits.

    With `goodbye` the peer is told why, if it still listens.
    """
    if self._loss is not None:
      return
    self._loss = PeerLost(self.peer, cause, said_goodbye=said_goodbye)
    self._loss.__cause__ = error
    transport = self._writer.transport
    if goodbye is None:
      transport.abort()
    else:
      self._write_control(encode_control(Kind.BYE, {"reason": goodbye}))
      self._writer.close()
      asyncio.get_running_loop().call_later(_GOODBYE_S, transport.abort)
    self._outbox.clear()
    for event in (self._outbox_room, self._inbox_changed, self._inbox_room):
      event.set()
    for task in self._tasks:
      if task is not asyncio.current_task():
        task.cancel()

  async def _guard(self, loop: Callable[[], Awaitable[None]]) -> None:
    """Makes a fault of this side end the channel instead of hanging it."""
    try:
      await loop()
    except Exception as error:
      self._lose(f"fault of this side: {error!r}", error, goodbye=repr(error))
      raise

  async def _write_loop(self) -> None:
    try:
      while True:
        while not self._outbox:
          self._outbox_changed.clear()
          await self._outbox_changed.wait()
        deliver_at_s, frame = self._outbox[0]
        await sleep_until(deliver_at_s)
        self._writer.write(frame)
        await self._writer.drain()
        self._outbox.popleft()
        self._outbox_bytes -= len(frame)
        self._outbox_room.set()
    except OSError as error:
      self._lose(f"connection lost while sending ({error})", error)

  async def _read_loop(self) -> None:
    try:
      while data := await self._reader.read(_READ_BYTES):
        self._heard_s = time.monotonic()
        for frame in self._decoder.feed(data):
          self.received_bytes += frame.num_bytes
          await self._take(frame)
      self._lose(self._closed_cause())
    except FrameError as error:
      cause = f"sent a frame that was refused: {error}"
      self._lose(cause, error, goodbye=f"your frame was refused: {error}")
    except ssl.SSLError as error:
      self._lose(f"{self._doubt()}TLS alert: {error}", error)
    except OSError as error:
      self._lose(f"{self._doubt()}connection lost ({error})", error)

  def _doubt(self) -> str:
    """Returns what a break before the first frame means under TLS 1.3.

    The client's handshake ends before the server has seen its certificate.
    """
    if self._may_be_unwelcome and not self.received_bytes:
      return "certificate not accepted by the peer, it seems: "
    return ""

  def _closed_cause(self) -> str:
    where = " in the middle of a frame" if self._decoder.mid_frame else ""
    return f"{self._doubt()}connection closed{where}"

  async def _take(self, frame: Frame) -> None:
    """Handles a heartbeat or goodbye, queues anything else."""
    now_s = time.monotonic()
    if frame.kind == Kind.PING:
      backlog = self._writer.transport.get_write_buffer_size()
      if backlog < _MAX_ANSWER_BACKLOG_BYTES:
        fields = pong_fields(decode_control(frame), received_s=now_s)
        self._write_control(encode_control(Kind.PONG, fields))
    elif frame.kind == Kind.PONG:
      sample = estimate(decode_control(frame), self._ping_sent_s, now_s)
      if sample is not None:
        self._ping_sent_s = None
        self.clock = sample.merge(self.clock)
    elif frame.kind == Kind.BYE:
      reason = decode_control(frame).get("reason", "no reason given")
      self._lose(f"said goodbye ({reason})", said_goodbye=True)
    else:
      limit = self._options.max_incoming_bytes
      while self._inbox and self._inbox_bytes + frame.num_bytes > limit:
        self._reading_paused = True
        self._inbox_room.clear()
        await self._inbox_room.wait()
      if self._reading_paused:
        self._reading_paused = False
        self._heard_s = time.monotonic()
      self._inbox.append(frame)
      self._inbox_bytes += frame.num_bytes
      self._inbox_changed.set()

  async def _heartbeat_loop(self) -> None:
    interval_s = self._options.ping_interval_s
    deadline_s = self._options.peer_deadline_s
    while True:
      before_s = time.monotonic()
      wake_s = before_s + interval_s
      if self._heard_s + deadline_s > before_s:
        wake_s = min(wake_s, self._heard_s + deadline_s)
      await asyncio.sleep(wake_s - before_s)
      now_s = time.monotonic()
      if now_s - wake_s > interval_s:
        self._heard_s = now_s  # this process stood still; not the peer's fault
      if self._reading_paused:
        self._heard_s = now_s  # unread bytes are waiting
      if now_s - self._heard_s >= deadline_s:
        self._lose(f"no answer for {deadline_s:g} s")
        return
      self._ping_sent_s = None  # an answer to an older ping counts as heard
      self.ping()


def _certificate_name(writer: asyncio.StreamWriter) -> str | None:
  """Returns the common name of the peer's certificate, if it showed one."""
  certificate: dict[str, Any] = writer.get_extra_info("peercert") or {}
  for relative_name in certificate.get("subject", ()):
    for kind, value in relative_name:
      if kind == "commonName":
        return value
  return None
