# SPDX-License-Identifier: Apache-2.0
"""Hedges, in-pipe growth and segments: the plain text under any timing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedules import bench, virtual
from wanspec_jax import schedules as sch

POLICIES = {
  "hedged": lambda: sch.hedged(depth=3, fan_out=(1, 0, 2, 3)),
  "hedged, root first": lambda: sch.hedged(depth=2, fan_out=2, redraft=False),
  "hedged, one token": lambda: sch.hedged(depth=1, redraft=False),
  "hedged, launched": lambda: sch.hedged(depth=2, fan_out=2, launch_hedges=3),
  "hedged, both": lambda: sch.hedged(
    depth=3, fan_out=1, redraft=False, launch_hedges=2
  ),
  "in_pipe": lambda: sch.in_pipe(width=3),
  "in_pipe, chain": lambda: sch.in_pipe(width=1, in_flight=5),
  "in_pipe, filled": lambda: sch.in_pipe(width=2, children=3, fill=True),
  "in_pipe, forced": lambda: sch.in_pipe(width=2, in_flight=7, fill=True),
  "segments": lambda: sch.segments(segment=3, initial=7, expand=5, levels=3),
  "segments, shallow": lambda: sch.segments(segment=2, initial=4, top_k=0),
}


@pytest.mark.parametrize("name", POLICIES)
@bench.examples(25)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_gives_the_plain_text(name, seed):
  bench.check_any_interleaving(POLICIES[name](), seed, max_rows=[6, 16])


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("level_s", [0.0, 0.004])
def test_a_ring_with_jitter_gives_the_plain_text(name, level_s):
  text = virtual.text_of(80)
  drafter = virtual.drafter_of(text, (0.6, 0.2, 0.1))
  outcome, runs = virtual.decode(  # compares the text
    POLICIES[name](),
    text,
    drafter,
    tokens=80,
    stage_s=(0.004, 0.006),
    delay_s=(0.01, 0.02, 0.01),
    jitter_s=0.01,
    level_s=level_s,
    records=True,
  )
  # It does speculate: plain decoding takes this long without any jitter.
  assert outcome.decode_s < 79 * 0.05
  # A node is launched once, and never before its parent.
  known = set()
  for run in runs:
    rows = zip(run.ids, run.parents, run.committed, strict=True)
    for node, parent, committed in rows:
      assert node not in known
      assert committed or not known or parent in known
      known.add(node)
