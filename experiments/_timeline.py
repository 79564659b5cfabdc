# SPDX-License-Identifier: Apache-2.0
"""Who was busy when: a picture for papers, a trace for a viewer."""

import json
import os
import pathlib
import re
import statistics
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from wanspec_jax.worlds import Span

# Okabe and Ito's colours, which colour-blind readers tell apart; grey: no run.
_COLOURS = (
  "#0072B2",
  "#E69F00",
  "#009E73",
  "#CC79A7",
  "#56B4E9",
  "#D55E00",
  "#F0E442",
)
_NO_RUN = "#999999"
_LAPS_SHOWN = 4
_CLOCKS = {"virtual": "virtual time (modelled)", "sockets": "wall clock"}
_RING_LANE = re.compile(r"(hop|stage) (\d+)")


def lanes(spans: Sequence[Span]) -> tuple[str, ...]:
  """Returns the lanes in ring order.

  First the coordinator and the drafter, if they did anything, then hop 0, stage
  0, hop 1, … to the last hop; lanes of other names follow. A stage or hop
  without spans is listed too if the ring goes on behind it: it was idle.
  """
  names = {span.lane for span in spans}
  last = -1
  for name in names:
    if match := _RING_LANE.fullmatch(name):
      last = max(last, 2 * int(match[2]) + (match[1] == "stage"))
  ring = [f"{('hop', 'stage')[i % 2]} {i // 2}" for i in range(last + 1)]
  head = [name for name in ("coordinator", "drafter") if name in names]
  return (*head, *ring, *sorted(names.difference(head, ring)))


def busy_fractions(spans: Sequence[Span]) -> dict[str, float]:
  """Returns, per lane, the part of the session during which it was busy.

  Spans that overlap, such as frames that are on a link together, count once.
  The session lasts from the first span's start to the last one's end.
  """
  start_s, end_s = _extent(spans)
  busy_s = dict.fromkeys(lanes(spans), 0.0)
  free_s = dict.fromkeys(busy_s, start_s)
  for span in sorted(spans, key=lambda span: span.start_s):
    begin_s = max(span.start_s, free_s[span.lane])
    if span.end_s > begin_s:
      busy_s[span.lane] += span.end_s - begin_s
      free_s[span.lane] = span.end_s
  total_s = end_s - start_s
  return {name: s / total_s if total_s else 0.0 for name, s in busy_s.items()}


