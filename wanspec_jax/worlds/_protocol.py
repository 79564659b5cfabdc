# SPDX-License-Identifier: Apache-2.0
"""What the members of a session say to each other besides runs and verdicts.

Nothing that comes from another host is believed before it is checked: every
reader here names whoever sent what it refuses.
"""

import asyncio
import math
import reprlib
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from wanspec_jax import wire
from wanspec_jax.wire import Kind
from wanspec_jax.worlds._cluster import Cluster

COORDINATOR = "coordinator"  # also the name on its certificate
MAX_SPANS = 2**17  # of one stage; older ones are forgotten
SPANS_PER_FRAME = 4000  # a frame of them stays well under the control cap
MAX_REPEATS = 1000
BUSY = "is busy with another session"  # what a stage says that is not free
SETTLE_S = 2.0  # how long a member goes on telling others why it stopped

_MAX_WORDS = 2000  # characters of a cause that are passed on
_MAX_NAME = 100
_MAX_INFOS = 1000


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

  def frame(self) -> bytes:
    """Returns the FAULT frame that passes it on."""
    return wire.encode_control(
      Kind.FAULT,
      {"stage": clip(self.stage, _MAX_NAME), "cause": clip(self.cause)},
    )


class Over(Exception):
  """The coordinator said goodbye: no fault."""


def clip(text: Any, limit: int = _MAX_WORDS) -> str:
  """Returns text that may come from another host, bounded in length."""
  text = str(text).encode(errors="replace").decode()  # no lone surrogates
  return text if len(text) <= limit else text[: limit - 1] + "…"


def briefly(value: Any) -> str:
  """Returns a short `repr` of a value that may come from another host."""
  return clip(reprlib.repr(value), 200)


def fault_of(frame: wire.Frame, sender: str) -> SessionFault:
  """Returns the fault that a frame reports; any other frame is one itself."""
  if frame.kind != Kind.FAULT:
    return SessionFault(sender, f"{frame.kind.name} came out of turn")
  try:
    message = wire.decode_control(frame)
    return SessionFault(
      clip(message["stage"], _MAX_NAME), clip(message["cause"])
    )
  except (wire.FrameError, KeyError) as error:
    return SessionFault(sender, f"sent an unreadable fault ({error})")


def as_fault(error: BaseException, name: str) -> SessionFault:
  """Returns any error as a fault; of `name` unless it says of whom."""
  match error:
    case SessionFault():
      return error
    case wire.PeerLost(peer=peer, cause=cause):
      return SessionFault(peer, cause)
    case wire.PeerRefused(peer=peer, reason=reason):
      return SessionFault(peer, f"refused: {reason}")
    case wire.WireError():
      return SessionFault(name, str(error).removeprefix(f"{name}: "))
  return SessionFault(name, f"{type(error).__name__}: {error}")


def first_of(faults: Sequence[SessionFault]) -> SessionFault:
  """Returns the first fault, which says what came of it."""
  first, *others = faults
  if not others:
    return first
  words = [first.cause, *map(str, others)]
  told = SessionFault(first.stage, "; then ".join(words))
  told.__cause__ = others[-1]
  return told


def is_goodbye(error: BaseException) -> bool:
  """Whether it only says that a peer left, which has a cause of its own."""
  return isinstance(error, wire.PeerLost) and error.said_goodbye


def read_control(frame: wire.Frame, sender: str) -> dict[str, Any]:
  """Returns a control frame's map.

  Raises:
    SessionFault: of `sender`, if it is none.
  """
  try:
    return wire.decode_control(frame)
  except wire.FrameError as error:
    raise SessionFault(sender, f"sent a bad frame: {error}") from error


def channel_options(
  cluster: Cluster, *, max_body_bytes: int = wire.MAX_BODY_BYTES
) -> wire.ChannelOptions:
  """Returns the bounds and deadlines of the ring's channels."""
  deadline_s = cluster.peer_deadline_s
  return wire.ChannelOptions(
    max_body_bytes=max_body_bytes,
    peer_deadline_s=deadline_s,
    ping_interval_s=min(2.0, deadline_s / 4),
  )


def shaper_fields(shaper: wire.LinkShaper) -> list[float]:
  """Returns a shaper as it travels; `read_hops` inverts it."""
  return [
    shaper.delay_s,
    min(shaper.bandwidth_bps, 1e300),
    shaper.jitter_s,
    shaper.seed,
  ]


def read_hops(fields: Any, num_hops: int) -> list[wire.LinkShaper] | None:
  """Returns the emulated links that an introduction asks for.

  Raises:
    ValueError: if they are anything but None or `num_hops` legal links.
  """
  if fields is None:
    return None
  if not isinstance(fields, list) or len(fields) != num_hops:
    raise ValueError(f"hops: must be {num_hops} links")
  hops = []
  for entry in fields:
    if not (
      isinstance(entry, list)
      and len(entry) == 4
      and all(type(x) in (int, float) for x in entry)
      and isinstance(entry[3], int)
    ):
      raise ValueError(
        f"hops: {briefly(entry)} is not [delay_s, bandwidth_bps, jitter_s, "
        "seed]"
      )
    delay_s, bandwidth_bps, jitter_s, seed = entry
    hops.append(
      wire.LinkShaper(
        delay_s=float(delay_s),
        bandwidth_bps=float(bandwidth_bps),
        jitter_s=float(jitter_s),
        seed=seed,
      )
    )
  return hops


