# SPDX-License-Identifier: Apache-2.0
"""Where walks start and what they mean, against sets of token paths."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax.messages import Commit, Open, Run, Sampling
from wanspec_jax.verify._tail import TailSequence, conclude, plan_walks


def _run(rows, commits=(), run_id=0):
  """Returns a run of rows (sequence, id, parent, token, committed)."""
  columns = list(zip(*rows, strict=True)) or [()] * 5
  sequences, ids, parents, tokens = (np.array(c, np.int64) for c in columns[:4])
  return Run(
    run_id=run_id,
    commits=tuple(Commit(sequence=s, root=r) for s, r in commits),
    sequences=sequences.astype(np.int32),
    ids=ids,
    parents=parents,
    tokens=tokens.astype(np.int32),
    committed=np.array(columns[4], bool),
  )


def _open(sequence, **fields):
  return TailSequence(
    open=Open(sequence=sequence, sampling=Sampling(), **fields)
  )


def _target(sequence, path):
  """What the target says after a path: any fixed function will do."""
  return hash((sequence, *path)) % 3


def _walk(plan, text_of):
  """Walks a plan by its own arrays; `text_of(row, drawn)` is the next token."""
  row, drawn = plan.start, []
  while True:
    drawn.append(text_of(drawn))
    below = [
      i
      for i in range(row + 1, len(plan.rows))
      if plan.parent_rows[i] == row and plan.tokens[i] == drawn[-1]
    ]
    if not below:
      return row, drawn
    row = below[0]


def _answer(tails, run, positions, path_of):
  """Returns {sequence: tokens drawn} of one run, walks carried out."""
  verdicts = {}
  for plan in plan_walks(tails, run, positions):
    start = path_of[plan.sequence][int(run.ids[plan.rows[plan.start]])]
    assert plan.position == len(start) - 1
    row, drawn = _walk(
      plan,
      lambda drawn, plan=plan, start=start: _target(
        plan.sequence, (*start, *drawn)
      ),
    )
    verdict = conclude(
      tails,
      plan,
      tokens=np.array(drawn),
      last=row,
      log_probs=np.zeros(len(drawn)),
      margins=np.zeros(len(drawn)),
    )
    assert plan.sequence not in verdicts
    verdicts[plan.sequence] = verdict.tokens
  return verdicts


class _Coordinator:
  """What the coordinator may send of one sequence, at random.

  Attributes:
    path: `{id: tokens from the start}` of nodes that are not dead.
    parent: `{id: parent id}` of all nodes.
    arrived: paths that have come to the tail with logits.
    text: prompt and all draws: what the last draw says is pending.
  """

  def __init__(self, sequence, length):
    self.sequence = sequence
    self.text = (0,) * length
    self.path = {i: self.text[: i + 1] for i in range(length)}
    self.parent = {i: max(i - 1, 0) for i in range(length)}
    self.arrived = set()
    self.alive = [length - 1]

  def _add(self, parent, token):
    node = len(self.parent)
    self.parent[node] = parent
    self.path[node] = (*self.path[parent], token)
    self.alive.append(node)
    return (self.sequence, node, parent, token, False)

  def prompt(self):
    return [
      (self.sequence, i, self.parent[i], 0, i < len(self.text) - 1)
      for i in self.path
    ]

  def reroot(self, random):
    """Returns the rows (one or none) and the root of a commit."""
    rows = []
    lowest = {}
    for node in sorted(self.alive):
      if self.path[node] == self.text[: len(self.path[node])]:
        lowest.setdefault(self.path[node], node)
    if self.text[:-1] in lowest and random.random() < 0.5:
      rows = [self._add(lowest[self.text[:-1]], self.text[-1])]
      root = rows[0][1]
    else:
      root = random.choice(sorted(lowest.values()))
    below = {root}
    for node in sorted(self.alive):  # parents have lower ids
      if self.parent[node] in below:
        below.add(node)
    self.alive = sorted(below)
    return rows, root

  def grow(self, random):
    rows = []
    for _ in range(random.randint(0, 5)):
      parent = random.choice(self.alive)
      token = random.randrange(3)
      if random.random() < 0.5:  # more often right than by chance
        token = _target(self.sequence, self.path[parent])
      rows.append(self._add(parent, token))
    return rows

  def expected(self, rows):
    """Returns what the tail must say once these rows have come."""
    self.arrived |= {
      self.path[node]
      for sequence, node, _, _, committed in rows
      if sequence == self.sequence and not committed
    }
    before = len(self.text)
    while self.text in self.arrived:
      self.text = (*self.text, _target(self.sequence, self.text))
    return self.text[before:]


@settings(derandomize=True, deadline=None, max_examples=300)
@given(st.randoms(use_true_random=False), st.sampled_from([0.0, 0.5]))
def test_any_nodes_in_any_runs(random, commit_rate):
  """The tail says exactly what the arrived paths allow, and says it once.

  The oracle knows token paths only: after a run it goes on from the last drawn
  path for as long as that path has arrived. Nodes come in any runs, below any
  earlier node, several of a kind (in one run, in later ones, of the tip and of
  nodes above it), of several sequences; the drawn token's node comes with its
  parent or much later.
  """
  tails, all_of = {}, {}
  for run_id in range(random.randint(1, 7)):
    rows, commits = [], []
    if not tails or (len(tails) < 3 and random.random() < 0.3):
      new = len(tails)
      tails[new] = _open(new)
      all_of[new] = _Coordinator(new, random.randint(1, 3))
      rows += all_of[new].prompt()
      commits.append((new, all_of[new].alive[0]))
    for sequence, mine in all_of.items():
      opened = (sequence, mine.alive[0]) in commits
      if not opened and random.random() < commit_rate:
        root_rows, root = mine.reroot(random)
        rows += root_rows
        commits.append((sequence, root))
      rows += mine.grow(random)
    random.shuffle(rows)
    rows.sort(key=lambda row: len(all_of[row[0]].path[row[1]]))
    positions = [len(all_of[s].path[i]) - 1 for s, i, *_ in rows]
    run = _run(rows, commits, run_id)
    path_of = {s: mine.path for s, mine in all_of.items()}
    said = _answer(tails, run, np.array(positions), path_of)
    expected = {s: mine.expected(rows) for s, mine in all_of.items()}
    assert said == {s: tokens for s, tokens in expected.items() if tokens}
    for sequence, mine in all_of.items():
      assert tails[sequence].pending == mine.text[-1]
      assert tails[sequence].position == len(mine.text) - 2


def _says(tails, rows, target, commits=()):
  """Returns the draws of one run of sequence 0 as `target` dictates them."""
  run = _run(rows, commits)
  positions = np.zeros(len(rows), int)
  said = []
  for plan in plan_walks(tails, run, positions):
    row, drawn = _walk(plan, lambda drawn: target.pop(0))
    verdict = conclude(
      tails,
      plan,
      tokens=np.array(drawn),
      last=row,
      log_probs=np.arange(len(drawn)) - 1.5,
      margins=np.arange(len(drawn)) + 0.5,
    )
    said.append(verdict)
  return said


def test_start_is_not_the_first_row():
  """The pending token's node comes behind one that missed its chance."""
  tails = {0: _open(0)}
  assert _says(tails, [(0, 1, 0, 9, False)], [4])[0].tokens == (4,)
  rows = [(0, 2, 1, 5, False), (0, 3, 1, 4, False), (0, 4, 3, 6, False)]
  (plan,) = plan_walks(tails, _run(rows), np.array([2, 2, 3]))
  assert (plan.start, plan.position) == (1, 2)
  assert plan.rows.tolist() == [0, 1, 2]
  assert plan.parent_rows.tolist() == [0, 1, 1]  # a stranger is its own


