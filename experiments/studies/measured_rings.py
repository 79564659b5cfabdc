# SPDX-License-Identifier: Apache-2.0
"""The virtual world against WAN rings that others built and measured.

Virtual time. Seven sets of measurements (docs/measured-rings.md) are simulated
under the schedule that each system ran, at inputs marked published, derived or
assumed. A figure counts if none of its inputs was derived from it and is within
if it lies at most 15% off; orderings are those beyond the stated noise. Last,
the same rings under `priced`.

Last line: `within15=k/n orderings=k/n priced_gain=…`, the latter the geometric
mean of `priced` over the measured system's best setting, both here.
"""

import concurrent.futures
import dataclasses
import math
import multiprocessing
import pathlib
from typing import Any

import matplotlib.figure
import rich.console

from experiments._rundir import write_json
from experiments.studies import _measured_cases
from experiments.studies._measured_cases import Result


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
  names = list(_measured_cases.CASES)
  with concurrent.futures.ProcessPoolExecutor(
    config.workers, mp_context=multiprocessing.get_context("spawn")
  ) as pool:
    results = list(
      pool.map(_measured_cases.run_case, names, [tokens] * len(names))
    )
  text = markdown(dict(zip(names, results, strict=True)))
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
  gains = [r.priced / r.best for r in results if r.best > 0]
  return {
    "within15": f"{sum(f.is_within for f in counted)}/{len(counted)}",
    "orderings": f"{sum(o.holds for o in orderings)}/{len(orderings)}",
    "priced_gain": math.exp(sum(map(math.log, gains)) / len(gains)),
  }


def markdown(results: dict[str, Result]) -> str:
  """Returns all figures, orderings and inputs as tables."""
  lines = [
    "| ring | figure | measured | ours | ratio | verdict |",
    "|---|---|---|---|---|---|",
  ]
  for result in results.values():
    for f in result.figures:
      verdict = "within" if f.is_within else "off"
      if not f.counts:
        verdict = f"not counted, {verdict}"
      lines.append(
        f"| {f.case} | {f.name} | {f.measured:.4g} | {f.ours:.4g} | "
        f"{f.ours / f.measured:.2f} | {verdict} |"
      )
  lines += ["", "| ring | ordering | holds |", "|---|---|---|"]
  for result in results.values():
    lines += [
      f"| {o.case} | {o.claim} | {'yes' if o.holds else 'no'} |"
      for o in result.orderings
    ]
  lines += ["", "| ring | input | mark |", "|---|---|---|"]
  marks = {
    (f.case, name, mark): None
    for result in results.values()
    for f in result.figures
    for name, mark in f.inputs.items()
  }
  lines += [f"| {case} | {name} | {mark} |" for case, name, mark in marks]
  lines += [
    "",
    "| ring | best measured setting, here | `priced`, here | gain |",
    "|---|---|---|---|",
  ]
  lines += [
    f"| {name} | {r.best:.3g} tokens/s | {r.priced:.3g} tokens/s | "
    f"{r.priced / r.best:.2f} |"
    for name, r in results.items()
    if r.best > 0
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
