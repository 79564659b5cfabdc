# SPDX-License-Identifier: Apache-2.0
"""Continuous, rate-matched and branched drafting, and the floor under all."""

import dataclasses
import itertools
import math
import random as random_lib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.base import Anchor
from wanspec_jax.links import Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.schedules import _speculation as tree
from wanspec_jax.worlds import Driver, ReplayStage, Stall, VirtualRing, Weather

VOCAB = 500
MAX_ROWS = 64
POLICIES = {
  "take-all": lambda: sch.continuous(nodes=1, most=6, max_in_flight=1),
  "micro-steps": lambda: sch.continuous(nodes=4, max_in_flight=2),
  "whole steps": lambda: sch.continuous(nodes=3, width=3, truncate=False),
  "reactive": lambda: sch.continuous(threshold=0.2, recovery=0.3, decay=0.1),
  "branched": lambda: sch.branched(depth=4, epsilon=0.7),
  "branched-budget": lambda: sch.branched(depth=3, branches=4, decay=0.5),
  "rate_matched": lambda: sch.rate_matched(nodes=7, depth=3),
  "rate-included": lambda: sch.rate_matched(nodes=5, depth=4, included=True),
  "rate-idle": lambda: sch.rate_matched(nodes=5, depth=2, proactive=0),
}
POLICIES |= {
  f"floor, {name}": lambda make=make: sch.with_floor(make())
  for name, make in {
    **POLICIES,
    "lockstep": lambda: sch.lockstep(lambda g, t: len(g), max_nodes=6),
    "hedged": lambda: sch.hedged(depth=2, fan_out=2, launch_hedges=3),
    "in_pipe": lambda: sch.in_pipe(width=2),
    "segments": lambda: sch.segments(segment=3, initial=7, expand=5),
  }.items()
}


def _plain():
  return sch.lockstep(lambda gains, lap_s: 0, max_nodes=0)


@pytest.mark.parametrize("name", POLICIES)
@settings(derandomize=True, deadline=None, max_examples=8)
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


# The virtual world. -----------------------------------------------------------


def _decode(
  policy,
  *,
  accept,
  tokens,
  stage_s=(0.1,),
  lap_s=0.0,
  mbps=1e6,
  row_bytes=0,
  level_s=0.0,
  jitter_s=0.0,
  weather=None,
  drafter_stage=None,
  sequences=1,
):
  """Returns the outcomes; texts, drafts and faults are the same for all."""
  random = random_lib.Random(5)
  texts = {
    s: [random.randrange(VOCAB) for _ in range(tokens + 200)]
    for s in range(sequences)
  }
  models = [
    drafters.synthetic(
      texts[s][1:], acceptance=accept, vocab_size=VOCAB, seed=s
    )
    for s in texts
  ]
  drafter = models[0]._replace(
    init=lambda params, prompt, key: (key, models[key].init(None, prompt, key)),
    expand=lambda state, *args: (
      state,
      models[state[0]].expand(state[1], *args)[1],
    ),
    rebase=lambda state, root: state,
    observe=lambda state, new: (
      state[0],
      models[state[0]].observe(state[1], new),
    ),
  )
  num = len(stage_s)
  profile = StageProfile(
    buckets=(MAX_ROWS,),
    seconds=tuple((t,) for t in stage_s),
    dtype="none",
    device="modelled",
  )
  draft = sch.DraftCosts(per_level_s=level_s)
  capacity = sequences * (tokens + 1100)
  stages = [
    ReplayStage(capacity=capacity, row_bytes=row_bytes) for _ in stage_s[1:]
  ]
  stages.append(ReplayStage(capacity=capacity, texts=texts))
  ring = VirtualRing(
    stages=stages,
    hops=[
      wire.LinkShaper(
        delay_s=lap_s / (num + 1),
        bandwidth_bps=mbps * 1e6,
        jitter_s=jitter_s,
        seed=i,
      )
      for i in range(num + 1)
    ],
    profile=profile,
    draft=draft,
    weather=weather,
    drafter_stage=drafter_stage,
    trace=False,
  )
  links = Ring.uniform(
    num_stages=num, lap_s=lap_s, bandwidth_bps=mbps * 1e6, jitter_s=jitter_s
  )
  hop_bytes = hop_bytes_model(
    num_stages=num, ids_bytes_per_node=0, row_bytes=row_bytes
  )
  costs = sch.Costs.of_ring(
    links, profile, hop_bytes, max_rows=MAX_ROWS, draft=draft
  )
  engine = sch.init(policy, costs, capacity=capacity, prefill_rows=8)
  requests = [
    (
      0.0,
      sch.Request(
        prompt=(texts[s][0],), max_new_tokens=tokens, sampling=Sampling(seed=s)
      ),
    )
    for s in texts
  ]
  outcomes = ring.run(Driver(engine, drafter), requests).outcomes
  for s, text in texts.items():
    assert outcomes[s].tokens == text[1 : 1 + tokens]
  return outcomes, models, texts


