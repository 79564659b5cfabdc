# SPDX-License-Identifier: Apache-2.0
"""Who was busy when: a picture for papers, a trace for a viewer."""

import json
import os
import pathlib
import re
import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from experiments import _fates
from wanspec_jax.worlds import Span

# Okabe and Ito's colours, which colour-blind readers tell apart.
_FILLS = {
  _fates.PROMPT: ("prompt chunk", "#56B4E9"),
  _fates.ROOT: ("committed before launch (root)", "#0072B2"),
  _fates.ACCEPTED: ("speculated and accepted", "#009E73"),
  _fates.DEAD: ("speculated in vain", "#E69F00"),
  _fates.CANCELLED: ("cancelled before it was computed", "#D55E00"),
  _fates.VERDICT: ("verdict", "#CC79A7"),
  _fates.DRAFT: ("drafting", "#F0E442"),
  _fates.UNKNOWN: ("run", "#0072B2"),
  _fates.HEADER: ("header alone", "#999999"),
  _fates.DOWN: ("down", "#000000"),
}
_IDLE = "#ECECEC"
_CANCEL = "#D55E00"
_HATCH = "//////"
_EDGE = "#333333"
_LAPS_SHOWN = 4
_CLOCKS = {"virtual": "virtual time (modelled)", "sockets": "wall clock"}
_RING_LANE = re.compile(r"(hop|stage) (\d+)")
_BACK_LANE = re.compile(r"back (\d+)")


def lanes(spans: Sequence[Span]) -> tuple[str, ...]:
  """Returns the lanes in ring order.

  First the coordinator and the drafter, if they did anything, then hop 0, stage
  0, hop 1, … to the last hop; lanes of other names follow, last the ways back
  of the hops, on which cancels travel. A stage or hop without spans is listed
  too if the ring goes on behind it: it was idle.
  """
  every = {span.lane for span in spans}
  back = sorted(filter(_BACK_LANE.fullmatch, every), key=_number)
  names = every.difference(back)
  last = -1
  for name in names:
    if match := _RING_LANE.fullmatch(name):
      last = max(last, 2 * int(match[2]) + (match[1] == "stage"))
  ring = [f"{('hop', 'stage')[i % 2]} {i // 2}" for i in range(last + 1)]
  head = [name for name in ("coordinator", "drafter") if name in names]
  return (*head, *ring, *sorted(names.difference(head, ring)), *back)


def _number(lane: str) -> int:
  return int(lane.rpartition(" ")[2])


def busy_fractions(
  spans: Sequence[Span], *, within: tuple[float, float] | None = None
) -> dict[str, float]:
  """Returns, per lane, the part of the time during which it was busy.

  A link is busy while a frame is on its way, delay included. Spans that
  overlap, such as frames that are on a link together, count once; a stage that
  is down is idle.

  Args:
    spans: of one session.
    within: start and end in seconds; by default the session, from the first
      span's start to the last one's end.
  """
  start_s, end_s = within or _extent(spans)
  busy_s = dict.fromkeys(lanes(spans), 0.0)
  free_s = dict.fromkeys(busy_s, start_s)
  for span in sorted(spans, key=lambda span: span.start_s):
    if span.name == _fates.DOWN:
      continue
    begin_s = max(span.start_s, free_s[span.lane])
    until_s = min(span.end_s, end_s)
    if until_s > begin_s:
      busy_s[span.lane] += until_s - begin_s
      free_s[span.lane] = until_s
  total_s = end_s - start_s
  return {name: s / total_s if total_s else 0.0 for name, s in busy_s.items()}


