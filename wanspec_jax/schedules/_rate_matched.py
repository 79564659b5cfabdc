# SPDX-License-Identifier: Apache-2.0
"""Rate-matched: a tree as deep as the target's time allows to draft.

SpecEdge (https://arxiv.org/abs/2505.17052).
"""

from wanspec_jax.schedules._paths import best_path, can_grow
from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Policy, Send


def rate_matched(
  *,
  nodes: int = 32,
  depth: int | None = None,
  proactive: bool = True,
  target_s: float | None = None,
) -> Policy:
  """Returns the policy.

  Args:
    nodes: budget of the tree; 32 in the example configuration.
    depth: levels; by default ⌊T / t_d⌋, at least 1, with T the lap (the WAN
      form) or, given `target_s`, ⌊(T_v − RTT) / t_d⌋.
    proactive: draft below the single likeliest (leaf, token) while waiting;
      used if the verdict lands exactly there ("included").
    target_s: T_v, the target's own time of a verification.
  """
  if nodes < 1 or (depth is not None and depth < 1):
    raise ValueError(f"nodes = {nodes}, depth = {depth}: must be >= 1")

  def levels(pipe: Pipe) -> int | None:
    level_s = pipe.costs.draft.per_level_s
    if depth is not None or not level_s:
      return depth
    spare_s = pipe.costs.lap_s(1)
    if target_s is not None:
      spare_s = target_s - sum(pipe.costs.delay_s)
    return max(1, int(spare_s / level_s))

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    del time_s
    if spec.drafting:
      return None
    if spec.in_flight:
      path = best_path(spec, spec.root)
      tip = path[-1] if path else spec.root
      unsent = sum(spec.nodes[n].run is None for n in path)
      most = levels(pipe) or 1
      if proactive and unsent <= most and can_grow(spec, tip):
        return Grow((spec.anchor(tip),), nodes, most)
      return None
    is_new = can_grow(spec, spec.root) and not spec.below.get(spec.root)
    if is_new and spec.max_new_nodes:
      return Grow((spec.anchor(spec.root),), nodes, levels(pipe))
    return Send(tuple(spec.launchable(min(nodes, spec.max_new_nodes))))

  return Policy(name="rate_matched", decide=decide, max_in_flight=1)
