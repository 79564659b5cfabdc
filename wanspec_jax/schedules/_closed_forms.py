# SPDX-License-Identifier: Apache-2.0
"""Closed forms of drafted chains: i.i.d. acceptance, constant times."""

import math


def expected_tokens(accept: float, depth: int) -> float:
  """Returns Ω(γ, α) = (1 − α^{γ+1}) / (1 − α), the tokens of a verified chain,
  the target's own among them."""
  if accept >= 1:
    return depth + 1.0
  return (1 - accept ** (depth + 1)) / (1 - accept)


def synchronous_rate(
  accept: float, depth: int, *, level_s: float, lap_s: float
) -> float:
  """Returns tokens per second of chains in lockstep: Ω(γ, α) / (γ t_d + T)."""
  return expected_tokens(accept, depth) / (depth * level_s + lap_s)


def overlapped_rate(
  accept: float, depth: int, *, level_s: float, lap_s: float
) -> float:
  """Returns tokens per second where the next chain is drafted meanwhile:
  Ω(γ, α) / max(γ t_d, T), PicoSpec's law (https://arxiv.org/abs/2603.19133)."""
  return expected_tokens(accept, depth) / max(depth * level_s, lap_s)


def always_rolling(accept: float, window: int) -> tuple[float, float]:
  """Returns (ρ, tokens per step) of a verifier whose drafter never stops.

  ρ = α / (1 − α^{γ+1} + α) is the share of steps that find a window of γ
  drafted tokens; the others follow a rollback and yield one token:

    (1 − ρ) + ρ (1 − α^{γ+1}) / (1 − α)

  PipeSpec (https://arxiv.org/abs/2505.01572).
  """
  rho = accept / (1 - accept ** (window + 1) + accept)
  return rho, (1 - rho) + rho * expected_tokens(accept, window)


def lookahead(*, target_s: float, level_s: float, servers: int) -> int:
  """Returns the fewest drafted tokens per verification that let so many servers
  (or runs in flight) keep up: ⌈t_target / (servers · t_drafter)⌉, DSI's rule
  (https://arxiv.org/abs/2405.14105)."""
  return max(1, math.ceil(target_s / (servers * level_s)))
