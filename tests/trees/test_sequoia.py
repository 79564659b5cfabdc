# SPDX-License-Identifier: Apache-2.0
"""Sequoia's recursion against published values, enumeration and a heap."""

import functools
import json
import pathlib

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

import trees
from trees import _sequoia

REFERENCE = json.loads(
  (
    pathlib.Path(__file__).parents[1] / "data" / "sequoia_reference.json"
  ).read_text()
)
settings = hypothesis.settings(derandomize=True, deadline=None, max_examples=40)
probability = st.floats(0, 1, allow_subnormal=False)


@functools.cache
def ordered_trees(num_nodes):
  """All shapes of `num_nodes` nodes as nested tuples of children."""

  def forests(n):
    if n == 0:
      return [()]
    return [
      (first, *rest)
      for size in range(1, n + 1)
      for first in ordered_trees(size)
      for rest in forests(n - size)
    ]

  return forests(num_nodes - 1)


def value(tree, p, level=1):
  """F of a nested tuple; −inf beyond the ranks or levels of `p` ([L, B])."""
  if tree and (level > len(p) or len(tree) > len(p[0])):
    return -np.inf
  return 1 + sum(
    p[level - 1][k] * value(child, p, level + 1) for k, child in enumerate(tree)
  )


def levels(tree):
  return 1 + max((levels(child) for child in tree), default=0)


def brute(p, num_nodes, max_depth=99):
  return max(
    (value(t, p) for t in ordered_trees(num_nodes) if levels(t) <= max_depth),
    default=-np.inf,
  )


def check_shape(shape, acceptance, num_nodes, max_depth=None):
  """A legal tree that is worth what its record says."""
  assert shape.num_nodes == num_nodes
  assert shape.parents[0] == 0 and shape.ranks[0] == 0
  assert all(shape.parents[i] < i for i in range(1, num_nodes))
  for v in range(num_nodes):
    ranks = sorted(shape.ranks[1:][shape.parents[1:] == v])
    assert ranks == list(range(1, len(ranks) + 1))
  if max_depth is not None:
    assert shape.depth <= max_depth
  np.testing.assert_allclose(
    trees.expected_tokens(shape, acceptance),
    shape.expected_tokens,
    rtol=0,
    atol=1e-12 * num_nodes,
  )


def test_published_values():
  p = (0.6, 0.15, 0.07, 0.04, 0.02)
  want = {1: 1.00, 8: 2.64, 16: 3.08, 32: 3.50, 64: 3.89, 128: 4.26}
  want |= {256: 4.59, 512: 4.89, 1024: 5.17}
  shape = trees.sequoia_dp(p, num_nodes=1024)
  got = {n: round(float(shape.expected_by_size[n]), 2) for n in want}
  assert got == want
  check_shape(shape, p, 1024)
  heap = trees.sequoia_heap(p, num_nodes=1024)
  np.testing.assert_allclose(
    heap.expected_by_size, shape.expected_by_size, rtol=0, atol=1e-12
  )


