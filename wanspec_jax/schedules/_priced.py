# SPDX-License-Identifier: Apache-2.0
"""Priced: launch what saves more time than it costs on links and stages now.

A node that is not launched now can still be launched when the verdict on its
nearest launched ancestor b comes back, and the tail has its logits at

  A0(v) = A(b) + return + lap

with A(b) the time at which the tail has those of b, and later by what each
node between b and v takes of the busiest link or stage. Launched now it is
there at A(v). If the text leaves the drafted tree behind v, the next token of
the text is known A0(v) − A(v) sooner, and with it everything after; if the text
goes on to a child, it is that child's time which counts. So with P(v) the
calibrated probability that the text passes v, a set S of launches saves

  Σ_{v ∈ S} P(v) (1 − Σ_c p(c | v)) (A0(v) − A(v))

seconds, the sum over the drafted children of v. Against this stands what a run
delays: the nodes that travel with it, since A grows with the rows of a run, and
the next canonical run, which cannot overtake it, should a verdict come which
kills it; a verdict about to come may be worth waiting for (`_better_later`).
Both follow from the ring's costs and the verdicts that are due, so seconds are
weighed against seconds, and no price of time is needed.

So whenever the pipe could take a run without queueing, the policy lays out the
unlaunched nodes, likeliest first, in consecutive runs of one size, for several
sizes, and launches the first run of the best plan, if it gains anything. Trees
in lockstep, one level per stage time, score-ordered segments and hedges are all
such plans, for other rings and drafters.
"""

import dataclasses
import heapq
import math
from typing import NamedTuple

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Flight, Node, Speculation
from wanspec_jax.schedules._state import Answer, Grow, Hold, Policy, Send


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pricing:
  """Bounds of the search; the defaults suit rings from a LAN to a satellite.

  Attributes:
    pool: unlaunched nodes that a plan considers, and a draft's budget.
    ahead: unlaunched nodes that are kept ready; of a costly drafter only if
      they are likelier than what any leaf could grow.
    min_probability: nodes less likely than this are neither grown nor sent.
    draft_width: nodes that one forward pass of a costly drafter extends.
    slack: share of a run's occupancy that it may queue.
  """

  pool: int = 64
  ahead: int = 96
  min_probability: float = 1e-6
  draft_width: int = 16
  slack: float = 0.05


def priced(pricing: Pricing | None = None) -> Policy:
  """Returns the policy; needs calibrated nodes and the ring's costs only."""
  limits = pricing or Pricing()

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    if not spec.drafting:
      grow = _growth(spec, pipe, time_s, limits)
      if grow is not None:
        return grow
    elif not spec.root_launched and _better_waits(spec, pipe):
      return None  # the answer is under way, and the root waits for it
    if spec.root_launched and spec.flights:
      # A smaller run would only catch up with the one before.
      rows = len(spec.flights[-1].ids)
      wait_s = pipe.wait_s(rows, time_s)
      if wait_s > limits.slack * pipe.costs.occupancy_s(rows):
        return Hold(time_s + wait_s)
    ids = _best_run(spec, pipe, time_s, limits)
    return None if ids is None else Send(ids)

  return Policy(name="priced", decide=decide, max_in_flight=4096)


def _growth(
  spec: Speculation, pipe: Pipe, time_s: float, limits: Pricing
) -> Grow | None:
  """Returns what to ask the drafter for, if more nodes could be of use.

  Where drafts cost time a leaf grows if its children, at the rate of hits,
  would be among the `ahead` best of what is ready to be launched; elsewhere the
  best leaves grow whenever less than that is ready. There, what is still
  unlaunched is drafted afresh after each verdict as well: the further ahead of
  the committed text a token was drafted, the less it is worth.
  """
  if spec.remaining <= 1:
    return None
  is_costly = pipe.costs.draft.per_level_s > 0
  is_stale = not is_costly and spec.drafted_root != spec.root
  ahead = limits.ahead
  if is_costly and spec.flights:
    # Just in time: two runs of what the pipe has been taking, or a forward
    # pass of the drafter.
    rows = len(spec.flights[-1].ids)
    ahead = min(ahead, max(limits.draft_width, 2 * rows))
  if not is_costly and not is_stale and len(spec.unlaunched()) >= ahead:
    return None
  nodes, below = spec.nodes, spec.below
  root = nodes[spec.root]
  base = root.path_log_p
  floor = math.log(limits.min_probability) + base
  deepest = root.position + spec.remaining - 1
  tails = {flight.run: flight.tail_s for flight in spec.flights}
  latest, waiting = _waiting(spec, pipe, time_s, tails)
  soonest_s = pipe.tail_s(1, time_s)
  lap_s = pipe.costs.lap_s(1)
  least = 0.0
  if is_costly and len(waiting) >= ahead:
    ready = sorted(
      (
        math.exp(node.path_log_p - base) * max(0.0, latest[node.id] - soonest_s)
        for node in waiting
        if node.path_log_p >= floor
      ),
      reverse=True,
    )
    if len(ready) >= ahead:
      least = ready[ahead - 1] / max(pipe.hit_rate, 0.05)
  leaves = []
  for node in nodes.values():
    if node.path_log_p < floor or node.position >= deepest:
      continue
    if is_stale:
      if node.run is None and node is not root:
        continue
    elif node.grown is not None:
      continue  # else it may lack children that an answer left out
    missing = 1.0
    for child in below.get(node.id, ()):
      if not is_stale or nodes[child].run is not None:
        missing -= math.exp(nodes[child].log_p)
    if missing <= 0.0:
      continue
    if node.run is not None:
      latest_s = tails.get(node.run, time_s) + lap_s
    else:
      latest_s = latest[node.id]
    chance = math.exp(node.path_log_p - base)
    score = chance * missing * (latest_s - soonest_s)
    if score >= least:
      leaves.append((-score, node.id))
  width = limits.draft_width if is_costly or is_stale else limits.pool
  anchors = [node for _, node in heapq.nsmallest(width, leaves)]
  if not anchors:
    return None
  if is_stale:
    budget, levels = min(limits.pool, pipe.costs.max_rows), None
  else:
    budget, levels = 4 * len(anchors), 1
  if is_costly:  # as many as cost no more than their level
    budget = min(limits.pool, pipe.costs.max_rows)
    if node_s := pipe.costs.draft.per_node_s:
      most = int(pipe.costs.draft.per_level_s / node_s)
      budget = min(budget, max(4 * len(anchors), most))
  return Grow(tuple(spec.anchor(a) for a in anchors), budget, levels)


