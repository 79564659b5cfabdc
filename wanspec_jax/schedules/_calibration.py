# SPDX-License-Identifier: Apache-2.0
"""What drafts are worth and runs do to each other, learned from verdicts."""

import bisect
import math

_EDGES = (0.02, 0.05, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97)
_LEVELS = (1, 2, 3, 4, 6, 8, 12, 16)  # smallest level of each class
_FLOOR = 1e-4
_RETURN_MEMORY = 100
_LEAST_WEIGHT = 1e-3  # a size not seen for long
_LEAST_SPREAD = 0.5  # below it, `others` hardly varied


class Crowding:
  """How much later runs come back for every other one that is under way.

  What the queues of a `Pipe` do not tell: stages that share cores and memory
  slow each other down. The slope of lateness over others by least squares,

    Σ (late − E[late]) (others − E[others]) / Σ (others − E[others])²

  with a mean per size of run (powers of two), so that stage times which are
  off for a size count neither for nor against; the past is forgotten by and by.
  """

  def __init__(self):
    # By size: weight, Σ late, Σ others, Σ late · others, Σ others².
    self._sums: dict[int, list[float]] = {}

  @property
  def seconds(self) -> float:
    """Per other run; 0 where there is nothing of the kind."""
    joint = spread = 0.0
    for n, late_s, others, product, square in self._sums.values():
      joint += product - late_s * others / n
      spread += square - others * others / n
    return max(0.0, joint / spread) if spread > _LEAST_SPREAD else 0.0

  def note_return(self, late_s: float, others: int, rows: int) -> None:
    """Counts one run that came back.

    Args:
      late_s: how much later than the queues said; negative for sooner.
      others: runs that were under way at its launch, and that were launched
        while it was.
      rows: of the run.
    """
    keep = 1 - 1 / _RETURN_MEMORY
    for size, sums in list(self._sums.items()):
      sums[:] = [keep * x for x in sums]
      if sums[0] < _LEAST_WEIGHT:
        del self._sums[size]
    sums = self._sums.setdefault(rows.bit_length(), [0.0] * 5)
    noted = (1.0, late_s, others, late_s * others, others * others)
    sums[:] = [x + y for x, y in zip(sums, noted, strict=True)]


class Calibration:
  """Acceptance by stated probability and by level, with the drafter as prior.

  Every verdict tests the children of each token that it passes: the one that
  bears the target's draw was right, its siblings were wrong. Nodes are binned
  by what the drafter stated; a bin of `n` tests of which `k` passed, with
  stated sum `s`, corrects what is stated there by

    c = (k + m) / (s + m)        m = `prior`

  and a second factor of the same form, over what the first one left, corrects
  by level (how far the drafter was ahead of the committed text): acceptance
  decays with it for most drafters, and not for all.

  Mutable: shared by an engine's sequences, and by the engines that follow each
  other on a ring, if they are given the same one.

  Args:
    prior: weight of the drafter's own word, in expected acceptances.
    memory: tests after which older ones have faded to 1/e.

  Attributes:
    crowding: what was learned of the ring, by the same verdicts.
  """

  def __init__(self, prior: float = 2.0, memory: float = 2000.0):
    self._prior = prior
    self._keep = math.exp(-1 / memory)
    self._bins = [[0.0, 0.0] for _ in range(len(_EDGES) + 1)]
    self._levels = [[0.0, 0.0] for _ in _LEVELS]
    self.crowding = Crowding()

  def estimate(self, log_q: float, level: int) -> float:
    """Returns the log-probability that such a node is accepted, its parent
    being so."""
    stated = max(math.exp(log_q), _FLOOR)
    by_bin = self._factor(self._bins[bisect.bisect(_EDGES, stated)])
    by_level = self._factor(self._levels[bisect.bisect(_LEVELS, level) - 1])
    return math.log(min(max(stated * by_bin * by_level, _FLOOR), 1.0))

  def observe(self, log_q: float, level: int, accepted: bool) -> None:
    """Counts one test."""
    stated = max(math.exp(log_q), _FLOOR)
    in_bin = self._bins[bisect.bisect(_EDGES, stated)]
    of_level = self._levels[bisect.bisect(_LEVELS, level) - 1]
    corrected = min(stated * self._factor(in_bin), 1.0)
    for counts, expected in ((in_bin, stated), (of_level, corrected)):
      counts[0] = counts[0] * self._keep + accepted
      counts[1] = counts[1] * self._keep + expected

  def _factor(self, counts: list[float]) -> float:
    return (counts[0] + self._prior) / (counts[1] + self._prior)
