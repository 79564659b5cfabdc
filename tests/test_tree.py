# SPDX-License-Identifier: Apache-2.0
"""Draft trees against a drawn tree and slow Python walks."""

import dataclasses

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanspec_jax import _tree

N, M = 10, 7  # capacities of the trees in the property tests
settings = hypothesis.settings(derandomize=True, deadline=None, max_examples=60)
# One compilation per operation serves all examples of a property.
depths = jax.jit(_tree.depths)
ancestor_mask = jax.jit(_tree.ancestor_mask)
cumulative_log_q = jax.jit(_tree.cumulative_log_q)
path = jax.jit(_tree.path)
reroot = jax.jit(_tree.reroot)
prune = jax.jit(_tree.prune)
truncate = jax.jit(_tree.truncate)
merge = jax.jit(_tree.merge)
accepted_path = jax.jit(_tree.accepted_path)


@st.composite
def node_lists(draw, max_size=N):
  """Token, parent and log q lists of a tree without twin siblings."""
  attempts = draw(st.integers(0, 2 * max_size))  # enough to fill it often
  tokens, parents, log_q, seen = [0], [0], [0.0], set()
  for _ in range(attempts):
    if len(tokens) == max_size:
      break
    parent = draw(st.integers(0, len(tokens) - 1))
    token = draw(st.integers(0, 2))
    if (parent, token) not in seen:
      seen.add((parent, token))
      tokens.append(token)
      parents.append(parent)
      # Quarters sum exactly, and their few values make ties common.
      log_q.append(-draw(st.integers(0, 4)) / 4)
  return tokens, parents, log_q


def build(nodes, capacity=N):
  return _tree.from_nodes(*nodes, capacity=capacity)


def walk(parents, row):
  """Rows from the root to `row`, by following parents."""
  rows = [row]
  while rows[-1] != 0:
    rows.append(parents[rows[-1]])
  return rows[::-1]


def as_lists(tree):
  n = int(tree.num_nodes)
  for field in ("tokens", "parents", "log_q"):
    padding = np.asarray(getattr(tree, field))[n:]
    assert not padding.any(), f"{field} has padding {padding}"
  return tuple(
    np.asarray(values)[:n].tolist()
    for values in (tree.tokens, tree.parents, tree.log_q)
  )


def by_path(nodes):
  """Log q of each node, named by its tokens below the root."""
  tokens, parents, log_q = nodes
  return {
    tuple(tokens[r] for r in walk(parents, i)[1:]): log_q[i]
    for i in range(len(tokens))
  }


def compact(nodes, keep):
  """Lists of the rows in `keep`, whose first becomes the root."""
  tokens, parents, log_q = nodes
  keep = sorted(keep)
  new = {old: i for i, old in enumerate(keep)}
  return (
    [tokens[i] for i in keep],
    [0] + [new[parents[i]] for i in keep[1:]],
    [0.0] + [log_q[i] for i in keep[1:]],
  )


def check_remapped(got, nodes, keep):
  assert as_lists(got.tree) == compact(nodes, keep)
  assert np.flatnonzero(got.kept_mask).tolist() == sorted(keep)
  for new, old in enumerate(sorted(keep)):
    assert got.new_of_old[old] == new
  dropped = np.asarray(got.new_of_old)[~np.asarray(got.kept_mask)]
  assert not dropped.any()


#        0 (token 9)
#       /|
#  1:5   2:6          log q  −0.5   −1
#  |     | \
#  3:7   4:5 5:8      log q  −2     −0.25  −3
#        |
#        6:7          log q  −0.125
DRAWN = (
  [9, 5, 6, 7, 5, 8, 7],
  [0, 0, 0, 1, 2, 2, 4],
  [0.0, -0.5, -1.0, -2.0, -0.25, -3.0, -0.125],
)


