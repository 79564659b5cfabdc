# SPDX-License-Identifier: Apache-2.0
"""Segments: a tree ordered by score, streamed piece by piece.

FlowSpec (https://arxiv.org/abs/2507.02620): the nodes with the best path scores
go first, so early segments are verified while later ones are on their way. A
verdict prunes what is not below the token drawn, wherever it is, and the
drafter adds to what is left: the re-rooting of SwiftSpec
(https://arxiv.org/abs/2506.11309), which here is the commit.
"""

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Hold, Policy, Send


def segments(
  *,
  segment: int = 16,
  initial: int = 80,
  expand: int = 64,
  top_k: int = 10,
  levels: int = 6,
) -> Policy:
  """Returns the policy; the defaults are the paper's.

  A new root waits for its tree and travels with the first segment. The next
  ones follow as fast as the busiest link or stage takes them. A verdict that
  lands in the tree keeps the part below, launched or not, and the tree below
  the new root is drafted again: what is known already is the same node, by its
  path, and stays where it is; what is new joins the queue by its score. If less
  than a segment is waiting all the same, the likeliest leaves grow.

  Args:
    segment: nodes per run, a new root among them.
    initial: nodes of a new tree.
    expand: nodes drafted after a verdict.
    top_k: leaves that grow when the queue runs short: the beam of the paper's
      drafter. 0 leaves the tree as deep as a draft below the root.
    levels: depth of a draft.
  """
  for field, value, low in (
    ("segment", segment, 1),
    ("initial", initial, 1),
    ("expand", expand, 1),
    ("top_k", top_k, 0),
    ("levels", levels, 1),
  ):
    if value < low:
      raise ValueError(f"{field} = {value}: must be >= {low}")

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    grow = None if spec.drafting else _growth(spec)
    if grow is not None:
      return grow
    with_root = not spec.root_launched
    if with_root and spec.drafting:
      return None  # its tree is under way
    room = min(segment - with_root, spec.max_new_nodes)
    ids = tuple(spec.launchable(room))
    if with_root:
      return Send(ids)
    if not ids:
      return None
    wait_s = pipe.wait_s(len(ids), time_s)
    if wait_s > 1e-3 * pipe.costs.occupancy_s(len(ids)):
      return Hold(time_s + wait_s)
    return Send(ids)

  def _growth(spec: Speculation) -> Grow | None:
    if spec.remaining <= 1:
      return None
    if spec.drafted_root != spec.root:
      is_new = not spec.below.get(spec.root)
      budget = initial if is_new else expand
      return Grow((spec.anchor(spec.root),), budget, levels)
    if len(spec.launchable(segment)) == segment:
      return None
    leaves = sorted(
      (-node.path_log_p, node.id)
      for node in spec.nodes.values()
      if node.grown is None
      and not spec.below.get(node.id)
      and spec.depth(node.id) < spec.remaining - 1
    )[:top_k]
    anchors = tuple(spec.anchor(node) for _, node in leaves)
    return Grow(anchors, expand, levels) if anchors else None

  return Policy(name="segments", decide=decide, max_in_flight=4096)
