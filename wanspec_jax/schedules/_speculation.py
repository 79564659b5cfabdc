# SPDX-License-Identifier: Apache-2.0
"""The coordinator's one growing tree of a sequence."""

import collections
import dataclasses
import math
from collections.abc import Callable, Collection

from wanspec_jax.base import Anchor, Nodes

_RECENT = 24  # verdicts over which the pace of a text is taken

Estimate = Callable[[float, int], float]


@dataclasses.dataclass(slots=True)
class Node:
  """A drafted (or committed, not yet cached) token.

  Attributes:
    id: grows within the sequence.
    parent: parent's id.
    token: token id.
    log_q: log-probability given the parent, as the drafter put it.
    log_p: the same as the engine estimates it, from verdicts so far.
    level: levels below the last committed token when it was drafted, from 1.
    position: absolute position of the token.
    path_log_p: sum of `log_p` along the path from the sequence's first root.
    run: run that carries it; None until launched.
    grown: nodes that the drafter has been asked for below it; None if it has
      not been.
  """

  id: int
  parent: int
  token: int
  log_q: float
  log_p: float
  level: int
  position: int
  path_log_p: float
  run: int | None = None
  grown: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Flight:
  """A run on its way.

  Attributes:
    run: its id.
    ids: nodes that it carries, the root among them if it was sent along.
    launched_s: when it was launched.
    tail_s: when the model expects its last row's logits.
    return_s: when the model expects it back.
    others: runs of any sequence that were in flight at its launch.
  """

  run: int
  ids: tuple[int, ...]
  launched_s: float
  tail_s: float
  return_s: float
  others: int = 0


@dataclasses.dataclass(slots=True)
class Speculation:
  """What is known and in flight below the root of one sequence.

  The root is the last committed token. Every node in `nodes` is the root or
  below it: a commit removes the rest, so what is left is alive.

  Attributes:
    sequence: its number.
    tokens: committed tokens, prompt included; `tokens[-1]` is the root's.
    prompt_length: of these, how many are the prompt.
    root: node id of the root.
    next_id: id of the next new node.
    nodes: alive nodes by id, in creation order (a topological order).
    children: child id by (parent id, token).
    below: ids of the children of each alive node that has any.
    flights: runs of this sequence launched and not yet returned, in order.
    drafting: anchors of a `Draft` that is asked for and not answered.
    ticket: of the latest `Draft`.
    trail: (id, token) of nodes committed since that `Draft`.
    drafted_root: root that the last answered draft grew from; None if none.
    commit_due: the root moved since the last commit was sent.
    max_new_nodes: nodes that may be launched now beyond the root.
    remaining: tokens that may still be emitted; a path of that many nodes is
      longer than the text can use.
    drafted: nodes launched since the last verdict, roots apart.
    num_launched: launched nodes below the root: they hold slots.
    dead_held: launched nodes that died since the last commit was sent: stages
      hold their slots until the next one.
    launches: runs launched since the root was last launched itself, that one
      included: 1 when only the canonical run is under way.
    misses: verdicts in a row after which the root had to be launched anew.
    verdicts: number of verdicts so far.
    recent: (time, committed tokens by then) of the latest verdicts.
    fresh: nodes below the root in creation order, all unlaunched ones among
      them; see `unlaunched`.
  """

  sequence: int
  tokens: list[int]
  prompt_length: int
  root: int
  next_id: int
  nodes: dict[int, Node]
  children: dict[tuple[int, int], int]
  below: dict[int, list[int]] = dataclasses.field(default_factory=dict)
  flights: collections.deque[Flight] = dataclasses.field(
    default_factory=collections.deque
  )
  drafting: tuple[int, ...] = ()
  ticket: int = 0
  trail: list[tuple[int, int]] = dataclasses.field(default_factory=list)
  drafted_root: int | None = None
  commit_due: bool = True
  max_new_nodes: int = 0
  remaining: int = 0
  drafted: int = 0
  num_launched: int = 0
  dead_held: int = 0
  launches: int = 0
  misses: int = 0
  verdicts: int = 0
  recent: collections.deque[tuple[float, int]] = dataclasses.field(
    default_factory=lambda: collections.deque(maxlen=_RECENT)
  )
  fresh: list[Node] = dataclasses.field(default_factory=list)

  @property
  def root_launched(self) -> bool:
    return self.nodes[self.root].run is not None

  @property
  def in_flight(self) -> int:
    """Runs of this sequence launched and not yet returned."""
    return len(self.flights)

  def path(self, node_id: int) -> tuple[int, ...]:
    """Returns the tokens from the root (excluded) to the node (included)."""
    tokens = []
    while node_id != self.root:
      node = self.nodes[node_id]
      tokens.append(node.token)
      node_id = node.parent
    return tuple(reversed(tokens))

  def descend(self, tokens: tuple[int, ...]) -> int:
    """Returns the node that `tokens` lead to from the root."""
    at = self.root
    for token in tokens:
      at = self.children[at, token]
    return at

  def depth(self, node_id: int) -> int:
    """Returns the number of nodes from the root (excluded) to the node."""
    return self.nodes[node_id].position - self.nodes[self.root].position

  def anchor(self, node_id: int) -> Anchor:
    return Anchor(id=node_id, path=self.path(node_id))

  def unlaunched(self) -> list[Node]:
    """Returns unlaunched nodes below the root, in creation order."""
    self.fresh = [node for node in self.fresh if node.run is None]
    return list(self.fresh)

  def probability(self, node_id: int) -> float:
    """Returns the estimated probability that the node's path is accepted."""
    log_p = self.nodes[node_id].path_log_p - self.nodes[self.root].path_log_p
    return math.exp(min(log_p, 0.0))

  def launchable(self, count: int | None = None) -> list[int]:
    """Returns unlaunched node ids, likeliest first, parents before children.

    Nodes too deep for what may still be emitted are left out.

    Args:
      count: at most so many; all by default.
    """
    low = self.nodes[self.root].position
    ranked = sorted(
      (-node.path_log_p, node.id)
      for node in self.unlaunched()
      if node.position - low < self.remaining
    )
    return [node_id for _, node_id in ranked[:count]]


