# SPDX-License-Identifier: Apache-2.0
"""Opening channels from either end."""

import asyncio
import collections
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable
from typing import Any

from wanspec_jax.wire._accounting import ByteCounter
from wanspec_jax.wire._channel import Channel, ChannelOptions
from wanspec_jax.wire._emulation import LinkShaper
from wanspec_jax.wire._errors import (
  DeadlineExceeded,
  PeerLost,
  PeerRefused,
  WireError,
)
from wanspec_jax.wire._frames import Kind, encode_control

_LOG = logging.getLogger(__name__)
_RETRY_S = 0.1
_TLS_CLOSE_S = 1.0


def set_nodelay(sock: Any) -> None:
  """Turns Nagle's algorithm off and makes sure that it is.

  Raises:
    WireError: if the system does not comply; a small frame would then wait for
      the acknowledgement of the one before it, tens of milliseconds.
  """
  sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
  if not sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY):
    raise WireError("TCP_NODELAY could not be set")


async def connect(
  host: str,
  port: int,
  *,
  peer: str,
  link: str = "",
  ssl_context: ssl.SSLContext | None = None,
  options: ChannelOptions | None = None,
  shaper: LinkShaper | None = None,
  counter: ByteCounter | None = None,
  retry: bool = False,
  deadline_s: float = 10.0,
) -> Channel:
  """Returns a channel to a listening peer.

  Args:
    host: name or address.
    port: TCP port.
    peer: the name that the peer's certificate must bear.
    link: name of this direction in `counter`.
    ssl_context: see `client_context`; None for plain TCP.
    options: bounds and deadlines.
    shaper: emulated link that outgoing frames pass.
    counter: bytes sent; a new one by default.
    retry: whether to try again while nobody listens yet.
    deadline_s: for TCP and TLS together, retries included.

  Raises:
    PeerRefused: if the peer's certificate is not that of `peer`.
    PeerLost: if it cannot be reached or breaks off.
    DeadlineExceeded: if it takes too long.
  """
  tls: dict[str, Any] = {}
  if ssl_context is not None:
    tls = {
      "ssl": ssl_context,
      "server_hostname": peer,
      "ssl_shutdown_timeout": _TLS_CLOSE_S,
    }
  try:
    async with asyncio.timeout(deadline_s):
      while True:
        try:
          reader, writer = await asyncio.open_connection(host, port, **tls)
          break
        except ConnectionRefusedError:
          if not retry:
            raise
          await asyncio.sleep(_RETRY_S)
  except TimeoutError as error:
    raise DeadlineExceeded(
      f"{peer}: no connection to {host}:{port} within {deadline_s} s"
    ) from error
  except ssl.SSLCertVerificationError as error:
    raise PeerRefused(
      peer, f"certificate not accepted by this side: {error.verify_message}"
    ) from error
  except ssl.SSLError as error:
    raise PeerLost(peer, f"TLS handshake failed: {error}") from error
  except OSError as error:
    raise PeerLost(
      peer, f"cannot connect to {host}:{port} ({error})"
    ) from error
  set_nodelay(writer.get_extra_info("socket"))
  channel = Channel(
    reader,
    writer,
    peer=peer,
    link=link,
    options=options,
    shaper=shaper,
    counter=counter,
  )
  if channel.certificate_name not in (None, peer):
    reason = f"certificate of {channel.certificate_name!r}, not of {peer!r}"
    refuse = encode_control(Kind.REFUSE, {"reason": reason})
    await channel.send_now(refuse)
    await channel.close(reason)
    raise PeerRefused(peer, reason)
  return channel


