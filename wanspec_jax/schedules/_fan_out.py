# SPDX-License-Identifier: Apache-2.0
"""How many guesses each outcome of a verification deserves.

A chain of K drafted tokens has the outcomes k = 0 … K: k of them are accepted,
and then the target draws a token of its own. F_k guesses at that token are
worth having a continuation ready for; Σ F_k ≤ B. Saguaro, speculative
speculative decoding (https://arxiv.org/abs/2603.03251), Theorem 12 and its
generalisation to a measured histogram. All in float64.
"""

import heapq
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Law(NamedTuple):
  """I.i.d. acceptance and a power law of misses.

  Attributes:
    accept: a, in (0, 1): acceptance per drafted token.
    power: r > 0: F guesses miss with probability F^{−r}.
  """

  accept: float
  power: float


def _check_law(law: Law, length: int) -> None:
  if not 0 < law.accept < 1:
    raise ValueError(f"accept = {law.accept}: must be in (0, 1)")
  if not law.power > 0:
    raise ValueError(f"power = {law.power}: must be > 0")
  if length < 0:
    raise ValueError(f"length = {length}: must be >= 0")


def _check_budget(budget: float, length: int) -> None:
  if budget < length + 1:
    raise ValueError(
      f"budget = {budget}: must be >= length + 1 = {length + 1}, a guess per "
      "outcome"
    )


def outcome_weights(accept: float, length: int) -> np.ndarray:
  """Returns the probability of each outcome.

  Returns:
    `[K + 1]` float64: (1 − a) a^k for k < K, and a^K.
  """
  weights = accept ** np.arange(length + 1, dtype=np.float64)
  weights[:-1] *= 1 - accept
  return weights


def geometric_fan_out(law: Law, *, length: int, budget: float) -> np.ndarray:
  """Returns the fan-out of fewest misses among real numbers (Theorem 12).

  Minimises `miss_probability` subject to Σ F_k = B. Stationarity makes F_k
  proportional to the probability of outcome k to the power 1 / (1 + r):

    F_k = F_0 a^{k / (1 + r)}, k < K
    F_K = F_0 a^{K / (1 + r)} (1 − a)^{−1 / (1 + r)}

  so it falls geometrically, but for the last outcome, which needs no rejection
  and deserves more.

  Args:
    law: of acceptance and misses.
    length: K, drafted tokens.
    budget: B, guesses.

  Returns:
    `[K + 1]` float64 with sum B; some may be below 1, see `whole_fan_out`.

  Raises:
    ValueError: an argument is out of range.

  Example:
    >>> geometric_fan_out(Law(0.8, 0.7), length=4, budget=30).round(2)
    array([6.19, 5.43, 4.76, 4.18, 9.44])
  """
  _check_law(law, length)
  if not budget > 0:
    raise ValueError(f"budget = {budget}: must be > 0")
  shares = outcome_weights(law.accept, length) ** (1 / (1 + law.power))
  return budget * shares / shares.sum()


def miss_probability(law: Law, fan_out: Sequence[float] | np.ndarray) -> float:
  """Returns the probability that an outcome is not among the guesses:

    q(F) = (1 − a) Σ_{k<K} a^k F_k^{−r} + a^K F_K^{−r}

  Args:
    law: of acceptance and misses.
    fan_out: `[K + 1]` positive guesses per outcome.
  """
  guesses = np.asarray(fan_out, np.float64)
  _check_law(law, len(guesses) - 1)
  if not (guesses > 0).all():
    raise ValueError(f"fan_out = {guesses.tolist()}: must be positive")
  weights = outcome_weights(law.accept, len(guesses) - 1)
  return float(weights @ guesses**-law.power)