def window(
  spans: Sequence[Span], *, window_s: float | None = None
) -> tuple[float, float]:
  """Returns the start and end, in seconds, of a part that stands for the whole.

  It begins with the run launched in the middle of the session, and lasts
  `window_s`: four laps by default, a lap being the median time from a run's
  first span to its last.

  Raises:
    ValueError: if `window_s` is not positive.
  """
  if window_s is not None and not window_s > 0:
    raise ValueError(f"window_s = {window_s}: must be > 0")
  start_s, end_s = _extent(spans)
  runs: dict[int, list[Span]] = defaultdict(list)
  for span in spans:
    if span.run >= 0:
      runs[span.run].append(span)
  extents = sorted(_extent(of_run) for of_run in runs.values())
  if window_s is None:
    laps_s = [b - a for a, b in extents]
    window_s = _LAPS_SHOWN * statistics.median(laps_s) if laps_s else 0.0
  if not 0 < window_s < end_s - start_s:
    return start_s, end_s
  middle_s = extents[len(extents) // 2][0] if extents else (start_s + end_s) / 2
  begin_s = max(start_s, min(middle_s, end_s - window_s))
  return begin_s, begin_s + window_s


def draw_timeline(
  spans: Sequence[Span],
  path: str | os.PathLike[str],
  *,
  world: str,
  title: str,
  window_s: float | None = None,
) -> None:
  """Draws a lane per link, stage and drafter, a bar per span, gaps when idle.

  Above a window of about four laps, below it the whole session. Colours follow
  the run id; what overlaps in a lane is stacked. Each lane's name has the part
  of the session during which it was busy.

  Args:
    spans: of one session.
    path: file to write; its ending names the format (`.png`, `.svg`, `.pdf`).
    world: `"virtual"` or `"sockets"`: the figure says whose clock it shows.
    title: what was run.
    window_s: length of the upper part in seconds.

  Raises:
    ValueError: if there are no spans, or on an unknown world.
  """
  from matplotlib.figure import Figure  # half a second that few runs need

  if world not in _CLOCKS:
    raise ValueError(f"world = {world!r}: must be one of {tuple(_CLOCKS)}")
  begin_s, end_s = window(spans, window_s=window_s)
  names = lanes(spans)
  rows = _stack(spans)
  busy = busy_fractions(spans)
  figure = Figure(figsize=(10, 2.4 + 0.42 * len(names)), layout="constrained")
  figure.suptitle(title)
  upper, lower = figure.subplots(2, 1, height_ratios=(2, 1))
  _draw(upper, names, rows, numbered=(begin_s, end_s))
  _draw(lower, names, rows)
  upper.set_title(
    f"{_CLOCKS[world]}; % of the session busy; colours and numbers are runs, "
    "grey is no run",
    fontsize=9,
  )
  upper.set_xlim(begin_s, end_s)
  upper.set_yticks(
    range(len(names)), [f"{name}  {busy[name]:.0%}" for name in names]
  )
  upper.tick_params(labelsize=8)
  lower.set_xlim(*_extent(spans))
  lower.set_yticks(range(len(names)), names)
  lower.tick_params(labelsize=8)
  lower.tick_params(axis="y", labelsize=5)
  lower.axvspan(begin_s, end_s, color="black", alpha=0.12, linewidth=0)
  lower.set_title("whole session, the part above shaded", fontsize=9)
  lower.set_xlabel(f"seconds, {_CLOCKS[world]}", fontsize=9)
  figure.savefig(path, dpi=150)


def write_perfetto(spans: Sequence[Span], path: str | os.PathLike[str]) -> None:
  """Writes a Chrome trace, for https://ui.perfetto.dev or `chrome://tracing`.

  One thread per lane, in ring order; times in µs, shifted if need be so that
  none is negative. The format demands that the events of a thread nest, but
  frames overtake each other's time on a link: those get further threads of the
  same lane, such as `hop 1 (2)`.

  Raises:
    ValueError: if there are no spans.
  """
  origin_s = min(0.0, _extent(spans)[0])
  order = {name: i for i, name in enumerate(lanes(spans))}
  rows = _stack(spans)
  tids: dict[tuple[str, int], int] = {}
  for name in order:
    depth = max((row for span, row in rows if span.lane == name), default=0)
    for row in range(depth + 1):
      tids[name, row] = len(tids) + 1
  events: list[dict[str, Any]] = []
  for (name, row), tid in tids.items():
    common = {"ph": "M", "pid": 1, "tid": tid}
    label = f"{name} ({row + 1})" if row else name
    events.append(common | {"name": "thread_name", "args": {"name": label}})
    events.append(
      common | {"name": "thread_sort_index", "args": {"sort_index": tid}}
    )
  for span, row in rows:
    events.append(
      {
        "ph": "X",
        "pid": 1,
        "tid": tids[span.lane, row],
        "name": span.name,
        "ts": 1e6 * (span.start_s - origin_s),
        "dur": 1e6 * _duration_s(span),
        "args": {"run": span.run},
      }
    )
  text = json.dumps(
    {"traceEvents": events, "displayTimeUnit": "ms"}, allow_nan=False
  )
  pathlib.Path(path).write_text(text, encoding="utf-8")


def _extent(spans: Sequence[Span]) -> tuple[float, float]:
  if not spans:
    raise ValueError("spans: none given, a timeline needs one")
  return min(s.start_s for s in spans), max(s.end_s for s in spans)


def _duration_s(span: Span) -> float:
  # A hop's ends are read from two hosts' clocks, aligned to within a little.
  return max(0.0, span.end_s - span.start_s)


def _stack(spans: Sequence[Span]) -> list[tuple[Span, int]]:
  """Gives each span the first row of its lane that is free, in time order."""
  free_s: dict[str, list[float]] = defaultdict(list)
  placed = []
  for span in sorted(spans, key=lambda span: (span.start_s, span.end_s)):
    ends_s = free_s[span.lane]
    row = next(
      (i for i, end_s in enumerate(ends_s) if end_s <= span.start_s),
      len(ends_s),
    )
    ends_s[row : row + 1] = [span.start_s + _duration_s(span)]
    placed.append((span, row))
  return placed


def _draw(
  axes: Any,
  names: Sequence[str],
  rows: Sequence[tuple[Span, int]],
  *,
  numbered: tuple[float, float] | None = None,
) -> None:
  """Draws the bars; writes run ids into those wide enough in `numbered`."""
  for i, name in enumerate(names):
    here = [(span, row) for span, row in rows if span.lane == name]
    height = 0.84 / (max((row for _, row in here), default=0) + 1)
    by_row: dict[int, list[Span]] = defaultdict(list)
    for span, row in here:
      by_row[row].append(span)
    for row, of_row in by_row.items():
      bottom = i - 0.42 + row * height
      axes.broken_barh(
        [(span.start_s, _duration_s(span)) for span in of_row],
        (bottom, height),
        color=[_colour(span.run) for span in of_row],
        linewidth=0.4,  # edges keep the shortest spans visible
      )
      if numbered is None:
        continue
      begin_s, end_s = numbered
      for span in of_row:
        left, right = max(span.start_s, begin_s), min(span.end_s, end_s)
        if span.run >= 0 and right - left > 0.03 * (end_s - begin_s):
          axes.text(
            (left + right) / 2,
            bottom + height / 2,
            str(span.run),
            ha="center",
            va="center",
            fontsize=min(7.0, 14 * height),
          )
  axes.set_ylim(len(names) - 0.5, -0.5)  # the ring runs downwards
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)


def _colour(run: int) -> str:
  return _COLOURS[run % len(_COLOURS)] if run >= 0 else _NO_RUN