@pytest.mark.parametrize(
  "case", REFERENCE["cases"], ids=lambda c: f"{c['name']}-{c['max_depth']}"
)
def test_reference_cases(case):
  acceptance = REFERENCE["acceptance"][case["name"]][1:]
  limit = case["max_depth"]
  sizes = [int(m) for m in case["best_at_size"]]
  shape = trees.sequoia_dp(acceptance, num_nodes=max(sizes), max_depth=limit)
  check_shape(shape, acceptance, max(sizes), limit)
  for size, (expected, _) in case["best_at_size"].items():
    assert shape.expected_by_size[int(size)] == pytest.approx(
      expected, abs=1e-12
    )
  p = _sequoia._read_acceptance(acceptance)
  if all(np.diff(acceptance) <= 0):
    heap = trees.sequoia_heap(acceptance, num_nodes=max(sizes), max_depth=limit)
    np.testing.assert_allclose(
      heap.expected_by_size, shape.expected_by_size, rtol=0, atol=1e-12
    )
    by_depth = None
  else:
    by_depth = dict(_sequoia._solve_by_depth(p, max(sizes), 10))
  for size, row in case.get("expected_by_size_depth", {}).items():
    for depth, expected in row.items():
      size, depth = int(size), int(depth)
      if by_depth is None:
        got = trees.expected_by_size(
          acceptance, max_nodes=size, max_depth=depth
        )[size]
      elif depth <= 10 and size <= max(sizes):
        got = by_depth[depth].expected[size]
      else:
        continue
      assert got == pytest.approx(expected, abs=1e-12), (size, depth)
  for tree in case["trees"]:
    ours = trees.sequoia_dp(
      acceptance, num_nodes=tree["size"], max_depth=tree["depth_limit"]
    )
    theirs = trees.TreeShape(
      parents=np.maximum(tree["parents"], 0).astype(np.int32),
      ranks=np.array(tree["child_rank"], np.int32),
      expected_by_size=np.zeros(tree["size"] + 1),
    )
    assert trees.expected_tokens(theirs, acceptance) == pytest.approx(
      tree["expected"], abs=1e-12
    )
    assert ours.expected_tokens == pytest.approx(tree["expected"], abs=1e-12)
    check_shape(ours, acceptance, tree["size"], tree["depth_limit"])


@settings
@hypothesis.given(
  p=st.lists(probability, min_size=1, max_size=4),
  depth=st.one_of(st.none(), st.integers(1, 5)),
)
def test_dp_is_the_best_of_all_trees(p, depth):
  got = _sequoia._solve_dp(_sequoia._read_acceptance(p), 7, depth)
  want = [0.0] + [brute([p] * 7, n, depth or 99) for n in range(1, 8)]
  np.testing.assert_allclose(got.expected, want, rtol=0, atol=1e-12)
  for n in range(1, 8):
    if np.isfinite(want[n]):
      check_shape(got.extract(n), p, n, depth)


@settings
@hypothesis.given(data=st.data(), num_levels=st.integers(1, 4))
def test_per_depth_dp_is_the_best_of_all_trees(data, num_levels):
  row = st.lists(probability, min_size=3, max_size=3)
  p = data.draw(st.lists(row, min_size=num_levels, max_size=num_levels))
  depth = data.draw(st.one_of(st.none(), st.integers(1, 5)))
  got = _sequoia._solve_dp(_sequoia._read_acceptance(p), 7, depth)
  want = [0.0] + [brute(p, n, depth or 99) for n in range(1, 8)]
  np.testing.assert_allclose(got.expected, want, rtol=0, atol=1e-12)
  for n in range(1, 8):
    if np.isfinite(want[n]):
      check_shape(got.extract(n), p, n, min(depth or 99, num_levels + 1))


