# SPDX-License-Identifier: Apache-2.0
"""Slots by mask against a dictionary that walks parents."""

import copy
import dataclasses

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
  RuleBasedStateMachine,
  initialize,
  invariant,
  precondition,
  rule,
)

from wanspec_jax.messages import Commit, Run
from wanspec_jax.rollback import apply_riders, mask_rollback, place_rows

MASK = mask_rollback()
CAPACITY = 24


def _run(rows, commits=(), closes=()):
  """Returns a run of rows (sequence, id, parent, committed)."""
  columns = list(zip(*rows, strict=True)) or [()] * 4
  sequences, ids, parents = (np.array(c, np.int64) for c in columns[:3])
  return Run(
    run_id=0,
    closes=tuple(closes),
    commits=tuple(Commit(sequence=s, root=r) for s, r in commits),
    sequences=sequences.astype(np.int32),
    ids=ids,
    parents=parents,
    tokens=np.zeros(len(rows), np.int32),
    committed=np.array(columns[3], bool),
  )


@dataclasses.dataclass
class _Row:
  """A node of the oracle."""

  parent: int
  committed: bool
  slot: int


class _Machine(RuleBasedStateMachine):
  """Random runs, commits, cancels and closes over three sequences.

  The oracle keeps a dictionary of nodes per sequence and finds everything by
  walking parents: a row sees its ancestors and itself, nothing else.
  """

  @initialize()
  def start(self):
    self.table = MASK.init(CAPACITY)
    self.oracle = {}  # sequence -> {id: _Row}
    self.root = {}
    self.next_id = {}

  # The oracle's own reading of the rules. ------------------------------------

  def _ancestors(self, sequence, node):
    """Returns the ids from the node up to the first row, both included."""
    rows, path = self.oracle[sequence], [node]
    while rows[path[-1]].parent != path[-1]:
      path.append(rows[path[-1]].parent)
    return path

  def _live(self, sequence):
    """Returns ids at or below the root."""
    root = self.root[sequence]
    return [
      node
      for node in self.oracle[sequence]
      if root in self._ancestors(sequence, node)
    ]

  def _used(self):
    return sum(len(rows) for rows in self.oracle.values())

  def _apply(self, rows, commits=(), closes=()):
    """Sends a run through the table and through the oracle."""
    run = _run(rows, commits, closes)
    before, frozen = self.table, copy.deepcopy(self.table)
    table = apply_riders(MASK, self.table, run)
    for sequence in closes:
      self.oracle.pop(sequence)
    new = {(s, i): parent for s, i, parent, _ in rows}
    for sequence, root in commits:
      mine = self.oracle.setdefault(sequence, {})
      top = root
      while new.get((sequence, top), top) != top:
        top = new[sequence, top]
      path = [] if top not in mine else self._ancestors(sequence, top)
      below = set()
      if (sequence, root) not in new:
        below = {n for n in mine if root in self._ancestors(sequence, n)}
      for node in list(mine):
        if node in path:
          mine[node].committed = True
        elif not mine[node].committed and node not in below:
          del mine[node]
      self.root[sequence] = root
    free = [
      slot
      for slot in range(CAPACITY)
      if slot not in {r.slot for m in self.oracle.values() for r in m.values()}
    ]
    if len(rows) > len(free):
      with pytest.raises(RuntimeError, match=f"{len(free)} of {CAPACITY}"):
        place_rows(MASK, table, run)
      self.table = table  # a stage would end its session; the books stand
      return
    self.table, slots = place_rows(MASK, table, run)
    assert slots.tolist() == free[: len(rows)]
    for (sequence, node, parent, committed), slot in zip(
      rows, slots.tolist(), strict=True
    ):
      self.oracle.setdefault(sequence, {})[node] = _Row(parent, committed, slot)
    for sequence, root in commits:
      for node in self._ancestors(sequence, root):
        self.oracle[sequence][node].committed = True
    for field in dataclasses.fields(frozen):  # pure: the old state stands
      np.testing.assert_array_equal(
        getattr(before, field.name), getattr(frozen, field.name)
      )

  # What happens. -------------------------------------------------------------

  @precondition(lambda self: len(self.oracle) < 3)
  @rule(length=st.integers(1, 6), chunk=st.integers(1, 4), apart=st.booleans())
  def open(self, length, chunk, apart):
    """A prompt in chunks; its root comes apart or with the last of them."""
    sequence = max(self.next_id, default=-1) + 1
    if self._used() + length > CAPACITY:
      return
    rows = [(sequence, i, max(i - 1, 0), apart) for i in range(length - 1)]
    last = [(sequence, length - 1, max(length - 2, 0), False)]
    while apart and rows:
      self._apply(rows[:chunk])
      rows = rows[chunk:]
    self._apply(rows + last, commits=[(sequence, length - 1)])
    self.root[sequence] = length - 1
    self.next_id[sequence] = length

  def _draw_nodes(self, data, sequence, first_parent=None):
    live = self._live(sequence)
    made = []
    for i in range(data.draw(st.integers(0, 4))):
      above = [row[1] for row in made]
      if first_parent is not None and i == 0:
        parent = first_parent
      elif first_parent is not None:
        parent = data.draw(st.sampled_from(above))
      else:
        parent = data.draw(st.sampled_from(live + above))
      made.append((sequence, self.next_id[sequence] + i, parent, False))
    self.next_id[sequence] += len(made)
    return made

  @precondition(lambda self: self.oracle)
  @rule(data=st.data())
  def launch(self, data):
    """Nodes of several sequences, their rows mixed, any commits."""
    parts, commits = [], []
    for sequence in list(self.oracle):
      kind = data.draw(st.sampled_from(["none", "old", "new"]))
      parent = None
      if kind == "old":
        root = data.draw(st.sampled_from(self._live(sequence)))
        commits.append((sequence, root))
        # Rows of the run may only lie below the new root.
        kept = self.root[sequence]
        self.root[sequence] = root
        rows = self._draw_nodes(data, sequence)
        self.root[sequence] = kept
      else:
        if kind == "new":
          parent = data.draw(st.sampled_from(self._live(sequence)))
        rows = self._draw_nodes(data, sequence, parent)
        if kind == "new" and rows:
          commits.append((sequence, rows[0][1]))
      parts.append(rows)
    if sum(map(len, parts)) + self._used() > CAPACITY + 3:
      return  # far too many: nothing to learn
    mixed = []
    while any(parts):
      part = data.draw(st.sampled_from([p for p in parts if p]))
      mixed.append(part.pop(0))
    self._apply(mixed, commits=commits)
    for sequence in [s for s, rows in self.oracle.items() if not rows]:
      del self.oracle[sequence]
    # Had the run been refused, the new root would hold no slot.
    for sequence, root in commits:
      if sequence in self.oracle and root not in self.oracle[sequence]:
        self._apply([], closes=[sequence])

  @precondition(lambda self: self.oracle)
  @rule(data=st.data())
  def cancel(self, data):
    sequence = data.draw(st.sampled_from(sorted(self.oracle)))
    known = sorted(self.oracle[sequence])
    ids = data.draw(st.lists(st.sampled_from([*known, 10**6]), max_size=3))
    self.table = MASK.cancel(self.table, sequence, np.array(ids, np.int64))
    rows = self.oracle[sequence]
    hit = {i for i in ids if i in rows and not rows[i].committed}
    gone = [node for node in rows if hit & set(self._ancestors(sequence, node))]
    for node in gone:
      del rows[node]

  @precondition(lambda self: self.oracle)
  @rule(data=st.data())
  def close(self, data):
    sequence = data.draw(st.sampled_from(sorted(self.oracle)))
    self._apply([], closes=[sequence])

  # What must hold. -----------------------------------------------------------

  @invariant()
  def books_agree(self):
    if not hasattr(self, "table"):
      return
    held = {}
    for sequence, rows in self.oracle.items():
      for node, row in rows.items():
        assert row.slot not in held, "two live rows share a slot"
        held[row.slot] = (sequence, node)
    assert MASK.num_used(self.table) == len(held)
    assert set(np.flatnonzero(self.table.used).tolist()) == set(held)
    if not held:
      return
    slots = np.array(sorted(held), np.int32)
    expected = np.zeros((len(slots), CAPACITY), bool)
    positions = []
    for i, slot in enumerate(slots.tolist()):
      sequence, node = held[slot]
      path = self._ancestors(sequence, node)
      positions.append(len(path) - 1)
      for above in path:
        expected[i, self.oracle[sequence][above].slot] = True
    assert MASK.positions(self.table, slots).tolist() == positions
    for num_slots in (int(slots.max()) + 1, CAPACITY):
      np.testing.assert_array_equal(
        MASK.mask(self.table, slots, num_slots), expected[:, :num_slots]
      )


