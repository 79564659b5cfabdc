# SPDX-License-Identifier: Apache-2.0
"""One run of a coordinator: an engine's events over sockets."""

import asyncio
import collections
import dataclasses
import time
from collections.abc import Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.messages import Returned
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import _protocol as proto
from wanspec_jax.worlds._driver import Driver, Span
from wanspec_jax.worlds._protocol import SessionFault

if TYPE_CHECKING:
  from wanspec_jax.worlds._sockets import SocketRing


class Job:
  """One `SocketRing.run`: an engine, what it waits for and who is at it.

  A drafter works on a thread, so that heartbeats go on. Meanwhile verdicts of
  its sequence are held back: they change the drafter's state.

  Attributes:
    start_s: when it began, on `time.monotonic`.
    spans: of the drafter and the first hop, counted from then.
    tasks: what goes on beside it; whoever runs it stops them.
  """

  def __init__(
    self,
    ring: "SocketRing",
    driver: Driver,
    requests: Sequence[tuple[float, sch.Request]],
  ):
    self.start_s = time.monotonic()
    self.spans: list[Span] = []
    self.tasks: set[asyncio.Task[None]] = set()
    self._ring = ring
    self._driver = driver
    self._requests = requests
    self._in_flight: collections.deque[tuple[int, frozenset[int]]] = (
      collections.deque()
    )
    self._due_s = 0.0  # by when the next run must be back
    self._drafts: collections.Counter[int] = collections.Counter()
    self._draft_due_s = 0.0
    self._held: list[tuple[Returned, frozenset[int]]] = []

  async def run(self) -> None:
    self._begin(self._submit())
    submitted = 0
    while (
      submitted < len(self._requests)
      or not self._driver.done
      or (self._in_flight)
    ):
      what, source, detail = await self._next_event()
      match what:
        case "submit":
          submitted += 1
          await self._hear(
            sch.Submitted(time_s=self._now_s(), sequence=source, request=detail)
          )
        case "drafted":
          await self._drafted(detail)
        case "woke":
          await self._hear(sch.Woke(time_s=self._now_s()))
        case "failed":
          raise detail
        case "frame":
          await self._returned(source, detail)

  def _now_s(self) -> float:
    return time.monotonic() - self.start_s

  def _begin(self, work: Coroutine[Any, Any, None]) -> None:
    task = asyncio.create_task(work)
    self.tasks.add(task)
    task.add_done_callback(self.tasks.discard)

  async def _next_event(self) -> tuple[Any, Any, Any]:
    dues_s = []
    if self._in_flight:
      dues_s.append(self._due_s)
    if self._drafts:
      dues_s.append(self._draft_due_s)
    wait_s = max(0.0, min(dues_s) - time.monotonic()) if dues_s else None
    try:
      return await self._ring.next_event(wait_s)
    except TimeoutError:
      deadline_s = self._ring.lap_deadline_s
      if self._in_flight and self._due_s <= time.monotonic():
        raise SessionFault(
          "ring",
          f"run {self._in_flight[0][0]} was not back within {deadline_s:g} s "
          "although every stage answers",
        ) from None
      raise SessionFault(
        "drafter", f"no answer within {deadline_s:g} s"
      ) from None

  async def _submit(self) -> None:
    for sequence, (time_s, request) in enumerate(self._requests):
      await wire.sleep_until(self.start_s + time_s)
      await self._ring.post("submit", sequence, request)

  async def _draft(self, action: sch.Draft) -> None:
    loop = asyncio.get_running_loop()
    begin_s = self._now_s()
    try:
      answer = await loop.run_in_executor(
        self._ring.drafter_thread, self._driver.draft, action, 0.0
      )
    except Exception as error:
      await self._ring.post("failed", None, error)
      return
    self.spans.append(Span("drafter", "draft", begin_s, self._now_s(), -1))
    await self._ring.post("drafted", None, answer)

  async def _hear(self, event: sch.Event) -> None:
    work = self._driver.handle(event)
    for run in work.runs:
      data = wire.encode_run(run)
      handed_s = self._now_s()
      arrival_s = await self._ring.launch(data) - self.start_s
      if not self._in_flight:
        self._wait_for_run()
      self._in_flight.append(
        (run.run_id, frozenset(run.sequences[~run.committed].tolist()))
      )
      self.spans.append(
        Span("hop 0", f"{len(data)} B", handed_s, arrival_s, run.run_id)
      )
    for action in work.drafts:
      if not self._drafts:
        self._wait_for_draft()
      self._drafts[action.sequence] += 1
      self._ring.is_dirty = True
      self._begin(self._draft(action))
    for time_s in work.wakes:
      self._begin(self._wake(time_s))

  async def _wake(self, time_s: float) -> None:
    await wire.sleep_until(self.start_s + time_s)
    await self._ring.post("woke", None, None)

  def _wait_for_run(self) -> None:
    self._due_s = time.monotonic() + self._ring.lap_deadline_s

  def _wait_for_draft(self) -> None:
    self._draft_due_s = time.monotonic() + self._ring.lap_deadline_s

  async def _drafted(self, answer: sch.Drafted) -> None:
    sequence = answer.sequence
    self._wait_for_draft()
    self._drafts[sequence] -= 1
    if not self._drafts[sequence]:
      del self._drafts[sequence]
    held, self._held = self._held, []
    for returned, carried in held:  # they came first
      await self._arrived(returned, carried)
    if self._driver.knows(sequence):
      await self._hear(dataclasses.replace(answer, time_s=self._now_s()))

  async def _returned(self, source: wire.Channel, frame: wire.Frame) -> None:
    if frame.kind != Kind.RETURNED or source is not self._ring.back:
      raise proto.fault_of(frame, source.peer)
    try:
      returned = wire.decode_returned(
        frame.body, max_rows=self._ring.cluster.shape.max_rows
      )
    except wire.FrameError as error:
      raise SessionFault(source.peer, f"sent a bad verdict: {error}") from error
    due = self._in_flight[0][0] if self._in_flight else None
    if returned.run_id != due or returned.epoch:
      raise SessionFault(
        source.peer,
        f"returned run {returned.run_id} of epoch {returned.epoch}, run {due} "
        "of epoch 0 was due",
      )
    _, carried = self._in_flight.popleft()
    self._wait_for_run()
    drawn = {verdict.sequence for verdict in returned.verdicts}
    if not drawn <= carried:
      raise SessionFault(
        source.peer,
        f"sent verdicts on sequences {sorted(drawn - carried)}, "
        f"which run {returned.run_id} does not carry",
      )
    await self._arrived(returned, carried)

  async def _arrived(self, returned: Returned, carried: frozenset[int]) -> None:
    behind = frozenset[int]().union(*(held for _, held in self._held))
    if carried & (self._drafts.keys() | behind):
      self._held.append((returned, carried))
      return
    self._check_verdicts(returned, carried)
    await self._hear(sch.Arrived(time_s=self._now_s(), returned=returned))

  def _check_verdicts(
    self, returned: Returned, carried: frozenset[int]
  ) -> None:
    """Refuses what would lead the engine astray.

    Once all of a sequence's runs are back, the tail has drawn a successor of
    every node that the text may go on from, so the root is a new token.
    """
    last = self._ring.cluster.stages[-1].name
    sequences = self._driver.engine.sequences
    silent = set(carried)
    for verdict in returned.verdicts:
      silent.discard(verdict.sequence)
      if verdict.sequence not in sequences:
        continue  # it ended meanwhile
      spec = sequences[verdict.sequence].spec
      at = spec.root
      for token in verdict.tokens[:-1]:
        at = spec.children.get((at, token), -1)
        if at not in spec.nodes or spec.nodes[at].run is None:
          raise SessionFault(
            last,
            f"sent a verdict with run {returned.run_id} that accepts a token "
            "which was not launched",
          )
    for sequence in silent & sequences.keys():
      spec = sequences[sequence].spec
      if spec.in_flight == 1 and spec.root_launched:
        raise SessionFault(
          last,
          f"returned run {returned.run_id} without the verdict that is due on "
          f"sequence {sequence}",
        )