def idle_shares(
  spans: Sequence[Span], *, within: tuple[float, float] | None = None
) -> dict[str, float]:
  """Returns, per lane, the part of the time during which it was idle; see
  `busy_fractions`."""
  busy = busy_fractions(spans, within=within)
  return {name: 1.0 - share for name, share in busy.items()}


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
  runs: Mapping[int, _fates.RunRows] | None = None,
  window_s: float | None = None,
  overview: bool = True,
) -> None:
  """Draws a lane per link, stage and drafter, a bar per span, gaps when idle.

  A window of about four laps, below it the whole session. The height of a bar
  is shared by the rows of its run, coloured by what became of them; hedges are
  hatched, and bars that have the room bear their run's number. Frames that are
  on a link together are stacked. Cancels are lines against the flow, up from
  the stage (or coordinator) that sends them to the one before it; where a stage
  drops all rows of a run there is a cross. To the right of each lane stands the
  part of the whole session during which it was idle.

  The same spans give the same SVG file, byte for byte.

  Args:
    spans: of one session.
    path: file to write; its ending names the format (`.png`, `.svg`, `.pdf`).
    world: `"virtual"` or `"sockets"`: the figure says whose clock it shows.
    title: what was run.
    runs: the session's `fates`; without them rows have one colour.
    window_s: length of the upper part in seconds.
    overview: draw the lower part.

  Raises:
    ValueError: if there are no spans, or on an unknown world.
  """
  import matplotlib as mpl  # half a second that few runs need
  from matplotlib.figure import Figure

  if world not in _CLOCKS:
    raise ValueError(f"world = {world!r}: must be one of {tuple(_CLOCKS)}")
  extent = begin_s, end_s = window(spans, window_s=window_s)
  names = [name for name in lanes(spans) if not _BACK_LANE.fullmatch(name)]
  kinds = dict(zip(spans, _fates.sections(spans, runs), strict=True))
  bars = _bars(kinds, names, extent)
  idle = idle_shares(spans)
  height = 1.5 + 0.34 * len(names)
  settings = {
    "svg.hashsalt": "wanspec",
    "svg.fonttype": "none",  # letters as text, not as outlines: smaller
    "hatch.linewidth": 0.5,
  }
  with mpl.rc_context(settings):
    figure = Figure(
      figsize=(10, 1.6 * height if overview else height), layout="constrained"
    )
    figure.suptitle(title, fontsize=11)
    if overview:
      upper, lower = figure.subplots(2, 1, height_ratios=(2, 1))
    else:
      upper, lower = figure.subplots(), None
    _draw(upper, names, bars, extent, detailed=True)
    _draw_cancels(upper, names, spans, extent)
    upper.set_title(
      f"{_CLOCKS[world]}; right: idle, of the whole session; numbers are runs",
      fontsize=9,
    )
    upper.set_yticks(range(len(names)), names)
    upper.tick_params(labelsize=8)
    for i, name in enumerate(names):
      upper.text(
        *(1.005, i, f"idle {idle[name]:.0%}"),
        transform=upper.get_yaxis_transform(),
        va="center",
        fontsize=7,
      )
    last = upper
    if lower is not None:
      whole = _extent(spans)
      _draw(lower, names, _bars(kinds, names, whole), whole)
      lower.set_yticks(range(len(names)), names)
      lower.tick_params(labelsize=8)
      lower.tick_params(axis="y", labelsize=5)
      lower.axvspan(begin_s, end_s, color="black", alpha=0.12, linewidth=0)
      lower.set_title("whole session, the part above shaded", fontsize=9)
      last = lower
    last.set_xlabel(f"seconds, {_CLOCKS[world]}", fontsize=9)
    has_cancels = any(_BACK_LANE.fullmatch(span.lane) for span in spans)
    _draw_legend(figure, bars, has_cancels)
    is_svg = pathlib.Path(path).suffix == ".svg"
    figure.savefig(path, dpi=150, metadata={"Date": None} if is_svg else None)


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


class _Bar(NamedTuple):
  """Where a span is drawn."""

  span: Span
  bottom: float
  height: float
  sections: tuple[_fates.Section, ...]


def _bars(
  kinds: Mapping[Span, tuple[_fates.Section, ...]],
  names: Sequence[str],
  extent: tuple[float, float],
) -> list[_Bar]:
  """Returns the bars of what happened between two times."""
  rows = _stack(
    [s for s in kinds if s.end_s >= extent[0] and s.start_s <= extent[1]]
  )
  depth: dict[str, int] = defaultdict(int)
  for span, row in rows:
    depth[span.lane] = max(depth[span.lane], row + 1)
  place = {name: i for i, name in enumerate(names)}
  bars = []
  for span, row in rows:
    if span.lane in place:
      height = 0.84 / depth[span.lane]
      bottom = place[span.lane] - 0.42 + row * height
      bars.append(_Bar(span, bottom, height, kinds[span]))
  return bars


