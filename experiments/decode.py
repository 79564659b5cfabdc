# SPDX-License-Identifier: Apache-2.0
"""Decodes prompts over a ring: `python -m experiments.decode --config wan4`.

Spawns a ring of stage processes here (or joins a running one, `--cluster`),
decodes each prompt plainly and speculatively over the same emulated links, and
compares tokens, laps, bytes and time. Writes a run directory. The last line is
`identical=k/n tokens_per_lap=… speedup=…`.

`--config NAME` starts from `experiments/configs/NAME.py` (or a file); every
field may then be overridden.
"""

import asyncio
import dataclasses
import json
import sys
from collections.abc import Sequence
from typing import Any

import rich.console
import tyro

from experiments import (
  _arms,
  _fates,
  _report,
  _rundir,
  _setup,
  _timeline,
)
from experiments._recorded import recorded_plain, ring_identity
from experiments._session import Session, open_session
from experiments._settings import Decode, load_config
from training import Prompt, load_prompts
from wanspec_jax import metrics, models, wire
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import (
  Cluster,
  Outcome,
  Recording,
  SessionFault,
  Span,
)


class Printer:
  """Streams text; with several prompts at once only says how far they are."""

  def __init__(
    self, tokenizer: Any, prompts: Sequence[Prompt], settings: Decode
  ):
    self._tokenizer = tokenizer
    self._prompts = prompts
    self._stream = settings.stream
    self._stop = settings.stop
    self._held: list[int] = []
    self._console = rich.console.Console(highlight=False, soft_wrap=True)
    self._texts: dict[int, Any] = {}

  def begin(self, arm: str, first: int) -> None:
    self._texts = {}
    prompt = self._prompts[first]
    left = f"{first + 1}/{len(self._prompts)}"
    self._console.print(
      f"[bold]{arm}[/bold] {left} {prompt.category} {prompt.id}",
      end="\n" if self._stream else " ",
    )

  def emit(self, sequence: int, tokens: Sequence[int]) -> None:
    if not self._stream or sequence:
      return
    if self._stop:  # the text is known once it is known where it is cut
      self._held.extend(tokens)
      return
    if sequence not in self._texts:
      self._texts[sequence] = self._tokenizer.stream()
    text = self._texts[sequence].push(tokens)
    self._console.print(text, end="", markup=False, style="dim")

  def end(self) -> None:
    if self._held:
      text = cut(self._tokenizer.decode(self._held), self._stop)
      self._console.print(text, end="", markup=False, style="dim")
      self._held = []
    self._console.print("")


def cut(text: str, stop: Sequence[str]) -> str:
  """Returns the text before the first stop string."""
  ends = [at for s in stop if (at := text.find(s)) >= 0]
  return text[: min(ends, default=len(text))]


def read_prompts(settings: Decode) -> tuple[Prompt, ...]:
  """Returns the prompts that the settings name."""
  if settings.text:
    return tuple(
      Prompt(id=str(i), category="given", text=text, turns=(text,))
      for i, text in enumerate(settings.text)
    )
  if settings.prompts is None:
    return _rundir.bundled_prompts(
      per_category=settings.per_category, limit=settings.limit
    )
  return load_prompts(
    settings.prompts,
    per_category=settings.per_category,
    limit=settings.limit,
  )


def make_requests(
  settings: Decode, prompts: Sequence[Prompt], tokenizer: Any
) -> list[sch.Request]:
  """Returns one request per prompt, chat template applied."""
  return [
    _arms.make_request(
      tokenizer.apply_chat_template([{"role": "user", "content": p.text}]),
      max_new_tokens=settings.max_new_tokens,
      sampling=dataclasses.replace(
        settings.sampling, seed=settings.sampling.seed + i
      ),
      tokenizer=tokenizer,
      stop_strings=settings.stop,
    )
    for i, p in enumerate(prompts)
  ]


async def run_arm(
  session: Session,
  name: str,
  speculate: _arms.Speculate,
  requests: Sequence[sch.Request],
  *,
  recorded: Sequence[Outcome] | None = None,
  printer: Any = None,
) -> tuple[_report.Arm, list[Span], dict[int, _fates.RunRows]]:
  """Decodes all requests, `concurrent` at a time.

  Returns:
    The arm, its spans, and what became of the rows of its runs.
  """
  outcomes: list[Outcome] = []
  counter = wire.ByteCounter()
  spans: list[Span] = []
  runs: dict[int, _fates.RunRows] = {}
  faults: list[tuple[str, str]] = []
  shift_s, num_runs = 0.0, 0
  step = session.settings.concurrent
  for low in range(0, len(requests), step):
    batch = requests[low : low + step]
    replayed = None
    if speculate.drafter == "synthetic" and recorded is not None:
      replayed = recorded[low].tokens
    if printer is not None:
      printer.begin(name, low)
    driver = session.driver(
      speculate,
      batch,
      recorded=replayed,
      on_emit=None if printer is None else printer.emit,
    )
    driver.recording = Recording()
    result = await session.run(driver, batch)
    outcomes += [result.outcomes[i] for i in range(len(batch))]
    counter = counter.merge(result.bytes)
    spans += [
      s._replace(
        start_s=s.start_s + shift_s,
        end_s=s.end_s + shift_s,
        run=s.run + num_runs if s.run >= 0 else s.run,
      )
      for s in result.spans
    ]
    fates = _fates.fates(driver.recording)
    runs |= {run + num_runs: rows for run, rows in fates.items()}
    num_runs = 1 + max(s.run for s in spans)  # each engine counts from 0
    shift_s = max([shift_s, *(s.end_s for s in spans)])
    if printer is not None:
      printer.end()
    for _, stage, cause in result.faults:
      faults.append((stage, cause))
      print(f"{name}: {stage} failed ({cause}); its standby took over")
  arm = _report.Arm(
    name=name,
    world=session.settings.world,
    outcomes=outcomes,
    bytes=counter,
    faults=faults,
  )
  return arm, spans, runs


