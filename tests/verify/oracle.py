# SPDX-License-Identifier: Apache-2.0
"""Slow, independent versions of what `verify` computes."""

import math

import numpy as np


def process(logits, *, temperature, top_k=0, top_p=1.0, min_p=0.0):
  """The processed law as a float64 array, by an explicit sort.

  Returns also how close the top-p and min-p rules were to a tie, since float32
  may decide those otherwise.
  """
  z = [float(x) / temperature for x in logits]
  top = max(z)
  weights = [math.exp(x - top) for x in z]
  order = sorted(range(len(z)), key=lambda i: (-z[i], i))
  if top_k:
    order = order[:top_k]
  total = sum(weights[i] for i in order)
  kept, mass, gap = [], 0.0, math.inf
  for i in order:
    if top_p < 1:
      gap = min(gap, abs(mass - top_p))
      if mass >= top_p:
        break
    kept.append(i)
    mass += weights[i] / total
  if min_p > 0:
    gap = min([gap, *(abs(weights[i] - min_p) for i in kept)])
    kept = [i for i in kept if weights[i] >= min_p]
  law = np.zeros(len(z))
  law[kept] = [weights[i] for i in kept]
  return law / law.sum(), gap


def threefry(key, counter):
  """Threefry-2x32-20 of two 32-bit words, after Salmon et al. (2011)."""
  mask = 0xFFFFFFFF
  k = [*key, key[0] ^ key[1] ^ 0x1BD11BDA]
  a, b = (counter[0] + k[0]) & mask, (counter[1] + k[1]) & mask
  rotations = ((13, 15, 26, 6), (17, 29, 16, 24))
  for group in range(5):
    for r in rotations[group % 2]:
      a = (a + b) & mask
      b = ((b << r | b >> (32 - r)) & mask) ^ a
    a = (a + k[(group + 1) % 3]) & mask
    b = (b + k[(group + 2) % 3] + group + 1) & mask
  return a, b


def race_bits(seed, purpose, position, size):
  """The 32 bits of each token id, from the specification in `_draw`."""
  key = (seed >> 32, seed & 0xFFFFFFFF)
  for part in (purpose, position):
    key = threefry(key, (0, part))
  return [a ^ b for a, b in (threefry(key, (0, i)) for i in range(size))]


def gumbel(seed, purpose, position, size):
  """float64 Gumbel noise from `race_bits`."""
  bits = np.array(race_bits(seed, purpose, position, size), np.float64)
  return -np.log(-np.log1p(-(bits + 0.5) / 2**32))


def total_variation(p, q):
  return 0.5 * np.abs(np.asarray(p) - np.asarray(q)).sum()


def chi_square_bound(degrees, sigmas=4.76):
  """Value that χ² exceeds with probability 1e-6 (Wilson and Hilferty)."""
  c = 2 / (9 * degrees)
  return degrees * (1 - c + sigmas * math.sqrt(c)) ** 3


def chi_square(counts, law):
  """Pearson's statistic and its bound; cells of probability 0 must be empty."""
  counts, law = np.ravel(counts), np.ravel(law)
  assert counts[law == 0].sum() == 0
  counts, law = counts[law > 0], law[law > 0]
  expected = counts.sum() * law
  assert expected.min() > 20, "too few samples for the approximation"
  statistic = ((counts - expected) ** 2 / expected).sum()
  return statistic, chi_square_bound(len(law) - 1)
