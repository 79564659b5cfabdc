# SPDX-License-Identifier: Apache-2.0
"""Rollback by mask: commit and cancel change who is visible, never the data.

Keys are stored after RoPE at their absolute position, so a row never moves; a
dead row's slot is simply given to a later row. The bookkeeping is host numpy:
it reads nothing from the device, so it never waits for it.
"""

import dataclasses

import numpy as np

from wanspec_jax.base import Rollback

# (sequence, id) packed into one sortable integer.
_ID_BITS = 40


@dataclasses.dataclass(frozen=True, kw_only=True)
class SlotTable:
  """Which node each of `S` slots holds. Only `used` slots mean anything.

  Attributes:
    used: `[S]` bool, slot holds a live or committed row.
    committed: `[S]` bool, the row is part of the canonical text.
    keys: `[S]` int64 packed (sequence, node id).
    sequences: `[S]` int32.
    parents: `[S]` int32 *slot* of the parent; the own slot for first rows.
    positions: `[S]` int32 absolute position of the row's token.
  """

  used: np.ndarray
  committed: np.ndarray
  keys: np.ndarray
  sequences: np.ndarray
  parents: np.ndarray
  positions: np.ndarray

  @property
  def capacity(self) -> int:
    return len(self.used)


def _pack(sequences, ids):
  return (np.asarray(sequences, np.int64) << _ID_BITS) | np.asarray(
    ids, np.int64
  )


def init(capacity: int) -> SlotTable:
  """Returns an empty table of `capacity` slots."""
  return SlotTable(
    used=np.zeros(capacity, bool),
    committed=np.zeros(capacity, bool),
    keys=np.zeros(capacity, np.int64),
    sequences=np.zeros(capacity, np.int32),
    parents=np.arange(capacity, dtype=np.int32),
    positions=np.zeros(capacity, np.int32),
  )


def _copy(state: SlotTable) -> SlotTable:
  return SlotTable(
    used=state.used.copy(),
    committed=state.committed.copy(),
    keys=state.keys.copy(),
    sequences=state.sequences.copy(),
    parents=state.parents.copy(),
    positions=state.positions.copy(),
  )


def _slots_of(state: SlotTable, keys: np.ndarray) -> np.ndarray:
  """Returns the slot of each packed key; `KeyError` names a stranger."""
  used = np.flatnonzero(state.used)
  order = used[np.argsort(state.keys[used])]
  sorted_keys = state.keys[order]
  at = np.searchsorted(sorted_keys, keys)
  found = at < len(order)
  found[found] = sorted_keys[at[found]] == keys[found]
  if not found.all():
    stranger = int(keys[np.argmin(found)])
    raise KeyError(
      f"no slot holds node {stranger & ((1 << _ID_BITS) - 1)} of sequence "
      f"{stranger >> _ID_BITS}: its run never came, or it is dead"
    )
  return order[at].astype(np.int32)


def reserve(
  state: SlotTable,
  *,
  sequences: np.ndarray,
  ids: np.ndarray,
  parents: np.ndarray,
  committed: np.ndarray,
) -> tuple[SlotTable, np.ndarray]:
  """Gives each row of a run the lowest free slot.

  Args:
    state: the table, commits of the run applied.
    sequences: `[n]` sequence of each row.
    ids: `[n]` node id of each row.
    parents: `[n]` node id of each row's parent, an earlier row or a live node;
      the row's own id for the first row of a sequence.
    committed: `[n]` bool, rows launched as committed.

  Returns:
    The table, and `[n]` int32 slots.

  Raises:
    RuntimeError: fewer than `n` slots are free; the coordinator counts slots,
      so this is a fault of the peer, not a state to recover from.
    KeyError: a parent is neither in the run nor live.
  """
  num_rows = len(ids)
  free = np.flatnonzero(~state.used)
  if len(free) < num_rows:
    raise RuntimeError(
      f"run of {num_rows} rows needs as many slots, {len(free)} of "
      f"{state.capacity} are free: the coordinator counted wrongly"
    )
  slots = free[:num_rows].astype(np.int32)
  state = _copy(state)
  state.used[slots] = True
  state.committed[slots] = committed
  state.keys[slots] = _pack(sequences, ids)
  state.sequences[slots] = sequences
  state.parents[slots] = _slots_of(state, _pack(sequences, parents))
  positions = state.positions
  # Parents first: rows are topologically ordered.
  for slot, parent in zip(
    slots.tolist(), state.parents[slots].tolist(), strict=True
  ):
    positions[slot] = 0 if parent == slot else positions[parent] + 1
  return state, slots


