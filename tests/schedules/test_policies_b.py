# SPDX-License-Identifier: Apache-2.0
"""Hedges, in-pipe growth, segments, and the closed forms behind them."""

import itertools
import math
import random as random_lib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.base import Anchor, Nodes
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Returned, Sampling, Verdict
from wanspec_jax.schedules._speculation import (
  add_nodes,
  commit_tokens,
  start,
)
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing

VOCAB = 500
MAX_ROWS = 64
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


# Exactness. -------------------------------------------------------------------


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
    bench.costs(random.choice([6, 16])),
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


def _text(tokens, seed=5):
  random = random_lib.Random(seed)
  return [random.randrange(VOCAB) for _ in range(tokens + 300)]


def _decode(
  policy,
  text,
  drafter,
  *,
  tokens,
  stage_s=(0.01,),
  delay_s=None,
  jitter_s=0.0,
  level_s=0.0,
  capacity=4096,
):
  """Returns the outcome, and every run as the head saw it."""
  delay_s = delay_s or (0.0,) * (len(stage_s) + 1)
  profile = StageProfile(
    buckets=(MAX_ROWS,),
    seconds=tuple((t,) for t in stage_s),
    dtype="none",
    device="modelled",
  )
  draft = sch.DraftCosts(per_level_s=level_s)
  stages = [ReplayStage(capacity=capacity, row_bytes=0) for _ in stage_s[:-1]]
  stages.append(ReplayStage(capacity=capacity, texts={0: text}))
  stages[0] = bench.Recorder(stages[0])
  stages[0].reset = lambda: None
  busy = tuple(x for t in stage_s for x in (0.0, t))
  costs = sch.Costs(
    delay_s=delay_s,
    busy_s=lambda rows: (*busy, 0.0),
    max_rows=MAX_ROWS,
    draft=draft,
  )
  ring = VirtualRing(
    stages=stages,
    hops=[
      wire.LinkShaper(delay_s=d, jitter_s=jitter_s, seed=i)
      for i, d in enumerate(delay_s)
    ],
    profile=profile,
    draft=draft,
    trace=False,
  )
  engine = sch.init(policy, costs, capacity=capacity, prefill_rows=8)
  request = sch.Request(
    prompt=(text[0],), max_new_tokens=tokens, sampling=Sampling()
  )
  outcome = ring.run(Driver(engine, drafter), [(0.0, request)]).outcomes[0]
  assert outcome.tokens == text[1 : 1 + tokens]
  return outcome, list(stages[0].rows.values())


@pytest.mark.parametrize("name", POLICIES)
@pytest.mark.parametrize("level_s", [0.0, 0.004])
def test_a_ring_with_jitter_gives_the_plain_text(name, level_s):
  text = _text(80)
  drafter = drafters.synthetic(
    text[1:], acceptance=(0.6, 0.2, 0.1), vocab_size=VOCAB
  )
  outcome, runs = _decode(  # compares the text
    POLICIES[name](),
    text,
    drafter,
    tokens=80,
    stage_s=(0.004, 0.006),
    delay_s=(0.01, 0.02, 0.01),
    jitter_s=0.01,
    level_s=level_s,
  )
  assert len(outcome.rounds) < 75  # it does speculate
  # A node is launched once, and never before its parent.
  known = set()
  for run in runs:
    rows = zip(run.ids, run.parents, run.committed, strict=True)
    for node, parent, committed in rows:
      assert node not in known
      assert committed or not known or parent in known
      known.add(node)


# In-pipe growth. --------------------------------------------------------------


def _hits(drafter, text, tokens):
  """Returns whether the likeliest child of each position is the true token."""
  state = drafter.init(None, text[:1], 0)
  hits = []
  for position in range(1, tokens + 1):
    state, nodes = drafter.expand(state, [Anchor(position - 1)], 1, 1)
    hits.append(int(nodes.tokens[0]) == text[position])
    state = drafter.observe(state, text[position : position + 1])
  return hits


