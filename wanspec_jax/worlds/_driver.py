# SPDX-License-Identifier: Apache-2.0
"""What every world does with an engine's actions, and what a session yields."""

import collections
import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor, Drafter, Nodes
from wanspec_jax.messages import Cancel, Run
from wanspec_jax.metrics import RoundRecord
from wanspec_jax.wire import ByteCounter
from wanspec_jax.worlds._recording import Recording


class Span(NamedTuple):
  """Something was busy: a stage, a link, the drafter.

  Attributes:
    lane: e.g. `"stage 2"`, `"hop 0"`, `"drafter"`.
    name: what it did.
    start_s: on the session's clock.
    end_s: likewise.
    run: run id, or -1.
  """

  lane: str
  name: str
  start_s: float
  end_s: float
  run: int


@dataclasses.dataclass(slots=True)
class Outcome:
  """What became of one request.

  Attributes:
    prompt: its tokens.
    tokens: emitted tokens.
    reason: `stop`, `stop_string`, `length`, `aborted`, `refused`; empty while
      it runs.
    detail: why it was refused.
    log_probs: of the emitted tokens, if asked for.
    margins: likewise.
    rounds: one record per verdict.
    emitted_s: time at which each token was emitted.
    submitted_s: when the request came.
    admitted_s: when it left the queue.
    finished_s: when it ended.
  """

  prompt: tuple[int, ...]
  submitted_s: float
  tokens: list[int] = dataclasses.field(default_factory=list)
  reason: str = ""
  log_probs: list[float] = dataclasses.field(default_factory=list)
  margins: list[float] = dataclasses.field(default_factory=list)
  rounds: tuple[RoundRecord, ...] = ()
  emitted_s: list[float] = dataclasses.field(default_factory=list)
  admitted_s: float = 0.0
  finished_s: float = 0.0
  detail: str = ""

  @property
  def total_s(self) -> float:
    """Seconds from submission to the end: queueing and prompt included."""
    return self.finished_s - self.submitted_s

  @property
  def decode_s(self) -> float:
    """Seconds from the first emitted token's verdict to the last one's."""
    return self.emitted_s[-1] - self.emitted_s[0] if self.emitted_s else 0.0


@dataclasses.dataclass(kw_only=True)
class SessionResult:
  """What a world hands back.

  Attributes:
    world: `"virtual"` (modelled time) or `"sockets"` (wall clock).
    outcomes: by sequence number.
    spans: who was busy when.
    bytes: every byte by hop and traffic class.
    num_events: events that the virtual clock handled.
    faults: `(time_s, stage, cause)` of every failure that was survived.
  """

  world: str
  outcomes: dict[int, Outcome]
  spans: list[Span]
  bytes: ByteCounter
  num_events: int = 0
  faults: list[tuple[float, str, str]] = dataclasses.field(default_factory=list)


class Work(NamedTuple):
  """What a world has to do after an event, each list in order.

  Attributes:
    runs: to launch.
    drafts: to make.
    cancels: to send against the flow.
    wakes: times at which the engine wants to be woken.
  """

  runs: list[Run]
  drafts: list[sch.Draft]
  cancels: list[Cancel]
  wakes: list[float]


_NOTHING = Nodes(
  np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
)


