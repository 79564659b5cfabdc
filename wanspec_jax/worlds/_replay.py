# SPDX-License-Identifier: Apache-2.0
"""Stages without a model: recorded texts in place of the target's draws."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from wanspec_jax.base import Rollback
from wanspec_jax.messages import Cancel, Returned, Run
from wanspec_jax.rollback import (
  Cancelled,
  apply_riders,
  mask_rollback,
  place_rows,
)
from wanspec_jax.verify._tail import TailSequence, conclude, plan_walks
from wanspec_jax.worlds._stage import Output


class ReplayStage:
  """A stage that keeps the books of a real one but computes nothing.

  Args:
    capacity: KV slots.
    row_bytes: bytes of hidden state per row that it sends; None on the last.
    texts: on the last stage, the whole text (prompt and recorded output) of
      each sequence: what the target draws at each position.
    rollback: slot bookkeeping.
  """

  def __init__(
    self,
    *,
    capacity: int,
    row_bytes: int | None = None,
    texts: Mapping[int, Sequence[int]] | None = None,
    rollback: Rollback | None = None,
  ):
    if (row_bytes is None) == (texts is None):
      raise ValueError(
        "ReplayStage: give row_bytes (any stage but the last) or texts (the "
        "last), one of the two"
      )
    self._row_bytes = row_bytes
    self._texts = texts
    self._rollback = rollback or mask_rollback()
    self._capacity = capacity
    self.reset()

  def reset(self) -> None:
    """Forgets every sequence: the start of a session."""
    self._slots = self._rollback.init(self._capacity)
    self._cancelled = Cancelled()
    self._tail: dict[int, TailSequence] = {}

  def cancel(self, cancel: Cancel) -> None:
    """Notes nodes whose rows need not be computed any more."""
    self._cancelled.add(cancel)

  def process(self, run: Run, payload: Any = None) -> Output:
    """Applies what rides on the run; draws from the texts on the last stage."""
    del payload
    run, _ = self._cancelled.filter(run)
    state = apply_riders(self._rollback, self._slots, run)
    self._slots, slots = place_rows(self._rollback, state, run)
    positions = self._rollback.positions(self._slots, slots)
    for sequence in run.closes:
      self._tail.pop(sequence, None)
    for opened in run.opens:
      self._tail[opened.sequence] = TailSequence(open=opened)
    if self._texts is None:
      return Output(
        run, bytes((self._row_bytes or 0) * run.num_rows), run.num_rows
      )
    verdicts = []
    for plan in plan_walks(self._tail, run, positions):
      text = self._texts[plan.sequence]
      row, drawn = plan.start, []
      while True:
        at = plan.position + len(drawn) + 1
        if at >= len(text):
          raise ValueError(
            f"texts[{plan.sequence}] has {len(text)} tokens: position {at} was "
            "asked for; record a longer output"
          )
        drawn.append(text[at])
        below = np.flatnonzero(
          (plan.parent_rows == row) & (plan.tokens == drawn[-1])
        )
        below = below[below > row]
        if not len(below):
          break
        row = int(below[0])
      zeros = np.zeros(len(drawn))
      verdicts.append(
        conclude(
          self._tail,
          plan,
          tokens=np.asarray(drawn),
          last=row,
          log_probs=zeros,
          margins=zeros,
        )
      )
    return Output(
      Returned(run_id=run.run_id, epoch=run.epoch, verdicts=tuple(verdicts)),
      None,
      run.num_rows,
    )


_ZEROS = memoryview(bytes(1 << 20))


class PassStage:
  """A stage that passes runs on and keeps no books: for large modelled rings.

  Args:
    row_bytes: bytes of hidden state per row that it sends.
  """

  def __init__(self, row_bytes: int):
    self._row_bytes = row_bytes
    self.reset()

  def reset(self) -> None:
    """Forgets what was cancelled."""
    self._cancelled = Cancelled()

  def cancel(self, cancel: Cancel) -> None:
    """Notes nodes whose rows need not be computed any more."""
    self._cancelled.add(cancel)

  def process(self, run: Run, payload: Any = None) -> Output:
    """Drops cancelled rows; the payload is zeros of the right length."""
    del payload
    run, _ = self._cancelled.filter(run)
    size = self._row_bytes * run.num_rows
    data = _ZEROS[:size] if size <= len(_ZEROS) else bytes(size)
    return Output(run, data, run.num_rows)
