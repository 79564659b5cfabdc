# SPDX-License-Identifier: Apache-2.0
"""The virtual world: an event clock, modelled times, real or replayed tokens.

The frames are the real ones, counted byte for byte; their times on the links
come from the shapers that the sockets world emulates its links with.
"""

import collections
import dataclasses
import heapq
import itertools
import math
from collections.abc import Sequence
from typing import Any, Protocol

from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Cancel, Returned, Run
from wanspec_jax.worlds._driver import Driver, SessionResult, Span
from wanspec_jax.worlds._stage import Output
from wanspec_jax.worlds._weather import Kill, Weather

# Bytes of a cancel: frame prefix, epoch, run and sequence, then ids as deltas.
_CANCEL_BYTES = 10


class StageLike(Protocol):
  """What stands at a position of the ring: a `Stage`, or a replayed one."""

  def process(self, run: Run, payload: Any = None) -> Output: ...
  def cancel(self, cancel: Cancel) -> None: ...
  def reset(self) -> None: ...


@dataclasses.dataclass(frozen=True, slots=True)
class _Frame:
  """Something that travels down the ring."""

  hop: int
  message: Run | Returned
  payload: Any


@dataclasses.dataclass(frozen=True, slots=True)
class _Done:
  """A stage has finished a run; void if it was reset meanwhile."""

  stage: int
  output: Output
  life: int


@dataclasses.dataclass(frozen=True, slots=True)
class _Meets:
  """A cancel reaches a stage, counted from the first."""

  stage: int
  cancel: Cancel


@dataclasses.dataclass(frozen=True, slots=True)
class _Answer:
  """The drafter is done."""

  drafted: sch.Drafted


@dataclasses.dataclass(frozen=True, slots=True)
class _Up:
  """A killed stage has been replaced."""

  kill: Kill


class VirtualRing:
  """A ring whose time is modelled.

  Args:
    stages: the stages, first to last; real ones compute real tokens.
    hops: shaper of each of the P + 1 hops, the coordinator's first. With the
      coordinator on the last stage's host the last hop costs nothing, and the
      first one is the link from that host to the head.
    profile: stage times by row bucket.
    draft: what the drafter's answers cost; by default the profile's time per
      node.
    drafter_stage: stage whose device the drafter shares: each waits for the
      other. None for a device of its own.
    client: link between the coordinator's host and the client's, if they
      differ: requests and tokens cross it, 4 bytes a token and 4 more a
      message.
    feature_bytes: bytes of target features per drawn token that return with the
      verdicts, for drafters that want them.
    weather: what goes wrong.
    trace: note who was busy when.
  """

  def __init__(
    self,
    *,
    stages: Sequence[StageLike],
    hops: Sequence[wire.LinkShaper],
    profile: StageProfile,
    draft: sch.DraftCosts | None = None,
    drafter_stage: int | None = None,
    client: wire.LinkShaper | None = None,
    feature_bytes: int = 0,
    weather: Weather | None = None,
    trace: bool = True,
  ):
    if len(hops) != len(stages) + 1:
      raise ValueError(
        f"hops: {len(hops)} given, {len(stages)} stages need {len(stages) + 1}"
      )
    if profile.num_stages != len(stages):
      raise ValueError(
        f"profile.num_stages = {profile.num_stages}: must be {len(stages)}"
      )
    if drafter_stage is not None and not 0 <= drafter_stage < len(stages):
      raise ValueError(
        f"drafter_stage = {drafter_stage}: must be one of {len(stages)} stages"
      )
    self.stages = stages
    self.hops = hops
    self.profile = profile
    self.draft = draft or sch.DraftCosts(per_node_s=profile.draft_s_per_node)
    self.drafter_stage = drafter_stage
    self.client = client
    self.feature_bytes = feature_bytes
    self.weather = weather or Weather()
    self.trace = trace

  def run(
    self,
    driver: Driver,
    requests: Sequence[tuple[float, sch.Request]],
    *,
    until_s: float = math.inf,
  ) -> SessionResult:
    """Runs requests, each submitted at its time, until all have ended.

    The stages forget what an earlier session left on them.

    Args:
      driver: a fresh engine with its drafter.
      requests: `(time_s, request)`; sequence numbers follow the order.
      until_s: when the coordinator is lost with all it knows; what the client
        has of its texts by then is in the outcomes.
    """
    for stage in self.stages:
      stage.reset()
    return _Session(self, driver).run(requests, until_s)