def _hits(model, text, count):
  """Returns at which positions the drafter is right; position 0 first."""
  state = model.init(None, text[:1], 0)
  hits = []
  for token in text[1 : count + 1]:
    state, nodes = model.expand(state, [Anchor(0)], 1, 1)
    hits.append(int(nodes.tokens[0]) == token)
    state = model.observe(state, [token])
  return hits


@pytest.mark.parametrize(("accept", "window"), [(0.6, 4), (0.8, 8), (0.3, 2)])
def test_a_verifier_that_takes_all_walks_pipespecs_chain(accept, window):
  """Its states G (root alone) and V (root and γ tokens), walked by hand over
  the same hits: the chain whose closed form is `always_rolling`."""
  tokens = 1500
  policy = sch.continuous(nodes=1, most=window, max_in_flight=1)
  outcomes, models, texts = _decode(
    policy, accept=accept, tokens=tokens, level_s=1e-4
  )
  hits = _hits(models[0], texts[0], tokens)
  at = steps = full = 0
  is_known = False
  while at < tokens:
    most = min(window, tokens - at - 1) if is_known else 0
    taken = next((i for i in range(most) if not hits[at + i]), most)
    full += is_known
    at += taken + 1
    # Whether the target's own token is the drafter's next one.
    is_known = taken == most and hits[at - 1]
    steps += 1
  assert len(outcomes[0].rounds) == steps
  # A window of γ behind every full step, but for the text's end.
  rho, per_step = sch.always_rolling(sum(hits) / tokens, window)
  assert full / steps == pytest.approx(rho, abs=0.05)
  assert tokens / steps == pytest.approx(per_step, rel=0.05)


def test_a_stream_stays_within_a_draft_per_miss_of_dsis_bound():
  """A miss costs a lap, a hit the time of a draft: (1 + R) / (Λ + R t_d). The
  bound's drafter is killed at a miss; this one ends what it is at."""
  tokens, level_s, lap_s = 500, 0.05, 1.0
  policy = sch.continuous(nodes=1, max_in_flight=64)
  outcomes, models, texts = _decode(
    policy,
    accept=0.8,
    tokens=tokens,
    stage_s=(0.05, 0.05),
    lap_s=0.9,
    level_s=level_s,
  )
  hits = sum(_hits(models[0], texts[0], tokens - 1))
  misses = tokens - hits
  bound_s = misses * lap_s + hits * level_s
  rate = sch.stream_rate(
    hits / tokens, level_s=level_s, tick_s=0.05, lap_s=lap_s
  )
  assert tokens / bound_s == pytest.approx(rate, rel=1e-9)
  spent_s = outcomes[0].emitted_s[-1]
  assert bound_s - 1e-6 <= spent_s <= bound_s + misses * level_s


