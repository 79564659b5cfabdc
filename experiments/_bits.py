# SPDX-License-Identifier: Apache-2.0
"""Do a text's logits depend on how its rows were sent? Measured bit for bit."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wanspec_jax import models
from wanspec_jax.models import ModelConfig, StageParams


@dataclasses.dataclass(frozen=True, kw_only=True)
class Way:
  """One way to send the rows of a text through a model.

  Attributes:
    name: for the table.
    rows: rows per run; the last run may be shorter.
    bucket: compiled rows per run.
    num_slots: cache size.
    scattered: rows sit in random slots, the holes hold garbage.
  """

  name: str
  rows: int
  bucket: int
  num_slots: int
  scattered: bool = False


class Difference(NamedTuple):
  """How far two ways of sending one text are apart.

  Attributes:
    rows: compared rows.
    different: rows in which any logit differs in any bit.
    max_abs: largest difference of two logits.
    flips: rows whose argmax differs.
  """

  rows: int
  different: int
  max_abs: float
  flips: int

  @property
  def flips_per_1000(self) -> float:
    return 1000 * self.flips / self.rows


def ways(*, buckets: Sequence[int], num_slots: Sequence[int]) -> list[Way]:
  """Returns the reference (whole runs of the largest bucket) and the others.

  Args:
    buckets: compiled row counts, ascending.
    num_slots: cache sizes; the reference has the first.
  """
  small, large = buckets[0], buckets[-1]
  found = [
    Way(name="reference", rows=large, bucket=large, num_slots=num_slots[0])
  ]
  for size in num_slots:
    for bucket in buckets:
      found += [
        Way(
          name=f"{what}, bucket {bucket}, {size} slots",
          rows=rows,
          bucket=bucket,
          num_slots=size,
        )
        for what, rows in (("decode", 1), ("prefill", bucket))
      ]
    found += [
      Way(
        name=f"scattered among garbage, runs of {rows}, {size} slots",
        rows=rows,
        bucket=bucket,
        num_slots=size,
        scattered=True,
      )
      for rows, bucket in (
        (large, large),
        (7, next(b for b in buckets if b >= 7)),
        (1, small),
      )
    ]
  return found


class Prober:
  """Compiles a whole model once per shape and sends texts through it."""

  def __init__(self, params: StageParams, config: ModelConfig):
    self._params = params
    self._config = config
    self._stage = jax.jit(
      functools.partial(models.stage, config=config), donate_argnums=(1,)
    )
    self._head = jax.jit(functools.partial(models.head, config=config))

  def logits(
    self, tokens: Sequence[int], way: Way, *, seed: int = 0
  ) -> np.ndarray:
    """Returns `[T, V]` logits of a text sent in one way."""
    length = len(tokens)
    rng = np.random.default_rng(seed)
    slots = np.arange(length, dtype=np.int32)
    cache = models.init_cache(
      self._config,
      num_layers=len(self._params.layers),
      num_slots=way.num_slots,
    )
    if way.scattered:
      slots = rng.permutation(way.num_slots)[:length].astype(np.int32)
      dirty = [
        [x + 100 * rng.standard_normal(x.shape, dtype=np.float32) for x in part]
        for part in (cache.keys, cache.values)
      ]
      cache = dataclasses.replace(
        cache, keys=tuple(dirty[0]), values=tuple(dirty[1])
      )
    out = []
    for low in range(0, length, way.rows):
      count = min(way.rows, length - low)
      rows = slice(low, low + count)
      extra = way.bucket - count
      mask = np.zeros((way.bucket, way.num_slots), bool)
      for i in range(count):
        mask[i, slots[: low + i + 1]] = True
      hidden, cache = self._stage(
        self._params,
        cache,
        np.pad(np.asarray(tokens[rows], np.int32), (0, extra)),
        np.pad(slots[rows], (0, extra), constant_values=way.num_slots),
        np.pad(np.arange(low, low + count, dtype=np.int32), (0, extra)),
        mask,
      )
      out.append(np.asarray(self._head(self._params, hidden))[:count])
    return np.concatenate(out)


def compare(reference: np.ndarray, other: np.ndarray) -> Difference:
  """Compares `[T, V]` logits of one text."""
  unequal = reference.view(np.uint32) != other.view(np.uint32)
  return Difference(
    rows=len(reference),
    different=int(unequal.any(axis=1).sum()),
    max_abs=float(np.abs(reference - other).max()),
    flips=int((reference.argmax(1) != other.argmax(1)).sum()),
  )


def load_whole(
  model: str, dtype: str, *, num_layers: int | None = None
) -> tuple[StageParams, ModelConfig]:
  """Returns a model, whole or its first layers with the head; its config."""
  config = models.load_config(model)
  params = models.load_stage(
    model,
    config,
    first_layer=0,
    num_layers=config.num_layers,
    dtype=jnp.dtype(dtype),
  )
  if num_layers is not None:
    params = dataclasses.replace(params, layers=params.layers[:num_layers])
  return params, config