def test_drawn_tree():
  tree = build(DRAWN)
  assert tree.capacity == N
  assert _tree.node_mask(tree).tolist() == [True] * 7 + [False] * 3
  assert depths(tree).tolist() == [0, 1, 1, 2, 2, 2, 3, 0, 0, 0]
  assert cumulative_log_q(tree).tolist() == [
    0.0, -0.5, -1.0, -2.5, -1.25, -4.0, -1.375, 0.0, 0.0, 0.0,
  ]  # fmt: skip
  want = np.zeros((N, N), bool)
  for row, seen in enumerate(
    [[0], [0, 1], [0, 2], [0, 1, 3], [0, 2, 4], [0, 2, 5], [0, 2, 4, 6]]
  ):
    want[row, seen] = True
  np.testing.assert_array_equal(ancestor_mask(tree), want)

  walked = path(tree, 6)
  assert walked.rows.tolist() == [0, 2, 4, 6, 0, 0, 0, 0, 0, 0]
  assert walked.length == 4

  below = reroot(tree, 2)
  assert as_lists(below.tree) == (
    [6, 5, 8, 7], [0, 0, 0, 1], [0.0, -0.25, -3.0, -0.125],
  )  # fmt: skip
  assert below.new_of_old.tolist() == [0, 0, 0, 0, 1, 2, 3, 0, 0, 0]

  pruned = prune(tree, jnp.arange(N, dtype=jnp.int32) != 4)
  assert as_lists(pruned.tree)[0] == [9, 5, 6, 7, 8]

  # Best first: 0, 1 (−.5), 2 (−1), 4 (−1.25), 6 (−1.375), 3, 5.
  assert as_lists(truncate(tree, 5).tree)[0] == [9, 5, 6, 5, 7]

  # The target says 6 after the root, 5 after row 2, 1 after row 4; what it
  # says on the other branch does not matter.
  taken = accepted_path(tree, jnp.array([6, 7, 5, 7, 1, 2, 3, 4, 0, 0]))
  assert taken.rows.tolist() == [0, 2, 4, 0, 0, 0, 0, 0, 0, 0]
  assert taken.length == 3

  other = build(([9, 6, 5, 1], [0, 0, 1, 2], [0.0, -1, -1, -1]), capacity=M)
  merged = merge(tree, other)
  assert merged.row_of_b.tolist() == [0, 2, 4, 7, 0, 0, 0]
  assert not merged.overflowed
  assert merged.tree.tokens.tolist() == [9, 5, 6, 7, 5, 8, 7, 1, 0, 0]
  assert merged.tree.parents.tolist() == [0, 0, 0, 1, 2, 2, 4, 4, 0, 0]


@settings
@hypothesis.given(node_lists())
def test_masks_depths_scores_and_paths(nodes):
  tokens, parents, log_q = nodes
  tree = build(nodes)
  mask = np.zeros((N, N), bool)
  depth, score = np.zeros(N, np.int32), np.zeros(N, np.float32)
  for i in range(len(tokens)):
    rows = walk(parents, i)
    mask[i, rows] = True
    depth[i] = len(rows) - 1
    score[i] = sum(log_q[r] for r in rows)
    got = path(tree, i)
    assert got.rows.tolist() == rows + [0] * (N - len(rows))
    assert got.length == len(rows)
  np.testing.assert_array_equal(ancestor_mask(tree), mask)
  np.testing.assert_array_equal(depths(tree), depth)
  np.testing.assert_array_equal(cumulative_log_q(tree), score)
  assert as_lists(tree) == nodes


@settings
@hypothesis.given(node_lists(), st.data())
def test_reroot(nodes, data):
  parents = nodes[1]
  row = data.draw(st.integers(0, len(parents) - 1))
  keep = [i for i in range(len(parents)) if row in walk(parents, i)]
  check_remapped(reroot(build(nodes), row), nodes, keep)


@settings
@hypothesis.given(node_lists(), st.lists(st.booleans(), min_size=N, max_size=N))
def test_prune(nodes, wanted):
  parents = nodes[1]
  keep = [
    i
    for i in range(len(parents))
    if all(wanted[r] for r in walk(parents, i) if r)
  ]
  check_remapped(prune(build(nodes), jnp.array(wanted)), nodes, keep)


