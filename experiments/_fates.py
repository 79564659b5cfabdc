# SPDX-License-Identifier: Apache-2.0
"""What became of every row: known afterwards, from what the engine heard.

A session's spans say when a stage or link was busy with a run; its `Recording`
says which nodes the run carried, what the tail drew and what was cancelled.
Together they tell what each bar of a timeline was good for.
"""

import collections
import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from wanspec_jax import schedules as sch
from wanspec_jax.messages import Run
from wanspec_jax.worlds import Recording, Span

PROMPT = "prompt"  # launched as committed
ROOT = "root"  # the canonical row: its token was committed before its launch
ACCEPTED = "accepted"  # speculated, and became text
DEAD = "dead"  # speculated in vain
CANCELLED = "cancelled"  # dropped here, before it was computed
VERDICT = "verdict"
HEADER = "header"  # a run without rows, or an answer without a verdict
DRAFT = "draft"
CANCEL = "cancel"  # the message
DOWN = "down"
UNKNOWN = "run"  # rows of a run that no recording tells of

_STAGE = re.compile(r"stage (\d+)")
_HOP = re.compile(r"hop (\d+)")
_DROPPED = re.compile(r"\d+ rows, (\d+) cancelled")

_Sequence = tuple[int, int]  # (epoch, sequence)
_Node = tuple[int, int, int]  # (epoch, sequence, id): a fault starts ids anew


class Row(NamedTuple):
  """One row of a run.

  Attributes:
    fate: `PROMPT`, `ROOT`, `ACCEPTED` or `DEAD`.
    is_hedge: it was speculated, and a sibling had been launched before it, in
      an earlier run or an earlier row.
    cancel: how many cancels of the session precede the first one that named it;
      None if none did.
  """

  fate: str
  is_hedge: bool = False
  cancel: int | None = None


class RunRows(NamedTuple):
  """A run.

  Attributes:
    rows: in launch order.
    has_verdict: whether it brought one back.
  """

  rows: tuple[Row, ...]
  has_verdict: bool


class Section(NamedTuple):
  """Part of a span: so many rows (or messages) of one kind."""

  kind: str
  is_hedge: bool
  count: int


def fates(recording: Recording) -> dict[int, RunRows]:
  """Returns every launched run, by its id.

  The text is walked through the tree: from the first row of a sequence that is
  no prompt row, along the tokens that were emitted, from (parent, token) to the
  node that bears it. What the walk passes is committed, at the step at which
  the token was emitted; a row launched after that is a root, one launched
  before it was accepted.
  """
  launches: list[tuple[int, Run]] = []
  drawn: dict[_Sequence, list[tuple[int, int]]] = collections.defaultdict(list)
  cancels: dict[_Node, int] = {}
  answered: set[int] = set()
  num_cancels = 0
  for index, (event, actions) in enumerate(recording.steps):
    epoch = 0
    if isinstance(event, sch.Arrived):
      epoch = event.returned.epoch
      if event.returned.verdicts:
        answered.add(event.returned.run_id)
    for action in actions:
      match action:
        case sch.Emit(sequence=sequence, tokens=tokens):
          drawn[epoch, sequence] += [(index, token) for token in tokens]
        case sch.Launch(run=run):
          launches.append((index, run))
        case sch.CancelRows(cancel=cancel):
          for sequence, ids in cancel.nodes:
            for node in ids:
              cancels.setdefault((cancel.epoch, sequence, node), num_cancels)
          num_cancels += 1
  committed = _committed([run for _, run in launches], drawn)
  launched: set[_Node] = set()  # parents with a launched child
  runs = {}
  for index, run in launches:
    rows = []
    for _, node, parent, _, is_prompt in _rows(run):
      cancel = cancels.get(node)
      if is_prompt:
        rows.append(Row(PROMPT, cancel=cancel))
        continue
      step = committed.get(node)
      fate = DEAD if step is None else ROOT if step <= index else ACCEPTED
      is_hedge = fate != ROOT and parent in launched
      if node != parent:  # as the first row of a one-token prompt is
        launched.add(parent)
      rows.append(Row(fate, is_hedge, cancel))
    runs[run.run_id] = RunRows(tuple(rows), run.run_id in answered)
  return runs


