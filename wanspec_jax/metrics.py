# SPDX-License-Identifier: Apache-2.0
"""What is reported of a decoding run, one definition each.

Zero policy: a count over nothing is 0, a ratio over nothing is NaN (nothing is
known, which is not the same as a rate of 0); nothing raises
`ZeroDivisionError`.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True, kw_only=True)
class RoundRecord:
  """What the engine logs per verdict.

  Attributes:
    drafted: nodes launched for this round, root not included; relaunched or
      cancelled nodes count each time they are launched.
    tested: nodes on the path that were compared with the target's draw: the
      accepted ones, and the one level at which the walk left the tree although
      the tip had children. Siblings of one level count as one test.
    accepted: drafted nodes that became text.
    emitted: tokens that became text, the target's own token included. What a
      stop or a budget cuts off is neither accepted nor emitted.
  """

  drafted: int
  tested: int
  accepted: int
  emitted: int

  def __post_init__(self):
    for field in ("drafted", "tested", "accepted", "emitted"):
      if getattr(self, field) < 0:
        raise ValueError(
          f"RoundRecord.{field} = {getattr(self, field)}: must be >= 0"
        )
    if self.accepted > self.tested:
      raise ValueError(
        f"RoundRecord.accepted = {self.accepted}: must be <= tested = "
        f"{self.tested}"
      )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Summary:
  """All figures of a list of rounds; see the function of the same name."""

  laps: int
  drafted: int
  tested: int
  accepted: int
  emitted: int
  tokens_per_lap: float
  acceptance_rate: float
  accepted_per_drafted: float
  mean_accepted: float
  per_position_acceptance: tuple[float, ...]
  conditional_acceptance: tuple[float, ...]
  wasted_nodes: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class PromptRun:
  """One prompt decoded once.

  Attributes:
    tokens: emitted token ids.
    seconds: decoding time, compile time not included.
  """

  tokens: tuple[int, ...]
  seconds: float

  def __post_init__(self):
    if not (math.isfinite(self.seconds) and self.seconds > 0):
      raise ValueError(
        f"PromptRun.seconds = {self.seconds}: must be finite and > 0"
      )


class Speedup(NamedTuple):
  """A speed-up and what it rests on; print both.

  Attributes:
    ratio: total baseline seconds ÷ total candidate seconds, over the prompts
      whose tokens were identical.
    num_identical: how many those are.
    num_prompts: out of how many.
  """

  ratio: float
  num_identical: int
  num_prompts: int

  def __str__(self) -> str:
    return (
      f"{self.ratio:.3g}x identical={self.num_identical}/{self.num_prompts}"
    )


def tokens_per_lap(rounds: Sequence[RoundRecord]) -> float:
  """Returns emitted tokens ÷ verdict rounds, the target's own token included.

  The "mean accepted length" τ of Sequoia, EAGLE and DFlash.
  """
  return _ratio(sum(r.emitted for r in rounds), len(rounds))


def acceptance_rate(rounds: Sequence[RoundRecord]) -> float:
  """Returns accepted ÷ tested nodes on the path.

  Drafts behind a rejection were never tested and do not count against it.
  """
  return _ratio(sum(r.accepted for r in rounds), sum(r.tested for r in rounds))


def accepted_per_drafted(rounds: Sequence[RoundRecord]) -> float:
  """Returns accepted ÷ drafted nodes: the yield of what was launched."""
  return _ratio(sum(r.accepted for r in rounds), sum(r.drafted for r in rounds))


def mean_accepted(rounds: Sequence[RoundRecord]) -> float:
  """Returns accepted nodes per round, the target's own token not included."""
  return _ratio(sum(r.accepted for r in rounds), len(rounds))


def per_position_acceptance(
  rounds: Sequence[RoundRecord],
) -> tuple[float, ...]:
  """Returns, per draft position, the part of all rounds that accepted there.

  Position `i` (from 0) counts a round iff it accepted more than `i` nodes. The
  list ends with the last position that any round tested.
  """
  return tuple(
    _ratio(sum(r.accepted > i for r in rounds), len(rounds))
    for i in range(max((r.tested for r in rounds), default=0))
  )


