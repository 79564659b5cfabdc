# SPDX-License-Identifier: Apache-2.0
"""Each request is served by its own drafter, and by nobody else's state."""

import random as random_lib

import pytest

import drafters
from wanspec_jax.base import Anchor

TEXTS = {3: [1, 2, 3, 4, 5, 6], 8: [9, 9, 7, 7, 5, 5]}


def _synthetic(key):
  return drafters.synthetic(
    TEXTS[key], acceptance=[0.6, 0.2], vocab_size=10, seed=key
  )


def test_states_interleaved_at_random_equal_each_drafter_alone():
  both = drafters.by_request({key: _synthetic(key) for key in TEXTS})
  alone = {key: _synthetic(key) for key in TEXTS}
  states = {key: both.init(None, [0], key) for key in TEXTS}
  own = {key: alone[key].init(None, [0], key) for key in TEXTS}
  done = dict.fromkeys(TEXTS, 0)
  random = random_lib.Random(0)
  for _ in range(40):
    key = random.choice(list(TEXTS))
    if done[key] < 6 and random.random() < 0.3:
      token = TEXTS[key][done[key]]
      done[key] += 1
      states[key] = both.observe(states[key], [token])
      own[key] = alone[key].observe(own[key], [token])
      root = Anchor(done[key], (token,))
      states[key] = both.rebase(states[key], root)
      own[key] = alone[key].rebase(own[key], root)
      continue
    ask = ([Anchor(0)], random.randint(1, 6), random.choice([None, 1, 2]))
    states[key], got = both.expand(states[key], *ask)
    own[key], expected = alone[key].expand(own[key], *ask)
    for mine, theirs in zip(got, expected, strict=True):
      assert mine.tolist() == theirs.tolist()
  assert min(done.values()) > 0


def test_kinds_may_differ_and_the_name_says_so():
  drafter = drafters.by_request({3: _synthetic(3), 8: drafters.none()})
  assert drafter.name == "by_request(none, synthetic)"
  state = drafter.init(None, [0], 8)
  assert len(drafter.expand(state, [Anchor(0)], 5)[1].tokens) == 0
  state = drafter.init(None, [0], 3)
  assert len(drafter.expand(state, [Anchor(0)], 5)[1].tokens) == 5


def test_an_unknown_request_is_refused_by_name():
  drafter = drafters.by_request({key: _synthetic(key) for key in TEXTS})
  with pytest.raises(
    ValueError, match=r"request key 4: must be one of \[3, 8\]"
  ):
    drafter.init(None, [0], 4)
