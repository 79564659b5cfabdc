# SPDX-License-Identifier: Apache-2.0
"""The coordinator's one growing tree of a sequence."""

import dataclasses
import math

from wanspec_jax.base import Anchor, Nodes


@dataclasses.dataclass(slots=True)
class Node:
  """A drafted (or committed, not yet cached) token.

  Attributes:
    id: grows within the sequence.
    parent: parent's id.
    token: token id.
    log_p: estimated log-probability of being accepted given the parent.
    run: run that carries it; None until launched.
  """

  id: int
  parent: int
  token: int
  log_p: float
  run: int | None = None


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
    in_flight: runs of this sequence launched and not yet returned.
    drafting: a `Draft` has been asked for and not answered.
    drafted_root: root that the last answered draft grew from; None if none.
    commit_due: the root moved since the last commit was sent.
    max_new_nodes: nodes that may be launched now beyond the root.
    remaining: tokens that may still be emitted; a path of that many nodes is
      longer than the text can use.
    drafted: nodes launched since the last verdict, roots apart.
    dead_held: launched nodes that died since the last commit was sent: stages
      hold their slots until the next one.
  """

  sequence: int
  tokens: list[int]
  prompt_length: int
  root: int
  next_id: int
  nodes: dict[int, Node]
  children: dict[tuple[int, int], int]
  in_flight: int = 0
  drafting: bool = False
  drafted_root: int | None = None
  commit_due: bool = True
  max_new_nodes: int = 0
  remaining: int = 0
  drafted: int = 0
  dead_held: int = 0

  @property
  def root_launched(self) -> bool:
    return self.nodes[self.root].run is not None

  @property
  def num_launched(self) -> int:
    """Launched nodes below the root: they hold slots for speculation."""
    return sum(
      node.run is not None and node.id != self.root
      for node in self.nodes.values()
    )

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
    return len(self.path(node_id))

  def anchor(self, node_id: int) -> Anchor:
    return Anchor(id=node_id, path=self.path(node_id))

  def unlaunched(self) -> list[Node]:
    """Returns unlaunched nodes below the root, in creation order."""
    return [
      node
      for node in self.nodes.values()
      if node.run is None and node.id != self.root
    ]

  def probability(self, node_id: int) -> float:
    """Returns the estimated probability that the node's path is accepted."""
    log_p = 0.0
    while node_id != self.root:
      node = self.nodes[node_id]
      log_p += node.log_p
      node_id = node.parent
    return math.exp(log_p)


def start(
  sequence: int, prompt: tuple[int, ...], remaining: int
) -> Speculation:
  """Returns the tree of a new sequence: its root is the last prompt token."""
  last = len(prompt) - 1
  root = Node(id=last, parent=max(last - 1, 0), token=prompt[-1], log_p=0.0)
  return Speculation(
    sequence=sequence,
    tokens=list(prompt),
    prompt_length=len(prompt),
    root=last,
    next_id=last + 1,
    nodes={last: root},
    children={},
    remaining=remaining,
  )


def add_child(spec: Speculation, parent: int, token: int, log_p: float) -> Node:
  """Returns the child of `parent` that bears `token`, made if need be.

  A second node with the same (parent, token) is the same node.
  """
  known = spec.children.get((parent, token))
  if known is not None:
    node = spec.nodes[known]
    if node.run is None:  # a newer estimate replaces the older
      node.log_p = log_p
    return node
  node = Node(id=spec.next_id, parent=parent, token=token, log_p=log_p)
  spec.next_id += 1
  spec.nodes[node.id] = node
  spec.children[parent, token] = node.id
  return node


def add_nodes(
  spec: Speculation, anchors: tuple[Anchor, ...], nodes: Nodes
) -> int:
  """Adds drafted nodes below the anchors that are still alive.

  Returns how many rows were taken; rows below a dead anchor are dropped.

  Raises:
    ValueError: a parent row is not an earlier one, or a log-probability is NaN.
  """
  rows: list[int | None] = [
    anchor.id if anchor.id in spec.nodes else None for anchor in anchors
  ]
  taken = 0
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
    if above is None:
      rows.append(None)
      continue
    # Rounding makes certain nodes slightly more than certain; a node must not
    # look likelier than its parent, behind which it is launched.
    rows.append(add_child(spec, above, token, min(log_q, 0.0)).id)
    taken += 1
  return taken


def commit_tokens(spec: Speculation, tokens: tuple[int, ...]) -> list[Node]:
  """Moves the root along `tokens`, the tail's draws since the last verdict.

  Nodes that are not below the new root are removed.

  Returns:
    The nodes on the path, new root last; a node that the tree lacked is made.
  """
  path = []
  at = spec.root
  for token in tokens:
    node = add_child(spec, at, token, 0.0)
    path.append(node)
    at = node.id
  spec.tokens.extend(tokens)
  spec.root = at
  spec.commit_due = True
  launched_before = sum(node.run is not None for node in spec.nodes.values())
  alive = {at: spec.nodes[at]}
  for node in spec.nodes.values():  # creation order: parents come first
    if node.parent in alive and node.id != at:
      alive[node.id] = node
  on_path = sum(node.run is not None for node in path[:-1]) + 1
  launched_now = sum(node.run is not None for node in alive.values())
  # The old root and the path hold reserved slots; the rest died.
  spec.dead_held += launched_before - launched_now - on_path
  spec.nodes = alive
  spec.children = {
    (node.parent, node.token): node.id
    for node in alive.values()
    if node.id != at
  }
  return path
