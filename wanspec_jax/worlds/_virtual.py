# SPDX-License-Identifier: Apache-2.0
"""The virtual world: an event clock, modelled times, real or replayed tokens.

The frames are the real ones, encoded and counted byte for byte; their times on
the links come from the shapers that the sockets world emulates its links with.
"""

import dataclasses
import heapq
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Returned, Run
from wanspec_jax.worlds._driver import Driver, SessionResult, Span
from wanspec_jax.worlds._stage import Output


class StageLike(Protocol):
  """What stands at a position of the ring: a `Stage`, or a replayed one."""

  def process(self, run: Run, payload: Any = None) -> Output: ...


class _Clock:
  """An event heap; events of equal time keep the order of their posting."""

  def __init__(self) -> None:
    self.now_s = 0.0
    self._heap: list[tuple[float, int, Any]] = []
    self._count = itertools.count()

  def post(self, time_s: float, what: Any) -> None:
    heapq.heappush(self._heap, (time_s, next(self._count), what))

  def pop(self) -> Any:
    self.now_s, _, what = heapq.heappop(self._heap)
    return what

  def __bool__(self) -> bool:
    return bool(self._heap)


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Frame:
  hop: int
  message: Run | Returned
  payload: bytes | None


class VirtualRing:
  """A ring whose time is modelled.

  Args:
    stages: the stages, first to last; real ones compute real tokens.
    hops: shaper of each of the P + 1 hops, the coordinator's first.
    profile: stage times by row bucket, and drafting time per node.
  """

  def __init__(
    self,
    *,
    stages: Sequence[StageLike],
    hops: Sequence[wire.LinkShaper],
    profile: StageProfile,
  ):
    if len(hops) != len(stages) + 1:
      raise ValueError(
        f"hops: {len(hops)} given, {len(stages)} stages need {len(stages) + 1}"
      )
    if profile.num_stages != len(stages):
      raise ValueError(
        f"profile.num_stages = {profile.num_stages}: must be {len(stages)}"
      )
    self._stages = stages
    self._hops = hops
    self._profile = profile

  def run(
    self,
    driver: Driver,
    requests: Sequence[tuple[float, sch.Request]],
  ) -> SessionResult:
    """Runs requests, each submitted at its time, until all have ended.

    Args:
      driver: a fresh engine with its drafter.
      requests: `(time_s, request)`; sequence numbers follow the order.
    """
    clock = _Clock()
    links = [wire.ShaperState() for _ in self._hops]
    free_s = [0.0] * len(self._stages)
    spans: list[Span] = []
    counter = wire.ByteCounter()

    def send(frame: _Frame, time_s: float) -> None:
      if isinstance(frame.message, Run):
        data = wire.encode_run(frame.message, frame.payload)
      else:
        data = wire.encode_returned(frame.message)
      hop = f"hop {frame.hop}"
      counter.add(hop, wire.frame_classes(data))
      links[frame.hop], arrival_s = self._hops[frame.hop].schedule(
        links[frame.hop], time_s, len(data)
      )
      run_id = frame.message.run_id
      spans.append(Span(hop, f"{len(data)} B", time_s, arrival_s, run_id))
      clock.post(arrival_s, frame)

    def hear(event: sch.Event) -> None:
      runs, drafts = driver.handle(event)
      for run in runs:
        send(_Frame(hop=0, message=run, payload=None), clock.now_s)
      for action in drafts:
        answer = driver.draft(action, clock.now_s)
        spent_s = self._profile.draft_s_per_node * len(answer.nodes.tokens)
        done_s = clock.now_s + spent_s
        spans.append(Span("drafter", "draft", clock.now_s, done_s, -1))
        clock.post(done_s, dataclasses.replace(answer, time_s=done_s))

    def work(stage: int, frame: _Frame) -> None:
      run = frame.message
      assert isinstance(run, Run)
      out = self._stages[stage].process(run, frame.payload)
      start_s = max(clock.now_s, free_s[stage])
      spent_s = float(self._profile.stage_s(run.num_rows)[stage])
      free_s[stage] = start_s + spent_s
      if spent_s:
        spans.append(
          Span(
            f"stage {stage}",
            f"{run.num_rows} rows",
            start_s,
            free_s[stage],
            run.run_id,
          )
        )
      clock.post(free_s[stage], (stage, out))

    for sequence, (time_s, request) in enumerate(requests):
      clock.post(
        time_s,
        sch.Submitted(time_s=time_s, sequence=sequence, request=request),
      )
    while clock:
      match clock.pop():
        case _Frame(hop=hop) as frame if hop < len(self._stages):
          work(hop, frame)
        case _Frame(message=Returned() as returned):
          hear(sch.Arrived(time_s=clock.now_s, returned=returned))
        case (int() as stage, Output() as out):
          send(
            _Frame(hop=stage + 1, message=out.message, payload=out.payload),
            clock.now_s,
          )
        case event:
          hear(event)
    return SessionResult(
      world="virtual",
      outcomes=driver.outcomes,
      spans=spans,
      bytes=counter,
    )