class _Session:
  """One `VirtualRing.run`."""

  def __init__(self, ring: VirtualRing, driver: Driver):
    self._ring = ring
    self._driver = driver
    self._now_s = 0.0
    self._heap: list[tuple[float, int, Any]] = []
    self._count = itertools.count()
    num = len(ring.stages)
    self._links = [wire.ShaperState() for _ in ring.hops]
    self._delivered_s = [0.0] * len(ring.hops)
    self._back_links = [wire.ShaperState() for _ in ring.hops]
    self._queues: list[collections.deque[_Frame | sch.Draft]] = [
      collections.deque() for _ in range(num)
    ]
    self._drafts: collections.deque[sch.Draft] = collections.deque()
    self._is_drafting = False
    self._is_busy = [False] * num
    self._lives = [0] * num
    self._kills = [0] * num  # of a stage, not yet made good
    # Killed in this epoch: what others still send it means nothing to it, also
    # when it is up again and waits for another.
    self._is_blank = [False] * num
    self._next_run = [0] * (num + 1)
    self._epoch = 0
    self._sizes: dict[int, tuple[Run, dict[str, int]]] = {}
    self._loads: dict[int, tuple[Run, int, dict[str, int]]] = {}
    self._spent_s: dict[int, list[float]] = {}
    self._spans: list[Span] = []
    self._counter = wire.ByteCounter()
    self._asked, self._told = wire.ShaperState(), wire.ShaperState()
    self._num_events = 0

  def run(
    self, requests: Sequence[tuple[float, sch.Request]], until_s: float
  ) -> SessionResult:
    if self._ring.client is not None:
      self._driver.deliver_s = self._deliver
    for sequence, (time_s, request) in sorted(
      enumerate(requests), key=lambda item: item[1][0]
    ):
      due_s = self._ask(time_s, request)
      self._post(
        due_s, sch.Submitted(time_s=due_s, sequence=sequence, request=request)
      )
    for kill in self._ring.weather.kills:
      self._post(self._ring.weather.start_s + kill.time_s, kill)
    left = len(requests)
    while self._heap:
      self._now_s, _, what = heapq.heappop(self._heap)
      if self._now_s > until_s:
        break
      self._num_events += 1
      left -= isinstance(what, sch.Submitted)
      self._handle(what)
      if not left and self._driver.done and self._is_idle():
        break
    for sequence, (time_s, _) in enumerate(requests):
      if sequence in self._driver.outcomes:
        outcome = self._driver.outcomes[sequence]
        outcome.submitted_s = time_s
        if outcome.reason and outcome.emitted_s:  # the client's clock counts
          outcome.finished_s = max(outcome.finished_s, outcome.emitted_s[-1])
    return SessionResult(
      world="virtual",
      outcomes=self._driver.outcomes,
      spans=self._spans,
      bytes=self._counter,
      num_events=self._num_events,
    )

  def _is_idle(self) -> bool:
    """Whether the ring is up and nothing is left to happen but more kills and
    wakes."""
    idle = (Kill, sch.Woke)
    return not any(self._queues) and all(
      isinstance(what, idle) for _, _, what in self._heap
    )

  def _post(self, time_s: float, what: Any) -> None:
    heapq.heappush(self._heap, (time_s, next(self._count), what))

  def _handle(self, what: Any) -> None:
    match what:
      case _Frame(hop=hop, message=message):
        if self._is_stale(hop, message):
          return
        if hop < len(self._ring.stages):
          if not self._is_blank[hop]:
            self._queues[hop].append(what)
            self._start(hop)
        else:
          assert isinstance(message, Returned)
          self._hear(sch.Arrived(time_s=self._now_s, returned=message))
      case _Done(stage=stage, output=output, life=life):
        if life == self._lives[stage]:
          self._is_busy[stage] = False
          self._send(_Frame(stage + 1, output.message, output.payload))
          self._start(stage)
      case _Meets(stage=stage, cancel=cancel):
        if not self._is_blank[stage] and cancel.epoch == self._epoch:
          self._ring.stages[stage].cancel(cancel)
          self._send_back(cancel, stage)
      case _Answer(drafted=drafted):
        self._is_drafting = False
        where = self._ring.drafter_stage
        if where is not None:
          self._is_busy[where] = False
        self._hear(drafted)
        if where is not None:
          self._start(where)
        self._start_draft()
      case Kill() as kill:
        self._die(kill)
      case _Up(kill=kill):
        self._kills[kill.stage] -= 1
        if not any(self._kills):
          self._rise()
      case sch.Submitted():
        self._hear(what)
      case sch.Woke():
        self._hear(what)

  # The coordinator. ----------------------------------------------------------

  def _hear(self, event: sch.Event) -> None:
    work = self._driver.handle(event)
    for run in work.runs:
      self._send(_Frame(0, run, None))
    for cancel in work.cancels:
      self._send_back(cancel, len(self._ring.stages))
    for time_s in work.wakes:
      self._post(max(time_s, self._now_s), sch.Woke(time_s=time_s))
    where = self._ring.drafter_stage
    for action in work.drafts:
      if where is None:
        self._drafts.append(action)
        self._start_draft()
      else:
        self._queues[where].append(action)
        self._start(where)

  def _ask(self, time_s: float, request: sch.Request) -> float:
    """Returns when a request reaches the coordinator, and counts its bytes."""
    client = self._ring.client
    if client is None:
      return time_s
    size = 4 + 4 * (len(request.prompt) + len(request.emitted))
    self._counter.add("from client", {"ids": size})
    self._asked, arrival_s = client.schedule(self._asked, time_s, size)
    return arrival_s

  def _deliver(self, time_s: float, num_tokens: int) -> float:
    """Returns when tokens reach the client, and counts their bytes."""
    client = self._ring.client
    assert client is not None
    size = 4 + 4 * num_tokens
    self._counter.add("to client", {"ids": size})
    self._told, arrival_s = client.schedule(self._told, time_s, size)
    return arrival_s

  # The drafter. --------------------------------------------------------------

  def _start_draft(self) -> None:
    if self._drafts and not self._is_drafting:
      self._is_drafting = True
      self._think(self._drafts.popleft())

  def _think(self, action: sch.Draft) -> None:
    answer = self._driver.draft(action, self._now_s)
    levels, nodes = draft_size(answer)
    done_s = self._now_s + self._ring.draft.seconds(levels, nodes)
    self._note("drafter", f"{nodes} nodes", self._now_s, done_s, -1)
    self._post(done_s, _Answer(dataclasses.replace(answer, time_s=done_s)))

  # Links. --------------------------------------------------------------------

  def _send(self, frame: _Frame) -> None:
    hop, message = frame.hop, frame.message
    size = self._count_bytes(frame)
    num = self._links[hop].num_frames
    self._links[hop], arrival_s = self._ring.hops[hop].schedule(
      self._links[hop], self._now_s, size
    )
    weather = self._ring.weather
    arrival_s = weather.delivery_s(hop, self._now_s, arrival_s)
    arrival_s = self._delivered_s[hop] = max(arrival_s, self._delivered_s[hop])
    self._note(
      f"hop {hop}", f"{size} B", self._now_s, arrival_s, message.run_id
    )
    self._post(arrival_s, frame)
    if weather.is_doubled(hop, num):
      self._post(arrival_s, frame)

  def _count_bytes(self, frame: _Frame) -> int:
    """Returns a frame's length; a run is encoded once for all its hops."""
    message = frame.message
    if isinstance(message, Returned):
      self._sizes.pop(message.run_id, None)
      self._loads.pop(message.run_id, None)
      classes = wire.frame_classes(wire.encode_returned(message))
      if self._ring.feature_bytes and message.verdicts:
        drawn = sum(len(v.tokens) for v in message.verdicts)
        classes["features"] = drawn * self._ring.feature_bytes
    else:
      classes = self._run_bytes(message, frame.payload)
    self._counter.add(f"hop {frame.hop}", classes)
    return sum(classes.values())

  def _run_bytes(self, run: Run, payload: Any) -> dict[str, int]:
    known = self._sizes.get(run.run_id)
    if known is None or known[0] is not run:
      known = (run, wire.frame_classes(wire.encode_run(run)))
      self._sizes[run.run_id] = known
    if payload is None:
      return known[1]
    load = self._loads.get(run.run_id)
    if load is None or load[0] is not run or load[1] != len(payload):
      load = (run, len(payload), _with_payload(known[1], len(payload)))
      self._loads[run.run_id] = load
    return load[2]

  def _send_back(self, cancel: Cancel, after: int) -> None:
    """Sends a cancel from stage `after` (the coordinator: P) to the one before
    it."""
    if after == 0:
      return
    hop = self._ring.hops[after]
    size = _CANCEL_BYTES + sum(1 + len(ids) for _, ids in cancel.nodes)
    self._counter.add(f"back {after}", {"control": size})
    self._back_links[after], arrival_s = hop.schedule(
      self._back_links[after], self._now_s, size
    )
    arrival_s = self._ring.weather.delivery_s(after, self._now_s, arrival_s)
    self._note(f"back {after}", "cancel", self._now_s, arrival_s, -1)
    self._post(arrival_s, _Meets(after - 1, cancel))

  def _is_stale(self, place: int, message: Run | Returned) -> bool:
    """Whether a frame came twice, or belongs to an epoch that is over."""
    if message.epoch < self._epoch or message.run_id < self._next_run[place]:
      return True
    self._next_run[place] = message.run_id + 1
    return False

  # Stages. -------------------------------------------------------------------

  def _start(self, stage: int) -> None:
    """Begins what is next in a stage's queue, if the stage is free."""
    if self._is_busy[stage] or not self._queues[stage]:
      return
    self._is_busy[stage] = True
    item = self._queues[stage].popleft()
    if isinstance(item, sch.Draft):
      self._is_drafting = True
      self._think(item)
      return
    run = item.message
    assert isinstance(run, Run)
    output = self._ring.stages[stage].process(run, item.payload)
    spent_s = self._stage_s(output.num_rows)[stage]
    done_s = self._now_s + spent_s
    num_dropped = run.num_rows - output.num_rows
    if spent_s or num_dropped:  # nothing left of a run takes no time
      name = f"{output.num_rows} rows"
      if num_dropped:
        name += f", {num_dropped} cancelled"
      self._note(f"stage {stage}", name, self._now_s, done_s, run.run_id)
    self._post(done_s, _Done(stage, output, self._lives[stage]))

  def _stage_s(self, num_rows: int) -> list[float]:
    if num_rows not in self._spent_s:
      self._spent_s[num_rows] = self._ring.profile.stage_s(num_rows).tolist()
    return self._spent_s[num_rows]

  def _die(self, kill: Kill) -> None:
    self._kills[kill.stage] += 1
    self._is_blank[kill.stage] = True
    self._drop(kill.stage)
    self._note(
      f"stage {kill.stage}",
      "down",
      self._now_s,
      self._now_s + kill.down_s,
      -1,
    )
    self._post(self._now_s + kill.down_s, _Up(kill))

  def _rise(self) -> None:
    """Every stage begins anew under the next epoch."""
    self._epoch += 1
    self._is_blank = [False] * len(self._is_blank)
    for i in range(len(self._ring.stages)):
      self._drop(i)
    self._hear(sch.Faulted(time_s=self._now_s))

  def _drop(self, stage: int) -> None:
    """Takes all runs from a stage; a drafter on its device lives on."""
    queue = self._queues[stage]
    drafts = [x for x in queue if isinstance(x, sch.Draft)]
    queue.clear()
    queue.extend(drafts)
    self._lives[stage] += 1
    is_drafters = stage == self._ring.drafter_stage
    self._is_busy[stage] = self._is_drafting and is_drafters
    self._ring.stages[stage].reset()
    if is_drafters:
      self._start(stage)

  def _note(
    self, lane: str, name: str, start_s: float, end_s: float, run: int
  ) -> None:
    if self._ring.trace:
      self._spans.append(Span(lane, name, start_s, end_s, run))


def _with_payload(classes: dict[str, int], num_bytes: int) -> dict[str, int]:
  """Returns a run's bytes by class with so many of hidden states added.

  The prefix states the body's length in groups of 7 bits, so it may grow.
  """
  size = sum(classes.values())
  body = size - 3  # prefix: two bytes and at least one of length
  while 2 + len(wire.encode_varint(body)) + body > size:
    body -= 1
  grown = len(wire.encode_varint(body + num_bytes))
  return classes | {
    "activations": num_bytes,
    "control": classes["control"] + grown - len(wire.encode_varint(body)),
  }


def draft_size(answer: sch.Drafted) -> tuple[int, int]:
  """Returns how many levels and nodes a drafter's answer has."""
  base = len(answer.anchors)
  levels = [0] * base
  for parent in answer.nodes.parents.tolist():
    levels.append(levels[parent] + 1)
  return max(levels, default=0), len(levels) - base
