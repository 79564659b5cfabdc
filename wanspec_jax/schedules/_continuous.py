# SPDX-License-Identifier: Apache-2.0
"""Continuous: the drafter never waits for a verdict.

The asynchronous speculation of PipeInfer (https://arxiv.org/abs/2407.11798),
with AMUSD (https://arxiv.org/abs/2410.17375: `nodes` 1, `most` 16,
`max_in_flight` 1: the verifier takes whatever is there when it is free) and
PicoSpec's micro-steps (https://arxiv.org/abs/2603.19133: `nodes` 4, truncated
where drafting lags) as settings of it.
"""

from wanspec_jax.schedules._paths import best_path, can_grow, stated
from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Policy, Send


def continuous(
  *,
  nodes: int = 4,
  most: int | None = None,
  width: int = 1,
  max_in_flight: int = 8,
  threshold: float = 0.0,
  recovery: float = 0.0,
  decay: float = 0.0,
  truncate: bool = True,
) -> Policy:
  """Returns the policy.

  A micro-batch of `nodes` tokens is drafted below the likeliest leaf and sent
  as a run of its own; then the next one, whatever the verdicts are. A new root
  that is not under way is sent at once, with what was drafted below it, if
  anything was: the text always progresses.

  Drafting stops where the drafter is less sure of its token than

    threshold + i · recovery − r · decay

  with `i` the speculative runs since the root was launched and `r` the misses
  in a row: PipeInfer's reactive speculation (its README runs 0.001, 0.4, 0.01;
  its code defaults to 0.5, 0, 0).

  Args:
    nodes: depth of a micro-batch; PicoSpec's best is 4, PipeInfer's 3 to 4.
    most: drafted tokens that a run may carry when more are there than `nodes`,
      because no run could be launched; by default no more. One token beyond is
      drafted meanwhile: the next root.
    width: children drafted of each token; the likeliest leads on.
    max_in_flight: runs in flight.
    threshold: see above.
    recovery: see above.
    decay: see above.
    truncate: send what is there when the oldest verdict would come before the
      micro-batch is complete.
  """
  for field, value in (
    ("nodes", nodes),
    ("width", width),
    ("max_in_flight", max_in_flight),
  ):
    if value < 1:
      raise ValueError(f"{field} = {value}: must be >= 1")
  if most is not None and most < nodes:
    raise ValueError(f"most = {most}: must be >= nodes = {nodes}")
  cap, stock = (nodes, nodes) if most is None else (most, most + 1)

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    path = best_path(spec, spec.root)
    tip = path[-1] if path else spec.root
    waiting = [n for n in path if spec.nodes[n].run is None]
    bar = threshold + (spec.launches - 1) * recovery - spec.misses * decay
    unsure = [i for i, n in enumerate(waiting) if stated(spec.nodes[n]) < bar]
    is_unsure = bool(unsure)
    batch = waiting[: unsure[0]] if unsure else waiting
    batch = batch[: min(cap, spec.max_new_nodes)]
    if not spec.root_launched:  # with what happens to hang below it
      return Send(_with_siblings(spec, batch))
    has_room = spec.in_flight < max_in_flight
    ends = is_unsure or not (spec.drafting or can_grow(spec, tip))
    lags = (
      truncate
      and bool(spec.flights)
      and spec.flights[0].return_s <= time_s + pipe.costs.draft.per_level_s
    )
    if has_room and batch and (len(batch) >= nodes or ends or lags):
      return Send(_with_siblings(spec, batch))
    if (
      not spec.drafting
      and not is_unsure
      and len(waiting) < stock
      and can_grow(spec, tip)
    ):
      return Grow((spec.anchor(tip),), width, 1)
    return None

  def _with_siblings(spec: Speculation, batch: list[int]) -> tuple[int, ...]:
    """Adds the siblings of a batch's nodes, as far as slots allow."""
    ids: list[int] = []
    spare = spec.max_new_nodes - len(batch)
    for node in batch:
      ids.append(node)
      for other in spec.below[spec.nodes[node].parent]:
        if other != node and spec.nodes[other].run is None and spare > 0:
          ids.append(other)
          spare -= 1
    return tuple(ids)

  return Policy(
    name="continuous", decide=decide, max_in_flight=max_in_flight + 1
  )
