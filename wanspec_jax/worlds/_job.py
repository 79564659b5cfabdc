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
from wanspec_jax.messages import Returned, Run
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import _protocol as proto
from wanspec_jax.worlds._driver import Driver, Span
from wanspec_jax.worlds._protocol import SessionFault
from wanspec_jax.worlds._virtual import draft_size

if TYPE_CHECKING:
  from wanspec_jax.worlds._sockets import SocketRing


class Job:
  """One `SocketRing.run`: an engine, what it waits for and who is at it.

  A drafter works on a thread, so that heartbeats and verdicts go on.

  Attributes:
    start_s: when it began, on `time.monotonic`.
    first_run: id on the wire of the engine's run 0.
    first_epoch: likewise, of its epoch 0.
    spans: of the drafter and the coordinator's hops, counted from then.
    faults: `(time_s, stage, cause)` of each that was survived.
    tasks: what goes on beside it; whoever runs it stops them.
  """

  def __init__(
    self,
    ring: "SocketRing",
    driver: Driver,
    requests: Sequence[tuple[float, sch.Request]],
    draft: sch.DraftCosts | None = None,
  ):
    self.start_s = time.monotonic()
    self.first_run = ring.first_run
    self.first_epoch = ring.first_epoch
    self.spans: list[Span] = []
    self.faults: list[tuple[float, str, str]] = []
    self.tasks: set[asyncio.Task[None]] = set()
    self._ring = ring
    self._driver = driver
    self._requests = requests
    self._costs = draft
    self._drafter = asyncio.Lock()  # drafts are made in the order of asking
    self._in_flight: collections.deque[tuple[int, frozenset[int]]] = (
      collections.deque()
    )
    self._due_s = 0.0  # by when the next run must be back
    self._num_drafts = 0
    self._draft_due_s = 0.0
    self._kept: collections.deque[tuple[Any, Any, Any]] = collections.deque()
    self._submitted = 0
    self._is_broken = False  # a new session stands, and nothing is in it

  async def run(self) -> None:
    """Goes on until every request has ended and every run is back."""
    self._begin(self._submit())
    while (
      self._submitted < len(self._requests)
      or not self._driver.done
      or self._in_flight
    ):
      try:
        if self._is_broken:
          await self._rebuild()
        elif self._kept:
          await self._handle(*self._kept.popleft())
        else:
          await self._handle(*await self._next_event())
      except SessionFault as fault:
        await self.survive(fault)

  async def _handle(self, what: Any, source: Any, detail: Any) -> None:
    match what:
      case "submit":
        self._submitted += 1
        await self._hear(
          sch.Submitted(time_s=self._now_s(), sequence=source, request=detail)
        )
      case "drafted":
        self._wait_for_draft()
        self._num_drafts -= 1
        if self._driver.knows(detail.sequence):
          await self._hear(dataclasses.replace(detail, time_s=self._now_s()))
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
    if self._num_drafts:
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
      self._ring.post("submit", sequence, request)

  async def _draft(self, action: sch.Draft) -> None:
    """Has a draft made; its answer comes no earlier than its cost says."""
    loop = asyncio.get_running_loop()
    async with self._drafter:
      begin_s = self._now_s()
      cost_s = 0.0
      try:
        answer = await loop.run_in_executor(
          self._ring.drafter_thread, self._driver.draft, action, 0.0
        )
        if self._costs is not None:
          cost_s = self._costs.seconds(*draft_size(answer))
      except Exception as error:
        self._ring.post("failed", None, error)
        return
      await wire.sleep_until(self.start_s + begin_s + cost_s)
    name = f"{len(answer.nodes.tokens)} nodes"
    self.spans.append(Span("drafter", name, begin_s, self._now_s(), -1))
    self._ring.post("drafted", None, answer)

  async def _wake(self, time_s: float) -> None:
    await wire.sleep_until(self.start_s + time_s)
    self._ring.post("woke", None, None)

  async def _hear(self, event: sch.Event) -> None:
    work = self._driver.handle(event)
    # These first: they go on even if the ring breaks meanwhile.
    for action in work.drafts:
      if not self._num_drafts:
        self._wait_for_draft()
      self._num_drafts += 1
      self._ring.is_dirty = True
      self._begin(self._draft(action))
    for time_s in work.wakes:
      self._begin(self._wake(time_s))
    for run in work.runs:
      await self._launch(run)
    hop = f"back {self._ring.cluster.num_stages}"
    for cancel in work.cancels:
      data = wire.encode_cancel(
        dataclasses.replace(
          cancel,
          before_run=self.first_run + cancel.before_run,
          epoch=self.first_epoch + cancel.epoch,
        )
      )
      handed_s = self._now_s()
      arrival_s = await self._ring.cancel(data) - self.start_s
      self.spans.append(Span(hop, "cancel", handed_s, arrival_s, -1))

  async def _launch(self, run: Run) -> None:
    run_id = self.first_run + run.run_id
    data = wire.encode_run(
      dataclasses.replace(
        run, run_id=run_id, epoch=self.first_epoch + run.epoch
      )
    )
    handed_s = self._now_s()
    arrival_s = await self._ring.launch(data) - self.start_s
    if not self._in_flight:
      self._wait_for_run()
    self._in_flight.append(
      (run_id, frozenset(run.sequences[~run.committed].tolist()))
    )
    self.spans.append(
      Span("hop 0", f"{len(data)} B", handed_s, arrival_s, run.run_id)
    )

  def _wait_for_run(self) -> None:
    self._due_s = time.monotonic() + self._ring.lap_deadline_s

  def _wait_for_draft(self) -> None:
    self._draft_due_s = time.monotonic() + self._ring.lap_deadline_s

  # Faults. -------------------------------------------------------------------

  async def survive(self, fault: SessionFault) -> None:
    """Goes on in a new session; what was in flight is lost.

    Raises:
      SessionFault: if it may not be survived.
    """
    noted_s = self._now_s()
    survived = await self._ring.replace(fault)
    self.faults += [(noted_s, each.stage, each.cause) for each in survived]
    self._in_flight.clear()
    self._is_broken = True

  async def _rebuild(self) -> None:
    """Has the engine start anew from what is committed.

    Drafts under way are waited for, since they hold the drafter's states, and
    are of no use.
    """
    self._wait_for_draft()
    while self._num_drafts:
      what, source, detail = await self._next_event()
      if what == "drafted":
        self._num_drafts -= 1
        self._driver.settle(detail)
      elif what == "failed":
        raise detail
      else:
        self._kept.append((what, source, detail))
    self._is_broken = False  # before anything is sent: that may fail as well
    await self._hear(sch.Faulted(time_s=self._now_s()))

  # What comes back. ----------------------------------------------------------

  async def _returned(self, source: wire.Channel, frame: wire.Frame) -> None:
    if frame.kind != Kind.RETURNED or source is not self._ring.back:
      raise proto.fault_of(frame, source.peer)
    try:
      returned = wire.decode_returned(
        frame.body, max_rows=self._ring.cluster.shape.max_rows
      )
    except wire.FrameError as error:
      raise SessionFault(source.peer, f"sent a bad verdict: {error}") from error
    engine = self._driver.engine
    epoch = self.first_epoch + engine.epoch
    due = self.first_run + engine.next_run  # what is launched next
    if self._in_flight:
      due = self._in_flight[0][0]
    if returned.epoch < epoch or returned.run_id < due:
      return  # it came twice, or belongs to an epoch that is over
    if returned.run_id != due or returned.epoch > epoch or not self._in_flight:
      raise SessionFault(
        source.peer,
        f"returned run {returned.run_id} of epoch {returned.epoch}, run "
        f"{self._in_flight[0][0] if self._in_flight else None} of epoch "
        f"{epoch} was due",
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
    returned = dataclasses.replace(
      returned, run_id=returned.run_id - self.first_run, epoch=engine.epoch
    )
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
