# SPDX-License-Identifier: Apache-2.0
"""Optimal trees for positional acceptance (Sequoia), for any lap time.

Model of Sequoia (https://arxiv.org/abs/2402.12374): given that a node is
accepted, its k-th child is the accepted one with probability p_k. These are
marginals: p_k already says that children 1 … k−1 were refused. A node's score
f(v) is the product of p over its path, f(root) = 1, and a tree yields

  F(T) = Σ_{v ∈ T} f(v)   expected tokens per lap,

the root standing for the target's own token.

Conventions of this module: sizes count the root; depths are levels and count
the root's (depth 1 = root only); ranks are 1-based (0 for the root). So
`acceptance[k - 1]` is p_k, and with per-depth acceptance `[L, B]` row `l - 1`
holds for the children of nodes on level `l`, which bounds the depth to `L + 1`.
Everything here is host planning in numpy float64.
"""

import dataclasses
import heapq
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike

LapTime = Callable[[int], float]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class TreeShape:
  """A tree without tokens, topologically ordered.

  Attributes:
    parents: `[n]` int32 row of each node's parent; the root is its own.
    ranks: `[n]` int32 place among the siblings, from 1; 0 for the root.
    expected_by_size: `[n + 1]` float64, at `m` the F of the best tree of
      exactly `m` nodes under the same limits; −inf where there is none, 0 at 0.
  """

  parents: np.ndarray  # [n]
  ranks: np.ndarray  # [n]
  expected_by_size: np.ndarray  # [n + 1]

  @property
  def num_nodes(self) -> int:
    return len(self.parents)

  @property
  def expected_tokens(self) -> float:
    return float(self.expected_by_size[-1])

  @property
  def depth(self) -> int:
    """Number of levels, the root's included."""
    return int(self.levels().max())

  def levels(self) -> np.ndarray:
    """Returns the `[n]` int32 level of each node, 1 for the root."""
    levels = np.ones(self.num_nodes, np.int32)
    for i in range(1, self.num_nodes):
      levels[i] = levels[self.parents[i]] + 1
    return levels

  def child_counts(self) -> tuple[tuple[int, ...], ...]:
    """Returns how many children each node has, level by level.

    Within a level, nodes come in the order in which drafting by levels meets
    them: by their parent's place, then by rank. The last level is all zeros.
    """
    children: list[list[int]] = [[] for _ in range(self.num_nodes)]
    for i in range(1, self.num_nodes):
      children[self.parents[i]].append(i)
    counts, level = [], [0]
    while level:
      counts.append(tuple(len(children[v]) for v in level))
      level = [
        c for v in level for c in sorted(children[v], key=self.ranks.item)
      ]
    return tuple(counts)


class SequoiaPlan(NamedTuple):
  """The tree of the best expected tokens per second.

  Attributes:
    shape: the tree.
    expected_tokens: F of it.
    lap_s: time of its lap, drafting by levels included.
    tokens_per_s: their ratio.
  """

  shape: TreeShape
  expected_tokens: float
  lap_s: float
  tokens_per_s: float


def expected_tokens(shape: TreeShape, acceptance: ArrayLike) -> float:
  """Returns F, the expected tokens per lap of any shape.

  Args:
    shape: the tree.
    acceptance: `[B]`, or `[L, B]` per depth.

  Raises:
    ValueError: if the tree has ranks or levels that `acceptance` lacks.
  """
  p = _read_acceptance(acceptance)
  levels = shape.levels()
  scores = np.ones(shape.num_nodes)
  for i in range(1, shape.num_nodes):
    level, rank = int(levels[i]), int(shape.ranks[i])
    if rank > p.num_ranks or p.depth_limit(level, None) < level:
      raise ValueError(
        f"acceptance has shape {np.shape(acceptance)}: lacks rank {rank} "
        f"on level {level}"
      )
    scores[i] = scores[shape.parents[i]] * p.below(level - 1)[rank - 1]
  return float(scores.sum())


def sequoia_dp(
  acceptance: ArrayLike, *, num_nodes: int, max_depth: int | None = None
) -> TreeShape:
  """Returns the best tree of exactly `num_nodes` nodes, for any acceptance.

  T[n, b], the best F over trees of n nodes whose root has exactly b children
  (with a depth limit also over l, the levels left), is
  max_y T[n − y, b − 1] + p_b max_j T[y, j]; back-pointers rebuild the tree,
  level by level. O(n² B) without a depth limit, O(n² B depth) with one.

  Args:
    acceptance: `[B]` or per depth `[L, B]`; not necessarily monotone.
    num_nodes: size, root included.
    max_depth: levels, root included; None for no limit.

  Raises:
    ValueError: if no tree of this size exists within the limits.
  """
  p = _read_acceptance(acceptance)
  _check_sizes(num_nodes, max_depth)
  return _solve_dp(p, num_nodes, max_depth).extract(num_nodes)