def _better_waits(spec: Speculation, pipe: Pipe) -> bool:
  """Whether a root gains by waiting for the answer that is being drafted.

  Launched at once, it leaves the next level to the run behind, which lags by
  the occupancy of this one, if the text gets there: with the rate of hits to
  the power of the level. Held back, all come together, an answer later.
  """
  draft = pipe.costs.draft
  have = max(spec.depth(node) for node in spec.nodes)
  # A drafter that does not pay by level answers with all of them at once.
  answer_s = draft.seconds(1, 1 if draft.per_level_s else 8)
  # One level more: held back, everything comes an answer later and shares its
  # hops with another row; launched without it, that level lags by the spacing
  # of two runs.
  spacing_s = pipe.costs.occupancy_s(1)
  row_s = pipe.costs.tail_s(2) - pipe.costs.tail_s(1)
  return pipe.hit_rate ** (have + 1) * spacing_s >= answer_s + row_s


def _sizes(most: int) -> list[int]:
  sizes = [1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256]
  return [n for n in sizes if n < most] + [most] * (most > 0)


class _Candidate(NamedTuple):
  """An unlaunched node.

  Attributes:
    id: its id.
    last: probability that the text leaves the drafted tree behind it.
    latest_s: when the tail would have it if it waited for a verdict.
  """

  id: int
  last: float
  latest_s: float


def _covered(spec: Speculation, node_id: int) -> float:
  """Returns the probability that the next token is a drafted child."""
  below = spec.below.get(node_id, ())
  return min(sum(math.exp(spec.nodes[child].log_p) for child in below), 1.0)


def _leaves_at(spec: Speculation, pipe: Pipe, node_id: int) -> float:
  """Returns the probability that the text leaves the drafted tree there."""
  node = spec.nodes[node_id]
  covered = _covered(spec, node_id)
  if node.grown is None and node_id == spec.root:
    covered = max(covered, pipe.hit_rate)
  chance = math.exp(node.path_log_p - spec.nodes[spec.root].path_log_p)
  return chance * (1 - covered)


def _row_s(pipe: Pipe) -> float:
  """Returns what a row takes of the busiest link or stage in runs of the best
  size."""
  costs = pipe.costs
  return min(costs.occupancy_s(n) / n for n in _sizes(costs.max_rows))


def _waiting(
  spec: Speculation, pipe: Pipe, time_s: float, tails: dict[int, float]
) -> tuple[dict[int, float], list[Node]]:
  """Returns when the tail would have an unlaunched node (or the root, unless it
  is launched) if it waited for the verdict on its nearest launched ancestor,
  and the unlaunched nodes."""
  lap_s = pipe.costs.lap_s(1)
  row_s = _row_s(pipe)
  nodes = spec.nodes
  waiting = spec.unlaunched()
  latest: dict[int, float] = {}
  if not spec.root_launched:
    latest[spec.root] = pipe.tail_s(1, time_s) + lap_s
  for node in waiting:  # parents come first
    if node.parent in latest:
      latest[node.id] = latest[node.parent] + row_s  # its turn comes later
    else:
      run = nodes[node.parent].run
      latest[node.id] = tails.get(run or 0, time_s) + lap_s
  return latest, waiting