class Driver:
  """Feeds events to an engine and carries out its actions.

  Not a world: it neither waits nor sends. `handle` returns what to send and the
  drafts to make; the world makes them when its clock says so, through `draft`,
  and feeds the answers back: those of a sequence in the order in which they
  were asked for, each before the next is begun. From when a draft is asked for
  until its answer is in, the sequence's drafter state is left alone: what is
  committed meanwhile is told to the drafter then. So `draft` may run on another
  thread, and its anchors' paths start where the drafter stands.

  Args:
    engine: a fresh one.
    drafter: proposes trees.
    drafter_params: what its `init` takes.
    on_emit: `(sequence, tokens)`, called for what each verdict emits.
    recording: notes every event and what followed.
  """

  def __init__(
    self,
    engine: sch.EngineState,
    drafter: Drafter,
    drafter_params: Any = None,
    on_emit: Callable[[int, tuple[int, ...]], None] | None = None,
    recording: Recording | None = None,
  ):
    self.engine = engine
    self.drafter = drafter
    self.outcomes: dict[int, Outcome] = {}
    self.recording = recording
    self._params = drafter_params
    self._states: dict[int, Any] = {}
    # Per sequence: drafts that are awaited, and what was committed since each
    # was asked for. After a fault there may be several.
    self._awaited: dict[int, collections.deque[list[sch.Observe]]] = {}
    self._on_emit = on_emit
    self.deliver_s: Callable[[float, int], float] | None = None

  @property
  def done(self) -> bool:
    return not self.engine.sequences and not self.engine.queue

  def handle(self, event: sch.Event) -> "Work":
    """Steps the engine; returns what the world has to do."""
    if isinstance(event, sch.Drafted):
      self.settle(event)
    if isinstance(event, sch.Submitted):
      self.outcomes[event.sequence] = Outcome(
        prompt=event.request.prompt, submitted_s=event.time_s
      )
    self.engine, actions = sch.step(self.engine, event)
    if self.recording is not None:
      self.recording.add(event, actions)
    work = Work([], [], [], [])
    for action in actions:
      match action:
        case sch.Launch(run=run):
          work.runs.append(run)
        case sch.Draft():
          work.drafts.append(action)
          self._awaited[action.sequence].append([])
        case sch.CancelRows(cancel=cancel):
          work.cancels.append(cancel)
        case sch.Wake(time_s=time_s):
          work.wakes.append(time_s)
        case sch.Admit(sequence=sequence, request=request):
          self.outcomes[sequence].admitted_s = event.time_s
          state = self.drafter.init(
            self._params, request.prompt, request.sampling.seed
          )
          if request.emitted:
            state = self.drafter.observe(state, request.emitted)
            root = len(request.prompt) + len(request.emitted) - 1
            state = self.drafter.rebase(
              state, Anchor(id=root, path=request.emitted)
            )
          self._states[sequence] = state
          self._awaited[sequence] = collections.deque()
        case sch.Observe(sequence=sequence):
          if self._awaited[sequence]:
            self._awaited[sequence][-1].append(action)
          else:
            self._observe(action)
        case sch.Emit():
          self._emit(action, event.time_s)
        case sch.Finish(sequence=sequence, reason=reason, rounds=rounds):
          outcome = self.outcomes[sequence]
          outcome.reason = reason
          outcome.detail = action.detail
          outcome.rounds = rounds
          outcome.finished_s = event.time_s
          self._states.pop(sequence, None)
          self._awaited.pop(sequence, None)
    return work

  def _observe(self, action: sch.Observe) -> None:
    state = self.drafter.observe(self._states[action.sequence], action.tokens)
    self._states[action.sequence] = self.drafter.rebase(
      state, Anchor(id=action.root, path=action.tokens)
    )

  def draft(self, action: sch.Draft, time_s: float) -> sch.Drafted:
    """Asks the drafter; `time_s` is when the answer is there."""
    try:
      state = self._states[action.sequence]
    except KeyError:  # it ended before the drafter came to it
      nodes = _NOTHING
    else:
      state, nodes = self.drafter.expand(
        state, action.anchors, action.budget, action.levels
      )
      if action.sequence in self._states:
        self._states[action.sequence] = state
    return sch.Drafted(
      time_s=time_s,
      sequence=action.sequence,
      ticket=action.ticket,
      anchors=action.anchors,
      nodes=nodes,
    )

  def settle(self, answer: sch.Drafted) -> None:
    """Brings the drafter up to date once an answer is there.

    Part of `handle`; on its own for an answer that nobody wants any more.
    """
    awaited = self._awaited.get(answer.sequence)
    for told in awaited.popleft() if awaited else ():
      self._observe(told)

  def knows(self, sequence: int) -> bool:
    """Whether a draft for this sequence still means something."""
    return sequence in self._states

  def _emit(self, action: sch.Emit, time_s: float) -> None:
    outcome = self.outcomes[action.sequence]
    if self.deliver_s is not None:
      time_s = self.deliver_s(time_s, len(action.tokens))
    outcome.tokens.extend(action.tokens)
    outcome.log_probs.extend(action.log_probs)
    outcome.margins.extend(action.margins)
    outcome.emitted_s.extend([time_s] * len(action.tokens))
    if self._on_emit is not None:
      self._on_emit(action.sequence, action.tokens)
