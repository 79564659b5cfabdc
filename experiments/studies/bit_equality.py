# SPDX-License-Identifier: Apache-2.0
"""Are logits bit-equal across row buckets, slots, run splits, prefill, decode?

Sends bundled prompts through the whole model in every way and compares with one
prefill in the largest bucket. Last line: `ways=… equal=… flips_per_1000=…` for
each dtype that is asked for; figures of several dtypes carry its name.
"""

import dataclasses
import pathlib
from typing import Any

import matplotlib.figure
import rich.console
import rich.table

from experiments import _bits, _rundir
from wanspec_jax import models


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """What is compared.

  Attributes:
    model: as for decode.
    dtypes: of the weights.
    row_buckets: compiled row counts; the last is the reference's.
    num_slots: cache sizes, each with a reference of its own.
    num_tokens: text length per prompt.
    prompts: bundled prompts used.
    quick: one dtype, one prompt, 64 tokens.
    out: run directory.
  """

  model: str = "smollm2"
  dtypes: tuple[str, ...] = ("bfloat16", "float32")
  row_buckets: tuple[int, ...] = (8, 16, 32, 64)
  num_slots: tuple[int, ...] = (256, 1024)
  num_tokens: int = 192
  prompts: int = 1
  quick: bool = False
  out: pathlib.Path | None = None


def run(config: Config) -> dict[str, Any]:
  """Runs the study; returns its figures."""
  out = config.out
  assert out is not None
  if config.quick:
    config = dataclasses.replace(
      config, dtypes=config.dtypes[:1], num_tokens=64, prompts=1
    )
  tokenizer = models.load_tokenizer(config.model)
  texts = [
    (tokenizer.encode(p.text) * config.num_tokens)[: config.num_tokens]
    for p in _rundir.bundled_prompts(limit=config.prompts)
  ]
  console = rich.console.Console(width=100)
  figures: dict[str, Any] = {}
  drawn: dict[str, list[tuple[str, float]]] = {}
  for dtype in config.dtypes:
    prober = _bits.Prober(*_bits.load_whole(config.model, dtype))
    reference, *others = _bits.ways(
      buckets=config.row_buckets, num_slots=config.num_slots
    )
    want = [prober.logits(text, reference) for text in texts]
    table = rich.table.Table(title=f"{dtype}: logits against one prefill")
    for column in ("way", "rows", "rows not bit-equal", "max |Δ|", "flips"):
      table.add_column(column)
    equal = flips = rows = 0
    for way in others:
      found = [
        _bits.compare(w, prober.logits(text, way, seed=i))
        for i, (w, text) in enumerate(zip(want, texts, strict=True))
      ]
      different = sum(d.different for d in found)
      equal += different == 0
      rows += sum(d.rows for d in found)
      flips += sum(d.flips for d in found)
      drawn.setdefault(dtype, []).append(
        (way.name, different / sum(d.rows for d in found))
      )
      table.add_row(
        way.name,
        str(sum(d.rows for d in found)),
        str(different),
        f"{max(d.max_abs for d in found):.2g}",
        str(sum(d.flips for d in found)),
      )
    console.print(table)
    suffix = f"_{dtype}" if len(config.dtypes) > 1 else ""
    figures |= {
      f"ways{suffix}": len(others),
      f"equal{suffix}": equal,
      f"flips_per_1000{suffix}": 1000 * flips / rows,
    }
  _draw(drawn, out / "bit_equality.png")
  return figures


def _draw(
  shares: dict[str, list[tuple[str, float]]], path: pathlib.Path
) -> None:
  figure = matplotlib.figure.Figure(figsize=(8, 4), layout="constrained")
  axes = figure.subplots()
  height = 0.8 / len(shares)
  for k, (dtype, rows) in enumerate(shares.items()):
    axes.barh(
      [i + k * height for i in range(len(rows))],
      [share for _, share in rows],
      height,
      label=dtype,
    )
    axes.set_yticks(range(len(rows)), [name for name, _ in rows])
  axes.set_xlim(0, 1)
  axes.set_xlabel("share of rows that are not bit-equal (real model)")
  axes.legend()
  figure.savefig(path)
