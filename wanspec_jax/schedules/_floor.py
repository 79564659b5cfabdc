# SPDX-License-Identifier: Apache-2.0
"""A floor under any policy: plain decoding, less a small share."""

import dataclasses

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Policy, Send

_TRIAL = 3.0  # laps that a trial may lose
_CREDIT = 4.0  # laps that gains may be saved up for
_FORGET = 8  # plain laps over which their time is averaged


@dataclasses.dataclass(slots=True)
class _Account:
  """What one sequence has gained over plain decoding.

  Attributes:
    lap_s: time of a plain lap, as modelled and then as measured.
    tokens: committed at the last look.
    time_s: of the last look.
    balance_s: plain decoding's time for the tokens so far less the time taken,
      at most `_CREDIT` laps.
    is_trial: whether the inner policy is at work.
    plain_from_s: when the plain lap under way began; None if the inner policy's
      runs are still among those in flight.
  """

  lap_s: float
  tokens: int
  time_s: float
  balance_s: float = 0.0
  is_trial: bool = True
  plain_from_s: float | None = None


def with_floor(policy: Policy, *, share: float = 0.03) -> Policy:
  """Returns the policy, held back wherever it loses to plain decoding.

  Each sequence has an account: every token is worth the time of a plain lap
  (the root alone, one run in flight), and time is what it costs. Text that
  comes faster than plainly earns credit, up to 4 laps of it. The inner policy
  decides until it has lost 3 laps beyond its credit; then decoding goes on
  plainly until `share` of each lap has made up for them, and the next trial
  begins. A policy that pays is never interrupted.

  So the time of a text exceeds plain decoding's by `share` in the long run, and
  by the first trial. What is in flight when a trial ends still takes its time
  on links and stages; cancels meet it.

  The accounts live in the closure, keyed by sequence; an engine calls `decide`
  in the order of its events, so they are as deterministic as those. Use one
  `with_floor` per engine.

  Args:
    policy: the inner policy.
    share: of plain decoding's time, spent on trials of a policy that loses.
  """
  if not 0 < share < 1:
    raise ValueError(f"share = {share}: must lie in (0, 1)")
  accounts: dict[int, _Account] = {}

  def look(spec: Speculation, pipe: Pipe, time_s: float) -> _Account:
    account = accounts.get(spec.sequence)
    if account is None:
      account = accounts[spec.sequence] = _Account(
        lap_s=pipe.costs.lap_s(1), tokens=len(spec.tokens), time_s=time_s
      )
    gained = len(spec.tokens) - account.tokens
    spent_s = time_s - account.time_s
    account.tokens, account.time_s = len(spec.tokens), time_s
    if gained and account.plain_from_s is not None:
      sample_s = (time_s - account.plain_from_s) / gained
      account.lap_s += (sample_s - account.lap_s) / _FORGET
    worth = 1.0 if account.is_trial else 1.0 + share
    account.balance_s = min(
      account.balance_s + gained * worth * account.lap_s - spent_s,
      _CREDIT * account.lap_s,
    )
    if account.is_trial:
      account.plain_from_s = None
      account.is_trial = account.balance_s >= -_TRIAL * account.lap_s
    else:
      account.is_trial = account.balance_s >= 0
    return account

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    account = look(spec, pipe, time_s)
    if account.is_trial:
      return policy.decide(spec, pipe, time_s)
    if spec.root_launched:
      return None
    account.plain_from_s = None if spec.flights else time_s
    return Send(())

  return policy._replace(name=f"with_floor({policy.name})", decide=decide)
