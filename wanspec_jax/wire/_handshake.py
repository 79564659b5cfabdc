# SPDX-License-Identifier: Apache-2.0
"""Who are you, and do we agree: the first two frames of a channel."""

from collections.abc import Callable, Mapping
from typing import Any

from wanspec_jax.wire._channel import Channel
from wanspec_jax.wire._errors import (
  FrameError,
  PeerLost,
  PeerRefused,
  VersionError,
)
from wanspec_jax.wire._frames import (
  PROTOCOL_VERSION,
  Frame,
  Kind,
  decode_control,
  encode_control,
)


def _reason(frame: Frame) -> str:
  """Returns the reason of a REFUSE, whose form no version changes."""
  try:
    return str(decode_control(frame).get("reason", "no reason given"))
  except FrameError:
    return "no readable reason given"


async def _receive(channel: Channel, deadline_s: float) -> Frame:
  try:
    return await channel.recv(deadline_s=deadline_s)
  except PeerLost as error:
    if isinstance(error.__cause__, VersionError):
      raise error.__cause__ from error
    raise


async def offer(
  channel: Channel, hello: Mapping[str, Any], *, deadline_s: float = 10.0
) -> dict[str, Any]:
  """Introduces this side and returns what the peer says on accepting.

  Args:
    channel: on which nothing has been sent yet.
    hello: what the peer's `check` wants to know; under TLS `hello["name"]`
      must be the name on this side's certificate.
    deadline_s: for the peer's answer.

  Raises:
    PeerRefused: with the peer's reason.
    VersionError: if the peer speaks another protocol version.
    FrameError: if the peer answers with anything but ACCEPT or REFUSE.
    PeerLost: if the channel breaks first.
    DeadlineExceeded: if there is no answer in time.
  """
  await channel.send_now(encode_control(Kind.HELLO, hello))
  frame = await _receive(channel, deadline_s)
  if frame.kind == Kind.REFUSE:
    reason = _reason(frame)
    if frame.version != PROTOCOL_VERSION:
      raise VersionError(
        theirs=frame.version, ours=PROTOCOL_VERSION, detail=reason
      )
    raise PeerRefused(channel.peer, reason)
  if frame.kind != Kind.ACCEPT:
    raise FrameError(f"{channel.peer}: {frame.kind.name} in place of ACCEPT")
  accept = decode_control(frame)
  channel.ping()
  return accept


async def answer(
  channel: Channel,
  check: Callable[[dict[str, Any]], str | None],
  *,
  accept: Mapping[str, Any] | None = None,
  deadline_s: float = 10.0,
) -> dict[str, Any]:
  """Awaits the peer's introduction, accepts or refuses it, and returns it.

  A `name` in it becomes `channel.peer`.

  Args:
    channel: as its listener handed it over.
    check: returns why an introduction is refused, or None.
    accept: what to say on accepting.
    deadline_s: for the introduction.

  Raises:
    PeerRefused: if this side refuses, with the reason that the peer got too,
      or if the peer does, having seen this side's certificate.
    VersionError: if the peer speaks another protocol version; it was told.
    FrameError: if the first frame is not a legal HELLO.
    PeerLost: if the channel breaks first.
    DeadlineExceeded: if there is no introduction in time.
  """
  frame = await _receive(channel, deadline_s)
  if frame.kind == Kind.REFUSE:
    raise PeerRefused(channel.peer, _reason(frame))
  if frame.kind != Kind.HELLO:
    raise FrameError(f"{channel.peer}: {frame.kind.name} in place of HELLO")
  if frame.version != PROTOCOL_VERSION:
    await _refuse(
      channel,
      f"protocol version {frame.version} was offered, "
      f"version {PROTOCOL_VERSION} is spoken here",
    )
    raise VersionError(theirs=frame.version, ours=PROTOCOL_VERSION)
  hello = decode_control(frame)
  shown = channel.certificate_name
  name = hello.get("name")
  reason = None
  if shown is not None and name != shown:
    reason = f"name {name!r} is not that of the certificate, {shown!r}"
  if reason is None:
    reason = check(hello)
  if reason is not None:
    await _refuse(channel, reason)
    raise PeerRefused(channel.peer, reason)
  if isinstance(name, str):
    channel.peer = name
  await channel.send_now(encode_control(Kind.ACCEPT, accept or {}))
  channel.ping()
  return hello


async def _refuse(channel: Channel, reason: str) -> None:
  await channel.send_now(encode_control(Kind.REFUSE, {"reason": reason}))
