# SPDX-License-Identifier: Apache-2.0
"""Measured rings: the data as published, the schedules against other sums."""

import json
import random

import pytest

from experiments.studies import measured_rings
from experiments.studies._measured import figures as measured
from experiments.studies._measured.cases import CASES
from experiments.studies._measured.figures import (
  Figure,
  Gain,
  Ordering,
  Result,
)
from experiments.studies._measured.policies import chunks, frames
from experiments.studies._measured.world import MeasuredWorld, Quality, count
from experiments.studies._published.world import fixed, tokens_per_round
from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor


def test_the_copy_says_what_its_sources_say():
  """A few figures entered by hand from the published tables."""
  rings = measured.rings()
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


@pytest.mark.parametrize("text", ["", "{", '{"about": 1}'])
def test_data_that_is_none_is_refused(tmp_path, text):
  path = tmp_path / "rings.json"
  path.write_text(text)
  with pytest.raises((json.JSONDecodeError, KeyError)):
    measured.rings(path)


def test_an_arm_that_is_not_there():
  ring = measured.rings()["glm52-744b-6stage-us"]
  assert measured.arm(ring, "KV decode, relay-back")["tokens_per_s"]
  with pytest.raises(KeyError, match="no arm 'KV'"):
    measured.arm(ring, "KV")


WORLD = MeasuredWorld(stage_s=(0.01, 0.02), delay_s=(0.03, 0.04, 0.05))
LAP_S = 0.15
SURE = Quality.chain(1.0)


def test_plain_takes_a_lap_per_token():
  mine = count(WORLD, sch.lockstep(0), SURE, tokens=30)
  assert mine.tokens_per_s == pytest.approx(1 / LAP_S)
  assert mine.frames_per_token == 1 and mine.stale_per_token == 0


def test_rows_cost_their_share():
  """A 6-row run at 0.976 per further row: 5.88 one-row times at each stage."""
  world = MeasuredWorld(
    stage_s=(0.01, 0.02), row_s=0.001, row_share=0.976, delay_s=(0.0,) * 3
  )
  seconds = world.profile().stage_s(6).tolist()
  assert seconds == pytest.approx([0.0588 + 0.005, 0.1176 + 0.005])
  mine = count(world, fixed(5), SURE, tokens=600)
  assert mine.tokens_per_s == pytest.approx(6 / sum(seconds), rel=0.02)


def test_a_synchronous_chain_takes_draft_and_lap_per_round():
  world = MeasuredWorld(
    stage_s=WORLD.stage_s,
    delay_s=WORLD.delay_s,
    draft=sch.DraftCosts(per_level_s=0.005),
  )
  mine = count(world, chunks(4, 1), Quality.chain(0.8), tokens=4000)
  assert mine.tokens_per_round == pytest.approx(
    tokens_per_round(0.8, 4), rel=0.03
  )
  assert mine.tokens_per_s == pytest.approx(
    mine.tokens_per_round / (LAP_S + 4 * 0.005), rel=0.01
  )


def test_chunks_in_flight_share_a_lap_while_all_is_right():
  """D chunks of 5 per lap, the first a draft short."""
  for depth in (2, 4):
    mine = count(WORLD, chunks(4, depth), SURE, tokens=2000)
    assert mine.tokens_per_s == pytest.approx(5 * depth / LAP_S, rel=0.03)


@pytest.mark.parametrize("policy", [lambda: frames(5, 1), lambda: frames(0, 4)])
def test_frames_need_room(policy):
  with pytest.raises(ValueError, match="at least"):
    policy()


def test_chunks_need_room():
  with pytest.raises(ValueError, match="at least 1"):
    chunks(4, 0)