class Listener:
  """Accepts connections and runs a handler on the channel of each.

  Made by `listen`. A peer that fails the TLS handshake, or whose handler ends
  in a `WireError`, costs a line in `refusals` and in the log, nothing else.

  Attributes:
    port: TCP port that it listens on.
    refusals: the latest connections that came to nothing or broke, in words.
  """

  def __init__(
    self,
    sock: socket.socket,
    handler: Callable[[Channel], Awaitable[None]],
    *,
    ssl_context: ssl.SSLContext | None,
    options: ChannelOptions | None,
    shaper: LinkShaper | None,
    counter: ByteCounter | None,
    link: str,
    max_connections: int,
    deadline_s: float,
  ):
    self.port: int = sock.getsockname()[1]
    self.refusals: collections.deque[str] = collections.deque(maxlen=64)
    self._sock = sock
    self._handler = handler
    self._ssl_context = ssl_context
    self._options = options
    self._shaper = shaper
    self._counter = counter
    self._link = link
    self._max_connections = max_connections
    self._deadline_s = deadline_s
    self._connections: set[asyncio.Task[None]] = set()
    self._task = asyncio.create_task(self._accept_loop())

  async def close(self) -> None:
    """Stops listening and cancels the handlers; their channels are closed."""
    self._task.cancel()
    for task in self._connections:
      task.cancel()
    await asyncio.gather(self._task, *self._connections, return_exceptions=True)
    self._sock.close()

  async def __aenter__(self) -> "Listener":
    return self

  async def __aexit__(self, *exc_info: object) -> None:
    await self.close()

  def _note(self, text: str) -> None:
    self.refusals.append(text)
    _LOG.warning("%s", text)

  async def _accept_loop(self) -> None:
    loop = asyncio.get_running_loop()
    while True:
      try:
        connection, address = await loop.sock_accept(self._sock)
      except OSError as error:  # no file descriptors left, say
        self._note(f"cannot accept connections ({error})")
        await asyncio.sleep(_RETRY_S)
        continue
      where = f"{address[0]}:{address[1]}"
      if len(self._connections) >= self._max_connections:
        connection.close()
        self._note(f"{where}: over {self._max_connections} connections")
        continue
      task = asyncio.create_task(self._serve(connection, where))
      self._connections.add(task)
      task.add_done_callback(self._connections.discard)

  async def _serve(self, connection: socket.socket, where: str) -> None:
    try:
      channel = await self._admit(connection, where)
    except ssl.SSLCertVerificationError as error:
      connection.close()
      self._note(f"{where}: certificate not accepted: {error.verify_message}")
      return
    except (OSError, WireError) as error:
      connection.close()
      self._note(f"{where}: handshake failed: {error}")
      return
    try:
      await self._handler(channel)
    except WireError as error:
      if not (isinstance(error, PeerLost) and error.said_goodbye):
        self._note(f"{channel.peer}: {error}")
      await channel.close(str(error))
    finally:
      await channel.close()

  async def _admit(self, connection: socket.socket, where: str) -> Channel:
    """Runs the TLS handshake, if any.

    Not by `asyncio.start_server`, which hides why a handshake failed.
    """
    loop = asyncio.get_running_loop()
    connection.setblocking(False)
    set_nodelay(connection)
    tls: dict[str, Any] = {}
    if self._ssl_context is not None:
      tls = {
        "ssl": self._ssl_context,
        "ssl_handshake_timeout": self._deadline_s,
        "ssl_shutdown_timeout": _TLS_CLOSE_S,
      }
    reader = asyncio.StreamReader()
    protocol = asyncio.StreamReaderProtocol(reader)
    transport, _ = await loop.connect_accepted_socket(
      lambda: protocol, connection, **tls
    )
    writer = asyncio.StreamWriter(transport, protocol, reader, loop)
    return Channel(
      reader,
      writer,
      peer=where,
      link=self._link,
      options=self._options,
      shaper=self._shaper,
      counter=self._counter,
    )


async def listen(
  handler: Callable[[Channel], Awaitable[None]],
  *,
  host: str = "127.0.0.1",
  port: int = 0,
  link: str = "",
  ssl_context: ssl.SSLContext | None = None,
  options: ChannelOptions | None = None,
  shaper: LinkShaper | None = None,
  counter: ByteCounter | None = None,
  max_connections: int = 64,
  deadline_s: float = 10.0,
) -> Listener:
  """Returns a listener that runs `handler` on each new channel.

  Args:
    handler: usually begins with `answer`; when it returns, the channel closes.
    host: address to listen on.
    port: TCP port, 0 for any that is free.
    link: name of the outgoing direction in `counter`.
    ssl_context: see `server_context`; None for plain TCP.
    options: bounds and deadlines of each channel.
    shaper: emulated link that outgoing frames of each channel pass.
    counter: bytes sent by all channels; one of its own each by default.
    max_connections: at once; more are turned away.
    deadline_s: for a TLS handshake.

  Raises:
    OSError: if the address is taken.
  """
  family = socket.AF_INET6 if ":" in host else socket.AF_INET
  sock = socket.create_server((host, port), family=family)
  sock.setblocking(False)
  return Listener(
    sock,
    handler,
    ssl_context=ssl_context,
    options=options,
    shaper=shaper,
    counter=counter,
    link=link,
    max_connections=max_connections,
    deadline_s=deadline_s,
  )
