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
  capacity=1024,
  records=False,
):
  """Returns the outcome, and every run as the head saw it, if asked for."""
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
  if records:
    stages[0] = bench.Recorder(stages[0])
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
  return outcome, list(stages[0].rows.values()) if records else []


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


def _pace(outcome, skip=20):
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
  """(R + 1) / ((R + W) τ), W the lap in ticks; R from the drafts themselves.

  A hit comes a tick after the token before, a miss a lap after it: the share of
  hits fixes the rate, however long the text is.
  """
  tokens, tick_s = 140, 0.01
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
  hits = _hits(drafter, text, tokens)[20:-1]
  hit = sum(hits) / len(hits)
  assert hit == pytest.approx(accept, abs=0.1)
  window = sch.lap_window(num_stages * tick_s + latency_s, tick_s)
  assert window == round(num_stages + latency_s / tick_s)
  rate = sch.in_pipe_rate(hit, window, tick_s)
  assert 1 / _pace(outcome) == pytest.approx(rate, rel=0.01)


def test_a_lap_between_two_ticks_lies_between_two_windows():
  tokens, tick_s, lap_s = 300, 0.01, 0.085
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
  hits = _hits(drafter, text, tokens)[20:-1]
  hit = sum(hits) / len(hits)
  assert sch.lap_window(lap_s, tick_s) == 9
  slow, fast = (sch.in_pipe_rate(hit, w, tick_s) for w in (9, 8.5))
  assert 0.995 * slow <= 1 / _pace(outcome) <= 1.005 * fast


def test_a_slow_drafter_sets_the_pace_of_the_levels():
  """A level per draft then, on a ring that could take more. A lap is ten of
  them: no miss finds the drafter in the middle of one."""
  tokens, level_s = 300, 0.015
  text = _text(tokens)
  drafter = drafters.synthetic(text[1:], acceptance=0.8, vocab_size=VOCAB)
  outcome, _ = _decode(
    sch.in_pipe(width=1, in_flight=400),
    text,
    drafter,
    tokens=tokens,
    stage_s=(0.01,) * 2,
    delay_s=(0.04, 0.04, 0.05),
    level_s=level_s,
  )
  hits = _hits(drafter, text, tokens)[20:-1]
  rate = sch.stream_rate(
    sum(hits) / len(hits), level_s=level_s, tick_s=0.01, lap_s=0.15
  )
  assert 1 / _pace(outcome) == pytest.approx(rate, rel=0.01)


def _fading(first, keep):
  return lambda position, depth: (max(first * keep ** (depth - 1), 0.01),)


@pytest.mark.parametrize(("first", "keep"), [(0.8, 0.945), (0.9, 0.8)])
def test_the_levels_in_flight_chosen_are_near_the_best_of_a_sweep(first, keep):
  """Acceptance fades with every level ahead, as measured on real rings:
  .796 · .945^(i − 1)."""
  tokens = 120
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

  sweep = [rate(sch.in_pipe(width=1, in_flight=w)) for w in (2, 4, 8, 24)]
  assert rate(sch.in_pipe(width=1)) >= 0.97 * max(sweep)


def test_filling_is_forced_past_what_the_closed_form_wants():
  """A hopeless level is held back, and sent if the pipe is to be full."""
  costs = sch.Costs(
    delay_s=(0.05, 0.05),
    busy_s=lambda rows: (0.0, 0.01, 0.0),
    max_rows=MAX_ROWS,
  )
  spec = start(0, (9,), 100)
  spec.max_new_nodes = 50
  chain = Nodes(
    np.arange(12, dtype=np.int32),
    np.arange(12, dtype=np.int32),
    np.full(12, math.log(0.3), np.float32),
  )
  add_nodes(spec, (spec.anchor(spec.root),), chain)
  sent = {}
  for fill in (False, True):
    for node in spec.nodes.values():
      node.run = 0 if node.id == spec.root else None
    policy = sch.in_pipe(width=1, fill=fill)
    count = 0
    while True:
      answer = policy.decide(spec, sch.Pipe(costs), 0.0)
      if not isinstance(answer, sch.Send):
        break
      (node,) = answer.ids
      spec.nodes[node].run = 1
      count += 1
    sent[fill] = count
  assert sent[True] == 11 - 1  # a lap has 11 ticks, the root takes one
  # By enumeration: the rate with W levels, from what each of them brings.
  rates = {
    w: sch.window_rates(lambda i: 0.3, lap_s=0.11, tick_s=0.01)[w - 1]
    for w in range(1, 9)
  }
  best = max(rates.values())
  assert sent[False] == min(w for w in rates if rates[w] >= 0.999 * best) - 1


