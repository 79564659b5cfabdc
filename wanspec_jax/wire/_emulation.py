# SPDX-License-Identifier: Apache-2.0
"""User-space emulation of one directed WAN link, as a pure function of time.

The sender holds each frame until the moment at which the real link would have
delivered it. The virtual world calls the same function with its own clock, and
jitter is addressed by (seed, frame number), so both worlds draw the same.
"""

import dataclasses
import math
from typing import NamedTuple

import numpy as np


class ShaperState(NamedTuple):
  """Where a link stands.

  Attributes:
    num_frames: frames scheduled so far.
    free_at_s: when the last of them has left the sender.
    delivered_at_s: when the last of them arrives.
  """

  num_frames: int = 0
  free_at_s: float = -math.inf
  delivered_at_s: float = -math.inf


def half_normal(*, seed: int, index: int) -> float:
  """Returns |Z|, Z standard normal, addressed by `(seed, index)`.

  Box-Muller on the first two raw words of Philox-4x64 under the key
  `(seed, index)`: NumPy keeps the raw stream of a bit generator fixed across
  versions, which it does not promise for its normal variates.
  """
  u, v = _uniforms(seed, index)
  radius = math.sqrt(-2.0 * math.log(u))
  return abs(radius * math.cos(2.0 * math.pi * v))


def uniform(*, seed: int, index: int) -> float:
  """Returns a number in (0, 1), addressed as `half_normal`'s are."""
  return _uniforms(seed, index)[0]


def _uniforms(seed: int, index: int) -> tuple[float, float]:
  key = np.array([seed, index], np.uint64)
  words = np.random.Philox(key=key).random_raw(2)
  u, v = ((int(word) >> 11) + 0.5 for word in words)  # 53 bits, never 0
  return u * 2.0**-53, v * 2.0**-53


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinkShaper:
  """Delay, bandwidth and jitter of one directed link.

  Frame k of b bytes, handed over at time t, leaves and arrives at

    leaveₖ = max(t, leaveₖ₋₁) + 8 b / bandwidth
    arriveₖ = max(leaveₖ + delay + jitter · |Zₖ|, arriveₖ₋₁)

  so the link is a queue with one server, and order is kept. Jitter is
  half-normal: it only ever adds, by `jitter_s · √(2/π)` on average.

  Attributes:
    delay_s: one-way propagation delay.
    bandwidth_bps: bits per second; `math.inf` for none to wait for.
    jitter_s: standard deviation of the normal behind the half-normal.
    seed: addresses the jitter, together with the frame number.
  """

  delay_s: float = 0.0
  bandwidth_bps: float = math.inf
  jitter_s: float = 0.0
  seed: int = 0

  def __post_init__(self):
    rules = (
      ("delay_s", 0 <= self.delay_s < math.inf, "must be finite and >= 0"),
      ("bandwidth_bps", self.bandwidth_bps > 0, "must be > 0 (inf is allowed)"),
      ("jitter_s", 0 <= self.jitter_s < math.inf, "must be finite and >= 0"),
      ("seed", 0 <= self.seed < 2**64, "must lie in [0, 2**64)"),
    )
    for field, holds, rule in rules:
      if not holds:
        raise ValueError(f"LinkShaper.{field} = {getattr(self, field)}: {rule}")

  def schedule(
    self, state: ShaperState, now_s: float, num_bytes: int
  ) -> tuple[ShaperState, float]:
    """Returns the link's next state and when the frame is delivered.

    Args:
      state: of this link; `ShaperState()` at first.
      now_s: when the frame is handed over, on any clock that never goes back.
      num_bytes: length of the frame, prefix included.
    """
    leave_s = max(now_s, state.free_at_s) + 8.0 * num_bytes / self.bandwidth_bps
    arrive_s = leave_s + self.delay_s
    if self.jitter_s > 0:
      draw = half_normal(seed=self.seed, index=state.num_frames)
      arrive_s += self.jitter_s * draw
    arrive_s = max(arrive_s, state.delivered_at_s)
    return ShaperState(state.num_frames + 1, leave_s, arrive_s), arrive_s
