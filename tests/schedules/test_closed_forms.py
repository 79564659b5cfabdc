# SPDX-License-Identifier: Apache-2.0
"""Closed forms of chains against simulated chains and the virtual world."""

import itertools
import random as random_lib

import pytest

from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Sampling
from wanspec_jax.schedules import _closed_forms as forms
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing


@pytest.mark.parametrize("accept", [0.0, 0.5, 0.8, 1.0])
@pytest.mark.parametrize("depth", [1, 4])
def test_expected_tokens_by_enumeration(accept, depth):
  total = 0.0
  for outcome in itertools.product((0, 1), repeat=depth):
    chance = 1.0
    for bit in outcome:
      chance *= accept if bit else 1 - accept
    taken = next((i for i, bit in enumerate(outcome) if not bit), depth)
    total += chance * (taken + 1)
  assert forms.expected_tokens(accept, depth) == pytest.approx(total)


@pytest.mark.parametrize(("accept", "window"), [(0.6, 4), (0.8, 8), (0.3, 2)])
def test_always_rolling_matches_a_simulated_chain(accept, window):
  """The values that the reference's own Monte Carlo found: .394, .480, .236."""
  random = random_lib.Random(2)
  full = tokens = 0
  steps = 150_000
  is_rolled_back = True
  for _ in range(steps):
    if is_rolled_back:
      tokens += 1
      is_rolled_back = random.random() >= accept
      continue
    full += 1
    got = 0
    while got < window and random.random() < accept:
      got += 1
    tokens += got + 1
    is_rolled_back = got < window or random.random() >= accept
  rho, per_step = forms.always_rolling(accept, window)
  assert rho == pytest.approx(
    {4: 0.3942, 8: 0.4803, 2: 0.2357}[window], abs=1e-4
  )
  assert full / steps == pytest.approx(rho, abs=0.006)
  assert tokens / steps == pytest.approx(per_step, rel=0.01)


def test_lookahead_is_the_published_example():
  """t_target 1, t_drafter 0.1: with five tokens ahead two servers do."""
  assert forms.lookahead(target_s=1.0, level_s=0.1, servers=2) == 5
  assert forms.lookahead(target_s=1.0, level_s=0.1, servers=7) == 2


@pytest.mark.parametrize("depth", [2, 4])
def test_a_perfect_drafter_in_lockstep_has_the_synchronous_rate(depth):
  """Acceptance 1: the virtual world has no noise to average out."""
  text = [i * i % 7 % bench.VOCAB for i in range(400)]
  draft = sch.DraftCosts(per_level_s=0.004)
  ring = VirtualRing(
    stages=[ReplayStage(capacity=400, texts={0: text})],
    hops=[wire.LinkShaper(delay_s=0.05)] * 2,
    profile=StageProfile(
      buckets=(16,), seconds=((0.01,),), dtype="x", device="x"
    ),
    draft=draft,
  )
  engine = sch.init(
    sch.lockstep(lambda g, t: len(g), max_nodes=depth, levels=depth),
    sch.Costs.constant(0.11, max_rows=16),
    capacity=400,
    prefill_rows=8,
  )
  count = 40 * (depth + 1)
  request = sch.Request(
    prompt=(text[0],), max_new_tokens=count, sampling=Sampling()
  )
  outcome = ring.run(
    Driver(engine, bench.chain_of({0: text}, depth)), [(0.0, request)]
  ).outcomes[0]
  rate = forms.synchronous_rate(1.0, depth, level_s=0.004, lap_s=0.11)
  assert outcome.emitted_s[-1] == pytest.approx(count / rate)
  overlapped = forms.overlapped_rate(1.0, depth, level_s=0.004, lap_s=0.11)
  assert overlapped == pytest.approx((depth + 1) / 0.11)
