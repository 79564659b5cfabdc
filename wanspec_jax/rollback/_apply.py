# SPDX-License-Identifier: Apache-2.0
"""What a run means to a stage's slots, whatever the mechanism."""

from typing import Any

import numpy as np

from wanspec_jax.base import Rollback
from wanspec_jax.messages import Run


def apply_riders(rollback: Rollback, state: Any, run: Run) -> Any:
  """Returns the state after the closes and commits that ride on a run."""
  for sequence in run.closes:
    state = rollback.close(state, sequence)
  for commit in run.commits:
    at = np.flatnonzero(
      (run.sequences == commit.sequence) & (run.ids == commit.root)
    )
    parent = int(run.parents[at[0]]) if len(at) else None
    if parent == commit.root:  # a prompt of one token: nothing lies above it
      continue
    state = rollback.commit(state, commit.sequence, commit.root, parent)
  return state


def place_rows(
  rollback: Rollback, state: Any, run: Run
) -> tuple[Any, np.ndarray]:
  """Gives a run's rows their slots; its committed roots count as committed.

  Returns:
    The state and `[n]` int32 slots.
  """
  roots = {(c.sequence, c.root) for c in run.commits}
  is_root = [
    (s, i) in roots
    for s, i in zip(run.sequences.tolist(), run.ids.tolist(), strict=True)
  ]
  return rollback.reserve(
    state,
    sequences=run.sequences,
    ids=run.ids,
    parents=run.parents,
    committed=run.committed | np.asarray(is_root, bool),
  )