@pytest.mark.parametrize("level_s", [0.02, 0.04, 0.1])
def test_perfect_drafts_meet_picospecs_law(level_s):
  """Ω = γ + 1 tokens per max(T_draft, RTT + T_verify), where synchronous rounds
  take γ t_d + RTT + T_verify. All γ + 1 have to be drafted: the last is the
  next root."""
  window, lap_s, tokens = 4, 0.24, 400
  setting = {
    "accept": 1.0,
    "tokens": tokens,
    "stage_s": (0.04,),
    "lap_s": 0.2,
    "level_s": level_s,
  }
  policy = sch.continuous(
    nodes=window, most=window, max_in_flight=1, truncate=False
  )
  times = _decode(policy, **setting)[0][0].emitted_s
  # Steady state: the first rounds fill the drafter's stock.
  rate = (tokens - 41) / (times[-1] - times[40])
  best = sch.overlapped_rate(
    1.0, window, level_s=level_s * (window + 1) / window, lap_s=lap_s
  )
  assert rate == pytest.approx(best, rel=0.01)
  if level_s * (window + 1) <= lap_s:
    slow = sch.lockstep(lambda g, t: len(g), max_nodes=window, levels=window)
    times = _decode(slow, **setting)[0][0].emitted_s
    assert len(times) / times[-1] == pytest.approx(
      sch.synchronous_rate(1.0, window, level_s=level_s, lap_s=lap_s), rel=0.01
    )
    assert rate > len(times) / times[-1]


# Policies on trees drawn by hand. ---------------------------------------------


def _spec(*, remaining=50, slots=50):
  spec = tree.start(0, (7,), remaining)
  spec.max_new_nodes = slots
  return spec


def _add(spec, parent, *stated):
  """Adds children with these probabilities; returns their ids."""
  return [
    tree.add_child(spec, parent, 10 + i, math.log(p)).id
    for i, p in enumerate(stated)
  ]


def _chain(spec, *stated):
  """Adds a chain below the root; returns its ids."""
  at, ids = spec.root, []
  for p in stated:
    spec.nodes[at].grown = 1
    at = _add(spec, at, p)[0]
    ids.append(at)
  return ids


def _launch(spec, ids=(), *, time_s=0.0, return_s=1.0):
  ids = tuple(ids) if spec.root_launched else (spec.root, *ids)
  spec.launches += 1
  for node in ids:
    spec.nodes[node].run = len(spec.flights)
  spec.flights.append(
    sch.Flight(
      run=len(spec.flights),
      ids=ids,
      launched_s=time_s,
      tail_s=return_s,
      return_s=return_s,
    )
  )


def _pipe(level_s=0.0, lap_s=1.0):
  costs = sch.Costs.constant(lap_s, max_rows=MAX_ROWS)
  draft = sch.DraftCosts(per_level_s=level_s)
  pipe = sch.Pipe(dataclasses.replace(costs, draft=draft))
  pipe.num_sequences = 1
  return pipe


def test_a_new_root_never_waits_for_a_draft():
  policy = sch.continuous(nodes=4)
  assert policy.decide(_spec(), _pipe(level_s=1.0), 0.0) == sch.Send(())
  spec = _spec()
  some = _chain(spec, 0.9, 0.8)
  assert policy.decide(spec, _pipe(), 0.0) == sch.Send(tuple(some))


@pytest.mark.parametrize(
  ("launches", "misses", "bar"),
  [(1, 0, 0.3), (2, 0, 0.4), (3, 0, 0.5), (3, 4, 0.3), (1, 9, 0.0)],
)
def test_the_threshold_reacts(launches, misses, bar):
  """0.3 + 0.1 i − 0.05 r: below it the drafter stops and what is there goes."""
  policy = sch.continuous(nodes=4, threshold=0.3, recovery=0.1, decay=0.05)
  for q in (0.25, 0.35, 0.45, 0.55):
    spec = _spec()
    _launch(spec)
    first, _ = _chain(spec, 0.99, q)
    spec.launches, spec.misses = launches, misses
    answer = policy.decide(spec, _pipe(), 0.0)
    if q < bar:
      assert answer == sch.Send((first,))
      _launch(spec, [first])
      spec.launches = launches
      assert policy.decide(spec, _pipe(), 0.0) is None
    else:
      assert isinstance(answer, sch.Grow)


