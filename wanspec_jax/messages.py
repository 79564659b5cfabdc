# SPDX-License-Identifier: Apache-2.0
"""What travels round the ring, as plain host records (numpy, no jax).

A *node* is named by `(sequence, id)`: ids grow monotonically within their
sequence and are never reused. Prompt rows are nodes too: row `i` of the prompt
has id `i`. The first row of a sequence is its own parent.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sampling:
  """How the target's next token is drawn.

  Attributes:
    temperature: 0 means greedy (argmax, lowest id on a tie).
    top_k: keep the k most likely tokens; 0 keeps all.
    top_p: keep the smallest set of most likely tokens whose probability (after
      temperature and top-k) reaches `top_p`; 1 keeps all.
    min_p: drop tokens less likely than `min_p` times the most likely one
      (after temperature); 0 keeps all.
    seed: the request key; draws are addressed by (seed, purpose, position).
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  seed: int = 0

  def __post_init__(self):
    rules = (
      ("temperature", self.temperature >= 0, "must be >= 0"),
      ("top_k", self.top_k >= 0, "must be >= 0 (0 keeps all)"),
      ("top_p", 0 < self.top_p <= 1, "must lie in (0, 1]"),
      ("min_p", 0 <= self.min_p <= 1, "must lie in [0, 1]"),
      ("seed", 0 <= self.seed < 2**63, "must lie in [0, 2**63)"),
    )
    for field, holds, rule in rules:
      if not holds:
        raise ValueError(f"Sampling.{field} = {getattr(self, field)!r}: {rule}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Open:
  """Admits a sequence on every stage; rides on the first run of its rows."""

  sequence: int
  sampling: Sampling
  log_probs: bool = False  # report log p and the top-two margin of each draw


@dataclasses.dataclass(frozen=True, kw_only=True)
class Commit:
  """Re-roots a sequence: ancestors of `root` are committed, all that is not
  below it is dead. `root` is a node already launched, or one of the run that
  the commit rides on."""

  sequence: int
  root: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A batch of nodes sent down the pipe together, with what precedes them.

  A stage applies `closes`, `opens` and `commits`, in this order, before it
  gives slots to the rows. Rows are topologically ordered: a parent is an
  earlier row of this run or of an earlier run. A run without rows is legal: it
  carries commits or closes alone.

  Attributes:
    run_id: grows by one per run within an epoch.
    epoch: grows on faults only.
    opens: sequences that start with this run.
    closes: sequences whose slots are freed.
    commits: at most one per sequence.
    sequences: `[n]` int32 sequence of each row.
    ids: `[n]` int32 node id of each row.
    parents: `[n]` int32 node id of each row's parent (its own id for the first
      row of a sequence).
    tokens: `[n]` int32 token of each row.
    committed: `[n]` bool, true for rows launched as committed (prompt rows but
      the last): they need no logits, and every later row of their sequence
      sees them.
  """

  run_id: int
  epoch: int = 0
  opens: tuple[Open, ...] = ()
  closes: tuple[int, ...] = ()
  commits: tuple[Commit, ...] = ()
  sequences: np.ndarray
  ids: np.ndarray
  parents: np.ndarray
  tokens: np.ndarray
  committed: np.ndarray

  @property
  def num_rows(self) -> int:
    return len(self.ids)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cancel:
  """Nodes that a commit has killed, sent against the flow to meet the work.

  A stage that has not begun a row of these drops it: the row is not computed
  and does not travel on, while the run's header does, so that order is kept.
  Only an economy: a stage that never hears of it computes rows that nobody will
  walk.

  Attributes:
    epoch: of the runs meant.
    before_run: no run from this id on carries any of the nodes, so whoever
      remembers them may forget them there.
    nodes: `(sequence, ids)` of the dead, at most one entry per sequence.
  """

  epoch: int = 0
  before_run: int
  nodes: tuple[tuple[int, tuple[int, ...]], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
  """The tail's word on one sequence of a run.

  The tail walks from the tip: it draws the target's token; if a child of the
  tip bears it and has logits the walk goes on there, else the walk waits.
  `tokens` lists every token drawn since the last verdict, in order; all but
  the last were found in the tree, so the accepted path follows from them.

  Attributes:
    sequence: whose verdict.
    tokens: drawn tokens, never empty.
    log_probs: log-probability of each under the processed target law; empty
      unless asked for at `Open`.
    margins: gap between the best and the second best score of each draw (nats;
      noise included under temperature); empty likewise.
  """

  sequence: int
  tokens: tuple[int, ...]
  log_probs: tuple[float, ...] = ()
  margins: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Returned:
  """What comes back from the tail for each run, in launch order.

  A run whose rows were all dropped on the way returns as well: a header keeps
  the order.
  """

  run_id: int
  epoch: int = 0
  verdicts: tuple[Verdict, ...] = ()
