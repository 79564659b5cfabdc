# SPDX-License-Identifier: Apache-2.0
"""Simulations beside closed forms.

Where a form depends on the acceptance, it is taken at the share of drafted
tokens that was accepted in the very run: a shorter text then does.
"""

from experiments.studies._published.policies import micro_steps
from experiments.studies._published.row import Check
from experiments.studies._published.world import (
  Speed,
  World,
  fixed,
  simulate,
  tokens_per_round,
)
from wanspec_jax import schedules as sch
from wanspec_jax.schedules._in_pipe import in_pipe


def in_pipe_speed_up(stages: int, hit: float) -> float:
  """Returns D (R + 1) / (R + D), R = a / (1 − a), over plain decoding: one
  level per stage time fills D stages anew after each miss (PipeDec,
  https://arxiv.org/abs/2504.04104)."""
  run = hit / (1 - hit)
  return stages * (run + 1) / (run + stages)


def tokens_per_step(acceptance: float, window: int) -> float:
  """Returns (1 − ρ) + ρ Ω(γ, α), ρ = α / (1 − α^{γ+1} + α): tokens per
  verification of a verifier that never waits (PipeSpec,
  https://arxiv.org/abs/2505.01572)."""
  a = acceptance
  rho = a / (1 - a ** (window + 1) + a)
  return (1 - rho) + rho * tokens_per_round(a, window)


def replicas_token_s(
  acceptance: float, *, draft_s: float, verify_s: float, look_ahead: int
) -> float:
  """Returns seconds per token with as many replicas of the target as needed.

  Runs of k tokens are launched one after another until a token is rejected, so
  that between two rejections lie m full runs and j < k further tokens:

    T = k t_d (m + [j > 0]) + t_v        E[tokens] = 1 / (1 − α)

  the recursion of DSI (https://arxiv.org/abs/2405.14105), save that a wrong
  first token of any run, not of the first one only, is known from the target's
  token behind the run before it.
  """
  a, k = acceptance, look_ahead
  full = a**k
  runs = full / (1 - full) + (a - full) / (1 - full)
  return (k * draft_s * runs + verify_s) * (1 - a)


def closed_form_rows(quick: bool = False) -> list[Check]:
  """Returns the checks; each holds if the two differ by at most 1%."""
  scale = 1 if quick else 2
  return [
    _plain(),
    *(_lockstep(k, a, 4000 * scale) for k, a in ((4, 0.8), (8, 0.7))),
    *(_in_pipe(d, a, 600 * scale) for d in (8, 14) for a in (0.8, 0.9)),
    *(_never_waits(g, a, 4000 * scale) for g, a in ((4, 0.6), (8, 0.8))),
    *(_replicas(k, a, 2000 * scale) for k, a in ((5, 0.9), (3, 0.7))),
    *(_rounds(draft_s) for draft_s in (0.02, 0.08)),
    *(_streams(n) for n in (2, 6)),
  ]


def _plain() -> Check:
  world = World(stage_s=(0.01, 0.02, 0.03), delay_s=(0.1, 0.05, 0.04, 0.2))
  return Check(
    name="plain decoding: a lap per token",
    expected=0.45,
    ours=simulate(world, fixed(0), 0.5, tokens=50).token_s,
  )


def _lockstep(length: int, acceptance: float, tokens: int) -> Check:
  draft = sch.DraftCosts(per_level_s=0.01)
  world = World(stage_s=(0.03, 0.03), delay_s=(0.02,) * 3, draft=draft)
  speed = simulate(world, fixed(length), acceptance, tokens=tokens)
  tokens_a_lap = tokens_per_round(speed.acceptance, length)
  return Check(
    name=f"lockstep, {length} tokens: (T + γ t_d) / Ω(γ, α)",
    expected=(0.12 + length * 0.01) / tokens_a_lap,
    ours=speed.token_s,
  )


def _in_pipe(stages: int, hit: float, tokens: int) -> Check:
  draft = sch.DraftCosts(per_level_s=0.002)
  world = World(stage_s=(0.01,) * stages, draft=draft)
  policy = in_pipe(width=1, in_flight=stages)
  speed = simulate(world, policy, hit, tokens=tokens)
  return Check(
    name=f"a level per stage time, {stages} stages: D (R + 1) / (R + D)",
    expected=in_pipe_speed_up(stages, speed.acceptance),
    ours=world.lap_s / speed.token_s,
  )


def _never_waits(window: int, acceptance: float, tokens: int) -> Check:
  # A window holds what is drafted during a verification but the first token,
  # which the target draws itself. The last one is a moment late: the drafter is
  # about to be free when a rejection comes.
  draft = sch.DraftCosts(per_level_s=1.0001 / (window + 2))
  world = World(stage_s=(1.0,), draft=draft)
  policy = micro_steps(1, in_flight=1, ahead=4 * window)
  speed = simulate(world, policy, acceptance, tokens=tokens)
  return Check(
    name=f"a verifier that never waits, window {window}: (1 − ρ) + ρ Ω(γ, α)",
    expected=tokens_per_step(speed.acceptance, window),
    ours=1 / speed.token_s,
  )


def _replicas(look_ahead: int, acceptance: float, tokens: int) -> Check:
  # The drafter ends the token that it is at when a rejection comes; here that
  # is a moment later.
  draft_s, verify_s = 0.1, 0.999
  world = World(
    stage_s=(0.0,),
    delay_s=(verify_s / 2, verify_s / 2),
    draft=sch.DraftCosts(per_level_s=draft_s),
  )
  policy = micro_steps(look_ahead, in_flight=64, ahead=256)
  speed = simulate(world, policy, acceptance, tokens=tokens)
  return Check(
    name=f"replicas, look-ahead {look_ahead}: k t_d (m + [j > 0]) + t_v",
    expected=replicas_token_s(
      speed.acceptance,
      draft_s=draft_s,
      verify_s=verify_s,
      look_ahead=look_ahead,
    ),
    ours=speed.token_s,
  )


def _rounds(draft_s: float) -> Check:
  step, rtt_s, verify_s = 4, 0.1, 0.1
  world = World(
    stage_s=(verify_s,),
    delay_s=(rtt_s / 2, rtt_s / 2),
    draft=sch.DraftCosts(per_level_s=draft_s),
  )
  policy = micro_steps(step, in_flight=1, ahead=4 * step, most=step)
  speed = simulate(world, policy, 1.0, tokens=800)
  return Check(
    name=f"all accepted, {draft_s:g} s a draft: max(T_draft, RTT + T_verify)",
    expected=max(step * draft_s, rtt_s + verify_s) / step,
    ours=speed.token_s,
  )


def _streams(sequences: int) -> Check:
  world = World(stage_s=(0.02, 0.02), delay_s=(0.02,) * 3)
  speed: Speed = simulate(world, fixed(0), 0.5, tokens=200, sequences=sequences)
  return Check(
    name=f"{sequences} texts at once: min(n / lap, 1 / busiest stage)",
    expected=min(sequences / 0.1, 1 / 0.02),
    ours=speed.tokens_per_s,
  )