@pytest.mark.parametrize("truncate", [True, False])
def test_a_lagging_micro_step_is_cut(truncate):
  """Two of four are there; the next would come after the verdict."""
  policy = sch.continuous(nodes=4, truncate=truncate)
  spec = _spec()
  _launch(spec, return_s=1.0)
  ids = _chain(spec, 0.9, 0.9)
  assert isinstance(policy.decide(spec, _pipe(0.2), 0.7), sch.Grow)
  answer = policy.decide(spec, _pipe(0.2), 0.85)
  if truncate:
    assert answer == sch.Send(tuple(ids))
  else:
    assert isinstance(answer, sch.Grow)


def test_runs_in_flight_are_bounded_and_a_stock_is_kept():
  policy = sch.continuous(nodes=1, most=3, max_in_flight=1)
  spec = _spec()
  _launch(spec)
  for _ in range(4):  # three tokens, and the next root
    answer = policy.decide(spec, _pipe(), 0.0)
    assert isinstance(answer, sch.Grow)
    at = answer.anchors[0].id
    spec.nodes[at].grown = 1
    _add(spec, at, 0.9)
  assert policy.decide(spec, _pipe(), 0.0) is None
  spec.flights.clear()
  assert len(policy.decide(spec, _pipe(), 0.0).ids) == 3


@pytest.mark.parametrize(
  ("stated", "sent", "count"),
  [
    ((0.9, 0.8, 0.3, 0.9), 2, 2),  # ⌊3 · 0.7⌋ at the third token
    ((0.05, 0.9, 0.9, 0.9), 0, 2),  # ⌊3 · 0.95⌋ at the first
    ((0.9, 0.39, 0.9, 0.9), 1, 1),  # ⌊3 · 0.61⌋
  ],
)
def test_specbranch_branches_where_the_drafter_is_unsure(stated, sent, count):
  policy = sch.branched(depth=4, branches=3, epsilon=0.4)
  spec = _spec()
  ids = _chain(spec, *stated)
  chain = policy.decide(spec, _pipe(), 0.0)
  assert chain == sch.Send(tuple(ids[:sent]))
  point = ids[sent - 1] if sent else spec.root
  # Less likely ones than the chain's own token.
  others = [
    tree.add_child(spec, point, 90 + i, math.log(p)).id
    for i, p in enumerate((0.04, 0.03, 0.02))
  ]
  _launch(spec, ids[:sent])
  spec.nodes[ids[-1]].grown = 1
  answer = policy.decide(spec, _pipe(), 0.0)
  # The chain's own branch is long enough where three tokens or more follow.
  branches = [ids[sent], *others][:count]
  expected = [n for n in branches if n != ids[sent]]
  if isinstance(answer, sch.Grow):
    assert [a.id for a in answer.anchors if a.id in branches] == expected
  else:
    assert not expected


def test_a_verdict_on_a_branch_retains_it():
  policy = sch.branched(depth=2, branches=3, epsilon=0.5)
  spec = _spec()
  spec.nodes[spec.root].grown = 8
  first, second = _add(spec, spec.root, 0.2, 0.15)
  _launch(spec)  # unsure at once: the root alone
  leaf = _add(spec, second, 0.9)[0]
  last = _add(spec, leaf, 0.9)[0]
  spec.flights.clear()
  tree.commit_tokens(spec, (spec.nodes[second].token,))
  assert first not in spec.nodes
  assert policy.decide(spec, _pipe(), 0.0) == sch.Send((leaf, last))


def test_acespecs_budget_falls_geometrically():
  policy = sch.branched(depth=4, branches=4, decay=0.5)
  spec = _spec()
  ids = _chain(spec, 0.5, 0.5, 0.5)
  assert isinstance(policy.decide(spec, _pipe(), 0.0), sch.Grow)
  ids += _add(spec, ids[-1], 0.5)
  answer = policy.decide(spec, _pipe(), 0.0)
  assert answer == sch.Send(tuple(ids))
  _launch(spec, ids, return_s=1.0)
  branches = []
  for k, node in enumerate([spec.root, *ids]):
    spec.nodes[node].grown = 8
    extra = [
      tree.add_child(spec, node, 50 + i, math.log(0.05)).id for i in range(6)
    ]
    branches.append(extra[: [4, 2, 1, 0, 0][k]])
  # ⌊η³ 4 + ½⌋ is 0 or 1, halves to even; the best one behind the last stays.
  behind = [n for n in spec.below[ids[-1]]][:1]
  answer = policy.decide(spec, _pipe(0.1), 0.5)
  assert isinstance(answer, sch.Grow)
  assert [a.id for a in answer.anchors] == [
    *itertools.chain(*branches),
    *behind,
  ]
  # A level that would not be done when the verdict is due is not begun.
  assert policy.decide(spec, _pipe(0.1), 0.95) is None


