# SPDX-License-Identifier: Apache-2.0
"""A floor under any policy: plain decoding, less a small share."""

import dataclasses
import math
import weakref

from wanspec_jax.schedules._pipe import Pipe
from wanspec_jax.schedules._speculation import Speculation
from wanspec_jax.schedules._state import Answer, Grow, Hold, Policy, Send

_FIRST = 3.0  # laps that may be lost while the drafter is not known yet
_TRIAL = 1.0  # laps that may be saved up for a trial
_MEMORY = 32  # plain laps over which their time is averaged
_OUTLIER = 1.5  # laps; a plain one that took longer counts as so many


@dataclasses.dataclass(slots=True)
class _Account:
  """What one sequence may lose against plain decoding at the moment.

  Attributes:
    flights: tells one `Speculation` of the sequence from the next.
    lap_s: time of a plain lap, as modelled and then as measured.
    tokens: committed at the last look.
    learned: number of tokens at which the learning ends.
    purse_s: seconds that may be lost.
    gain_s: plain decoding's time for all tokens less the time taken.
    since_s: of the last commit; None before the first.
    plain_s: when a root was launched alone into an empty pipe; None otherwise.
    due_s: when the first run in flight should be back.
    run_s: how long that run should take.
    foreseen_s: what was known to be lost on the verdict that is due.
    margin_s: what was lost of late that was not.
    drafted_s: when a draft was last under way.
    is_drafting: whether one was at the last look.
  """

  flights: weakref.ref
  lap_s: float
  tokens: int
  learned: int
  purse_s: float
  gain_s: float = 0.0
  since_s: float | None = None
  plain_s: float | None = None
  due_s: float = 0.0
  run_s: float = 0.0
  foreseen_s: float = 0.0
  margin_s: float = 0.0
  drafted_s: float = 0.0
  is_drafting: bool = False

  def note_commit(self, tokens: int, time_s: float, share: float) -> None:
    """Books the tokens of a verdict, and the time that they took."""
    # A run that takes twice its time, and a lap, was held up by the weather,
    # which plain decoding would have met as well.
    end_s = max(self.due_s, self.drafted_s) + self.run_s + self.lap_s
    end_s = min(time_s, end_s)
    if self.plain_s is not None:
      sample_s = min(end_s - self.plain_s, _OUTLIER * self.lap_s)
      self.lap_s += (sample_s - self.lap_s) / _MEMORY
    self.plain_s = None
    if self.since_s is not None:
      worth_s = (tokens - self.tokens) * self.lap_s
      spent_s = max(end_s - self.since_s, 0.0)
      gain_s = worth_s - spent_s
      beyond_s = spent_s - self.foreseen_s - self.lap_s
      self.margin_s *= 1 - 1 / _MEMORY
      if end_s == time_s:
        self.margin_s = max(self.margin_s, beyond_s)
      self.gain_s += gain_s
      laps = _FIRST if tokens < self.learned else _TRIAL
      self.purse_s = min(
        self.purse_s + gain_s + share * worth_s,
        laps * self.lap_s + max(self.gain_s, 0.0) / 2,
      )
    self.tokens, self.since_s, self.foreseen_s = tokens, time_s, 0.0

  def look(self, spec: Speculation, time_s: float, share: float) -> None:
    """Takes note of what has happened since the last look."""
    if self.is_drafting:  # on a stage's device, maybe
      self.drafted_s, self.plain_s = time_s, None
    if len(spec.tokens) > self.tokens:
      self.note_commit(len(spec.tokens), time_s, share)
    if spec.flights:
      self.due_s = spec.flights[0].return_s
      self.run_s = self.due_s - spec.flights[0].launched_s
    self.is_drafting = bool(spec.drafting)