async def decode(settings: Decode) -> dict[str, Any]:
  """Runs the experiment and returns the figures of the last line."""
  prompts = read_prompts(settings)
  model = settings.ring.model
  if settings.cluster is not None:
    model = Cluster.from_toml(settings.cluster).model
  tokenizer = models.load_tokenizer(model)
  requests = make_requests(settings, prompts, tokenizer)
  directory = settings.out or _rundir.new_run_dir("decode")
  directory.mkdir(parents=True, exist_ok=True)
  longest = max(len(r.prompt) + r.max_new_tokens for r in requests)
  async with open_session(
    settings, directory, max_length=longest * settings.concurrent
  ) as session:
    printer = Printer(tokenizer, prompts, settings)
    arms: list[_report.Arm] = []
    spans: dict[str, list[Span]] = {}
    identity = ring_identity(session)
    plain = None
    if settings.plain_from is not None:
      plain = recorded_plain(settings.plain_from, identity, requests)
      arms.append(plain)
    elif settings.plain:
      plain, spans["plain"], _ = await run_arm(
        session,
        "plain",
        _arms.Speculate(drafter="none", max_nodes=0),
        requests,
        printer=printer,
      )
      arms.append(plain)
      _rundir.write_json(
        directory / "plain.json",
        {
          "identity": identity,
          "outcomes": [dataclasses.asdict(o) for o in plain.outcomes],
          "bytes": plain.bytes.as_dict(),
        },
      )
    speculative, spans["speculative"], runs = await run_arm(
      session,
      "speculative",
      settings.speculate,
      requests,
      recorded=None if plain is None else plain.outcomes,
      printer=printer,
    )
    arms.append(speculative)
    for name, value in spans.items():
      _timeline.write_perfetto(value, directory / f"trace-{name}.json")
    _timeline.draw_timeline(
      spans["speculative"],
      directory / "timeline.png",
      title=f"{settings.schedule}, {settings.speculate.drafter}",
      world=settings.world,
      runs=runs,
    )
    tables = (
      _report.per_prompt_table(arms, [f"{p.category} {p.id}" for p in prompts]),
      _report.comparison_table(arms),
    )
    _report.show(*tables)
    (directory / "summary.txt").write_text(_report.to_text(*tables))
    figures = figures_of(plain, speculative)
    _rundir.write_json(
      directory / "result.json",
      {
        "config": _rundir.config_dict(settings),
        "cluster": dataclasses.asdict(session.cluster),
        "versions": _rundir.versions(),
        "profile": json.loads(session.profiles.to_json()),
        "figures": figures,
        "arms": {
          arm.name: _report.arm_figures(arm, plain)
          | {
            "faults": arm.faults,
            "outcomes": arm.outcomes,
            "texts": [
              cut(tokenizer.decode(o.tokens), settings.stop)
              for o in arm.outcomes
            ],
          }
          for arm in arms
        },
      },
    )
    print(f"run directory: {directory}")
    return figures


def figures_of(
  plain: _report.Arm | None, speculative: _report.Arm
) -> dict[str, Any]:
  """Returns the last line's figures; see `Arm.speedup` for the speed-up.

  More than one prompt with other tokens refuses it.
  """
  rounds = [r for o in speculative.outcomes for r in o.rounds]
  figures: dict[str, Any] = {"tokens_per_lap": metrics.tokens_per_lap(rounds)}
  if plain is None:
    return figures
  identical = speculative.num_identical(plain)
  refused = len(plain.outcomes) - identical > 1
  return {
    "identical": f"{identical}/{len(plain.outcomes)}",
    **figures,
    "speedup": "refused" if refused else speculative.speedup(plain).ratio,
  }


def main(argv: Sequence[str] | None = None) -> None:
  argv = list(sys.argv[1:] if argv is None else argv)
  try:
    default = Decode()
    if "--config" in argv:
      at = argv.index("--config")
      if at + 1 == len(argv):
        raise ValueError("--config: needs the name of a configuration")
      default = load_config(argv[at + 1])
      del argv[at : at + 2]
    settings = tyro.cli(
      tyro.conf.OmitArgPrefixes[Decode],
      args=argv,
      default=default,
      description=__doc__,
    )
    _setup.keep_freed_memory()
    _setup.use_compilation_cache()
    figures = asyncio.run(decode(settings))
  except (ValueError, RuntimeError, OSError, SessionFault) as error:
    sys.exit(f"experiments.decode: {error}")
  print(_rundir.figures_line(**figures))


if __name__ == "__main__":
  main()