def _pace(outcome, skip=50):
  """Returns seconds per token behind the first `skip`."""
  times = outcome.emitted_s
  return (times[-1] - times[skip]) / (len(times) - 1 - skip)


@pytest.mark.parametrize("accept", [0.8, 0.9])
@pytest.mark.parametrize(
  ("num_stages", "latency_s", "level_s"),
  [
    pytest.param(4, 0.0, 0.0, id="4"),
    pytest.param(14, 0.0, 0.009, id="14, drafting hidden"),
    pytest.param(30, 0.0, 0.0, id="30"),
    pytest.param(6, 0.24, 0.0, id="wan of 30 ticks"),
  ],
)
def test_one_level_per_tick_has_the_rate_of_the_closed_form(
  accept, num_stages, latency_s, level_s
):
  """(R + 1) / ((R + W) τ), W the lap in ticks; R from the drafts themselves."""
  tokens, tick_s = 1500, 0.01
  text = _text(tokens)
  drafter = drafters.synthetic(text[1:], acceptance=accept, vocab_size=VOCAB)
  outcome, _ = _decode(
    sch.in_pipe(width=1, in_flight=400),
    text,
    drafter,
    tokens=tokens,
    stage_s=(tick_s,) * num_stages,
    delay_s=(latency_s / (num_stages + 1),) * (num_stages + 1),
    level_s=level_s,
  )
  hits = _hits(drafter, text, tokens)[51:]
  hit = sum(hits) / len(hits)
  assert hit == pytest.approx(accept, abs=0.03)
  window = sch.lap_window(num_stages * tick_s + latency_s, tick_s)
  assert window == round(num_stages + latency_s / tick_s)
  rate = sch.in_pipe_rate(hit, window, tick_s)
  assert 1 / _pace(outcome) == pytest.approx(rate, rel=0.01)


def test_a_lap_between_two_ticks_lies_between_two_windows():
  tokens, tick_s, lap_s = 1500, 0.01, 0.085
  text = _text(tokens)
  drafter = drafters.synthetic(text[1:], acceptance=0.8, vocab_size=VOCAB)
  outcome, _ = _decode(
    sch.in_pipe(width=1, in_flight=400),
    text,
    drafter,
    tokens=tokens,
    stage_s=(tick_s,) * 2,
    delay_s=(0.025, 0.025, 0.015),
  )
  hits = _hits(drafter, text, tokens)[51:]
  hit = sum(hits) / len(hits)
  assert sch.lap_window(lap_s, tick_s) == 9
  slow, fast = (sch.in_pipe_rate(hit, w, tick_s) for w in (9, 8.5))
  assert 0.995 * slow <= 1 / _pace(outcome) <= 1.005 * fast


def _fading(first, keep):
  return lambda position, depth: (max(first * keep ** (depth - 1), 0.01),)


@pytest.mark.parametrize(("first", "keep"), [(0.8, 0.945), (0.9, 0.8)])
def test_the_levels_in_flight_chosen_are_near_the_best_of_a_sweep(first, keep):
  """Acceptance fades with every level ahead, as measured on real rings:
  .796 · .945^(i − 1)."""
  tokens = 600
  text = _text(tokens)

  def rate(policy):
    drafter = drafters.synthetic(
      text[1:], acceptance=_fading(first, keep), vocab_size=VOCAB
    )
    outcome, _ = _decode(
      policy,
      text,
      drafter,
      tokens=tokens,
      stage_s=(0.01,) * 4,
      delay_s=(0.04,) * 5,
    )
    return 1 / _pace(outcome)

  sweep = [
    rate(sch.in_pipe(width=1, in_flight=w)) for w in (1, 2, 4, 6, 8, 12, 24)
  ]
  assert rate(sch.in_pipe(width=1)) >= 0.97 * max(sweep)
