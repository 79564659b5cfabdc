# SPDX-License-Identifier: Apache-2.0
"""Drafts of a dialled quality, from a recording of what the target says."""

import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from wanspec_jax.base import Anchor, Drafter, Nodes

_MASK = (1 << 64) - 1

AcceptanceFn = Callable[[int, int], Sequence[float]]


def _mix(x: int) -> int:
  """SplitMix64's finaliser (https://doi.org/10.1145/2660193.2660195)."""
  x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
  x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
  return x ^ (x >> 31)


def _hash(*words: int) -> int:
  """Returns 64 bits addressed by `words`."""
  state = 0
  for word in words:
    state = _mix((state + 0x9E3779B97F4A7C15 + (word & _MASK)) & _MASK)
  return state


def _check_marginals(row: Sequence[float], where: str) -> tuple[float, ...]:
  out = tuple(float(a) for a in row)
  if not all(0.0 <= a <= 1.0 for a in out) or sum(out) > 1.0 + 1e-9:
    raise ValueError(
      f"synthetic: acceptance{where} = {out}: marginals must lie in [0, 1] and "
      "sum to at most 1"
    )
  return out


def _acceptance_fn(acceptance: Any) -> AcceptanceFn:
  """Returns `(position, depth from 1) -> checked marginals by rank`."""
  if callable(acceptance):
    return lambda position, depth: _check_marginals(
      acceptance(position, depth), f"({position}, {depth})"
    )
  table = np.asarray(acceptance, np.float64)
  if table.ndim > 3 or table.size == 0:
    raise ValueError(
      f"synthetic: acceptance has shape {table.shape}: must be a number, [R], "
      "[D, R] or [T, D, R], not empty"
    )
  table = table.reshape((1,) * (3 - table.ndim) + table.shape)
  rows = [
    [_check_marginals(row, f"[{t}, {d}]") for d, row in enumerate(by_depth)]
    for t, by_depth in enumerate(table.tolist())
  ]
  # Past its end a table goes on with its last row.
  return lambda position, depth: rows[min(position, len(rows) - 1)][
    min(depth, len(rows[0])) - 1
  ]


class _Progress:
  """How much of the recording is committed, and whether the text left it."""

  __slots__ = ("done", "strayed")

  def __init__(self):
    self.done = 0
    self.strayed = False


