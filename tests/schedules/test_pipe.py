# SPDX-License-Identifier: Apache-2.0
"""Costs and the pipe against the virtual world and sums by hand."""

import dataclasses
import itertools
import math

import numpy as np
import pytest

from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import Link, Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing

DELAYS = (0.01, 0.03, 0.02, 0.015)
BPS = (1e6, 2e5, 5e5, 1e6)
TIMES = (0.004, 0.009, 0.002)
ROW_BYTES = 100


def _profile():
  return StageProfile(
    buckets=(64,),
    seconds=tuple((t,) for t in TIMES),
    dtype="float32",
    device="none",
  )


def _costs():
  ring = Ring.from_links(
    [
      Link(rtt_s=2 * delay, bandwidth_bps=bps)
      for delay, bps in zip(DELAYS, BPS, strict=True)
    ]
  )
  return sch.Costs.of_ring(
    ring,
    _profile(),
    hop_bytes_model(
      num_stages=3, ids_bytes_per_node=0, row_bytes=ROW_BYTES, header_bytes=0
    ),
    max_rows=64,
  )


def test_a_lap_is_the_sum_of_its_parts():
  costs = _costs()
  rows = 3
  hops = [0, 8 * 300 / 2e5, 8 * 300 / 5e5, 0]
  lap_s = sum(DELAYS) + sum(hops) + sum(TIMES)
  assert costs.lap_s(rows) == pytest.approx(lap_s)
  assert costs.tail_s(rows) == pytest.approx(lap_s - DELAYS[-1])
  assert costs.occupancy_s(rows) == pytest.approx(hops[1])
  assert costs.occupancy_s(1) == pytest.approx(TIMES[1])


def test_mean_jitter_is_part_of_the_delay():
  ring = Ring.uniform(num_stages=1, lap_s=0.1, bandwidth_bps=1e9, jitter_s=0.01)
  costs = sch.Costs.of_ring(
    ring,
    StageProfile(buckets=(1,), seconds=((0.0,),), dtype="x", device="x"),
    lambda rows: np.zeros(2),
    max_rows=1,
  )
  draws = [wire.LinkShaper(jitter_s=0.01, seed=s) for s in range(4000)]
  mean = sum(d.schedule(wire.ShaperState(), 0.0, 0)[1] for d in draws) / 4000
  assert costs.lap_s(1) - 0.1 == pytest.approx(2 * mean, rel=0.05)


def test_predictions_are_the_times_of_the_virtual_world():
  """Runs of several sizes that queue behind each other: the pipe books what
  the world makes of them, header bytes apart."""
  text = [i * i % 7 % bench.VOCAB for i in range(400)]
  costs = _costs()
  predicted = []

  def decide(spec, pipe, time_s):
    if spec.flights:
      predicted.extend(
        (f.run, f.return_s) for f in spec.flights if f.run > len(predicted)
      )
    if not spec.drafting and spec.drafted_root is None:
      return sch.Grow((spec.anchor(spec.root),), 40)
    ids = spec.launchable(len(spec.flights) + 1)
    return sch.Send(tuple(ids)) if ids and len(spec.flights) < 6 else None

  engine = sch.init(
    sch.Policy("burst", decide, 8), costs, capacity=300, prefill_rows=8
  )
  stages = [ReplayStage(capacity=300, row_bytes=ROW_BYTES) for _ in range(2)]
  stages.append(ReplayStage(capacity=300, texts={0: text}))
  ring = VirtualRing(
    stages=stages,
    hops=[
      wire.LinkShaper(delay_s=d, bandwidth_bps=b)
      for d, b in zip(DELAYS, BPS, strict=True)
    ],
    profile=_profile(),
  )
  request = sch.Request(
    prompt=tuple(text[:1]), max_new_tokens=30, sampling=Sampling()
  )
  result = ring.run(
    Driver(engine, bench.chain_of({0: text}, 40)), [(0.0, request)]
  )
  assert result.outcomes[0].tokens == text[1:31]
  back = {
    s.run: s.end_s for s in result.spans if s.lane == "hop 3" and s.run >= 0
  }
  checked = [
    (expected, back[run]) for run, expected in predicted[:6] if run in back
  ]
  assert len(checked) >= 4
  for expected, seen in checked:
    # Headers and ids: some 40 bytes on links of 200 kbit/s and more.
    assert expected <= seen <= expected + 0.012
  times = [t for _, t in checked]
  assert all(b > a for a, b in itertools.pairwise(times))


def test_what_waits_is_what_is_booked():
  pipe = sch.Pipe(_costs())
  assert pipe.wait_s(2, 5.0) == pytest.approx(0.0, abs=1e-12)
  pipe.launch(10, 5.0)
  # Hop 1 is the bottleneck: 8 · 1000 / 2e5 s.
  assert pipe.wait_s(10, 5.0) == pytest.approx(8 * 1000 / 2e5)
  assert pipe.wait_s(10, 5.0 + 8 * 1000 / 2e5) == pytest.approx(0.0, abs=1e-12)
  assert pipe.tail_s(10, 5.0) > 5.0 + pipe.costs.tail_s(10)
  pipe.clear()
  assert pipe.wait_s(10, 5.0) == pytest.approx(0.0, abs=1e-12)


