# SPDX-License-Identifier: Apache-2.0
"""Tables that compare arms: the same prompts decoded in several ways."""

import dataclasses
import io
import math
import statistics
from collections.abc import Sequence
from typing import Any, TextIO

from rich import box
from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from wanspec_jax import metrics
from wanspec_jax.wire import TRAFFIC_CLASSES, ByteCounter
from wanspec_jax.worlds import Outcome, SessionResult

WIDTH = 100  # columns where there is no terminal to ask
CLOCKS = {"virtual": "virtual (modelled)", "sockets": "wall clock"}

_DEFINITIONS = (
  "tokens/s: decoding only, Σ(tokens - first block) / Σ(last emission - first "
  "emission), each sequence on its own. Speed-up: Σ seconds from submission to "
  "end, prompt included, {baseline} / this arm, over the prompts with equal "
  "tokens; none if more than one prompt differs. Laps: verdict rounds. "
  "Acceptance: accepted / tested nodes. Wasted: drafted nodes that did not "
  "become text. First token: median from submission to first emission."
)
_BYTES = (
  "All links together, the prompt's lap and every header included, per emitted "
  "token; what TCP and TLS add is not."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One way of decoding, and what came of it.

  Attributes:
    name: e.g. `"plain"`, `"speculative"`.
    world: `"virtual"` or `"sockets"`: whose clock the times are of.
    outcomes: one per prompt, in the order of the prompts.
    bytes: what went over the links in the whole session.
    replayed: whether the tokens were replayed instead of computed.
    faults: `(stage, cause)` of every failure that was survived.
  """

  name: str
  world: str
  outcomes: Sequence[Outcome]
  bytes: ByteCounter
  replayed: bool = False
  faults: Sequence[tuple[str, str]] = ()

  def __post_init__(self):
    if self.world not in CLOCKS:
      raise ValueError(
        f"Arm.world = {self.world!r}: must be one of {tuple(CLOCKS)}"
      )
    if not self.outcomes:
      raise ValueError(f"Arm {self.name!r} has no outcomes: must have one")

  @classmethod
  def from_session(
    cls, name: str, result: SessionResult, *, replayed: bool = False
  ) -> "Arm":
    """Returns the arm of one session, outcomes by sequence number."""
    return cls(
      name=name,
      world=result.world,
      outcomes=tuple(result.outcomes[i] for i in sorted(result.outcomes)),
      bytes=result.bytes,
      replayed=replayed,
    )

  @property
  def summary(self) -> metrics.Summary:
    """Figures over the rounds of all prompts together."""
    return metrics.summarize(
      [r for outcome in self.outcomes for r in outcome.rounds]
    )

  @property
  def num_tokens(self) -> int:
    """Emitted tokens of all prompts."""
    return sum(len(outcome.tokens) for outcome in self.outcomes)

  @property
  def tokens_per_s(self) -> float:
    """Decoding rate of a sequence in tokens/s; see `decode_rate`."""
    return decode_rate(self.outcomes)

  @property
  def first_token_s(self) -> float:
    """Median seconds from submission, queueing included, to the first token."""
    waits = [
      o.emitted_s[0] - o.submitted_s for o in self.outcomes if o.emitted_s
    ]
    return statistics.median(waits) if waits else math.nan

  @property
  def bytes_per_token(self) -> dict[str, float]:
    """Bytes ÷ emitted tokens, by traffic class and `total`."""
    return metrics.bytes_per_token(self.bytes.by_class(), self.num_tokens)

  def num_identical(self, baseline: "Arm") -> int:
    """Returns how many prompts gave the baseline's tokens exactly.

    Raises:
      ValueError: if the two arms did not decode the same prompts.
    """
    _check_same_prompts(baseline, self)
    pairs = zip(baseline.outcomes, self.outcomes, strict=True)
    return sum(a.tokens == b.tokens for a, b in pairs)

  def speedup(self, baseline: "Arm") -> metrics.Speedup:
    """Returns the speed-up in `total_s` over the identical prompts.

    Raises:
      ValueError: see `metrics.speedup`; also if the clocks differ.
    """
    _check_same_prompts(baseline, self)
    if self.world != baseline.world:
      raise ValueError(
        f"{self.name} ran on {CLOCKS[self.world]} time, {baseline.name} on "
        f"{CLOCKS[baseline.world]} time: a speed-up needs one clock"
      )
    return metrics.speedup(
      *(
        [
          metrics.PromptRun(tokens=tuple(o.tokens), seconds=o.total_s)
          for o in arm.outcomes
        ]
        for arm in (baseline, self)
      )
    )


def decode_rate(outcomes: Sequence[Outcome]) -> float:
  """Returns Σ(tokens - first block) ÷ Σ decode_s in tokens/s, NaN over 0 s.

  The first block is every token emitted at the time of the first one: the
  prompt's lap paid for it, and that lap is not in `decode_s`. Sequences that
  decode side by side count their own seconds each.
  """
  num_tokens = sum(
    len(o.tokens) - o.emitted_s.count(o.emitted_s[0])
    for o in outcomes
    if o.emitted_s
  )
  seconds = sum(o.decode_s for o in outcomes)
  return num_tokens / seconds if seconds > 0 else math.nan


def first_difference(
  tokens: Sequence[int], others: Sequence[int]
) -> int | None:
  """Returns the first position at which two texts differ; None if nowhere."""
  for i, (a, b) in enumerate(zip(tokens, others, strict=False)):
    if a != b:
      return i
  shorter = min(len(tokens), len(others))
  return None if len(tokens) == len(others) else shorter


def arm_figures(arm: Arm, baseline: Arm | None = None) -> dict[str, Any]:
  """Returns what the tables show of an arm, unrounded, for `result.json`.

  Args:
    arm: the arm.
    baseline: if given, adds `identical` (`"k/n"`) and `speedup` (NaN if
      refused).
  """
  figures: dict[str, Any] = {
    "world": arm.world,
    "clock": CLOCKS[arm.world],
    "tokens_replayed": arm.replayed,
    "tokens": arm.num_tokens,
    "tokens_per_s": arm.tokens_per_s,
    "first_token_s": arm.first_token_s,
    "bytes_per_token": arm.bytes_per_token,
    "summary": dataclasses.asdict(arm.summary),
  }
  if baseline is not None:
    figures["identical"] = _identical(arm, baseline)
    try:
      figures["speedup"] = arm.speedup(baseline).ratio
    except ValueError:
      figures["speedup"] = math.nan
  return figures


def comparison_table(rows: Sequence[Arm]) -> RenderableType:
  """Returns two tables, an arm a row each: decoding, and bytes per token.

  The first arm is the baseline: identical tokens and speed-ups are against it.
  The captions define every figure and say whether its time was wall clock or
  virtual and whether its tokens were real or replayed.

  Raises:
    ValueError: if there are no arms or their prompts differ.
  """
  _check_arms(rows)
  baseline = rows[0]
  decoding = _table(
    "Decoding",
    ["arm"],
    [
      "identical",
      "speed-up",
      "tokens",
      "laps",
      "tokens\n/lap",
      "tokens\n/s",
      "accept.\nrate",
      "wasted\nnodes",
      "first\ntoken",
    ],
  )
  traffic = _table("Bytes per token", ["arm"], [*TRAFFIC_CLASSES, "total"])
  notes = []
  for arm in rows:
    identical, ratio = "baseline", "-"
    if arm is not baseline:
      identical = _identical(arm, baseline)
      try:
        ratio = f"{arm.speedup(baseline).ratio:.3g}x"
      except ValueError as error:
        notes.append(f"No speed-up for {arm.name}: {error}.")
    summary = arm.summary
    decoding.add_row(
      Text(arm.name),
      identical,
      ratio,
      str(arm.num_tokens),
      str(summary.laps),
      _number(summary.tokens_per_lap),
      _number(arm.tokens_per_s),
      _number(summary.acceptance_rate),
      str(summary.wasted_nodes),
      _seconds(arm.first_token_s),
    )
    rates = arm.bytes_per_token
    traffic.add_row(
      Text(arm.name),
      *(_number(rates[name]) for name in (*TRAFFIC_CLASSES, "total")),
    )
  lines = [
    _clock_line(rows),
    _DEFINITIONS.format(baseline=baseline.name),
    *notes,
  ]
  return Group(
    decoding, Text("\n".join(lines)), Text(""), traffic, Text(_BYTES)
  )


def per_prompt_table(
  arms: Sequence[Arm], names: Sequence[str] | None = None
) -> RenderableType:
  """Returns a table with one row per prompt and arm.

  `same` says whether the tokens are the first arm's, and if not, from which
  position on, with the draw's logit margin there if it was recorded.

  Args:
    arms: the first one is the baseline.
    names: what to call the prompts; their numbers by default.

  Raises:
    ValueError: if there are no arms, their prompts differ, or `names` has
      another length.
  """
  _check_arms(arms)
  num_prompts = len(arms[0].outcomes)
  if names is None:
    names = [str(i) for i in range(num_prompts)]
  if len(names) != num_prompts:
    raise ValueError(
      f"names: {len(names)} given, there are {num_prompts} prompts"
    )
  table = _table(
    "Per prompt",
    ["prompt", "arm"],
    ["tokens", "laps", "tokens\n/lap", "tokens\n/s", "accept.\nrate"],
  )
  table.add_column("same")
  table.add_column("end")
  for i, name in enumerate(names):
    for arm in arms:
      outcome = arm.outcomes[i]
      summary = metrics.summarize(outcome.rounds)
      same = (
        "baseline" if arm is arms[0] else _same(outcome, arms[0].outcomes[i])
      )
      table.add_row(
        Text(name if arm is arms[0] else ""),
        Text(arm.name),
        str(len(outcome.tokens)),
        str(summary.laps),
        _number(summary.tokens_per_lap),
        _number(decode_rate([outcome])),
        _number(summary.acceptance_rate),
        same,
        Text(outcome.reason or "running"),
      )
  return Group(table, Text(_clock_line(arms)))


def to_text(*parts: RenderableType, width: int = WIDTH) -> str:
  """Returns what `show` prints, without colours, for a file."""
  out = io.StringIO()
  console = Console(
    file=out, width=width, color_system=None, force_terminal=False
  )
  for part in parts:
    console.print(part)
  return "".join(line.rstrip() + "\n" for line in out.getvalue().splitlines())


def show(*parts: RenderableType, file: TextIO | None = None) -> None:
  """Prints tables; 100 columns wide where the output is no terminal."""
  console = Console(file=file)
  if console.is_terminal:
    for part in parts:
      console.print(part)
  else:
    console.file.write(to_text(*parts))
    console.file.flush()


def _table(title: str, texts: Sequence[str], numbers: Sequence[str]) -> Table:
  table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
  for name in texts:
    table.add_column(name, overflow="fold")
  for name in numbers:
    table.add_column(name, justify="right", no_wrap=True)
  return table


def _check_arms(arms: Sequence[Arm]) -> None:
  if not arms:
    raise ValueError("arms: none given, a table needs one")
  for arm in arms[1:]:
    _check_same_prompts(arms[0], arm)


def _check_same_prompts(baseline: Arm, arm: Arm) -> None:
  ours, theirs = ([o.prompt for o in a.outcomes] for a in (arm, baseline))
  if ours != theirs:
    raise ValueError(
      f"arm {arm.name!r}: must have the prompts of {baseline.name!r}, in order"
    )


def _identical(arm: Arm, baseline: Arm) -> str:
  return f"{arm.num_identical(baseline)}/{len(arm.outcomes)}"


def _same(outcome: Outcome, baseline: Outcome) -> str:
  i = first_difference(outcome.tokens, baseline.tokens)
  if i is None:
    return "yes"
  margin = (
    f", margin {outcome.margins[i]:.2g}" if i < len(outcome.margins) else ""
  )
  return f"from {i}{margin}"


def _clock_line(arms: Sequence[Arm]) -> str:
  def one_or_each(values: list[str]) -> str:
    if len(set(values)) == 1:
      return values[0]
    named = zip(arms, values, strict=True)
    return ", ".join(f"{arm.name} {value}" for arm, value in named)

  clock = one_or_each([CLOCKS[arm.world] for arm in arms])
  origin = one_or_each(["replayed" if arm.replayed else "real" for arm in arms])
  return f"Time: {clock}. Tokens: {origin}."


def _number(value: float) -> str:
  if not math.isfinite(value):
    return "-"
  return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def _seconds(value: float) -> str:
  if not math.isfinite(value):
    return "-"
  return f"{value:.3g} s" if value >= 1 else f"{1e3 * value:.3g} ms"