@settings
@hypothesis.given(node_lists(), st.integers(0, N + 2))
def test_truncate(nodes, num_rows):
  parents, log_q = nodes[1:]
  order = sorted(
    range(len(parents)),
    key=lambda i: (-sum(log_q[r] for r in walk(parents, i)), i),
  )
  keep = order[: max(num_rows, 1)]
  assert all(parents[i] in keep for i in keep)
  check_remapped(truncate(build(nodes), num_rows), nodes, keep)


def test_truncate_is_closed_under_rounding_and_zero_probability():
  n = 64
  parents = list(range(n - 1))
  # A chain whose steps are lost in rounding, then impossible nodes.
  steps = [-1e3] + [-1e-6] * (n - 8) + [-np.inf] * 6
  tree = _tree.from_nodes([1] * n, [0, *parents], [0.0, *steps], capacity=n)
  for num_rows in (2, 30, 60, n):
    got = truncate(tree, num_rows)
    assert np.flatnonzero(got.kept_mask).tolist() == list(range(num_rows))
    assert got.tree.parents[:num_rows].tolist() == [0, *range(num_rows - 1)]


@settings
@hypothesis.given(node_lists(), node_lists(M))
def test_merge(a, b):
  got = merge(build(a), build(b, M))
  want, room = dict(by_path(a)), N - len(a[0])
  placed, overflowed = [], False
  for i, name in enumerate(by_path(b)):
    if name not in want and room and name[:-1] in want:
      want[name] = b[2][i]
      room -= 1
    elif name not in want and name[:-1] in want:
      overflowed = True
    placed.append(name in want)
  merged = as_lists(got.tree)
  assert by_path(merged) == want
  assert bool(got.overflowed) == overflowed
  assert got.placed_mask.tolist() == placed + [False] * (M - len(placed))
  names = list(by_path(merged))
  for i, name in enumerate(by_path(b)):
    assert got.row_of_b[i] == (names.index(name) if placed[i] else 0)
  n = len(a[0])
  assert tuple(values[:n] for values in merged) == a
  assert all(p < i for i, p in enumerate(merged[1]) if i)


def test_what_a_full_tree_has_already_does_not_overflow_it():
  chain = (list(range(N)), [0, *range(N - 1)], [0.0] + [-0.5] * (N - 1))
  got = merge(build(chain), build([values[:M] for values in chain], M))
  assert not got.overflowed and got.placed_mask.all()
  assert got.row_of_b.tolist() == list(range(M))


def test_merge_needs_the_same_root():
  a = build(([1, 2], [0, 0], [0.0, -1.0]))
  b = build(([3, 4], [0, 0], [0.0, -1.0]), M)
  got = merge(a, b)
  assert as_lists(got.tree) == as_lists(a)
  assert not got.placed_mask.any() and not got.overflowed


@settings
@hypothesis.given(
  node_lists(), st.lists(st.integers(0, 2), min_size=N, max_size=N)
)
def test_accepted_path(nodes, target):
  tokens, parents, _ = nodes
  rows = [0]
  while True:
    children = [
      i
      for i in range(1, len(tokens))
      if parents[i] == rows[-1] and tokens[i] == target[rows[-1]]
    ]
    if not children:
      break
    rows.append(children[0])
  got = accepted_path(build(nodes), jnp.array(target, jnp.int32))
  assert got.length == len(rows)
  assert got.rows.tolist() == rows + [0] * (N - len(rows))


def test_padding_is_never_accepted_even_if_the_target_says_token_zero():
  tree = build(([0], [0], [0.0]))
  assert accepted_path(tree, jnp.zeros((N,), jnp.int32)).length == 1


@pytest.mark.parametrize("row", [7, 99, -1])
def test_rows_that_are_not_real(row):
  tree = build(DRAWN)
  got = path(tree, row)
  assert got.length == 0 and not got.rows.any()
  assert reroot(tree, row).tree.num_nodes == 0


def test_one_row_of_capacity_one():
  tree = _tree.from_nodes([4], [0], [0.0], capacity=1)
  assert depths(tree).tolist() == [0]
  assert as_lists(reroot(tree, 0).tree) == ([4], [0], [0.0])
  other = _tree.from_nodes([4, 5], [0, 0], [0.0, -1.0], capacity=2)
  assert merge(tree, other).overflowed


