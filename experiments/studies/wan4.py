# SPDX-License-Identifier: Apache-2.0
"""The real model over sockets: `priced` against lockstep and against the bound.

Spawns the ring of the `wan4` configuration and decodes every prompt plainly,
in lockstep at its best tree size, and under `priced`, by drafter, bandwidth and
cost of drafting. Wall clock over emulated links. Sizes (and, where levels cost,
depths) are compared in virtual time first, on the recorded texts and at the
stage times of this ring; the best of them are then run over sockets, prompt by
prompt in turns with `priced`, and the best of those counts as lockstep.

  bound = 1 / (smallest lap · misses per token)

with the smallest lap that of plain decoding (median between two tokens) and the
misses those of `priced`: tokens that no launched node bore. Last, four requests
at once against each of them alone.

Per condition the last line has `NAME=` the ratio of `priced` to lockstep and
`NAME_bound=` its share of the bound, then `four=` the summed tokens/s of four
requests at once over one request's, and `identical=k/n` over all arms.
"""

import asyncio
import dataclasses
import os
import pathlib
from collections.abc import Sequence
from typing import Any

import matplotlib.figure
import rich.console
import rich.table

from experiments import _arms, _rundir
from experiments._session import Session, open_session
from experiments._settings import Decode, RingSettings
from experiments.configs import wan4
from experiments.decode import make_requests, read_prompts
from experiments.studies import _wan4
from experiments.studies._wan4 import Condition, Measured
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import Driver, Outcome, SessionResult


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The comparison.

  Attributes:
    prompts: prompts file; the bundled demo prompts by default.
    per_category: first so many prompts of each category.
    limit: so many prompts at most.
    max_new_tokens: budget per prompt.
    conditions: names out of `suffix`, `synthetic`, `costly_suffix`,
      `costly_synthetic` (20 ms per draft level), `slow_suffix`,
      `slow_synthetic` (5 Mbps); all by default.
    settings: lockstep settings that are run over sockets, per condition.
    four: run four requests at once, too.
    lap_ms: summed one-way delays.
    quick: two prompts, 24 tokens, `suffix` only, one lockstep setting.
    out: run directory.
  """

  prompts: pathlib.Path | None = None
  per_category: int | None = None
  limit: int | None = None
  max_new_tokens: int = 48
  conditions: tuple[str, ...] = tuple(c.name for c in _wan4.CONDITIONS)
  settings: int = 2
  four: bool = True
  lap_ms: float = 200.0
  quick: bool = False
  out: pathlib.Path | None = None

  def __post_init__(self):
    known = [c.name for c in _wan4.CONDITIONS]
    for name in self.conditions:
      if name not in known:
        raise ValueError(f"conditions: {name!r} must be one of {known}")
    if self.settings < 1:
      raise ValueError(f"settings = {self.settings}: must be >= 1")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Arm:
  """One way of decoding under a condition, over sockets.

  Attributes:
    name: e.g. `lockstep 8` or `priced`.
    outcomes: one per prompt.
    rates: see `Measured`.
  """

  name: str
  outcomes: list[Outcome]
  rates: Measured


@dataclasses.dataclass(frozen=True, kw_only=True)
class Result:
  """What came of a condition.

  Attributes:
    condition: which.
    scouted: `(tokens/s, size, levels)` in virtual time, best first.
    virtual: rates of `priced` in virtual time.
    locksteps: over sockets, best first.
    priced: over sockets.
    identical: arms' texts equal to plain decoding's.
    texts: all arms' texts.
  """

  condition: Condition
  scouted: list[tuple[float, int, int | None]]
  virtual: Measured
  locksteps: list[Arm]
  priced: Arm
  identical: int
  texts: int

  @property
  def ratio(self) -> float:
    """Of `priced` to the best lockstep."""
    best = self.locksteps[0].rates.tokens_per_s
    return self.priced.rates.tokens_per_s / best

  @property
  def bound_share(self) -> float:
    """Of `priced` to its bound."""
    return self.priced.rates.tokens_per_s / self.priced.rates.bound


class Bench:
  """Decodes prompts on a session's ring by any policy and drafter.

  Args:
    session: the ring.
    lap_ms: summed one-way delays.
    requests: one per prompt.
  """

  def __init__(
    self, session: Session, lap_ms: float, requests: Sequence[sch.Request]
  ):
    self.session = session
    self.requests = requests
    self._lap_ms = lap_ms

  def drafter(self, condition: Condition, text: Sequence[int]):
    """Returns a fresh drafter for one text."""
    return _arms.make_drafter(
      _arms.Speculate(drafter=condition.drafter),
      eos_ids=self.session.tokenizer.eos_ids,
      vocab_size=self.session.vocab_size,
      recorded=text,
    )

  async def decode(
    self,
    condition: Condition,
    policy: sch.Policy,
    which: Sequence[int],
    text: Sequence[int],
    calibration: sch.Calibration,
  ) -> SessionResult:
    """Decodes some prompts at once."""
    cluster = self.session.cluster
    shape = cluster.shape
    requests = [self.requests[i] for i in which]
    profile = self.session.profile_for(requests)
    driver = Driver(
      sch.init(
        policy,
        _wan4.costs_of(cluster, condition, self._lap_ms, profile),
        capacity=shape.capacity,
        prefill_rows=shape.max_rows,
        calibration=calibration,
      ),
      self.drafter(condition, text),
    )
    draft = condition.draft if condition.level_s else None
    return await self.session.run(driver, requests, draft=draft)


def run(config: Config) -> dict[str, Any]:
  """Runs the study; returns its figures."""
  if config.quick:
    config = dataclasses.replace(
      config,
      limit=2,
      max_new_tokens=24,
      conditions=("suffix",),
      settings=1,
      four=False,
    )
  return asyncio.run(_run(config))


async def _run(config: Config) -> dict[str, Any]:
  assert config.out is not None
  console = rich.console.Console()
  chosen = [c for c in _wan4.CONDITIONS if c.name in config.conditions]
  results: list[Result] = []
  figures: dict[str, Any] = {}
  texts: list[list[int]] = []
  four: dict[str, Any] = {}
  for mbps in sorted({c.mbps for c in chosen}, reverse=True):
    settings = _settings(config, mbps)
    directory = config.out / f"ring-{mbps:g}-mbps"
    directory.mkdir()
    prompts = read_prompts(settings)
    longest = _longest(settings)
    async with open_session(
      settings,
      directory,
      max_length=longest * (4 if config.four else 1),
      profile_length=longest,
    ) as session:
      requests = make_requests(settings, prompts, session.tokenizer)
      bench = Bench(session, config.lap_ms, requests)
      first = next(c for c in chosen if c.mbps == mbps)
      # The texts are the same on every link; the lap is not.
      plain = await _plain(
        bench, first, requests if not texts else requests[:3]
      )
      lap_s = _wan4.median_lap_s(plain)
      texts = texts or [o.tokens for o in plain]
      console.print(f"{mbps:g} Mbps: smallest lap {1e3 * lap_s:.1f} ms")
      for condition in chosen:
        if condition.mbps == mbps:
          result = await _compare(config, bench, condition, texts, lap_s)
          results.append(result)
          _say(console, result)
      if config.four and not four:
        four = await _four(bench, first, texts, results)
        console.print(four)
  _show(console, results)
  _draw(results, config.out / "wan4.png")
  _rundir.write_json(
    config.out / "conditions.json",
    {"conditions": [_plain_result(r) for r in results], "four": four},
  )
  for r in results:
    figures[r.condition.name] = r.ratio
    figures[f"{r.condition.name}_bound"] = r.bound_share
  figures |= {k: v for k, v in four.items() if k.startswith("four")}
  same = sum(r.identical for r in results) + four.get("same", 0)
  total = sum(r.texts for r in results) + four.get("texts", 0)
  return figures | {"identical": f"{same}/{total}"}


def _settings(config: Config, mbps: float) -> Decode:
  base = wan4.get_config()
  return dataclasses.replace(
    base,
    prompts=config.prompts,
    per_category=config.per_category,
    limit=config.limit,
    max_new_tokens=config.max_new_tokens,
    links=_arms.Links(lap_ms=config.lap_ms, mbps=mbps),
    ring=RingSettings(stages=base.ring.stages),
    schedule="priced",
  )


def _longest(settings: Decode) -> int:
  from wanspec_jax import models

  tokenizer = models.load_tokenizer(settings.ring.model)
  requests = make_requests(settings, read_prompts(settings), tokenizer)
  return max(len(r.prompt) + r.max_new_tokens for r in requests)


async def _plain(
  bench: Bench, condition: Condition, requests: Sequence[sch.Request]
) -> list[Outcome]:
  outcomes = []
  for i in range(len(requests)):
    result = await bench.decode(
      condition, sch.lockstep(0), [i], (0,), sch.Calibration()
    )
    outcomes.append(result.outcomes[0])
  return outcomes


async def _compare(
  config: Config,
  bench: Bench,
  condition: Condition,
  texts: Sequence[Sequence[int]],
  lap_s: float,
) -> Result:
  session = bench.session
  replay = _wan4.Replay(
    session.cluster,
    lambda request: session.profile_for([request]),
    config.lap_ms,
    bench.requests,
    texts,
    bench.drafter,
  )

  def scout(policy: sch.Policy) -> Measured:
    return _wan4.measured(replay.run(condition, policy), lap_s)

  depths = (None, 1, 2, 4, 8) if condition.level_s else (None,)
  scouted = await asyncio.to_thread(
    lambda: sorted(
      (
        (scout(sch.lockstep(size, levels=levels)).tokens_per_s, size, levels)
        for size in _wan4.SIZES
        for levels in depths
      ),
      key=lambda row: row[0],
      reverse=True,
    )
  )
  virtual = await asyncio.to_thread(scout, sch.priced())
  policies = {
    f"lockstep {size}" + (f", {levels} levels" if levels else ""): (
      sch.lockstep(size, levels=levels)
    )
    for _, size, levels in scouted[: config.settings]
  }
  policies["priced"] = sch.priced()
  calibrations = {name: sch.Calibration() for name in policies}
  outcomes: dict[str, list[Outcome]] = {name: [] for name in policies}
  for i, text in enumerate(texts):
    for name, policy in policies.items():  # in turns: the machine drifts
      result = await bench.decode(
        condition, policy, [i], text, calibrations[name]
      )
      outcomes[name].append(result.outcomes[0])
  arms = [
    Arm(name=name, outcomes=done, rates=_wan4.measured(done, lap_s))
    for name, done in outcomes.items()
  ]
  locksteps = sorted(arms[:-1], key=lambda arm: -arm.rates.tokens_per_s)
  same = sum(
    list(o.tokens) == list(text)
    for arm in arms
    for o, text in zip(arm.outcomes, texts, strict=True)
  )
  return Result(
    condition=condition,
    scouted=scouted,
    virtual=virtual,
    locksteps=locksteps,
    priced=arms[-1],
    identical=same,
    texts=len(arms) * len(texts),
  )


async def _four(
  bench: Bench,
  condition: Condition,
  texts: Sequence[Sequence[int]],
  results: Sequence[Result],
) -> dict[str, Any]:
  """Returns the summed rate of four requests over that of one, per policy.

  Four: tokens of all between the last first block and the first end, per
  second. One: tokens after the first block, each alone, per second of these.
  """
  which = sorted(range(len(texts)), key=lambda i: -len(texts[i]))[:4]
  figures: dict[str, Any] = {"same": 0, "texts": 0}
  for name, policy in (("", sch.priced()), ("_plain", sch.lockstep(0))):
    alone = []
    for i in which:
      result = await bench.decode(
        condition, policy, [i], (0,), sch.Calibration()
      )
      alone.append(result.outcomes[0])
    result = await bench.decode(
      condition, policy, which, (0,), sch.Calibration()
    )
    together = [result.outcomes[i] for i in range(len(which))]
    start_s = max(o.emitted_s[0] for o in together)
    end_s = min(o.emitted_s[-1] for o in together)
    tokens = sum(start_s < t <= end_s for o in together for t in o.emitted_s)
    one = _wan4.measured(alone, 1.0).tokens_per_s
    figures[f"four{name}"] = tokens / (end_s - start_s) / one
    figures[f"one{name}_tokens_per_s"] = one
    busy_s = sum(
      min(s.end_s, end_s) - max(s.start_s, start_s)
      for s in result.spans
      if s.lane.startswith("stage") and s.start_s < end_s and s.end_s > start_s
    )
    # Stages at work at once, on average; each keeps about one core busy.
    figures[f"four{name}_busy"] = busy_s / (end_s - start_s)
    figures["same"] += sum(
      list(o.tokens) == list(texts[i])
      for done in (alone, together)
      for i, o in zip(which, done, strict=True)
    )
    figures["texts"] += 2 * len(which)
  figures["four_cores"] = os.cpu_count()
  return figures


# Reports. --------------------------------------------------------------------


def _say(console: rich.console.Console, r: Result) -> None:
  best = r.locksteps[0]
  console.print(
    f"{r.condition.name}: {best.name} {best.rates.tokens_per_s:.3f} tokens/s, "
    f"priced {r.priced.rates.tokens_per_s:.3f} ({r.ratio:.3f} of it, "
    f"{r.bound_share:.3f} of the bound), {r.identical}/{r.texts} identical",
    highlight=False,
  )


def _show(console: rich.console.Console, results: Sequence[Result]) -> None:
  table = rich.table.Table(
    title="tokens/s after the first block, wall clock (virtual in brackets)"
  )
  columns = ("condition", "lockstep", "priced", "bound", "ratio", "of bound")
  for column in (*columns, "target", "misses/token"):
    table.add_column(
      column, justify="left" if column == "condition" else "right"
    )
  for r in results:
    best, priced = r.locksteps[0], r.priced.rates
    table.add_row(
      r.condition.name,
      f"{best.rates.tokens_per_s:.2f} {best.name[9:]} ({r.scouted[0][0]:.2f})",
      f"{priced.tokens_per_s:.2f} ({r.virtual.tokens_per_s:.2f})",
      f"{priced.bound:.2f}",
      f"{r.ratio:.3f}",
      f"{r.bound_share:.3f}",
      f"{r.condition.target:g}",
      f"{priced.misses_per_token:.3f}",
    )
  console.print(table)


def _plain_result(r: Result) -> dict[str, Any]:
  return {
    "condition": dataclasses.asdict(r.condition),
    "scouted": r.scouted,
    "virtual": dataclasses.asdict(r.virtual),
    "arms": {
      arm.name: dataclasses.asdict(arm.rates)
      | {
        "emitted_s": [o.emitted_s for o in arm.outcomes],
        "rounds": [
          [dataclasses.astuple(x) for x in o.rounds] for o in arm.outcomes
        ],
      }
      for arm in (*r.locksteps, r.priced)
    },
    "ratio": r.ratio,
    "bound": r.priced.rates.bound,
    "bound_share": r.bound_share,
    "identical": r.identical,
    "texts": r.texts,
  }


def _draw(results: Sequence[Result], path: pathlib.Path) -> None:
  figure = matplotlib.figure.Figure(figsize=(9, 4), layout="constrained")
  axes = figure.add_subplot()
  at = range(len(results))
  for shift, label, rates in (
    (-0.25, "lockstep, best size", [r.locksteps[0].rates for r in results]),
    (0.0, "priced", [r.priced.rates for r in results]),
  ):
    axes.bar(
      [i + shift for i in at],
      [x.tokens_per_s for x in rates],
      width=0.24,
      label=label,
    )
  axes.bar(
    [i + 0.25 for i in at],
    [r.priced.rates.bound for r in results],
    width=0.24,
    label="bound: 1 / (smallest lap · misses per token)",
    color="0.8",
  )
  axes.set_xticks(list(at), [r.condition.name for r in results], rotation=15)
  axes.set_ylabel("tokens/s after the first block, wall clock")
  axes.legend(frameon=False)
  figure.savefig(path, dpi=120)
