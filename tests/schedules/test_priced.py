# SPDX-License-Identifier: Apache-2.0
"""Priced: the plain text under any timing, and never behind lockstep."""

import functools
import random as random_lib

import pytest
from hypothesis import given

import drafters
from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing

ROW_BYTES = 8192
TOKENS = 320
SKIP = 33  # the calibration's first steps


@bench.examples(60)
@given(bench.SEEDS)
def test_any_interleaving_gives_the_plain_text(random):
  """No clock here: what the policy expects of time is always wrong."""
  count = random.randint(1, 3)
  capacity = random.choice([40, 120])
  texts = bench.random_texts(random, count, capacity + 12)
  requests = [
    bench.request_of(texts[s], random.randint(1, 6), 20, seed=s)
    for s in range(count)
  ]
  engine = sch.init(
    sch.priced(sch.Pricing(pool=random.choice([3, 20]))),
    bench.costs(16),
    capacity=capacity,
    prefill_rows=4,
  )
  drafter = bench.drafter_of(
    texts,
    right=random.choice([0.0, 0.7, 1.0]),
    size=lambda budget: random.randint(0, budget),
    random=random,
  )
  stages = bench.ring(texts, num_stages=2, capacity=capacity)
  session = bench.play(Driver(engine, drafter), stages, requests, random)
  bench.assert_plain(session.driver, requests, texts, capacity)


def _acceptance(quality, seed):
  random = random_lib.Random(seed)
  by_position = [random.uniform(-0.25, 0.25) for _ in range(1000)]

  def marginals(position, depth):
    swing = by_position[position % 1000]
    first = min(max((quality + swing) * 0.985 ** (depth - 1), 0.02), 0.97)
    return (first, 0.4 * (1 - first), 0.15 * (1 - first))

  return marginals


def _rate(policy, *, lap_s, bandwidth_bps, num_stages, level_s, quality):
  """Returns virtual tokens per second behind the first `SKIP` tokens."""
  random = random_lib.Random(7)
  text = [random.randrange(1000) for _ in range(TOKENS + 200)]
  drafter = drafters.synthetic(
    text[8:], acceptance=_acceptance(quality, 0), vocab_size=1000
  )
  buckets = (1, 2, 4, 8, 16, 32, 64)
  stage_s = 0.064 / num_stages
  profile = StageProfile(
    buckets=buckets,
    seconds=tuple(
      tuple(stage_s * max(1.0, b / 32) for b in buckets)
      for _ in range(num_stages)
    ),
    dtype="bfloat16",
    device="modelled",
  )
  draft = sch.DraftCosts(per_level_s=level_s)
  stages = [
    ReplayStage(capacity=1024, row_bytes=ROW_BYTES)
    for _ in range(num_stages - 1)
  ]
  stages.append(ReplayStage(capacity=1024, texts={0: text}))
  ring = VirtualRing(
    stages=stages,
    hops=[
      wire.LinkShaper(
        delay_s=lap_s / (num_stages + 1), bandwidth_bps=bandwidth_bps
      )
    ]
    * (num_stages + 1),
    profile=profile,
    draft=draft,
    trace=False,
  )
  costs = sch.Costs.of_ring(
    Ring.uniform(
      num_stages=num_stages, lap_s=lap_s, bandwidth_bps=bandwidth_bps
    ),
    profile,
    hop_bytes_model(
      num_stages=num_stages,
      ids_bytes_per_node=4,
      row_bytes=ROW_BYTES,
      header_bytes=12,
      verdict_bytes=6,
    ),
    max_rows=64,
    draft=draft,
  )
  engine = sch.init(policy, costs, capacity=1024, prefill_rows=64)
  request = sch.Request(
    prompt=tuple(text[:8]), max_new_tokens=TOKENS, sampling=Sampling()
  )
  outcome = ring.run(Driver(engine, drafter), [(0.0, request)]).outcomes[0]
  assert outcome.tokens == text[8 : 8 + TOKENS]
  times = outcome.emitted_s
  return (TOKENS - 1 - SKIP) / (times[-1] - times[SKIP])


@pytest.mark.parametrize("quality", [0.3, 0.9])
@pytest.mark.parametrize("level_s", [0.0, 0.01])
@pytest.mark.parametrize(
  ("lap_s", "mbps", "num_stages"),
  [
    pytest.param(0.02, 1000, 2, id="stage-bound"),
    pytest.param(0.2, 1000, 2, id="latency-bound"),
    pytest.param(0.2, 10, 4, id="wan"),
    pytest.param(0.02, 1, 3, id="bandwidth-bound"),
  ],
)
def test_it_is_never_behind_lockstep_at_its_best_size(
  lap_s, mbps, num_stages, level_s, quality
):
  rate = functools.partial(
    _rate,
    lap_s=lap_s,
    bandwidth_bps=mbps * 1e6,
    num_stages=num_stages,
    level_s=level_s,
    quality=quality,
  )
  best = max(
    rate(sch.lockstep(size, levels=levels))
    for size in (0, 1, 4, 16)
    for levels in ((2, 8) if level_s and size > 1 else (None,))
  )
  assert rate(sch.priced()) >= 0.98 * best


def test_a_hopeless_drafter_costs_next_to_nothing():
  settings = {
    "lap_s": 0.1,
    "bandwidth_bps": 1e7,
    "num_stages": 4,
    "level_s": 0.0,
    "quality": -1.0,
  }
  plain = _rate(sch.lockstep(0), **settings)
  assert _rate(sch.priced(), **settings) >= 0.95 * plain