def _draw(
  axes: Any,
  names: Sequence[str],
  bars: Sequence[_Bar],
  extent: tuple[float, float],
  *,
  detailed: bool = False,
) -> None:
  """Draws bars, cut at the window's ends; those of one kind as one path."""
  from matplotlib.patches import PathPatch
  from matplotlib.path import Path

  begin_s, end_s = extent
  for i in range(len(names)):
    axes.axhspan(i - 0.42, i + 0.42, color=_IDLE, linewidth=0, zorder=0)
  boxes: dict[tuple[str, bool], list[Any]] = defaultdict(list)
  marks = []
  for bar in bars:
    left = max(bar.span.start_s, begin_s)
    right = min(bar.span.start_s + _duration_s(bar.span), end_s)
    total = sum(section.count for section in bar.sections)
    low = bar.bottom
    for kind, is_hedge, count in bar.sections:
      high = low + bar.height * count / total
      boxes[kind, is_hedge].append(
        [(left, low), (right, low), (right, high), (left, high)]
      )
      low = high
    if right <= left and bar.sections[-1].kind == _fates.CANCELLED:
      marks.append((left, bar.bottom + bar.height / 2))
    has_room = right - left > 0.03 * (end_s - begin_s) and bar.height > 0.25
    if detailed and bar.span.run >= 0 and has_room:
      axes.text(
        *((left + right) / 2, bar.bottom + bar.height / 2, str(bar.span.run)),
        ha="center",
        va="center",
        fontsize=min(7.0, 14 * bar.height),
      )
  for kind, is_hedge in sorted(boxes):
    corners = [
      Path([*box, box[0]], [1, 2, 2, 2, 79]) for box in boxes[kind, is_hedge]
    ]
    axes.add_patch(
      PathPatch(
        Path.make_compound_path(*corners),
        facecolor=_FILLS[kind][1],
        edgecolor=_EDGE if detailed else _FILLS[kind][1],
        linewidth=0.2,  # edges keep the shortest spans visible
        hatch=_HATCH if is_hedge and detailed else None,
      )
    )
  if marks and detailed:
    axes.plot(
      *zip(*marks, strict=True), "x", color=_CANCEL, markersize=4, zorder=4
    )
  axes.set_xlim(begin_s, end_s)
  axes.set_ylim(len(names) - 0.5, -0.5)  # the ring runs downwards
  for side in ("top", "right"):
    axes.spines[side].set_visible(False)


def _draw_cancels(
  axes: Any,
  names: Sequence[str],
  spans: Sequence[Span],
  extent: tuple[float, float],
) -> None:
  """Draws each cancel from whoever is behind a hop to the stage before it."""
  place = {name: i for i, name in enumerate(names)}
  for span in spans:
    match = _BACK_LANE.fullmatch(span.lane)
    if not match or span.end_s < extent[0] or span.start_s > extent[1]:
      continue
    hop = int(match[1])
    sender = place.get(f"stage {hop}", place.get(f"hop {hop}", len(names)))
    axes.plot(
      [span.start_s, span.end_s],
      [sender, place.get(f"stage {hop - 1}", sender)],
      color=_CANCEL,
      linewidth=0.8,
      linestyle=(0, (3, 1.5)),
      zorder=3,
    )


def _draw_legend(figure: Any, bars: Sequence[_Bar], has_cancels: bool) -> None:
  """Explains what the window shows."""
  from matplotlib.lines import Line2D
  from matplotlib.patches import Patch

  seen = {section for bar in bars for section in bar.sections}
  kinds = {section.kind for section in seen}
  handles: list[Any] = [
    Patch(facecolor=colour, edgecolor=_EDGE, linewidth=0.2, label=label)
    for kind, (label, colour) in _FILLS.items()
    if kind in kinds
  ]
  if any(section.is_hedge for section in seen):
    handles.append(
      Patch(facecolor="white", edgecolor=_EDGE, hatch=_HATCH, label="hedge")
    )
  handles.append(Patch(facecolor=_IDLE, label="idle"))
  if has_cancels:
    handles.append(
      Line2D([], [], color=_CANCEL, linestyle="--", label="cancel, on its way")
    )
  figure.legend(
    handles=handles, loc="outside lower center", ncols=5, fontsize=7
  )
