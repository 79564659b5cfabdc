# SPDX-License-Identifier: Apache-2.0
"""Measured figures beside ours, and which of them must be in the same order."""

import dataclasses
import itertools
import json
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

DATA = pathlib.Path(__file__).parents[2] / "data" / "measured_rings.json"
BAR = 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """One measured figure beside ours.

  Attributes:
    case: which ring.
    name: what was measured.
    measured: by its authors.
    ours: simulated.
    inputs: input → mark: `published`, `assumed` or `derived from …`.
    counts: whether no input was derived from this figure.
  """

  case: str
  name: str
  measured: float
  ours: float
  inputs: dict[str, str]
  counts: bool = True

  @property
  def is_within(self) -> bool:
    return abs(self.ours / self.measured - 1) <= BAR


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordering:
  """The pairs of one sweep that differ by more than its noise.

  Attributes:
    case: which ring.
    what: what was measured.
    rule: when a pair counts.
    pairs: `(less, more)`, as measured; `(a, b)` for two identical runs.
    wrong: those of them that are not so here.
  """

  case: str
  what: str
  rule: str
  pairs: tuple[tuple[str, str], ...]
  wrong: tuple[tuple[str, str], ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Gain:
  """`priced` beside the measured system's best setting, both here.

  Attributes:
    case: which ring.
    where: which of its texts or laps.
    best: tokens/s of the best setting that was measured.
    priced: tokens/s of `priced` on the same ring with the same drafter.
  """

  case: str
  where: str
  best: float
  priced: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What a case comes to.

  Attributes:
    figures: of the case.
    orderings: of the case.
    gains: of the case; none if it has no drafter.
  """

  figures: list[Figure]
  orderings: list[Ordering]
  gains: list[Gain] = dataclasses.field(default_factory=list)


def mean_gain(gains: list[Gain]) -> float:
  """Returns the geometric mean over cases of the one within each; NaN without
  any."""
  by_case: dict[str, list[float]] = {}
  for gain in gains:
    by_case.setdefault(gain.case, []).append(math.log(gain.priced / gain.best))
  if not by_case:
    return math.nan
  logs = [sum(of_case) / len(of_case) for of_case in by_case.values()]
  return math.exp(sum(logs) / len(logs))


def ordered(
  case: str,
  what: str,
  arms: Mapping[str, tuple[float, float]],
  noise: float | Callable[[str, str], bool],
  rule: str = "",
) -> Ordering:
  """Returns which pairs of arms differ by more than noise, and which of those
  are not in the same order here.

  Args:
    case: which ring.
    what: what was measured.
    arms: arm → (measured, ours).
    noise: relative difference that a pair must exceed, or whether two arms do.
    rule: in words; by default the number.

  Raises:
    ValueError: `noise` is negative, or a function without words.
  """
  if callable(noise):
    if not rule:
      raise ValueError("rule = '': say in words when two arms differ")
  elif noise < 0:
    raise ValueError(f"noise = {noise}: must be >= 0")
  else:
    rule = rule or f"more than {100 * noise:.3g}%"
  pairs, wrong = [], []
  for pair in itertools.combinations(arms, 2):
    less, more = sorted(pair, key=lambda arm: arms[arm][0])
    if callable(noise):
      differs = noise(less, more)
    else:
      differs = arms[more][0] > (1 + noise) * arms[less][0]
    if differs:
      pairs.append((less, more))
      if not arms[less][1] < arms[more][1]:
        wrong.append((less, more))
  return Ordering(
    case=case,
    what=what,
    rule=rule,
    pairs=tuple(pairs),
    wrong=tuple(wrong),
  )


def identical(case: str, what: str, runs: Mapping[str, Any]) -> Ordering:
  """Returns which pairs of runs, whose counters were identical, are not so
  here."""
  pairs = tuple(itertools.combinations(runs, 2))
  return Ordering(
    case=case,
    what=what,
    rule="identical counters",
    pairs=pairs,
    wrong=tuple((a, b) for a, b in pairs if runs[a] != runs[b]),
  )


def rings(path: pathlib.Path = DATA) -> dict[str, Any]:
  """Returns the measured rings by name."""
  return json.loads(path.read_text())["rings"]


def arm(ring: dict[str, Any], label: str) -> dict[str, Any]:
  """Returns the arm of that label.

  Raises:
    KeyError: there is none.
  """
  for one in ring["arms"]:
    if one["label"] == label:
      return one
  raise KeyError(f"no arm {label!r} in {ring.get('title', 'this ring')!r}")
