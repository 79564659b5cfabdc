# SPDX-License-Identifier: Apache-2.0
"""The floor under all policies: no slower than plain decoding, none slowed."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedules import bench, hand, virtual
from tests.schedules.policies import DRAFTING
from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor
from wanspec_jax.schedules import _speculation as tree
from wanspec_jax.worlds import Stall, Weather

POLICIES = {
  f"floor, {name}": lambda make=make: sch.with_floor(make())
  for name, make in {
    **DRAFTING,
    "lockstep": lambda: sch.lockstep(6),
    "hedged": lambda: sch.hedged(depth=2, fan_out=2, launch_hedges=3),
    "in_pipe": lambda: sch.in_pipe(width=2),
    "segments": lambda: sch.segments(segment=3, initial=7, expand=5),
  }.items()
}


@pytest.mark.parametrize("name", POLICIES)
@bench.examples(8)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_gives_the_plain_text(name, seed):
  bench.check_any_interleaving(POLICIES[name](), seed, max_rows=[6, 16])


def test_a_pipe_foresees_what_a_run_does_to_the_next():
  pipe = sch.Pipe(hand.row_costs(0.05, max_rows=8))
  # Four rows at 0: they reach the stage at 0.1 and leave it at 0.3.
  assert pipe.queue_s(4, 0.0, 0.05) == pytest.approx(0.15)
  assert pipe.queue_s(4, 0.0, 0.2) == pytest.approx(0.0)
  assert pipe.wait_s(1, 0.05) < 1e-12  # nothing was booked
  _, back_s = pipe.launch(4, 0.0)
  assert back_s == pytest.approx(0.4)
  assert pipe.wait_s(1, 0.05) == pytest.approx(0.15)


def _floored(inner):
  return sch.with_floor(
    sch.Policy("inner", lambda spec, pipe, time_s: inner(spec), 4)
  )


def test_what_the_purse_does_not_cover_is_cut():
  """Three laps of 1 s at first; each row beyond the root's takes 0.8 s."""
  pipe = sch.Pipe(hand.row_costs(0.8, max_rows=16))
  pipe.num_sequences = 1
  spec = hand.spec_of()
  ids = tuple(hand.chain(spec, *[0.9] * 8))
  policy = _floored(lambda spec: sch.Send(ids))
  assert policy.decide(spec, pipe, 0.0) == sch.Send(ids[:3])
  family = sch.with_floor(
    sch.Policy("f", lambda *_: sch.Send(ids), 1, keeps_children=True)
  )
  twin = hand.add(spec, ids[1], 0.05, first=99)[0]
  # Three are affordable, but that would part the last two.
  ids = (ids[0], ids[1], ids[2], twin)
  assert family.decide(spec, pipe, 0.0) == sch.Send(ids[:2])
  ids = (ids[0], twin_of_first := tree.add_child(spec, spec.root, 98, -3.0).id)
  ids = (ids[0], *hand.add(spec, ids[0], 0.5), twin_of_first)
  assert family.decide(spec, pipe, 0.0) == sch.Send((ids[0], ids[2], ids[1]))


def test_the_root_waits_for_a_draft_as_long_as_the_purse_lasts():
  pipe = hand.pipe_of(level_s=0.5)
  spec = hand.spec_of()
  wants = [None]
  policy = _floored(lambda spec: wants[0])
  hand.launch(spec, return_s=1.0)
  assert policy.decide(spec, pipe, 0.0) is None
  spec.flights.clear()
  tree.commit_tokens(spec, (5,))
  wants[0] = sch.Grow((Anchor(spec.root),), 4, 2)
  assert policy.decide(spec, pipe, 1.0) == wants[0]
  spec.drafting, wants[0] = (spec.root,), None
  assert policy.decide(spec, pipe, 1.0) == sch.Hold(4.0)
  assert policy.decide(spec, pipe, 4.0) == sch.Send(())


_HARD = {
  "slow link": {
    "stage_s": (0.03, 0.03),
    "lap_s": 0.1,
    "mbps": 1.0,
    "row_bytes": 8192,
  },
  "stage-bound": {"stage_s": (0.01,) * 4, "lap_s": 0.005},
  "costly drafts": {"stage_s": (0.01,) * 2, "lap_s": 0.02, "level_s": 0.03},
  "shared device": {
    "stage_s": (0.01,) * 2,
    "lap_s": 0.02,
    "level_s": 0.03,
    "drafter_stage": 1,
  },
  "jitter": {"stage_s": (0.01,) * 2, "lap_s": 0.2, "jitter_s": 0.02},
  "three texts": {
    "stage_s": (0.02, 0.02),
    "lap_s": 0.1,
    "mbps": 4.0,
    "row_bytes": 8192,
    "sequences": 3,
  },
}
_INNER = {
  "lockstep": lambda: sch.lockstep(12),
  "continuous": lambda: sch.continuous(nodes=2, width=2),
  "hedged": lambda: sch.hedged(depth=3, fan_out=2, launch_hedges=3),
  "branched": lambda: sch.branched(),
  "in_pipe": lambda: sch.in_pipe(width=4),
  "segments": lambda: sch.segments(segment=8),
  "rate_matched": lambda: sch.rate_matched(),
}


@pytest.mark.parametrize("place", _HARD)
def test_no_hopeless_drafter_slows_any_policy(place):
  setting = {"accept": [1e-6, 1e-7], "tokens": 64, **_HARD[place]}
  plain = virtual.time_s(sch.lockstep(0), **setting)
  for name, make in _INNER.items():
    floored = virtual.time_s(sch.with_floor(make()), **setting)
    assert floored <= plain / 0.95, name


@pytest.mark.parametrize("place", ["slow link", "stage-bound"])
@pytest.mark.parametrize("name", _INNER)
def test_a_policy_that_pays_keeps_its_gain(place, name):
  setting = {"accept": [0.8, 0.08], "tokens": 128, **_HARD[place]}
  plain = virtual.time_s(sch.lockstep(0), **setting)
  bare = plain / virtual.time_s(_INNER[name](), **setting)
  floored = plain / virtual.time_s(sch.with_floor(_INNER[name]()), **setting)
  assert floored >= 0.95
  if bare > 1:
    assert floored - 1 >= 0.97 * (bare - 1)


def test_the_weather_is_not_the_policys_fault():
  """A stall of 40 laps does not end the speculation."""
  setting = {"accept": 0.8, "tokens": 192, "stage_s": (0.01,), "lap_s": 0.04}
  weather = Weather(stalls=(Stall(1, 1.0, 3.0),))
  make = _INNER["continuous"]
  calm = virtual.time_s(sch.with_floor(make()), skip=0, **setting)
  bad = virtual.time_s(
    sch.with_floor(make()), skip=0, weather=weather, **setting
  )
  assert bad <= calm + 2.0 + 2 * 0.05


def test_bad_arguments_are_named():
  for make, what in (
    (lambda: sch.with_floor(sch.lockstep(0), share=0.0), r"share = 0\.0"),
    (lambda: sch.with_floor(sch.lockstep(0), learning=-1), "learning = -1"),
  ):
    with pytest.raises(ValueError, match=what):
      make()
