# SPDX-License-Identifier: Apache-2.0
"""Lockstep: launch one sized tree, wait for its verdict, repeat.

The synchronous tree speculation of SpecInfer (https://arxiv.org/abs/2305.09781)
and Sequoia (https://arxiv.org/abs/2402.12374), with the tree's size chosen
anew each lap from the drafter's own probabilities and the ring's lap time.
"""

from collections.abc import Callable

import numpy as np

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Policy, Send

Size = Callable[[np.ndarray, Callable[[int], float]], int]


def lockstep(
  size: Size | int,
  *,
  max_nodes: int | None = None,
  levels: int | None = None,
) -> Policy:
  """Returns the policy; `lockstep(0)` is plain decoding.

  Args:
    size: `(gains [m], lap_s) -> n`: how many of the candidates to launch, where
      `gains[i]` is the estimated probability that candidate `i` and its path
      are accepted, best first, and `lap_s(rows)` the time of a lap; e.g.
      the `num_nodes` of `trees.best_prefix` for the best tokens per second. A
      number stands for the likeliest so many.
    max_nodes: drafted nodes per lap, at most; by default `size`, if that is a
      number.
    levels: depth of the drafts, at most: each level costs a drafter that runs a
      model a forward pass; None for no limit.

  Raises:
    ValueError: a number below 0, or `size` is a function and `max_nodes` is
      missing.
  """
  if isinstance(size, int):
    if size < 0:
      raise ValueError(f"size = {size}: must be >= 0")
    return _lockstep(
      lambda gains, lap_s: size,
      size if max_nodes is None else max_nodes,
      levels,
    )
  if max_nodes is None:
    raise ValueError("max_nodes = None: must be a number if size is a function")
  return _lockstep(size, max_nodes, levels)


def _lockstep(size: Size, max_nodes: int, levels: int | None) -> Policy:
  if max_nodes < 0:
    raise ValueError(f"max_nodes = {max_nodes}: must be >= 0")

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    del time_s  # one run in flight: nothing to time
    if spec.in_flight or spec.drafting:
      return None
    budget = min(max_nodes, spec.max_new_nodes)
    if budget and spec.remaining > 1 and spec.drafted_root != spec.root:
      return Grow((spec.anchor(spec.root),), budget, levels)
    ids = spec.launchable(budget)
    gains = np.asarray([spec.probability(i) for i in ids], np.float64)
    count = size(gains, pipe.costs.lap_s) if len(gains) else 0
    return Send(ids=tuple(ids[:count]))

  return Policy(
    name="lockstep", decide=decide, max_in_flight=1, keeps_children=True
  )
