# SPDX-License-Identifier: Apache-2.0
"""Walks over a speculation that several policies need."""

import math

from wanspec_jax.schedules._speculation import Node, Speculation


def best_child(spec: Speculation, node_id: int) -> int | None:
  """Returns the likeliest child, the oldest on a tie; None for a leaf."""
  below = spec.below.get(node_id)
  if not below:
    return None
  return max(below, key=lambda child: (spec.nodes[child].log_p, -child))


def best_path(spec: Speculation, node_id: int) -> list[int]:
  """Returns the nodes below `node_id` along likeliest children."""
  path = []
  at = best_child(spec, node_id)
  while at is not None:
    path.append(at)
    at = best_child(spec, at)
  return path


def launchable_now(spec: Speculation) -> list[Node]:
  """Returns unlaunched nodes whose parent is launched, in creation order."""
  return [
    node
    for node in spec.unlaunched()
    if spec.nodes[node.parent].run is not None
  ]


def stated(node: Node) -> float:
  """Returns the probability that the drafter stated for a node."""
  return math.exp(node.log_q)


def can_grow(spec: Speculation, node_id: int) -> bool:
  """Whether the drafter may still be asked for something below a node."""
  node = spec.nodes[node_id]
  return node.grown is None and spec.depth(node_id) < spec.remaining - 1
