# SPDX-License-Identifier: Apache-2.0
"""Calibration runs are legal, and what is made of their times is right."""

import collections
import time

import pytest

from tests.worlds import rings
from wanspec_jax import wire
from wanspec_jax.worlds import ReplayStage, StageShape
from wanspec_jax.worlds._calibrate import calibration_laps, stage_seconds

SHAPE = StageShape(row_buckets=(4, 8), slot_buckets=(16, 64))


def texts():
  return collections.defaultdict(lambda: rings.TEXT)


@pytest.mark.parametrize("num_slots", SHAPE.slot_buckets)
def test_runs_are_legal_fill_the_cache_and_leave_nothing(num_slots):
  laps = calibration_laps(SHAPE, num_slots=num_slots, repeats=3)
  assert [lap.run.run_id for lap in laps] == list(range(len(laps)))
  timed = [lap.bucket for lap in laps if lap.bucket]
  assert timed == [4, 8] * 3
  tail = ReplayStage(capacity=SHAPE.capacity, texts=texts())
  used = []
  for lap in laps:
    out = tail.process(
      wire.decode_run(wire.split_frame(wire.encode_run(lap.run)).body)[0]
    )
    used.append(int(tail._slots.used.sum()))
    assert len(out.message.verdicts) == (lap.bucket is not None)
  assert used[-1] == 0
  highest = max(used)
  assert highest <= num_slots
  smaller = [b for b in SHAPE.slot_buckets if b < num_slots]
  assert all(highest > b for b in smaller), "the cache grows to its size"


def test_medians_and_the_rest_of_a_lap_by_hand():
  laps = [
    lap
    for lap in calibration_laps(SHAPE, num_slots=16, repeats=3)
    if lap.bucket
  ]
  spans, elapsed_s = [], {}
  for i, lap in enumerate(laps):
    run, start_s = lap.run.run_id, 10.0 * i
    busy = 0.01 * lap.bucket + (5.0 if i == 0 else 0.0)  # one outlier
    spans += [
      ["hop 0", "", start_s, start_s + 0.1, run],
      ["stage 0", "", start_s + 0.1, start_s + 0.1 + busy, run],
      ["hop 1", "", start_s, start_s + 0.2, run],
      ["stage 1", "", start_s, start_s + 2 * busy, run],
      ["hop 2", "", start_s, start_s + 0.3, run],
    ]
    elapsed_s[run] = 0.6 + 3 * busy + 0.02
  found = stage_seconds(
    laps, spans=spans, elapsed_s=elapsed_s, num_stages=2, is_emulated=True
  )
  assert found[4] == pytest.approx([0.04 + 0.01, 0.08 + 0.01])
  assert found[8] == pytest.approx([0.08 + 0.01, 0.16 + 0.01])
  real = stage_seconds(
    laps, spans=spans, elapsed_s=elapsed_s, num_stages=2, is_emulated=False
  )
  assert real[8] == pytest.approx([0.08, 0.16]), "real links keep the rest"


def test_a_ring_is_timed_in_its_laps():
  """Stages that sleep are found to take that long, and a little more."""

  def slow(run):
    time.sleep(2e-3 * run.num_rows)

  stages = rings.recorded(2, texts())
  for stage in stages:
    stage.hook = slow

  async def main():
    async with rings.served(2, stages) as (cluster, _):
      hops = [wire.LinkShaper()] * 3
      async with rings.ring_of(cluster, hops=hops) as ring:
        found = await ring.profile(num_slots=64, repeats=3)
        assert len(found) == 2
        for times in found:
          for seconds, bucket in zip(
            times, rings.SHAPE.row_buckets, strict=True
          ):
            assert 2e-3 * bucket <= seconds < 2e-3 * bucket + 0.05
        with pytest.raises(ValueError, match="num_slots must be one of"):
          await ring.profile(num_slots=65, repeats=1)
        with pytest.raises(ValueError, match="repeats at least 1"):
          await ring.profile(num_slots=64, repeats=0)
        # The slower of two stages that sleep side by side sets the pace.
        spacing = await ring.spacing(num_slots=64, repeats=5)
        for seconds, bucket in zip(
          spacing, rings.SHAPE.row_buckets, strict=True
        ):
          assert 2e-3 * bucket <= seconds < 1.5 * 2e-3 * bucket + 0.01
        with pytest.raises(ValueError, match="repeats at least 2"):
          await ring.spacing(num_slots=64, repeats=1)
        result = await ring.run(
          rings.driver_of(), [(0.0, rings.request_of(10))]
        )
        assert tuple(result.outcomes[0].tokens) == rings.TEXT[3:13]
        assert min(s.start_s for s in result.spans) >= 0, "none of before"

  rings.run(main)
