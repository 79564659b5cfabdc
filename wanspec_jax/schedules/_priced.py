# SPDX-License-Identifier: Apache-2.0
"""Priced: launch what saves more time than it costs on links and stages now.

Time has a price, ρ tokens per second: what the text makes of it at present.
Let A(v) be when the tail has the logits of node v, and P(v) the calibrated
probability that the text passes v. If the launched nodes are S, the text gains

  Σ_{v ∈ S} P(v) tokens   in   A(root) + Σ_{v ∈ S} P(v) (A(v) − A(parent of v))

seconds, so a node launched in some run is worth

  P(v) (1 − ρ (A(v) − A(parent of v))):

the step of Dinkelbach's method for the best ratio of tokens to time. A run has
to pay, besides, for what it delays: the rows that it shares hops with (its own
lap grows with its rows), and the next canonical run, which queues behind it
should a verdict that kills it come while the busiest link or stage is still at
it. Both follow from the ring's costs and the verdicts that are due.

So whenever the pipe could take a run without queueing, the policy lays out the
unlaunched nodes, likeliest first, in consecutive runs of one size, for several
sizes, and launches the first run of the best plan, if it gains anything. Trees
in lockstep, one level per stage time, score-ordered segments and hedges are all
such plans, for other rings and drafters.
"""

import dataclasses
import math
from typing import NamedTuple

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Hold, Policy, Send


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pricing:
  """Bounds of the search; the defaults suit rings from a LAN to a satellite.

  Attributes:
    pool: drafted nodes kept ready, unlaunched.
    min_probability: nodes less likely than this are neither grown nor sent.
    draft_width: nodes that one forward pass of a costly drafter extends.
    slack: share of a run's occupancy that it may queue.
  """

  pool: int = 64
  min_probability: float = 0.01
  draft_width: int = 8
  slack: float = 0.05


def priced(pricing: Pricing | None = None) -> Policy:
  """Returns the policy; needs calibrated nodes and the ring's costs only."""
  limits = pricing or Pricing()

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    if not spec.drafting:
      grow = _growth(spec, pipe, limits)
      if grow is not None:
        return grow
    elif not spec.root_launched and _better_waits(spec, pipe, time_s):
      return None  # the answer is under way, and the root waits for it
    if spec.root_launched:
      wait_s = pipe.wait_s(1, time_s)
      if wait_s > limits.slack * pipe.costs.occupancy_s(1):
        return Hold(time_s + wait_s)
    ids = _best_run(spec, pipe, time_s, limits)
    if ids is None:
      return None
    return Send(ids)

  return Policy(name="priced", decide=decide, max_in_flight=4096)


def _price(spec: Speculation, pipe: Pipe, time_s: float) -> float:
  """Returns ρ, tokens per second: of late, but no less than plain decoding."""
  plain = 1 / pipe.costs.lap_s(1)
  if len(spec.recent) < 4:
    return 1.5 * plain
  (begin_s, before), (_, now) = spec.recent[0], spec.recent[-1]
  return max(plain, (now - before) / max(time_s - begin_s, 1e-9))


def _growth(spec: Speculation, pipe: Pipe, limits: Pricing) -> Grow | None:
  """Returns what to ask the drafter for, if more nodes could be of use."""
  if spec.remaining <= 1:
    return None
  low = spec.nodes[spec.root].position
  floor = math.log(limits.min_probability) + spec.nodes[spec.root].path_log_p
  ready = 0
  open_ends = []
  for node in spec.nodes.values():
    if node.path_log_p < floor:
      continue
    if node.run is None and node.id != spec.root:
      ready += 1
    if (
      node.grown is None
      and node.position - low < spec.remaining - 1
      and not spec.below.get(node.id)
    ):
      open_ends.append((-node.path_log_p, node.id))
  if not open_ends or ready >= limits.pool:
    return None
  costs = pipe.costs.draft
  anchors = [node for _, node in sorted(open_ends)[: limits.draft_width]]
  budget = min(limits.pool, pipe.costs.max_rows)
  levels = None
  if costs.per_level_s:
    levels, budget = 1, 4 * len(anchors)
  return Grow(tuple(spec.anchor(a) for a in anchors), budget, levels)


