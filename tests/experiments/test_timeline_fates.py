# SPDX-License-Identifier: Apache-2.0
"""What became of rows: worked by hand, then against the engine's own rounds and
the bytes that were counted on the links."""

import collections

import numpy as np
import pytest

from experiments import _fates
from experiments._fates import (
  ACCEPTED,
  CANCELLED,
  DEAD,
  HEADER,
  PROMPT,
  ROOT,
  VERDICT,
  Row,
  Section,
)
from experiments.studies import _grid
from wanspec_jax import schedules as sch
from wanspec_jax.messages import Cancel, Returned, Run, Verdict
from wanspec_jax.worlds import Recording, Span, Step


def launch(run_id, rows, *, epoch=0, sequence=0):
  """A launch of (id, parent, token) rows; a fourth entry marks a prompt row."""
  ids, parents, tokens = (np.array([r[i] for r in rows]) for i in range(3))
  return sch.Launch(
    run=Run(
      run_id=run_id,
      epoch=epoch,
      sequences=np.full(len(rows), sequence, np.int32),
      ids=ids,
      parents=parents,
      tokens=tokens,
      committed=np.array([len(r) > 3 for r in rows]),
    )
  )


def arrived(run_id, *tokens, epoch=0, sequence=0):
  verdicts = (Verdict(sequence=sequence, tokens=tokens),) if tokens else ()
  return sch.Arrived(
    time_s=0.0,
    returned=Returned(run_id=run_id, epoch=epoch, verdicts=verdicts),
  )


def emit(*tokens, sequence=0):
  return sch.Emit(sequence=sequence, tokens=tokens)


def cancel(*ids, sequence=0, epoch=0):
  return sch.CancelRows(
    cancel=Cancel(epoch=epoch, before_run=99, nodes=((sequence, ids),))
  )


SUBMITTED = sch.Submitted(
  time_s=0.0,
  sequence=0,
  request=sch.Request(prompt=(1, 2, 3), max_new_tokens=9),
)
WOKE = sch.Woke(time_s=0.0)

# The prompt's rows 0 and 1 go first, its last token 2 is the root. Below it 3
# and its sibling 4; 5 below 3, 6 below 5, then 7, a sibling of 5. The tail
# draws 3's token, and 33, which no node bears: it becomes node 8, launched as
# the next root. Cancels name 6 and 7, and then 5 (as late as that: it had been
# thought to be back). 9 below 8 is accepted, what follows it ends the text.
STEPS = [
  Step(SUBMITTED, (launch(0, [(0, 0, 1, "prompt"), (1, 0, 2, "prompt")]),)),
  Step(WOKE, (launch(1, [(2, 1, 3), (3, 2, 30), (4, 2, 31)]),)),
  Step(WOKE, (launch(2, [(5, 3, 32), (6, 5, 40), (7, 3, 34)]),)),
  Step(arrived(0), ()),
  Step(
    arrived(1, 30, 33),
    (emit(30, 33), cancel(6, 7), launch(3, [(8, 3, 33), (9, 8, 35)])),
  ),
  Step(WOKE, (cancel(5),)),
  Step(arrived(2), ()),
  Step(arrived(3, 35, 36), (emit(35, 36),)),
]
HAND = {
  0: ((Row(PROMPT), Row(PROMPT)), False),
  1: ((Row(ROOT), Row(ACCEPTED), Row(DEAD, is_hedge=True)), True),
  2: (
    (
      Row(DEAD, cancel=1),
      Row(DEAD, cancel=0),
      Row(DEAD, is_hedge=True, cancel=0),
    ),
    False,
  ),
  3: ((Row(ROOT), Row(ACCEPTED)), True),
}


def test_fates_of_a_text_worked_by_hand():
  assert _fates.fates(Recording(STEPS)) == HAND


def test_a_launched_sibling_makes_a_hedge_across_runs_but_never_a_root():
  # Node 8 had launched siblings (5 and 7), yet its token was known: no hedge.
  # A second guess at it, launched before the verdict, is one, and is accepted.
  steps = [
    Step(SUBMITTED, (launch(0, [(2, 1, 3), (3, 2, 30)]),)),
    Step(WOKE, (launch(1, [(4, 2, 31)]),)),
    Step(arrived(0, 31), (emit(31),)),
  ]
  runs = _fates.fates(Recording(steps))
  assert runs[0].rows[1] == Row(DEAD)
  assert runs[1].rows == (Row(ACCEPTED, is_hedge=True),)


def test_one_token_prompt_is_its_own_parent_and_no_sibling():
  steps = [Step(SUBMITTED, (launch(0, [(0, 0, 1), (1, 0, 30)]),))]
  assert _fates.fates(Recording(steps))[0].rows == (Row(ROOT), Row(DEAD))


def test_a_fault_starts_ids_anew():
  # Before the fault node 3 bears 30 and is accepted; after it the prompt has
  # grown by that token and node 3 is the root's child, here in vain.
  steps = [
    Step(SUBMITTED, (launch(0, [(2, 1, 3), (3, 2, 30)]),)),
    Step(arrived(0, 30), (emit(30),)),
    Step(
      sch.Faulted(time_s=0.0),
      (
        launch(1, [(2, 1, 3, "prompt")], epoch=1),
        launch(2, [(3, 2, 30), (4, 3, 50)], epoch=1),
        cancel(3),  # of the old epoch
      ),
    ),
    Step(arrived(2, 51, epoch=1), (emit(51),)),
  ]
  runs = _fates.fates(Recording(steps))
  assert runs[0].rows == (Row(ROOT), Row(ACCEPTED, cancel=0))
  assert runs[1].rows == (Row(PROMPT),)
  assert runs[2].rows == (Row(ROOT), Row(DEAD))