def with_floor(
  policy: Policy, *, share: float = 0.02, learning: int = 32
) -> Policy:
  """Returns the policy, held back wherever it would lose to plain decoding.

  Each sequence has a purse of seconds that may be lost. A token pays in the
  time of a plain lap (the root alone, one run in flight) and `share` of that on
  top; the time that it took is paid out. Whatever the policy wants is priced
  first, by the costs of the ring and what is queued on it:

  * nodes that ride with the root: how much later the tail has walked it;
  * nodes behind a root under way: how long the next root, launched when the
    first verdict is due, would queue because of them and those before;
  * either: what they cost the other sequences, which is paid to their purses;
  * a draft that the root waits for: a level of it, and when the root has waited
    for as long as the purse lasts, it goes alone.

  Of what the purse does not cover only a prefix is sent, or the root alone, at
  once; with an empty purse decoding is plain. So a policy that loses goes on in
  trials that take `share` of the time, the smallest ones that it can make. One
  that pays earns itself larger ones: the purse holds at most 1.25 laps (3 while
  learning) and half of all that was gained.

  A hopeless drafter then costs, over n tokens after the first `learning`, at
  most `share` n + 1.25 laps, and what the costs did not foresee; of that the
  purse recovers before the policy is asked again. With the defaults this is
  less than 1/0.95 of plain decoding's time for n of 60 or more.

  The purses live in the closure, keyed by sequence; an engine calls `decide` in
  the order of its events, so they are as deterministic as those. A fault starts
  the clock anew, the purse stays. Use one `with_floor` per engine.

  Args:
    policy: the inner policy.
    share: of plain decoding's time, spent on trials of a policy that loses.
    learning: tokens at the beginning of a text that may lose 3 laps.

  Raises:
    ValueError: `share` outside (0, 1), or `learning` negative.
  """
  if not 0 < share < 1:
    raise ValueError(f"share = {share}: must lie in (0, 1)")
  if learning < 0:
    raise ValueError(f"learning = {learning}: must be >= 0")
  accounts: dict[int, _Account] = {}

  def account_of(spec: Speculation, pipe: Pipe) -> _Account:
    old = accounts.get(spec.sequence)
    if old is not None and old.flights() is spec.flights:
      return old
    costs = pipe.costs
    lap_s = max(costs.lap_s(1), pipe.num_sequences * costs.occupancy_s(1))
    new = _Account(
      flights=weakref.ref(spec.flights),
      lap_s=lap_s,
      tokens=len(spec.tokens),
      learned=len(spec.tokens) + learning,
      purse_s=_FIRST * lap_s,
    )
    if old is not None and spec.verdicts:  # a fault: its time is nobody's
      new = dataclasses.replace(
        old, flights=new.flights, since_s=None, plain_s=None
      )
    accounts[spec.sequence] = new
    return new

  def decide(spec: Speculation, pipe: Pipe, time_s: float) -> Answer:
    account = account_of(spec, pipe)
    account.look(spec, time_s, share)
    purse_s = account.purse_s - account.margin_s
    answer = policy.decide(spec, pipe, time_s) if purse_s > 0 else None
    start_s = time_s if account.since_s is None else account.since_s
    if isinstance(answer, Send) and answer.ids:
      ids, families = answer.ids, policy.keeps_children
      ids = _affordable(spec, pipe, ids, time_s, purse_s, families)
      answer = Send(ids) if ids or not spec.root_launched else None
      account.foreseen_s = max(
        account.foreseen_s, _price_s(spec, pipe, len(ids), time_s)
      )
      toll_s = _toll_s(spec, pipe, len(ids))
      for other in accounts.values():
        if toll_s and other is not account and other.flights() is not None:
          other.purse_s += toll_s
          account.purse_s -= toll_s
    if spec.root_launched:
      return answer
    if not isinstance(answer, Send):  # the root is to wait, but for how long?
      is_draft = isinstance(answer, Grow)
      least_s = pipe.costs.draft.seconds(1, 1) if is_draft else 0.0
      if time_s + least_s < start_s + purse_s:
        if is_draft:
          return answer
        until_s = answer.until_s if isinstance(answer, Hold) else math.inf
        return Hold(min(until_s, start_s + purse_s))
      if spec.in_flight > policy.max_in_flight:
        return answer
      answer = Send(())
    account.foreseen_s += time_s - start_s
    if not (answer.ids or spec.flights or account.since_s is None):
      account.plain_s = time_s if pipe.num_sequences == 1 else None
    return answer

  return policy._replace(
    name=f"with_floor({policy.name})",
    decide=decide,
    # The inner policy's runs may all be on their way when the root goes alone.
    max_in_flight=policy.max_in_flight + 1,
  )


def _toll_s(spec: Speculation, pipe: Pipe, count: int) -> float:
  """Returns what so many nodes cost each other sequence: the time that they
  keep the busiest link or stage, by the share of time that it is busy."""
  if pipe.num_sequences < 2 or not count:
    return 0.0
  costs = pipe.costs
  extra_s = costs.occupancy_s(count)
  if not spec.root_launched:
    extra_s = costs.occupancy_s(count + 1) - costs.occupancy_s(1)
  load = pipe.num_sequences * costs.occupancy_s(count + 1) / costs.lap_s(1)
  return extra_s * min(1.0, load)


def _price_s(spec: Speculation, pipe: Pipe, count: int, time_s: float) -> float:
  """Returns what a run of so many nodes, now, costs all sequences."""
  if not count:
    return 0.0
  if spec.root_launched:
    due_s = spec.flights[0].return_s if spec.flights else time_s
    own_s = pipe.queue_s(count, time_s, max(due_s, time_s))
  else:
    own_s = pipe.tail_s(count + 1, time_s) - pipe.tail_s(1, time_s)
  return own_s + (pipe.num_sequences - 1) * _toll_s(spec, pipe, count)


def _affordable(
  spec: Speculation,
  pipe: Pipe,
  ids: tuple[int, ...],
  time_s: float,
  purse_s: float,
  families: bool,
) -> tuple[int, ...]:
  """Returns the longest prefix of the nodes that costs at most `purse_s`; one
  that parts no siblings, if rules want them in one run."""
  parents = [spec.nodes[node].parent for node in ids]
  if families:
    order = sorted(
      range(len(ids)), key=lambda i: (parents.index(parents[i]), i)
    )
    ids = tuple(ids[i] for i in order)
    parents = [parents[i] for i in order]
  low, high = 0, len(ids)
  while low < high:
    middle = (low + high + 1) // 2
    if _price_s(spec, pipe, middle, time_s) <= purse_s:
      low = middle
    else:
      high = middle - 1
  while families and 0 < low < len(ids) and parents[low - 1] == parents[low]:
    low -= 1
  return ids[:low]
