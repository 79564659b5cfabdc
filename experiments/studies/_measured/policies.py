# SPDX-License-Identifier: Apache-2.0
"""The schedules of the measured systems.

None of them sends cancels: what a verdict killed is computed by every stage
behind, and costs what the rest costs.
"""

from wanspec_jax import schedules as sch


def frames(block: int, limit: int, *, floor: int = 1) -> sch.Policy:
  """Returns DeepSeek-V4's schedule in `leyten/shard`: single-position frames.

  The verdict on a position brings a block of drafts behind the token that it
  commits. If that token is the deepest one under way, or none is, the block
  goes out one node per frame; else it is dropped. So the next block leaves
  while the last frame of this one is still in flight. Frames beyond the limit
  are dropped too: the block is `limit - 1` long if that is less.

  Args:
    block: drafts per block.
    limit: frames in flight that are not stale, at most.
    floor: more than 1 refills earlier: while fewer frames than this are under
      way behind the root, every verdict's block adds what it has beyond them.

  Raises:
    ValueError: no room for a draft.
  """
  if block < 1 or limit < 2 or floor < 1:
    raise ValueError(
      f"frames: block = {block}, limit = {limit}, floor = {floor}: must be at "
      "least 1, 2, 1"
    )
  most = min(block, limit - 1)

  def decide(spec, pipe, time_s):
    del pipe, time_s
    if spec.drafting:
      return None
    ready = spec.launchable(1)
    if not spec.root_launched:
      # A block that came late, from the hidden state before, is used up first.
      if spec.drafted_root != spec.root and spec.remaining > 1 and not ready:
        return sch.Grow((spec.anchor(spec.root),), most, most)
      return sch.Send(())
    if ready:
      return sch.Send(tuple(ready))
    if spec.num_launched >= floor or spec.drafted_root == spec.root:
      return None
    deepest = max(spec.nodes.values(), key=lambda node: node.position)
    depth = spec.depth(deepest.id)
    missing = min(most, spec.remaining - 1) - depth
    if missing < 1:
      return None
    return sch.Grow((spec.anchor(deepest.id),), missing, missing)

  return sch.Policy(
    f"frames({block}, {limit}, {floor})", decide, 4096, cancels=False
  )


def chunks(length: int, depth: int) -> sch.Policy:
  """Returns `leyten/shard`'s chunk pipelining: chains of several positions.

  A chunk of `length` drafts follows the token before it; the next one follows
  the last draft. One that is not accepted in full voids all behind it. At depth
  1 it is the synchronous chain.

  Args:
    length: drafts per chunk; `length + 1` positions.
    depth: chunks in flight that are not void.

  Raises:
    ValueError: an argument below 1.
  """
  if length < 1 or depth < 1:
    raise ValueError(
      f"chunks: length = {length}, depth = {depth}: must be at least 1"
    )

  def decide(spec, pipe, time_s):
    del pipe, time_s
    if spec.drafting:
      return None
    ready = spec.launchable(length + 1)
    if not spec.root_launched:
      need = min(length, spec.remaining - 1)
      if len(ready) < need and spec.drafted_root != spec.root:
        return sch.Grow((spec.anchor(spec.root),), length, length)
      return sch.Send(tuple(ready[:length]))
    alive = sum(any(i in spec.nodes for i in f.ids) for f in spec.flights)
    if alive >= depth:
      return None
    deepest = max(spec.nodes.values(), key=lambda node: node.position)
    reach = spec.depth(deepest.id)
    if len(ready) <= length and reach < spec.remaining - 1:
      return sch.Grow((spec.anchor(deepest.id),), length + 1, length + 1)
    return sch.Send(tuple(ready)) if ready else None

  return sch.Policy(f"chunks({length}, {depth})", decide, 4096, cancels=False)