def test_a_level_is_the_likeliest_nodes_of_one_depth():
  """Paths compete across parents; what is left of a level is passed over."""
  spec = start(0, (9,), 100)
  spec.max_new_nodes = 50
  root = spec.nodes[spec.root]
  root.run = 0
  pipe = sch.Pipe(bench.costs(MAX_ROWS))
  policy = sch.in_pipe(width=2, children=3)
  answer = policy.decide(spec, pipe, 0.0)
  assert answer == sch.Grow((Anchor(root.id),), 3, 1)
  first = Nodes(
    np.array([1, 2, 3], np.int32),
    np.zeros(3, np.int32),
    np.log([0.2, 0.5, 0.3]).astype(np.float32),
  )
  add_nodes(spec, (spec.anchor(root.id),), first)
  root.grown = 3
  one, two, three = (spec.children[root.id, t] for t in (1, 2, 3))
  assert policy.decide(spec, pipe, 0.0) == sch.Send((two, three))
  spec.nodes[two].run = spec.nodes[three].run = 1
  # Node `one` waits, and is not sent: the level below is next.
  answer = policy.decide(spec, pipe, 0.0)
  assert isinstance(answer, sch.Grow)
  assert [a.id for a in answer.anchors] == [two, three]
  assert (answer.budget, answer.levels) == (6, 1)
  second = Nodes(
    np.array([4, 5, 6], np.int32),
    np.array([0, 1, 1], np.int32),
    np.log([0.3, 0.8, 0.1]).astype(np.float32),  # .15, .24, .03
  )
  add_nodes(spec, answer.anchors, second)
  four, five = spec.children[two, 4], spec.children[three, 5]
  assert policy.decide(spec, pipe, 0.0) == sch.Send((five, four))
  assert spec.nodes[one].run is None


# Hedges. ----------------------------------------------------------------------


class _Hand:
  """An engine stepped by hand, with what it launches and asks for."""

  def __init__(self, policy):
    self.engine = sch.init(
      policy, bench.costs(MAX_ROWS), capacity=100, prefill_rows=8
    )
    self.draft = None
    self.runs = []
    request = sch.Request(prompt=(7,), max_new_tokens=50)
    self.hear(sch.Submitted(time_s=0.0, sequence=0, request=request))

  def hear(self, event):
    """Returns the tokens of each run that the event launches."""
    self.engine, actions = sch.step(self.engine, event)
    new = [a.run for a in actions if isinstance(a, sch.Launch)]
    self.runs += new
    for action in actions:
      if isinstance(action, sch.Draft):
        self.draft = action
    return [tuple(run.tokens.tolist()) for run in new]

  def answer(self, *children):
    """Answers the draft: `(anchor's row, token, probability)` of each node."""
    draft, self.draft = self.draft, None
    nodes = Nodes(
      np.array([c[1] for c in children], np.int32),
      np.array([c[0] for c in children], np.int32),
      np.log([c[2] for c in children]).astype(np.float32),
    )
    return self.hear(
      sch.Drafted(
        time_s=0.0,
        sequence=0,
        ticket=draft.ticket,
        anchors=draft.anchors,
        nodes=nodes,
      )
    )

  def verdict(self, run, *tokens):
    verdict = Verdict(sequence=0, tokens=tokens)
    returned = Returned(run_id=run.run_id, epoch=0, verdicts=(verdict,))
    return self.hear(sch.Arrived(time_s=0.0, returned=returned))

  @property
  def asked(self):
    """Paths of the anchors of the draft that is asked for."""
    return [a.path for a in self.draft.anchors]


