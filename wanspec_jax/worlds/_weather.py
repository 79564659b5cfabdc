# SPDX-License-Identifier: Apache-2.0
"""What goes wrong on links and hosts of the virtual world, by seed."""

import dataclasses
from typing import NamedTuple

from wanspec_jax.wire import uniform

_SLOT_S = 0.05


class Stall(NamedTuple):
  """A hop delivers nothing between two moments; then all that waited comes."""

  hop: int
  start_s: float
  end_s: float


class Kill(NamedTuple):
  """A stage dies with all it holds; `down_s` later a replacement stands.

  Once every stage stands, the ring is up again under a new epoch, and committed
  tokens are replayed.
  """

  stage: int
  time_s: float
  down_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Weather:
  """Faults as a function of time, so that two schedules meet the same ones.

  Attributes:
    seed: addresses the draws.
    loss: share of time slots of 50 ms in which a hop loses what is handed to
      it; what was lost is sent again.
    retransmit_s: how much later it arrives then; what follows waits for it.
    duplicates: share of frames that arrive twice.
    stalls: see `Stall`.
    kills: see `Kill`.
    start_s: when the schedule begins: slots, stalls and kills are counted from
      then, and before it the weather is fair.
  """

  seed: int = 0
  loss: float = 0.0
  retransmit_s: float = 0.2
  duplicates: float = 0.0
  stalls: tuple[Stall, ...] = ()
  kills: tuple[Kill, ...] = ()
  start_s: float = 0.0

  def delivery_s(self, hop: int, sent_s: float, arrival_s: float) -> float:
    """Returns when a frame arrives that would have come at `arrival_s`."""
    if sent_s < self.start_s:
      return arrival_s
    return self.start_s + self._delivery_s(
      hop, sent_s - self.start_s, arrival_s - self.start_s
    )

  def _delivery_s(self, hop: int, sent_s: float, arrival_s: float) -> float:
    if self.loss and self._share(hop, int(sent_s / _SLOT_S)) < self.loss:
      arrival_s += self.retransmit_s
    for stall in sorted(self.stalls, key=lambda stall: stall.start_s):
      if stall.hop == hop and stall.start_s <= arrival_s < stall.end_s:
        arrival_s = stall.end_s
    return arrival_s

  def is_doubled(self, hop: int, frame: int) -> bool:
    """Whether the `frame`-th frame of a hop arrives twice."""
    return bool(self.duplicates) and (
      self._share(1000 + hop, frame) < self.duplicates
    )

  def _share(self, lane: int, index: int) -> float:
    """Returns a number in [0, 1), addressed by seed, lane and index."""
    return uniform(seed=self.seed * 10007 + lane, index=index)