def sequoia_heap(
  acceptance: ArrayLike, *, num_nodes: int, max_depth: int | None = None
) -> TreeShape:
  """Returns the best tree when acceptance never grows with rank.

  Then scores fall along paths and along siblings, and the `n` highest scores
  form a tree: popping them off a heap gives the optimum of `sequoia_dp` in
  O(n log n). Rows come in popping order, so that every prefix is the best tree
  of its size.

  Args:
    acceptance: `[B]` or per depth `[L, B]`, non-increasing in rank.
    num_nodes: size, root included.
    max_depth: levels, root included; None for no limit.

  Raises:
    ValueError: if acceptance grows with rank (use `sequoia_dp`), or if no tree
      of this size exists within the limits.
  """
  p = _read_acceptance(acceptance)
  _check_sizes(num_nodes, max_depth)
  if not p.monotone:
    row, rank = np.argwhere(np.diff(p.rows, axis=1) > 0)[0]
    raise ValueError(
      f"acceptance rises from {p.rows[row, rank]} at rank {rank + 1} to "
      f"{p.rows[row, rank + 1]}: sequoia_heap needs non-increasing ranks, "
      "use sequoia_dp"
    )
  return _solve_heap(p, num_nodes, max_depth).extract(num_nodes)


def expected_by_size(
  acceptance: ArrayLike, *, max_nodes: int, max_depth: int | None = None
) -> np.ndarray:
  """Returns the `[max_nodes + 1]` F of the best tree of each exact size.

  Entry 0 is 0; sizes that no tree within the limits has are −inf.
  """
  p = _read_acceptance(acceptance)
  _check_sizes(max_nodes, max_depth)
  return _solve(p, max_nodes, max_depth).expected


def sequoia(
  acceptance: ArrayLike,
  lap_time: LapTime,
  *,
  max_nodes: int,
  max_depth: int | None = None,
  level_s: float = 0.0,
) -> SequoiaPlan:
  """Returns the tree that maximises expected tokens per second.

  Maximises F(n, d) / (lap_time(n) + (d − 1) level_s) over every size n and
  depth d: Sequoia's hardware-aware search with an arbitrary lap in place of a
  verification time. The optimum is exact; ties go to the smaller size, and
  to the smaller depth before that where depth costs time.

  Args:
    acceptance: `[B]` or per depth `[L, B]`.
    lap_time: seconds of a lap of `n` rows, root included (`links.lap_model`);
      called once per size.
    max_nodes: largest size, root included.
    max_depth: most levels, root included; None for no limit.
    level_s: drafting time of one level that is not hidden behind the lap. 0
      makes depth free.

  Raises:
    ValueError: if a lap time or `level_s` is not usable.
  """
  p = _read_acceptance(acceptance)
  _check_sizes(max_nodes, max_depth)
  if not (np.isfinite(level_s) and level_s >= 0):
    raise ValueError(f"level_s = {level_s}: must be finite and >= 0")
  laps = lap_times(lap_time, range(1, max_nodes + 1))
  free = _solve(p, max_nodes, max_depth)
  if level_s == 0:
    n = int(np.argmax(free.expected[1:] / laps)) + 1
    best = (float(free.expected[n] / laps[n - 1]), n, 1, free)
  else:
    best = (-np.inf, 1, 1, free)
    for depth, solved in _solve_by_depth(p, max_nodes, max_depth):
      costs = laps + (depth - 1) * level_s
      # No deeper tree yields more than `free` nor costs less than `costs`.
      if np.max(free.expected[1:] / costs) <= best[0]:
        break
      n = int(np.argmax(solved.expected[1:] / costs)) + 1
      ratio = float(solved.expected[n] / costs[n - 1])
      if ratio > best[0]:
        best = (ratio, n, depth, solved)
  ratio, n, depth, solved = best
  shape = solved.extract(n)
  return SequoiaPlan(
    shape=shape,
    expected_tokens=shape.expected_tokens,
    lap_s=float(laps[n - 1] + (depth - 1) * level_s),
    tokens_per_s=ratio,
  )