def _hedged_round(**options):
  """Returns a chain of two in flight with all its hedges one level deep."""
  hand = _Hand(sch.hedged(depth=2, fan_out=(1, 1, 2), **options))
  if not options.get("redraft", True):
    assert [r.tokens.tolist() for r in hand.runs] == [[7]]
  assert hand.asked == [()]
  assert (hand.draft.budget, hand.draft.levels) == (3, 1)
  assert hand.answer((0, 1, 0.6), (0, 2, 0.2), (0, 3, 0.1)) == []
  assert hand.asked == [(1,)]
  launched = hand.answer((0, 4, 0.6), (0, 5, 0.3))
  assert launched == [(7, 1, 4) if options.get("redraft", True) else (1, 4)]
  # One guess for k = 0 besides token 1, one for k = 1 besides 4; of what lies
  # below 4, nothing is known.
  assert hand.asked == [(1, 4), (2,), (1, 5)]
  assert hand.draft.budget == 3 * 3
  hand.answer((0, 6, 0.2), (0, 8, 0.5), (0, 9, 0.3), (1, 10, 0.9), (2, 11, 0.8))
  # Nothing is left out for k = K: the two likeliest. The others go on.
  assert sorted(hand.asked) == [(1, 4, 8), (1, 4, 9), (1, 5, 11), (2, 10)]
  return hand


def test_a_verdict_that_hits_launches_what_was_kept_for_it():
  hand = _hedged_round()
  assert hand.verdict(hand.runs[0], 1, 5) == [(5, 11)]


def test_the_last_outcome_hits_though_its_chain_is_not_drafted_yet():
  hand = _hedged_round()
  rows = {path: i for i, path in enumerate(hand.asked)}
  launched = hand.answer(
    (rows[1, 4, 9], 12, 0.5),
    (rows[1, 4, 8], 13, 0.5),
    (rows[1, 5, 11], 14, 0.5),
  )
  assert launched == []
  assert hand.verdict(hand.runs[0], 1, 4, 9) == [(9, 12)]


def test_a_miss_drafts_anew_before_the_root_is_launched():
  hand = _hedged_round()
  assert hand.verdict(hand.runs[0], 1, 77) == []
  # The drafter is still at the hedges, all of them dead by now.
  assert hand.answer((0, 20, 0.5)) == []
  assert hand.asked == [()]
  assert hand.answer((0, 21, 0.5), (0, 22, 0.3)) == []
  assert hand.answer((0, 23, 0.5)) == [(77, 21, 23)]


def test_a_miss_may_launch_the_root_at_once():
  hand = _hedged_round(redraft=False)
  # The root's own run says token 1, then the chain's run a miss behind it.
  assert hand.verdict(hand.runs[0], 1) == []
  assert hand.verdict(hand.runs[1], 77) == [(77,)]
  assert hand.answer((0, 20, 0.5)) == []
  hand.answer((0, 21, 0.5), (0, 22, 0.3))
  assert hand.answer((0, 23, 0.5)) == [(21, 23)]


def test_hedges_may_be_launched_before_the_verdict():
  """Likeliest first, parents before children; a hit then goes on from there."""
  hand = _Hand(sch.hedged(depth=1, fan_out=(1, 2), launch_hedges=2))
  launched = hand.answer((0, 1, 0.6), (0, 2, 0.3))
  assert launched == [(7, 1), (2,)]
  assert hand.asked == [(1,), (2,)]
  # .42 for (1, 3), .27 for (2, 5), .12 for (1, 4).
  launched = hand.answer((0, 3, 0.7), (0, 4, 0.2), (1, 5, 0.9))
  assert launched == [(3, 5), (4,)]
  assert hand.verdict(hand.runs[0], 2) == []
  spec = hand.engine.sequences[0].spec
  assert spec.root_launched and spec.depth(spec.children[spec.root, 5]) == 1