@pytest.mark.parametrize(("block", "limit"), [(5, 64), (5, 3), (8, 64), (8, 5)])
def test_frames_that_are_all_right_in_closed_form(block, limit):
  """One block every L + (b − 2) s, b = min(block, limit − 1).

  Its b frames leave together and come back s = 10 ms apart; the verdict on the
  last but one finds the last one under way as the deepest, and the next block
  leaves: b + 1 frames in flight.
  """
  stage_s, lap_s = 0.01, 0.3
  world = MeasuredWorld(stage_s=(stage_s,), delay_s=(0.145, 0.145))
  mine = count(world, frames(block, limit), SURE, tokens=40 * 5 * 8)
  most = min(block, limit - 1)
  period_s = lap_s + (most - 2) * stage_s
  assert mine.tokens_per_s == pytest.approx(most / period_s, rel=0.01)
  assert mine.frames_per_token == pytest.approx(1.0, abs=0.01)
  assert mine.alive_max == most + 1
  # Frame i of a block waits i s for those before it. Little: N = λ W.
  wait_s = (most - 1) / 2 * stage_s
  fill = most / period_s * (lap_s + wait_s)
  assert mine.in_flight_fill == pytest.approx(fill, rel=0.02)
  assert mine.alive_fill == pytest.approx(fill, rel=0.02)
  # Before verdict 1, 2, …, b of a block there are so many left.
  left = [*range(most, 1, -1), most + 1]
  assert mine.alive_mean == pytest.approx(sum(left) / most, rel=0.01)


def test_frames_whose_second_draft_is_always_wrong():
  """Played by hand, block 3: root, d1, d2, d3 leave; the root's verdict is d1,
  that of d1 is not d2: d2 and d3 are stale, and the next four leave. So two
  tokens in L + s of every 4 frames, of which the stale ones are in the pipe for
  two of their L, but no longer alive."""
  stage_s, lap_s = 0.01, 0.3
  world = MeasuredWorld(stage_s=(stage_s,), delay_s=(0.145, 0.145))
  # A draft that is never right is none to the synthetic drafter.
  quality = Quality(by_index=(1.0, 1e-9, 1.0), refilled=(1.0, 1e-9, 1e-9))
  mine = count(world, frames(3, 64), quality, tokens=1000)
  assert mine.frames_per_token == pytest.approx(2.0, rel=0.01)
  assert mine.stale_per_token == pytest.approx(1.0, rel=0.01)
  assert mine.tokens_per_cancel == pytest.approx(2.0, rel=0.01)
  # The new root queues behind nothing: stale frames have passed its stage.
  assert mine.tokens_per_s == pytest.approx(2 / (lap_s + stage_s), rel=0.01)
  assert mine.alive_max == 4
  assert mine.alive_mean == pytest.approx((4 + 3) / 2, rel=0.01)
  # Alive: 4 until L, 3 for s. In flight: two stale ones on top, until they are
  # back 2 s and 3 s after the root, of which s is over.
  assert mine.alive_fill == pytest.approx(
    (4 * lap_s + 3 * stage_s) / (lap_s + stage_s), rel=0.01
  )
  assert mine.in_flight_fill - mine.alive_fill == pytest.approx(
    (1 + 2) * stage_s / (lap_s + stage_s), rel=0.03
  )


def test_stale_frames_are_computed_and_hold_up_the_next_block():
  """The same with 100 ms on the stage and 10 ms a hop: the new root is there
  after 230 ms, when d2 is being computed and d3 waits. Four frames of 100 ms
  per two tokens."""
  world = MeasuredWorld(stage_s=(0.1,), delay_s=(0.01, 0.01))
  quality = Quality(by_index=(1.0, 1e-9, 1.0), refilled=(1.0, 1e-9, 1e-9))
  mine = count(world, frames(3, 64), quality, tokens=1000)
  assert mine.tokens_per_s == pytest.approx(2 / 0.4, rel=0.01)
  assert not frames(3, 64).cancels and not chunks(4, 2).cancels


@pytest.mark.parametrize("floor", [1, 8])
def test_little_s_law_holds_with_stale_frames(floor):
  """Frames in flight = frames per token × rate × lap, without queues."""
  world = MeasuredWorld(stage_s=(1e-6,), delay_s=(0.1, 0.1))
  quality = Quality.block((0.93, 0.85, 0.83, 0.95, 0.84, 0.7, 0.7, 0.7))
  mine = count(world, frames(8, 64, floor=floor), quality, tokens=1500)
  assert mine.in_flight_fill == pytest.approx(
    mine.frames_per_token * mine.tokens_per_s * 0.2, rel=0.02
  )
  assert mine.alive_fill < mine.in_flight_fill
  assert mine.alive_max == 9