def test_stages_that_share_a_host_space_the_runs():
  """What no link or stage alone demands: runs follow at the measured time."""
  profile = dataclasses.replace(
    _profile(), buckets=(8, 64), seconds=((0.004, 0.004),) * 3
  )
  profile = dataclasses.replace(profile, spacing_s=(0.02, 0.05))
  ring = Ring.uniform(num_stages=3, lap_s=0.1, bandwidth_bps=1e9)
  costs = sch.Costs.of_ring(ring, profile, lambda n: np.zeros(4), max_rows=64)
  assert costs.occupancy_s(8) == pytest.approx(0.02)
  assert costs.occupancy_s(9) == pytest.approx(0.05)
  assert costs.occupancy_s(65) == pytest.approx(0.07)
  assert costs.lap_s(8) == pytest.approx(0.112), "alone it is as fast as ever"
  pipe = sch.Pipe(costs)
  back = [pipe.launch(8, 1.0)[1] for _ in range(3)]
  assert np.diff(back) == pytest.approx([0.02, 0.02])
  assert pipe.wait_s(9, 1.0) == pytest.approx(0.06)
  assert pipe.queue_s(64, 1.06, 1.06) == pytest.approx(0.05)
  assert pipe.wait_s(1, 1.06) == pytest.approx(0.0), "nothing was booked"
  assert StageProfile.from_json(profile.to_json()) == profile
  with pytest.raises(ValueError, match=r"spacing_s = .*: must be empty or"):
    dataclasses.replace(profile, spacing_s=(0.02,))


def test_what_runs_do_to_each_other_is_learned_from_their_returns():
  """Runs come back late by 3 ms for each other one under way meanwhile."""
  text = [i * i % 7 % bench.VOCAB for i in range(400)]

  def decide(spec, pipe, time_s):
    if not spec.drafting and spec.drafted_root != spec.root:
      return sch.Grow((spec.anchor(spec.root),), 40)
    ids = spec.launchable(1)
    return sch.Send(tuple(ids)) if ids and len(spec.flights) < width else None

  for width, off_s in ((1, 0.0), (4, 0.0), (1, 0.02), (4, 0.02), (4, -0.01)):
    state = sch.init(
      sch.Policy("some", decide, 8), _costs(), capacity=300, prefill_rows=8
    )
    stage = ReplayStage(capacity=300, texts={0: text})
    drafter = bench.chain_of({0: text}, 40)
    driver = Driver(state, drafter)
    request = sch.Request(
      prompt=tuple(text[:1]), max_new_tokens=60, sampling=Sampling()
    )
    work = driver.handle(sch.Submitted(time_s=0.0, sequence=0, request=request))
    due: list[tuple[float, int, object]] = []
    alive: list[int] = []
    others: dict[int, int] = {}

    def take(
      work,
      time_s,
      due=due,
      alive=alive,
      others=others,
      driver=driver,
      stage=stage,
    ):
      for run in work.runs if not driver.done else ():
        others[run.run_id] = len(alive)
        for other in alive:
          others[other] += 1
        alive.append(run.run_id)
        spec = driver.engine.sequences[0].spec
        (flight,) = [f for f in spec.flights if f.run == run.run_id]
        due.append((flight.return_s, run.run_id, stage.process(run)))
      for draft in work.drafts:
        take(driver.handle(driver.draft(draft, time_s)), time_s)

    take(work, 0.0)
    while not driver.done:
      back_s, run_id, output = due.pop(0)
      alive.remove(run_id)
      time_s = back_s + off_s + 3e-3 * others[run_id]
      take(
        driver.handle(sch.Arrived(time_s=time_s, returned=output.message)),
        time_s,
      )
    found = driver.engine.pipe.crowding_s
    assert found == pytest.approx(3e-3 * (width > 1), rel=1e-6, abs=1e-9)


@pytest.mark.parametrize("stated", [0.03, 0.3, 0.6, 0.95])
@pytest.mark.parametrize("scale", [0.5, 1.0, 1.4])
def test_calibration_finds_what_stated_chances_are_worth(stated, scale):
  true = min(stated * scale, 0.99)
  calibration = sch.Calibration()
  hits = 0.0
  for _ in range(1500):
    hits += true
    accepted = hits >= 1.0
    hits -= accepted
    calibration.observe(math.log(stated), 1, accepted)
  found = math.exp(calibration.estimate(math.log(stated), 1))
  assert found == pytest.approx(true, rel=0.12)


def test_calibration_learns_decay_by_level():
  calibration = sch.Calibration()
  for level, rate in ((1, 0.8), (2, 0.6), (3, 0.4), (8, 0.2)):
    acc = 0.0
    for _ in range(800):
      acc += rate
      accepted = acc >= 1.0
      acc -= accepted
      calibration.observe(math.log(0.8), level, accepted)
  found = [math.exp(calibration.estimate(math.log(0.8), n)) for n in (1, 2, 8)]
  assert found[0] > 1.2 * found[1] > 1.4 * found[2]


def test_before_any_verdict_the_drafter_is_believed():
  calibration = sch.Calibration()
  for p in (0.01, 0.4, 1.0):
    assert math.exp(calibration.estimate(math.log(p), 5)) == pytest.approx(p)
