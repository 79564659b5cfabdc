# SPDX-License-Identifier: Apache-2.0
"""Saguaro against tuned ordinary speculation.

https://arxiv.org/abs/2603.03251: greedy, one text at a time, the target on four
devices and the drafter on a fifth.
"""

from typing import NamedTuple

from experiments.studies._published.policies import outcome_hedges
from experiments.studies._published.row import (
  ASSUMED,
  PUBLISHED,
  Input,
  Row,
  derived,
)
from experiments.studies._published.world import (
  World,
  acceptance_for,
  simulate,
  tokens_per_round,
)
from wanspec_jax import schedules as sch

_LENGTH, _LOCKSTEP_LENGTH, _FAN_OUT, _HIT = 7, 6, 3, 0.9


class _Pair(NamedTuple):
  """Tokens/s of a pair of models: plain, tuned lockstep, Saguaro; layers of
  the drafter."""

  plain: float
  lockstep: float
  saguaro: float
  draft_layers: int


_LLAMA = _Pair(54.7, 161.8, 255.8, 16)
_QWEN = _Pair(88.8, 136.8, 203.8, 28)
_ALPACA_LOCKSTEP = 145.0


def best_length(verify_s: float, draft_s: float, acceptance: float) -> int:
  """Returns the length at which ordinary speculation is fastest."""
  return max(
    range(1, 17),
    key=lambda k: tokens_per_round(acceptance, k) / (verify_s + k * draft_s),
  )


def draft_time_s() -> float:
  """Returns the middle of the drafting times for which tuning lockstep yields
  the published length of 6 at the rate published for Alpaca."""
  verify_s, length = 1 / _LLAMA.plain, _LOCKSTEP_LENGTH
  fits = []
  for step in range(1, 200):
    draft_s = step * 2e-5
    tokens = _ALPACA_LOCKSTEP * (verify_s + length * draft_s)
    if 1 < tokens < length + 1:
      a = acceptance_for(tokens, length)
      if best_length(verify_s, draft_s, a) == length:
        fits.append(draft_s)
  return (fits[0] + fits[-1]) / 2


def residual_hits(acceptance: float, length: int, hit: float) -> float:
  """Returns which share of rejections must find the target's token among the
  hedges for a share `hit` of all verdicts to land on one.

    hit = (1 − α^K) h + α^K (α + (1 − α) h)
  """
  full = acceptance**length
  return (hit - full * acceptance) / (1 - full * acceptance)


def saguaro(quick: bool) -> list[Row]:
  """Returns tokens/s of two pairs; tuned lockstep's fix the acceptance."""
  tokens = 800 if quick else 3000
  llama_s = draft_time_s()
  rows = []
  for name, pair in (("Llama-3.1-70B", _LLAMA), ("Qwen3-32B", _QWEN)):
    draft_s = llama_s * pair.draft_layers / _LLAMA.draft_layers

    def ours(draft_s: float, hit: float, pair=pair) -> tuple[float, float]:
      verify_s, k = 1 / pair.plain, _LOCKSTEP_LENGTH
      a = acceptance_for(pair.lockstep * (verify_s + k * draft_s), k)
      h = max(residual_hits(a, _LENGTH, hit), 0.0)
      ranks = [a] + [h * (1 - a) / _FAN_OUT] * _FAN_OUT
      world = World(
        stage_s=(verify_s,), draft=sch.DraftCosts(per_level_s=draft_s)
      )
      policy = outcome_hedges(_LENGTH)
      return simulate(world, policy, ranks, tokens=tokens).tokens_per_s, a

    rate, a = ours(draft_s, _HIT)
    spread = None
    if not quick:
      others = [
        ours(draft_s * f, hit)[0]
        for f, hit in ((0.8, _HIT), (1.25, _HIT), (1.0, 0.8))
      ]
      spread = (min(rate, *others), max(rate, *others))
    is_llama = pair is _LLAMA
    rows.append(
      Row(
        system="Saguaro",
        figure=f"{name}, tokens/s",
        low=pair.saguaro,
        ours=rate,
        spread=spread,
        inputs=(
          Input("verification", 1e3 / pair.plain, "ms", PUBLISHED),
          Input(
            "drafting a token",
            1e3 * draft_s,
            "ms",
            derived("tuned lockstep on Alpaca: its best length is 6")
            if is_llama
            else ASSUMED,
            "" if is_llama else "as Llama's, by the number of layers",
          ),
          Input(
            "acceptance",
            a,
            "",
            derived(f"tuned lockstep, {pair.lockstep} tokens/s"),
          ),
          Input("verdicts that land on a hedge", _HIT, "", PUBLISHED, "up to"),
          Input("hedges per node", _FAN_OUT, "", PUBLISHED),
          Input("length of chains", _LENGTH, "tokens", PUBLISHED),
        ),
        weak=""
        if is_llama
        else "off if drafting takes a quarter longer than assumed",
        note="spread: drafting 0.8 and 1.25 times as long; 80% of hits",
      )
    )
  return rows
