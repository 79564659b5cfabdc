# SPDX-License-Identifier: Apache-2.0
"""What a schedule hears and what it asks for. Time comes in events only."""

import dataclasses
from collections.abc import Callable, Sequence

from wanspec_jax.base import Anchor, Nodes
from wanspec_jax.messages import Cancel, Returned, Run, Sampling
from wanspec_jax.metrics import RoundRecord


@dataclasses.dataclass(frozen=True, kw_only=True)
class Stop:
  """When a text ends, besides its budget.

  Attributes:
    ids: token ids that end the text; the id itself is emitted.
    strings: texts that end it; needs `text_of`. The tokens that complete the
      string are emitted, the text is cut before the string by the printer.
    text_of: `(tokens) -> str`, the tokenizer's decoding of *new* tokens.
  """

  ids: frozenset[int] = frozenset()
  strings: tuple[str, ...] = ()
  text_of: Callable[[Sequence[int]], str] | None = None

  def __post_init__(self):
    if self.strings and self.text_of is None:
      raise ValueError(
        f"Stop.strings = {self.strings!r}: needs Stop.text_of to decode tokens"
      )
    if any(not s for s in self.strings):
      raise ValueError("Stop.strings: an empty string would stop at once")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Request:
  """One text to continue.

  Attributes:
    prompt: token ids, at least one.
    max_new_tokens: budget of emitted tokens; 0 finishes at once.
    sampling: how the target draws.
    stop: when the text ends early.
    log_probs: report each token's log-probability and margin.
    emitted: tokens that an earlier session emitted already: decoding goes on
      behind them, as if it had never stopped. They count against the budget and
      may hold the beginning of a stop string, and are not emitted again.
  """

  prompt: tuple[int, ...]
  max_new_tokens: int
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  stop: Stop = dataclasses.field(default_factory=Stop)
  log_probs: bool = False
  emitted: tuple[int, ...] = ()

  def __post_init__(self):
    if not self.prompt:
      raise ValueError("Request.prompt = (): needs at least one token")
    if self.max_new_tokens < 0:
      raise ValueError(
        f"Request.max_new_tokens = {self.max_new_tokens}: must be >= 0"
      )
    if len(self.emitted) > self.max_new_tokens:
      raise ValueError(
        f"Request.emitted has {len(self.emitted)} tokens: must be at most "
        f"max_new_tokens = {self.max_new_tokens}"
      )


# Events ---------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Submitted:
  """A new request; `sequence` numbers are never reused within a session."""

  time_s: float
  sequence: int
  request: Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Drafted:
  """The drafter's answer to a `Draft`."""

  time_s: float
  sequence: int
  ticket: int
  anchors: tuple[Anchor, ...]
  nodes: Nodes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arrived:
  """A run came back from the tail."""

  time_s: float
  returned: Returned


@dataclasses.dataclass(frozen=True, kw_only=True)
class Aborted:
  """The client is gone."""

  time_s: float
  sequence: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Woke:
  """The time came that a `Wake` asked for."""

  time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Faulted:
  """The ring broke and stands again, empty: what was in flight is lost.

  Every sequence goes on from its committed tokens, which are replayed under a
  new epoch; draws are addressed by position, so the text is the same.
  """

  time_s: float


Event = Submitted | Drafted | Arrived | Aborted | Woke | Faulted


# Actions --------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Draft:
  """Ask the drafter for at most `budget` nodes below the anchors, none deeper
  than `levels` below its anchor; the answer bears the `ticket`."""

  sequence: int
  ticket: int
  anchors: tuple[Anchor, ...]
  budget: int
  levels: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Observe:
  """Tell the drafter what was committed: `tokens` lead to the new `root`."""

  sequence: int
  root: int
  tokens: tuple[int, ...]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Launch:
  """Send a run to the head."""

  run: Run


@dataclasses.dataclass(frozen=True, kw_only=True)
class CancelRows:
  """Send a cancel against the flow: to the tail first, then up the ring."""

  cancel: Cancel


@dataclasses.dataclass(frozen=True, kw_only=True)
class Wake:
  """Send a `Woke` at this time, on the clock of the events."""

  time_s: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emit:
  """New canonical tokens of a sequence, cut at its end."""

  sequence: int
  tokens: tuple[int, ...]
  log_probs: tuple[float, ...] = ()
  margins: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admit:
  """A sequence leaves the queue; its drafter state is made now."""

  sequence: int
  request: Request


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finish:
  """A sequence ended: `stop` (id), `stop_string`, `length`, `aborted`, or
  `refused` for what can never be served, with the rule that it breaks.
  """

  sequence: int
  reason: str
  rounds: tuple[RoundRecord, ...] = ()
  detail: str = ""


Action = Draft | Observe | Launch | CancelRows | Wake | Emit | Admit | Finish
