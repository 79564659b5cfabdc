# SPDX-License-Identifier: Apache-2.0
"""Rate-matched: a tree as deep as the target's time allows to draft.

SpecEdge (https://arxiv.org/abs/2505.17052).
"""

from wanspec_jax.schedules._paths import best_child, can_grow
from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Policy, Send


def rate_matched(
  *,
  nodes: int = 32,
  depth: int | None = None,
  target_s: float | None = None,
  proactive: int = 3,
  included: bool = False,
) -> Policy:
  """Returns the policy.

  Lockstep with a tree whose drafting takes as long as its verification, so
  that two clients can alternate at one target: depth · t_d + RTT = T_v. One
  client on a WAN has the whole lap to fill instead.

  While a tree is verified the drafter goes on proactively: one level below all
  leaves of the tree finds the expansion head, the single likeliest (leaf,
  token), and a tree is grown below that, a level per answer. It is of use if
  the verdict lands exactly there (complete alignment); else a level at most is
  waited for in vain, and a tree is drafted anew.

  Args:
    nodes: budget of a tree; 32 in the example configuration.
    depth: levels of a tree, 4 in the example configuration. By default matched:
      ⌊T_lap / t_d⌋ or, given `target_s`, ⌊(T_v − RTT) / t_d⌋, at least 1, with
      t_d from the pipe's draft costs; as deep as the budget allows if drafting
      is free.
    target_s: T_v, the target's own time of a verification; it has to exceed RTT
      for that rule to make sense, which on a WAN it does not.
    proactive: levels below the expansion head, 3 in the example configuration;
      0 for none.
    included: after an alignment the levels that are there count towards the
      depth of the next tree ("included", saves time) or do not ("excluded",
      the default of the example configuration, saves nothing but goes deeper).

  Raises:
    ValueError: an argument out of range.
  """
  if nodes < 1 or (depth is not None and depth < 1) or proactive < 0:
    raise ValueError(
      f"nodes = {nodes}, depth = {depth}, proactive = {proactive}: must be "
      "at least 1, 1 and 0"
    )

  def levels(pipe: Pipe) -> int:
    level_s = pipe.costs.draft.per_level_s
    if depth is not None:
      return depth
    if not level_s:
      return nodes
    spare_s = pipe.costs.lap_s(1)
    if target_s is not None:
      spare_s = target_s - sum(pipe.costs.delay_s)
    return max(1, int(spare_s / level_s))

  def go_on(spec: Speculation) -> Answer:
    """Returns a level of the proactive tree."""
    leaves = [
      n
      for n in spec.nodes.values()
      if n.run is not None and can_grow(spec, n.id) and n.id not in spec.below
    ]
    heads = [
      n for n in spec.unlaunched() if spec.nodes[n.parent].run is not None
    ]
    if leaves:
      return Grow(tuple(spec.anchor(n.id) for n in leaves), len(leaves), 1)
    if not heads:
      return None
    head = max(heads, key=lambda n: (n.path_log_p, -n.id))
    tips, level = [head.id], 0
    while level < proactive:
      open_tips = tuple(spec.anchor(n) for n in tips if can_grow(spec, n))
      if open_tips:
        return Grow(open_tips, nodes, 1)
      tips = [child for n in tips for child in spec.below.get(n, ())]
      level += 1
    return None

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    del time_s
    if spec.drafting:
      return None
    if spec.in_flight:
      return go_on(spec) if proactive else None
    if spec.drafted_root != spec.root and spec.max_new_nodes:
      have = _height(spec, spec.root)
      more = levels(pipe) - (have if included else 0)
      tips = [
        spec.anchor(n)
        for n in spec.nodes
        if n not in spec.below and can_grow(spec, n)
      ]
      if more > 0 and tips:
        return Grow(tuple(tips), nodes, more)
    return Send(tuple(spec.launchable(min(nodes, spec.max_new_nodes))))

  return Policy(name="rate_matched", decide=decide, max_in_flight=1)


def _height(spec: Speculation, root: int) -> int:
  """Returns the levels below a node along likeliest children."""
  height, at = 0, best_child(spec, root)
  while at is not None:
    height, at = height + 1, best_child(spec, at)
  return height
