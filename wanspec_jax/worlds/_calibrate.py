# SPDX-License-Identifier: Apache-2.0
"""Stage times as they are in a lap: measured by runs round the ring itself.

A stage that is timed in a loop is faster than the same stage in a lap: there
its threads have slept, and the other stages have filled the caches. On two
cores with four stages the loop was 12 to 25 ms per lap too fast.
"""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from wanspec_jax.messages import Commit, Open, Run, Sampling
from wanspec_jax.worlds._stage import StageShape


class Lap(NamedTuple):
  """One calibration run.

  Attributes:
    run: what is launched; without rows it only frees.
    bucket: row bucket that it times; None where it only prepares.
  """

  run: Run
  bucket: int | None


def calibration_laps(
  shape: StageShape, *, num_slots: int, repeats: int, is_stream: bool = False
) -> list[Lap]:
  """Returns the runs that time every row bucket at a cache size, in order.

  The first ones fill slots until the cache has that size. Then every bucket in
  turn, `repeats` times over, gets a full run: a root with nodes below it. For
  a stream all runs of a bucket follow each other.
  """
  smaller = [b for b in shape.slot_buckets if b < num_slots]
  length = smaller[-1] if smaller else 0
  laps = []

  def add(
    sequence: int,
    first: int,
    num_rows: int,
    *,
    is_text: bool,
    closes: tuple[int, ...] = (),
  ) -> None:
    ids = np.arange(first, first + num_rows, dtype=np.int64)
    comb = np.maximum(ids - 1, 0) // 2 * 2  # every second node has a child
    commits = () if is_text else (Commit(sequence=sequence, root=0),)
    opens = ()
    if num_rows and first == 0:
      opens = (Open(sequence=sequence, sampling=Sampling()),)
    run = Run(
      run_id=len(laps),
      opens=opens,
      closes=closes,
      commits=commits if num_rows else (),
      sequences=np.full(num_rows, sequence, np.int32),
      ids=ids,
      parents=np.maximum(ids - 1, 0) if is_text else comb,
      tokens=(ids % 100 + 1).astype(np.int32),
      committed=np.full(num_rows, is_text),
    )
    laps.append(Lap(run, None if is_text or not num_rows else num_rows))

  for low in range(0, length, shape.max_rows):
    add(0, low, min(shape.max_rows, length - low), is_text=True)
  sequence = 0
  order = list(shape.row_buckets) * repeats
  for bucket in sorted(order) if is_stream else order:
    sequence += 1
    closes = (sequence - 1,) if sequence > 1 else ()
    add(sequence, 0, bucket, is_text=False, closes=closes)
  last = (sequence, 0) if length else (sequence,)
  add(sequence, 0, 0, is_text=False, closes=last)
  return laps


def stage_seconds(
  laps: Sequence[Lap],
  *,
  spans: Sequence[Sequence[Any]],
  elapsed_s: Mapping[int, float],
  num_stages: int,
  is_emulated: bool,
) -> dict[int, list[float]]:
  """Returns `[P]` seconds by row bucket, medians over the laps.

  What a lap takes besides its links' modelled times and its stages' own work
  (framing, hand-overs between threads, sockets) is shared out evenly among the
  stages, so that links and stages add up to the lap.

  Args:
    laps: as launched.
    spans: `(lane, name, start_s, end_s, run id)` of stages and links.
    elapsed_s: seconds from launch to return, by run id.
    num_stages: `P`.
    is_emulated: whether the links are: of real ones nobody here knows what they
      took, so there the rest is left out.
  """
  work: dict[int, dict[str, float]] = {}
  for lane, _, start_s, end_s, run in spans:
    work.setdefault(run, {})[lane] = end_s - start_s
  found: dict[int, list[float]] = {}
  for bucket in dict.fromkeys(lap.bucket for lap in laps):
    if bucket is None:
      continue
    rows = []
    for lap in laps:
      if lap.bucket == bucket:
        mine = work[lap.run.run_id]
        stages = [mine[f"stage {i}"] for i in range(num_stages)]
        rest_s = 0.0
        if is_emulated:
          rest_s = max(0.0, elapsed_s[lap.run.run_id] - sum(mine.values()))
        rows.append([t + rest_s / num_stages for t in stages])
    found[bucket] = [
      statistics.median(column) for column in zip(*rows, strict=True)
    ]
  return found