@pytest.mark.parametrize(
  ("level_s", "target_s", "levels"),
  [
    (0.011, None, 90),  # ⌊1 / 0.011⌋ on a WAN
    (0.4, None, 2),
    (3.0, None, 1),
    (0.1, 1.75, 7),  # (T_v − RTT) / t_d = 0.75 / 0.1
    (0.1, 0.5, 1),  # T_v below RTT
  ],
)
def test_specedges_depth(level_s, target_s, levels):
  policy = sch.rate_matched(target_s=target_s)
  answer = policy.decide(_spec(), _pipe(level_s), 0.0)
  assert (answer.budget, answer.levels) == (32, levels)


@pytest.mark.parametrize("included", [True, False])
def test_specedge_expands_below_the_likeliest_leaf_and_token(included):
  policy = sch.rate_matched(nodes=6, depth=4, proactive=2, included=included)
  spec = _spec()
  spec.nodes[spec.root].grown = 6
  left, right = _add(spec, spec.root, 0.55, 0.45)
  spec.nodes[left].grown = spec.nodes[right].grown = 6
  deep = _add(spec, left, 0.5, 0.4)  # paths of 0.275 and 0.22, right has 0.45
  spec.drafted_root = spec.root
  answer = policy.decide(spec, _pipe(0.1), 0.0)
  assert set(answer.ids) == {left, right, *deep}
  _launch(spec, [left, right, *deep])
  spec.nodes[right].grown = None
  answer = policy.decide(spec, _pipe(0.1), 0.0)
  assert {a.id for a in answer.anchors} == {right, *deep}
  assert (answer.budget, answer.levels) == (3, 1)
  for node in (right, *deep):
    spec.nodes[node].grown = 3
  _add(spec, deep[0], 0.9)
  head = _add(spec, right, 0.8)[0]  # 0.36 beats 0.275 · 0.9
  at = head
  for _ in range(2):
    answer = policy.decide(spec, _pipe(0.1), 0.0)
    assert [a.id for a in answer.anchors] == [at]
    spec.nodes[at].grown = 6
    at = _add(spec, at, 0.9)[0]
  assert policy.decide(spec, _pipe(0.1), 0.0) is None
  # Complete alignment: the leaf and the token.
  spec.flights.clear()
  tokens = (spec.nodes[right].token, spec.nodes[head].token)
  tree.commit_tokens(spec, tokens)
  answer = policy.decide(spec, _pipe(0.1), 0.0)
  assert [a.id for a in answer.anchors] == [at]
  assert answer.levels == (2 if included else 4)


def test_a_misaligned_verdict_drafts_anew():
  policy = sch.rate_matched(nodes=6, depth=3)
  spec = _spec()
  ids = _chain(spec, 0.9, 0.9)
  _launch(spec, ids[:1])
  spec.flights.clear()
  tree.commit_tokens(spec, (99,))
  answer = policy.decide(spec, _pipe(0.1), 0.0)
  assert ([a.id for a in answer.anchors], answer.levels) == ([spec.root], 3)


# The floor. -------------------------------------------------------------------


