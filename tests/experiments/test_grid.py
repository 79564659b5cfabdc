# SPDX-License-Identifier: Apache-2.0
"""The grid's points, and settings that are given up."""

import pytest

from experiments.studies import _grid
from wanspec_jax import schedules as sch

POINT = _grid.Point(lap_s=0.2, mbps=30.0, stages=2, level_s=0.0, quality=0.6)


def test_the_quick_points_are_of_the_grid_and_meet_every_value_of_each_axis():
  quick, full = _grid.points(True), _grid.points(False)
  assert len(set(quick)) == len(quick) == 12
  assert len(set(full)) == len(full) == 162
  assert set(quick) <= set(full)
  for axis in ("lap_s", "mbps", "stages", "level_s", "quality"):
    assert {getattr(p, axis) for p in quick} == {getattr(p, axis) for p in full}


@pytest.mark.parametrize("factor", [0.5, 0.999, 1.001, 1.1, 1.5, 4.0])
def test_only_what_is_slower_than_the_least_is_given_up(factor):
  policy = sch.in_pipe(width=1, in_flight=4)
  whole = _grid.rate(POINT, policy, tokens=100)
  least = factor * whole
  found = _grid.rate(POINT, policy, tokens=100, least=least)
  if factor < 1:
    assert found == whole
  else:
    assert 0 < found < least


def test_what_is_given_up_is_not_decoded_to_its_end(monkeypatch):
  counts = []
  session = _grid.session

  def counted(*args, on_emit, **kwargs):
    def note(times_s):
      counts.append(len(times_s))
      on_emit(times_s)

    return session(*args, on_emit=note, **kwargs)

  monkeypatch.setattr(_grid, "session", counted)
  plain = sch.lockstep(0)
  rate = _grid.rate(POINT, plain, tokens=100)
  assert counts.pop() == 100
  counts.clear()
  _grid.rate(POINT, plain, tokens=100, least=4 * rate)
  # A quarter of the 66 tokens behind the 34th, and the one that tells.
  assert counts.pop() == 34 + 66 // 4 + 1
