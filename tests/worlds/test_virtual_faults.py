# SPDX-License-Identifier: Apache-2.0
"""Cancels, weather and lost stages on the virtual ring: by hand, by bytes."""

import collections
import itertools
import random as random_lib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules import bench
from tests.worlds.scripted import (
  TEXT,
  WRONG,
  burst,
  chain_drafter,
  driver_of,
  ring_of,
  taps,
)
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.worlds import Kill, Stall, Weather

D = 0.01  # delay of every hop, unless said otherwise


def _plain_run(weather, *, count=4, num_stages=2, tokens=5, submit_s=0.0):
  """Decodes one text without drafts, one token a lap of `num_stages + 1` D."""
  stages = taps({0: TEXT}, num_stages)
  ring = ring_of(
    stages,
    delays=(D,) * (num_stages + 1),
    times=(0.0,) * num_stages,
    weather=weather,
  )
  driver = driver_of(sch.lockstep(0), chain_drafter())
  request = bench.request_of(TEXT, count, tokens, seed=0)
  result = ring.run(driver, [(submit_s, request)])
  outcome = result.outcomes[0]
  assert outcome.tokens == TEXT[count : count + tokens]
  assert outcome.reason == "length" and driver.done
  return result, stages, driver


# Cancels. -------------------------------------------------------------------


def _burst(cancels, num_stages=2):
  """Three runs at once, [root, A], [B], [C], with A wrong, before a last stage
  that takes 0.1 s a run; the other stages take no time."""
  stages = taps({0: TEXT}, num_stages)
  ring = ring_of(
    stages,
    delays=(D,) * (num_stages + 1),
    times=(0.0,) * (num_stages - 1) + (0.1,),
  )
  driver = driver_of(
    burst(3, cancels=cancels), chain_drafter((WRONG, WRONG, WRONG))
  )
  request = bench.request_of(TEXT, 1, 2, seed=0)
  result = ring.run(driver, [(0.0, request)])
  assert result.outcomes[0].tokens == TEXT[1:3]
  return result, stages


@pytest.mark.parametrize(("cancels", "second_s"), [(True, 0.33), (False, 0.43)])
def test_a_cancel_drops_what_still_queues(cancels, second_s):
  """At the last stage: run 0 from 0.02 to 0.12, run 1 to 0.22, run 2 queues.

  The verdict is back at 0.13; the cancel meets the stage at 0.14, when run 1
  has begun and run 2 has not. The new root's run is there at 0.15, so it is
  begun at 0.22 and back at 0.33; behind run 2's rows it is back at 0.43.
  """
  result, stages = _burst(cancels)
  assert result.outcomes[0].emitted_s == pytest.approx([0.13, second_s])
  rows = [span for span in result.spans if span.lane == "stage 1"]
  computed = [0, 1, 3] if cancels else [0, 1, 2, 3]
  assert [s.run for s in rows if s.end_s > s.start_s] == computed
  assert [s.run for s in rows if s.name == "0 rows, 1 cancelled"] == (
    [2] if cancels else []
  )
  # All of them came, as whole runs, for the first stage had nothing to drop.
  assert [run.num_rows for run in stages[1].heard] == [2, 1, 1, 1, 0]


def test_a_cancel_travels_stage_by_stage():
  """Against the flow, one hop after the other, to the head."""
  result, _ = _burst(True, num_stages=3)
  back = [(s.lane, s.start_s) for s in result.spans if s.name == "cancel"]
  lanes, times = zip(*back, strict=True)
  assert lanes[:3] == ("back 3", "back 2", "back 1")
  assert times[:3] == pytest.approx([0.14, 0.15, 0.16])


