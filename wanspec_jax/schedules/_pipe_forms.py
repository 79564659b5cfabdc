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


def window_rates(
  hit_at: Callable[[int], float], *, lap_s: float, tick_s: float
) -> list[float]:
  """Returns tokens per second with at most W = 1, 2, … levels under way.

  The i-th level behind a missed one is drafted min(i, W) levels ahead of the
  last token known, and hits with a rate that depends on that. It follows the
  one before by a tick, but when W levels have been launched the next waits for
  the first verdict. With S_i = Π_{j ≤ i} a(min(j, W)) the rate is

    (1 + Σ_{i ≥ 1} S_i) / (Λ + τ Σ_{i ≥ 1} S_i + e Σ_{m ≥ 1} S_{m W})

  where e = max(0, Λ − W τ): `in_pipe_rate` if a is constant and the pipe full.
  With fewer levels than fit the pipe runs dry at times; with more, each is a
  worse guess, which is why filling it may not pay.

  Args:
    hit_at: `(levels ahead, from 1) -> a`.
    lap_s: Λ, time of a lap of one level.
    tick_s: τ, time that a level keeps the busiest link or stage busy; 0 if it
      takes none.

  Returns:
    The rates for W = 1 … ⌈Λ / τ⌉, as far as S_W is above 1e-4: no level beyond
    is worth a thought.
  """
  _check_positive(lap_s=lap_s)
  most = _MOST_LEVELS
  if tick_s > lap_s / most:
    most = lap_window(lap_s, tick_s)
  rates = []
  reach, passed = 1.0, 0.0  # S_W, and Σ S_i for i = 1 … W
  for window in range(1, most + 1):
    hit = hit_at(window)
    _check_rate(f"hit_at({window})", hit)
    reach *= hit
    passed += reach
    gap_s = max(0.0, lap_s - window * tick_s)
    if hit == 1:
      tokens, spent_s = window, window * tick_s + gap_s
    else:
      beyond = reach * hit / (1 - hit)
      tokens = 1 + passed + beyond
      spent_s = lap_s + tick_s * (passed + beyond)
      spent_s += gap_s * reach / (1 - hit**window)
    rates.append(tokens / spent_s)
    if reach < 1e-4:
      break
  return rates


def levels_in_flight(
  hit_at: Callable[[int], float],
  *,
  lap_s: float,
  tick_s: float,
  slack: float = 0.001,
) -> int:
  """Returns how many levels to keep under way: not always all that fit.

  The least W whose rate, by `window_rates`, is within `slack` of the best one.
  SpecPipe (https://arxiv.org/abs/2504.04104) fills the pipe; where acceptance
  fades with every level ahead most of that is dead on arrival.

  Args:
    hit_at: `(levels ahead, from 1) -> a`.
    lap_s: Λ, time of a lap of one level.
    tick_s: τ, time that a level keeps the busiest link or stage busy.
    slack: share of the rate that is given up for fewer levels in vain.
  """
  rates = window_rates(hit_at, lap_s=lap_s, tick_s=tick_s)
  enough = max(rates) * (1 - slack)
  return next(i + 1 for i, rate in enumerate(rates) if rate >= enough)


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
