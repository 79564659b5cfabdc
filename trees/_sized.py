# SPDX-License-Identifier: Apache-2.0
"""How many nodes a draft should have, for any lap time.

Both functions solve the fractional programme max E[tokens] / lap time exactly,
by looking at every size, so that lap times may jump at row buckets and need not
be convex. Sizes are told apart by name: `num_nodes` counts drafted nodes,
`num_rows` counts the root as well.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from trees._sequoia import LapTime, expected_by_size, lap_times


class Sized(NamedTuple):
  """A size and what to expect of it.

  Attributes:
    num_nodes: drafted nodes, the root not included; 0 is plain decoding.
    expected_tokens: per lap, the target's own token included.
    lap_s: seconds per lap.
    tokens_per_s: their ratio.
  """

  num_nodes: int
  expected_tokens: float
  lap_s: float
  tokens_per_s: float

  @property
  def num_rows(self) -> int:
    """Rows that the lap carries: the nodes and the root."""
    return self.num_nodes + 1


def sized(
  acceptance: ArrayLike,
  lap_time_s: LapTime,
  *,
  max_nodes: int,
  candidates: Sequence[int] | None = None,
  draft_s: float = 0.0,
) -> Sized:
  """Returns the tree size with the best expected tokens per second.

  Maximises F(n) / (lap_time_s(n) + draft_s [n > 1]) over tree sizes, where F is
  that of the optimal tree of each size (`trees.sequoia_dp`). Exact; ties go to
  the smaller size.

  Args:
    acceptance: positional acceptance, `[B]` or per depth `[L, B]`.
    lap_time_s: seconds of a lap of `n` rows, root included.
    max_nodes: largest tree size, root included.
    candidates: tree sizes allowed, root included; None allows them all. Those
      that no tree within the rank and depth limits has are skipped.
    draft_s: drafting time of a lap that is not hidden behind it; a lap of the
      root alone drafts nothing.

  Raises:
    ValueError: if a lap time, a candidate or `draft_s` is not usable.
  """
  if not (np.isfinite(draft_s) and draft_s >= 0):
    raise ValueError(f"draft_s = {draft_s}: must be finite and >= 0")
  expected = expected_by_size(acceptance, max_nodes=max_nodes)
  sizes = sorted(
    set(range(1, max_nodes + 1) if candidates is None else candidates)
  )
  for n in sizes:
    if not 1 <= n <= max_nodes:
      raise ValueError(
        f"candidates has {n}: must lie in [1, max_nodes = {max_nodes}]"
      )
  sizes = [n for n in sizes if np.isfinite(expected[n])]
  if not sizes:
    raise ValueError(f"candidates = {candidates}: no tree has such a size")
  laps = lap_times(lap_time_s, sizes)
  laps += np.where(np.array(sizes) > 1, draft_s, 0.0)
  return _best(np.array(sizes) - 1, expected[sizes], laps)


def best_prefix(gains: ArrayLike, lap_time_s: LapTime) -> Sized:
  """Returns how many of the listed nodes are worth their time on the links.

  Maximises (1 + Σ_{i ≤ n} gainᵢ) / lap_time_s(1 + n) over n = 0 … len(gains);
  n = 0 is plain decoding. Exact; ties go to the smaller n. In the continuum
  this is the rule "add a node iff its acceptance probability exceeds the
  marginal lap time times the current rate".

  Args:
    gains: `[m]` probability that each node is accepted, i.e. of its whole path,
      in an order in which every prefix is a tree (best first); not necessarily
      non-increasing.
    lap_time_s: seconds of a lap of `n` rows, root included.

  Raises:
    ValueError: if a gain is not a probability or a lap time is not usable.
  """
  values = np.asarray(gains, np.float64)
  if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
    raise ValueError(f"gains = {gains}: must be a list of numbers in [0, 1]")
  expected = np.concatenate([[1.0], 1 + np.cumsum(values)])
  laps = lap_times(lap_time_s, range(1, len(expected) + 1))
  return _best(np.arange(len(expected)), expected, laps)


def _best(
  num_nodes: np.ndarray, expected: np.ndarray, laps: np.ndarray
) -> Sized:
  rates = expected / laps
  i = int(np.argmax(rates))  # the first of equals, hence the smallest
  return Sized(
    num_nodes=int(num_nodes[i]),
    expected_tokens=float(expected[i]),
    lap_s=float(laps[i]),
    tokens_per_s=float(rates[i]),
  )
