# SPDX-License-Identifier: Apache-2.0
"""Nested: the last model's own chain, in the passes that agreement allows."""

import random as random_lib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor
from wanspec_jax.worlds import Driver

VOCAB = 50


def _text(count, seed=3):
  random = random_lib.Random(seed)
  return [random.randrange(VOCAB) for _ in range(count)]


def _model(text, acceptance, seed=0):
  return drafters.synthetic(
    text, acceptance=acceptance, vocab_size=VOCAB, seed=seed
  )


def _chain_alone(model, path, length):
  """Returns a model's chain token by token, one expansion each."""
  state = model.init(None, [0], 0)
  tokens = []
  for _ in range(length):
    state, nodes = model.expand(state, [Anchor(0, (*path, *tokens))], 4, 1)
    tokens.append(int(nodes.tokens[nodes.log_q.argmax()]))
  return tokens


@settings(derandomize=True, deadline=None, max_examples=40)
@given(
  qualities=st.lists(
    st.sampled_from([0.05, 0.5, 0.9, 1.0]), min_size=1, max_size=3
  ),
  window=st.integers(1, 5),
  ahead=st.integers(0, 6),
  length=st.integers(1, 20),
)
def test_the_last_model_alone_decides(qualities, window, ahead, length):
  text = _text(60)
  models = [_model(text, [q, (1 - q) / 2], i) for i, q in enumerate(qualities)]
  drafter = drafters.nested(models, window=window)
  path = tuple(text[:ahead])
  state = drafter.init(None, [0], 0)
  _, nodes = drafter.expand(state, [Anchor(0, path)], length)
  assert nodes.tokens.tolist() == _chain_alone(models[-1], path, length)
  assert nodes.parents.tolist() == list(range(length))


@pytest.mark.parametrize(("accept", "window"), [(0.6, 4), (0.8, 8), (0.3, 2)])
def test_passes_follow_the_law_of_agreement(accept, window):
  """Against the hits walked by hand, and Ω(γ, α) within 1%."""
  count = 12_000
  text = _text(count + 1)
  small = _model(text, accept)
  drafter = drafters.nested([small, _model(text, 1.0)], window=window)
  state = drafter.init(None, [0], 0)
  state, nodes = drafter.expand(state, [Anchor(0)], count)
  assert nodes.tokens.tolist() == text[:count]
  state_0 = small.init(None, [0], 0)
  hits = []
  for token in text[:count]:
    state_0, one = small.expand(state_0, [Anchor(0)], 1)
    hits.append(int(one.tokens[0]) == token)
    state_0 = small.observe(state_0, [token])
  at = passes = 0
  while at < count:
    checked = min(window, count - at - 1)
    taken = next((i for i in range(checked) if not hits[at + i]), checked)
    at += taken + 1
    passes += 1
  assert state.passes[1] == passes
  share = sum(hits) / count
  omega = sch.expected_tokens(share, window)
  assert count / passes == pytest.approx(omega, rel=0.01)


def test_three_models_save_passes_of_each_larger_one():
  text = _text(400)
  models = [_model(text, q, i) for i, q in enumerate((0.7, 0.85, 1.0))]
  drafter = drafters.nested(models, window=4)
  state, nodes = drafter.expand(
    drafter.init([None] * 3, [0], 0), [Anchor(0)], 300
  )
  assert len(nodes.tokens) == 300
  small, middle, large = state.passes
  assert large < middle < small
  assert large < 300 / 2


def test_anchors_share_the_budget_and_levels_bound_the_depth():
  text = _text(30)
  drafter = drafters.nested([_model(text, 1.0)] * 2, window=3)
  state = drafter.init(None, [0], 0)
  anchors = [Anchor(0), Anchor(7, tuple(text[:2]))]
  state, nodes = drafter.expand(state, anchors, 7)
  assert nodes.tokens.tolist() == text[:3] + text[2:6]
  assert nodes.parents.tolist() == [0, 2, 3, 1, 5, 6, 7]
  _, nodes = drafter.expand(state, anchors, 7, 2)
  assert nodes.tokens.tolist() == text[:2] + text[2:4]


def test_it_follows_the_text():
  text = _text(30)
  drafter = drafters.nested([_model(text, 0.5), _model(text, 1.0)])
  state = drafter.init(None, [0], 0)
  state = drafter.observe(state, text[:5])
  state = drafter.rebase(state, Anchor(9, tuple(text[:5])))
  _, nodes = drafter.expand(state, [Anchor(9)], 4)
  assert nodes.tokens.tolist() == text[5:9]


def test_it_drafts_for_a_schedule():
  text = [t % bench.VOCAB for t in _text(140)]
  models = [
    drafters.synthetic(text[1:], acceptance=q, vocab_size=bench.VOCAB, seed=i)
    for i, q in enumerate((0.6, 0.8))
  ]
  engine = sch.init(
    sch.continuous(nodes=2), bench.costs(8), capacity=150, prefill_rows=4
  )
  request = bench.request_of(text, 1, 60, seed=0)
  driver = Driver(engine, drafters.nested(models, window=2))
  stages = bench.ring({0: text}, num_stages=2, capacity=150)
  session = bench.play(driver, stages, [request], random_lib.Random(1))
  assert session.driver.outcomes[0].tokens == text[1:61]


@pytest.mark.parametrize(
  ("count", "window", "what"), [(0, 2, "0 models"), (1, 0, "window = 0")]
)
def test_bad_arguments_are_named(count, window, what):
  models = [_model(_text(5), 1.0)] * count
  with pytest.raises(ValueError, match=what):
    drafters.nested(models, window=window)


def test_params_are_one_per_model():
  drafter = drafters.nested([_model(_text(5), 1.0)] * 2)
  with pytest.raises(ValueError, match="1 params for 2 models"):
    drafter.init([None], [0], 0)
