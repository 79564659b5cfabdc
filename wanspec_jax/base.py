# SPDX-License-Identifier: Apache-2.0
"""The slots of the library: records of pure functions, and what goes in them.

A pluggable part is a `NamedTuple` of pure functions made by a factory and
combined by functions, as in optax. Host-side parts (drafters' bookkeeping,
policies) work on numpy and Python values; device-side parts are jittable.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np


class Anchor(NamedTuple):
  """A node that a draft may grow from.

  Attributes:
    id: node id within its sequence.
    path: tokens on the path from the root (excluded: the root is the last
      observed token) to this node (included); empty for the root itself.
  """

  id: int
  path: tuple[int, ...] = ()


class Nodes(NamedTuple):
  """Drafted nodes below a list of `A` anchors, topologically ordered.

  Attributes:
    tokens: `[m]` int32 token of each node.
    parents: `[m]` int32 row of each node's parent, where rows `0 … A-1` are the
      anchors and row `A + i` is node `i`.
    log_q: `[m]` float32 log-probability of each node given its parent, as the
      drafter estimates it; calibrated where the drafter says so.
  """

  tokens: np.ndarray
  parents: np.ndarray
  log_q: np.ndarray


class DrafterInit(Protocol):
  def __call__(
    self, params: Any, prompt: Sequence[int], request_key: int
  ) -> Any:
    """Returns the drafter state of one sequence whose root is `prompt[-1]`."""
    ...


class DrafterExpand(Protocol):
  def __call__(
    self,
    state: Any,
    anchors: Sequence[Anchor],
    budget: int,
    levels: int | None = None,
  ) -> tuple[Any, Nodes]:
    """Returns at most `budget` nodes below the anchors, best first among those
    whose parents are listed already; none deeper than `levels` below its
    anchor. A drafter that runs a model pays one forward pass per level."""
    ...


class DrafterRebase(Protocol):
  def __call__(self, state: Any, root: Anchor) -> Any:
    """Re-roots: keeps what lies below `root` (path from the old root)."""
    ...


class DrafterObserve(Protocol):
  def __call__(
    self, state: Any, tokens: Sequence[int], features: Any = None
  ) -> Any:
    """Appends committed tokens (and true target features), never guesses."""
    ...


class Drafter(NamedTuple):
  """Something that proposes trees. Order per verdict: `observe`, `rebase`."""

  name: str
  init: DrafterInit
  expand: DrafterExpand
  rebase: DrafterRebase
  observe: DrafterObserve


class Codec(NamedTuple):
  """Turns rows of hidden states into bytes and back.

  What `decode` reconstructs for a row depends on that row (and the rows of its
  own path) only when `row_local` is true; others are refused where exactness
  is on. `encode` and `decode` are jittable over a padded `[N, D]` batch; `pack`
  and `unpack` are the host edge, where only the first `n` rows count.

  Attributes:
    name: canonical spec, agreed upon at the handshake, e.g. `"uniform:8:64"`.
    init: `(width D) -> state`.
    encode: `(state, x [N, D], side) -> (state, payload pytree of arrays)`.
    decode: `(state, payload, side) -> (state, x [N, D] float32)`.
    pack: `(payload, n) -> bytes`; raises `ValueError` naming the row when a row
      cannot be represented.
    unpack: `(data, n, width, capacity) -> payload` padded to `capacity` rows;
      raises `ValueError` on data of the wrong length.
    row_bytes: `(width) -> bytes per row` on the wire (exact for fixed-rate
      codecs, expected otherwise).
    row_local: see above.
  """

  name: str
  init: Callable[[int], Any]
  encode: Callable[[Any, jax.Array, Any], tuple[Any, Any]]
  decode: Callable[[Any, Any, Any], tuple[Any, jax.Array]]
  pack: Callable[[Any, int], bytes]
  unpack: Callable[[bytes, int, int, int], Any]
  row_bytes: Callable[[int], float]
  row_local: bool


class Rollback(NamedTuple):
  """Bookkeeping of a stage's cache slots: who holds which, who sees whom.

  All functions are pure: they return a new state and leave the old one valid,
  so a snapshot is the state itself.

  Attributes:
    name: as in `--rollback`.
    init: `(capacity) -> state`.
    reserve: `(state, *, sequences, ids, parents, committed) -> (state, slots)`,
      a slot per row of a run.
    mask: `(state, slots, num_slots) -> [n, num_slots] bool`, true where a row
      sees a slot.
    commit: `(state, sequence, root id, parent id) -> state`; the parent is None
      unless the root is a row of the run that the commit rides on.
    cancel: `(state, sequence, ids) -> state`.
    close: `(state, sequence) -> state`.
    positions: `(state, slots) -> [n] int32` absolute positions.
    num_used: `(state) -> int` slots in use.
  """

  name: str
  init: Callable[[int], Any]
  reserve: Callable[..., tuple[Any, np.ndarray]]
  mask: Callable[[Any, np.ndarray, int], np.ndarray]
  commit: Callable[[Any, int, int, int | None], Any]
  cancel: Callable[[Any, int, np.ndarray], Any]
  close: Callable[[Any, int], Any]
  positions: Callable[[Any, np.ndarray], np.ndarray]
  num_used: Callable[[Any], int]
