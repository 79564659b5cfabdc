# SPDX-License-Identifier: Apache-2.0
"""Hedges stepped by hand and walked, and how guesses are fanned out."""

import itertools
import math
import random as random_lib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules import bench, virtual
from wanspec_jax import schedules as sch
from wanspec_jax.messages import Returned, Verdict

# Hedges. ----------------------------------------------------------------------


class _Hand:
  """An engine stepped by hand, with what it launches and asks for."""

  def __init__(self, policy):
    self.engine = sch.init(
      policy, bench.costs(virtual.MAX_ROWS), capacity=100, prefill_rows=8
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
    nodes = bench.nodes_of(
      [c[1] for c in children],
      [c[0] for c in children],
      np.log([c[2] for c in children]),
    )
    return self.hear(bench.drafted(draft, nodes))

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
  text = virtual.text_of(tokens)
  drafter = virtual.drafter_of(text, accept)
  outcome, _ = virtual.decode(
    sch.hedged(depth=depth, fan_out=1),
    text,
    drafter,
    tokens=tokens,
    stage_s=(0.02,),
    delay_s=(0.04, 0.04),
    level_s=level_s,
  )
  hits = virtual.hits(drafter, text, tokens + 50)
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
  ],
)
def test_what_makes_no_sense_is_refused_by_name(call, match):
  with pytest.raises(ValueError, match=match):
    call()
