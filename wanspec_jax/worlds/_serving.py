# SPDX-License-Identifier: Apache-2.0
"""A stage behind a socket: one process per stage, one session at a time."""

import asyncio
import concurrent.futures
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from wanspec_jax import wire
from wanspec_jax.worlds import _protocol as proto
from wanspec_jax.worlds._cluster import Cluster
from wanspec_jax.worlds._protocol import SessionFault as SessionFault
from wanspec_jax.worlds._session import Session
from wanspec_jax.worlds._stage import Stage

_LOG = logging.getLogger(__name__)
_MAX_SESSION_NAME = 64


class StageServer:
  """Serves one stage until cancelled.

  Args:
    stage: loaded and compiled.
    cluster: the ring; `cluster.stages[index]` is this stage. A standby is given
      `cluster.standing_in(its name)`.
    index: position in the ring.
    model_hash: what all hosts must agree upon.

  Raises:
    ValueError: a certificate or key of the cluster is missing here.
  """

  def __init__(
    self, stage: Stage, *, cluster: Cluster, index: int, model_hash: str
  ):
    self.stage = stage
    self.cluster = cluster
    self.index = index
    self.name = cluster.stages[index].name
    self.options = proto.channel_options(cluster)
    self.client_ssl, self._server_ssl = cluster.tls(self.name)
    self.agreement = cluster.agreement(index, model_hash)
    self._current: Session | None = None
    self._worker: concurrent.futures.ThreadPoolExecutor | None = None

  async def serve(self, on_ready: Callable[[int], None]) -> None:
    """Listens until cancelled; calls `on_ready(port)` once it does.

    Raises:
      OSError: the port is taken.
    """
    here = self.cluster.stages[self.index]
    listener = await wire.listen(
      self._handle,
      host=here.host,
      port=here.port,
      link=f"back {self.index}",
      ssl_context=self._server_ssl,
      options=self.options,
      deadline_s=self.cluster.peer_deadline_s,
    )
    self._worker = concurrent.futures.ThreadPoolExecutor(
      max_workers=1, thread_name_prefix=self.name
    )
    try:
      async with listener:
        on_ready(listener.port)
        await asyncio.Event().wait()
    finally:
      self._worker.shutdown(wait=False, cancel_futures=True)

  async def work(self, function: Callable[..., Any], *args, **kwargs) -> Any:
    """Runs device work on the stage's own thread; heartbeats go on.

    Raises:
      SessionFault: of this stage, if the work fails or takes longer than the
        cluster's `start_deadline_s`, which allows for compiling.
    """
    loop = asyncio.get_running_loop()
    deadline_s = self.cluster.start_deadline_s
    try:
      async with asyncio.timeout(deadline_s):
        return await loop.run_in_executor(
          self._worker, lambda: function(*args, **kwargs)
        )
    except TimeoutError:
      raise SessionFault(
        self.name, f"its work was not done within {deadline_s:g} s"
      ) from None
    except Exception as error:
      _LOG.exception("%s: stage work failed", self.name)
      raise proto.as_fault(error, self.name) from error

  # Handshake. ----------------------------------------------------------------

  def _check(self, hello: dict[str, Any]) -> str | None:
    """Returns why an introduction is refused, or None."""
    role = hello.get("role")
    if role == "return":
      return self._check_return(hello)
    if role != "ring":
      return f"role {proto.briefly(role)} is unknown here"
    for field, ours in self.agreement.items():
      theirs = hello.get(field)
      if theirs != ours:
        return (
          f"{field} of {self.name} is {ours!r}, {proto.briefly(theirs)} was "
          "asked for"
        )
    try:
      ring = proto.read_ring(hello.get("ring"), self.cluster)
    except ValueError as error:
      return str(error)
    if ring.stages[self.index].name != self.name:
      return f"ring: {self.name} has no place in it"
    before = (
      ring.stages[self.index - 1].name if self.index else proto.COORDINATOR
    )
    if hello.get("name") != before:
      return (
        f"name: {before} comes before {self.name}, not "
        f"{proto.briefly(hello.get('name'))}"
      )
    session = hello.get("session")
    if not isinstance(session, str) or not 0 < len(session) <= (
      _MAX_SESSION_NAME
    ):
      return f"session: must be 1 to {_MAX_SESSION_NAME} characters"
    try:
      proto.read_hops(hello.get("hops"), self.cluster.num_stages + 1)
    except ValueError as error:
      return str(error)
    if self._current is not None and not self._current.is_ending:
      return f"{self.name} {proto.BUSY}"
    return None

  def _check_return(self, hello: dict[str, Any]) -> str | None:
    if self.index != self.cluster.num_stages - 1:
      return f"{self.name} is not the last stage: verdicts come from that one"
    if hello.get("name") != proto.COORDINATOR:
      return f"name: verdicts go to {proto.COORDINATOR} only"
    session = self._current
    if (
      session is None
      or session.is_ending
      or hello.get("session") != session.session
    ):
      theirs = proto.briefly(hello.get("session"))
      return f"{self.name} has no session {theirs}"
    if session.is_back_claimed:
      return f"{self.name} returns its verdicts to somebody else already"
    return None

  async def _handle(self, channel: wire.Channel) -> None:
    """Serves one connection; what goes wrong here ends here."""
    taken: list[Session] = []

    def check(hello: dict[str, Any]) -> str | None:
      reason = self._check(hello)
      if reason is None:  # taken before anybody else asks
        if hello["role"] == "ring":
          self._current = Session(self, channel, hello, self._current)
        assert self._current is not None
        self._current.is_back_claimed |= hello["role"] == "return"
        taken.append(self._current)
      return reason

    try:
      hello = await wire.answer(
        channel, check, deadline_s=self.cluster.peer_deadline_s
      )
      (session,) = taken
      if hello["role"] == "return":
        await session.serve_return(channel)
      else:
        await session.run()
    except wire.WireError:
      raise  # the listener notes it
    except Exception:
      _LOG.exception("%s: a connection failed", self.name)
    finally:
      if taken and taken[0].before is channel:
        await self._retire(taken[0])

  async def _retire(self, session: "Session") -> None:
    previous = session.previous
    if previous is not None:  # it ends soon: its channel is gone
      with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(3 * proto.SETTLE_S):
          await previous.ended.wait()
      session.previous = None
    session.ended.set()
    if self._current is session:
      self._current = None
