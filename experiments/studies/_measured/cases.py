# SPDX-License-Identifier: Apache-2.0
"""Seven sets of measurements on real WAN rings, and what we make of each.

Inputs are marked `published`, `assumed`, or `derived from …`. A figure counts
only if no input of it was derived from it.
"""

from collections.abc import Callable
from typing import Any

from experiments.studies._measured import chunks, figures, v4
from experiments.studies._measured.figures import Result

CASES: dict[str, Callable[[dict[str, Any], int], Result]] = {
  "Nordic": v4.nordic,
  "ten boxes": v4.ten_boxes,
  "block sweep": v4.block_sweep,
  "M2.5 paper bench": chunks.paper_bench,
  "gpt-oss depth pair": chunks.depth_pair,
  "GLM ladder": chunks.glm_ladder,
  "slopes": chunks.slopes,
}


def run_case(name: str, tokens: int) -> Result:
  """Returns what a case comes to."""
  return CASES[name](figures.rings(), tokens)