def play_frames(hits, block, limit, tokens):
  """`leyten/shard`'s coordinator, verdict by verdict, without a clock.

  Text position n is drafted right at index i iff `hits[n][i - 1]`. Returns
  frames, wrong drafts and the sum of alive frames before each verdict.
  """
  frontier, sent, frames_, wrong, alive = 0, {0: True}, 1, 0, 0
  horizon = 0
  for i in range(1, min(block, limit - 1) + 1):  # the first block
    sent[i], frames_, horizon = hits[i][i - 1], frames_ + 1, i
  while frontier < tokens - 1:
    alive += horizon - frontier + 1
    frontier += 1
    if frontier not in sent:
      sent[frontier], horizon, frames_ = True, frontier, frames_ + 1
    elif not sent[frontier]:
      wrong += 1
      sent = {frontier: True}
      horizon, frames_ = frontier, frames_ + 1
    if horizon == frontier:
      for i in range(1, min(block, limit - 1, tokens - 1 - frontier) + 1):
        sent[frontier + i] = hits[frontier + i][i - 1]
        horizon, frames_ = frontier + i, frames_ + 1
  return frames_, wrong, alive / (tokens - 1)


@pytest.mark.parametrize("limit", [2, 4, 6, 16])
def test_single_frames_against_a_play_of_the_coordinator(limit):
  tokens, block = 4000, 5
  acceptance = (0.8, 0.75, 0.7, 0.67, 0.63)
  world = MeasuredWorld(stage_s=(1e-7,), delay_s=(0.05, 0.05))
  mine = count(
    world, frames(block, limit), Quality.block(acceptance), tokens=tokens
  )
  rng = random.Random(limit)
  draws = [rng.random() for _ in range(tokens + 9)]
  hits = [[draw < a for a in acceptance] for draw in draws]
  launched, wrong, alive = play_frames(hits, block, limit, tokens)
  assert mine.alive_max == min(limit, block + 1)
  assert mine.frames_per_token == pytest.approx(launched / tokens, rel=0.05)
  assert mine.tokens_per_cancel == pytest.approx(tokens / wrong, rel=0.1)
  assert mine.alive_mean == pytest.approx(alive, rel=0.03)


def test_a_block_ends_and_a_refill_drafts_it_anew():
  quality = Quality.block((0.9, 0.8, 0.5))
  assert quality.refilled == pytest.approx((0.9, 0.72, 0.36))
  drafter = quality.drafter(list(range(9)), 0)
  state = drafter.init(None, [0], 0)
  _, first = drafter.expand(state, [Anchor(0)], 64)
  assert first.log_q.tolist() == pytest.approx(
    [-0.10536, -0.22314, -0.69315], abs=1e-4
  )
  path = tuple(first.tokens.tolist()[:2])
  _, more = drafter.expand(state, [Anchor(2, path)], 64)
  assert more.log_q.tolist() == pytest.approx([-1.02165], abs=1e-4)


def test_refills_that_are_right_fill_the_pipe_to_the_cap():
  """Block + 1 frames in every lap."""
  world = MeasuredWorld(stage_s=(0.001,) * 3, delay_s=(0.03,) * 4)
  mine = count(world, frames(8, 64, floor=8), SURE, tokens=900)
  assert mine.tokens_per_s == pytest.approx(9 / 0.123, rel=0.02)
  assert mine.alive_fill == pytest.approx(9, rel=0.02)


