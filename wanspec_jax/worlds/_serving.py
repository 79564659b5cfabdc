# SPDX-License-Identifier: Apache-2.0
"""A stage behind a socket: one process per stage, one session at a time."""

import asyncio
import concurrent.futures
import contextlib
import logging
import time
from collections.abc import Callable
from typing import Any

from wanspec_jax import wire
from wanspec_jax.messages import Returned
from wanspec_jax.wire import Kind
from wanspec_jax.worlds._cluster import Cluster
from wanspec_jax.worlds._stage import Output, Stage

_LOG = logging.getLogger(__name__)
_SPANS_PER_FRAME = 4000
_SETTLE_S = 2.0  # how long a stage goes on telling others why it stopped


class SessionFault(Exception):
  """A stage or link failed; names the first cause.

  Attributes:
    stage: name of the stage at fault.
    cause: what went wrong there.
  """

  def __init__(self, stage: str, cause: str):
    super().__init__(f"{stage}: {cause}")
    self.stage = stage
    self.cause = cause


def shaper_fields(shaper: wire.LinkShaper) -> list[float]:
  return [
    shaper.delay_s,
    min(shaper.bandwidth_bps, 1e300),
    shaper.jitter_s,
    shaper.seed,
  ]


def shaper_of(fields: list[float]) -> wire.LinkShaper:
  delay_s, bandwidth_bps, jitter_s, seed = fields
  return wire.LinkShaper(
    delay_s=delay_s,
    bandwidth_bps=bandwidth_bps,
    jitter_s=jitter_s,
    seed=int(seed),
  )


class StageServer:
  """Serves one stage until cancelled.

  Args:
    stage: loaded and compiled.
    cluster: the ring; `cluster.stages[index]` is this stage.
    index: position in the ring.
    model_hash: what all hosts must agree upon.
  """

  def __init__(
    self, stage: Stage, *, cluster: Cluster, index: int, model_hash: str
  ):
    self._stage = stage
    self._cluster = cluster
    self._index = index
    self._me = cluster.stages[index].name
    self._agreement = cluster.agreement(index, model_hash)
    self._session: str | None = None
    self._back: asyncio.Future[wire.Channel] | None = None
    self._ended: asyncio.Event = asyncio.Event()
    self._worker = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix="stage"
    )
    self._options = channel_options(cluster)
    self._client_ssl = None
    if cluster.keys is not None:
      self._client_ssl = wire.client_context(cluster.keys, self._me)

  async def serve(self, on_ready: Callable[[int], None]) -> None:
    """Listens until cancelled; calls `on_ready(port)` once it does."""
    here = self._cluster.stages[self._index]
    ssl_context = None
    if self._cluster.keys is not None:
      ssl_context = wire.server_context(self._cluster.keys, self._me)
    listener = await wire.listen(
      self._handle,
      host=here.host,
      port=here.port,
      link=f"back {self._index}",
      ssl_context=ssl_context,
      options=self._options,
    )
    async with listener:
      on_ready(listener.port)
      await asyncio.Event().wait()

  # Handshake. ----------------------------------------------------------------

  def _check(self, hello: dict[str, Any]) -> str | None:
    role = hello.get("role")
    if role == "return":
      if self._index != self._cluster.num_stages - 1:
        return f"{self._me} is not the last stage: verdicts come from that one"
      if hello.get("session") != self._session or self._back is None:
        return f"{self._me} has no session {hello.get('session')!r}"
      if self._back.done():
        return f"{self._me} returns its verdicts to somebody else already"
      return None
    if role != "ring":
      return f"role {role!r} is unknown here"
    for field, ours in self._agreement.items():
      theirs = hello.get(field)
      if theirs != ours:
        return f"{field} of {self._me} is {ours!r}, {theirs!r} was asked for"
    if self._session is not None:
      return f"{self._me} is busy with another session"
    if not isinstance(hello.get("session"), str):
      return "session: must be a string"
    hops = hello.get("hops")
    if hops is not None and len(hops) != self._cluster.num_stages + 1:
      return f"hops: must be {self._cluster.num_stages + 1} links"
    return None

  async def _handle(self, channel: wire.Channel) -> None:
    mine = False

    def check(hello: dict[str, Any]) -> str | None:
      nonlocal mine
      reason = self._check(hello)
      if reason is None and hello["role"] == "ring":
        mine = True
        self._session = hello["session"]  # taken before anybody else asks
        self._back = asyncio.get_running_loop().create_future()
        self._ended = asyncio.Event()
      return reason

    try:
      hello = await wire.answer(
        channel, check, deadline_s=self._cluster.peer_deadline_s
      )
    except BaseException:
      if mine:
        self._free()
      raise
    if hello["role"] == "return":
      assert self._back is not None
      ended = self._ended
      if hello.get("hops") is not None:
        channel.shape(shaper_of(hello["hops"][-1]))
      channel.link = f"hop {self._cluster.num_stages}"
      self._back.set_result(channel)
      await ended.wait()
      return
    try:
      await _Session(self, channel, hello).run()
    finally:
      self._free()

  def _free(self) -> None:
    self._ended.set()
    self._session = None
    self._back = None


