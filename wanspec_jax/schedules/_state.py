# SPDX-License-Identifier: Apache-2.0
"""The engine's state, and what a policy is."""

import collections
import dataclasses
from collections.abc import Callable
from typing import NamedTuple

from wanspec_jax.base import Anchor
from wanspec_jax.messages import Open
from wanspec_jax.metrics import RoundRecord
from wanspec_jax.schedules import _events as ev
from wanspec_jax.schedules._calibration import Calibration
from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation


class Grow(NamedTuple):
  """A policy asks the drafter for nodes below these anchors.

  Attributes:
    anchors: nodes to grow from.
    budget: nodes, at most.
    levels: depth below the anchors, at most; None for no limit.
  """

  anchors: tuple[Anchor, ...]
  budget: int
  levels: int | None = None


class Send(NamedTuple):
  """A policy launches these nodes (with the root, if it is not launched).

  A node whose parent is neither launched nor listed before it is refused.
  """

  ids: tuple[int, ...]


class Hold(NamedTuple):
  """A policy has nothing to do before this time and wants to be asked then."""

  until_s: float


Answer = Grow | Send | Hold | None


class Policy(NamedTuple):
  """Decides which nodes are worth their time on the links now.

  Attributes:
    name: as in `--schedule`.
    decide: `(spec, pipe, time_s) -> Grow | Send | Hold | None`; asked after
      every event that may matter to the sequence, and again after each answer
      until it has nothing more to say. Must not change what it is given; what
      it has to remember follows from `spec`.
    max_in_flight: runs of one sequence that it may have in flight.
    cancels: send cancels for what a verdict killed in flight.
    keeps_children: whether all children of a node travel in one run, chosen
      before their identity is known; rules that need the drafter's law refuse a
      policy that does not.
  """

  name: str
  decide: Callable[[Speculation, Pipe, float], Answer]
  max_in_flight: int
  cancels: bool = True
  keeps_children: bool = False


@dataclasses.dataclass(slots=True)
class SequenceState:
  """One admitted sequence."""

  request: ev.Request
  spec: Speculation
  budget: int
  emitted: list[int]
  rounds: list[RoundRecord]
  wake_s: float | None = None


@dataclasses.dataclass(slots=True)
class EngineState:
  """All sequences of a session and the slots they hold.

  Attributes:
    policy: what to launch.
    pipe: what the ring costs, and what is under way.
    calibration: what the drafter's probabilities are worth.
    capacity: slots per stage.
    prefill_rows: rows per prompt chunk.
    queue: requests that wait for slots.
    sequences: admitted ones.
    next_run: id of the next run.
    epoch: grows on faults only.
    runs: sequence whose verdict each run in flight may bring.
    closes: sequences that ended since the last run.
    opens: sequences whose `Open` rides on their first run.
    next_ticket: of the next `Draft`.
  """

  policy: Policy
  pipe: Pipe
  calibration: Calibration
  capacity: int
  prefill_rows: int
  queue: collections.deque[tuple[int, ev.Request]]
  sequences: dict[int, SequenceState]
  next_run: int
  epoch: int
  runs: dict[int, int]
  closes: list[int]
  opens: dict[int, Open]
  next_ticket: int
