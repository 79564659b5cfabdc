# SPDX-License-Identifier: Apache-2.0
"""What a run means to a stage's slots, whatever the mechanism."""

from typing import Any

import numpy as np

from wanspec_jax.base import Rollback
from wanspec_jax.messages import Commit, Run


def _committed_path(run: Run, commit: Commit) -> tuple[list[int], int | None]:
  """Returns the part of a new root's path that rides on the run itself.

  Returns:
    The node ids from the root upwards that are rows of the run, and the parent
    of the last of them: None if that is the first row of its sequence, or if
    the root holds a slot already.
  """
  mine = run.sequences == commit.sequence
  parent_of = dict(
    zip(run.ids[mine].tolist(), run.parents[mine].tolist(), strict=True)
  )
  path = []
  at = commit.root
  while at in parent_of:
    path.append(at)
    if parent_of[at] == at:
      return path, None
    at = parent_of[at]
  return path, at if path else None


def apply_riders(rollback: Rollback, state: Any, run: Run) -> Any:
  """Returns the state after the closes and commits that ride on a run."""
  for sequence in run.closes:
    state = rollback.close(state, sequence)
  for commit in run.commits:
    path, parent = _committed_path(run, commit)
    if path and parent is None:  # a whole prompt: nothing lies above it
      continue
    state = rollback.commit(state, commit.sequence, commit.root, parent)
  return state


def place_rows(
  rollback: Rollback, state: Any, run: Run
) -> tuple[Any, np.ndarray]:
  """Gives a run's rows their slots; new roots and their paths are committed.

  Returns:
    The state and `[n]` int32 slots.
  """
  roots = {
    (commit.sequence, node)
    for commit in run.commits
    for node in _committed_path(run, commit)[0]
  }
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
