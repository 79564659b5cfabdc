# SPDX-License-Identifier: Apache-2.0
"""The demo: SmolLM2-135M-Instruct cut into four stages, a lap of 200 ms.

Source: our own set-up, five hops of 40 ms one way at 100 Mbps, the middle of
the grid of `python -m experiments.study laps`.

Command: `python -m experiments.decode --config wan4` (what `make demo` runs)
Hardware: 2 CPU cores; about 4 minutes once installed.
Expected: tokens equal to plain decoding on every prompt, a speed-up above 1.3.
"""

from experiments._arms import Links, Speculate
from experiments._settings import Decode, RingSettings


def get_config() -> Decode:
  return Decode(
    ring=RingSettings(stages=4),
    links=Links(lap_ms=200.0, mbps=100.0),
    speculate=Speculate(drafter="suffix", max_nodes=63, size="sized"),
    max_new_tokens=72,
  )
