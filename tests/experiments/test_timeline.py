# SPDX-License-Identifier: Apache-2.0
"""Timelines: idle shares by hand, pictures that are the same each time, and the
study that draws one per policy."""

import dataclasses
import xml.etree.ElementTree as ET

import numpy as np
import pytest

from experiments import _fates, _timeline
from experiments.studies import _grid, timelines
from wanspec_jax import schedules as sch
from wanspec_jax.wire import ByteCounter
from wanspec_jax.worlds import Outcome, SessionResult, Span

SPANS = [
  Span("hop 0", "30 B", 0.0, 2.0, 0),
  Span("hop 0", "30 B", 1.0, 3.0, 1),
  Span("stage 0", "1 rows", 2.0, 4.0, 0),
  Span("stage 0", "down", 5.0, 7.0, -1),
  Span("back 1", "cancel", 4.0, 6.0, -1),
  Span("hop 1", "5 B", 4.0, 6.0, 0),
  Span("hop 1", "5 B", 8.0, 10.0, 1),
]


def test_idle_shares_worked_by_hand():
  assert _timeline.idle_shares(SPANS) == pytest.approx(
    {"hop 0": 0.7, "stage 0": 0.8, "hop 1": 0.6, "back 1": 0.8}
  )
  # From 2.5 to 5: half a second of hop 0, 1.5 of stage 0, 1 of hop 1 and back.
  assert _timeline.idle_shares(SPANS, within=(2.5, 5.0)) == pytest.approx(
    {"hop 0": 0.8, "stage 0": 0.4, "hop 1": 0.6, "back 1": 0.6}
  )


def test_idle_shares_on_a_raster():
  """Against counting the moments at which nothing goes on in a lane."""
  rng = np.random.default_rng(0)
  spans = []
  for run in range(40):
    start_s, length_s = rng.uniform(0, 10), rng.uniform(0, 0.6)
    lane = ("hop 0", "stage 0")[run % 2]
    spans.append(Span(lane, "x", start_s, start_s + length_s, run))
  within = 2.0, 7.0
  moments = np.linspace(*within, 200_001)
  shares = _timeline.idle_shares(spans, within=within)
  for lane in ("hop 0", "stage 0"):
    busy = np.zeros(len(moments), bool)
    for span in spans:
      if span.lane == lane:
        busy |= (span.start_s <= moments) & (moments < span.end_s)
    assert shares[lane] == pytest.approx(1 - busy.mean(), abs=1e-3)


def test_ways_back_come_last():
  assert _timeline.lanes(
    [
      *SPANS,
      Span("back 10", "cancel", 0, 1, -1),
      Span("back 2", "cancel", 0, 1, -1),
    ]
  ) == ("hop 0", "stage 0", "hop 1", "back 1", "back 2", "back 10")


def test_the_same_spans_give_the_same_file(tmp_path):
  for name in ("one", "two"):
    _timeline.draw_timeline(
      SPANS,
      tmp_path / f"{name}.svg",
      world="virtual",
      title="by hand",
      overview=False,
    )
  one, two = ((tmp_path / f"{n}.svg").read_bytes() for n in ("one", "two"))
  assert one == two
  assert b"<dc:date>" not in one
  texts = {"".join(e.itertext()).strip() for e in ET.fromstring(one).iter()}
  assert {"idle 70%", "idle 80%", "idle 60%", "hop 0", "by hand"} <= texts
  assert "cancel, on its way" in texts
  assert "back 1" not in texts  # drawn as lines from lane to lane


def test_drawing_shows_fates(tmp_path):
  runs = {
    0: _fates.RunRows(
      (_fates.Row(_fates.ROOT), _fates.Row(_fates.DEAD, is_hedge=True)), True
    )
  }
  path = tmp_path / "t.svg"
  _timeline.draw_timeline(
    SPANS, path, world="virtual", title="", runs=runs, overview=False
  )
  text = path.read_text()
  for label in ("root", "speculated in vain", "hedge", "verdict", "down"):
    assert label in text
  assert "speculated and accepted" not in text
  assert "<pattern" in text  # the hatch


TWO = _grid.Point(lap_s=0.3, mbps=8.0, stages=2, level_s=0.0, quality=0.9)


