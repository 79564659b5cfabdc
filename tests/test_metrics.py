# SPDX-License-Identifier: Apache-2.0
"""Definitions against figures worked out by hand."""

import math

import pytest

from wanspec_jax import metrics


def rounds_of(accepted, width):
  """Chains of `width` drafts, walked until the first rejection."""
  return [
    metrics.RoundRecord(
      drafted=width, tested=min(a + 1, width), accepted=a, emitted=a + 1
    )
    for a in accepted
  ]


def test_known_figures():
  rounds = rounds_of([4, 0, 2, 4], 4)
  assert metrics.accepted_per_drafted(rounds) == 0.625
  assert metrics.acceptance_rate(rounds) == pytest.approx(10 / 12)
  assert metrics.mean_accepted(rounds) == 2.5
  assert metrics.tokens_per_lap(rounds) == 3.5
  assert metrics.per_position_acceptance(rounds) == (0.75, 0.75, 0.5, 0.5)
  assert metrics.conditional_acceptance(rounds) == pytest.approx(
    (0.75, 1, 2 / 3, 1)
  )
  assert metrics.wasted_nodes(rounds) == 6


def test_conditionals_multiply_to_positions():
  rounds = rounds_of([3, 1, 0, 2, 5, 5, 1], 5)
  running = 1.0
  for part, whole in zip(
    metrics.conditional_acceptance(rounds),
    metrics.per_position_acceptance(rounds),
    strict=True,
  ):
    running *= part
    assert running == pytest.approx(whole)


def test_walks_that_end_at_a_leaf_test_nothing_more():
  # A tree of 6 nodes, 2 accepted down to a leaf, cut to 2 tokens by a stop.
  rounds = [
    metrics.RoundRecord(drafted=6, tested=2, accepted=2, emitted=2),
    metrics.RoundRecord(drafted=0, tested=0, accepted=0, emitted=1),
  ]
  assert metrics.acceptance_rate(rounds) == 1
  assert metrics.conditional_acceptance(rounds) == (1, 1)
  assert metrics.per_position_acceptance(rounds) == (0.5, 0.5)
  assert metrics.tokens_per_lap(rounds) == 1.5
  assert metrics.wasted_nodes(rounds) == 4


def test_summary_is_every_function():
  rounds = rounds_of([4, 0, 2, 4], 4)
  summary = metrics.summarize(rounds)
  counts = (summary.laps, summary.drafted, summary.tested, summary.accepted)
  assert counts == (4, 16, 12, 10)
  assert summary.emitted == 14
  for name in (
    "tokens_per_lap",
    "acceptance_rate",
    "accepted_per_drafted",
    "mean_accepted",
    "per_position_acceptance",
    "conditional_acceptance",
    "wasted_nodes",
  ):
    assert getattr(summary, name) == getattr(metrics, name)(rounds)


def test_nothing_gives_zero_counts_and_nan_ratios():
  summary = metrics.summarize([])
  assert summary.laps == summary.emitted == summary.wasted_nodes == 0
  assert math.isnan(summary.tokens_per_lap)
  assert math.isnan(summary.acceptance_rate)
  assert math.isnan(summary.accepted_per_drafted)
  assert math.isnan(summary.mean_accepted)
  assert summary.per_position_acceptance == ()
  assert summary.conditional_acceptance == ()
  # Plain decoding: rounds without drafts.
  plain = metrics.summarize(rounds_of([0, 0], 0))
  assert plain.tokens_per_lap == 1
  assert math.isnan(plain.acceptance_rate)
  assert plain.per_position_acceptance == ()
  assert math.isnan(metrics.bytes_per_token({"ids": 5}, 0)["ids"])
  assert math.isnan(metrics.joules_per_token(3.0, 0))


def test_bytes_per_token_by_class():
  got = metrics.bytes_per_token({"ids": 100, "activations": 9000}, 50)
  assert got == {"ids": 2, "activations": 180, "total": 182}
  assert metrics.bytes_per_token({}, 5) == {"total": 0}
  assert metrics.joules_per_token(30.0, 20) == 1.5
  with pytest.raises(ValueError, match="total"):
    metrics.bytes_per_token({"total": 1}, 5)
  with pytest.raises(ValueError, match="ids"):
    metrics.bytes_per_token({"ids": -1}, 5)


def runs(*pairs):
  return [metrics.PromptRun(tokens=t, seconds=s) for t, s in pairs]


def test_speedup_counts_identical_prompts_only():
  base = runs(((1, 2), 4.0), ((3,), 2.0), ((4, 5), 6.0))
  fast = runs(((1, 2), 1.0), ((3,), 2.0), ((4, 6), 0.001))
  got = metrics.speedup(base, fast)
  assert got == (2.0, 2, 3)
  assert str(got) == "2x identical=2/3"
  assert metrics.speedup(base, base) == (1.0, 3, 3)


def test_speedup_is_refused_when_tokens_differ():
  base = runs(((1, 2), 4.0), ((3,), 2.0), ((4, 5), 6.0))
  wrong = runs(((1, 2, 3), 1.0), ((3,), 2.0), ((4, 6), 1.0))
  with pytest.raises(ValueError, match=r"identical=1/3, prompts \[0, 2\]"):
    metrics.speedup(base, wrong)
  with pytest.raises(ValueError, match="identical=0/1"):
    metrics.speedup(base[:1], wrong[:1])
  with pytest.raises(ValueError, match="identical=0/0"):
    metrics.speedup([], [])
  with pytest.raises(ValueError, match="2 prompts"):
    metrics.speedup(base, base[:2])


@pytest.mark.parametrize(
  ("fields", "words"),
  [
    ({"drafted": -1}, "drafted = -1"),
    ({"emitted": -1}, "emitted = -1"),
    ({"accepted": 3, "tested": 2}, "accepted = 3"),
  ],
)
def test_impossible_rounds_are_refused(fields, words):
  valid = {"drafted": 4, "tested": 2, "accepted": 1, "emitted": 2}
  with pytest.raises(ValueError, match=words):
    metrics.RoundRecord(**valid | fields)


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_impossible_times_are_refused(seconds):
  with pytest.raises(ValueError, match="seconds"):
    metrics.PromptRun(tokens=(1,), seconds=seconds)
