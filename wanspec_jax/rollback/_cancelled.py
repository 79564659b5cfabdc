# SPDX-License-Identifier: Apache-2.0
"""Rows that a stage need not compute any more."""

import collections
import dataclasses

import numpy as np

from wanspec_jax.messages import Cancel, Run


class Cancelled:
  """Dead nodes that a stage has heard of and not yet seen.

  A cancel meets its rows wherever they are: what has begun goes on, what has
  not is dropped. Nodes are forgotten with the first run that cannot carry them.
  """

  def __init__(self) -> None:
    self._epoch = 0
    self._cancels: collections.deque[Cancel] = collections.deque()
    self._dead: collections.Counter[tuple[int, int]] = collections.Counter()

  def add(self, cancel: Cancel) -> None:
    """Notes dead nodes; what belongs to an older epoch is ignored."""
    if cancel.epoch < self._epoch:
      return
    if cancel.epoch > self._epoch:
      self._epoch = cancel.epoch
      self._cancels.clear()
      self._dead.clear()
    self._cancels.append(cancel)
    self._dead.update(
      (sequence, node) for sequence, ids in cancel.nodes for node in ids
    )

  def filter(self, run: Run) -> tuple[Run, np.ndarray | None]:
    """Returns a run without its dead rows, and which rows stayed.

    Returns:
      The run, and `[k]` indices of the rows kept; None if all were.
    """
    if not self._cancels:
      return run, None
    while self._cancels and (
      run.epoch > self._epoch or self._cancels[0].before_run <= run.run_id
    ):
      for sequence, ids in self._cancels.popleft().nodes:
        for node in ids:
          self._dead[sequence, node] -= 1
          if not self._dead[sequence, node]:
            del self._dead[sequence, node]
    dead = self._dead
    if not dead or run.epoch < self._epoch:
      return run, None
    if run.commits:
      # The root of a text that goes on is never dead: this one has ended.
      commits = tuple(
        c for c in run.commits if (c.sequence, c.root) not in dead
      )
      if len(commits) < len(run.commits):
        run = dataclasses.replace(run, commits=commits)
    rows = list(zip(run.sequences.tolist(), run.ids.tolist(), strict=True))
    if dead.keys().isdisjoint(rows):
      return run, None
    alive = [i for i, row in enumerate(rows) if row not in dead]
    keep = np.asarray(alive, np.int64)
    columns = ("sequences", "ids", "parents", "tokens", "committed")
    return dataclasses.replace(
      run, **{name: getattr(run, name)[keep] for name in columns}
    ), keep
