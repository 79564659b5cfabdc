# SPDX-License-Identifier: Apache-2.0
"""The suffix drafter against brute force, and its promises."""

import math
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from drafters._suffix import _WEIGHTS
from tests.drafters._scan import blend, scan
from wanspec_jax.base import Anchor

_settings = settings(derandomize=True, deadline=None, max_examples=120)
_text = st.lists(st.integers(0, 3), min_size=1, max_size=30)
_path = st.lists(st.integers(0, 4), max_size=4)
ROOT = Anchor(0)


def _expand(drafter, text, anchors=(ROOT,), budget=64):
  state = drafter.init(None, text, 0)
  nodes = drafter.expand(state, list(anchors), budget)[1]
  drafters.check_nodes(nodes, len(anchors), budget)
  return nodes


def _lists(nodes):
  return [x.tolist() for x in nodes]


@_settings
@given(text=_text, path=_path, max_depth=st.integers(1, 6))
def test_children_have_the_documented_probabilities(text, path, max_depth):
  drafter = drafters.suffix(max_depth=max_depth, min_prob=1e-30, max_length=1)
  nodes = _expand(drafter, text, [Anchor(5, tuple(path))])
  want = blend(text, text + path, max_depth=max_depth, weights=_WEIGHTS)
  assert set(nodes.tokens.tolist()) == set(want)
  np.testing.assert_allclose(
    np.exp(nodes.log_q), [want[t] for t in nodes.tokens.tolist()], rtol=1e-5
  )
  assert sum(want.values()) < 1
  assert np.all(np.diff(nodes.log_q) <= 0)


def _best_first(text, *, budget, max_depth):
  """Enumerates the `budget` likeliest paths by brute force."""
  found, frontier = [], {(): 1.0}
  while frontier and len(found) < budget:
    path = max(frontier, key=lambda p: frontier[p])
    reach = frontier.pop(path)
    if path:
      found.append(reach)
    prob = blend(text, text + list(path), max_depth=max_depth, weights=_WEIGHTS)
    frontier |= {(*path, t): reach * p for t, p in prob.items()}
  return found


@settings(derandomize=True, deadline=None, max_examples=40)
@given(text=_text, budget=st.integers(1, 20), max_depth=st.integers(1, 5))
def test_tree_holds_the_likeliest_paths(text, budget, max_depth):
  drafter = drafters.suffix(max_depth=max_depth, min_prob=1e-30)
  nodes = _expand(drafter, text, budget=budget)
  reach = np.exp(drafters.cumulative_log_q(nodes, 1))
  want = _best_first(text, budget=budget, max_depth=max_depth)
  np.testing.assert_allclose(reach, want, rtol=1e-4)


@_settings
@given(text=_text, path=_path, max_depth=st.integers(1, 6))
def test_chain_follows_the_longest_suffix(text, path, max_depth):
  drafter = drafters.suffix(
    shape="chain", max_depth=max_depth, min_prob=1e-30, max_length=10
  )
  nodes = _expand(drafter, text, [Anchor(5, tuple(path))])
  read, want = text + path, []
  for _ in range(10):
    longest = scan(text, read, max_depth)
    if not longest or longest[0][0] == 0:
      break
    want.append(longest[0][2][0])
    read = [*read, want[-1]]
  assert nodes.tokens.tolist() == want
  assert nodes.parents.tolist() == list(range(len(want)))


@_settings
@given(text=_text, paths=st.lists(_path, min_size=1, max_size=4))
def test_a_smaller_budget_returns_a_prefix(text, paths):
  drafter = drafters.suffix()
  anchors = [Anchor(i, tuple(p)) for i, p in enumerate(paths)]
  full = _lists(_expand(drafter, text, anchors, 40))
  for budget in (0, 1, 7):
    part = _lists(_expand(drafter, text, anchors, budget))
    assert part == [x[:budget] for x in full]


@_settings
@given(text=_text, more=_text, path=_path)
def test_expand_is_idempotent_and_observe_equals_init(text, more, path):
  drafter = drafters.suffix(max_tokens=16)
  state = drafter.init(None, text, 0)
  anchors = [ROOT, Anchor(1, tuple(path))]
  state, first = drafter.expand(state, anchors, 20)
  state, second = drafter.expand(state, anchors, 20)
  assert _lists(first) == _lists(second)
  for token in more:
    state, _ = drafter.expand(state, anchors, 20)
    state = drafter.observe(state, [token])
    state = drafter.rebase(state, Anchor(2, (token,)))
  grown = drafter.expand(state, anchors, 20)[1]
  fresh = _expand(drafter, text + more, anchors, 20)
  assert _lists(grown) == _lists(fresh)