def test_a_cancelled_run_goes_on_as_a_header():
  """A slow middle stage drops run 2; its header keeps run 2's place behind."""
  stages = taps({0: TEXT}, 3)
  ring = ring_of(stages, delays=(D,) * 4, times=(0.0, 0.1, 0.0))
  driver = driver_of(burst(3), chain_drafter((WRONG, WRONG, WRONG)))
  request = bench.request_of(TEXT, 1, 2, seed=0)
  result = ring.run(driver, [(0.0, request)])
  # Run 0 is back at 0.14, the cancel at the middle stage at 0.16.
  assert result.outcomes[0].emitted_s == pytest.approx([0.14, 0.34])
  assert [run.run_id for run in stages[2].heard] == [0, 1, 2, 3, 4]
  assert [run.num_rows for run in stages[2].heard] == [2, 1, 0, 1, 0]
  header = next(run for run in stages[2].heard if run.run_id == 2)
  (span,) = (s for s in result.spans if (s.lane, s.run) == ("hop 2", 2))
  assert span.name == f"{len(wire.encode_run(header, b''))} B"


@settings(derandomize=True, deadline=None, max_examples=30)
@given(st.integers(0, 2**32).map(random_lib.Random))
def test_every_frame_pays_for_the_bytes_that_it_would_have(random):
  """What `wire` makes of each message at each hop, payload included."""
  num_stages = random.randint(1, 4)
  count = random.randint(1, 3)
  texts = {s: TEXT[s:] for s in range(count)}
  stages = taps(texts, num_stages, row_bytes=random.choice([4, 100, 3000]))
  ring = ring_of(
    stages,
    delays=[random.uniform(0, 0.02) for _ in range(num_stages + 1)],
    times=[random.uniform(0, 0.02) for _ in range(num_stages)],
  )
  drafter = bench.drafter_of(
    texts,
    right=0.7,
    size=lambda budget: random.randint(0, budget),
    random=random,
  )
  policy = bench.pipelined(random, max_in_flight=4, max_nodes=8)
  requests = [
    (0.01 * s, bench.request_of(texts[s], 2 + s, 12, seed=s))
    for s in range(count)
  ]
  result = ring.run(driver_of(policy, drafter), requests)
  sizes = {
    (0, run.run_id): len(wire.encode_run(run)) for run in stages[0].heard
  }
  for hop, stage in enumerate(stages, 1):
    for message, payload in stage.sent:
      sizes[hop, message.run_id] = len(
        wire.encode_returned(message)
        if hop == num_stages
        else wire.encode_run(message, payload)
      )
  seen = {
    (int(span.lane[4:]), span.run): int(span.name.removesuffix(" B"))
    for span in result.spans
    if span.lane.startswith("hop")
  }
  assert sizes == seen
  for hop in range(num_stages + 1):
    on_hop = sum(size for (h, _), size in sizes.items() if h == hop)
    assert result.bytes.total(link=f"hop {hop}") == on_hop


# Weather. -------------------------------------------------------------------


def test_what_is_lost_comes_later_and_nothing_overtakes_it():
  """Every frame lost once: each of the three hops takes 0.2 s more."""
  weather = Weather(loss=1.0, retransmit_s=0.2)
  result, _, _ = _plain_run(weather, count=1, tokens=3)
  lap_s = 3 * (D + 0.2)
  assert result.outcomes[0].emitted_s == pytest.approx(
    [lap_s, 2 * lap_s, 3 * lap_s]
  )


def test_a_frame_behind_a_lost_one_waits_for_it():
  """Hop 0 loses what is sent in one slot; a run of the next slot queues."""
  weather = next(
    w
    for w in (Weather(seed=s, loss=0.5, retransmit_s=0.2) for s in range(99))
    if (w.delivery_s(0, 0.01, 0.02), w.delivery_s(0, 0.06, 0.07))
    == (0.22, 0.07)
  )
  stages = taps({0: TEXT, 1: TEXT}, 1)
  ring = ring_of(
    stages, delays=(D, D), times=(0.0,), weather=weather, client=None
  )
  requests = [
    (at_s, bench.request_of(TEXT, 1, 1, seed=0)) for at_s in (0.01, 0.06)
  ]
  driver = driver_of(sch.lockstep(0), chain_drafter())
  result = ring.run(driver, requests)
  came = [s.end_s for s in result.spans if s.lane == "hop 0"][:2]
  assert came == pytest.approx([0.22, 0.22])