def lap_times(lap_time: LapTime, sizes: range | list[int]) -> np.ndarray:
  """Returns the float64 lap time of each size, checked to be usable."""
  laps = np.array([lap_time(n) for n in sizes], np.float64)
  for n, lap in zip(sizes, laps, strict=True):
    if not (np.isfinite(lap) and lap > 0):
      raise ValueError(f"lap_time({n}) = {lap}: must be finite and > 0")
  return laps


class _Acceptance(NamedTuple):
  """Positional acceptance, by level or the same on all of them."""

  rows: np.ndarray  # [L, B], or [1, B]
  per_depth: bool

  @property
  def num_ranks(self) -> int:
    return self.rows.shape[1]

  @property
  def monotone(self) -> bool:
    return bool(np.all(np.diff(self.rows, axis=1) <= 0))

  def below(self, level: int) -> np.ndarray:
    """Returns the `[B]` acceptance of the children of nodes on `level`."""
    return self.rows[level - 1 if self.per_depth else 0]

  def depth_limit(self, max_nodes: int, max_depth: int | None) -> int:
    limit = max_nodes if max_depth is None else min(max_nodes, max_depth)
    return min(limit, len(self.rows) + 1) if self.per_depth else limit


class _Solved(NamedTuple):
  """F of each exact size, and how to get the tree of one."""

  expected: np.ndarray  # [N + 1]
  extract: Callable[[int], TreeShape]


class _Table(NamedTuple):
  """The recursion for subtrees whose root sits on one level.

  Attributes:
    best: `[N + 1]` max_b T[n, b].
    branches: `[N + 1]` the b that attains it.
    last: `[B + 1, N + 1]` size y of the b-th child's subtree in T[n, b].
  """

  best: np.ndarray
  branches: np.ndarray
  last: np.ndarray


def _solve(p: _Acceptance, max_nodes: int, max_depth: int | None) -> _Solved:
  solve = _solve_heap if p.monotone else _solve_dp
  return solve(p, max_nodes, max_depth)


def _solve_heap(
  p: _Acceptance, max_nodes: int, max_depth: int | None
) -> _Solved:
  max_depth = p.depth_limit(max_nodes, max_depth)
  parents, ranks = [], []
  expected = np.full(max_nodes + 1, -np.inf)
  expected[0] = total = 0.0
  # (−score, order of creation, parent, rank, level, parent's score)
  heap = [(-1.0, 0, 0, 0, 1, 1.0)]
  created = 1
  while heap and len(parents) < max_nodes:
    score, _, parent, rank, level, parent_score = heapq.heappop(heap)
    row = len(parents)
    parents.append(parent)
    ranks.append(rank)
    total -= score
    expected[row + 1] = total
    if 0 < rank < p.num_ranks:
      sibling = -parent_score * float(p.below(level - 1)[rank])
      heapq.heappush(
        heap, (sibling, created, parent, rank + 1, level, parent_score)
      )
      created += 1
    if level < max_depth:
      child = score * float(p.below(level)[0])
      heapq.heappush(heap, (child, created, row, 1, level + 1, -score))
      created += 1

  def extract(num_nodes: int) -> TreeShape:
    _check_feasible(expected, num_nodes)
    return TreeShape(
      parents=np.array(parents[:num_nodes], np.int32),
      ranks=np.array(ranks[:num_nodes], np.int32),
      expected_by_size=expected[: num_nodes + 1].copy(),
    )

  return _Solved(expected, extract)


def _solve_dp(p: _Acceptance, max_nodes: int, max_depth: int | None) -> _Solved:
  if max_depth is None and not p.per_depth:
    table = _grow(p.below(1), max_nodes, None)
    return _read_out(lambda level: table)
  depth = p.depth_limit(max_nodes, max_depth)
  tables = [_leaves(max_nodes)]  # tables[i]: i + 1 levels left
  for level in range(depth - 1, 0, -1):
    tables.append(_grow(p.below(level), max_nodes, tables[-1].best))
  return _read_out(lambda level: tables[depth - level])


def _solve_by_depth(
  p: _Acceptance, max_nodes: int, max_depth: int | None
) -> Iterator[tuple[int, _Solved]]:
  """Yields the solution under every depth limit, shallowest first."""
  limit = p.depth_limit(max_nodes, max_depth)
  if p.monotone:
    for depth in range(1, limit + 1):
      yield depth, _solve_heap(p, max_nodes, depth)
  elif p.per_depth:  # what is optimal below a level depends on the level
    for depth in range(1, limit + 1):
      yield depth, _solve_dp(p, max_nodes, depth)
  else:
    tables = [_leaves(max_nodes)]
    for depth in range(1, limit + 1):
      if depth > 1:
        tables.append(_grow(p.below(depth - 1), max_nodes, tables[-1].best))
      yield depth, _read_out(lambda level, d=depth: tables[d - level])