def test_a_pipe_foresees_what_a_run_does_to_the_next():
  costs = sch.Costs(
    delay_s=(0.1, 0.1),
    busy_s=lambda rows: (0.0, 0.05 * rows, 0.0),
    max_rows=8,
  )
  pipe = sch.Pipe(costs)
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
  costs = sch.Costs(
    delay_s=(0.1, 0.1),
    busy_s=lambda rows: (0.0, 0.8 * rows, 0.0),
    max_rows=16,
  )
  pipe = sch.Pipe(costs)
  pipe.num_sequences = 1
  spec = _spec()
  ids = tuple(_chain(spec, *[0.9] * 8))
  policy = _floored(lambda spec: sch.Send(ids))
  assert policy.decide(spec, pipe, 0.0) == sch.Send(ids[:3])
  family = sch.with_floor(
    sch.Policy("f", lambda *_: sch.Send(ids), 1, keeps_children=True)
  )
  twin = tree.add_child(spec, ids[1], 99, math.log(0.05)).id
  # Three are affordable, but that would part the last two.
  ids = (ids[0], ids[1], ids[2], twin)
  assert family.decide(spec, pipe, 0.0) == sch.Send(ids[:2])
  ids = (ids[0], twin_of_first := tree.add_child(spec, spec.root, 98, -3.0).id)
  ids = (ids[0], *_add(spec, ids[0], 0.5), twin_of_first)
  assert family.decide(spec, pipe, 0.0) == sch.Send((ids[0], ids[2], ids[1]))


def test_the_root_waits_for_a_draft_as_long_as_the_purse_lasts():
  pipe = _pipe(level_s=0.5)
  spec = _spec()
  wants = [None]
  policy = _floored(lambda spec: wants[0])
  _launch(spec, return_s=1.0)
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
  "lockstep": lambda: sch.lockstep(lambda g, t: len(g), max_nodes=12),
  "continuous": lambda: sch.continuous(nodes=2, width=2),
  "hedged": lambda: sch.hedged(depth=3, fan_out=2, launch_hedges=3),
  "branched": lambda: sch.branched(),
  "in_pipe": lambda: sch.in_pipe(width=4),
  "segments": lambda: sch.segments(segment=8),
  "rate_matched": lambda: sch.rate_matched(),
}


def _time_s(policy, *, skip=32, **setting):
  outcomes = _decode(policy, **setting)[0]
  return sum(o.emitted_s[-1] - o.emitted_s[skip] for o in outcomes.values())


@pytest.mark.parametrize("place", _HARD)
def test_no_hopeless_drafter_slows_any_policy(place):
  setting = {"accept": [1e-6, 1e-7], "tokens": 64, **_HARD[place]}
  plain = _time_s(_plain(), **setting)
  for name, make in _INNER.items():
    floored = _time_s(sch.with_floor(make()), **setting)
    assert floored <= plain / 0.95, name


@pytest.mark.parametrize("place", ["slow link", "stage-bound"])
@pytest.mark.parametrize("name", _INNER)
def test_a_policy_that_pays_keeps_its_gain(place, name):
  setting = {"accept": [0.8, 0.08], "tokens": 128, **_HARD[place]}
  plain = _time_s(_plain(), **setting)
  bare = plain / _time_s(_INNER[name](), **setting)
  floored = plain / _time_s(sch.with_floor(_INNER[name]()), **setting)
  assert floored >= 0.95
  if bare > 1:
    assert floored - 1 >= 0.97 * (bare - 1)


def test_the_weather_is_not_the_policys_fault():
  """A stall of 40 laps does not end the speculation."""
  setting = {"accept": 0.8, "tokens": 192, "stage_s": (0.01,), "lap_s": 0.04}
  weather = Weather(stalls=(Stall(1, 1.0, 3.0),))
  make = _INNER["continuous"]
  calm = _time_s(sch.with_floor(make()), skip=0, **setting)
  bad = _time_s(sch.with_floor(make()), skip=0, weather=weather, **setting)
  assert bad <= calm + 2.0 + 2 * 0.05


def test_bad_arguments_are_named():
  for make, what in (
    (lambda: sch.continuous(nodes=0), "nodes = 0"),
    (lambda: sch.continuous(nodes=4, most=2), "most = 2"),
    (lambda: sch.branched(depth=0), "depth = 0"),
    (lambda: sch.branched(decay=1.5), r"decay = 1\.5"),
    (lambda: sch.rate_matched(depth=0), "depth = 0"),
    (lambda: sch.rate_matched(proactive=-1), "proactive = -1"),
    (lambda: sch.with_floor(_plain(), share=0.0), r"share = 0\.0"),
    (lambda: sch.with_floor(_plain(), learning=-1), "learning = -1"),
  ):
    with pytest.raises(ValueError, match=what):
      make()