def start(
  sequence: int,
  tokens: tuple[int, ...],
  remaining: int,
  *,
  prompt_length: int | None = None,
) -> Speculation:
  """Returns the tree of a sequence whose root is the last of its tokens.

  Args:
    sequence: its number.
    tokens: prompt, and what was emitted before.
    remaining: tokens that may still be emitted.
    prompt_length: how many of the tokens are the prompt; all by default.
  """
  last = len(tokens) - 1
  root = Node(
    id=last,
    parent=max(last - 1, 0),
    token=tokens[-1],
    log_q=0.0,
    log_p=0.0,
    level=0,
    position=last,
    path_log_p=0.0,
  )
  return Speculation(
    sequence=sequence,
    tokens=list(tokens),
    prompt_length=len(tokens) if prompt_length is None else prompt_length,
    root=last,
    next_id=last + 1,
    nodes={last: root},
    children={},
    remaining=remaining,
  )


def _as_drafted(log_q: float, level: int) -> float:
  del level
  return log_q


def add_child(
  spec: Speculation,
  parent: int,
  token: int,
  log_q: float,
  estimate: Estimate = _as_drafted,
) -> Node:
  """Returns the child of `parent` that bears `token`, made if need be.

  A second node with the same (parent, token) is the same node.
  """
  above = spec.nodes[parent]
  known = spec.children.get((parent, token))
  level = above.position + 1 - spec.nodes[spec.root].position
  if known is not None:
    node = spec.nodes[known]
    if node.run is not None:
      return node
    node.log_q, node.level = log_q, level  # the newer estimate counts
  else:
    node = Node(
      id=spec.next_id,
      parent=parent,
      token=token,
      log_q=log_q,
      log_p=0.0,
      level=level,
      position=above.position + 1,
      path_log_p=0.0,
    )
    spec.next_id += 1
    spec.nodes[node.id] = node
    spec.children[parent, token] = node.id
    spec.below.setdefault(parent, []).append(node.id)
    spec.fresh.append(node)
  # Siblings exclude each other: together they are not likelier than certain.
  taken = sum(
    math.exp(spec.nodes[sibling].log_p)
    for sibling in spec.below[parent]
    if sibling != node.id
  )
  room = math.log(max(1.0 - taken, 1e-9))
  node.log_p = min(estimate(log_q, level), room, 0.0)
  _move(spec, node, above.path_log_p + node.log_p)
  return node


def _move(spec: Speculation, node: Node, path_log_p: float) -> None:
  """Sets a path's log-probability, and with it those of the paths below."""
  shift = path_log_p - node.path_log_p
  node.path_log_p = path_log_p
  queue = list(spec.below.get(node.id, ())) if shift else []
  while queue:
    child = spec.nodes[queue.pop()]
    child.path_log_p = spec.nodes[child.parent].path_log_p + child.log_p
    queue.extend(spec.below.get(child.id, ()))