@settings
@hypothesis.given(data=st.data())
def test_heap_equals_dp_wherever_monotone(data):
  row = st.lists(probability, min_size=3, max_size=3).map(
    lambda values: sorted(values, reverse=True)
  )
  p = data.draw(st.one_of(row, st.lists(row, min_size=1, max_size=5)))
  depth = data.draw(st.one_of(st.none(), st.integers(1, 6)))
  law = _sequoia._read_acceptance(p)
  heap = _sequoia._solve_heap(law, 40, depth)
  dp = _sequoia._solve_dp(law, 40, depth)
  np.testing.assert_allclose(heap.expected, dp.expected, rtol=0, atol=1e-12)
  largest = int(np.flatnonzero(np.isfinite(heap.expected))[-1])
  # Every prefix in popping order is itself a best tree.
  for n in (1, largest // 2 or 1, largest):
    check_shape(heap.extract(n), p, n, depth)


def test_a_matrix_of_equal_rows_is_the_vector_under_a_depth_limit():
  p = [0.3, 0.5, 0.1]
  np.testing.assert_allclose(
    trees.expected_by_size([p] * 4, max_nodes=30),
    trees.expected_by_size(p, max_nodes=30, max_depth=5),
    rtol=0,
    atol=1e-12,
  )


def test_child_counts_of_a_drawn_tree():
  #      0
  #    1   2        rows 3, 4 below 2; row 5 (rank 2) and 6 (rank 1) below 1
  shape = trees.TreeShape(
    parents=np.array([0, 0, 0, 2, 2, 1, 1, 5], np.int32),
    ranks=np.array([0, 1, 2, 1, 2, 2, 1, 1], np.int32),
    expected_by_size=np.zeros(9),
  )
  assert shape.levels().tolist() == [1, 2, 2, 3, 3, 3, 3, 4]
  assert shape.child_counts() == ((2,), (2, 2), (0, 1, 0, 0), (0,))
  assert shape.depth == 4
  # 1 + .5 + .2 + .2(.5 + .2) + .5(.2 + .5) + .5·.2·.5
  assert trees.expected_tokens(shape, [0.5, 0.2]) == pytest.approx(2.24)


@settings
@hypothesis.given(
  p=st.lists(probability, min_size=1, max_size=3),
  laps=st.lists(st.floats(0.01, 10), min_size=7, max_size=7),
  level_s=st.sampled_from([0.0, 0.1, 1.0]),
  max_depth=st.one_of(st.none(), st.integers(1, 4)),
  per_depth=st.booleans(),
)
def test_plan_is_the_best_of_all_trees(p, laps, level_s, max_depth, per_depth):
  acceptance = [p] * 3 if per_depth else p
  plan = trees.sequoia(
    acceptance,
    lambda n: laps[n - 1],
    max_nodes=7,
    max_depth=max_depth,
    level_s=level_s,
  )
  want = max(
    value(t, [p] * (3 if per_depth else 7))
    / (laps[n - 1] + level_s * (levels(t) - 1))
    for n in range(1, 8)
    for t in ordered_trees(n)
    if levels(t) <= (max_depth or 99)
  )
  assert plan.tokens_per_s == pytest.approx(want, rel=1e-12)
  assert plan.tokens_per_s == plan.expected_tokens / plan.lap_s
  check_shape(plan.shape, acceptance, plan.shape.num_nodes, max_depth)
  assert plan.lap_s == pytest.approx(
    laps[plan.shape.num_nodes - 1] + level_s * (plan.shape.depth - 1)
  )


def test_dearer_rows_give_smaller_trees_and_a_long_lap_larger_ones():
  def size(delay_s, row_s):
    plan = trees.sequoia(
      (0.6, 0.15, 0.07, 0.04, 0.02),
      lambda n: delay_s + row_s * n,
      max_nodes=512,
    )
    return plan.shape.num_nodes

  assert size(0.2, 1e-4) > size(0.2, 1e-3) > size(0.2, 1e-1) >= 1
  assert size(0.02, 1e-3) < size(0.2, 1e-3) < size(2.0, 1e-3)
  assert size(0.0, 1.0) == 1


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (lambda: trees.sequoia_heap([0.1, 0.2], num_nodes=3), "sequoia_dp"),
    (lambda: trees.sequoia_dp([0.5, 1.5], num_nodes=3), r"\[0, 1\]"),
    (lambda: trees.sequoia_dp([np.nan], num_nodes=3), r"\[0, 1\]"),
    (lambda: trees.sequoia_dp([], num_nodes=3), "not empty"),
    (lambda: trees.sequoia_dp([0.5], num_nodes=0), "nodes = 0"),
    (lambda: trees.sequoia_dp([0.5], num_nodes=3, max_depth=0), "max_depth"),
    (
      lambda: trees.sequoia_dp([0.5], num_nodes=4, max_depth=3),
      "largest size is 3",
    ),
    (
      lambda: trees.sequoia_heap([[0.5], [0.4]], num_nodes=4),
      "largest size is 3",
    ),
    (
      lambda: trees.expected_tokens(
        trees.sequoia_dp([0.5], num_nodes=4), [[0.5]]
      ),
      "level 3",
    ),
    (
      lambda: trees.sequoia([0.5], lambda n: n - 2.0, max_nodes=4),
      r"lap_time\(1\)",
    ),
    (
      lambda: trees.sequoia([0.5], lambda n: 1.0, max_nodes=4, level_s=-1),
      "level_s",
    ),
  ],
)
def test_refusals(call, words):
  with pytest.raises(ValueError, match=words):
    call()
