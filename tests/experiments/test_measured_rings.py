# SPDX-License-Identifier: Apache-2.0
"""Measured rings: the data as published, the schedules against other sums."""

import random

import pytest

from experiments.studies import _measured_figure, measured_rings
from experiments.studies._measured_cases import CASES
from experiments.studies._measured_figure import Figure, Ordering, Result
from experiments.studies._measured_world import chunks, count, frames, plain
from experiments.studies._published_world import World, tokens_per_round
from wanspec_jax import schedules as sch


def test_the_copy_says_what_its_sources_say():
  """A few figures entered by hand from the published tables."""
  rings = _measured_figure.rings()
  assert len(rings) == 9
  nordic = rings["v4flash-6stage-nordic-depth-sweep"]
  sweep = [a for a in nordic["arms"] if a["label"].startswith("depth ")]
  assert [a["discarded_frames"] for a in sweep] == [10, 15, 23, 42, 51, 51]
  assert [a["frames_in_flight_max"] for a in sweep] == [2, 3, 4, 6, 7, 7]
  blocks = rings["v4flash-6stage-eu-fill-sweep"]["arms"]
  assert [a["tokens_per_s"] for a in blocks[:5]] == [
    29.2,
    28.3,
    30.5,
    27.1,
    14.1,
  ]
  glm = rings["glm52-744b-6stage-us"]
  assert [a["tokens_per_s"] for a in glm["arms"]] == [
    1.87,
    1.99,
    2.94,
    16.6,
    30.03,
  ]
  edges = [e["rtt_s"] for e in glm["network"]["edges"]]
  assert sum(edges) == pytest.approx(0.2915)
  for ring in rings.values():
    assert ring["source"] and ring["trust"]["grade"] in "ABCD"


WORLD = World(stage_s=(0.01, 0.02), delay_s=(0.03, 0.04, 0.05))
LAP_S = 0.15


def test_plain_takes_a_lap_per_token():
  assert count(WORLD, plain(), 0.5, tokens=30).tokens_per_s == pytest.approx(
    1 / LAP_S
  )


def test_a_synchronous_chain_takes_draft_and_lap_per_round():
  world = World(
    stage_s=WORLD.stage_s,
    delay_s=WORLD.delay_s,
    draft=sch.DraftCosts(per_level_s=0.005),
  )
  mine = count(world, chunks(4, 1), 0.8, tokens=4000)
  per_round = tokens_per_round(0.8, 4)
  assert mine.tokens_per_round == pytest.approx(per_round, rel=0.03)
  assert mine.tokens_per_s == pytest.approx(
    mine.tokens_per_round / (LAP_S + 4 * 0.005), rel=0.01
  )


def test_chunks_in_flight_share_a_lap_while_all_is_right():
  """D chunks of 5 per lap, the first a draft short."""
  for depth in (2, 4):
    mine = count(WORLD, chunks(4, depth), 1.0, tokens=2000)
    assert mine.tokens_per_s == pytest.approx(5 * depth / LAP_S, rel=0.03)


def simulate_frames(hits, block, limit, tokens):
  """Frames in a pipe without queues, event by event: `(launched, wrong)`.

  Text position n is drafted right at index i iff `hits[n][i - 1]`.
  """
  root, launched, wrong = 0, 0, 0
  while root < tokens:
    # One block: index 1 to block behind `root`; one frame per tick, each back
    # after LAP ticks, the next one only while fewer than `limit` are alive.
    lap = 1000
    back, sent, time, at = [], 0, 0, 0
    while True:
      if sent <= min(block, tokens - 1 - root) and len(back) < limit:
        back.append(time + lap)
        sent += 1
        launched += 1
        time += 1
        continue
      time = back.pop(0)  # the verdict on index `at`
      at += 1
      if root + at >= tokens or (at > block) or (sent == at and not back):
        break
      if not hits[root + at][at - 1]:
        wrong += at < sent
        break
    root += at
  return launched, wrong


@pytest.mark.parametrize("limit", [2, 4, 6, 16])
def test_single_frames_against_a_simulation_of_their_own(limit):
  tokens, block = 3000, 5
  acceptance = [0.8, 0.75, 0.7, 0.67, 0.63]
  world = World(stage_s=(1e-7,), delay_s=(0.05, 0.05))
  mine = count(
    world, frames(block, limit), [[a] for a in acceptance], tokens=tokens
  )
  rng = random.Random(limit)
  draws = [rng.random() for _ in range(tokens + 9)]
  hits = [[draw < a for a in acceptance] for draw in draws]
  launched, wrong = simulate_frames(hits, block, limit, tokens)
  assert mine.in_flight_max == min(limit, block + 1)
  assert mine.frames_per_token == pytest.approx(launched / tokens, rel=0.05)
  assert mine.tokens_per_cancel == pytest.approx(tokens / wrong, rel=0.1)


def test_forced_refills_cost_the_tail_a_draft_per_frame():
  """The drafter's time bounds the rate: one answer per frame, each 20 ms."""
  world = World(
    stage_s=(0.001,) * 3,
    delay_s=(0.03,) * 4,
    draft=sch.DraftCosts(per_call_s=0.02),
    drafter_stage=2,
  )
  once = count(world, frames(8, 64), 1.0, tokens=600)
  always = count(world, frames(8, 64, floor=16), 1.0, tokens=600)
  assert always.tokens_per_s < 1.05 / 0.021
  assert always.in_flight_fill > 0
  assert once.frames_per_token == pytest.approx(1.0, abs=0.02)


def figure(measured, ours, counts=True):
  return Figure(
    case="c", name="n", measured=measured, ours=ours, inputs={}, counts=counts
  )


def test_what_counts_and_what_is_within(tmp_path, monkeypatch):
  assert figure(100, 115).is_within and figure(100, 85.01).is_within
  assert not figure(100, 115.1).is_within and not figure(100, 84).is_within
  results = {
    "a": Result(
      figures=[figure(1, 1), figure(1, 2), figure(1, 1, counts=False)],
      orderings=[
        Ordering(case="c", claim="x", holds=True),
        Ordering(case="c", claim="y", holds=False),
      ],
      best=2.0,
      priced=4.0,
    ),
    "b": Result(figures=[figure(2, 2.1)], orderings=[], best=1.0, priced=0.5),
  }

  class Pool:
    def __init__(self, *args, **kwargs):
      pass

    def __enter__(self):
      return self

    def __exit__(self, *exc_info):
      pass

    def map(self, function, names, tokens):
      del function, tokens
      return [results[name] for name in names]

  monkeypatch.setattr(measured_rings._measured_cases, "CASES", results)
  monkeypatch.setattr(
    measured_rings.concurrent.futures, "ProcessPoolExecutor", Pool
  )
  out = measured_rings.run(measured_rings.Config(out=tmp_path, quick=True))
  assert out["within15"] == "2/3" and out["orderings"] == "1/2"
  assert out["priced_gain"] == pytest.approx(1.0)
  text = (tmp_path / "measured_rings.md").read_text()
  assert "not counted, within" in text and "| 2.00 | off |" in text


def test_a_case_runs_from_data_to_figures():
  result = CASES["slopes"](_measured_figure.rings(), 40)
  by_name = {f.name: f for f in result.figures}
  four = by_name["4 devices, 10 ms: tokens/s"]
  # 1 / (1 / 57.1 + 5 · 10 ms), by hand.
  assert four.ours == pytest.approx(1 / (1 / 57.1 + 0.05), rel=1e-6)
  assert four.counts and not by_name["3 devices, 10 ms: tokens/s"].counts