def whole_fan_out(fan_out: Sequence[float] | np.ndarray) -> tuple[int, ...]:
  """Returns whole numbers near a real fan-out, at least 1 each.

  Largest remainder: each is rounded down, but not below 1, and what is left of
  the sum (rounded to the nearest whole) goes to the largest remainders, the
  smaller k on a tie. If the floor of 1 has used up more than there was, those
  that lost least by rounding up give it back, first the one that stands
  highest above its real share.

  Args:
    fan_out: `[K + 1]` non-negative, with a sum of at least K + 1.

  Returns:
    K + 1 whole numbers with the same sum.
  """
  real = np.asarray(fan_out, np.float64)
  budget = round(float(real.sum()))
  if not (real >= 0).all():
    raise ValueError(f"fan_out = {real.tolist()}: must not be negative")
  _check_budget(budget, len(real) - 1)
  whole = np.maximum(np.floor(real + 1e-9), 1).astype(np.int64)
  while whole.sum() < budget:
    whole[np.argmax(real - whole)] += 1
  while whole.sum() > budget:
    above = np.where(whole > 1, whole - real, -np.inf)
    whole[np.argmax(above)] -= 1
  return tuple(int(n) for n in whole)


def measured_fan_out(
  weights: Sequence[float] | np.ndarray,
  histogram: Sequence[Sequence[float]] | np.ndarray,
  *,
  budget: int,
) -> tuple[int, ...]:
  """Returns the fan-out of most hits on a measured histogram; no law assumed.

  With w_k the probability of outcome k and h_k(i) how often the target's token
  was the i-th best guess there, F_k guesses hit with probability
  w_k Σ_{i ≤ F_k} h_k(i). Guesses are handed out one by one, each to the outcome
  where it adds most. That is optimal where every h_k falls with rank (the gains
  are concave and separable). A measured one need not; where it rises, the best
  mean gain of the next few guesses counts, that is, the least concave bound of
  the sums, and the result is optimal for every budget at which no such few are
  cut.

  Args:
    weights: `[K + 1]` probabilities, or counts, of the outcomes.
    histogram: `[K + 1, R]`: frequency of ranks 1 … R given the outcome; ranks
      beyond count as misses. Rows need not be normalised to 1: what is missing
      was never among the guesses.
    budget: B, guesses.

  Returns:
    K + 1 whole numbers, each from 1 to R, with sum min(B, (K + 1) R).

  Raises:
    ValueError: shapes differ, a frequency is negative, or the budget is below
      K + 1.
  """
  chances = np.asarray(weights, np.float64)
  ranks = np.asarray(histogram, np.float64)
  if chances.ndim != 1 or ranks.ndim != 2 or len(ranks) != len(chances):
    raise ValueError(
      f"histogram has shape {ranks.shape}: must be [{len(chances)}, R]"
    )
  if not ((chances >= 0).all() and (ranks >= 0).all() and ranks.size):
    raise ValueError("histogram: frequencies must not be negative, nor missing")
  _check_budget(budget, len(chances) - 1)
  gains = chances[:, None] * ranks
  fan_out = [1] * len(gains)
  left = min(budget, gains.size) - len(gains)
  heap = [_next_block(row, k, 1) for k, row in enumerate(gains)]
  heap = [block for block in heap if block is not None]
  heapq.heapify(heap)
  while left > 0 and heap:
    _, k, size = heapq.heappop(heap)
    size = min(size, left)
    fan_out[k] += size
    left -= size
    block = _next_block(gains[k], k, fan_out[k])
    if block is not None:
      heapq.heappush(heap, block)
  return tuple(fan_out)


def _next_block(
  gains: np.ndarray, k: int, done: int
) -> tuple[float, int, int] | None:
  """Returns (−mean gain, k, size) of the guesses behind the first `done` whose
  mean gain is largest, the fewest such; None if there are none left."""
  rest = gains[done:]
  if not len(rest):
    return None
  means = np.cumsum(rest) / np.arange(1, len(rest) + 1)
  size = int(np.argmax(means > means.max() - 1e-15)) + 1
  return -float(means[size - 1]), k, size