def _ranked(
  spec: Speculation, pipe: Pipe, time_s: float, limits: Pricing
) -> list[_Candidate]:
  """Returns what could be launched, by chance times what launching it saves.

  A child has no better chance than its parent, so it never comes before it.
  """
  root = spec.nodes[spec.root]
  floor = math.log(limits.min_probability) + root.path_log_p
  tails = {flight.run: flight.tail_s for flight in spec.flights}
  latest, waiting = _waiting(spec, pipe, time_s, tails)
  soonest_s = pipe.tail_s(1, time_s)
  scored = []
  for node in waiting:
    if node.path_log_p < floor:
      continue
    if node.position - root.position >= spec.remaining:
      continue
    chance = math.exp(node.path_log_p - root.path_log_p)
    saves_s = max(0.0, latest[node.id] - soonest_s)
    if saves_s > 0:
      scored.append((-chance, node.id, chance * saves_s))
  scored.sort()
  space_s = pipe.costs.occupancy_s(1)
  kept: set[int] = set()
  ranked = []
  for i, (_, node, worth) in enumerate(scored):
    parent = spec.nodes[node].parent
    is_reached = parent in kept or spec.nodes[parent].run is not None
    if not is_reached and parent != spec.root:
      continue  # its parent does not pay, so neither does it
    # Its turn makes all that follows later.
    after = -scored[i + 1][0] if i + 1 < len(scored) else 0.0
    if worth < after * space_s and i:
      continue
    kept.add(node)
    ranked.append(_Candidate(node, _leaves_at(spec, pipe, node), latest[node]))
    if len(ranked) == limits.pool:
      break
  return ranked


def _best_run(
  spec: Speculation, pipe: Pipe, time_s: float, limits: Pricing
) -> tuple[int, ...] | None:
  """Returns the first run of the best plan; None if no launch saves time.

  With the root unlaunched there is always a run, be it of the root alone.
  """
  candidates = _ranked(spec, pipe, time_s, limits)
  with_root = not spec.root_launched
  best_saving, best_size = 0.0, 0
  for size in _sizes(min(len(candidates), spec.max_new_nodes) + with_root):
    saving = _saving_of_plan(candidates, size, spec, pipe, time_s)
    if saving < best_saving / 2:
      break  # it has a maximum, and from there it falls
    # Of two that save about the same, the smaller run's verdict comes sooner.
    if saving > best_saving * 1.001 and (
      with_root or not _better_later(candidates[:size], spec, pipe, time_s)
    ):
      best_saving, best_size = saving, size
  if best_size or with_root:
    count = max(0, best_size - with_root)
    return tuple(candidate.id for candidate in candidates[:count])
  return None


def _saving_of_plan(
  candidates: list[_Candidate],
  size: int,
  spec: Speculation,
  pipe: Pipe,
  time_s: float,
) -> float:
  """Returns the seconds that runs of `size` rows save, the first launched now
  (the root among them if it is due) and each of the others once the busiest
  link or stage is free, as far as they save more than they hold up others."""
  with_root = not spec.root_launched
  tail_s = pipe.tail_s(size, time_s)
  space_s = pipe.costs.occupancy_s(size)
  saving = 0.0
  if with_root:  # the root waits for the rows that travel with it
    leaves = _leaves_at(spec, pipe, spec.root)
    saving -= leaves * (tail_s - pipe.tail_s(1, time_s))
  # Each run holds up the others under way, of all sequences. One that saves
  # nothing itself may lead to those that do, so what counts is the best end.
  burden_s = pipe.crowding_s * max(1, pipe.num_sequences)
  if not with_root:
    saving -= burden_s
  best, at = -math.inf, 0
  for i, (_, last, latest_s) in enumerate(candidates):
    run = (i + with_root) // size
    if run > at:
      best = max(best, saving)
      saving -= burden_s
      at = run
    sooner_s = latest_s - tail_s - run * space_s
    if sooner_s > 0:
      saving += last * sooner_s
  return max(best, saving)


def _better_later(
  run: list[_Candidate], spec: Speculation, pipe: Pipe, time_s: float
) -> bool:
  """Whether a run should wait for a verdict that is about to come.

  In δ it may say that the run is in vain, with probability m, and a new root
  would have to wait for what is left of its time on the busiest link or stage,
  τ − δ; else what is below the run, with probability P, comes δ later:

    m (τ − δ) > P δ

  summed over the verdicts due until then.
  """
  costs = pipe.costs
  clear_s = max(
    time_s + costs.occupancy_s(len(run)),
    pipe.tail_s(len(run), time_s) - costs.tail_s(1),
  )
  ids = {candidate.id for candidate in run}
  chance = sum(
    spec.probability(node) for node in ids if spec.nodes[node].parent not in ids
  )
  saved_s = 0.0
  for flight in spec.flights:
    if flight.return_s >= clear_s:
      break
    saved_s += _miss(spec, flight) * (clear_s - flight.return_s)
    if saved_s > chance * max(0.0, flight.return_s - time_s):
      return True
  return False


def _miss(spec: Speculation, flight: Flight) -> float:
  """Returns the probability that the text leaves the launched tree there."""
  miss = 0.0
  for node_id in flight.ids:
    if node_id in spec.nodes:
      stays = sum(
        math.exp(spec.nodes[child].log_p)
        for child in spec.below.get(node_id, ())
        if spec.nodes[child].run is not None
      )
      miss += spec.probability(node_id) * max(0.0, 1 - stays)
  return miss
