# SPDX-License-Identifier: Apache-2.0
"""Hedged: what to send next is drafted for every likely verdict.

Saguaro, speculative speculative decoding (https://arxiv.org/abs/2603.03251). A
chain of K tokens x₁ … x_K below the root x₀ is in flight. Its outcome is (k,
t): k tokens accepted, then the target's own token t. An outcome is a node, the
child of x_k that bears t, so guessing outcomes is growing siblings, and keeping
the next chain for one is growing below it.
"""

from collections.abc import Sequence

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Node, Speculation
from wanspec_jax.schedules._state import Answer, Grow, Hold, Policy, Send


def hedged(
  *,
  depth: int = 7,
  fan_out: int | Sequence[int] = 3,
  redraft: bool = True,
  launch_hedges: int = 0,
) -> Policy:
  """Returns the policy.

  While a chain is verified, the drafter extends the guesses at all its
  outcomes, one level per answer and all of them in parallel, so it never goes
  on for long with what a verdict has ruled out. A verdict that hits one of them
  launches the new root with whatever is there of its chain, at once.

  Args:
    depth: K, drafted tokens per run; the paper's code takes 7 (6 in lockstep).
    fan_out: guesses at the token behind k accepted ones: F_k for k = 0 … K, or
      one number for all, as the paper's code has it (3). The best ones are
      `geometric_fan_out` and, on measured ranks, `measured_fan_out`. The
      drafted token itself is not guessed again for k < K. If the chain in
      flight is shorter, or partly committed, the last entries count.
    redraft: on a miss, draft a new chain before the root is launched, which
      costs K levels of drafting (the paper's choice for small batches). False
      launches the root alone, at once; its chain follows as a run of its own.
    launch_hedges: nodes per run of guesses and their chains that are launched
      before the verdict, likeliest first, as the pipe takes them; 0 for none.
  """
  if depth < 1:
    raise ValueError(f"depth = {depth}: must be >= 1")
  guesses = (
    (fan_out,) * (depth + 1) if isinstance(fan_out, int) else tuple(fan_out)
  )
  if len(guesses) != depth + 1 or min(guesses) < 0:
    raise ValueError(
      f"fan_out = {fan_out}: must be non-negative, one or depth + 1 numbers"
    )
  if launch_hedges < 0:
    raise ValueError(f"launch_hedges = {launch_hedges}: must be >= 0")
  children = max(guesses) + 1  # the guesses, and the drafted token

  def grow(spec: Speculation, tips: list[Node]) -> Grow | None:
    anchors = tuple(spec.anchor(n.id) for n in tips if _can_grow(spec, n))
    if spec.drafting or not anchors:
      return None
    return Grow(anchors, children * len(anchors), 1)

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    root = spec.nodes[spec.root]
    chain = _chain(spec, root, depth, launched=True)
    if (not chain and spec.launches <= 1) or not spec.root_launched:
      # No chain of this root is under way yet.
      chain = _chain(spec, root, depth)
      if spec.root_launched or redraft:
        # On a hit something is there; on a miss all of it has to be drafted.
        is_hit = bool(chain) and spec.drafted_root != spec.root
        if not is_hit and len(chain) < depth:
          more = grow(spec, [chain[-1] if chain else root])
          if more is not None or spec.drafting:
            return more
      ids = tuple(n.id for n in chain[: spec.max_new_nodes])
      return Send(ids) if ids or not spec.root_launched else None
    hedges = _hedges(spec, [root, *chain], guesses)
    chains = [[h, *_chain(spec, h, depth)] for h in hedges]
    more = grow(
      spec,
      [chain[-1] if chain else root]
      + [c[-1] for c in chains if len(c) <= depth],
    )
    if more is not None:
      return more
    ready = sorted(
      (-n.path_log_p, n.id) for c in chains for n in c if n.run is None
    )[: min(launch_hedges, spec.max_new_nodes)]
    if not ready:
      return None
    wait_s = pipe.wait_s(len(ready), time_s)
    if wait_s > 1e-3 * pipe.costs.occupancy_s(len(ready)):
      return Hold(time_s + wait_s)
    return Send(tuple(node for _, node in ready))

  return Policy(
    name="hedged",
    decide=decide,
    # A root by itself, its chain, and a chain that a verdict has killed.
    max_in_flight=4096 if launch_hedges else 3,
  )


def _can_grow(spec: Speculation, node: Node) -> bool:
  return node.grown is None and spec.depth(node.id) < spec.remaining - 1


def _children(spec: Speculation, node: Node) -> list[Node]:
  """Returns a node's children, likeliest first."""
  below = [spec.nodes[child] for child in spec.below.get(node.id, ())]
  return sorted(below, key=lambda n: (-n.log_p, n.id))


def _chain(
  spec: Speculation, node: Node, most: int, *, launched: bool = False
) -> list[Node]:
  """Returns up to `most` nodes below along likeliest children; those that are
  launched, if asked for."""
  chain: list[Node] = []
  while len(chain) < most:
    below = [
      n for n in _children(spec, node) if n.run is not None or not launched
    ]
    if not below:
      break
    node = below[0]
    chain.append(node)
  return chain


def _hedges(
  spec: Speculation, chain: list[Node], guesses: tuple[int, ...]
) -> list[Node]:
  """Returns the guessed outcomes of a chain, its root included."""
  hedges = []
  following = [n.id for n in chain[1:]] + [None]
  counts = guesses[-len(chain) :]
  for node, drafted, count in zip(chain, following, counts, strict=True):
    others = [n for n in _children(spec, node) if n.id != drafted]
    hedges += others[:count]
  return hedges
