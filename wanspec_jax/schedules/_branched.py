# SPDX-License-Identifier: Apache-2.0
"""Branched: more than one continuation where the drafter is unsure.

SpecBranch (https://arxiv.org/abs/2506.01979) and AceSpec's branch budget
(https://arxiv.org/abs/2609.02514).
"""

from collections.abc import Sequence

from wanspec_jax.schedules._paths import best_path, can_grow, stated
from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Policy, Send

_CHILDREN = 8  # asked for per node, of which the likeliest become branches


def branched(
  *,
  depth: int = 4,
  branches: int = 3,
  epsilon: float = 0.4,
  decay: float | None = None,
) -> Policy:
  """Returns the policy.

  A chain of `depth` tokens is drafted. The branch point is the first of them
  that the drafter states at q < ε, or the one behind the last. What lies before
  it is launched with the root; meanwhile the max(1, ⌊k_max (1 − q)⌋) likeliest
  tokens at the branch point, the chain's own among them, are drafted on side by
  side, one level of all of them per answer, until each is `depth` long. A
  verdict that lands on one of them retains that branch as the next chain, and
  completes it if it is short; on any other a chain is drafted anew, and the
  root waits for it. (The paper's classifier of all-rejected and all-accepted
  chains, H-RAD, needs the target's features; this is its middle case.)

  With `decay` it is AceSpec's tree: the whole chain is launched, and k_max ηᵏ
  other tokens, rounded, are drafted on at the position behind k accepted ones,
  and what follows the last. No level is begun that would not be done when the
  verdict is due: building the tree takes at most RTT + T_verify.

  Args:
    depth: γ, drafted tokens of a chain; 4 in the open code.
    branches: k_max; 3 in the open code.
    epsilon: ε; tuned per pair of models in the paper, which gives no value.
    decay: η, the ratio of the geometric budget; None for SpecBranch.

  Raises:
    ValueError: `depth` or `branches` not positive, or `decay` outside (0, 1].
  """
  if depth < 1 or branches < 1:
    raise ValueError(f"depth = {depth}, branches = {branches}: must be >= 1")
  if decay is not None and not 0 < decay <= 1:
    raise ValueError(f"decay = {decay}: must lie in (0, 1]")

  def heads(spec: Speculation, sent: Sequence[int]) -> list[int]:
    """Returns the first node of every branch below what is sent."""
    if decay is None:
      below = _ranked(spec, sent[-1])
      count = int(branches * (1 - stated(spec.nodes[below[0]]))) if below else 0
      return below[: max(1, count)]
    found = []
    for k, node in enumerate(sent):
      others = [n for n in _ranked(spec, node) if n not in sent]
      found += others[: round(branches * decay**k)]
    return found + [n for n in best_path(spec, sent[-1])[:1] if n not in found]

  def next_chain(spec: Speculation, path: list[int]) -> tuple[int, ...]:
    chain = path[: min(depth, spec.max_new_nodes)]
    if decay is None:
      unsure = (
        i for i, n in enumerate(chain) if stated(spec.nodes[n]) < epsilon
      )
      chain = chain[: next(unsure, len(chain))]
    return tuple(chain)

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    if spec.drafting:
      return None
    path = best_path(spec, spec.root)
    if not spec.in_flight:
      tip = path[-1] if path else spec.root
      if len(path) < depth and can_grow(spec, tip):
        return Grow((spec.anchor(tip),), _CHILDREN, 1)
      return Send(next_chain(spec, path))
    sent = [spec.root, *(n for n in path if spec.nodes[n].run is not None)]
    tips = [n for n in sent if can_grow(spec, n)]
    for head in () if tips else heads(spec, sent):
      branch = [head, *best_path(spec, head)]
      if len(branch) < depth and can_grow(spec, branch[-1]):
        tips.append(branch[-1])
    done_s = time_s + pipe.costs.draft.seconds(1, _CHILDREN * len(tips))
    is_late = decay is not None and done_s > spec.flights[0].return_s
    if not tips or is_late:
      return None
    return Grow(tuple(spec.anchor(n) for n in tips), _CHILDREN * len(tips), 1)

  return Policy(name="branched", decide=decide, max_in_flight=1)


def _ranked(spec: Speculation, node: int) -> list[int]:
  """Returns a node's children, likeliest first, the oldest on a tie."""
  return sorted(
    spec.below.get(node, ()),
    key=lambda child: (-spec.nodes[child].log_p, child),
  )
