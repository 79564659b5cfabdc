# SPDX-License-Identifier: Apache-2.0
"""A published figure beside ours, and what ours rests on."""

import dataclasses
import math
from typing import NamedTuple

PUBLISHED = "published"
OWN = "derived from this figure"
ASSUMED = "assumed"
TOLERANCE = 0.15


def derived(row: str) -> str:
  """Returns the mark of an input that another row's figure fixed."""
  return f"derived from {row}"


class Input(NamedTuple):
  """What a simulation was given.

  Attributes:
    name: what it is.
    value: in the unit.
    unit: e.g. `"ms"`; empty for a ratio.
    mark: `PUBLISHED`, `OWN`, `ASSUMED` or `derived(row)`.
    note: where it was published, or why it was assumed.
  """

  name: str
  value: float
  unit: str
  mark: str
  note: str = ""

  def __str__(self) -> str:
    unit = f" {self.unit}" if self.unit else ""
    return f"{self.name} {self.value:.4g}{unit} ({self.mark})"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Row:
  """One published figure.

  Attributes:
    system: whose.
    figure: what it says, and in which set-up; unique within the system.
    low: published value, or the lower end of the published range.
    high: upper end of the range; None if the figure is one number.
    ours: what the virtual ring yields.
    inputs: what it was given.
    spread: ours at the ends of what could as well have been assumed; None if
      that was not tried.
    weak: why a match says little, e.g. because the figure that an input was
      derived from would match as well; empty if it does not.
    note: what the simulation leaves out, or what `spread` spans.
  """

  system: str
  figure: str
  low: float
  ours: float
  inputs: tuple[Input, ...]
  high: float | None = None
  spread: tuple[float, float] | None = None
  weak: str = ""
  note: str = ""

  def __post_init__(self):
    if not self.inputs:
      raise ValueError(f"{self.name}: Row.inputs = (): every row has some")
    for item in self.inputs:
      if item.mark not in (PUBLISHED, OWN, ASSUMED) and (
        not item.mark.startswith("derived from ")
        or item.mark == derived(self.name)
      ):
        raise ValueError(f"{self.name}: Input.mark = {item.mark!r}: unknown")
    if self.high is not None and not self.low <= self.high:
      raise ValueError(f"{self.name}: Row.high = {self.high}: must be >= low")

  @property
  def name(self) -> str:
    return f"{self.system}: {self.figure}"

  @property
  def published(self) -> str:
    """The published value or range, as text."""
    return f"{self.low:.4g}" + (
      "" if self.high is None else f" to {self.high:.4g}"
    )

  @property
  def error(self) -> float:
    """Relative distance to the published value, or to the nearer end of the
    range; 0 inside it."""
    high = self.low if self.high is None else self.high
    if self.low <= self.ours <= high:
      return 0.0
    near = self.low if self.ours < self.low else high
    return self.ours / near - 1

  @property
  def matches(self) -> bool:
    """Whether ours is within 15% of a number, or inside a range."""
    if self.high is not None:
      return self.error == 0.0
    return abs(self.error) <= TOLERANCE

  @property
  def verdict(self) -> str:
    """`reproduced` if it matches and nothing was derived from the figure
    itself, `fitted` if it matches and something was, else `off`."""
    if not (math.isfinite(self.ours) and self.matches):
      return "off"
    own = any(item.mark == OWN for item in self.inputs)
    return "fitted" if own else "reproduced"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Check:
  """A simulation beside a closed form.

  Attributes:
    name: of the form, with its source.
    expected: what the form says.
    ours: what the virtual ring yields.
    limit: relative error allowed.
  """

  name: str
  expected: float
  ours: float
  limit: float = 0.01

  @property
  def error(self) -> float:
    return self.ours / self.expected - 1

  @property
  def holds(self) -> bool:
    return abs(self.error) <= self.limit