class _Session:
  """One coordinator's use of the stage."""

  def __init__(
    self, server: StageServer, before: wire.Channel, hello: dict[str, Any]
  ):
    self._server = server
    self._stage = server._stage
    self._cluster = server._cluster
    self._index = server._index
    self._before = before
    self._hello = hello
    self._next: wire.Channel | None = None
    self._spans: list[list[Any]] = []
    self._hop = f"hop {self._index + 1}"

  async def run(self) -> None:
    """Runs until the coordinator is done or something breaks."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(self._server._worker, self._stage.reset)
    reason = "session over"
    try:
      infos = [self._info()]
      if self._index + 1 < self._cluster.num_stages:
        self._next, behind = await self._connect_next()
        infos += behind
      await self._before.send_now(
        wire.encode_control(Kind.CONTROL, {"op": "ready", "stages": infos})
      )
      async with asyncio.TaskGroup() as tasks:
        tasks.create_task(self._forward())
        if self._next is not None:
          tasks.create_task(self._backward(self._next))
    except BaseExceptionGroup as group:
      reason = await self._report(group.exceptions[0])
    except (wire.WireError, SessionFault) as error:
      reason = await self._report(error)
    finally:
      if self._next is not None:
        await self._next.close(reason)
      back = self._server._back
      if back is not None and back.done() and not back.cancelled():
        await back.result().close(reason)

  def _info(self) -> dict[str, Any]:
    return {"name": self._server._me, "traces": dict(self._stage.num_traces)}

  async def _connect_next(self) -> tuple[wire.Channel, list[Any]]:
    index = self._index + 1
    there = self._cluster.stages[index]
    shaper = None
    if self._hello.get("hops") is not None:
      shaper = shaper_of(self._hello["hops"][index])
    try:
      channel = await wire.connect(
        there.host,
        there.port,
        peer=there.name,
        link=self._hop,
        ssl_context=self._server._client_ssl,
        options=self._server._options,
        shaper=shaper,
        retry=True,
        deadline_s=self._cluster.peer_deadline_s,
      )
      await wire.offer(
        channel,
        self._hello
        | {
          "name": self._server._me,
          "stage": index,
          "layers": list(there.layers),
        },
        deadline_s=self._cluster.peer_deadline_s,
      )
      behind = await await_ready(
        channel, there.name, self._cluster.start_deadline_s
      )
    except wire.WireError as error:
      raise SessionFault(there.name, _cause(error)) from error
    return channel, behind

  # The ring's direction. -----------------------------------------------------

  async def _forward(self) -> None:
    """Takes frames from the stage before, in order, and passes results on."""
    while True:
      try:
        frame = await self._before.recv()
      except wire.PeerLost as error:
        if error.said_goodbye:
          raise _Over(error.cause) from error
        raise
      if frame.kind == Kind.RUN:
        await self._run(frame)
      elif frame.kind == Kind.CONTROL:
        await self._control(wire.decode_control(frame))
      else:
        raise wire.FrameError(f"{frame.kind.name} has no meaning here")

  async def _run(self, frame: wire.Frame) -> None:
    run, payload = wire.decode_run(frame.body)
    start_s = time.monotonic()
    out = await self._work(self._stage.process, run, payload)
    end_s = time.monotonic()
    self._spans.append(
      [
        f"stage {self._index}",
        f"{run.num_rows} rows",
        start_s,
        end_s,
        run.run_id,
      ]
    )
    await self._pass_on(out)

  async def _pass_on(self, out: Output) -> None:
    if isinstance(out.message, Returned):
      data = wire.encode_returned(out.message)
      channel = await self._return_channel()
    else:
      data = wire.encode_run(out.message, out.payload)
      channel = self._next
      assert channel is not None
    handed_s = time.monotonic()
    arrival_s = await channel.send(data)
    self._spans.append(
      [self._hop, f"{len(data)} B", handed_s, arrival_s, out.message.run_id]
    )

  async def _return_channel(self) -> wire.Channel:
    back = self._server._back
    assert back is not None
    try:
      async with asyncio.timeout(self._cluster.peer_deadline_s):
        return await asyncio.shield(back)
    except TimeoutError:
      raise SessionFault(
        "coordinator", "never connected for the verdicts"
      ) from None

  async def _work(self, function, *args, **kwargs):
    """Runs device work on the stage's own thread; heartbeats go on."""
    loop = asyncio.get_running_loop()
    try:
      return await loop.run_in_executor(
        self._server._worker, lambda: function(*args, **kwargs)
      )
    except Exception as error:
      _LOG.exception("%s: stage work failed", self._server._me)
      raise SessionFault(
        self._server._me, f"{type(error).__name__}: {error}"
      ) from error

  async def _control(self, message: dict[str, Any]) -> None:
    match message.get("op"):
      case "measure":
        times = await self._work(
          self._stage.measure,
          num_slots=int(message["num_slots"]),
          repeats=int(message["repeats"]),
        )
        message["seconds"] = [
          *message["seconds"],
          [times[b] for b in self._stage.shape.row_buckets],
        ]
        data = wire.encode_control(Kind.CONTROL, message)
        channel = self._next or await self._return_channel()
        await channel.send_now(data)
      case "trace":
        await self._send_trace()
        if self._next is not None:
          await self._next.send_now(
            wire.encode_control(Kind.CONTROL, message)
          )
      case op:
        raise wire.FrameError(f"control operation {op!r} is unknown")

  # Against it. ---------------------------------------------------------------

  async def _send_trace(self) -> None:
    counters = [self._before.counter]
    if self._next is not None:
      counters.append(self._next.counter)
    else:
      counters.append((await self._return_channel()).counter)
    spans, self._spans = self._spans, []
    parts = [
      spans[i : i + _SPANS_PER_FRAME]
      for i in range(0, len(spans) or 1, _SPANS_PER_FRAME)
    ]
    for i, part in enumerate(parts):
      last = i + 1 == len(parts)
      await self._before.send_now(
        wire.encode_control(
          Kind.TRACE,
          {
            "stage": self._index,
            "spans": part,
            "last": last,
            "bytes": [c.as_dict() for c in counters] if last else [],
            "traces": dict(self._stage.num_traces),
          },
        )
      )

  async def _backward(self, channel: wire.Channel) -> None:
    """Relays faults and traces of the stages behind, on this host's clock."""
    there = self._cluster.stages[self._index + 1].name
    while True:
      try:
        frame = await channel.recv()
      except wire.PeerLost as error:
        raise SessionFault(there, _cause(error)) from error
      message = wire.decode_control(frame)
      if frame.kind == Kind.FAULT:
        raise SessionFault(str(message["stage"]), str(message["cause"]))
      if frame.kind == Kind.TRACE:
        offset_s = channel.clock_offset_s or 0.0
        for span in message["spans"]:
          span[2] -= offset_s
          span[3] -= offset_s
        await self._before.send_now(
          wire.encode_control(Kind.TRACE, message)
        )

  async def _report(self, error: BaseException) -> str:
    """Tells the stage before why this session ends; returns the words."""
    if isinstance(error, _Over):
      return "session over"
    if isinstance(error, SessionFault):
      stage, cause = error.stage, error.cause
    elif isinstance(error, wire.PeerLost):
      stage, cause = error.peer, error.cause
    else:
      stage, cause = self._server._me, f"{type(error).__name__}: {error}"
    _LOG.warning("%s: session ends: %s: %s", self._server._me, stage, cause)
    with contextlib.suppress(wire.WireError, TimeoutError):
      async with asyncio.timeout(_SETTLE_S):
        await self._before.send_now(
          wire.encode_control(Kind.FAULT, {"stage": stage, "cause": cause})
        )
    return f"{stage}: {cause}"


