# SPDX-License-Identifier: Apache-2.0
"""The host half of the tail's authority: where walks start, what they mean.

The tail is the only one that draws. Per sequence it keeps the *tip*, the last
token whose successor it has drawn, and that successor, *pending* until a node
that bears it has logits. A walk only ever needs logits of the run that has just
arrived: everything older has been walked already.
"""

import dataclasses

import numpy as np

from wanspec_jax.messages import Open, Run, Verdict


@dataclasses.dataclass(slots=True)
class TailSequence:
  """One open sequence at the tail.

  Attributes:
    open: how to draw.
    tip: node id of the last walked node; None before the first walk.
    pending: token drawn after the tip.
    position: absolute position of the tip's token.
    nodes: canonical node id by (canonical parent id, token), below the last
      committed root; the parent of a first row is None.
    alias: canonical id of each of these nodes; a second node with the same
      (parent, token) is the same node, also one that comes when the tip has
      passed the first.
  """

  open: Open
  tip: int | None = None
  pending: int = 0
  position: int = -1
  nodes: dict[tuple[int | None, int], int] = dataclasses.field(
    default_factory=dict
  )
  alias: dict[int, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WalkPlan:
  """A walk that the device is to make over one sequence's rows of a run.

  Attributes:
    sequence: whose.
    rows: `[m]` int32 rows of the run.
    ids: `[m]` node ids.
    tokens: `[m]` int32.
    parent_rows: `[m]` int32 index into these `m` of each row's parent; the own
      index where the parent came earlier.
    start: index at which the walk starts.
    position: absolute position of the start's token.
  """

  sequence: int
  rows: np.ndarray
  ids: np.ndarray
  tokens: np.ndarray
  parent_rows: np.ndarray
  start: int
  position: int


def plan_walks(
  sequences: dict[int, TailSequence], run: Run, positions: np.ndarray
) -> list[WalkPlan]:
  """Returns the walks that a run makes possible; notes its nodes.

  Args:
    sequences: open sequences; updated in place.
    run: the run that has just got logits.
    positions: `[n]` absolute position of each row.

  Raises:
    ValueError: a row belongs to a sequence that is not open.
  """
  for commit in run.commits:
    if commit.sequence in sequences:
      _forget_dead(sequences[commit.sequence], commit.root)
  plans = []
  wanted = np.flatnonzero(~run.committed)
  for sequence in dict.fromkeys(run.sequences[wanted].tolist()):
    if sequence not in sequences:
      raise ValueError(f"run {run.run_id}: sequence {sequence} is not open")
    state = sequences[sequence]
    rows = wanted[run.sequences[wanted] == sequence]
    ids, tokens = run.ids[rows], run.tokens[rows]
    canonical: list[int] = []
    row_of: dict[int, int] = {}
    parent_rows = np.arange(len(rows), dtype=np.int32)
    start = None
    for i, (node, parent, token) in enumerate(
      zip(
        ids.tolist(), run.parents[rows].tolist(), tokens.tolist(), strict=True
      )
    ):
      # A first row is below nothing: its child may bear the same token.
      above = None if parent == node else state.alias.get(parent, parent)
      same = state.nodes.setdefault((above, token), node)
      state.alias[node] = same
      canonical.append(same)
      row_of.setdefault(same, i)
      if above is not None and above in row_of:
        parent_rows[i] = row_of[above]
      if start is None and (
        state.tip is None or (above == state.tip and token == state.pending)
      ):
        start = i
    if start is not None:
      plans.append(
        WalkPlan(
          sequence=sequence,
          rows=rows.astype(np.int32),
          ids=np.asarray(canonical, np.int64),
          tokens=tokens.astype(np.int32),
          parent_rows=parent_rows,
          start=start,
          position=int(positions[rows[start]]),
        )
      )
  return plans


def conclude(
  sequences: dict[int, TailSequence],
  plan: WalkPlan,
  *,
  tokens: np.ndarray,
  last: int,
  log_probs: np.ndarray,
  margins: np.ndarray,
) -> Verdict:
  """Moves the tip along a finished walk and returns the verdict.

  Args:
    sequences: open sequences; updated in place.
    plan: the walk.
    tokens: `[k]` drawn tokens in order, at least one.
    last: index into the plan's rows at which the walk ended.
    log_probs: `[k]` of the draws.
    margins: `[k]` of the draws.
  """
  state = sequences[plan.sequence]
  state.tip = int(plan.ids[last])
  state.pending = int(tokens[-1])
  state.position = plan.position + len(tokens) - 1
  detail = state.open.log_probs
  return Verdict(
    sequence=plan.sequence,
    tokens=tuple(int(t) for t in tokens),
    log_probs=tuple(float(x) for x in log_probs) if detail else (),
    margins=tuple(float(x) for x in margins) if detail else (),
  )


def _forget_dead(state: TailSequence, root: int) -> None:
  """Keeps the tip and what lies below the root, which is bounded."""
  root = state.alias.get(root, root)
  alive: set[int | None] = {root, root if state.tip is None else state.tip}
  nodes: dict[tuple[int | None, int], int] = {}
  for (parent, token), node in state.nodes.items():  # parents come first
    if parent in alive:
      alive.add(node)
      nodes[parent, token] = node
  state.nodes = nodes
  state.alias = {
    node: same for node, same in state.alias.items() if same in alive
  }