def _leaves(max_nodes: int) -> _Table:
  best = np.full(max_nodes + 1, -np.inf)
  best[1] = 1.0
  return _Table(
    best=best,
    branches=np.zeros(max_nodes + 1, np.int32),
    last=np.zeros((1, max_nodes + 1), np.int32),
  )


def _grow(p: np.ndarray, max_nodes: int, below: np.ndarray | None) -> _Table:
  """Returns the table of a level from that of the level below it.

  Args:
    p: `[B]` acceptance of the children of this level's nodes.
    max_nodes: `N`.
    below: `[N + 1]` best F of subtrees one level down; None when depth is not
      limited, and then they are this table's own smaller entries.
  """
  p = p[: max_nodes - 1, None]
  total = np.full((len(p) + 1, max_nodes + 1), -np.inf)
  total[0, 1] = 1.0
  last = np.zeros(total.shape, np.int32)
  branches = np.zeros(max_nodes + 1, np.int32)
  best = np.full(max_nodes + 1, -np.inf)
  best[1] = 1.0
  gains = np.full((len(p), max_nodes + 1), -np.inf)  # p_b · best F of size y

  def gain(values):
    # 0 · −inf would be NaN; a size that no tree has stays impossible.
    return np.where(np.isfinite(values), p * np.maximum(values, 0), -np.inf)

  if below is not None:
    gains = gain(below[None, :])
  columns = np.arange(len(p))
  for n in range(2, max_nodes + 1):
    if below is None:
      gains[:, n - 1 : n] = gain(best[None, n - 1 : n])
    width = min(len(p), n - 1)
    # y = 1 … n−1 against T[n − y, b − 1], all b at once.
    options = total[:width, n - 1 : 0 : -1] + gains[:width, 1:n]
    y = np.argmax(options, axis=1)
    total[1 : width + 1, n] = options[columns[:width], y]
    last[1 : width + 1, n] = y + 1
    branches[n] = np.argmax(total[: width + 1, n])
    best[n] = total[branches[n], n]
  return _Table(best=best, branches=branches, last=last)


def _read_out(table_of: Callable[[int], _Table]) -> _Solved:
  """Returns the solution whose subtrees on `level` follow `table_of(level)`."""
  expected = table_of(1).best.copy()
  expected[0] = 0.0

  def extract(num_nodes: int) -> TreeShape:
    _check_feasible(expected, num_nodes)
    parents, ranks = [0], [0]
    level, sizes = 1, [(0, num_nodes)]  # rows of a level and subtree sizes
    while sizes:
      table, deeper = table_of(level), []
      for row, size in sizes:
        shares = []
        for b in range(int(table.branches[size]), 0, -1):
          shares.append(int(table.last[b, size]))
          size -= shares[-1]
        for rank, share in enumerate(reversed(shares), start=1):
          deeper.append((len(parents), share))
          parents.append(row)
          ranks.append(rank)
      level, sizes = level + 1, deeper
    return TreeShape(
      parents=np.array(parents, np.int32),
      ranks=np.array(ranks, np.int32),
      expected_by_size=expected[: num_nodes + 1].copy(),
    )

  return _Solved(expected, extract)


def _read_acceptance(acceptance: ArrayLike) -> _Acceptance:
  p = np.asarray(acceptance, np.float64)
  if p.ndim not in (1, 2) or p.size == 0:
    raise ValueError(
      f"acceptance has shape {p.shape}: must be [B] or [L, B], not empty"
    )
  if not ((p >= 0) & (p <= 1)).all():
    raise ValueError(f"acceptance = {p.tolist()}: must lie in [0, 1]")
  return _Acceptance(np.atleast_2d(p), per_depth=p.ndim == 2)


def _check_sizes(num_nodes: int, max_depth: int | None) -> None:
  if num_nodes < 1:
    raise ValueError(f"number of nodes = {num_nodes}: must be >= 1")
  if max_depth is not None and max_depth < 1:
    raise ValueError(f"max_depth = {max_depth}: must be >= 1, or None")


def _check_feasible(expected: np.ndarray, num_nodes: int) -> None:
  if not np.isfinite(expected[num_nodes]):
    largest = int(np.flatnonzero(np.isfinite(expected))[-1])
    raise ValueError(
      f"num_nodes = {num_nodes}: no such tree within the depth and rank "
      f"limits, the largest size is {largest}"
    )
