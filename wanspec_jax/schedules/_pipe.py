# SPDX-License-Identifier: Apache-2.0
"""What runs cost on links and stages, and when those are free again."""

import dataclasses
import math
from collections.abc import Callable
from typing import NamedTuple, Self

import numpy as np

from wanspec_jax.links import HopBytes, Ring, StageProfile
from wanspec_jax.schedules._calibration import Crowding


class DraftCosts(NamedTuple):
  """What an answer of the drafter costs, in seconds.

  Attributes:
    per_call_s: of any answer.
    per_level_s: of each level of the deepest path: a forward pass.
    per_node_s: of each node.
  """

  per_call_s: float = 0.0
  per_level_s: float = 0.0
  per_node_s: float = 0.0

  def seconds(self, levels: int, nodes: int) -> float:
    """Returns the time of an answer of so many levels and nodes."""
    if not nodes:
      return self.per_call_s
    return self.per_call_s + levels * self.per_level_s + nodes * self.per_node_s


_FREE = DraftCosts()
_HIT_MEMORY = 50


@dataclasses.dataclass(frozen=True, kw_only=True)
class Costs:
  """What a ring costs, as planning sees it: means, nothing else in flight.

  Attributes:
    delay_s: `P + 1` one-way delays.
    busy_s: `(rows) -> 2 P + 1` seconds that a run keeps hop 0, stage 0, hop 1,
      …, stage P − 1, hop P busy.
    max_rows: rows that one run may carry (the stages' largest bucket).
    draft: of the drafter.
    spacing_s: `(rows) -> seconds` that must lie between two runs whatever each
      link and stage alone could take: stages that share a host. None for
      nothing beyond `busy_s`.
  """

  delay_s: tuple[float, ...]
  busy_s: Callable[[int], tuple[float, ...]]
  max_rows: int
  draft: DraftCosts = _FREE
  spacing_s: Callable[[int], float] | None = None

  @classmethod
  def of_ring(
    cls,
    ring: Ring,
    profile: StageProfile,
    hop_bytes: HopBytes,
    *,
    max_rows: int,
    draft: DraftCosts = _FREE,
  ) -> Self:
    """Returns the costs of a ring; jitter counts with its mean, which is
    √(2/π) of `jitter_s` for the half-normal law of `wire.LinkShaper`."""
    s_per_byte = 8 / np.asarray(ring.bandwidth_bps, np.float64)
    jitter_s = math.sqrt(2 / math.pi) * np.asarray(ring.jitter_s, np.float64)
    known: dict[int, tuple[float, ...]] = {}

    def busy_s(rows: int) -> tuple[float, ...]:
      if rows not in known:
        hops = (hop_bytes(rows) * s_per_byte).tolist()
        stages = profile.stage_s(rows).tolist()
        both = [x for pair in zip(hops, stages, strict=False) for x in pair]
        known[rows] = (*both, hops[-1])
      return known[rows]

    delays = np.asarray(ring.rtt_s, np.float64) / 2 + jitter_s
    return cls(
      delay_s=tuple(delays.tolist()),
      busy_s=busy_s,
      max_rows=max_rows,
      draft=draft,
      spacing_s=profile.run_spacing_s if profile.spacing_s else None,
    )

  @classmethod
  def constant(cls, lap_s: float, *, max_rows: int) -> Self:
    """Returns the costs of a ring whose laps take the same for any run."""
    busy = (0.0, 0.0, 0.0)
    return cls(
      delay_s=(lap_s / 2, lap_s / 2),
      busy_s=lambda rows: busy,
      max_rows=max_rows,
    )

  def lap_s(self, rows: int) -> float:
    """Returns the time of one lap of a run of that many rows."""
    return sum(self.delay_s) + sum(self.busy_s(rows))

  def tail_s(self, rows: int) -> float:
    """Returns the time until the tail has walked a run of that many rows."""
    return self.lap_s(rows) - self.delay_s[-1] - self.busy_s(rows)[-1]

  def occupancy_s(self, rows: int) -> float:
    """Returns how long the busiest link or stage is kept busy, or the host that
    stages share: no two such runs can follow each other more closely."""
    busiest_s = max(self.busy_s(rows))
    return max(busiest_s, self.gate_s(rows))

  def gate_s(self, rows: int) -> float:
    """Returns `spacing_s(rows)`, 0 where there is none."""
    return self.spacing_s(rows) if self.spacing_s is not None else 0.0


class Pipe:
  """Costs, and what the runs launched so far do to those that follow.

  Runs keep their order, so each link and stage is a queue with one server. What
  stages share is one more, which all runs pass first: where contention slows
  several runs down a little each, the last of them is as late as if it had
  waited there. The pipe is shared by all sequences of an engine.

  Attributes:
    costs: see `Costs`.
    num_sequences: sequences that share the pipe.
    hit_rate: how often, of late, the target's token was among the drafted
      children of the token before, where there were any.
    crowding: see there.
    crowding_s: what one more run under way costs each of the others.
  """

  def __init__(self, costs: Costs, crowding: Crowding | None = None):
    self.costs = costs
    self.crowding = crowding or Crowding()
    self.num_sequences = 0
    self.hit_rate = 0.5
    self._free_s = [0.0] * (2 * len(costs.delay_s) - 1)
    self._gate_s = 0.0

  @property
  def crowding_s(self) -> float:
    return self.crowding.seconds

  def launch(self, rows: int, time_s: float) -> tuple[float, float]:
    """Books a run launched now; returns when the tail has walked it and when
    it is back."""
    at = max(time_s, self._gate_s)
    self._gate_s = at + self.costs.gate_s(rows)
    tail_s = at
    last = len(self._free_s) - 1
    delays = self.costs.delay_s
    for i, busy in enumerate(self.costs.busy_s(rows)):
      if i == last:
        tail_s = at
      at = max(at, self._free_s[i]) + busy
      self._free_s[i] = at
      if not i & 1:
        at += delays[i >> 1]
    return tail_s, at

  def wait_s(self, rows: int, time_s: float) -> float:
    """Returns how long a run launched now would queue on its way to the tail,
    all queues together."""
    return self.tail_s(rows, time_s) - time_s - self.costs.tail_s(rows)

  def tail_s(self, rows: int, time_s: float) -> float:
    """Returns when the tail would have walked a run launched now."""
    at = max(time_s, self._gate_s)
    delays = self.costs.delay_s
    for i, busy in enumerate(self.costs.busy_s(rows)[:-1]):
      free = self._free_s[i]
      at = (free if free > at else at) + busy
      if not i & 1:
        at += delays[i >> 1]
    return at

  def queue_s(self, rows: int, time_s: float, then_s: float) -> float:
    """Returns how long a run of one row, launched at `then_s`, would queue on
    its way to the tail if one of `rows` were launched now."""
    free_s, gate_s = list(self._free_s), self._gate_s
    self.launch(rows, time_s)
    wait_s = self.wait_s(1, then_s)
    self._free_s, self._gate_s = free_s, gate_s
    return wait_s

  def note_hit(self, hit: bool) -> None:
    """Counts one token whose predecessor had drafted children."""
    self.hit_rate += (hit - self.hit_rate) / _HIT_MEMORY

  def clear(self) -> None:
    """Forgets what was launched: it is lost."""
    self._free_s = [0.0] * len(self._free_s)
    self._gate_s = 0.0