def conditional_acceptance(
  rounds: Sequence[RoundRecord],
) -> tuple[float, ...]:
  """Returns, per draft position, accepted ÷ tested rounds at that position.

  Only rounds whose walk reached position `i` count there, so the values do not
  decay merely because walks end.
  """
  return tuple(
    _ratio(
      sum(r.accepted > i for r in rounds), sum(r.tested > i for r in rounds)
    )
    for i in range(max((r.tested for r in rounds), default=0))
  )


def wasted_nodes(rounds: Sequence[RoundRecord]) -> int:
  """Returns drafted nodes that did not become text."""
  return sum(r.drafted - r.accepted for r in rounds)


def bytes_per_token(
  bytes_by_class: Mapping[str, int], emitted: int
) -> dict[str, float]:
  """Returns bytes on the wire ÷ emitted tokens, per traffic class and `total`.

  Raises:
    ValueError: if a class is called `total` or has a negative count.
  """
  if "total" in bytes_by_class:
    raise ValueError("bytes_by_class has a class 'total': the name is taken")
  for name, count in bytes_by_class.items():
    if count < 0:
      raise ValueError(f"bytes_by_class[{name!r}] = {count}: must be >= 0")
  rates = {name: _ratio(n, emitted) for name, n in bytes_by_class.items()}
  return rates | {"total": _ratio(sum(bytes_by_class.values()), emitted)}


def joules_per_token(joules: float, emitted: int) -> float:
  """Returns energy of all hosts ÷ emitted tokens."""
  return _ratio(joules, emitted)


def speedup(
  baseline: Sequence[PromptRun], candidate: Sequence[PromptRun]
) -> Speedup:
  """Returns the speed-up over the prompts that gave identical tokens.

  Args:
    baseline: one run per prompt.
    candidate: the same prompts in the same order.

  Raises:
    ValueError: if the lists differ in length or are empty, if more than one
      prompt gave other tokens, or if none gave the same.
  """
  if len(baseline) != len(candidate):
    raise ValueError(
      f"candidate has {len(candidate)} prompts: must be the baseline's "
      f"{len(baseline)}"
    )
  pairs = list(zip(baseline, candidate, strict=True))
  same = [(a, b) for a, b in pairs if a.tokens == b.tokens]
  identical = f"identical={len(same)}/{len(pairs)}"
  if len(pairs) - len(same) > 1:
    unequal = [i for i, (a, b) in enumerate(pairs) if a.tokens != b.tokens]
    raise ValueError(
      f"{identical}, prompts {unequal} differ: a speed-up allows one unequal "
      "prompt at most"
    )
  if not same:
    raise ValueError(f"{identical}: a speed-up needs an identical prompt")
  return Speedup(
    ratio=sum(a.seconds for a, _ in same) / sum(b.seconds for _, b in same),
    num_identical=len(same),
    num_prompts=len(pairs),
  )


def summarize(rounds: Sequence[RoundRecord]) -> Summary:
  """Returns every figure of this module that follows from the rounds alone."""
  return Summary(
    laps=len(rounds),
    drafted=sum(r.drafted for r in rounds),
    tested=sum(r.tested for r in rounds),
    accepted=sum(r.accepted for r in rounds),
    emitted=sum(r.emitted for r in rounds),
    tokens_per_lap=tokens_per_lap(rounds),
    acceptance_rate=acceptance_rate(rounds),
    accepted_per_drafted=accepted_per_drafted(rounds),
    mean_accepted=mean_accepted(rounds),
    per_position_acceptance=per_position_acceptance(rounds),
    conditional_acceptance=conditional_acceptance(rounds),
    wasted_nodes=wasted_nodes(rounds),
  )


def _ratio(numerator: float, denominator: float) -> float:
  return numerator / denominator if denominator else math.nan