def _walk(hits, *, depth, lap_s, level_s, hedged):
  """Returns the time of a text in rounds of chains, from its hits alone."""
  at, time_s = 0, 0.0
  is_ready = False
  while at < len(hits):
    time_s += lap_s + (0.0 if is_ready else depth * level_s)
    kept = 0
    while kept < depth and at + kept < len(hits) and hits[at + kept]:
      kept += 1
    at += kept + 1
    is_ready = hedged and kept == depth and all(hits[at - 1 : at])
  return time_s


@pytest.mark.parametrize("accept", [0.7, 0.95])
def test_a_hit_saves_the_time_of_drafting_and_a_miss_pays_it(accept):
  """A drafter with one guess per token keeps a chain for one outcome: all
  accepted, and the next token too. The text ends on a full round."""
  tokens, depth, level_s = 400, 4, 0.01
  text = _text(tokens)
  drafter = drafters.synthetic(text[1:], acceptance=accept, vocab_size=VOCAB)
  outcome, _ = _decode(
    sch.hedged(depth=depth, fan_out=1),
    text,
    drafter,
    tokens=tokens,
    stage_s=(0.02,),
    delay_s=(0.04, 0.04),
    level_s=level_s,
  )
  hits = _hits(drafter, text, tokens + 50)
  times = [
    _walk(hits[:n], depth=depth, lap_s=0.1, level_s=level_s, hedged=True)
    for n in (tokens - 10, tokens)
  ]
  assert times[0] <= outcome.total_s <= times[1] + 1e-6
  slower = _walk(hits, depth=depth, lap_s=0.1, level_s=level_s, hedged=False)
  assert outcome.total_s < slower


# Fan-out. ---------------------------------------------------------------------

_LAW = sch.Law(accept=0.8, power=0.7)


def test_the_fan_out_is_the_published_vector():
  fan_out = sch.geometric_fan_out(_LAW, length=4, budget=30)
  assert fan_out == pytest.approx([6.19, 5.43, 4.76, 4.18, 9.44], abs=0.005)
  miss = sch.miss_probability(_LAW, fan_out)
  assert miss == pytest.approx(0.270436, abs=5e-7)
  uniform = sch.miss_probability(_LAW, [6.0] * 5)
  assert uniform == pytest.approx(0.285295, abs=5e-7)
  assert sch.whole_fan_out(fan_out) == (6, 5, 5, 4, 10)


@pytest.mark.parametrize("accept", [0.3, 0.8, 0.95])
@pytest.mark.parametrize("power", [0.3, 1.5])
@pytest.mark.parametrize("length", [0, 1, 5])
def test_the_fan_out_is_the_constrained_minimum(accept, power, length):
  """Descent on the simplex from the uniform split arrives at it."""
  law, budget = sch.Law(accept=accept, power=power), 4.0 * (length + 1)
  weights = [accept**k * (1 - accept) for k in range(length)]
  weights.append(accept**length)

  def miss(split):
    return sum(w * f**-power for w, f in zip(weights, split, strict=True))

  split = [4.0] * (length + 1)
  step = 1.0
  while step > 1e-7:  # moves of `step` guesses from one outcome to another
    moves = []
    for i, j in itertools.permutations(range(length + 1), 2):
      if split[i] > step:
        moved = list(split)
        moved[i] -= step
        moved[j] += step
        moves.append(moved)
    better = min(moves, key=miss, default=split)
    if miss(better) < miss(split):
      split = better
    else:
      step /= 2
  fan_out = sch.geometric_fan_out(law, length=length, budget=budget)
  assert fan_out.sum() == pytest.approx(budget)
  assert fan_out == pytest.approx(split, abs=1e-3)
  assert sch.miss_probability(law, fan_out) <= miss(split) + 1e-9


