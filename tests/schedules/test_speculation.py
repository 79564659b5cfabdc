# SPDX-License-Identifier: Apache-2.0
"""The coordinator's tree against sets of token paths."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules import bench
from wanspec_jax.base import Anchor
from wanspec_jax.schedules._speculation import (
  add_child,
  add_nodes,
  commit_tokens,
  start,
)

SETTINGS = settings(derandomize=True, deadline=None, max_examples=150)


def _paths(spec):
  """Returns {token path from the start of the text: node}, oracle's view."""
  text = tuple(spec.tokens)
  return {text + spec.path(i): node for i, node in spec.nodes.items()}


@SETTINGS
@given(st.randoms(use_true_random=False))
def test_random_trees_and_commits(random):
  """Alive is what extends the text; dead and launched is held."""
  spec = start(7, (5, 6), 100)
  spec.nodes[spec.root].run = 0
  alive = {(5, 6): 0}  # the oracle: path -> run that launched it, or None
  held = 0  # launched, dead, not freed yet
  for run in range(1, random.randint(2, 7)):
    # A draft below a few nodes, some of which are long gone.
    paths = _paths(spec)
    picks = random.sample(sorted(paths), min(len(paths), 2))
    anchors = tuple(spec.anchor(paths[p].id) for p in picks)
    stranger = random.random() < 0.3
    if stranger:
      anchors = (*anchors, Anchor(id=10**6, path=(1, 2)))
    tokens, parents, rows = [], [], [*picks] + [None] * stranger
    for _ in range(random.randint(0, 6)):
      parents.append(random.randrange(len(rows)))
      tokens.append(random.randrange(3))
      above = rows[parents[-1]]
      rows.append(None if above is None else (*above, tokens[-1]))
    expected = [p for p in rows[len(anchors) :] if p is not None]
    nodes = bench.nodes_of(tokens, parents)
    assert add_nodes(spec, anchors, nodes) == len(expected)
    for path in expected:
      alive.setdefault(path, None)
    paths = _paths(spec)
    assert set(paths) == set(alive)
    assert len(paths) == len(spec.nodes), "(parent, token) is a node's name"
    # Launch some of them, parents first.
    for path in sorted(alive, key=len):
      above = alive.get(path[:-1])
      if alive[path] is None and above is not None and random.random() < 0.6:
        alive[path] = paths[path].run = run
        spec.num_launched += 1
    # The tail's verdict: found nodes were launched; the last is free.
    new = []
    text = tuple(spec.tokens)
    while random.random() < 0.7:
      children = [
        p[-1]
        for p, launched in alive.items()
        if p[:-1] == (*text, *new) and launched is not None
      ]
      if not children:
        break
      new.append(random.choice(sorted(children)))
    new.append(random.randrange(4))
    ids_before = {p: node.id for p, node in paths.items()}
    path, dead_nodes = commit_tokens(spec, tuple(new))
    text = (*text, *new)
    dead = [p for p in alive if p != text[: len(p)] and p[: len(text)] != text]
    held += sum(alive[p] is not None for p in dead)
    assert len(dead_nodes) == sum(alive[p] is not None for p in dead)
    alive = {p: r for p, r in alive.items() if p[: len(text)] == text}
    alive.setdefault(text, None)
    assert tuple(spec.tokens) == text and spec.path(spec.root) == ()
    assert [node.token for node in path] == new
    assert path[-1] is spec.nodes[spec.root]
    assert spec.commit_due and spec.dead_held == held
    paths = _paths(spec)
    assert {p: node.run for p, node in paths.items()} == alive
    for p, node in paths.items():
      assert ids_before.get(p, node.id) == node.id, "ids stay"
    assert spec.num_launched == sum(
      r is not None for p, r in alive.items() if p != text
    )
    assert {(n.id) for n in spec.unlaunched()} == {
      paths[p].id for p, r in alive.items() if r is None and p != text
    }
    assert set(spec.children.values()) == set(spec.nodes) - {spec.root}
    if not spec.root_launched:  # the next run carries root and commit
      spec.nodes[spec.root].run = alive[text] = run + 1
    if random.random() < 0.6:
      held = spec.dead_held = 0


def test_duplicates_are_one_node():
  spec = start(0, (1,), 9)
  root = Anchor(spec.root)
  taken = add_nodes(
    spec, (root,), bench.nodes_of([4, 4, 5, 5], [0, 0, 1, 2], [-1, -2, -1, -3])
  )
  assert taken == 4 and len(spec.nodes) == 3
  four = spec.nodes[spec.descend((4,))]
  five = spec.nodes[spec.descend((4, 5))]
  assert (four.log_p, five.log_p) == (-2.0, -3.0)  # the newer estimate
  four.run = 3
  assert add_child(spec, spec.root, 4, -9.0) is four
  assert four.log_p == -2.0  # launched: nothing to decide any more


def test_probability_is_that_of_the_path():
  spec = start(0, (1,), 9)
  add_nodes(
    spec,
    (Anchor(spec.root),),
    bench.nodes_of([2, 3, 4], [0, 1, 2], np.log([0.5, 0.25, 0.5])),
  )
  at = spec.descend((2, 3, 4))
  assert spec.depth(at) == 3
  assert spec.probability(at) == pytest.approx(1 / 16)
  commit_tokens(spec, (2,))
  assert spec.probability(at) == pytest.approx(1 / 8)


def test_a_parent_row_ahead_is_refused_by_name():
  spec = start(0, (1,), 9)
  with pytest.raises(ValueError, match="node 1 has parent row 2"):
    add_nodes(spec, (Anchor(spec.root),), bench.nodes_of([2, 3], [0, 2]))
  with pytest.raises(ValueError, match="parent row -1"):
    add_nodes(spec, (Anchor(spec.root),), bench.nodes_of([2], [-1]))


@pytest.mark.parametrize("log_q", [1e-6, 3.0, float("inf")])
def test_a_log_probability_above_zero_cannot_outrank_its_parent(log_q):
  """Rounding gives such values; a child must not come before its parent."""
  spec = start(0, (1,), 9)
  add_nodes(
    spec, (Anchor(spec.root),), bench.nodes_of([2, 3], [0, 1], [-1.0, log_q])
  )
  parent, child = spec.descend((2,)), spec.descend((2, 3))
  assert spec.probability(child) <= spec.probability(parent) <= 1.0


def test_a_log_probability_that_is_no_number_is_refused():
  spec = start(0, (1,), 9)
  with pytest.raises(ValueError, match=r"drafter: .*log_q.*nan"):
    add_nodes(
      spec, (Anchor(spec.root),), bench.nodes_of([2], [0], [float("nan")])
    )


def test_a_newer_draft_displaces_what_it_no_longer_names():
  """What an older draft held likely gets what the newer one leaves."""
  spec = start(0, (5,), 100)
  anchors = (spec.anchor(spec.root),)
  add_nodes(spec, anchors, bench.nodes_of([1, 2], [0, 0], np.log([0.8, 0.1])))
  one, two = (spec.children[spec.root, token] for token in (1, 2))
  below = add_child(spec, one, 4, math.log(0.5))
  add_nodes(spec, anchors, bench.nodes_of([3, 2], [0, 0], np.log([0.7, 0.2])))
  three = spec.children[spec.root, 3]
  chances = [spec.probability(i) for i in (three, two, one, below.id)]
  np.testing.assert_allclose(chances, [0.7, 0.2, 0.1, 0.05], atol=1e-6)
  assert spec.launchable() == [three, two, one, below.id]