def everything(a, b, row, keep_mask, target, num_rows):
  """Every operation once, as one program."""
  return {
    "mask": _tree.ancestor_mask(a),
    "depths": _tree.depths(a),
    "score": _tree.cumulative_log_q(a),
    "path": _tree.path(a, row),
    "reroot": _tree.reroot(a, row),
    "prune": _tree.prune(a, keep_mask),
    "truncate": _tree.truncate(a, num_rows),
    "merge": _tree.merge(a, b),
    "accepted": _tree.accepted_path(a, target),
  }


def everything_inputs():
  chain = (list(range(9)), [0, *range(8)], [0.0] + [-0.5] * 8)
  star = (list(range(9)), [0] * 9, [0.0] + [-0.5] * 8)
  return [
    (
      build(nodes),
      build(star),
      jnp.int32(row),
      jnp.arange(N, dtype=jnp.int32) != row + 1,
      jnp.full((N,), row, jnp.int32),
      jnp.int32(num_rows),
    )
    for nodes, row, num_rows in ((DRAWN, 2, 3), (chain, 8, 1), (star, 0, 9))
  ]


def test_batches_agree_with_single_trees_and_nothing_recompiles():
  single = jax.jit(chex.assert_max_traces(everything, n=1))
  inputs = everything_inputs()
  batch = jax.tree.map(lambda *leaves: jnp.stack(leaves), *inputs)
  got = jax.jit(jax.vmap(everything))(*batch)
  for i, arguments in enumerate(inputs):
    chex.assert_trees_all_equal(
      jax.tree.map(lambda leaf, i=i: leaf[i], got), single(*arguments)
    )


def test_types_do_not_depend_on_64_bit_mode():
  with jax.enable_x64(True):
    outputs = jax.eval_shape(everything, *everything_inputs()[0])
    kinds = {leaf.dtype.name for leaf in jax.tree.leaves(outputs)}
  assert kinds == {"bool", "int32", "float32"}


def test_wrong_shapes_are_refused_when_traced():
  tree = build(DRAWN)
  short = dataclasses.replace(tree, parents=tree.parents[:-1])
  with pytest.raises(AssertionError):
    jax.eval_shape(_tree.ancestor_mask, short)
  with pytest.raises(AssertionError):
    jax.eval_shape(_tree.accepted_path, tree, tree.tokens[:-1])
  with pytest.raises(AssertionError):
    jax.eval_shape(_tree.prune, tree, tree.tokens)  # not a mask
  batch = jax.tree.map(lambda leaf: leaf[None], tree)
  with pytest.raises(AssertionError):
    jax.eval_shape(_tree.depths, batch)


@pytest.mark.parametrize(
  ("nodes", "words"),
  [
    (([], [], []), "0 rows"),
    ((list(range(11)), [0] * 11, [0.0] * 11), "11 rows"),
    (([1, 2], [0], [0.0, 0.0]), "parents has shape"),
    (([1, 2], [0, 0], [0.0]), "log_q has shape"),
    (([1, 2], [1, 0], [0.0, 0.0]), r"parents\[0\]"),
    (([1, 2, 3], [0, 2, 0], [0.0] * 3), r"parents\[1\] = 2"),
    (([1, 2], [0, -1], [0.0, 0.0]), r"parents\[1\] = -1"),
    (([1, -2], [0, 0], [0.0, 0.0]), r"tokens\[1\]"),
    (([1, 2**31], [0, 0], [0.0, 0.0]), r"tokens\[1\]"),
    (([1, 2], [0, 0], [-1.0, 0.0]), r"log_q\[0\]"),
    (([1, 2], [0, 0], [0.0, 0.5]), r"log_q\[1\]"),
    (([1, 2], [0, 0], [0.0, np.nan]), r"log_q\[1\]"),
    (([1.5, 2], [0, 0], [0.0, 0.0]), "integers"),
    (([1, 2, 3, 2], [0, 0, 0, 0], [0.0] * 4), "rows 1 and 3"),
  ],
)
def test_invalid_nodes_are_refused_by_name(nodes, words):
  with pytest.raises(ValueError, match=words):
    build(nodes)