def synthetic(
  output: Sequence[int],
  *,
  acceptance: float | Sequence[Any] | np.ndarray | AcceptanceFn,
  vocab_size: int,
  max_depth: int = 64,
  seed: int = 0,
) -> Drafter:
  """Returns a drafter that is right as often as it is told to be.

  It knows what plain decoding makes of the prompt and proposes, below every
  node, one child per rank `r` with a positive marginal `a[r]`. The true token
  is child `r` with probability `a[r]`, for one `r` at most, and missing with
  probability `1 − Σ a`: the positional acceptance of Sequoia
  (https://arxiv.org/abs/2402.12374, marginals, not conditionals). The other
  children bear distractors, which are never the true token. So the acceptance
  of a schedule can be varied while the text stays what it is.

  Whether and where the true token of a position is found depends on (`seed`,
  position, `a`) only: drafting the position again, in whatever round, from
  whatever anchor, gives the same children. If `a` varies with depth, one
  uniform number per position is compared with the `a` of the depth at hand, so
  a hit at a smaller `a` is a hit at a larger one.

  Below an anchor or a node whose path left the recording, and beyond its end,
  all children are distractors. The tree is grown best first by the product of
  the marginals (the optimum for marginals that fall with rank; ties go to the
  node pushed first), and `log_q` is the logarithm of the marginal: calibrated
  by construction.

  The state is a mutable host object; treat the argument of every function as
  donated.

  Args:
    output: `[T]` recorded tokens after the prompt; position 0 is the first.
    acceptance: marginals by rank: a number (one child), `[R]`, `[D, R]` by
      depth, `[T, D, R]` by position and depth, or `(position, depth) ->
      marginals`. Tables go on with their last row. Depth counts from the root,
      whose children have depth 1.
    vocab_size: distractors are drawn from `0 … vocab_size - 1`.
    max_depth: largest depth below an anchor.
    seed: key of all draws.

  Returns:
    A `Drafter`; `params`, the prompt, `request_key` and `features` are
    ignored.

  Raises:
    ValueError: marginals outside [0, 1] or with a sum above 1 (for a callable,
      when it is called), a recorded token outside the vocabulary, more ranks
      than distractors, or an argument out of range.

  Example:
    >>> import drafters
    >>> from wanspec_jax.base import Anchor
    >>> drafter = drafters.synthetic(
    ...   [4, 5, 6], acceptance=1.0, vocab_size=10
    ... )
    >>> state = drafter.init(None, [3], 0)
    >>> drafter.expand(state, [Anchor(0)], 2)[1].tokens.tolist()
    [4, 5]
  """
  if vocab_size < 2:
    raise ValueError(f"synthetic: vocab_size = {vocab_size}: must be >= 2")
  if max_depth < 1:
    raise ValueError(f"synthetic: max_depth = {max_depth}: must be >= 1")
  truth = tuple(int(t) for t in output)
  for i, token in enumerate(truth):
    if not 0 <= token < vocab_size:
      raise ValueError(
        f"synthetic: output[{i}] = {token}: must lie in 0 … {vocab_size - 1}"
      )
  marginals = _acceptance_fn(acceptance)

  def children(position: int, depth: int, on_path: bool):
    """Returns [(token, marginal)] by rank, ranks of marginal 0 left out."""
    row = marginals(position, depth)
    if len(row) >= vocab_size:
      raise ValueError(
        f"synthetic: acceptance has {len(row)} ranks: must be fewer than "
        f"vocab_size = {vocab_size}"
      )
    bits = _hash(seed, position)
    # Distinct steps from the true token never arrive at it.
    origin = truth[position] if position < len(truth) else bits % vocab_size
    start = _mix(bits)
    out = [
      (origin + 1 + (start + rank) % (vocab_size - 1)) % vocab_size
      for rank in range(len(row))
    ]
    if on_path and position < len(truth):
      uniform = (bits >> 11) * 2.0**-53
      for rank, marginal in enumerate(row):
        uniform -= marginal
        if uniform < 0.0:
          out[rank] = origin
          break
    return [(t, a) for t, a in zip(out, row, strict=True) if a > 0.0]

  def init(params, prompt, request_key):
    del params, prompt, request_key
    return _Progress()

  def expand(
    state,
    anchors: Sequence[Anchor],
    budget: int,
    levels: int | None = None,
  ):
    deepest = max_depth if levels is None else min(levels, max_depth)
    # (-log reach, creation order, log a, token, parent row, position, depths
    # from the root and the anchor, whether the path is the recorded one).
    heap: list[tuple[float, int, float, int, int, int, int, bool]] = []
    made = 0

    def push_children(row, position, depth, grown, on_path, log_reach):
      nonlocal made
      if grown >= deepest:
        return
      for token, a in children(position, depth + 1, on_path):
        made += 1
        stays = on_path and truth[position : position + 1] == (token,)
        log_a = math.log(a)
        heapq.heappush(
          heap,
          (-(log_reach + log_a), made, log_a, token, row, depth, grown, stays),
        )

    for row, anchor in enumerate(anchors):
      ahead = truth[state.done : state.done + len(anchor.path)]
      on_path = not state.strayed and ahead == tuple(anchor.path)
      depth = len(anchor.path)
      push_children(row, state.done + depth, depth, 0, on_path, 0.0)
    nodes: list[tuple[int, int, float]] = []
    while heap and len(nodes) < budget:
      negative, _, log_a, token, row, depth, grown, stays = heapq.heappop(heap)
      nodes.append((token, row, log_a))
      push_children(
        len(anchors) + len(nodes) - 1,
        state.done + depth + 1,
        depth + 1,
        grown + 1,
        stays,
        -negative,
      )
    return state, Nodes(
      np.array([n[0] for n in nodes], np.int32),
      np.array([n[1] for n in nodes], np.int32),
      np.array([n[2] for n in nodes], np.float32),
    )

  def rebase(state, root):
    del root  # positions move with `observe`
    return state

  def observe(state, tokens, features=None):
    del features
    new = tuple(int(t) for t in tokens)
    if truth[state.done : state.done + len(new)] != new:
      state.strayed = True
    state.done += len(new)
    return state

  return Drafter("synthetic", init, expand, rebase, observe)
