# SPDX-License-Identifier: Apache-2.0
"""Tables and timelines of small sessions, against figures worked by hand."""

import io
import itertools
import json
import math
import struct

import pytest

from experiments import _report, _timeline
from wanspec_jax import metrics
from wanspec_jax.wire import TRAFFIC_CLASSES, ByteCounter
from wanspec_jax.worlds import Outcome, SessionResult, Span


def outcome(tokens, emitted_s, rounds=(), *, prompt=(1, 2), **kwargs):
  return Outcome(
    prompt=prompt,
    submitted_s=0.5,
    tokens=list(tokens),
    emitted_s=list(emitted_s),
    finished_s=max(emitted_s, default=0.5),
    rounds=tuple(
      metrics.RoundRecord(drafted=d, tested=t, accepted=a, emitted=e)
      for d, t, a, e in rounds
    ),
    reason="length",
    **kwargs,
  )


def arm(name, outcomes, world="virtual", **kwargs):
  counter = ByteCounter()
  counter.add("hop 0", {"ids": 12, "control": 30})
  counter.add("hop 1", {"activations": 600})
  return _report.Arm(
    name=name, world=world, outcomes=outcomes, bytes=counter, **kwargs
  )


def plain(**kwargs):
  lap = [(0, 0, 0, 1)]
  return arm(
    "plain",
    [
      outcome([5, 6, 7, 8], [1, 2, 3, 4], 4 * lap),
      outcome([9, 9], [2, 4], 2 * lap, prompt=(3,)),
    ],
    **kwargs,
  )


def speculative(last=9, **kwargs):
  return arm(
    "speculative",
    [
      # The first block has two tokens, so two are decoded in 1.5 s.
      outcome([5, 6, 7, 8], [1, 1, 2, 2.5], [(3, 2, 1, 2), (3, 1, 0, 1)] * 2),
      outcome(
        [9, last], [2, 3], [(4, 1, 1, 2)], prompt=(3,), margins=[1.0, 0.02]
      ),
    ],
    **kwargs,
  )


def test_arm_against_hand_computed_figures():
  a, b = plain(), speculative()
  assert a.tokens_per_s == pytest.approx((3 + 1) / (3 + 2))
  assert b.tokens_per_s == pytest.approx((2 + 1) / (1.5 + 1))
  assert b.first_token_s == pytest.approx(1.0)  # median of 0.5 and 1.5
  assert b.num_tokens == 6
  assert b.summary.laps == 5
  assert b.summary.wasted_nodes == 16 - 3
  assert b.summary.acceptance_rate == pytest.approx(3 / 7)
  assert b.bytes_per_token["activations"] == 100
  assert b.bytes_per_token["total"] == pytest.approx(642 / 6)
  assert b.num_identical(a) == 2
  # From the submission at 0.5 s to the last token.
  assert b.speedup(a).ratio == pytest.approx((3.5 + 3.5) / (2.0 + 2.5))
  assert speculative(last=3).speedup(a).ratio == pytest.approx(3.5 / 2.0)


def test_nothing_emitted_is_nan_and_prints():
  nothing = arm("none", [outcome([], [])])
  assert math.isnan(nothing.tokens_per_s)
  assert math.isnan(nothing.first_token_s)
  assert "-" in _report.to_text(_report.comparison_table([nothing]))


def test_arm_of_a_session_is_in_sequence_order():
  outcomes = {1: outcome([4], [1]), 0: outcome([3], [1], prompt=(8,))}
  result = SessionResult(
    world="sockets", outcomes=outcomes, spans=[], bytes=ByteCounter()
  )
  made = _report.Arm.from_session("x", result)
  assert [o.prompt for o in made.outcomes] == [(8,), (1, 2)]
  assert made.world == "sockets"


def row_of(text, title, name):
  """The cells of an arm's row, found from the table's title downwards."""
  lines = text[text.index(title) :].splitlines()
  return next(line.split() for line in lines if line.split()[:1] == [name])


def test_comparison_table_at_100_columns():
  text = _report.to_text(
    _report.comparison_table([plain(), speculative(last=3)])
  )
  assert max(map(len, text.splitlines())) <= 100
  assert "…" not in text
  cells = " ".join(row_of(text, "Decoding", "speculative"))
  assert cells == "speculative 1/2 1.75x 6 5 1.6 1.2 0.429 13 1 s"
  assert row_of(text, "Decoding", "plain")[1:3] == ["baseline", "-"]
  row = row_of(text, "Bytes per token", "speculative")
  order = text[text.index("Bytes per token") :].split()[4:12]
  assert order == [*TRAFFIC_CLASSES, "total"]
  assert dict(zip(order, row[1:], strict=True)) == {
    "ids": "2",
    "verdicts": "0",
    "topology": "0",
    "activations": "100",
    "features": "0",
    "control": "5",
    "trace": "0",
    "total": "107",
  }
  assert "Time: virtual (modelled). Tokens: real." in text
  assert "first block" in text


