# SPDX-License-Identifier: Apache-2.0
"""Every published row, and the tables they are printed as."""

import concurrent.futures
import multiprocessing
from collections.abc import Callable

from experiments.studies._published import asynchronous, hedges, pipelines
from experiments.studies._published.row import Check, Row

SYSTEMS: tuple[Callable[[bool], list[Row]], ...] = (
  pipelines.pipedec,
  pipelines.pipeinfer,
  asynchronous.picospec,
  asynchronous.picospec_naive,
  pipelines.specedge,
  hedges.saguaro,
  asynchronous.amusd,
  asynchronous.pipespec,
  asynchronous.dsi,
  pipelines.intel,
)


def published_rows(quick: bool = False, workers: int = 1) -> list[Row]:
  """Returns a row per published figure, in the order of `SYSTEMS`.

  Args:
    quick: short texts; no spreads.
    workers: processes.
  """
  if workers <= 1:
    return [row for system in SYSTEMS for row in system(quick)]
  with concurrent.futures.ProcessPoolExecutor(
    workers, mp_context=multiprocessing.get_context("spawn")
  ) as pool:
    jobs = [pool.submit(system, quick) for system in SYSTEMS]
    return [row for job in jobs for row in job.result()]


def counts(rows: list[Row]) -> dict[str, int]:
  """Returns how many rows are reproduced, fitted and off; and how many of the
  reproduced ones say little (`Row.weak`)."""
  verdicts = [row.verdict for row in rows]
  found = {v: verdicts.count(v) for v in ("reproduced", "fitted", "off")}
  weak = sum(bool(row.weak) and row.verdict == "reproduced" for row in rows)
  return found | {"weak": weak}


def markdown(rows: list[Row]) -> str:
  """Returns the rows as a table."""
  lines = [
    "| system | set-up and figure | published | ours | inputs | verdict |",
    "|---|---|---|---|---|---|",
  ]
  for row in rows:
    ours = f"{row.ours:.3g}"
    if row.spread is not None:
      ours += f" ({row.spread[0]:.3g} to {row.spread[1]:.3g})"
    inputs = "; ".join(map(str, row.inputs))
    lines.append(
      f"| {row.system} | {row.figure} | {row.published} | {ours} | {inputs} | "
      f"{row.verdict}{', weak' if row.weak else ''} |"
    )
  return "\n".join(lines)


def checks_markdown(checks: list[Check]) -> str:
  """Returns the closed forms as a table."""
  lines = [
    "| closed form | expected | ours | error |",
    "|---|---|---|---|",
  ]
  lines += [
    f"| {c.name} | {c.expected:.4g} | {c.ours:.4g} | {100 * c.error:+.2f}% |"
    for c in checks
  ]
  return "\n".join(lines)
