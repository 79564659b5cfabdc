# SPDX-License-Identifier: Apache-2.0
"""The coordinator's side of one session: two channels, while they last."""

import asyncio
import contextlib
import secrets
import ssl
from collections.abc import Sequence
from typing import Any

from wanspec_jax import wire
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import _protocol as proto
from wanspec_jax.worlds._cluster import Cluster
from wanspec_jax.worlds._protocol import SessionFault

# A fault travels from stage to stage; the closing of another channel may
# overtake it, and would name a neighbour instead of the first cause.
_FIRST_CAUSE_S = 1.0
_MAX_BODY_BYTES = 16 * 2**20  # verdicts and traces are small
_MAX_EVENTS = 256  # heard and not yet handled; beyond it TCP holds them back


class Joined:
  """A session that a coordinator has opened, or is about to.

  Args:
    cluster: the members.
    model_hash: of the coordinator's own copy of the model.
    hops: emulated link of each of the P + 1 hops, or None.
    client_ssl: to connect with; None for plain TCP.
    events: where what the channels bring is put, as `("frame", channel, frame)`
      and `("lost", channel, error)`; whoever takes one says so by `taken`.

  Attributes:
    head: channel to the first stage; runs leave by it.
    back: channel from the last one; verdicts come, cancels leave by it.
    infos: what each stage said on being ready.
  """

  def __init__(
    self,
    cluster: Cluster,
    *,
    model_hash: str,
    hops: Sequence[wire.LinkShaper] | None,
    client_ssl: ssl.SSLContext | None,
    events: asyncio.Queue[Any],
  ):
    self.cluster = cluster
    self.head: wire.Channel
    self.back: wire.Channel
    self.infos: list[dict[str, Any]] = []
    self._model_hash = model_hash
    self._hops = hops
    self._client_ssl = client_ssl
    self._events = events
    self._room = asyncio.Semaphore(_MAX_EVENTS)
    self._channels: list[wire.Channel] = []
    self._listeners: list[asyncio.Task[None]] = []

  async def open(self) -> None:
    """Joins the ring and waits until all of it is ready.

    Raises:
      SessionFault: naming who refused, failed or was not there.
    """
    cluster = self.cluster
    hello: dict[str, Any] = {
      "name": proto.COORDINATOR,
      "session": secrets.token_hex(8),
      "ring": [stage.name for stage in cluster.stages],
      "hops": None
      if self._hops is None
      else [proto.shaper_fields(hop) for hop in self._hops],
    }
    last = cluster.num_stages - 1
    first, final = (None, None)
    if self._hops is not None:
      first, final = self._hops[0], self._hops[-1]
    try:
      agreement = cluster.agreement(0, self._model_hash)
      self.head = await self._join(
        0, hello | {"role": "ring"} | agreement, "hop 0", first
      )
      name = cluster.stages[0].name
      try:
        self.infos = await proto.await_ready(
          self.head, name, cluster.start_deadline_s
        )
      except wire.WireError as error:
        raise proto.as_fault(error, name) from error
      try:
        self.back = await self._join(
          last, hello | {"role": "return"}, f"back {last + 1}", final
        )
      except SessionFault as fault:
        raise await self._word(self.head) or fault from fault
    except BaseException:
      await self.close()
      raise
    self._listeners = [
      asyncio.create_task(self._listen(channel)) for channel in self._channels
    ]

  async def close(self, fault: SessionFault | None = None) -> None:
    """Leaves the session; its events stop.

    Args:
      fault: why, if it is broken. Both ends of the ring are told, so that the
        members on either side of the break are free at once.
    """
    await stop(self._listeners)
    await asyncio.gather(*(self._part(c, fault) for c in self._channels))

  async def _part(
    self, channel: wire.Channel, fault: SessionFault | None
  ) -> None:
    if fault is not None:
      with contextlib.suppress(wire.WireError):
        await channel.send_now(fault.frame())
    await channel.close("session over", deadline_s=0.0 if fault else 1.0)

  async def _join(
    self,
    index: int,
    hello: dict[str, Any],
    link: str,
    shaper: wire.LinkShaper | None,
  ) -> wire.Channel:
    there = self.cluster.stages[index]
    deadline_s = self.cluster.peer_deadline_s
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
        shaper=shaper,
        retry=True,
        deadline_s=deadline_s,
      )
      self._channels.append(channel)
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
        await self._room.acquire()
        self._events.put_nowait(("frame", channel, await channel.recv()))
    except wire.WireError as error:
      self._events.put_nowait(("lost", channel, error))

  @property
  def counter(self) -> wire.ByteCounter:
    """Bytes that this side has sent."""
    totals = wire.ByteCounter()
    for channel in self._channels:
      totals = totals.merge(channel.counter)
    return totals

  def taken(self) -> None:
    """Makes room for another event."""
    self._room.release()

  async def launch(self, data: bytes) -> float:
    """Sends a frame round the ring; returns when the first hop delivers it."""
    return await self._send(self.head, data)

  async def cancel(self, data: bytes) -> float:
    """Sends a frame against the ring; returns when the last hop delivers it."""
    return await self._send(self.back, data)

  async def _send(self, channel: wire.Channel, data: bytes) -> float:
    try:
      return await channel.send(data)
    except wire.WireError as error:
      raise await self.first_cause(channel, error) from error

  async def tell(self, message: dict[str, Any]) -> None:
    """Sends a control message round the ring, past the emulated links."""
    try:
      await self.head.send_now(wire.encode_control(Kind.CONTROL, message))
    except wire.WireError as error:
      raise await self.first_cause(self.head, error) from error

  async def first_cause(
    self, channel: wire.Channel, error: wire.WireError
  ) -> SessionFault:
    """Waits a moment for the word of a stage that saw the first cause.

    In its absence a channel that broke says more than one that was closed in
    good order. What others say of this side it knows better itself, unless it
    has nothing else to go by. Events of others are kept.
    """
    about_us = None
    others = []
    try:
      async with asyncio.timeout(_FIRST_CAUSE_S):
        while True:
          what, source, detail = event = await self._events.get()
          if what in ("frame", "lost"):
            self.taken()
          else:
            others.append(event)
          if what == "frame" and detail.kind == Kind.FAULT:
            fault = proto.fault_of(detail, source.peer)
            if fault.stage != proto.COORDINATOR:
              return fault
            about_us = fault
          elif what == "lost" and proto.is_goodbye(error):
            channel, error = source, detail
    except TimeoutError:
      pass
    finally:
      for event in others:
        self._events.put_nowait(event)
    if about_us is not None and proto.is_goodbye(error):
      return about_us
    return proto.as_fault(error, channel.peer)


async def stop(tasks) -> None:
  """Cancels tasks and waits for their end."""
  tasks = list(tasks)
  for task in tasks:
    task.cancel()
  await asyncio.gather(*tasks, return_exceptions=True)