def test_faults_are_a_function_of_time():
  """Two schedules meet the same ones, whatever they send; shares are as set."""
  weather = Weather(seed=3, loss=0.3, duplicates=0.2)
  slots = [0.05 * i + 0.005 for i in range(4000)]
  lost = [weather.delivery_s(1, s, s) > s for s in slots]
  later = [weather.delivery_s(1, s + 0.04, s + 0.04) > s + 0.04 for s in slots]
  assert lost == later
  # Four standard deviations of 4000 draws.
  assert sum(lost) / 4000 == pytest.approx(0.3, abs=0.03)
  doubled = [weather.is_doubled(1, i) for i in range(4000)]
  assert sum(doubled) / 4000 == pytest.approx(0.2, abs=0.026)
  other = [weather.delivery_s(2, s, s) > s for s in slots]
  both = sum(a and b for a, b in zip(lost, other, strict=True)) / 4000
  assert both == pytest.approx(0.09, abs=0.02)  # hops are independent


def test_a_stall_holds_a_hop_and_stalls_may_follow_each_other():
  """Hop 1 delivers nothing from 0.015 to 0.5: the first lap ends at 0.51."""
  stalls = (Stall(1, 0.4, 0.5), Stall(1, 0.015, 0.45), Stall(0, 2.0, 9.0))
  result, _, _ = _plain_run(Weather(stalls=stalls), count=1, tokens=3)
  assert result.outcomes[0].emitted_s == pytest.approx([0.51, 0.54, 0.57])


def test_a_frame_that_comes_twice_counts_once():
  calm, stages, _ = _plain_run(Weather())
  doubled, others, _ = _plain_run(Weather(duplicates=1.0))
  assert doubled.outcomes[0].emitted_s == calm.outcomes[0].emitted_s
  assert [r.run_id for r in others[0].heard] == [
    r.run_id for r in stages[0].heard
  ]
  assert doubled.num_events > calm.num_events


# Lost stages. ---------------------------------------------------------------


@pytest.mark.parametrize("stage", [0, 1])
def test_a_killed_stage_is_replaced_and_the_text_goes_on(stage):
  """Laps of 0.03. Killed at 0.095, three tokens in: up at 0.6, text goes on
  one lap later, its four chunks of committed tokens ahead of it."""
  weather = Weather(kills=(Kill(stage, 0.095, 0.505),))
  result, stages, driver = _plain_run(weather, count=13, tokens=6)
  laps = [0.03, 0.06, 0.09, 0.63, 0.66, 0.69]
  assert result.outcomes[0].emitted_s == pytest.approx(laps)
  assert driver.engine.epoch == 1
  replayed = [r for r in stages[0].heard if r.epoch == 1 and r.committed.any()]
  rows = list(itertools.chain(*(r.tokens.tolist() for r in replayed)))
  assert rows == TEXT[: 13 + 3 - 1]
  assert [stage.num_used for stage in stages] == [0, 0]


def test_the_ring_is_up_when_all_of_it_is():
  """One stage back at 0.6, the other at 0.3: nothing before 0.6."""
  weather = Weather(kills=(Kill(0, 0.095, 0.505), Kill(1, 0.2, 0.1)))
  result, _, driver = _plain_run(weather, count=1, tokens=4)
  assert result.outcomes[0].emitted_s == pytest.approx([0.03, 0.06, 0.09, 0.63])
  assert driver.engine.epoch == 1


