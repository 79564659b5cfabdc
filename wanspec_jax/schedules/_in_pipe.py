# SPDX-License-Identifier: Apache-2.0
"""In-pipe growth: one level of the tree per stage time.

PipeDec, later SpecPipe (https://arxiv.org/abs/2504.04104): the stages hold
consecutive levels of one tree, the oldest of which is verified as the newest is
drafted; a verdict keeps what lies below the token drawn.
"""

import bisect
import itertools
import math

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._pipe_forms import lap_window, levels_in_flight
from wanspec_jax.schedules._speculation import Node, Speculation
from wanspec_jax.schedules._state import Answer, Grow, Hold, Policy, Send

_MOST_LEVELS = 512


def in_pipe(
  *,
  width: int = 16,
  children: int | None = None,
  in_flight: int | None = None,
  fill: bool = False,
) -> Policy:
  """Returns the policy.

  The `width` likeliest nodes of a level, by the probability of their paths, are
  one run, which follows that of the level above by a tick: the time for which
  it keeps the busiest link or stage busy. So many more levels than stages may
  be under way on a WAN. The next level is drafted meanwhile, below what was
  launched, without waiting for the target's states. A miss sends the new root
  alone, at once, and the pipe fills anew.

  Args:
    width: nodes per level; 16 in FlowSpec's baseline of PipeDec
      (https://arxiv.org/abs/2507.02620). 1 is a chain in frames of one
      position.
    children: nodes drafted per node of the level above; `width` by default, as
      there.
    in_flight: levels under way, at most, the root's among them. None for the
      closed form's choice, `levels_in_flight`, at the chances of the tree as it
      is: where acceptance falls with every level ahead, a full pipe is not
      best.
    fill: forced filling, for studies: a level leaves as soon as it is drafted,
      though it has to queue, until `in_flight` levels, or as many as a lap has
      ticks, are under way.
  """
  for field, value in (
    ("width", width),
    ("children", children),
    ("in_flight", in_flight),
  ):
    if value is not None and value < 1:
      raise ValueError(f"{field} = {value}: must be >= 1")
  below = width if children is None else children

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    if not spec.root_launched:
      return Send(())
    level, newest = _next_level(spec)
    if not level:
      anchors = [n for n in _best(newest, width) if _can_grow(spec, n)]
      if spec.drafting or not anchors:
        return None
      ids = tuple(spec.anchor(n.id) for n in anchors)
      return Grow(ids, below * len(ids), 1)
    # The root's level, and one per level below it.
    under_way = spec.depth(level[0].id)
    most = in_flight or _window(spec, pipe, width, fill)
    count = min(width, spec.max_new_nodes)
    if under_way >= most or not count:
      return None
    ids = tuple(n.id for n in _best(level, count))
    if not fill:
      tick_s = pipe.costs.occupancy_s(len(ids))
      wait_s = max(
        pipe.wait_s(len(ids), time_s), _due_s(spec, pipe, time_s, tick_s)
      )
      if wait_s > 1e-3 * tick_s:
        return Hold(time_s + wait_s)
    return Send(ids)

  return Policy(name="in_pipe", decide=decide, max_in_flight=4096)


def _due_s(
  spec: Speculation, pipe: Pipe, time_s: float, tick_s: float
) -> float:
  """Returns how long to wait for a verdict that is about to come; else 0.

  In δ it may say that the level is in vain, and the new root would have to wait
  for the rest of the tick, τ − δ. At a rate of hits a that is worth it where

    (1 − a) (τ − δ) > a δ
  """
  first = spec.flights[0] if spec.flights else None
  if first is None or first.run != spec.nodes[spec.root].run:
    return 0.0
  due_s = first.return_s - time_s
  if due_s < -1e-3 * tick_s or due_s >= (1 - pipe.hit_rate) * tick_s:
    return 0.0
  return due_s + 2e-3 * tick_s  # behind the verdict, if it keeps its time


def _next_level(spec: Speculation) -> tuple[list[Node], list[Node]]:
  """Returns the unlaunched nodes right below the deepest launched ones, and
  those."""
  launched = [n for n in spec.nodes.values() if n.run is not None]
  deepest = max(n.position for n in launched)
  newest = [n for n in launched if n.position == deepest]
  level = [
    spec.nodes[child] for n in newest for child in spec.below.get(n.id, ())
  ]
  reach = spec.nodes[spec.root].position + spec.remaining
  return [n for n in level if n.position < reach], newest


def _best(nodes: list[Node], count: int) -> list[Node]:
  return sorted(nodes, key=lambda n: (-n.path_log_p, n.id))[:count]


def _can_grow(spec: Speculation, node: Node) -> bool:
  return node.grown is None and spec.depth(node.id) < spec.remaining - 1


def _window(spec: Speculation, pipe: Pipe, width: int, fill: bool) -> int:
  """Returns how many levels should be under way."""
  costs = pipe.costs
  lap_s, tick_s = costs.lap_s(width), costs.occupancy_s(width)
  if lap_s <= 0:
    return 1
  if fill:
    return lap_window(lap_s, max(tick_s, lap_s / _MOST_LEVELS))
  # Probability that the text passes each level of the tree, and how far ahead
  # of the last token then known that level was drafted.
  root = spec.nodes[spec.root]
  chances: dict[int, list[float]] = {}
  ahead_of: dict[int, int] = {}
  for node in spec.nodes.values():
    depth = node.position - root.position
    chance = math.exp(min(node.path_log_p - root.path_log_p, 0.0))
    chances.setdefault(depth, []).append(chance)
    ahead_of[depth] = node.level
  passed = 1.0
  hits: dict[int, float] = {}
  for depth in range(1, len(chances)):
    mass = sum(sorted(chances[depth], reverse=True)[:width])
    if passed < 1e-12:
      break
    hits[ahead_of[depth]] = min(1.0, mass / passed)
    passed = min(mass, passed)
  # No level is worse than one that was drafted further ahead: what looks like
  # it has not been tested often.
  known = sorted(hits)
  for near, far in reversed(list(itertools.pairwise(known))):
    hits[near] = max(hits[near], hits[far])

  def hit_at(ahead: int) -> float:
    """The share that a level keeps of what reached the one above."""
    if not known:
      return pipe.hit_rate
    return hits[known[min(bisect.bisect_left(known, ahead), len(known) - 1)]]

  return levels_in_flight(hit_at, lap_s=lap_s, tick_s=tick_s)