def test_sequences_are_apart():
  steps = [
    Step(
      SUBMITTED,
      (
        launch(0, [(2, 1, 3), (3, 2, 30)]),
        launch(1, [(2, 1, 3), (3, 2, 30)], sequence=1),
      ),
    ),
    Step(arrived(1, 30, sequence=1), (emit(30, sequence=1),)),
  ]
  runs = _fates.fates(Recording(steps))
  assert [row.fate for row in runs[0].rows] == [ROOT, DEAD]
  assert [row.fate for row in runs[1].rows] == [ROOT, ACCEPTED]


def test_sections_of_spans_worked_by_hand():
  def of(kind, count=1, *, is_hedge=False):
    return Section(kind, is_hedge, count)

  run_2 = of(DEAD, 2), of(DEAD, is_hedge=True)
  run_1 = of(ROOT), of(ACCEPTED), of(DEAD, is_hedge=True)
  # The first cancel named 6 and 7; 7 was a hedge. Then the second one: 5.
  first = of(DEAD), of(CANCELLED), of(CANCELLED, is_hedge=True)
  table = [
    (Span("drafter", "4 nodes", 0, 1, -1), (of(_fates.DRAFT),)),
    (Span("hop 0", "20 B", 0, 1, 2), run_2),
    (Span("stage 0", "3 rows", 1, 2, 2), run_2),
    (Span("hop 1", "99 B", 2, 3, 2), run_2),
    (Span("stage 1", "1 rows, 2 cancelled", 3, 4, 2), first),
    (Span("hop 2", "40 B", 4, 5, 2), (of(DEAD),)),
    (Span("stage 2", "0 rows, 1 cancelled", 5, 5, 2), (of(CANCELLED),)),
    (Span("hop 3", "6 B", 5, 6, 2), (of(HEADER),)),
    (Span("back 3", "cancel", 2, 3, -1), (of(_fates.CANCEL),)),
    (Span("stage 1", "down", 7, 8, -1), (of(_fates.DOWN),)),
    (Span("hop 0", "20 B", 0, 1, 1), run_1),
    (Span("stage 2", "3 rows", 0, 1, 1), run_1),
    (Span("hop 3", "8 B", 0, 1, 1), (of(VERDICT),)),
    (Span("hop 2", "8 B", 0, 1, 77), (of(_fates.UNKNOWN),)),
  ]
  spans, expected = zip(*table, strict=True)
  found = _fates.sections(spans, _fates.fates(Recording(STEPS)))
  assert found == list(expected)


def test_without_a_recording_rows_are_of_one_kind():
  spans = [Span("stage 0", "3 rows, 1 cancelled", 0, 1, 0)]
  assert _fates.sections(spans) == [(Section(_fates.UNKNOWN, False, 1),)]


POINT = _grid.Point(lap_s=0.1, mbps=30, stages=3, level_s=0.004, quality=0.6)
POLICIES = {
  "lockstep": lambda: sch.lockstep(6),
  "continuous": lambda: sch.continuous(width=2),
  "in_pipe": lambda: sch.in_pipe(width=3),
  "segments": lambda: sch.segments(segment=6),
  "hedged": lambda: sch.hedged(depth=3, launch_hedges=3),
  "priced": sch.priced,
}


@pytest.mark.parametrize("name", POLICIES)
def test_fates_agree_with_rounds_and_bytes(name):
  tokens = 40
  recording = Recording()
  result = _grid.session(
    POINT, POLICIES[name](), tokens=tokens, trace=True, recording=recording
  )
  runs = _fates.fates(recording)
  rows = [row for run in runs.values() for row in run.rows]
  count = collections.Counter(row.fate for row in rows)
  rounds = result.outcomes[0].rounds
  # The engine counts what verdicts accepted, the tail the verdicts.
  assert count[ACCEPTED] == sum(r.accepted for r in rounds)
  assert sum(run.has_verdict for run in runs.values()) == len(rounds)
  # Every token but the last is the root of what follows, or was accepted.
  assert tokens <= count[ROOT] + count[ACCEPTED] <= tokens + 1

  found = _fates.sections(result.spans, runs)
  at = collections.Counter()
  for span, parts in zip(result.spans, found, strict=True):
    computed = sum(
      part.count for part in parts if part.kind not in (CANCELLED, HEADER)
    )
    dropped = sum(part.count for part in parts if part.kind == CANCELLED)
    if span.lane.startswith("stage"):
      assert computed == int(span.name.split()[0])
      assert dropped == _fates.num_dropped(span)
    at[span.lane] += computed
    at["dropped"] += dropped
  # Rows on a hop between stages are bytes of hidden states.
  for hop in range(1, POINT.stages):
    sent = result.bytes.by_class(link=f"hop {hop}").get("activations", 0)
    assert at[f"hop {hop}"] * _grid.ROW_BYTES == sent
  assert at["hop 0"] == len(rows)
  last = at[f"stage {POINT.stages - 1}"]
  assert at["dropped"] == len(rows) - last
  if name not in ("lockstep", "hedged"):
    assert at["dropped"] > 0