def _rows(run: Run) -> list[tuple[_Sequence, _Node, _Node, int, bool]]:
  """Returns (sequence, node, parent, token, is prompt) of each row."""
  return [
    (
      (run.epoch, sequence),
      (run.epoch, sequence, node),
      (run.epoch, sequence, parent),
      token,
      committed,
    )
    for sequence, node, parent, token, committed in zip(
      run.sequences.tolist(),
      run.ids.tolist(),
      run.parents.tolist(),
      run.tokens.tolist(),
      run.committed.tolist(),
      strict=True,
    )
  ]


def _committed(
  launched: Sequence[Run], drawn: Mapping[_Sequence, list[tuple[int, int]]]
) -> dict[_Node, int]:
  """Returns the step at which each launched node was committed; -1 for the
  roots that the sequences started from."""
  first: dict[_Sequence, _Node] = {}
  below: dict[tuple[_Node, int], _Node] = {}
  for run in launched:
    for sequence, node, parent, token, is_prompt in _rows(run):
      if not is_prompt:
        first.setdefault(sequence, node)
        if node != first[sequence]:
          below[parent, token] = node
  committed = dict.fromkeys(first.values(), -1)
  for sequence, tokens in drawn.items():
    at = first.get(sequence)
    for step, token in tokens:
      at = None if at is None else below.get((at, token))
      if at is None:  # the last token of a text is never launched
        break
      committed[at] = step
  return committed


def num_dropped(span: Span) -> int:
  """Returns how many rows of its run a stage dropped before computing them."""
  match = _DROPPED.fullmatch(span.name)
  return int(match[1]) if match and _STAGE.fullmatch(span.lane) else 0


def sections(
  spans: Sequence[Span], runs: Mapping[int, RunRows] | None = None
) -> list[tuple[Section, ...]]:
  """Returns what each span was good for, in the order of the spans.

  A stage's span has the rows that it computed and those that it dropped, a
  hop's those that were left; what comes behind the last stage is a verdict or a
  header. Cancels reach a stage in the order in which they were sent, so which
  rows it dropped follows from how many.

  Args:
    spans: of one session.
    runs: its `fates`; without them rows are `UNKNOWN`.
  """
  dropped: dict[int, collections.Counter[int]] = collections.defaultdict(
    collections.Counter
  )
  num_stages = 0
  for span in spans:
    if match := _STAGE.fullmatch(span.lane):
      num_stages = max(num_stages, int(match[1]) + 1)
      dropped[span.run][int(match[1])] += num_dropped(span)
  return [
    _sections_of(span, runs or {}, dropped[span.run], num_stages)
    for span in spans
  ]


def _sections_of(
  span: Span,
  runs: Mapping[int, RunRows],
  dropped: Mapping[int, int],
  num_stages: int,
) -> tuple[Section, ...]:
  if span.run < 0:
    for kind in (CANCEL, DOWN):
      if span.name == kind:
        return (Section(kind, False, 1),)
    return (Section(DRAFT if span.lane == "drafter" else HEADER, False, 1),)
  stage, hop = _STAGE.fullmatch(span.lane), _HOP.fullmatch(span.lane)
  run = runs.get(span.run)
  if run is None or not (stage or hop):
    return (Section(UNKNOWN, False, 1),)
  if hop and int(hop[1]) == num_stages:
    return (Section(VERDICT if run.has_verdict else HEADER, False, 1),)
  place = int((stage or hop)[1])  # type: ignore[index]
  order = sorted(
    (row for row in run.rows if row.cancel is not None),
    key=lambda row: row.cancel or 0,
  )
  order += [row for row in run.rows if row.cancel is None]
  gone = sum(count for at, count in dropped.items() if at < place)
  here = dropped.get(place, 0) if stage else 0
  kinds = collections.Counter(
    (row.fate, row.is_hedge) for row in order[gone + here :]
  )
  kinds.update((CANCELLED, row.is_hedge) for row in order[gone : gone + here])
  found = tuple(
    Section(kind, is_hedge, kinds[kind, is_hedge])
    for kind in (PROMPT, ROOT, ACCEPTED, DEAD, CANCELLED)
    for is_hedge in (False, True)
    if kinds[kind, is_hedge]
  )
  return found or (Section(HEADER, False, 1),)