@settings(derandomize=True, deadline=None)
@given(st.lists(st.floats(0, 9), min_size=1, max_size=8), st.integers(0, 2**32))
def test_whole_fan_outs_stay_within_one_of_the_real_ones(real, seed):
  random = random_lib.Random(seed)
  real = [f + 1.0 for f in real]
  total = math.ceil(sum(real)) + random.randint(0, 3)
  real = [f * total / sum(real) for f in real]
  whole = sch.whole_fan_out(real)
  assert sum(whole) == total and min(whole) >= 1
  assert all(abs(w - f) <= 1 for w, f in zip(whole, real, strict=True))


def test_a_share_below_one_guess_is_paid_for_by_the_others():
  whole = sch.whole_fan_out([0.1, 0.2, 3.7])
  assert whole == (1, 1, 2)


def _compositions(total, parts, most):
  if parts == 1:
    return [(total,)] if 1 <= total <= most else []
  return [
    (first, *rest)
    for first in range(1, min(most, total) + 1)
    for rest in _compositions(total - first, parts - 1, most)
  ]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_the_measured_fan_out_is_the_best_of_all(seed):
  random = random_lib.Random(seed)
  length, ranks = random.randint(0, 3), random.randint(2, 6)
  weights = [random.random() for _ in range(length + 1)]
  histogram = [
    sorted((random.random() for _ in range(ranks)), reverse=True)
    for _ in weights
  ]
  budget = random.randint(length + 1, (length + 1) * ranks)

  def hits(fan_out):
    return sum(
      w * sum(row[:f])
      for w, row, f in zip(weights, histogram, fan_out, strict=True)
    )

  best = max(hits(f) for f in _compositions(budget, length + 1, ranks))
  fan_out = sch.measured_fan_out(weights, histogram, budget=budget)
  assert sum(fan_out) == budget
  assert hits(fan_out) == pytest.approx(best, abs=1e-12)


def test_the_measured_fan_out_of_a_power_law_is_near_the_closed_form():
  """hit(F) = 1 − F^{−r}, as a histogram; whole numbers cost little."""
  length, budget = 4, 30
  misses = np.arange(1, 40, dtype=np.float64) ** -_LAW.power
  row = -np.diff(np.concatenate([[1.0], misses]))
  weights = sch.outcome_weights(_LAW.accept, length)
  assert weights.sum() == pytest.approx(1)
  fan_out = sch.measured_fan_out(weights, [row] * 5, budget=budget)
  real = sch.geometric_fan_out(_LAW, length=length, budget=budget)
  assert np.abs(np.array(fan_out) - real).max() < 1
  best = min(
    sch.miss_probability(_LAW, f) for f in _compositions(budget, 5, 14)
  )
  assert sch.miss_probability(_LAW, fan_out) == pytest.approx(best)
  assert best >= sch.miss_probability(_LAW, real)


def test_a_rank_that_pays_late_is_still_reached():
  """The second guess at outcome 0 is worthless and the third a certain hit."""
  fan_out = sch.measured_fan_out(
    [0.5, 0.5], [[0.1, 0.0, 0.9], [0.3, 0.2, 0.1]], budget=5
  )
  assert fan_out == (3, 2)


@pytest.mark.parametrize(
  ("call", "match"),
  [
    (lambda: sch.geometric_fan_out(_LAW, length=-1, budget=3), "length = -1"),
    (lambda: sch.miss_probability(sch.Law(1.0, 1.0), [1, 2]), "accept = 1.0"),
    (lambda: sch.miss_probability(_LAW, [1, 0]), "must be positive"),
    (lambda: sch.whole_fan_out([0.5, 0.5]), "budget = 1"),
    (lambda: sch.measured_fan_out([1.0], [[0.5], [0.5]], budget=2), "shape"),
    (lambda: sch.hedged(depth=2, fan_out=(1, 2)), "fan_out"),
    (lambda: sch.in_pipe(width=0), "width = 0"),
    (lambda: sch.segments(segment=0), "segment = 0"),
    (lambda: sch.in_pipe_rate(1.2, 3, 0.1), "hit = 1.2"),
    (lambda: sch.lap_window(0.1, 0.0), "tick_s = 0.0"),
  ],
)
def test_what_makes_no_sense_is_refused_by_name(call, match):
  with pytest.raises(ValueError, match=match):
    call()