def read_ring(names: Any, cluster: Cluster) -> Cluster:
  """Returns the ring that an introduction asks for; None leaves it as it is.

  Raises:
    ValueError: if anybody in it may not serve there.
  """
  if names is None:
    return cluster
  if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
    raise ValueError("ring: must be names")
  return cluster.arranged(names)


async def await_ready(
  channel: wire.Channel,
  name: str,
  deadline_s: float,
  relay: Callable[[bytes], Awaitable[None]] | None = None,
) -> list[dict[str, Any]]:
  """Returns the infos of a stage and those behind it, once all are ready.

  A stage says for whom it waits, and passes on what those behind it say, so
  whoever runs out of patience first knows the name.

  Args:
    channel: to the stage.
    name: of the stage.
    deadline_s: for all of them together.
    relay: gets each frame that says for whom the ring is waiting.

  Raises:
    SessionFault: what the first failing stage said, or who is not ready in
      time.
    PeerLost: if the channel breaks.
  """
  awaited = name
  try:
    async with asyncio.timeout(deadline_s):
      while True:
        frame = await channel.recv()
        if frame.kind != Kind.CONTROL:
          raise fault_of(frame, name)
        message = read_control(frame, name)
        op = message.get("op")
        if op == "ready":
          return _read_infos(message.get("stages"), name)
        if op != "waiting":
          raise SessionFault(name, f"{briefly(op)} in place of 'ready'")
        awaited = clip(message.get("stage"), _MAX_NAME)
        if relay is not None:
          await relay(waiting_frame(awaited))
  except TimeoutError:
    raise SessionFault(awaited, f"not ready within {deadline_s:g} s") from None


def read_seconds(
  frame: wire.Frame, sender: str, shape: tuple[int, int]
) -> list[list[float]]:
  """Returns the times that a measurement brought, one list per stage.

  Args:
    frame: a CONTROL.
    sender: whom to blame for what is refused.
    shape: stages and times of each.

  Raises:
    SessionFault: if they are anything else.
  """
  seconds = read_control(frame, sender).get("seconds")
  if not (
    isinstance(seconds, list)
    and len(seconds) == shape[0]
    and all(isinstance(s, list) and len(s) == shape[1] for s in seconds)
    and all(isinstance(x, float) and x >= 0 for s in seconds for x in s)
  ):
    raise SessionFault(sender, f"sent times that are not {shape}")
  return seconds


def waiting_frame(stage: str) -> bytes:
  """Returns the frame that says for whom the ring is waiting."""
  return wire.encode_control(Kind.CONTROL, {"op": "waiting", "stage": stage})


def _read_infos(infos: Any, sender: str) -> list[dict[str, Any]]:
  if (
    not isinstance(infos, list)
    or not 0 < len(infos) <= _MAX_INFOS
    or not all(isinstance(i, dict) and "traces" in i for i in infos)
  ):
    raise SessionFault(sender, "sent a 'ready' of another form")
  return infos


class Trace(NamedTuple):
  """What a stage noted since it was asked last, or a part of it.

  Attributes:
    stage: its position.
    spans: `(lane, name, start_s, end_s, run id)` on the receiver's clock.
    last: whether it is the last part.
    bytes: sent by the stage since the session began, by link and class.
    traces: compiled programs so far, by name.
  """

  stage: int
  spans: list[list[Any]]
  last: bool
  bytes: wire.ByteCounter
  traces: dict[str, int]

  def frame(self) -> bytes:
    """Returns the TRACE frame that passes it on."""
    return wire.encode_control(
      Kind.TRACE, self._asdict() | {"bytes": self.bytes.as_dict()}
    )


def read_trace(frame: wire.Frame, sender: str, offset_s: float) -> Trace:
  """Returns a trace whose times are put from its sender's clock on ours.

  Args:
    frame: a TRACE.
    sender: whom to blame for what is refused.
    offset_s: the sender's clock minus ours.

  Raises:
    SessionFault: if it is not one.
  """
  message = read_control(frame, sender)
  try:
    spans = [
      [
        clip(lane, _MAX_NAME),
        clip(name, _MAX_NAME),
        _finite(start_s) - offset_s,
        _finite(end_s) - offset_s,
        int(run),
      ]
      for lane, name, start_s, end_s, run in message["spans"]
    ]
    return Trace(
      stage=int(message["stage"]),
      spans=spans,
      last=bool(message["last"]),
      bytes=wire.ByteCounter.from_dict(message["bytes"]),
      traces={str(k): int(v) for k, v in message["traces"].items()},
    )
  except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as e:
    raise SessionFault(sender, f"sent a bad trace ({e!r})") from e


def _finite(value: float) -> float:
  if not math.isfinite(value):
    raise ValueError(f"time {value}")
  return float(value)
