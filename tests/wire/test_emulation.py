# SPDX-License-Identifier: Apache-2.0
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax.wire import ByteCounter, LinkShaper, ShaperState
from wanspec_jax.wire._emulation import half_normal


def test_schedule_by_hand():
  shaper = LinkShaper(delay_s=0.5, bandwidth_bps=8000.0)  # 1000 bytes a second
  state = ShaperState()
  # (handed over, bytes) → arrival. The second waits for the first to leave at
  # 2.25, the third finds the link free, the fourth (empty) leaves at once.
  frames = [
    (2.0, 250, 2.75),
    (2.125, 500, 3.25),
    (4.0, 1000, 5.5),
    (5.0, 0, 5.5),
  ]
  for now_s, num_bytes, expected_s in frames:
    state, deliver_at_s = shaper.schedule(state, now_s, num_bytes)
    assert deliver_at_s == expected_s
  assert state == ShaperState(4, 5.0, 5.5)


def test_no_parameters_deliver_at_once():
  state, deliver_at_s = LinkShaper().schedule(ShaperState(), 7.0, 10**9)
  assert deliver_at_s == 7.0
  assert state.free_at_s == 7.0


@settings(derandomize=True, deadline=None, max_examples=50)
@given(
  st.lists(
    st.tuples(st.floats(0, 0.1), st.integers(0, 10**5)), min_size=1, max_size=20
  ),
  st.integers(0, 2**64 - 1),
)
def test_order_and_bounds_hold_under_jitter(steps, seed):
  shaper = LinkShaper(delay_s=0.01, bandwidth_bps=1e7, jitter_s=0.05, seed=seed)
  steady = LinkShaper(delay_s=0.01, bandwidth_bps=1e7)
  state = steady_state = ShaperState()
  now_s = last_s = 0.0
  for step_s, num_bytes in steps:
    now_s += step_s
    state, deliver_at_s = shaper.schedule(state, now_s, num_bytes)
    steady_state, earliest_s = steady.schedule(steady_state, now_s, num_bytes)
    assert deliver_at_s >= max(last_s, earliest_s)
    last_s = deliver_at_s
  assert state.num_frames == len(steps)


def test_jitter_is_half_normal_and_addressed():
  draws = np.array([half_normal(seed=3, index=i) for i in range(4000)])
  # E|Z| = √(2/π), E|Z|² = 1, P(|Z| < 0.6745) = 1/2; five standard errors.
  n = len(draws)
  assert abs(draws.mean() - math.sqrt(2 / math.pi)) < 5 * 0.603 / math.sqrt(n)
  assert abs((draws**2).mean() - 1) < 5 * math.sqrt(2 / n)
  assert abs((draws < 0.67449).mean() - 0.5) < 5 * 0.5 / math.sqrt(n)
  assert half_normal(seed=3, index=17) == draws[17]
  assert half_normal(seed=4, index=17) != draws[17]
  shaper = LinkShaper(jitter_s=0.25, seed=3)
  _, deliver_at_s = shaper.schedule(ShaperState(num_frames=17), 1.0, 100)
  assert deliver_at_s == 1.0 + 0.25 * draws[17]


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"delay_s": -1.0}, "delay_s = -1.0: must be finite"),
    ({"delay_s": math.inf}, "delay_s"),
    ({"bandwidth_bps": 0.0}, "bandwidth_bps = 0.0: must be > 0"),
    ({"jitter_s": math.nan}, "jitter_s"),
    ({"seed": -1}, "seed"),
  ],
)
def test_bad_parameters_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    LinkShaper(**fields)


def test_byte_counter():
  counter = ByteCounter()
  counter.add("a>b", {"ids": 3, "control": 2})
  counter.add("a>b", {"ids": 4})
  other = ByteCounter()
  other.add("b>c", {"activations": 100, "ids": 1})
  both = counter.merge(other)
  assert both.total() == 110
  assert both.total(link="a>b") == 9
  assert both.total(traffic="ids") == 8
  assert both.total(link="a>b", traffic="ids") == 7
  assert both.by_class(link="none") == dict.fromkeys(both.by_class(), 0)
  assert counter.total() == 9  # merging changed neither
  assert ByteCounter.from_dict(both.as_dict()).as_dict() == both.as_dict()
  with pytest.raises(ValueError, match="traffic class = 'id'"):
    counter.add("a>b", {"id": 1})
  with pytest.raises(ValueError, match="must be >= 0"):
    counter.add("a>b", {"ids": -1})
