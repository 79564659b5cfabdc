# SPDX-License-Identifier: Apache-2.0
"""A target without a model whose every draw depends on what each stage saw.

A row's state at a stage is a hash of the states of exactly those rows that the
stage's rollback mask lets it see, at their positions; the tail draws from a law
that follows from it. So a slot given away too early, a mask that shows a dead
row or hides a live one, or a wrong position, on any stage, changes the text.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from wanspec_jax.base import Rollback
from wanspec_jax.messages import Cancel, Returned, Run, Sampling
from wanspec_jax.rollback import (
  Cancelled,
  apply_riders,
  mask_rollback,
  place_rows,
)
from wanspec_jax.verify._tail import (
  TailSequence,
  WalkPlan,
  conclude,
  plan_walks,
)
from wanspec_jax.worlds._stage import Output

_U64 = np.uint64
_GOLDEN = _U64(0x9E3779B97F4A7C15)
_A, _B = _U64(0xBF58476D1CE4E5B9), _U64(0x94D049BB133111EB)


def _mix(x: np.ndarray) -> np.ndarray:
  """SplitMix64's finaliser (https://doi.org/10.1145/2660193.2660195)."""
  with np.errstate(over="ignore"):
    x = (x ^ (x >> _U64(30))) * _A
    x = (x ^ (x >> _U64(27))) * _B
    return x ^ (x >> _U64(31))


def _placed(states: np.ndarray, positions: np.ndarray) -> np.ndarray:
  """Returns what a row contributes to those that see it."""
  with np.errstate(over="ignore"):
    return _mix(states + (positions.astype(_U64) + _U64(1)) * _GOLDEN)


def _draw(state: int, position: int, sampling: Sampling, vocab: int) -> int:
  """Returns the token at `position`, from the state of the row before."""
  tokens = np.arange(vocab, dtype=_U64)
  with np.errstate(over="ignore"):
    bits = _mix(_U64(state) + (tokens + _U64(1)) * _GOLDEN)
    logits = (bits >> _U64(11)).astype(np.float64) * 2.0**-53 * 4.0
    if sampling.temperature == 0:
      return int(np.argmax(logits))
    noise_key = _U64(sampling.seed % 2**32) * _A + _U64(position) * _B
    noise = _mix(_mix(noise_key + tokens) + _GOLDEN)
  uniform = ((noise >> _U64(11)).astype(np.float64) + 0.5) * 2.0**-53
  return int(
    np.argmax(logits / sampling.temperature - np.log(-np.log(uniform)))
  )


class ToyStage:
  """A stage of the toy target; see the module.

  Args:
    capacity: slots.
    is_first: whether it embeds tokens; the others take states.
    is_last: whether it draws.
    vocab: tokens of the law.
    rollback: slot bookkeeping under test.
  """

  def __init__(
    self,
    *,
    capacity: int,
    is_first: bool,
    is_last: bool,
    vocab: int = 6,
    rollback: Rollback | None = None,
  ):
    self._capacity = capacity
    self._is_first = is_first
    self._is_last = is_last
    self._vocab = vocab
    self._rollback = rollback or mask_rollback()
    self.reset()

  def reset(self) -> None:
    """Forgets every sequence; the cache keeps its garbage."""
    self._slots = self._rollback.init(self._capacity)
    self._cache = _mix(np.arange(self._capacity, dtype=_U64))
    self._cancelled = Cancelled()
    self._tail: dict[int, TailSequence] = {}

  def cancel(self, cancel: Cancel) -> None:
    """Notes nodes whose rows need not be computed any more."""
    self._cancelled.add(cancel)

  @property
  def num_used(self) -> int:
    return self._rollback.num_used(self._slots)

  def process(self, run: Run, payload: Any = None) -> Output:
    """Does to a run what a `Stage` does; states travel as 8 bytes a row."""
    run, keep = self._cancelled.filter(run)
    state = apply_riders(self._rollback, self._slots, run)
    for sequence in run.closes:
      self._tail.pop(sequence, None)
    for opened in run.opens:
      self._tail[opened.sequence] = TailSequence(open=opened)
    if not run.num_rows:
      self._slots = state
      if self._is_last:
        return Output(Returned(run_id=run.run_id, epoch=run.epoch), None, 0)
      return Output(run, b"", 0)
    self._slots, slots = place_rows(self._rollback, state, run)
    positions = self._rollback.positions(self._slots, slots)
    if self._is_first:
      rows = _mix(run.tokens.astype(_U64) + _GOLDEN)
    else:
      rows = np.frombuffer(payload, _U64)
      rows = rows if keep is None else rows[keep]
    self._cache[slots] = _placed(rows, positions)
    seen = self._rollback.mask(self._slots, slots, self._capacity)
    with np.errstate(over="ignore"):
      sums = np.where(seen, self._cache, _U64(0)).sum(axis=1, dtype=_U64)
      out = _mix(sums + rows)
    if not self._is_last:
      return Output(run, out.tobytes(), run.num_rows)
    verdicts = tuple(
      self._walk(plan, out) for plan in plan_walks(self._tail, run, positions)
    )
    return Output(
      Returned(run_id=run.run_id, epoch=run.epoch, verdicts=verdicts),
      None,
      run.num_rows,
    )

  def _walk(self, plan: WalkPlan, states: np.ndarray):
    sampling = self._tail[plan.sequence].open.sampling
    row, drawn = plan.start, []
    while True:
      position = plan.position + len(drawn) + 1
      state = int(states[plan.rows[row]])
      drawn.append(_draw(state, position, sampling, self._vocab))
      below = np.flatnonzero(
        (plan.parent_rows == row) & (plan.tokens == drawn[-1])
      )
      below = below[below > row]
      if not len(below):
        break
      row = int(below[0])
    zeros = np.zeros(len(drawn))
    return conclude(
      self._tail,
      plan,
      tokens=np.asarray(drawn),
      last=row,
      log_probs=zeros,
      margins=zeros,
    )


def toy_text(
  prompt: Sequence[int],
  sampling: Sampling,
  count: int,
  *,
  num_stages: int,
  vocab: int = 6,
) -> list[int]:
  """Returns what plain decoding makes of a prompt, computed without a ring.

  Args:
    prompt: at least one token.
    sampling: temperature and seed count.
    count: tokens to draw.
    num_stages: stages of the target: its law depends on the cuts.
    vocab: tokens of the law.
  """
  text = list(prompt)
  sums = np.zeros(num_stages, _U64)  # of all rows so far, stage by stage
  state = np.zeros((), _U64)
  done = 0
  while True:
    for position in range(done, len(text)):
      with np.errstate(over="ignore"):
        state = _mix(np.asarray(text[position], _U64) + _GOLDEN)
        for stage in range(num_stages):
          sums[stage] += _placed(state, np.asarray(position))
          state = _mix(sums[stage] + state)
    done = len(text)
    if done == len(prompt) + count:
      return text[len(prompt) :]
    text.append(_draw(int(state), done, sampling, vocab))
