# SPDX-License-Identifier: Apache-2.0
"""Measured figures beside ours, and the rings that they were measured on."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments.studies._measured_world import count
from experiments.studies._published_world import World
from wanspec_jax import schedules as sch

DATA = pathlib.Path(__file__).parent.parent / "data" / "measured_rings.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Figure:
  """One measured figure beside ours.

  Attributes:
    case: which ring.
    name: what was measured.
    measured: by its authors.
    ours: simulated.
    inputs: input → mark.
    counts: whether all inputs are known without this figure.
  """

  case: str
  name: str
  measured: float
  ours: float
  inputs: dict[str, str]
  counts: bool = True

  @property
  def is_within(self) -> bool:
    return abs(self.ours / self.measured - 1) <= 0.15


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ordering:
  """What was faster, or more, on a real ring, beyond its noise.

  Attributes:
    case: which ring.
    claim: in words.
    holds: whether it holds here.
  """

  case: str
  claim: str
  holds: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """A case's figures and orderings, and the ring's best beside `priced`.

  Attributes:
    figures: of the case.
    orderings: of the case.
    best: tokens/s here of the measured system's best setting; NaN if the case
      has no drafter.
    priced: tokens/s of `priced` on the same ring with the same drafter.
  """

  figures: list[Figure]
  orderings: list[Ordering]
  best: float = float("nan")
  priced: float = float("nan")


def rings(path: pathlib.Path = DATA) -> dict[str, Any]:
  """Returns the measured rings by name."""
  return json.loads(path.read_text())["rings"]


def arm(ring: dict[str, Any], label: str) -> dict[str, Any]:
  """Returns the arm of that label."""
  return next(one for one in ring["arms"] if one["label"] == label)


def table(acceptance: Sequence[float]) -> list[list[float]]:
  """Returns acceptance by depth as `drafters.synthetic` takes it."""
  return [[a] for a in acceptance]


def priced(world: World, acceptance: Any, tokens: int) -> float:
  """Returns the tokens/s of `priced` on a ring."""
  return count(world, sch.priced(), acceptance, tokens=tokens).tokens_per_s