def test_a_drafter_on_the_tail_adds_its_time_to_every_block():
  """8 tokens in L + 6 s + 20 ms: by the answer, the last frame is back too."""
  world = MeasuredWorld(
    stage_s=(0.001,) * 3,
    delay_s=(0.03,) * 4,
    draft=sch.DraftCosts(per_call_s=0.02),
    drafter_stage=2,
  )
  mine = count(world, frames(8, 64), SURE, tokens=900)
  assert mine.tokens_per_s == pytest.approx(
    8 / (0.123 + 0.006 + 0.02), rel=0.02
  )
  # 8 before the first verdict on a block, 1 before the last.
  assert mine.alive_mean == pytest.approx(4.5, rel=0.01)


def figure(measured, ours, counts=True):
  return Figure(
    case="c", name="n", measured=measured, ours=ours, inputs={}, counts=counts
  )


def test_pairs_beyond_the_noise_must_be_in_order():
  arms = {"a": (1.0, 5.0), "b": (1.05, 4.0), "c": (1.2, 4.5), "d": (2.0, 6.0)}
  got = measured.ordered("r", "x", arms, 0.06)
  assert got.pairs == (
    ("a", "c"),
    ("a", "d"),
    ("b", "c"),
    ("b", "d"),
    ("c", "d"),
  )
  assert got.wrong == (("a", "c"),)
  ties = measured.ordered("r", "x", {"a": (1, 3), "b": (2, 3)}, 0.06)
  assert ties.wrong == (("a", "b"),)
  only = measured.ordered("r", "x", arms, lambda a, b: b == "d", "d")
  assert len(only.pairs) == 3 and not only.wrong
  with pytest.raises(ValueError, match="rule"):
    measured.ordered("r", "x", arms, lambda a, b: True)
  with pytest.raises(ValueError, match="noise"):
    measured.ordered("r", "x", arms, -0.1)
  same = measured.identical("r", "x", {"a": 1, "b": 1, "c": 2})
  assert same.wrong == (("a", "c"), ("b", "c")) and len(same.pairs) == 3


def test_the_gain_weighs_rings_not_texts():
  gains = [
    Gain(case="a", where="x", best=1.0, priced=2.0),
    Gain(case="a", where="y", best=1.0, priced=8.0),
    Gain(case="b", where="", best=4.0, priced=1.0),
  ]
  assert measured.mean_gain(gains) == pytest.approx(1.0)
  assert measured.mean_gain([]) != measured.mean_gain([])


def test_what_counts_and_what_is_within(tmp_path, monkeypatch):
  assert figure(100, 115).is_within and figure(100, 85.01).is_within
  assert not figure(100, 115.1).is_within and not figure(100, 84).is_within
  ordering = Ordering(
    case="c",
    what="x",
    rule="r",
    pairs=(("a", "b"), ("b", "c")),
    wrong=(("a", "b"),),
  )
  results = {
    "a": Result(
      figures=[figure(1, 1), figure(1, 2), figure(1, 1, counts=False)],
      orderings=[ordering],
      gains=[Gain(case="a", where="w", best=2.0, priced=4.0)],
    ),
    "b": Result(
      figures=[figure(2, 2.1)],
      orderings=[],
      gains=[Gain(case="b", where="w", best=1.0, priced=0.5)],
    ),
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

  monkeypatch.setattr(measured_rings.measured_cases, "CASES", results)
  monkeypatch.setattr(
    measured_rings.concurrent.futures, "ProcessPoolExecutor", Pool
  )
  out = measured_rings.run(measured_rings.Config(out=tmp_path, quick=True))
  assert out["within15"] == "2/3" and out["orderings"] == "1/2"
  assert out["priced_gain"] == pytest.approx(1.0)
  text = (tmp_path / "measured_rings.md").read_text()
  assert "not counted, within" in text and "| 2.00 | off |" in text
  assert "| 1/2 | a < b |" in text


def test_a_case_runs_from_data_to_figures():
  result = CASES["slopes"](measured.rings(), 40)
  by_name = {f.name: f for f in result.figures}
  four = by_name["4 devices, 10 ms: tokens/s"]
  # 1 / (1 / 57.1 + 5 · 10 ms), by hand.
  assert four.ours == pytest.approx(1 / (1 / 57.1 + 0.05), rel=1e-6)
  assert four.counts and not by_name["3 devices, 10 ms: tokens/s"].counts