_Machine.TestCase.settings = settings(
  derandomize=True, deadline=None, max_examples=60, stateful_step_count=25
)
TestMachine = _Machine.TestCase


def _opened(length):
  """Returns the table of sequence 0 with a prompt, its root committed."""
  run = _run(
    [(0, i, max(i - 1, 0), i < length - 1) for i in range(length)],
    commits=[(0, length - 1)],
  )
  return place_rows(MASK, apply_riders(MASK, MASK.init(8), run), run)[0]


def test_hand_drawn_commit_reuses_the_dead_slots():
  """0-1-2 committed; 3, 4 below 2, 5 below 4; 4 becomes root: 3 dies."""
  table = _opened(3)
  run = _run([(0, 3, 2, False), (0, 4, 2, False), (0, 5, 4, False)])
  table, slots = place_rows(MASK, table, run)
  assert slots.tolist() == [3, 4, 5]
  assert MASK.mask(table, slots, 6).astype(int).tolist() == [
    [1, 1, 1, 1, 0, 0],
    [1, 1, 1, 0, 1, 0],
    [1, 1, 1, 0, 1, 1],
  ]
  run = _run([(0, 6, 5, False)], commits=[(0, 4)])
  table, slots = place_rows(MASK, apply_riders(MASK, table, run), run)
  assert slots.tolist() == [3]  # where node 3 was
  assert MASK.positions(table, slots).tolist() == [5]
  assert MASK.mask(table, slots, 8).astype(int).tolist() == [
    [1, 1, 1, 1, 1, 1, 0, 0]
  ]


