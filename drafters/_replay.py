# SPDX-License-Identifier: Apache-2.0
"""Acceptance of a drafter on recorded text, without running the target.

With sample-and-match verification the text does not depend on the drafter, so
a recording of plain decoding tells exactly what any deterministic drafter
would have got accepted (https://arxiv.org/abs/2411.04975 uses the same kind of
offline simulation).
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from wanspec_jax.base import Anchor, Drafter, Nodes


class Round(NamedTuple):
  """What one lap of synchronous tree speculation would have done.

  Attributes:
    drafted: nodes sent (the root not counted).
    tested: positions of the walk at which there was a child to test; every
      accepted node is one, and so is the rejection, if there was any.
    accepted: nodes accepted.
    emitted: tokens of text gained: `accepted + 1`, the last being the target's
      own; only `accepted` where the recording ends first.
    expected: `Σ exp(cumulative log_q)` over the nodes sent that lie within the
      recording: the accepted number that the drafter itself expects. Calibrated
      drafters have equal sums of `expected` and `accepted` over many rounds.
  """

  drafted: int
  tested: int
  accepted: int
  emitted: int
  expected: float


SizeFn = Callable[[np.ndarray], int]


def node_depths(nodes: Nodes, num_anchors: int) -> np.ndarray:
  """Returns the `[m]` int64 depth of each node below its anchor, from 1.

  Args:
    nodes: topologically ordered nodes below `num_anchors` anchors.
    num_anchors: `A`, the number of rows before node 0.
  """
  depth = np.zeros(num_anchors + len(nodes.tokens), np.int64)
  for i, parent in enumerate(nodes.parents.tolist()):
    depth[num_anchors + i] = depth[parent] + 1
  return depth[num_anchors:]


def cumulative_log_q(nodes: Nodes, num_anchors: int) -> np.ndarray:
  """Returns the `[m]` float64 log-probability of each node given its anchor.

  Args:
    nodes: topologically ordered nodes below `num_anchors` anchors.
    num_anchors: `A`, the number of rows before node 0.
  """
  total = np.zeros(num_anchors + len(nodes.tokens), np.float64)
  for i, (parent, log_q) in enumerate(
    zip(nodes.parents.tolist(), nodes.log_q.tolist(), strict=True)
  ):
    total[num_anchors + i] = total[parent] + log_q
  return total[num_anchors:]


def check_nodes(nodes: Nodes, num_anchors: int, budget: int) -> None:
  """Raises `ValueError` unless `nodes` is what `Drafter.expand` promises.

  Args:
    nodes: result of `expand`.
    num_anchors: number of anchors handed to it.
    budget: the budget handed to it.

  Raises:
    ValueError: more nodes than the budget, arrays of unequal length, a parent
      that is not an earlier row, two children of one parent with one token, or
      a `log_q` that is no log-probability.
  """
  m = len(nodes.tokens)
  if m > budget:
    raise ValueError(f"nodes: {m} drafted, but budget = {budget}")
  if not len(nodes.parents) == len(nodes.log_q) == m:
    raise ValueError(
      f"nodes: lengths of tokens, parents, log_q = {m}, "
      f"{len(nodes.parents)}, {len(nodes.log_q)} must be equal"
    )
  for i, parent in enumerate(nodes.parents.tolist()):
    if not 0 <= parent < num_anchors + i:
      raise ValueError(
        f"nodes.parents[{i}] = {parent}: must be an earlier row "
        f"(0 … {num_anchors + i - 1})"
      )
  edges = set(zip(nodes.parents.tolist(), nodes.tokens.tolist(), strict=True))
  if len(edges) != m:
    raise ValueError("nodes: two children of one parent bear the same token")
  if not np.all(nodes.log_q <= 0):  # also false for NaN
    raise ValueError("nodes.log_q: must be log-probabilities (<= 0)")


def replay(
  drafter: Drafter,
  prompt: Sequence[int],
  output: Sequence[int],
  *,
  budget: int = 64,
  size_fn: SizeFn | None = None,
  params: Any = None,
  request_key: int = 0,
) -> list[Round]:
  """Returns the rounds that synchronous speculation would take.

  Each round drafts below the root, keeps the first `n` nodes, walks the
  recorded text as far as it is in the tree and adds one token of the target.

  Args:
    drafter: what to test; it sees recorded tokens only once they are committed.
    prompt: prompt token ids, at least one.
    output: what plain decoding made of the prompt.
    budget: largest number of nodes per round.
    size_fn: `(cumulative log_q [m]) -> n ≤ m`, how many of the drafted nodes
      to send; all of them if absent.
    params: handed to the drafter.
    request_key: handed to the drafter.

  Returns:
    One `Round` per lap; `Σ emitted = len(output)`.

  Raises:
    ValueError: an empty prompt, nodes that break the contract of
      `Drafter.expand`, or a size outside 0 … m.

  Example:
    >>> import drafters
    >>> rounds = drafters.replay(drafters.suffix(), [5, 6, 7, 5], [6, 7, 5, 6])
    >>> sum(r.emitted for r in rounds) / len(rounds)  # tokens per lap
    4.0
  """
  if not len(prompt):
    raise ValueError("prompt: must hold at least one token, got none")
  state = drafter.init(params, list(prompt), request_key)
  rounds = []
  done = 0
  while done < len(output):
    state, nodes = drafter.expand(state, [Anchor(len(prompt) + done)], budget)
    check_nodes(nodes, 1, budget)
    log_reach = cumulative_log_q(nodes, 1)
    kept = len(nodes.tokens) if size_fn is None else int(size_fn(log_reach))
    if not 0 <= kept <= len(nodes.tokens):
      raise ValueError(
        f"size_fn: {kept} is outside 0 … {len(nodes.tokens)} drafted nodes"
      )
    children: dict[int, dict[int, int]] = {}
    for i in range(kept):
      siblings = children.setdefault(int(nodes.parents[i]), {})
      siblings[int(nodes.tokens[i])] = i + 1
    row = accepted = tested = 0
    path: list[int] = []
    while done + accepted < len(output) and row in children:
      tested += 1
      token = int(output[done + accepted])
      if token not in children[row]:
        break
      row = children[row][token]
      path.append(token)
      accepted += 1
    left = len(output) - done
    within = node_depths(nodes, 1)[:kept] <= left
    emitted = min(accepted + 1, left)
    committed = [int(t) for t in output[done : done + emitted]]
    state = drafter.observe(state, committed)
    done += emitted
    state = drafter.rebase(
      state, Anchor(len(prompt) + done - 1, tuple(committed))
    )
    rounds.append(
      Round(
        drafted=kept,
        tested=tested,
        accepted=accepted,
        emitted=emitted,
        expected=float(np.exp(log_reach[:kept][within]).sum()),
      )
    )
  return rounds
