# SPDX-License-Identifier: Apache-2.0
"""Draft trees as fixed-capacity, topologically ordered arrays.

Every function is pure, unbatched (use `jax.vmap` for a batch) and jittable with
static shapes: what varies is `num_nodes`, never the capacity `N`. Rows that are
not real are told apart by masks; no index is ever negative.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTree:
  """A token tree awaiting verification.

  `N` is the capacity, a compile-time constant; only the first `num_nodes` rows
  are real. Rows are topologically ordered: `parents[i] < i` for every real row
  but the root, which is its own parent. Two real rows never share both parent
  and token. Padding rows point at the root and hold token 0 and `log_q` 0.

  Attributes:
    tokens: `[N]` int32 token ids; row 0 holds the anchor that the tree grows
      from, the last accepted token.
    parents: `[N]` int32 row of each node's parent.
    log_q: `[N]` float32 log-probability of each node given its parent; 0 for
      the root and for padding.
    num_nodes: `[]` int32 number of real rows, root included.
  """

  tokens: jax.Array  # [N]
  parents: jax.Array  # [N]
  log_q: jax.Array  # [N]
  num_nodes: jax.Array  # []

  @property
  def capacity(self) -> int:
    return self.tokens.shape[-1]


class Path(NamedTuple):
  """A walk from the root downwards.

  Attributes:
    rows: `[N]` int32 rows in walking order, the root first; 0 past `length`.
    length: `[]` int32 number of rows on the walk, root included.
  """

  rows: jax.Array
  length: jax.Array


class Remapped(NamedTuple):
  """A tree that kept some rows of an older one, compacted in the same order.

  Attributes:
    tree: the new tree, of the same capacity.
    new_of_old: `[N]` int32 new row of each old row; 0 where dropped.
    kept_mask: `[N]` bool, true for the old rows that were kept.
  """

  tree: DraftTree
  new_of_old: jax.Array
  kept_mask: jax.Array


class Merged(NamedTuple):
  """The union of two trees.

  Attributes:
    tree: rows of `a` where they were, then what only `b` has.
    row_of_b: `[M]` int32 row of each row of `b` in `tree`; 0 where not placed.
    placed_mask: `[M]` bool, true for the real rows of `b` that are in `tree`.
    overflowed: `[]` bool, true if a row of `b` was left out for lack of room.
  """

  tree: DraftTree
  row_of_b: jax.Array
  placed_mask: jax.Array
  overflowed: jax.Array


def from_nodes(
  tokens: Sequence[int] | np.ndarray,
  parents: Sequence[int] | np.ndarray,
  log_q: Sequence[float] | np.ndarray,
  *,
  capacity: int,
) -> DraftTree:
  """Returns a padded tree of `n` host rows, root first, after checking them.

  Args:
    tokens: `[n]` token ids.
    parents: `[n]` row of each node's parent; 0 for the root, row 0.
    log_q: `[n]` log-probabilities given the parent; 0 for the root.
    capacity: `N`, at least `n`.

  Raises:
    ValueError: naming the row that breaks an invariant of `DraftTree`.
  """
  token_ids, rows = _integers("tokens", tokens), _integers("parents", parents)
  scores = np.asarray(log_q, np.float32)
  n = len(token_ids)
  for field, values in (("parents", rows), ("log_q", scores)):
    if values.shape != (n,):
      raise ValueError(
        f"{field} has shape {values.shape}: must be ({n},) as tokens has"
      )
  if not 1 <= n <= capacity:
    raise ValueError(
      f"tokens has {n} rows: must lie in [1, capacity = {capacity}]"
    )
  if rows[0] != 0:
    raise ValueError(f"parents[0] = {rows[0]}: the root is its own parent, 0")
  if scores[0] != 0:
    raise ValueError(f"log_q[0] = {scores[0]}: must be 0 for the root")
  seen: dict[tuple[int, int], int] = {}
  for i in range(n):
    token, parent = int(token_ids[i]), int(rows[i])
    if not 0 <= token < 2**31:
      raise ValueError(f"tokens[{i}] = {token}: must lie in [0, 2**31)")
    if not scores[i] <= 0:  # also catches NaN
      raise ValueError(f"log_q[{i}] = {scores[i]}: must be <= 0")
    if i == 0:
      continue
    if not 0 <= parent < i:
      raise ValueError(f"parents[{i}] = {parent}: must lie in [0, {i})")
    if (parent, token) in seen:
      raise ValueError(
        f"rows {seen[parent, token]} and {i} both hold token {token} below "
        f"row {parent}: siblings must differ"
      )
    seen[parent, token] = i
  pad = (0, capacity - n)
  return DraftTree(
    tokens=jnp.asarray(np.pad(token_ids.astype(np.int32), pad)),
    parents=jnp.asarray(np.pad(rows.astype(np.int32), pad)),
    log_q=jnp.asarray(np.pad(scores, pad)),
    num_nodes=jnp.asarray(n, jnp.int32),
  )


def node_mask(tree: DraftTree) -> jax.Array:
  """Returns the `[N]` bool mask of real (non-padding) rows."""
  _check(tree)
  return _row_ids(tree) < tree.num_nodes


def ancestor_mask(tree: DraftTree) -> jax.Array:
  """Returns which rows each row may attend to.

  Row `i` sees itself and every node on its path to the root: the tree attention
  of SpecInfer (https://arxiv.org/abs/2305.09781). Padding rows see nothing and
  nothing sees them.

  Returns:
    `[N, N]` bool, true at `[i, j]` iff `j` is `i` or an ancestor of `i`.
  """
  _check(tree)

  def double(_, carry):
    mask, jump = carry
    return mask | mask[jump], jump[jump]

  eye = jnp.eye(tree.capacity, dtype=jnp.bool_)
  mask, _ = jax.lax.fori_loop(0, _doublings(tree), double, (eye, tree.parents))
  valid = node_mask(tree)
  return mask & valid[:, None] & valid[None, :]


def depths(tree: DraftTree) -> jax.Array:
  """Returns the `[N]` int32 edges between root and row; 0 for padding.

  The absolute position of a node is the root's plus its depth, never its row.
  """
  _check(tree)

  def double(_, carry):
    steps, jump = carry
    return steps + steps[jump], jump[jump]

  # The root jumps to itself with zero steps, so overshooting adds nothing.
  steps = ((_row_ids(tree) > 0) & node_mask(tree)).astype(jnp.int32)
  return jax.lax.fori_loop(0, _doublings(tree), double, (steps, tree.parents))[
    0
  ]


def cumulative_log_q(tree: DraftTree) -> jax.Array:
  """Returns the `[N]` float32 path log-probabilities; 0 for padding.

  cumᵢ = cum_parent(i) + log qᵢ, summed from the root in this order, so that
  no node ever scores above its parent, rounding included.
  """
  _check(tree)

  def body(i, cum):
    return cum.at[i].set(cum[tree.parents[i]] + tree.log_q[i])

  cum = jax.lax.fori_loop(
    1, tree.capacity, body, jnp.zeros((tree.capacity,), jnp.float32)
  )
  return jnp.where(node_mask(tree), cum, jnp.float32(0))


def path(tree: DraftTree, row: jax.typing.ArrayLike) -> Path:
  """Returns the rows from the root to `row`, both included.

  Args:
    tree: an unbatched tree.
    row: `[]` integer; one that is not real gives a path of length 0.
  """
  _check(tree)
  row, real = _row(tree, row)
  depth = depths(tree)[row]

  def body(i, carry):
    rows, at = carry
    return rows.at[depth - i].set(at), tree.parents[at]

  length = jnp.where(real, depth + 1, jnp.int32(0))
  rows = jnp.zeros((tree.capacity,), jnp.int32)
  rows, _ = jax.lax.fori_loop(0, length, body, (rows, row))
  return Path(rows=rows, length=length)


def reroot(tree: DraftTree, row: jax.typing.ArrayLike) -> Remapped:
  """Returns the subtree of `row`, which becomes the root.

  Args:
    tree: an unbatched tree.
    row: `[]` integer; one that is not real keeps nothing (`num_nodes` 0).
  """
  _check(tree)
  row, real = _row(tree, row)

  def double(_, carry):
    below, jump = carry
    return below | below[jump], jump[jump]

  seed = (_row_ids(tree) == row) & real
  below, _ = jax.lax.fori_loop(
    0, _doublings(tree), double, (seed, tree.parents)
  )
  return _compact(tree, below)


def prune(tree: DraftTree, keep_mask: jax.Array) -> Remapped:
  """Returns the tree without the rows not kept and all that hangs below them.

  Args:
    tree: an unbatched tree.
    keep_mask: `[N]` bool, true = keep; the root stays whatever it says.
  """
  _check(tree)
  chex.assert_shape(keep_mask, (tree.capacity,))
  chex.assert_type(keep_mask, jnp.bool_)

  def double(_, carry):
    alive, jump = carry
    return alive & alive[jump], jump[jump]

  alive, _ = jax.lax.fori_loop(
    0, _doublings(tree), double, (keep_mask.at[0].set(True), tree.parents)
  )
  return _compact(tree, alive)


def truncate(tree: DraftTree, num_rows: jax.typing.ArrayLike) -> Remapped:
  """Returns the `num_rows` rows of highest path probability.

  Rows compete by cumulative log q, ties going to the lower row; a parent never
  scores below its child, so the result is a tree (the best-first order of
  SpecExec, https://arxiv.org/abs/2406.02532). Survivors keep their row order.

  Args:
    tree: an unbatched tree.
    num_rows: `[]` integer, root included; the root stays even at 0.
  """
  _check(tree)
  valid = node_mask(tree)
  cost = jnp.where(valid, -cumulative_log_q(tree), jnp.float32(jnp.inf))
  order = jnp.argsort(cost, stable=True)
  place = jnp.zeros((tree.capacity,), jnp.int32).at[order].set(_row_ids(tree))
  keep = place < jnp.asarray(num_rows, jnp.int32)
  return _compact(tree, keep.at[0].set(True))


def merge(a: DraftTree, b: DraftTree) -> Merged:
  """Returns the union of two trees with the same root, in `a`'s capacity.

  Nodes are the same if their token paths are: row by row, a node of `b` whose
  (parent, token) is there already is that row and keeps that row's `log_q`;
  any other is appended. A node that finds no room is left out together with
  its descendants. If the roots hold different tokens nothing of `b` is placed.
  """
  _check(a)
  _check(b)
  rows = _row_ids(a)
  valid_b = node_mask(b)

  def body(i, carry):
    tree, row_of_b, placed, overflowed = carry
    parent, token = row_of_b[b.parents[i]], b.tokens[i]
    wanted = valid_b[i] & placed[b.parents[i]]
    same = (rows > 0) & (rows < tree.num_nodes)
    same &= (tree.parents == parent) & (tree.tokens == token)
    found = jnp.any(same)
    room = tree.num_nodes < a.capacity
    append = wanted & ~found & room
    row = jnp.where(found, jnp.argmax(same).astype(jnp.int32), tree.num_nodes)
    # An index past the end makes the scatter drop, so nothing is overwritten.
    at = jnp.where(append, row, jnp.int32(a.capacity))
    tree = DraftTree(
      tokens=tree.tokens.at[at].set(token, mode="drop"),
      parents=tree.parents.at[at].set(parent, mode="drop"),
      log_q=tree.log_q.at[at].set(b.log_q[i], mode="drop"),
      num_nodes=tree.num_nodes + append.astype(jnp.int32),
    )
    has_row = wanted & (found | room)
    return (
      tree,
      row_of_b.at[i].set(jnp.where(has_row, row, jnp.int32(0))),
      placed.at[i].set(has_row),
      overflowed | (wanted & ~found & ~room),
    )

  placed = jnp.zeros((b.capacity,), jnp.bool_)
  placed = placed.at[0].set(valid_b[0] & (a.tokens[0] == b.tokens[0]))
  carry = (a, jnp.zeros((b.capacity,), jnp.int32), placed, jnp.asarray(False))
  return Merged(*jax.lax.fori_loop(1, b.capacity, body, carry))


def accepted_path(tree: DraftTree, target_tokens: jax.Array) -> Path:
  """Returns the sample-and-match walk given the target's own token per row.

  From the root, the walk goes on to the child that bears the token which the
  target draws at the current row, as long as there is one. It keeps the
  target's law exactly for any tree, since the target's draw is what is emitted.
  The number of accepted nodes is `length - 1`, and `target_tokens` at the last
  row of the walk is the token emitted after them.

  Args:
    tree: an unbatched tree.
    target_tokens: `[N]` int32 the target's next token after each row.
  """
  _check(tree)
  chex.assert_shape(target_tokens, (tree.capacity,))
  match = (target_tokens[tree.parents] == tree.tokens) & node_mask(tree)
  match = match.at[0].set(True)

  def double(_, carry):
    ok, jump = carry
    return ok & ok[jump], jump[jump]

  ok, _ = jax.lax.fori_loop(0, _doublings(tree), double, (match, tree.parents))
  # Siblings differ, so at most one row of each depth has matched.
  leaf = jnp.argmax(jnp.where(ok, depths(tree), jnp.int32(-1)))
  return path(tree, leaf)


def _check(tree: DraftTree) -> None:
  chex.assert_rank(tree.num_nodes, 0)
  chex.assert_shape([tree.tokens, tree.parents, tree.log_q], (tree.capacity,))
  chex.assert_type(
    [tree.tokens, tree.parents, tree.num_nodes, tree.log_q],
    [jnp.int32, jnp.int32, jnp.int32, jnp.float32],
  )


def _row_ids(tree: DraftTree) -> jax.Array:
  return jnp.arange(tree.capacity, dtype=jnp.int32)


def _doublings(tree: DraftTree) -> int:
  """Pointer jumps of length 1, 2, 4, … that cover any path in the tree."""
  return max(tree.capacity - 1, 1).bit_length()


def _row(
  tree: DraftTree, row: jax.typing.ArrayLike
) -> tuple[jax.Array, jax.Array]:
  """Returns `row` brought into range, and whether it was a real row."""
  row = jnp.asarray(row)
  chex.assert_rank(row, 0)
  real = (row >= 0) & (row < tree.num_nodes)
  return jnp.where(real, row, 0).astype(jnp.int32), real


def _compact(tree: DraftTree, keep_mask: jax.Array) -> Remapped:
  """Moves the kept real rows to the front; a row whose parent is not kept (the
  first one) becomes the root."""
  keep_mask = keep_mask & node_mask(tree)
  new_of_old = jnp.cumsum(keep_mask, dtype=jnp.int32) - 1
  new_of_old = jnp.where(keep_mask, new_of_old, jnp.int32(0))
  at = jnp.where(keep_mask, new_of_old, jnp.int32(tree.capacity))

  def move(values):
    return jnp.zeros_like(values).at[at].set(values, mode="drop")

  return Remapped(
    tree=DraftTree(
      tokens=move(tree.tokens),
      parents=move(new_of_old[tree.parents]),
      log_q=move(tree.log_q).at[0].set(0),
      num_nodes=jnp.sum(keep_mask, dtype=jnp.int32),
    ),
    new_of_old=new_of_old,
    kept_mask=keep_mask,
  )


def _integers(field: str, values: Sequence[int] | np.ndarray) -> np.ndarray:
  array = np.asarray(values)
  whole = array.size == 0 or np.issubdtype(array.dtype, np.integer)
  if array.ndim != 1 or not whole:
    raise ValueError(
      f"{field} has shape {array.shape} and dtype {array.dtype}: "
      "must be a list of integers"
    )
  return array