def _rows_of(
  spec: Speculation, anchors: tuple[Anchor, ...]
) -> list[int | None]:
  """Returns the node of each anchor: alive, committed since, or None."""
  passed = {node for node, _ in spec.trail}
  return [
    anchor.id if anchor.id in spec.nodes or anchor.id in passed else None
    for anchor in anchors
  ]


def add_nodes(
  spec: Speculation,
  anchors: tuple[Anchor, ...],
  nodes: Nodes,
  estimate: Estimate = _as_drafted,
) -> int:
  """Adds drafted nodes below the anchors that are still alive.

  An anchor that was committed while the drafter was at it counts: of what was
  drafted below, the part that the text has since taken leads on to the rest.

  Args:
    spec: the tree, changed in place.
    anchors: as in the `Draft`.
    nodes: the drafter's answer.
    estimate: `(log q, level) -> log p`.

  Returns:
    How many rows were taken; rows below a dead anchor are dropped.

  Raises:
    ValueError: a parent row is not an earlier one, or a log-probability is NaN.
  """
  rows = _rows_of(spec, anchors)
  # (committed node, token of the next committed one) -> that one.
  ahead = {
    (above, token): node
    for (above, _), (node, token) in zip(
      spec.trail, spec.trail[1:], strict=False
    )
  }
  taken = 0
  listed: dict[int, dict[int, None]] = {}  # children by parent, in order
  for token, parent, log_q in zip(
    nodes.tokens.tolist(),
    nodes.parents.tolist(),
    nodes.log_q.tolist(),
    strict=True,
  ):
    if not 0 <= parent < len(rows):
      raise ValueError(
        f"drafter: node {len(rows) - len(anchors)} has parent row {parent}, "
        f"must be an earlier row (< {len(rows)})"
      )
    if math.isnan(log_q):
      raise ValueError(
        f"drafter: node {len(rows) - len(anchors)} has log_q nan: must be a "
        "log-probability"
      )
    above = rows[parent]
    if above is None or above not in spec.nodes:
      rows.append(None if above is None else ahead.get((above, token)))
      continue
    # Rounding makes certain nodes slightly more than certain; a node must not
    # look likelier than its parent, behind which it is launched.
    child = add_child(spec, above, token, min(log_q, 0.0), estimate)
    listed.setdefault(above, {})[child.id] = None
    rows.append(child.id)
    taken += 1
  for above, fresh in listed.items():
    if len(spec.below[above]) > len(fresh):
      _prefer(spec, above, fresh, estimate)
  return taken


def _prefer(
  spec: Speculation, parent: int, fresh: Collection[int], estimate: Estimate
) -> None:
  """Leaves to the children that a newer draft did not name again no more than
  what those that it did name leave."""
  room = 1.0
  for child in [*fresh, *(c for c in spec.below[parent] if c not in fresh)]:
    node = spec.nodes[child]
    if child in fresh and node.run is None:
      log_p = estimate(node.log_q, node.level)
    else:
      log_p = node.log_p
    node.log_p = min(log_p, math.log(max(room, 1e-9)), 0.0)
    room -= math.exp(node.log_p)
    _move(spec, node, spec.nodes[parent].path_log_p + node.log_p)


def commit_tokens(
  spec: Speculation, tokens: tuple[int, ...]
) -> tuple[list[Node], list[Node]]:
  """Moves the root along `tokens`, the tail's draws since the last verdict.

  Nodes that are not below the new root are removed.

  Returns:
    The nodes on the path, new root last (a node that the tree lacked is made),
    and the launched nodes that died, the passed ones not among them.
  """
  path = []
  at = spec.root
  for token in tokens:
    node = add_child(spec, at, token, 0.0)
    path.append(node)
    at = node.id
  spec.tokens.extend(tokens)
  if spec.drafting:
    spec.trail.extend((node.id, node.token) for node in path)
  old_root, spec.root = spec.root, at
  spec.commit_due = True
  passed = {old_root, *(node.id for node in path)}
  nodes = {at: spec.nodes[at]}
  below: dict[int, list[int]] = {}
  children: dict[tuple[int, int], int] = {}
  dead = []
  num_launched = 0
  for node in spec.nodes.values():  # creation order: parents come first
    if node.id in passed:
      continue
    if node.parent in nodes:
      nodes[node.id] = node
      below.setdefault(node.parent, []).append(node.id)
      children[node.parent, node.token] = node.id
      num_launched += node.run is not None
    elif node.run is not None:
      dead.append(node)
  # The old root and the path hold reserved slots; the rest died.
  spec.dead_held += len(dead)
  spec.num_launched = num_launched
  spec.nodes, spec.below, spec.children = nodes, below, children
  spec.fresh = [n for n in spec.unlaunched() if n.id in nodes and n.id != at]
  return path, dead
