# SPDX-License-Identifier: Apache-2.0
"""Continuous, rate-matched and branched drafting."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.schedules import bench, hand, virtual
from tests.schedules.policies import DRAFTING
from wanspec_jax import schedules as sch
from wanspec_jax.schedules import _speculation as tree


@pytest.mark.parametrize("name", DRAFTING)
@bench.examples(8)
@given(seed=st.integers(0, 2**32))
def test_any_interleaving_gives_the_plain_text(name, seed):
  bench.check_any_interleaving(DRAFTING[name](), seed, max_rows=[6, 16])


# The virtual world. -----------------------------------------------------------


@pytest.mark.parametrize(("accept", "window"), [(0.6, 4), (0.8, 8), (0.3, 2)])
def test_a_verifier_that_takes_all_walks_pipespecs_chain(accept, window):
  """Its states G (root alone) and V (root and γ tokens), walked by hand over
  the same hits: the chain whose closed form is `always_rolling`."""
  tokens = 1500
  policy = sch.continuous(nodes=1, most=window, max_in_flight=1)
  outcomes, models, texts = virtual.decode_texts(
    policy, accept=accept, tokens=tokens, level_s=1e-4
  )
  hits = virtual.hits(models[0], texts[0], tokens)
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
  outcomes, models, texts = virtual.decode_texts(
    policy,
    accept=0.8,
    tokens=tokens,
    stage_s=(0.05, 0.05),
    lap_s=0.9,
    level_s=level_s,
  )
  hits = sum(virtual.hits(models[0], texts[0], tokens - 1))
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
  times = virtual.decode_texts(policy, **setting)[0][0].emitted_s
  # Steady state: the first rounds fill the drafter's stock.
  rate = (tokens - 41) / (times[-1] - times[40])
  best = sch.overlapped_rate(
    1.0, window, level_s=level_s * (window + 1) / window, lap_s=lap_s
  )
  assert rate == pytest.approx(best, rel=0.01)
  if level_s * (window + 1) <= lap_s:
    slow = sch.lockstep(window, levels=window)
    times = virtual.decode_texts(slow, **setting)[0][0].emitted_s
    assert len(times) / times[-1] == pytest.approx(
      sch.synchronous_rate(1.0, window, level_s=level_s, lap_s=lap_s), rel=0.01
    )
    assert rate > len(times) / times[-1]


# Policies on trees drawn by hand. ---------------------------------------------


def test_a_new_root_never_waits_for_a_draft():
  policy = sch.continuous(nodes=4)
  spec, pipe = hand.spec_of(), hand.pipe_of(level_s=1.0)
  assert policy.decide(spec, pipe, 0.0) == sch.Send(())
  some = hand.chain(spec, 0.9, 0.8)
  assert policy.decide(spec, hand.pipe_of(), 0.0) == sch.Send(tuple(some))


@pytest.mark.parametrize(
  ("launches", "misses", "bar"),
  [(1, 0, 0.3), (2, 0, 0.4), (3, 0, 0.5), (3, 4, 0.3), (1, 9, 0.0)],
)
def test_the_threshold_reacts(launches, misses, bar):
  """0.3 + 0.1 i − 0.05 r: below it the drafter stops and what is there goes."""
  policy = sch.continuous(nodes=4, threshold=0.3, recovery=0.1, decay=0.05)
  for q in (0.25, 0.35, 0.45, 0.55):
    spec = hand.spec_of()
    hand.launch(spec)
    first, _ = hand.chain(spec, 0.99, q)
    spec.launches, spec.misses = launches, misses
    answer = policy.decide(spec, hand.pipe_of(), 0.0)
    if q < bar:
      assert answer == sch.Send((first,))
      hand.launch(spec, [first])
      spec.launches = launches
      assert policy.decide(spec, hand.pipe_of(), 0.0) is None
    else:
      assert isinstance(answer, sch.Grow)


@pytest.mark.parametrize("truncate", [True, False])
def test_a_lagging_micro_step_is_cut(truncate):
  """Two of four are there; the next would come after the verdict."""
  policy = sch.continuous(nodes=4, truncate=truncate)
  spec = hand.spec_of()
  hand.launch(spec, return_s=1.0)
  ids = hand.chain(spec, 0.9, 0.9)
  assert isinstance(policy.decide(spec, hand.pipe_of(0.2), 0.7), sch.Grow)
  answer = policy.decide(spec, hand.pipe_of(0.2), 0.85)
  if truncate:
    assert answer == sch.Send(tuple(ids))
  else:
    assert isinstance(answer, sch.Grow)


def test_runs_in_flight_are_bounded_and_a_stock_is_kept():
  policy = sch.continuous(nodes=1, most=3, max_in_flight=1)
  spec = hand.spec_of()
  hand.launch(spec)
  for _ in range(4):  # three tokens, and the next root
    answer = policy.decide(spec, hand.pipe_of(), 0.0)
    assert isinstance(answer, sch.Grow)
    at = answer.anchors[0].id
    spec.nodes[at].grown = 1
    hand.add(spec, at, 0.9)
  assert policy.decide(spec, hand.pipe_of(), 0.0) is None
  spec.flights.clear()
  assert len(policy.decide(spec, hand.pipe_of(), 0.0).ids) == 3


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
  spec = hand.spec_of()
  ids = hand.chain(spec, *stated)
  chain = policy.decide(spec, hand.pipe_of(), 0.0)
  assert chain == sch.Send(tuple(ids[:sent]))
  point = ids[sent - 1] if sent else spec.root
  # Less likely ones than the chain's own token.
  others = hand.add(spec, point, 0.04, 0.03, 0.02, first=90)
  hand.launch(spec, ids[:sent])
  spec.nodes[ids[-1]].grown = 1
  answer = policy.decide(spec, hand.pipe_of(), 0.0)
  # The chain's own branch is long enough where three tokens or more follow.
  branches = [ids[sent], *others][:count]
  expected = [n for n in branches if n != ids[sent]]
  if isinstance(answer, sch.Grow):
    assert [a.id for a in answer.anchors if a.id in branches] == expected
  else:
    assert not expected


def test_a_verdict_on_a_branch_retains_it():
  policy = sch.branched(depth=2, branches=3, epsilon=0.5)
  spec = hand.spec_of()
  spec.nodes[spec.root].grown = 8
  first, second = hand.add(spec, spec.root, 0.2, 0.15)
  hand.launch(spec)  # unsure at once: the root alone
  leaf = hand.add(spec, second, 0.9)[0]
  last = hand.add(spec, leaf, 0.9)[0]
  spec.flights.clear()
  tree.commit_tokens(spec, (spec.nodes[second].token,))
  assert first not in spec.nodes
  assert policy.decide(spec, hand.pipe_of(), 0.0) == sch.Send((leaf, last))


def test_acespecs_budget_falls_geometrically():
  policy = sch.branched(depth=4, branches=4, decay=0.5)
  spec = hand.spec_of()
  ids = hand.chain(spec, 0.5, 0.5, 0.5)
  assert isinstance(policy.decide(spec, hand.pipe_of(), 0.0), sch.Grow)
  ids += hand.add(spec, ids[-1], 0.5)
  answer = policy.decide(spec, hand.pipe_of(), 0.0)
  assert answer == sch.Send(tuple(ids))
  hand.launch(spec, ids, return_s=1.0)
  branches = []
  for k, node in enumerate([spec.root, *ids]):
    spec.nodes[node].grown = 8
    extra = hand.add(spec, node, *[0.05] * 6, first=50)
    branches.append(extra[: [4, 2, 1, 0, 0][k]])
  # ⌊η³ 4 + ½⌋ is 0 or 1, halves to even; the best one behind the last stays.
  behind = [n for n in spec.below[ids[-1]]][:1]
  answer = policy.decide(spec, hand.pipe_of(0.1), 0.5)
  assert isinstance(answer, sch.Grow)
  assert [a.id for a in answer.anchors] == [
    *itertools.chain(*branches),
    *behind,
  ]
  # A level that would not be done when the verdict is due is not begun.
  assert policy.decide(spec, hand.pipe_of(0.1), 0.95) is None


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
  answer = policy.decide(hand.spec_of(), hand.pipe_of(level_s), 0.0)
  assert (answer.budget, answer.levels) == (32, levels)


@pytest.mark.parametrize("included", [True, False])
def test_specedge_expands_below_the_likeliest_leaf_and_token(included):
  policy = sch.rate_matched(nodes=6, depth=4, proactive=2, included=included)
  spec = hand.spec_of()
  spec.nodes[spec.root].grown = 6
  left, right = hand.add(spec, spec.root, 0.55, 0.45)
  spec.nodes[left].grown = spec.nodes[right].grown = 6
  # Paths of 0.275 and 0.22; right has 0.45.
  deep = hand.add(spec, left, 0.5, 0.4)
  spec.drafted_root = spec.root
  answer = policy.decide(spec, hand.pipe_of(0.1), 0.0)
  assert set(answer.ids) == {left, right, *deep}
  hand.launch(spec, [left, right, *deep])
  spec.nodes[right].grown = None
  answer = policy.decide(spec, hand.pipe_of(0.1), 0.0)
  assert {a.id for a in answer.anchors} == {right, *deep}
  assert (answer.budget, answer.levels) == (3, 1)
  for node in (right, *deep):
    spec.nodes[node].grown = 3
  hand.add(spec, deep[0], 0.9)
  head = hand.add(spec, right, 0.8)[0]  # 0.36 beats 0.275 · 0.9
  at = head
  for _ in range(2):
    answer = policy.decide(spec, hand.pipe_of(0.1), 0.0)
    assert [a.id for a in answer.anchors] == [at]
    spec.nodes[at].grown = 6
    at = hand.add(spec, at, 0.9)[0]
  assert policy.decide(spec, hand.pipe_of(0.1), 0.0) is None
  # Complete alignment: the leaf and the token.
  spec.flights.clear()
  tokens = (spec.nodes[right].token, spec.nodes[head].token)
  tree.commit_tokens(spec, tokens)
  answer = policy.decide(spec, hand.pipe_of(0.1), 0.0)
  assert [a.id for a in answer.anchors] == [at]
  assert answer.levels == (2 if included else 4)


def test_a_misaligned_verdict_drafts_anew():
  policy = sch.rate_matched(nodes=6, depth=3)
  spec = hand.spec_of()
  ids = hand.chain(spec, 0.9, 0.9)
  hand.launch(spec, ids[:1])
  spec.flights.clear()
  tree.commit_tokens(spec, (99,))
  answer = policy.decide(spec, hand.pipe_of(0.1), 0.0)
  assert ([a.id for a in answer.anchors], answer.levels) == ([spec.root], 3)


def test_bad_arguments_are_named():
  for make, what in (
    (lambda: sch.continuous(nodes=0), "nodes = 0"),
    (lambda: sch.continuous(nodes=4, most=2), "most = 2"),
    (lambda: sch.branched(depth=0), "depth = 0"),
    (lambda: sch.branched(decay=1.5), r"decay = 1\.5"),
    (lambda: sch.rate_matched(depth=0), "depth = 0"),
    (lambda: sch.rate_matched(proactive=-1), "proactive = -1"),
  ):
    with pytest.raises(ValueError, match=what):
      make()
