# SPDX-License-Identifier: Apache-2.0
"""The synthetic drafter: dialled against measured acceptance."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from wanspec_jax.base import Anchor

ROOT = Anchor(0)


def _children(nodes, row):
  """Returns `{token: rank}` of the children of a row."""
  kept = np.flatnonzero(nodes.parents == row)
  # Marginals fall with rank in these tests, so best first is rank order.
  return {int(t): r for r, t in enumerate(nodes.tokens[kept])}


def _binomial_slack(p, n):
  """Five standard deviations: a chance below 1e-6 of a false alarm."""
  return 5 * math.sqrt(p * (1 - p) / n) + 1e-12


def test_acceptance_by_rank_is_what_was_dialled():
  n, row = 20_000, (0.6, 0.2, 0.05)
  output = [i * i % 50 for i in range(n)]
  drafter = drafters.synthetic(
    output, acceptance=row, vocab_size=50, max_depth=1, seed=1
  )
  state = drafter.init(None, [0], 0)
  hits = np.zeros(3)
  for token in output:
    nodes = drafter.expand(state, [ROOT], 3)[1]
    rank = _children(nodes, 0).get(token)
    if rank is not None:
      hits[rank] += 1
    state = drafter.observe(state, [token])
  for p, got in zip(row, hits / n, strict=True):
    assert abs(got - p) < _binomial_slack(p, n)


def test_acceptance_by_depth_and_position_is_what_was_dialled():
  n = 12_000
  # Depth 1, 2, 3; the first half of the text is easy, the second hard.
  easy = [[0.9, 0.1], [0.7, 0.2], [0.5, 0.3]]
  hard = [[0.3, 0.1], [0.2, 0.1], [0.1, 0.05]]
  output = [i % 31 for i in range(n)]
  drafter = drafters.synthetic(
    output,
    acceptance=np.array([easy] * (n // 2) + [hard] * (n // 2)),
    vocab_size=31,
    max_depth=1,
  )
  state = drafter.init(None, [0], 0)
  tested = np.zeros((2, 3))
  found = np.zeros((2, 3, 2))
  for start in range(0, n - 3, 3):
    # The true path of every depth, whether or not the tree holds it: anchors.
    anchors = [Anchor(d, tuple(output[start : start + d])) for d in range(3)]
    nodes = drafter.expand(state, anchors, 6)[1]
    for depth in range(3):
      half = int(start + depth >= n // 2)
      tested[half, depth] += 1
      rank = _children(nodes, depth).get(output[start + depth])
      if rank is not None:
        found[half, depth, rank] += 1
    state = drafter.observe(state, output[start : start + 3])
  for half, depth, rank in itertools.product(range(2), range(3), range(2)):
    p = (easy, hard)[half][depth][rank]
    got = found[half, depth, rank] / tested[half, depth]
    slack = _binomial_slack(p, tested[half, depth])
    assert abs(got - p) < slack, (half, depth, rank)


def test_replay_accepts_what_log_q_promises():
  rng = np.random.default_rng(0)
  output = rng.integers(0, 100, 20_000).tolist()
  drafter = drafters.synthetic(
    output, acceptance=[[0.6, 0.15], [0.5, 0.1]], vocab_size=100
  )
  rounds = drafters.replay(drafter, [0], output, budget=12)
  accepted = sum(r.accepted for r in rounds)
  # `accepted − expected` has mean zero in each round; the bound is five
  # standard deviations of the sum.
  spread = np.std([r.accepted - r.expected for r in rounds])
  assert abs(accepted - sum(r.expected for r in rounds)) < (
    5 * spread * math.sqrt(len(rounds))
  )
  assert 1.5 < sum(r.emitted for r in rounds) / len(rounds) < 3.0


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
  output=st.lists(st.integers(0, 4), min_size=8, max_size=20),
  seed=st.integers(0, 2**40),
  done=st.integers(0, 3),
  depth=st.integers(0, 4),
)
def test_children_depend_on_the_position_only(output, seed, done, depth):
  drafter = drafters.synthetic(
    output, acceptance=[0.4, 0.2, 0.1], vocab_size=5, seed=seed
  )
  position = done + depth
  near = drafter.init(None, [0], 0)
  for token in output[:position]:
    near = drafter.observe(near, [token])
  far = drafter.observe(drafter.init(None, [7, 7], 9), output[:done])
  far = drafter.rebase(far, Anchor(3, tuple(output[:done])))
  anchor = Anchor(4, tuple(output[done:position]))
  first = drafter.expand(near, [ROOT], 3)[1]
  again = drafter.expand(near, [ROOT], 3)[1]
  other = drafter.expand(far, [anchor], 3)[1]
  for nodes in (again, other):
    assert [x.tolist() for x in nodes] == [x.tolist() for x in first]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
  output=st.lists(st.integers(0, 5), min_size=4, max_size=12),
  budget=st.integers(0, 30),
  wrong=st.integers(0, 5),
)
def test_trees_are_well_formed_and_strays_get_distractors(
  output, budget, wrong
):
  drafter = drafters.synthetic(
    output, acceptance=[0.5, 0.25, 0.2], vocab_size=6, max_depth=3
  )
  state = drafter.init(None, [0], 0)
  anchors = [ROOT, Anchor(1, (output[0],)), Anchor(2, (wrong, output[1]))]
  nodes = drafter.expand(state, anchors, budget)[1]
  drafters.check_nodes(nodes, 3, budget)
  assert len(nodes.tokens) == budget
  if wrong != output[0]:
    assert output[2] not in _children(nodes, 2)


def test_tree_grows_best_first():
  row = (0.6, 0.15, 0.07)
  drafter = drafters.synthetic([1] * 40, acceptance=row, vocab_size=9)
  state = drafter.init(None, [0], 0)
  nodes = drafter.expand(state, [ROOT], 20)[1]
  got = np.exp(drafters.cumulative_log_q(nodes, 1))
  paths = itertools.chain.from_iterable(
    itertools.product(row, repeat=d) for d in range(1, 8)
  )
  want = sorted((math.prod(p) for p in paths), reverse=True)[:20]
  np.testing.assert_allclose(got, want, rtol=1e-6)
  np.testing.assert_array_equal(
    np.isin(nodes.log_q, np.log(np.array(row)).astype(np.float32)), True
  )


def test_callable_acceptance_and_depth_limit():
  asked = []

  def acceptance(position, depth):
    asked.append((position, depth))
    return [1.0] if position != 2 else []

  drafter = drafters.synthetic(
    [5, 6, 7, 8, 9], acceptance=acceptance, vocab_size=10, max_depth=4
  )
  state = drafter.init(None, [0], 0)
  nodes = drafter.expand(state, [ROOT], 9)[1]
  assert nodes.tokens.tolist() == [5, 6]
  assert asked == [(0, 1), (1, 2), (2, 3)]
  rounds = drafters.replay(drafter, [0], [5, 6, 7, 8, 9], budget=9)
  assert [r.emitted for r in rounds] == [3, 2]


def test_text_that_left_the_recording_gets_distractors():
  drafter = drafters.synthetic([5, 6, 7], acceptance=1.0, vocab_size=10)
  state = drafter.observe(drafter.init(None, [0], 0), [4])
  nodes = drafter.expand(state, [ROOT], 2)[1]
  assert nodes.tokens[0] != 6
  assert nodes.tokens[1] != 7


def test_seeds_differ():
  output = [1] * 64
  drafts = []
  for seed in (0, 1):
    drafter = drafters.synthetic(
      output, acceptance=0.5, vocab_size=1000, seed=seed
    )
    rounds = drafters.replay(drafter, [0], output)
    drafts.append([r.emitted for r in rounds])
  assert drafts[0] != drafts[1]


@pytest.mark.parametrize(
  ("options", "message"),
  [
    ({"acceptance": 1.2}, r"must lie in \[0, 1\]"),
    ({"acceptance": [0.7, 0.4]}, "sum to at most 1"),
    ({"acceptance": float("nan")}, r"must lie in \[0, 1\]"),
    ({"acceptance": []}, "not empty"),
    ({"acceptance": np.zeros((1, 1, 1, 1))}, "must be a number"),
    ({"vocab_size": 1}, "vocab_size = 1"),
    ({"vocab_size": 3}, r"output\[1\] = 3"),
    ({"max_depth": 0}, "max_depth = 0"),
  ],
)
def test_bad_options_are_named(options, message):
  good = {"acceptance": 0.5, "vocab_size": 9}
  with pytest.raises(ValueError, match=message):
    drafters.synthetic([1, 3], **(good | options))


def test_bad_callables_are_named_when_called():
  drafter = drafters.synthetic(
    [1, 2], acceptance=lambda position, depth: [2.0], vocab_size=9
  )
  with pytest.raises(ValueError, match=r"acceptance\(0, 1\)"):
    drafter.expand(drafter.init(None, [0], 0), [ROOT], 1)
  wide = drafters.synthetic([1], acceptance=[0.1] * 4, vocab_size=4)
  with pytest.raises(ValueError, match="fewer than vocab_size"):
    wide.expand(wide.init(None, [0], 0), [ROOT], 1)