def mask(
  state: SlotTable, slots: np.ndarray, num_slots: int | None = None
) -> np.ndarray:
  """Returns `[n, num_slots]` bool: the slots that each row may attend to.

  A row sees the committed slots of its sequence up to its own position and the
  slots of its uncommitted ancestors, itself included.
  """
  num_slots = state.capacity if num_slots is None else num_slots
  sequences = state.sequences[:num_slots]
  positions = state.positions[:num_slots]
  canonical = (state.used & state.committed)[:num_slots]
  seen = (
    canonical[None, :]
    & (sequences[None, :] == state.sequences[slots][:, None])
    & (positions[None, :] <= state.positions[slots][:, None])
  )
  rows = np.arange(len(slots))
  at = np.asarray(slots)
  while len(rows):
    seen[rows, at] = True
    parent = state.parents[at]
    climb = (parent != at) & ~state.committed[at]
    rows, at = rows[climb], parent[climb]
  return seen


def _below(state: SlotTable, slot: int) -> np.ndarray:
  """Returns `[S]` bool: the slot itself and its descendants."""
  below = np.zeros(state.capacity, bool)
  below[slot] = True
  while True:
    grown = below | (state.used & below[state.parents])
    if (grown == below).all():
      return below
    below = grown


def commit(
  state: SlotTable, sequence: int, root: int, parent: int | None = None
) -> SlotTable:
  """Commits `root` and its ancestors; frees what is not below it.

  Args:
    state: the table.
    sequence: whose tree is re-rooted.
    root: node id of the new root.
    parent: None where `root` holds a slot already. Where `root` is a row of
      the run that the commit rides on, its parent's id: the parent's path is
      committed and nothing uncommitted is below the new root yet.
  """
  new = parent is not None
  slot = int(_slots_of(state, _pack([sequence], [parent if new else root]))[0])
  keep = np.zeros(state.capacity, bool) if new else _below(state, slot)
  state = _copy(state)
  at = slot
  while not state.committed[at]:
    state.committed[at] = True
    if state.parents[at] == at:
      break
    at = int(state.parents[at])
  mine = state.used & (state.sequences == sequence)
  state.used[mine & ~state.committed & ~keep] = False
  return state


def cancel(state: SlotTable, sequence: int, ids: np.ndarray) -> SlotTable:
  """Frees uncommitted nodes and all that lies below them; unknown ids (dead
  already) are ignored."""
  wanted = _pack(np.full(len(ids), sequence), ids)
  gone = state.used & ~state.committed & np.isin(state.keys, wanted)
  drop = np.zeros(state.capacity, bool)
  for slot in np.flatnonzero(gone):
    drop |= _below(state, int(slot))
  state = _copy(state)
  state.used[drop & ~state.committed] = False
  return state


def close(state: SlotTable, sequence: int) -> SlotTable:
  """Frees all slots of a sequence."""
  state = _copy(state)
  mine = state.used & (state.sequences == sequence)
  state.used[mine] = False
  state.committed[mine] = False
  return state


def mask_rollback() -> Rollback:
  """Returns the default mechanism: visibility by mask, dead slots reused.

  Costs per commit: O(S) host work, no device work, no bytes beyond the commit
  itself. Supports chains, trees, several runs in flight, several sequences.
  """
  return Rollback(
    name="mask",
    init=init,
    reserve=reserve,
    mask=mask,
    commit=commit,
    cancel=cancel,
    close=close,
    positions=lambda state, slots: state.positions[slots],
    num_used=lambda state: int(state.used.sum()),
  )
