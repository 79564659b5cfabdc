# SPDX-License-Identifier: Apache-2.0
"""Seven sets of measurements on real WAN rings, and what we make of each.

Inputs are marked `published`, `assumed`, or `derived from …`. A figure counts
only if no input of it was derived from it.
"""

from collections.abc import Callable
from typing import Any

from experiments.studies import (
  _measured_chunks,
  _measured_figure,
  _measured_v4,
)
from experiments.studies._measured_figure import Result

CASES: dict[str, Callable[[dict[str, Any], int], Result]] = {
  "Nordic": _measured_v4.nordic,
  "ten boxes": _measured_v4.ten_boxes,
  "block sweep": _measured_v4.block_sweep,
  "M2.5 paper bench": _measured_chunks.paper_bench,
  "gpt-oss depth pair": _measured_chunks.depth_pair,
  "GLM ladder": _measured_chunks.glm_ladder,
  "slopes": _measured_chunks.slopes,
}


def run_case(name: str, tokens: int) -> Result:
  """Returns what a case comes to."""
  return CASES[name](_measured_figure.rings(), tokens)
