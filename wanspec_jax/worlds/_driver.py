# SPDX-License-Identifier: Apache-2.0
"""What every world does with an engine's actions, and what a session yields."""

import dataclasses
from typing import Any, NamedTuple

from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor, Drafter
from wanspec_jax.messages import Run
from wanspec_jax.metrics import RoundRecord
from wanspec_jax.wire import ByteCounter


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
    reason: `stop`, `stop_string`, `length`, `aborted`; empty while it runs.
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
  """

  world: str
  outcomes: dict[int, Outcome]
  spans: list[Span]
  bytes: ByteCounter


class Driver:
  """Feeds events to an engine and carries out its actions.

  Not a world: it neither waits nor sends. `handle` returns the runs to send and
  the drafts to make; the world makes them when its clock says so, through
  `draft`, and feeds the answer back.
  """

  def __init__(
    self,
    engine: sch.EngineState,
    drafter: Drafter,
    drafter_params: Any = None,
    on_emit=None,
  ):
    self.engine = engine
    self.drafter = drafter
    self.outcomes: dict[int, Outcome] = {}
    self._params = drafter_params
    self._states: dict[int, Any] = {}
    self._on_emit = on_emit

  @property
  def done(self) -> bool:
    return not self.engine.sequences and not self.engine.queue

  def handle(self, event: sch.Event) -> tuple[list[Run], list[sch.Draft]]:
    """Steps the engine; returns runs to send, in order, and drafts to make."""
    if isinstance(event, sch.Submitted):
      self.outcomes[event.sequence] = Outcome(
        prompt=event.request.prompt, submitted_s=event.time_s
      )
    self.engine, actions = sch.step(self.engine, event)
    runs, drafts = [], []
    for action in actions:
      match action:
        case sch.Launch(run=run):
          runs.append(run)
        case sch.Draft():
          drafts.append(action)
        case sch.Admit(sequence=sequence, request=request):
          self.outcomes[sequence].admitted_s = event.time_s
          self._states[sequence] = self.drafter.init(
            self._params, request.prompt, request.sampling.seed
          )
        case sch.Observe(sequence=sequence, root=root, tokens=tokens):
          state = self.drafter.observe(self._states[sequence], tokens)
          self._states[sequence] = self.drafter.rebase(
            state, Anchor(id=root, path=tokens)
          )
        case sch.Emit():
          self._emit(action, event.time_s)
        case sch.Finish(sequence=sequence, reason=reason, rounds=rounds):
          outcome = self.outcomes[sequence]
          outcome.reason = reason
          outcome.rounds = rounds
          outcome.finished_s = event.time_s
          self._states.pop(sequence, None)
    return runs, drafts

  def draft(self, action: sch.Draft, time_s: float) -> sch.Drafted:
    """Asks the drafter; `time_s` is when the answer is there."""
    state, nodes = self.drafter.expand(
      self._states[action.sequence], action.anchors, action.budget
    )
    self._states[action.sequence] = state
    return sch.Drafted(
      time_s=time_s,
      sequence=action.sequence,
      root=action.root,
      anchors=action.anchors,
      nodes=nodes,
    )

  def knows(self, sequence: int) -> bool:
    """Whether a draft for this sequence still means something."""
    return sequence in self._states

  def _emit(self, action: sch.Emit, time_s: float) -> None:
    outcome = self.outcomes[action.sequence]
    outcome.tokens.extend(action.tokens)
    outcome.log_probs.extend(action.log_probs)
    outcome.margins.extend(action.margins)
    outcome.emitted_s.extend([time_s] * len(action.tokens))
    if self._on_emit is not None:
      self._on_emit(action.sequence, action.tokens)
