# SPDX-License-Identifier: Apache-2.0
"""Policies as published systems have them, where the library's own differ.

`continuous` sends a new root by itself and micro-batches of one size; here a
run takes whatever is there, which on a target that is not cut is what counts.
"""

from wanspec_jax import schedules as sch


def micro_steps(
  batch: int, *, in_flight: int, ahead: int, most: int | None = None
) -> sch.Policy:
  """Returns a policy that drafts a chain, token by token, without ever waiting.

  Args:
    batch: drafted tokens that make a run; the root goes with what is there.
    in_flight: 1 for a verifier that takes all that is there whenever it is free
      (AMUSD, https://arxiv.org/abs/2410.17375; PipeSpec,
      https://arxiv.org/abs/2505.01572), more for a pipe (PipeInfer,
      https://arxiv.org/abs/2407.11798) or for replicas (DSI,
      https://arxiv.org/abs/2405.14105).
    ahead: depth below the root at which the drafter stops.
    most: drafted tokens that a run may carry; the root then goes by itself.
      With 1 and as many runs as there are stages this is `in_pipe` of width 1.
  """

  def decide(
    spec: sch.Speculation, pipe: sch.Pipe, time_s: float
  ) -> sch.Grow | sch.Send | None:
    del pipe, time_s
    tip = spec.root
    while spec.below.get(tip):
      tip = spec.below[tip][-1]
    if spec.in_flight < in_flight:
      free = min(
        spec.max_new_nodes, spec.max_new_nodes if most is None else most
      )
      # The root goes by itself where levels do.
      free -= most is not None and not spec.root_launched
      ids = tuple(node.id for node in spec.unlaunched()[:free])
      if len(ids) >= batch or not spec.root_launched:
        return sch.Send(ids)
    if not spec.drafting and spec.depth(tip) < min(ahead, spec.remaining - 1):
      return sch.Grow((spec.anchor(tip),), 1, 1)
    return None

  return sch.Policy(name="micro_steps", decide=decide, max_in_flight=in_flight)


def outcome_hedges(length: int) -> sch.Policy:
  """Returns lockstep whose drafter meanwhile drafts for other outcomes.

  Saguaro (https://arxiv.org/abs/2603.03251): while a chain is verified, the
  children of each of its nodes are drafted (one pass) and below each of these a
  chain of its own (all in parallel). A verdict that lands on one of them finds
  the next chain ready; any other has to wait for one.

  Args:
    length: tokens of a chain.
  """

  def decide(
    spec: sch.Speculation, pipe: sch.Pipe, time_s: float
  ) -> sch.Grow | sch.Send | None:
    del pipe, time_s
    if spec.drafting:
      return None
    if not spec.in_flight:
      chain, at = [], spec.root
      while len(chain) < length and spec.below.get(at):
        at = max(spec.below[at], key=lambda i: spec.nodes[i].log_q)
        chain.append(at)
      if not chain and spec.drafted_root != spec.root and spec.remaining > 1:
        return sch.Grow((spec.anchor(spec.root),), length, length)
      return sch.Send(tuple(chain))
    sent = [n for n in spec.nodes.values() if n.run is not None]
    tip = max(sent, key=lambda n: n.position)
    if not spec.below.get(tip.id) and tip.grown is None:
      anchors = tuple(spec.anchor(n.id) for n in sent)
      return sch.Grow(anchors, 8 * len(sent), 1)
    hedges = [n for n in spec.unlaunched() if n.grown is None]
    if hedges and all(spec.nodes[n.parent].run is not None for n in hedges):
      anchors = tuple(spec.anchor(n.id) for n in hedges)
      return sch.Grow(anchors, length * len(hedges), length)
    return None

  return sch.Policy(name="outcome_hedges", decide=decide, max_in_flight=1)


def edge_chain(depth: int, *, extra: int) -> sch.Policy:
  """Returns lockstep whose drafter goes on below its leaf meanwhile.

  SpecEdge's proactive drafting with one expansion head: if the whole chain was
  accepted and the target's own token is what was drafted next, the draft starts
  with what is there and only the rest is drafted.

  Args:
    depth: levels of a draft.
    extra: levels drafted ahead while a chain is verified.
  """

  def decide(
    spec: sch.Speculation, pipe: sch.Pipe, time_s: float
  ) -> sch.Grow | sch.Send | None:
    del pipe, time_s
    if spec.drafting:
      return None
    tip = spec.root
    while spec.below.get(tip):
      tip = spec.below[tip][-1]
    ahead = spec.unlaunched()
    if spec.in_flight:
      if ahead or spec.remaining <= 1:
        return None
      return sch.Grow((spec.anchor(tip),), extra, extra)
    if len(ahead) <= extra and spec.nodes[tip].grown is None:
      return sch.Grow((spec.anchor(tip),), depth, depth)
    return sch.Send(tuple(n.id for n in ahead))

  return sch.Policy(name="edge_chain", decide=decide, max_in_flight=1)