def test_wide_figures_and_long_names_are_not_cut():
  big = 3 * [(10**7, 0, 0, 1)]
  many = arm(
    "a-name-of-an-arm-that-goes-on-and-on",
    [outcome(range(3), [1e4, 2e4, 3e4], big)],
  )
  text = _report.to_text(_report.comparison_table([many]))
  assert max(map(len, text.splitlines())) <= 100
  assert "…" not in text
  assert "30000000" in text


def test_refused_speedups_say_why():
  tables = [
    ([plain(), speculative(world="sockets")], "needs one clock"),
    (
      [
        plain(),
        # Unequal in both prompts: nothing to compare the times of.
        arm("other", [outcome([1], [1]), outcome([1], [1], (), prompt=(3,))]),
      ],
      "identical=0/2",
    ),
  ]
  for arms, why in tables:
    text = " ".join(_report.to_text(_report.comparison_table(arms)).split())
    assert f"No speed-up for {arms[1].name}" in text
    assert why in text
    assert math.isnan(_report.arm_figures(arms[1], arms[0])["speedup"])


def test_two_unequal_prompts_refuse_the_speedup():
  other = speculative(last=3)
  other.outcomes[0].tokens[1] = 0
  with pytest.raises(ValueError, match="identical=0/2"):
    other.speedup(plain())


def test_mixed_clocks_and_replayed_tokens_are_named_per_arm():
  text = " ".join(
    _report.to_text(
      _report.comparison_table(
        [plain(world="sockets"), speculative(replayed=True)]
      )
    ).split()
  )
  assert "plain wall clock, speculative virtual (modelled)" in text
  assert "Tokens: plain real, speculative replayed." in text


def test_other_prompts_are_refused():
  other = arm("other", [outcome([1], [1], prompt=(7,))])
  with pytest.raises(ValueError, match="'other': must have the prompts of"):
    _report.comparison_table([plain(), other])
  with pytest.raises(ValueError, match="none given"):
    _report.comparison_table([])
  with pytest.raises(ValueError, match=r"Arm\.world = 'moon'"):
    arm("x", [outcome([1], [1])], world="moon")


def test_per_prompt_table_locates_differences():
  text = _report.to_text(
    _report.per_prompt_table(
      [plain(), speculative(last=3)], ["first", "second"]
    )
  )
  assert max(map(len, text.splitlines())) <= 100
  lines = [line for line in text.splitlines() if " speculative " in line]
  assert lines[0].split()[1:] == [
    *"44",
    "1.5",
    "1.33",
    "0.333",
    "yes",
    "length",
  ]
  assert "from 1, margin 0.02" in lines[1]
  assert [w for w in text.split() if w in ("first", "second")] == [
    "first",
    "second",
  ]
  with pytest.raises(ValueError, match="names: 1 given, there are 2"):
    _report.per_prompt_table([plain()], ["one"])


def test_first_difference():
  assert _report.first_difference([1, 2], [1, 2]) is None
  assert _report.first_difference([1, 2, 3], [1, 4, 3]) == 1
  assert _report.first_difference([1, 2], [1, 2, 3]) == 2


def test_figures_are_what_the_tables_show():
  figures = _report.arm_figures(speculative(), plain())
  assert figures["identical"] == "2/2"
  assert figures["speedup"] == pytest.approx(7 / 4.5)
  assert figures["summary"]["laps"] == 5
  assert figures["clock"] == "virtual (modelled)"


def test_show_without_a_terminal_is_plain_text():
  out = io.StringIO()
  _report.show(_report.per_prompt_table([plain()]), file=out)
  assert "\x1b" not in out.getvalue()
  assert out.getvalue() == _report.to_text(_report.per_prompt_table([plain()]))


def ring_spans(num_runs=12, lap_s=1.0):
  """Two stages; each run's lap is cut into 0.4 + 0.05 + 0.3 + 0.05 + 0.2."""
  spans = []
  for run in range(num_runs):
    time_s = run * lap_s
    spans.append(Span("drafter", "draft", time_s - 0.01, time_s, -1))
    for lane, part in (
      ("hop 0", 0.4),
      ("stage 0", 0.05),
      ("hop 1", 0.3),
      ("stage 1", 0.05),
      ("hop 2", 0.2),
    ):
      spans.append(Span(lane, "x", time_s, time_s + part * lap_s, run))
      time_s += part * lap_s
  return spans


RING = ("drafter", "hop 0", "stage 0", "hop 1", "stage 1", "hop 2")