def test_root_in_the_same_run_leaves_only_its_path():
  table = _opened(2)
  run = _run([(0, 2, 1, False), (0, 3, 1, False), (0, 4, 3, False)])
  table, _ = place_rows(MASK, table, run)
  run = _run([(0, 5, 3, False), (0, 6, 5, False)], commits=[(0, 5)])
  table, slots = place_rows(MASK, apply_riders(MASK, table, run), run)
  assert slots.tolist() == [2, 4]  # nodes 2 and 4 are dead
  assert MASK.num_used(table) == 5
  assert MASK.mask(table, slots, 5).astype(int).tolist() == [
    [1, 1, 1, 1, 0],
    [1, 1, 1, 1, 1],
  ]


def test_unknown_parent_names_node_and_sequence():
  run = _run([(0, 3, 7, False)])
  with pytest.raises(KeyError, match="node 7 of sequence 0"):
    place_rows(MASK, _opened(2), run)


def test_dead_parent_is_unknown():
  table = _opened(2)
  table, _ = place_rows(MASK, table, _run([(0, 2, 1, False)]))
  run = _run([(0, 3, 1, False), (0, 4, 2, False)], commits=[(0, 3)])
  with pytest.raises(KeyError, match="node 2 of sequence 0"):
    place_rows(MASK, apply_riders(MASK, table, run), run)


def test_commit_of_an_unknown_root_is_refused():
  with pytest.raises(KeyError, match="node 9 of sequence 0"):
    apply_riders(MASK, _opened(2), _run([], commits=[(0, 9)]))


def test_exhaustion_says_how_many_and_changes_nothing():
  table = _opened(6)
  run = _run([(0, 6 + i, 5, False) for i in range(3)])
  with pytest.raises(RuntimeError, match=r"3 rows.* 2 of 8 are free"):
    place_rows(MASK, table, run)
  assert MASK.num_used(table) == 6


def test_sequences_with_equal_ids_stay_apart():
  table = _opened(2)
  run = _run(
    [(1, 0, 0, True), (1, 1, 0, False), (0, 2, 1, False)],
    commits=[(1, 1)],
  )
  table, slots = place_rows(MASK, apply_riders(MASK, table, run), run)
  assert MASK.mask(table, slots, 5).astype(int).tolist() == [
    [0, 0, 1, 0, 0],
    [0, 0, 1, 1, 0],
    [1, 1, 0, 0, 1],
  ]