class _Over(Exception):
  """The coordinator said goodbye."""


def _cause(error: wire.WireError) -> str:
  if isinstance(error, wire.PeerLost):
    return error.cause
  if isinstance(error, wire.PeerRefused):
    return f"refused: {error.reason}"
  return str(error)


async def await_ready(
  channel: wire.Channel, name: str, deadline_s: float
) -> list[dict[str, Any]]:
  """Returns the infos of a stage and those behind it, once all are ready.

  Raises:
    SessionFault: what the first failing stage said.
    WireError: if the channel breaks or nothing comes in time.
  """
  frame = await channel.recv(deadline_s=deadline_s)
  message = wire.decode_control(frame)
  if frame.kind == Kind.FAULT:
    raise SessionFault(str(message["stage"]), str(message["cause"]))
  if frame.kind != Kind.CONTROL or message.get("op") != "ready":
    raise wire.FrameError(f"{name}: {frame.kind.name} in place of ready")
  return message["stages"]


def channel_options(cluster: Cluster) -> wire.ChannelOptions:
  """Returns the bounds and deadlines of the ring's channels."""
  deadline_s = cluster.peer_deadline_s
  return wire.ChannelOptions(
    peer_deadline_s=deadline_s, ping_interval_s=min(2.0, deadline_s / 4)
  )
