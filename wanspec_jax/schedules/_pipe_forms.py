# SPDX-License-Identifier: Apache-2.0
"""Closed forms of pipelined speculation, for constant times.

All are pure functions of floats. Acceptance is i.i.d. with rate `a` unless
stated otherwise, and R = a / (1 − a) is the mean run of hits.
"""

import math
from collections.abc import Callable

_MOST_LEVELS = 512


def _check_rate(name: str, value: float, *, low: float = 0.0) -> None:
  if not low <= value <= 1.0:
    raise ValueError(f"{name} = {value}: must be in [{low:g}, 1]")


def _check_positive(**values: float) -> None:
  for name, value in values.items():
    if not value > 0:
      raise ValueError(f"{name} = {value}: must be > 0")


def in_pipe_rate(hit: float, window: float, tick_s: float) -> float:
  """Returns tokens per second of one level per tick, `window` levels deep.

  A cycle begins with a miss. Its root takes W ticks round the pipe and commits
  one token; the levels behind follow a tick apart, and R of them hit:

    (R + 1) / ((R + W) τ)

  SpecPipe (https://arxiv.org/abs/2504.04104), whose W is the number of stages;
  where latency dominates it is the number of ticks in a lap, see `lap_window`.

  Args:
    hit: a, the share of levels that hold the target's token.
    window: W, ticks from the launch of a level to its verdict.
    tick_s: τ, time between two levels.

  Raises:
    ValueError: `hit` is no probability, or another argument not positive.
  """
  _check_rate("hit", hit)
  _check_positive(window=window, tick_s=tick_s)
  if hit == 1:
    return 1 / tick_s
  mean_run = hit / (1 - hit)
  return (mean_run + 1) / ((mean_run + window) * tick_s)


def in_pipe_speedup(hit: float, window: float) -> float:
  """Returns the speed-up over plain decoding, one token per W ticks:

    W (R + 1) / (R + W)

  It tends to R + 1 = 1 / (1 − a) however deep the pipe is, and is half of that
  at W = R.
  """
  return in_pipe_rate(hit, window, 1.0) * window


def lap_window(lap_s: float, tick_s: float) -> int:
  """Returns W = ⌈Λ / τ⌉, the levels under way in a full pipe.

  Args:
    lap_s: Λ, time of a lap of one level, latencies included.
    tick_s: τ, time that a level keeps the busiest link or stage busy.
  """
  _check_positive(lap_s=lap_s, tick_s=tick_s)
  # Rounding errors of Λ, a sum, must not add a level.
  return max(1, math.ceil(lap_s / tick_s * (1 - 1e-9)))


def levels_in_flight(
  hit_at: Callable[[int], float], *, lap_s: float, tick_s: float
) -> int:
  """Returns how many levels to keep under way: not always all that fit.

  With W of them one starts every τ_W = max(τ, Λ / W), was drafted W levels
  ahead of the last token known, and hits with the rate a(W) of such levels,
  which falls with W. So the pipe should be as full as

    argmax_W (R_W + 1) / ((R_W + W) τ_W)        R_W = a(W) / (1 − a(W))

  says, for W = 1 … ⌈Λ / τ⌉; the smallest such W.

  Args:
    hit_at: `(levels ahead, from 1) -> a`.
    lap_s: Λ, time of a lap of one level.
    tick_s: τ, time that a level keeps the busiest link or stage busy; 0 if it
      takes none.
  """
  _check_positive(lap_s=lap_s)
  most = _MOST_LEVELS
  if tick_s > lap_s / most:
    most = lap_window(lap_s, tick_s)
  best, best_rate = 1, 0.0
  for window in range(1, most + 1):
    each_s = max(tick_s, lap_s / window)
    rate = in_pipe_rate(hit_at(window), lap_s / each_s, each_s)
    if rate > best_rate * (1 + 1e-9):
      best, best_rate = window, rate
  return best


def stream_rate(
  accept: float, *, level_s: float, tick_s: float, lap_s: float
) -> float:
  """Returns tokens per second of a drafter that never waits.

  Distributed speculative inference (https://arxiv.org/abs/2405.14105) has as
  many copies of the target as verifications overlap; a pipe takes their place
  with the runs it holds, and a lap that of the target's time. A rejection costs
  a lap, and each token accepted the slower of drafting and the tick:

    (1 + R) / (Λ + R max(t_d, τ))

  `in_pipe_rate` at W = Λ / max(t_d, τ).

  Args:
    accept: acceptance per token.
    level_s: t_d, time to draft one token.
    tick_s: τ, time that a run keeps the busiest link or stage busy.
    lap_s: Λ, time of a lap.
  """
  _check_positive(lap_s=lap_s)
  each_s = max(level_s, tick_s)
  _check_positive(**{"max(level_s, tick_s)": each_s})
  return in_pipe_rate(accept, lap_s / each_s, each_s)