def _better_waits(spec: Speculation, pipe: Pipe, time_s: float) -> bool:
  """Whether a root gains by waiting for the answer that is being drafted.

  Launched at once, it leaves the next level to the run behind, which lags by
  the occupancy of this one, if the text gets there: with the rate of hits to
  the power of the level. Held back, all come together, an answer later.
  """
  del time_s
  draft = pipe.costs.draft
  have = max(spec.depth(node) for node in spec.nodes)
  # A drafter that does not pay by level answers with all of them at once.
  answer_s = draft.seconds(1, 1 if draft.per_level_s else 8)
  # One level more: held back, everything comes an answer later; launched
  # without it, that level lags by the spacing of two runs.
  spacing_s = pipe.costs.occupancy_s(1)
  return pipe.hit_rate ** (have + 1) * spacing_s >= answer_s


def _sizes(most: int) -> list[int]:
  sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
  return [n for n in sizes if n < most] + [most] * (most > 0)


class _Candidate(NamedTuple):
  """An unlaunched node.

  Attributes:
    chance: probability that the text passes it.
    above: index of its parent among the candidates; -1 for a parent that
      travels along as the root, -2 for one that is launched.
    arrived_s: when the tail has that launched parent.
  """

  chance: float
  above: int
  arrived_s: float


def _candidates(
  spec: Speculation, ids: list[int], time_s: float
) -> list[_Candidate]:
  root = spec.nodes[spec.root]
  tails = {flight.run: flight.tail_s for flight in spec.flights}
  index = {node: i for i, node in enumerate(ids)}
  candidates = []
  for node_id in ids:
    node = spec.nodes[node_id]
    chance = math.exp(node.path_log_p - root.path_log_p)
    parent = spec.nodes[node.parent]
    if parent.run is not None:
      candidates.append(_Candidate(chance, -2, tails.get(parent.run, time_s)))
    else:
      candidates.append(_Candidate(chance, index.get(node.parent, -1), 0.0))
  return candidates


def _best_run(
  spec: Speculation, pipe: Pipe, time_s: float, limits: Pricing
) -> tuple[int, ...] | None:
  """Returns the first run of the best plan; None if no launch gains.

  With the root unlaunched there is always a run, be it of the root alone.
  """
  root = spec.nodes[spec.root]
  floor = math.log(limits.min_probability) + root.path_log_p
  ids = [
    node
    for node in spec.launchable(limits.pool)
    if spec.nodes[node].path_log_p >= floor
  ]
  candidates = _candidates(spec, ids, time_s)
  price = _price(spec, pipe, time_s)
  misses = _misses(spec)
  best_gain, best_size = 0.0, 0
  for size in _sizes(min(len(ids), spec.max_new_nodes)):
    gain = _gain_of_plan(candidates, size, spec, pipe, time_s, price, misses)
    if gain > best_gain:
      best_gain, best_size = gain, size
  if best_size or not spec.root_launched:
    return tuple(ids[:best_size])
  return None


def _gain_of_plan(
  candidates: list[_Candidate],
  size: int,
  spec: Speculation,
  pipe: Pipe,
  time_s: float,
  price: float,
  misses: list[tuple[float, float]],
) -> float:
  """Returns the tokens that runs of `size` candidates gain, the first launched
  now and each of the others once the busiest link or stage is free."""
  with_root = not spec.root_launched
  rows = size + with_root
  first_s = pipe.tail_s(rows, time_s)
  space_s = pipe.costs.occupancy_s(size)
  gain = 0.0
  if with_root:  # the root waits for the rows that travel with it
    gain -= price * (first_s - pipe.tail_s(1, time_s))
  else:
    busy_s = time_s + pipe.costs.occupancy_s(rows)
    for due_s, miss in misses:
      gain -= price * miss * max(0.0, busy_s - due_s)
  best = -math.inf
  for i, (chance, above, arrived_s) in enumerate(candidates):
    if i and not i % size:  # the runs from here on may stay away
      best = max(best, gain)
    run = i // size
    if above == -2:
      lag_s = first_s + run * space_s - arrived_s
    else:
      lag_s = (run - max(above, 0) // size) * space_s
    gain += chance * (1 - price * lag_s)
  return max(best, gain)


def _misses(spec: Speculation) -> list[tuple[float, float]]:
  """Returns, per run in flight, when it is due and the probability that the
  text leaves the launched tree there."""
  root = spec.nodes[spec.root]
  dues = []
  for flight in spec.flights:
    miss = 0.0
    for node_id in flight.ids:
      node = spec.nodes.get(node_id)
      if node is None:
        continue
      stays = sum(
        math.exp(spec.nodes[c].log_p)
        for c in spec.below.get(node_id, ())
        if spec.nodes[c].run is not None
      )
      miss += math.exp(node.path_log_p - root.path_log_p) * max(0.0, 1 - stays)
    dues.append((flight.return_s, miss))
  return dues
