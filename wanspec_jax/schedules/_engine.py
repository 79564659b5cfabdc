# SPDX-License-Identifier: Apache-2.0
"""The engine: one growing tree per sequence, driven by events.

`step(state, event) -> (state, actions)` knows nodes, runs, verdicts, commits,
cancels and slots; a *policy* decides what to draft and what to launch. No
sockets, no clocks, no threads, no randomness: the same engine runs in every
world. The state passed to `step` is donated: use the one that comes back.
"""

import collections

from wanspec_jax.schedules import _events as ev
from wanspec_jax.schedules._calibration import Calibration
from wanspec_jax.schedules._launching import (
  admit,
  ask_policy,
  begin,
  free_slots,
)
from wanspec_jax.schedules._pipe import Costs, Pipe
from wanspec_jax.schedules._speculation import add_nodes, start
from wanspec_jax.schedules._state import EngineState, Policy
from wanspec_jax.schedules._verdicts import apply_verdict, finish


def init(
  policy: Policy,
  costs: Costs,
  *,
  capacity: int,
  prefill_rows: int,
  calibration: Calibration | None = None,
) -> EngineState:
  """Returns an engine with nothing to do.

  Args:
    policy: see `Policy`.
    costs: see `Costs`.
    capacity: KV slots that every stage has.
    prefill_rows: rows per prompt chunk; chunks follow each other through the
      pipe without waiting.
    calibration: what is known of drafter and ring; learned afresh by default.
      It is shared, not copied: what this engine learns goes into it.
  """
  for field, value, high in (
    ("capacity", capacity, None),
    ("prefill_rows", prefill_rows, costs.max_rows),
  ):
    if value < 1 or (high is not None and value > high):
      raise ValueError(
        f"{field} = {value}: must be at least 1"
        + (f" and at most max_rows = {high}" if high is not None else "")
      )
  calibration = Calibration() if calibration is None else calibration
  return EngineState(
    policy=policy,
    pipe=Pipe(costs, calibration.crowding),
    calibration=calibration,
    capacity=capacity,
    prefill_rows=prefill_rows,
    queue=collections.deque(),
    sequences={},
    next_run=0,
    epoch=0,
    runs={},
    closes=[],
    opens={},
    next_ticket=0,
  )


def step(
  state: EngineState, event: ev.Event
) -> tuple[EngineState, list[ev.Action]]:
  """Applies one event; returns the state and what the world must do, in order.

  Whoever was touched by the event is asked first, then everybody else whose
  turn may have come: slots and pipe are shared.
  """
  if not isinstance(event, ev.Event):
    raise TypeError(f"not an event: {event!r}")
  actions: list[ev.Action] = []
  touched: int | None = None
  now_s = event.time_s
  match event:
    case ev.Submitted(sequence=sequence, request=request):
      if len(request.prompt) >= state.capacity:
        actions.append(_refuse(state, sequence, request))
      else:
        state.queue.append((sequence, request))
    case ev.Arrived(returned=returned):
      # A run of a closed sequence, or of before a fault, may still return: its
      # verdicts are void.
      touched = state.runs.pop(returned.run_id, None)
      if returned.epoch == state.epoch:
        if touched in state.sequences:
          flights = state.sequences[touched].spec.flights
          if flights and flights[0].run == returned.run_id:
            flight = flights.popleft()
            state.pipe.crowding.note_return(
              now_s - flight.return_s,
              flight.others + len(state.runs),
              len(flight.ids),
            )
        for verdict in returned.verdicts:
          if verdict.sequence in state.sequences:
            actions += apply_verdict(state, verdict, now_s)
    case ev.Drafted(sequence=sequence, ticket=ticket):
      if sequence in state.sequences:
        spec = state.sequences[sequence].spec
        if spec.drafting and spec.ticket == ticket:
          touched = sequence
          add_nodes(
            spec, event.anchors, event.nodes, state.calibration.estimate
          )
          spec.drafted_root = spec.trail[0][0]
          spec.drafting = ()
    case ev.Aborted(sequence=sequence):
      waiting = [item for item in state.queue if item[0] != sequence]
      if len(waiting) < len(state.queue):
        state.queue = collections.deque(waiting)
        actions.append(ev.Finish(sequence=sequence, reason="aborted"))
      if sequence in state.sequences:
        actions += finish(state, sequence, "aborted")
    case ev.Woke():
      pass
    case ev.Faulted():
      actions += _rebuild(state, now_s)
  while True:
    admit(state, actions, now_s)
    before = len(actions)
    for sequence in _in_turn(state, touched):
      actions += ask_policy(state, sequence, now_s)
    actions += free_slots(state, now_s)
    # What was sent may have freed the slots that a request waits for.
    if not state.queue or len(actions) == before:
      return state, actions


def _in_turn(state: EngineState, touched: int | None) -> list[int]:
  """Returns all sequences, the one that an event is about first, then those
  that have waited longest since their last launch."""
  order = sorted(
    state.sequences,
    key=lambda s: (s != touched, _last_launch_s(state, s), s),
  )
  return order


def _last_launch_s(state: EngineState, sequence: int) -> float:
  flights = state.sequences[sequence].spec.flights
  return flights[-1].launched_s if flights else -1.0


def _refuse(
  state: EngineState, sequence: int, request: ev.Request
) -> ev.Action:
  return ev.Finish(
    sequence=sequence,
    reason="refused",
    detail=(
      f"Request.prompt of {len(request.prompt)} tokens: needs fewer than the "
      f"stages' capacity of {state.capacity} slots"
    ),
  )


def _rebuild(state: EngineState, now_s: float) -> list[ev.Action]:
  """Starts every sequence anew from what is committed, under a new epoch."""
  state.epoch += 1
  state.runs.clear()
  state.closes = []
  state.opens.clear()
  state.pipe.clear()
  actions: list[ev.Action] = []
  for sequence, entry in state.sequences.items():
    old = entry.spec
    entry.wake_s = None
    entry.spec = start(
      sequence,
      tuple(old.tokens),
      old.remaining,
      prompt_length=old.prompt_length,
    )
    entry.spec.verdicts = old.verdicts
    entry.spec.recent = old.recent
    actions += begin(state, sequence, now_s)
  return actions
