# SPDX-License-Identifier: Apache-2.0
"""Round-trip time and clock offset from pings, without wall clocks.

With a ping sent at t₀ and answered at t₃ by our clock, received at t₁ and
answered at t₂ by the peer's, as in NTP (RFC 5905):

  rtt    = (t₃ - t₀) - (t₂ - t₁)
  offset = ((t₁ - t₀) + (t₂ - t₃)) / 2,   off by at most rtt / 2
"""

import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from wanspec_jax.wire._errors import FrameError

_WINDOW = 16  # samples that a least round-trip time is taken over


def _number(fields: Mapping[str, Any], name: str) -> float:
  value = fields.get(name)
  if not isinstance(value, float) or not math.isfinite(value):
    raise FrameError(f"heartbeat: {name} = {value!r} is no finite float")
  return value


def pong_fields(
  ping: Mapping[str, Any], *, received_s: float
) -> dict[str, float]:
  """Returns the fields of the answer to a ping."""
  return {
    "sent_s": _number(ping, "sent_s"),
    "received_s": received_s,
    "answered_s": time.monotonic(),
  }


class ClockEstimate(NamedTuple):
  """What the pings so far say of the peer's clock.

  Attributes:
    samples: the latest `(rtt_s, offset_s)`, oldest first, at most 16.
  """

  samples: tuple[tuple[float, float], ...]

  @property
  def rtt_s(self) -> float:
    """Least of the recent round-trip times."""
    return min(self.samples)[0]

  @property
  def offset_s(self) -> float:
    """Peer's monotonic clock minus ours, by the sample of least delay."""
    return min(self.samples)[1]

  def merge(self, earlier: "ClockEstimate | None") -> "ClockEstimate":
    """Returns the estimate of both, the earlier one's samples first."""
    older = () if earlier is None else earlier.samples
    return ClockEstimate((*older, *self.samples)[-_WINDOW:])


def estimate(
  pong: Mapping[str, Any], ping_sent_s: float | None, now_s: float
) -> ClockEstimate | None:
  """Returns the one sample of an answer, or None if it answers another ping.

  Raises:
    FrameError: if a field is missing or no finite float.
  """
  sent_s, received_s, answered_s = (
    _number(pong, name) for name in ("sent_s", "received_s", "answered_s")
  )
  if sent_s != ping_sent_s:
    return None
  rtt_s = (now_s - sent_s) - (answered_s - received_s)
  offset_s = ((received_s - sent_s) + (answered_s - now_s)) / 2
  return ClockEstimate(((rtt_s, offset_s),))
