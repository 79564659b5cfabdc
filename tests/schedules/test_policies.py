# SPDX-License-Identifier: Apache-2.0
"""Every policy: the plain text under any timing, and a floor under its pace."""

import random as random_lib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing

_LEARNED = 32  # tokens

POLICIES = {
  "lockstep": lambda: sch.lockstep(lambda g, t: len(g), max_nodes=6),
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
@settings(derandomize=True, deadline=None, max_examples=25)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_gives_the_plain_text(name, seed):
  random = random_lib.Random(seed)
  count = random.randint(1, 3)
  capacity = random.choice([24, 60, 150])
  texts = {
    s: [random.randrange(bench.VOCAB) for _ in range(capacity + 12)]
    for s in range(count)
  }
  requests = [
    bench.request_of(
      texts[s], random.randint(1, 6), random.randint(1, 18), seed=s
    )
    for s in range(count)
  ]
  engine = sch.init(
    POLICIES[name](),
    bench.costs(random.choice([8, 16])),
    capacity=capacity,
    prefill_rows=4,
  )
  drafter = bench.drafter_of(
    texts,
    right=random.choice([0.0, 0.6, 1.0]),
    size=lambda budget: random.randint(0, budget + 1),
    random=random,
  )
  stages = bench.ring(texts, num_stages=random.randint(1, 3), capacity=capacity)
  session = bench.play(Driver(engine, drafter), stages, requests, random)
  for s, request in enumerate(requests):
    tokens, reason = bench.plain(texts[s], request, capacity)
    outcome = session.driver.outcomes[s]
    assert (outcome.tokens, outcome.reason) == (tokens, reason)
  for stage in stages:
    assert int(stage.stage._slots.used.sum()) == 0


def _time_s(policy, *, accept, num_stages, stage_s, lap_s, level_s, tokens):
  """Returns virtual seconds from the 33rd token on."""
  random = random_lib.Random(5)
  text = [random.randrange(500) for _ in range(tokens + 300)]
  drafter = drafters.synthetic(text[1:], acceptance=accept, vocab_size=500)
  profile = StageProfile(
    buckets=(64,),
    seconds=((stage_s,),) * num_stages,
    dtype="x",
    device="modelled",
  )
  draft = sch.DraftCosts(per_level_s=level_s)
  stages = [
    ReplayStage(capacity=4096, row_bytes=8) for _ in range(num_stages - 1)
  ]
  stages.append(ReplayStage(capacity=4096, texts={0: text}))
  hop = wire.LinkShaper(delay_s=lap_s / (num_stages + 1), bandwidth_bps=1e12)
  ring = VirtualRing(
    stages=stages,
    hops=[hop] * (num_stages + 1),
    profile=profile,
    draft=draft,
    trace=False,
  )
  costs = sch.Costs.of_ring(
    Ring.uniform(num_stages=num_stages, lap_s=lap_s, bandwidth_bps=1e12),
    profile,
    hop_bytes_model(num_stages=num_stages, ids_bytes_per_node=4, row_bytes=8),
    max_rows=64,
    draft=draft,
  )
  engine = sch.init(policy, costs, capacity=4096, prefill_rows=8)
  request = sch.Request(
    prompt=(text[0],), max_new_tokens=tokens, sampling=Sampling()
  )
  outcome = ring.run(Driver(engine, drafter), [(0.0, request)]).outcomes[0]
  assert outcome.tokens == text[1 : 1 + tokens]
  return outcome.emitted_s[-1] - outcome.emitted_s[_LEARNED]


@pytest.mark.parametrize("name", [n for n in POLICIES if n != "floor"])
def test_a_floor_keeps_any_policy_near_plain_decoding(name):
  """A hopeless drafter on a ring where every row costs a lap's worth."""
  setting = {
    "accept": 0.02,
    "num_stages": 2,
    "stage_s": 0.01,
    "lap_s": 0.02,
    "level_s": 0.03,
    "tokens": 220,
  }
  plain = _time_s(sch.lockstep(lambda g, t: 0, max_nodes=0), **setting)
  floored = _time_s(sch.with_floor(POLICIES[name]()), **setting)
  assert floored <= plain / 0.95
