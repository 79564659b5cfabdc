# SPDX-License-Identifier: Apache-2.0
"""What a verdict means: commit, what it killed, and where a text ends."""

from wanspec_jax.messages import Cancel, Verdict
from wanspec_jax.metrics import RoundRecord
from wanspec_jax.schedules import _events as ev
from wanspec_jax.schedules._speculation import (
  Node,
  Speculation,
  commit_tokens,
)
from wanspec_jax.schedules._state import EngineState

_SPARE_TOKENS = 8


def apply_verdict(
  state: EngineState, verdict: Verdict, now_s: float
) -> list[ev.Action]:
  """Commits what the tail drew, cut at the first reason to stop."""
  entry = state.sequences[verdict.sequence]
  spec = entry.spec
  drafted, spec.drafted = spec.drafted, 0
  _calibrate(state, spec, verdict.tokens)
  # All but the last draw were found among the nodes. The last one was tested if
  # its tip had launched children, and passed if one of them, still on its way,
  # bears it.
  found = len(verdict.tokens) - 1
  tip = spec.descend(verdict.tokens[:-1])
  tested = found + any(
    spec.nodes[child].run is not None for child in spec.below.get(tip, ())
  )
  _, dead = commit_tokens(spec, verdict.tokens)
  spec.verdicts += 1
  spec.recent.append((now_s, len(spec.tokens)))
  spec.misses = 0 if spec.root_launched else spec.misses + 1
  accepted = found + spec.root_launched
  kept, reason = 0, None
  while reason is None and kept < len(verdict.tokens):
    entry.emitted.append(verdict.tokens[kept])
    reason = stop_reason(entry.request, entry.emitted, entry.budget)
    kept += 1
  if kept <= accepted:  # what lies behind the end was not decoded
    tested = accepted = kept
  entry.rounds.append(
    RoundRecord(drafted=drafted, tested=tested, accepted=accepted, emitted=kept)
  )
  spec.remaining = entry.budget - len(entry.emitted)
  actions: list[ev.Action] = [
    ev.Emit(
      sequence=verdict.sequence,
      tokens=verdict.tokens[:kept],
      log_probs=verdict.log_probs[:kept],
      margins=verdict.margins[:kept],
    )
  ]
  if reason is not None:
    return actions + finish(state, verdict.sequence, reason)
  actions.append(
    ev.Observe(sequence=verdict.sequence, root=spec.root, tokens=verdict.tokens)
  )
  return actions + _cancels(state, spec, [node.id for node in dead])


def _calibrate(
  state: EngineState, spec: Speculation, tokens: tuple[int, ...]
) -> None:
  """Tests every node that hung from a token which the verdict passed."""
  at = spec.root
  for token in tokens:
    below = spec.below.get(at, ())
    for child in below:
      node: Node = spec.nodes[child]
      state.calibration.observe(node.log_q, node.level, node.token == token)
    found = spec.children.get((at, token), -1)
    if below:
      state.pipe.note_hit(found >= 0)
    at = found


def _cancels(
  state: EngineState, spec: Speculation, dead: list[int]
) -> list[ev.Action]:
  """Returns a cancel for those of the dead that are still on their way."""
  if not state.policy.cancels or not dead or not spec.flights:
    return []
  gone = set(dead)
  ids = tuple(
    node for flight in spec.flights for node in flight.ids if node in gone
  )
  if not ids:
    return []
  return [
    ev.CancelRows(
      cancel=Cancel(
        epoch=state.epoch,
        before_run=state.next_run,
        nodes=((spec.sequence, ids),),
      )
    )
  ]


def stop_reason(
  request: ev.Request, emitted: list[int], budget: int
) -> str | None:
  """Returns why a text ends with the last of its tokens; None if it does
  not."""
  stop = request.stop
  if emitted and emitted[-1] in stop.ids:
    return "stop"
  if emitted and stop.strings:
    text = _last_text(stop, emitted)
    if any(s in text for s in stop.strings):
      return "stop_string"
  if len(emitted) >= budget:
    return "length"
  return None


def _last_text(stop: ev.Stop, emitted: list[int]) -> str:
  """Returns the end of the text, as far back as a stop string may reach that
  the last token completes."""
  assert stop.text_of is not None
  longest = max(len(s.encode()) for s in stop.strings)
  # Most tokens are a byte or more. The spare ones cover a character that the
  # window's edge cuts; tokens without text make the window grow.
  window = longest + _SPARE_TOKENS
  while window < len(emitted):
    if len(stop.text_of(emitted[-window:-1])) >= longest + _SPARE_TOKENS // 2:
      break
    window *= 2
  return stop.text_of(emitted[-window:])


def finish(state: EngineState, sequence: int, reason: str) -> list[ev.Action]:
  """Ends a sequence; what is left of it on the stages goes with a close."""
  entry = state.sequences.pop(sequence)
  state.pipe.num_sequences = len(state.sequences)
  if state.opens.pop(sequence, None) is None:
    state.closes.append(sequence)  # the stages know it
  actions = _cancels(
    state, entry.spec, [n for f in entry.spec.flights for n in f.ids]
  )
  return [
    *actions,
    ev.Finish(sequence=sequence, reason=reason, rounds=tuple(entry.rounds)),
  ]
