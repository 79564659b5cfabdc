# SPDX-License-Identifier: Apache-2.0
"""Closed forms of chains and pipes against simulations of them, and the virtual
world."""

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
    sch.lockstep(depth, levels=depth),
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


# Pipes. -----------------------------------------------------------------------


def test_the_rate_is_that_of_a_ticking_pipe():
  """A pipe of D stages simulated tick by tick: what leaves is right with
  probability a, else all behind it is in vain."""
  random = random_lib.Random(1)
  for hit, depth in ((0.8, 4), (0.9, 14), (0.8, 30)):
    tokens = ticks = 0
    while tokens < 60_000:
      ticks += depth  # a root on its way through an empty pipe
      tokens += 1
      while random.random() < hit:
        ticks += 1
        tokens += 1
    rate = sch.in_pipe_rate(hit, depth, 0.01)
    assert tokens / (0.01 * ticks) == pytest.approx(rate, rel=0.01)


def test_published_speedups_are_those_of_plausible_hit_rates():
  """SpecPipe's 14 and 8 stages; the ends of both ranges."""
  for stages, hit, published in (
    (14, 0.835, 4.46),
    (14, 0.939, 7.79),
    (8, 0.870, 4.19),
    (8, 0.936, 5.53),
  ):
    speedup = sch.in_pipe_speedup(hit, stages)
    assert speedup == pytest.approx(published, rel=0.01)
  # The depth wall: 1 / (1 − a), half of it where the depth is the mean run.
  assert sch.in_pipe_speedup(0.9, 1e9) == pytest.approx(10)
  assert sch.in_pipe_speedup(0.9, 9) == pytest.approx(5)
  assert sch.in_pipe_speedup(1.0, 12) == 12


def test_a_lap_holds_as_many_levels_as_ticks():
  assert sch.lap_window(6 * 0.04 + 6 * 0.01, 0.01) == 30
  assert sch.lap_window(0.301, 0.01) == 31
  assert sch.lap_window(0.004, 0.01) == 1


def test_a_stream_is_limited_by_the_slower_of_drafting_and_the_pipe():
  """One token per lap without hits, one per step of the slower with nothing
  else; the pipe's own form in between."""
  ring = {"lap_s": 0.3, "tick_s": 0.01}
  assert sch.stream_rate(0.0, level_s=0.02, **ring) == pytest.approx(1 / 0.3)
  assert sch.stream_rate(1.0, level_s=0.02, **ring) == pytest.approx(50)
  assert sch.stream_rate(0.8, level_s=0.02, **ring) == pytest.approx(
    5 / (0.3 + 4 * 0.02)
  )
  assert sch.stream_rate(0.8, level_s=0.0, **ring) == pytest.approx(
    sch.in_pipe_rate(0.8, 30, 0.01)
  )


@pytest.mark.parametrize("fade", [1.0, 0.8])
def test_rates_by_levels_under_way_are_those_of_a_simulated_window(fade):
  lap_s, tick_s = 0.12, 0.01
  rates = sch.window_rates(
    lambda ahead: 0.9 * fade ** (ahead - 1), lap_s=lap_s, tick_s=tick_s
  )
  assert len(rates) == (12 if fade == 1 else 10)
  random = random_lib.Random(3)
  for window in (1, 3, len(rates)):
    time_s, tokens = 0.0, 0
    for _ in range(20_000):
      # Launches at the tick, or with the verdict that makes room.
      back = [lap_s]
      launched_s = 0.0
      while True:
        level = len(back)
        launched_s += tick_s
        if level >= window:
          launched_s = max(launched_s, back[level - window])
        if random.random() >= 0.9 * fade ** (min(level, window) - 1):
          break
        back.append(launched_s + lap_s)
      time_s += back[-1]
      tokens += len(back)
    assert rates[window - 1] == pytest.approx(tokens / time_s, rel=0.02)
  if fade == 1:  # a full pipe
    full = sch.in_pipe_rate(0.9, 12, tick_s)
    assert rates[-1] == pytest.approx(full)
    assert sch.levels_in_flight(lambda a: 0.9, lap_s=0.12, tick_s=0.01) == 12


@pytest.mark.parametrize(
  ("call", "match"),
  [
    (lambda: sch.in_pipe_rate(1.2, 3, 0.1), "hit = 1.2"),
    (lambda: sch.lap_window(0.1, 0.0), "tick_s = 0.0"),
  ],
)
def test_what_makes_no_sense_is_refused_by_name(call, match):
  with pytest.raises(ValueError, match=match):
    call()