def test_lanes_follow_the_ring():
  assert _timeline.lanes(ring_spans()[::-1]) == RING
  spans = [
    Span("hop 10", "x", 0, 1, 0),
    Span("helper", "x", 0, 1, 0),
    Span("coordinator", "x", 0, 1, 0),
  ]
  names = _timeline.lanes(spans)
  assert names[:4] == ("coordinator", "hop 0", "stage 0", "hop 1")
  assert names[-3:] == ("stage 9", "hop 10", "helper")


def test_window_is_four_laps_from_the_middle():
  begin_s, end_s = _timeline.window(ring_spans())
  assert (begin_s, end_s) == pytest.approx((6.0, 10.0))
  begin_s, end_s = _timeline.window(ring_spans(), window_s=1.5)
  assert (begin_s, end_s) == pytest.approx((6.0, 7.5))
  # It ends with the session, and is all of a session that is shorter.
  assert _timeline.window(ring_spans(), window_s=8) == pytest.approx((4, 12))
  assert _timeline.window(ring_spans(2)) == pytest.approx((-0.01, 2))
  with pytest.raises(ValueError, match="window_s = 0"):
    _timeline.window(ring_spans(), window_s=0)


def test_busy_counts_overlap_once():
  spans = [
    Span("hop 0", "x", 0, 4, 0),
    Span("hop 0", "x", 1, 2, 1),
    Span("hop 0", "x", 3, 6, 2),
    Span("hop 1", "x", 8, 10, 0),
  ]
  assert _timeline.busy_fractions(spans) == pytest.approx(
    {"hop 0": 0.6, "stage 0": 0.0, "hop 1": 0.2}
  )


def test_drawing_is_a_png_of_sensible_size(tmp_path):
  path = tmp_path / "timeline.png"
  _timeline.draw_timeline(
    ring_spans(), path, world="virtual", title="two stages"
  )
  data = path.read_bytes()
  assert data[:8] == b"\x89PNG\r\n\x1a\n"
  width, height = struct.unpack(">II", data[16:24])
  assert 1000 <= width <= 2000
  assert 500 <= height <= 2000


def test_drawing_says_whose_clock_it_shows(tmp_path):
  import matplotlib

  path = tmp_path / "timeline.svg"
  with matplotlib.rc_context({"svg.fonttype": "none"}):
    _timeline.draw_timeline(ring_spans(), path, world="sockets", title="T9")
  text = path.read_text()
  assert "wall clock" in text
  assert "virtual" not in text
  assert "T9" in text
  for lane in RING:
    assert f">{lane}" in text
  with pytest.raises(ValueError, match="world = 'moon'"):
    _timeline.draw_timeline(ring_spans(), path, world="moon", title="")


def read_trace(path):
  """Thread names by id, and the events per thread, from a trace file."""
  events = json.loads(path.read_text())["traceEvents"]
  names = {
    e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"
  }
  return names, [e for e in events if e["ph"] == "X"]


def test_trace(tmp_path):
  spans = ring_spans(3)
  _timeline.write_perfetto(spans[::-1], tmp_path / "trace.json")
  names, events = read_trace(tmp_path / "trace.json")
  assert tuple(names[tid] for tid in sorted(names)) == RING
  assert len(events) == len(spans)
  assert all(e["ts"] >= 0 and e["dur"] >= 0 for e in events)
  assert [e["ts"] for e in events] == sorted(e["ts"] for e in events)
  # The first draft began at -0.01 s, which moves everything by 10 ms.
  (event,) = (
    e for e in events if names[e["tid"]] == "stage 0" and e["args"]["run"] == 1
  )
  assert event["ts"] == pytest.approx(1.41e6)
  assert event["dur"] == pytest.approx(0.05e6)


def test_trace_events_of_a_thread_do_not_overlap(tmp_path):
  spans = [Span("hop 0", "f", 0.1 * i, 0.1 * i + 0.25, i) for i in range(6)]
  spans.append(Span("stage 0", "skewed", 0.5, 0.499, 5))
  _timeline.write_perfetto(spans, tmp_path / "trace.json")
  names, events = read_trace(tmp_path / "trace.json")
  assert list(names.values()) == ["hop 0", "hop 0 (2)", "hop 0 (3)", "stage 0"]
  for tid in names:
    mine = sorted((e["ts"], e["dur"]) for e in events if e["tid"] == tid)
    for (ts, dur), (following, _) in itertools.pairwise(mine):
      assert ts + dur <= following + 1e-6
  assert min(e["dur"] for e in events) == 0


def test_no_spans_are_refused(tmp_path):
  with pytest.raises(ValueError, match="spans: none given"):
    _timeline.write_perfetto([], tmp_path / "t.json")
  with pytest.raises(ValueError, match="spans: none given"):
    _timeline.draw_timeline([], tmp_path / "t.png", world="virtual", title="")
