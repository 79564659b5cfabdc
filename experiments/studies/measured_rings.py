# SPDX-License-Identifier: Apache-2.0
"""The virtual world against WAN rings that others built and measured.

Virtual time. Seven sets of measurements (docs/measured-rings.md) are simulated
under the schedule that each system ran, at inputs marked published, derived or
assumed. A figure counts if none of its inputs was derived from it and is within
if it lies at most 15% off. Orderings are counted by pairs: any two arms of a
sweep that differ by more than its stated noise, and runs with identical
counters. Last, the same rings under `priced`.

Last line: `within15=k/n orderings=k/n priced_gain=…`, the latter the geometric
mean over rings of `priced` over the measured system's best setting, both here.
"""

import concurrent.futures
import dataclasses
import multiprocessing
import pathlib
from typing import Any

import matplotlib.figure
import rich.console

from experiments._rundir import write_json
from experiments.studies._measured import cases as measured_cases
from experiments.studies._measured import figures as measured
from experiments.studies._measured.figures import Result


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The study.

  Attributes:
    tokens: length of each simulated text; measured ones were 48 to 512.
    workers: processes.
    quick: 400 tokens.
    out: run directory.
  """

  tokens: int = 1500
  workers: int = 2
  quick: bool = False
  out: pathlib.Path | None = None


def run(config: Config) -> dict[str, Any]:
  """Runs the study; returns its figures."""
  assert config.out is not None
  tokens = min(config.tokens, 400) if config.quick else config.tokens
  names = list(measured_cases.CASES)
  with concurrent.futures.ProcessPoolExecutor(
    config.workers, mp_context=multiprocessing.get_context("spawn")
  ) as pool:
    results = list(
      pool.map(measured_cases.run_case, names, [tokens] * len(names))
    )
  text = markdown(results)
  rich.console.Console().print(text, markup=False, soft_wrap=True)
  (config.out / "measured_rings.md").write_text(text)
  write_json(
    config.out / "measured_rings.json",
    {
      name: dataclasses.asdict(result)
      for name, result in zip(names, results, strict=True)
    },
  )
  _draw(results, config.out / "measured_rings.png")
  counted = [f for r in results for f in r.figures if f.counts]
  orderings = [o for r in results for o in r.orderings]
  pairs = sum(len(o.pairs) for o in orderings)
  held = pairs - sum(len(o.wrong) for o in orderings)
  return {
    "within15": f"{sum(f.is_within for f in counted)}/{len(counted)}",
    "orderings": f"{held}/{pairs}",
    "priced_gain": measured.mean_gain(
      [gain for r in results for gain in r.gains]
    ),
  }


def markdown(results: list[Result]) -> str:
  """Returns all figures, orderings, inputs and gains as tables."""
  lines = [
    "| ring | figure | measured | ours | ratio | verdict |",
    "|---|---|---|---|---|---|",
  ]
  figures = [f for result in results for f in result.figures]
  for f in figures:
    verdict = "within" if f.is_within else "off"
    if not f.counts:
      verdict = f"not counted, {verdict}"
    lines.append(
      f"| {f.case} | {f.name} | {f.measured:.4g} | {f.ours:.4g} | "
      f"{f.ours / f.measured:.2f} | {verdict} |"
    )
  lines += [
    "",
    "| ring | pairs of | that differ by | in order | not so here |",
    "|---|---|---|---|---|",
  ]
  for o in (o for result in results for o in result.orderings):
    wrong = "; ".join(f"{less} < {more}" for less, more in o.wrong)
    held = len(o.pairs) - len(o.wrong)
    lines.append(
      f"| {o.case} | {o.what} | {o.rule} | {held}/{len(o.pairs)} | {wrong} |"
    )
  lines += ["", "| ring | input | mark |", "|---|---|---|"]
  marks = {
    (f.case, name, mark): None
    for f in figures
    for name, mark in f.inputs.items()
  }
  lines += [f"| {case} | {name} | {mark} |" for case, name, mark in marks]
  lines += [
    "",
    "| ring | text or lap | best measured setting, here | `priced`, here | "
    "gain |",
    "|---|---|---|---|---|",
  ]
  lines += [
    f"| {g.case} | {g.where} | {g.best:.3g} tokens/s | {g.priced:.3g} tokens/s "
    f"| {g.priced / g.best:.2f} |"
    for result in results
    for g in result.gains
  ]
  return "\n".join(lines) + "\n"


def _draw(results: list[Result], path: pathlib.Path) -> None:
  figure = matplotlib.figure.Figure(figsize=(6, 6), layout="constrained")
  axes = figure.add_subplot()
  cases: dict[str, list[Any]] = {}
  for result in results:
    for f in result.figures:
      cases.setdefault(f.case, []).append(f)
  for i, (case, figures) in enumerate(cases.items()):
    axes.loglog(
      [f.measured for f in figures],
      [f.ours for f in figures],
      "os^vD<>p"[i % 8],
      markersize=4,
      label=case,
    )
  low, high = axes.get_xlim()
  for factor, style in ((1.0, "-"), (1.15, ":"), (1 / 1.15, ":")):
    axes.plot(
      [low, high],
      [low * factor, high * factor],
      style,
      color="0.6",
      linewidth=0.8,
    )
  axes.set(xlabel="measured", ylabel="ours (virtual time); dotted: 15%")
  axes.legend(frameon=False, fontsize=7)
  figure.savefig(path, dpi=120)