def test_transmissions_are_bytes_over_bandwidth():
  # 0.1 s of delay per hop; 50 kB at 1 MB/s take 0.05 s before that.
  spans = [
    Span("hop 1", "50000 B", 0.0, 0.3, 0),  # it had to queue for 0.15 s
    Span("stage 1", "1 rows", 0.3, 0.4, 0),
    Span("drafter", "4 nodes", 0.0, 0.1, -1),
  ]
  hop, stage = timelines.transmissions(spans, TWO)
  assert (hop.start_s, hop.end_s) == pytest.approx((0.15, 0.2))
  assert stage == spans[1]


def test_figures_by_hand():
  count = timelines._SKIP + 12
  outcome = Outcome(
    prompt=(1,),
    submitted_s=0.0,
    tokens=[0] * count,
    emitted_s=[float(i) for i in range(count)],
  )
  start_s = float(timelines._SKIP)
  spans = [
    Span("hop 0", "30 B", start_s, start_s + 0.2, 0),
    Span("stage 0", "3 rows", start_s - 1, start_s + 1, 0),
    Span("stage 1", "1 rows, 2 cancelled", start_s + 1, start_s + 3.2, 0),
  ]
  row = _fates.Row
  runs = {
    0: _fates.RunRows((row(_fates.PROMPT),), False),
    1: _fates.RunRows((row(_fates.ROOT), row(_fates.ACCEPTED)), True),
    2: _fates.RunRows((row(_fates.DEAD, is_hedge=True),), False),
  }
  result = SessionResult(
    world="virtual", outcomes={0: outcome}, spans=spans, bytes=ByteCounter()
  )
  figures = timelines.figures_of(result, runs, TWO)
  assert figures["tokens_per_s"] == pytest.approx(1.0)
  assert figures["bottleneck"] == "stage 1"
  assert figures["idle"] == pytest.approx(1 - 2.2 / 11)
  assert figures["rows"] == 3
  assert figures["hedges"] == 1
  assert figures["cancelled"] == 2
  assert figures["rows_per_token"] == pytest.approx(3 / count)
  assert [figures[k] for k in ("root", "accepted", "dead")] == [1, 1, 1]


def test_markdown_marks_the_best():
  text = timelines.markdown({"a": {"p": 1.0, "q": 2.0}})
  assert text.splitlines()[-1] == "| a | 1.00 | **2.00** |"


def test_a_drawn_policy(tmp_path):
  """Plain decoding, for which everything is known beforehand."""
  this = timelines.Drawn("plain", "root alone", sch.lockstep(0), TWO)
  tokens = timelines._SKIP + 20
  figures = timelines.draw(this, tokens, tmp_path, None)
  # A lap: delays, two stages of 32 ms, 8 KiB at 1 MB/s, and a few bytes.
  lap_s = 0.3 + 0.064 + _grid.ROW_BYTES / 1e6
  assert 1 / figures["tokens_per_s"] == pytest.approx(lap_s, rel=1e-3)
  assert figures["idle"] == pytest.approx(1 - 0.032 / lap_s, rel=1e-3)
  assert figures["bottleneck"].startswith("stage")
  assert figures["rows"] == figures["root"] == tokens
  assert figures["cancelled"] == figures["hedges"] == 0
  assert "plain (root alone): 1.00x plain" in (
    (tmp_path / "plain.svg").read_text()
  )


def test_every_policy_of_the_sweep_is_drawn_at_its_setting():
  settings = timelines.schedules.sweeps(timelines.HOME)
  best = {name: next(iter(found)) for name, found in settings.items()}
  drawn = timelines.drawn(best)
  names = [this.name for this in drawn]
  assert names == ["plain", *best, "priced", "with_floor"]
  assert {this.name: this.setting for this in drawn}.items() >= best.items()
  for this in drawn[1:-1]:
    assert this.point == timelines.HOME
    assert this.policy.name == this.name


def test_best_settings_are_the_fastest(monkeypatch):
  rates = {"a": 1.0, "b": 3.0, "c": 2.0}
  monkeypatch.setattr(
    timelines.schedules,
    "sweeps",
    lambda point: {"p": {name: lambda name=name: name for name in rates}},
  )
  monkeypatch.setattr(
    _grid, "rate", lambda point, policy, tokens: rates[policy]
  )
  assert timelines.best_settings(TWO, 40) == {"p": "b"}


def test_rings_differ_from_the_drawn_one_in_one_thing():
  home = dataclasses.asdict(timelines.HOME)
  for change in timelines._CHANGES.values():
    ((field, value),) = change.items()
    assert home[field] != value