def test_a_stage_that_dies_between_requests_is_there_for_the_next():
  """Nobody decodes from 0.03 on; the second request comes at 0.2, while the
  stage is down until 0.5."""
  stages = taps({0: TEXT, 1: TEXT}, 2)
  weather = Weather(kills=(Kill(1, 0.1, 0.4),))
  ring = ring_of(stages, delays=(D,) * 3, times=(0.0, 0.0), weather=weather)
  requests = [
    (at_s, bench.request_of(TEXT, 1, 1, seed=0)) for at_s in (0.0, 0.2)
  ]
  driver = driver_of(sch.lockstep(0), chain_drafter())
  result = ring.run(driver, requests)
  assert [result.outcomes[s].emitted_s for s in range(2)] == [
    pytest.approx([0.03]),
    pytest.approx([0.53]),
  ]


def test_a_text_that_ends_while_a_stage_is_down_leaves_the_ring_usable():
  """The last verdict is on its way when the first stage dies."""
  stages = taps({0: TEXT, 1: TEXT}, 2)
  weather = Weather(kills=(Kill(0, 0.025, 0.4),))
  ring = ring_of(stages, delays=(D,) * 3, times=(0.0, 0.0), weather=weather)
  requests = [
    (at_s, bench.request_of(TEXT, 1, 1, seed=0)) for at_s in (0.0, 1.0)
  ]
  driver = driver_of(sch.lockstep(0), chain_drafter())
  result = ring.run(driver, requests)
  assert [result.outcomes[s].emitted_s for s in range(2)] == [
    pytest.approx([0.03]),
    pytest.approx([1.03]),
  ]


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32).map(random_lib.Random))
def test_speculation_in_flight_survives_any_kill(random):
  """Several sequences, any policy, kills at any time: texts, ends, slots."""
  _survive(random)


# A stage up again takes nothing of the old epoch while another is down; and a
# ring that died with only dead runs in it comes up before the session ends.
@pytest.mark.parametrize("seed", [41, 663, 844, 616])
def test_kills_that_overlap(seed):
  _survive(random_lib.Random(seed))


def _survive(random):
  num_stages = random.randint(1, 3)
  count = random.randint(1, 3)
  texts = {s: TEXT[3 * s :] for s in range(count)}
  stages = taps(texts, num_stages)
  weather = Weather(
    seed=random.randrange(1000),
    loss=random.choice([0.0, 0.3]),
    duplicates=random.choice([0.0, 0.5]),
    kills=tuple(
      Kill(random.randrange(num_stages), random.uniform(0, 0.6), 0.1)
      for _ in range(random.randint(1, 3))
    ),
  )
  ring = ring_of(
    stages,
    delays=[random.uniform(0, 0.02) for _ in range(num_stages + 1)],
    times=[random.uniform(0, 0.01) for _ in range(num_stages)],
    draft=sch.DraftCosts(per_node_s=random.choice([0.0, 0.01])),
    drafter_stage=random.choice([None, num_stages - 1]),
    weather=weather,
  )
  drafter = bench.drafter_of(
    texts,
    right=random.choice([0.3, 0.9]),
    size=lambda budget: random.randint(0, budget),
    random=random,
  )
  policy = random.choice(
    [bench.pipelined(random, max_in_flight=4, max_nodes=6), sch.priced()]
  )
  stop = sch.Stop(
    ids=frozenset(random.sample(range(bench.VOCAB), random.randint(0, 1))),
    strings=tuple(random.sample(["aab", "ba"], random.randint(0, 1))),
    text_of=bench.text_of,
  )
  requests = [
    (
      random.uniform(0, 0.3),
      bench.request_of(texts[s], 2, random.randint(1, 25), seed=s, stop=stop),
    )
    for s in range(count)
  ]
  driver = driver_of(policy, drafter)
  result = ring.run(driver, requests)
  for s, (_, request) in enumerate(requests):
    outcome = result.outcomes[s]
    assert (outcome.tokens, outcome.reason) == bench.plain(
      texts[s], request, 200
    )
  assert driver.done and not driver.engine.runs
  by_epoch = collections.Counter(run.epoch for run in stages[0].heard)
  assert max(by_epoch, default=0) <= len(weather.kills)