def test_a_run_without_the_pending_token_says_nothing():
  tails = {0: _open(0)}
  _says(tails, [(0, 1, 0, 9, False)], [4])
  assert _says(tails, [(0, 2, 1, 5, False)], []) == []
  assert _says(tails, [(0, 3, 2, 4, False)], []) == []  # below another
  assert _says(tails, [(0, 4, 1, 4, False)], [7])[0].tokens == (7,)


def test_children_of_a_second_node_are_children_of_the_first():
  tails = {0: _open(0)}
  rows = [
    (0, 1, 0, 9, False),
    (0, 2, 1, 4, False),
    (0, 3, 1, 4, False),  # node 2 again
    (0, 4, 3, 5, False),
    (0, 5, 2, 6, False),
  ]
  assert _says(tails, rows, [4, 5, 7])[0].tokens == (4, 5, 7)


@pytest.mark.parametrize("above", [1, 2])
def test_a_second_node_of_the_tip_or_above_comes_later(above):
  """1-2 walked, 8 pending; the path comes again under new ids, with 8."""
  tails = {0: _open(0)}
  rows = [(0, 1, 0, 9, False), (0, 2, 1, 4, False)]
  assert _says(tails, rows, [4, 8])[0].tokens == (4, 8)
  again = [(0, 3, 0, 9, False), (0, 4, 3, 4, False)]
  rows = again[above - 1 :]
  if above == 2:
    rows = [(0, 4, 1, 4, False)]
  rows.append((0, 5, 4, 8, False))
  assert [v.tokens for v in _says(tails, rows, [7])] == [(7,)]


def test_memory_is_bounded_by_commits():
  """Rounds of a tree of which nothing is accepted leave nothing behind."""
  tails = {0: _open(0)}
  root = 1
  for round_ in range(50):
    below = [(0, root + i, root, 100 + i, False) for i in range(1, 9)]
    rows = [(0, root, max(root - 9, 0), round_, False), *below]
    _says(tails, rows, [round_ + 1], commits=[(0, root)])
    root += 9
  assert len(tails[0].nodes) <= 18 and len(tails[0].alias) <= 20


def test_a_closed_sequence_is_named():
  run = _run([(3, 1, 0, 9, False)], run_id=12)
  with pytest.raises(ValueError, match="run 12: sequence 3 is not open"):
    plan_walks({}, run, np.array([1]))


def test_details_are_reported_if_asked_for():
  for asked in (False, True):
    tails = {0: _open(0, log_probs=asked)}
    rows = [(0, 1, 0, 9, False), (0, 2, 1, 4, False)]
    (verdict,) = _says(tails, rows, [4, 8])
    assert verdict.log_probs == ((-1.5, -0.5) if asked else ())
    assert verdict.margins == ((0.5, 1.5) if asked else ())
