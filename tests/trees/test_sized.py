# SPDX-License-Identifier: Apache-2.0
"""Sizes against exhaustive search with exact fractions."""

import fractions

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import trees

settings = hypothesis.settings(
  derandomize=True, deadline=None, max_examples=100
)
# Multiples of 1/64 keep every sum exact, so ties are true ties.
gains = st.lists(st.integers(0, 64).map(lambda i: i / 64), max_size=12)
lap = st.integers(1, 64).map(lambda i: i / 64)


@settings
@hypothesis.given(gains=gains, laps=st.lists(lap, min_size=13, max_size=13))
def test_best_prefix_is_the_best_of_all(gains, laps):
  got = trees.best_prefix(gains, lambda n: laps[n - 1])
  rates = [
    (1 + sum(map(fractions.Fraction, gains[:n]), fractions.Fraction(0)))
    / fractions.Fraction(laps[n])
    for n in range(len(gains) + 1)
  ]
  # Exact rates that differ by less than rounding may be told apart either way.
  assert float(rates[got.num_nodes]) == pytest.approx(
    float(max(rates)), rel=1e-14
  )
  assert got.expected_tokens == 1 + sum(gains[: got.num_nodes])
  assert got.lap_s == laps[got.num_nodes]
  assert got.num_rows == got.num_nodes + 1
  assert got.tokens_per_s == got.expected_tokens / got.lap_s


def test_prefix_stops_where_the_marginal_rule_says():
  probabilities = 0.9 ** np.arange(1, 60)
  row_s, delay_s = 0.004, 0.2
  got = trees.best_prefix(probabilities, lambda n: delay_s + row_s * n)
  rate = got.tokens_per_s
  # Add node i iff P(i accepted) > (marginal lap time) x (rate).
  assert probabilities[got.num_nodes - 1] > row_s * rate
  assert probabilities[got.num_nodes] <= row_s * rate


def test_ties_go_to_the_smaller_size_and_zero_is_plain_decoding():
  assert trees.best_prefix([1.0, 1.0], lambda n: float(n)).num_nodes == 0
  assert trees.best_prefix([], lambda n: 0.5) == (0, 1.0, 0.5, 2.0)
  # Buckets of 4 rows: the lap jumps, so a full bucket is best.
  got = trees.best_prefix([0.5] * 10, lambda n: 1.0 + 1.25 * (-(-n // 4)))
  assert got.num_rows == 8
  # F of a chain with p = 1 is its size.
  got = trees.sized([1.0], lambda n: float(n), max_nodes=9)
  assert got == (0, 1.0, 1.0, 1.0)


@settings
@hypothesis.given(
  p=st.lists(st.floats(0, 1), min_size=1, max_size=3),
  laps=st.lists(st.floats(0.01, 5), min_size=8, max_size=8),
  candidates=st.one_of(
    st.none(), st.lists(st.integers(1, 8), min_size=1, max_size=5)
  ),
  draft_s=st.sampled_from([0.0, 0.7]),
)
def test_sized_is_the_best_of_all_sizes(p, laps, candidates, draft_s):
  got = trees.sized(
    p,
    lambda n: laps[n - 1],
    max_nodes=8,
    candidates=candidates,
    draft_s=draft_s,
  )
  rates = {}
  for n in candidates or range(1, 9):
    tokens = trees.sequoia_dp(p, num_nodes=n).expected_tokens
    rates[n] = tokens / (laps[n - 1] + (draft_s if n > 1 else 0.0))
  assert got.num_rows in rates
  assert rates[got.num_rows] == pytest.approx(max(rates.values()), rel=1e-12)
  assert got.tokens_per_s == pytest.approx(max(rates.values()), rel=1e-12)


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: trees.best_prefix([0.5, 1.5], lambda n: 1.0), "gains"),
    (lambda: trees.best_prefix([np.nan], lambda n: 1.0), "gains"),
    (lambda: trees.best_prefix([0.5], lambda n: 0.0), r"lap_time\(1\)"),
    (
      lambda: trees.sized([0.5], lambda n: 1.0, max_nodes=4, candidates=[2, 5]),
      r"candidates has 5",
    ),
    (
      lambda: trees.sized(
        [[0.5]], lambda n: 1.0, max_nodes=4, candidates=[3, 4]
      ),
      "no tree has such a size",
    ),
    (
      lambda: trees.sized([0.5], lambda n: 1.0, max_nodes=4, draft_s=-0.1),
      "draft_s",
    ),
  ],
)
def test_refusals(call, words):
  with pytest.raises(ValueError, match=words):
    call()