# Segments. --------------------------------------------------------------------


def _segments_spec():
  """Returns a launched root with two chains: .7 .49 .343 and .2 .18 .162."""
  spec = start(0, (9,), 100)
  spec.max_new_nodes = 50
  spec.nodes[spec.root].run = 0
  spec.drafted_root = spec.root
  spec.nodes[spec.root].grown = 7
  nodes = Nodes(
    np.array([1, 2, 3, 4, 5, 6], np.int32),
    np.array([0, 1, 2, 0, 4, 5], np.int32),
    np.log([0.7, 0.7, 0.7, 0.2, 0.9, 0.9]).astype(np.float32),
  )
  add_nodes(spec, (spec.anchor(spec.root),), nodes)
  return spec


def test_segments_go_in_the_order_of_their_scores():
  spec, pipe = _segments_spec(), sch.Pipe(bench.costs(MAX_ROWS))
  policy = sch.segments(segment=2, top_k=0)
  sent = []
  while True:
    answer = policy.decide(spec, pipe, 0.0)
    if not isinstance(answer, sch.Send):
      break
    sent.append([spec.nodes[n].token for n in answer.ids])
    for node in answer.ids:
      spec.nodes[node].run = len(sent)
  assert answer is None
  assert sent == [[1, 2], [3, 4], [5, 6]]


def test_a_verdict_keeps_what_is_below_and_the_draft_adds_to_it():
  spec, pipe = _segments_spec(), sch.Pipe(bench.costs(MAX_ROWS))
  policy = sch.segments(segment=2, expand=5, levels=3, top_k=0)
  first = policy.decide(spec, pipe, 0.0)
  assert isinstance(first, sch.Send)
  for node in first.ids:
    spec.nodes[node].run = 1
  one, two = first.ids
  commit_tokens(spec, (1,))
  assert spec.root == one and spec.nodes[two].run == 1
  three = spec.children[two, 3]
  assert [n.token for n in spec.unlaunched()] == [3]
  # The tree below the new root is drafted again; what is known stays.
  answer = policy.decide(spec, pipe, 0.0)
  assert answer == sch.Grow((Anchor(one),), 5, 3)
  again = Nodes(
    np.array([2, 3, 7, 8], np.int32),
    np.array([0, 1, 0, 2], np.int32),
    np.log([0.7, 0.7, 0.25, 0.6]).astype(np.float32),
  )
  add_nodes(spec, answer.anchors, again)
  spec.drafted_root = spec.root
  assert spec.children[one, 2] == two and spec.children[two, 3] == three
  seven, eight = spec.children[one, 7], spec.children[three, 8]
  # .49 for 3, .294 for 8, .25 for 7; 2 is under way.
  assert policy.decide(spec, pipe, 0.0) == sch.Send((three, eight))
  spec.nodes[three].run = spec.nodes[eight].run = 2
  assert policy.decide(spec, pipe, 0.0) == sch.Send((seven,))
  # A miss begins anew: the root waits for its tree.
  commit_tokens(spec, (99,))
  answer = policy.decide(spec, pipe, 0.0)
  assert answer == sch.Grow((Anchor(spec.root),), 80, 3)


def test_segments_fill_the_pipe_and_outrun_one_tree_in_lockstep():
  text = _text(150)

  def seconds(policy):
    drafter = drafters.synthetic(
      text[1:], acceptance=(0.7, 0.15, 0.05), vocab_size=VOCAB
    )
    outcome, runs = _decode(
      policy,
      text,
      drafter,
      tokens=150,
      stage_s=(0.01,) * 6,
      records=True,
    )
    assert max(run.num_rows for run in runs) <= 16
    return outcome.decode_s

  tree = sch.lockstep(lambda gains, lap_s: len(gains), max_nodes=15)
  assert seconds(sch.segments()) < seconds(tree)


# Closed forms. ----------------------------------------------------------------


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
