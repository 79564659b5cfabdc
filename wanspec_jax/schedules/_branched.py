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

  A chain is in flight. Meanwhile branches are drafted at the first of its
  tokens that the drafter states at q < ε, max(1, ⌊k_max (1 − q)⌋) of them, and
  the chain itself goes on below its last token. A verdict that lands on one of
  them finds the next chain there and sends it at once; otherwise a chain is
  drafted anew and the root waits for it. With `decay` the budget is AceSpec's:
  k_max ηᵏ branches, at least one, at every position k.

  Args:
    depth: γ, drafted tokens of a chain; 4 in the open code.
    branches: k_max; 3 in the open code.
    epsilon: ε; tuned per pair of models in the paper, which gives no value.
    decay: η.
  """
  if depth < 1 or branches < 1:
    raise ValueError(f"depth = {depth}, branches = {branches}: must be >= 1")

  def counts(spec: Speculation, chain: Sequence[int]) -> list[int]:
    if decay is not None:
      return [max(1, round(branches * decay**k)) for k in range(len(chain))]
    fan_out = [0] * (len(chain) - 1) + [1]
    for k, node in enumerate(chain[1:]):
      q = stated(spec.nodes[node])
      if q < epsilon:
        fan_out[k] = max(1, int(branches * (1 - q)))
        break
    return fan_out

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    del pipe, time_s
    path = best_path(spec, spec.root)
    if not spec.in_flight:
      if spec.drafting:
        return None
      tip = path[-1] if path else spec.root
      if len(path) < depth and can_grow(spec, tip):
        return Grow((spec.anchor(tip),), _CHILDREN, 1)
      return Send(tuple(path[: min(depth, spec.max_new_nodes)]))
    if spec.drafting or not spec.root_launched:
      return None
    chain = [spec.root, *(n for n in path if spec.nodes[n].run is not None)]
    tips = [n for n in chain if can_grow(spec, n)]
    if not tips:
      for branch in _branches(spec, chain, counts(spec, chain)):
        ahead = [branch, *best_path(spec, branch)]
        if len(ahead) < depth and can_grow(spec, ahead[-1]):
          tips.append(ahead[-1])
    if not tips:
      return None
    return Grow(tuple(spec.anchor(n) for n in tips), _CHILDREN * len(tips), 1)

  return Policy(name="branched", decide=decide, max_in_flight=1)


def _branches(
  spec: Speculation, chain: Sequence[int], counts: Sequence[int]
) -> list[int]:
  """Returns the likeliest children at each position, the chain's own apart."""
  on_chain = set(chain)
  branches: list[int] = []
  for node, count in zip(chain, counts, strict=True):
    below = sorted(
      (child for child in spec.below.get(node, ()) if child not in on_chain),
      key=lambda child: (-spec.nodes[child].log_p, child),
    )
    branches += below[:count]
  return branches