def test_memory_is_bounded_and_old_text_forgotten():
  drafter = drafters.suffix(max_tokens=100, max_depth=8)
  rng = random.Random(0)
  text = [1, 2, 3, 4] + [rng.randrange(1000, 9000) for _ in range(3000)]
  state = drafter.init(None, [1, 2, 3, 4], 0)
  for token in text[4:]:
    state = drafter.observe(state, [token])
    assert state.main.num_tokens <= 100
    assert state.young.num_tokens <= 50
    assert state.main.num_states <= 200
  assert state.main.num_tokens > 50
  state = drafter.observe(state, [1, 2])
  nodes = drafter.expand(state, [ROOT], 200)[1]
  assert 3 not in nodes.tokens
  # A fresh request with the same long text ends up with the same store.
  fresh = drafter.expand(drafter.init(None, [*text, 1, 2], 0), [ROOT], 200)[1]
  assert _lists(fresh) == _lists(nodes)


def test_expansion_cost_is_flat_in_the_length_of_the_text():
  drafter = drafters.suffix(max_tokens=1 << 20)
  steps = []
  for num_tokens in (1_000, 100_000):
    rng = random.Random(1)
    text = [int(rng.paretovariate(0.8)) % 40_000 for _ in range(num_tokens)]
    state = drafter.init(None, text, 0)
    before = state.main.steps
    assert len(drafter.expand(state, [ROOT], 64)[1].tokens) == 64
    steps.append(state.main.steps - before)
  assert steps[1] < 2 * steps[0]


def test_sequences_share_nothing():
  drafter = drafters.suffix()
  drafter.init(None, [5, 6, 7, 8, 5, 6], 0)
  assert set(_expand(drafter, [9, 4]).tokens.tolist()) == {9, 4}


def test_anchors_are_not_drafted_again():
  text = [1, 2, 3, 1, 2, 3, 1]
  drafter = drafters.suffix()
  nodes = _expand(drafter, text, [ROOT, Anchor(9, (2,)), Anchor(4, (2, 3))])
  children = [nodes.tokens[nodes.parents == row].tolist() for row in range(3)]
  assert 2 not in children[0]
  assert 3 not in children[1]
  assert children[2][0] == 1
  # The same place under two names is grown under the first.
  twice = _expand(drafter, text, [ROOT, ROOT])
  assert not np.any(twice.parents == 1)


def test_nothing_is_drafted_below_a_stop_token():
  text = [1, 0, 2, 1, 0, 2, 1]
  drafter = drafters.suffix(stop_tokens=[0])
  nodes = _expand(drafter, text)
  assert nodes.tokens[0] == 0
  rows = 1 + np.flatnonzero(nodes.tokens == 0)
  assert not np.isin(nodes.parents, rows).any()
  assert not _expand(drafter, text, [Anchor(3, (0,))]).tokens.size


def test_spec_factor_bounds_the_depth_by_the_match():
  def depth(text, **options):
    drafter = drafters.suffix(shape="chain", min_prob=1e-30, **options)
    return len(_expand(drafter, text).tokens)

  match_one = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1]
  match_two = [1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2]
  assert depth(match_one, max_spec_factor=1.5) == 3
  assert depth(match_two, max_spec_factor=1.5) == 5
  assert depth(match_one, max_length=7) == 7


def test_copied_text_takes_few_laps():
  rng = random.Random(2)
  block = [rng.randrange(5000) for _ in range(200)]
  prompt = [*block, 1, 2, 3, *block[:4]]
  rounds = drafters.replay(drafters.suffix(), prompt, block[4:], budget=32)
  assert len(rounds) <= math.ceil(196 / 12)
  chain = drafters.suffix(shape="chain", min_prob=1e-30)
  rounds = drafters.replay(chain, prompt, block[4:], budget=32)
  assert len(rounds) == math.ceil(196 / 33)


def test_empty_cases():
  assert not _expand(drafters.suffix(shape="chain"), [3]).tokens.size
  drafter = drafters.suffix()
  # One token is followed by nothing; all that is known is that it exists.
  assert set(_expand(drafter, [3]).tokens.tolist()) == {3}
  assert not _expand(drafter, [3, 3, 3], budget=0).tokens.size
  assert not _expand(drafter, [3, 3, 3], anchors=[]).tokens.size
  assert _expand(drafter, [3, 3]).tokens.tolist()[0] == 3


@pytest.mark.parametrize(
  "option",
  [
    {"shape": "bush"},
    {"max_depth": 0},
    {"max_children": 0},
    {"max_length": 0},
    {"max_spec_factor": 0.0},
    {"min_prob": 0.0},
    {"min_prob": 1.5},
    {"max_tokens": 1},
    {"weights": (1.0, 2.0)},
  ],
)
def test_bad_options_are_named(option):
  (name,) = option
  with pytest.raises(ValueError, match=f"suffix: {name} = "):
    drafters.suffix(**option)


def test_empty_prompt_is_refused():
  with pytest.raises(ValueError, match="prompt: must hold"):
    drafters.suffix().init(None, [], 0)
