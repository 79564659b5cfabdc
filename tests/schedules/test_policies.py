# SPDX-License-Identifier: Apache-2.0
"""Every policy: the plain text under any timing, and a floor under its pace."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedules import bench, virtual
from wanspec_jax import schedules as sch

POLICIES = {
  "lockstep": lambda: sch.lockstep(6),
  "continuous": lambda: sch.continuous(nodes=2, width=2),
  "stream": lambda: sch.continuous(nodes=1, max_in_flight=3),
  "reactive": lambda: sch.continuous(threshold=0.3, recovery=0.2, decay=0.1),
  "hedged": lambda: sch.hedged(depth=2, fan_out=(2, 2, 3)),
  "hedges-launched": lambda: sch.hedged(depth=2, fan_out=2, launch_hedges=3),
  "branched": lambda: sch.branched(depth=3),
  "branched-budget": lambda: sch.branched(depth=2, decay=0.6),
  "in_pipe": lambda: sch.in_pipe(width=3),
  "in_pipe-capped": lambda: sch.in_pipe(width=1, in_flight=2),
  "segments": lambda: sch.segments(segment=3, initial=7, expand=5),
  "rate_matched": lambda: sch.rate_matched(nodes=5, depth=2),
  "priced": lambda: sch.priced(),
  "floor": lambda: sch.with_floor(sch.continuous()),
}


@pytest.mark.parametrize("name", POLICIES)
@bench.examples(25)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_gives_the_plain_text(name, seed):
  bench.check_any_interleaving(POLICIES[name](), seed, max_rows=[8, 16])


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "floor"])
def test_a_floor_keeps_any_policy_near_plain_decoding(name):
  """A hopeless drafter on a ring where every row costs a lap's worth."""
  setting = {
    "accept": 0.02,
    "stage_s": (0.01,) * 2,
    "lap_s": 0.02,
    "row_bytes": 8,
    "level_s": 0.03,
    "tokens": 220,
  }
  plain = virtual.time_s(sch.lockstep(0), **setting)
  floored = virtual.time_s(sch.with_floor(POLICIES[name]()), **setting)
  assert floored <= plain / 0.95
