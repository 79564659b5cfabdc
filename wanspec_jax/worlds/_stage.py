# SPDX-License-Identifier: Apache-2.0
"""One stage of the target: frames in, frames out, the same in every world."""

import dataclasses
import functools
import time
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from wanspec_jax.base import Codec, Rollback
from wanspec_jax.messages import (
  Cancel,
  Commit,
  Open,
  Returned,
  Run,
  Sampling,
  Verdict,
)
from wanspec_jax.models import ModelConfig, StageParams
from wanspec_jax.models import _decoder as decoder
from wanspec_jax.rollback import Cancelled, apply_riders, place_rows
from wanspec_jax.verify import Verifier, sampling_arrays
from wanspec_jax.verify._tail import (
  TailSequence,
  WalkPlan,
  conclude,
  plan_walks,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageShape:
  """Static sizes that a stage is compiled for.

  Attributes:
    row_buckets: rows per compiled program, ascending; the largest bounds a run.
    slot_buckets: cache sizes, ascending; the cache grows to the next one when
      the slots in use need it; the last is the capacity.
    cache_dtype: dtype of cached keys and values.
    exact: accumulate attention in float64, so that logits do not depend on
      slots; `False` where float64 is slow or missing.
  """

  row_buckets: tuple[int, ...]
  slot_buckets: tuple[int, ...]
  cache_dtype: str = "float32"
  exact: bool = True

  def __post_init__(self):
    for field in ("row_buckets", "slot_buckets"):
      sizes = getattr(self, field)
      if not sizes or sizes[0] < 1 or list(sizes) != sorted(set(sizes)):
        raise ValueError(
          f"StageShape.{field} = {sizes}: must be positive and ascending"
        )
    if self.exact and self.row_buckets[0] < 2:
      raise ValueError(
        f"StageShape.row_buckets = {self.row_buckets}: must start at 2 or more "
        "where exact is on; the product of a single row has other bits"
      )
    if self.cache_dtype not in ("float32", "bfloat16"):
      raise ValueError(
        f"StageShape.cache_dtype = {self.cache_dtype!r}: must be 'float32' or "
        "'bfloat16'"
      )

  @property
  def capacity(self) -> int:
    return self.slot_buckets[-1]

  @property
  def max_rows(self) -> int:
    return self.row_buckets[-1]

  def row_bucket(self, num_rows: int) -> int:
    for bucket in self.row_buckets:
      if num_rows <= bucket:
        return bucket
    raise ValueError(
      f"run of {num_rows} rows: the largest row bucket is {self.max_rows}"
    )


class Output(NamedTuple):
  """What a stage passes on: a run with its payload, or the tail's answer.

  Attributes:
    message: see above.
    payload: hidden states of the run's rows.
    num_rows: rows that were computed: what came in, cancelled rows apart.
  """

  message: Run | Returned
  payload: bytes | memoryview | None
  num_rows: int


@dataclasses.dataclass(kw_only=True)
class Stage:
  """A stage's parameters, cache and bookkeeping; a thin shell over pure parts.

  Attributes:
    config: the model.
    params: this stage's layers.
    shape: compiled sizes.
    codec_in: of the link from the previous stage; None on the first.
    codec_out: of the link to the next stage; None on the last.
    rollback: slot bookkeeping.
    verifier: used on the last stage.
    num_traces: compiled programs so far, by name.
  """

  config: ModelConfig
  params: StageParams
  shape: StageShape
  codec_in: Codec | None
  codec_out: Codec | None
  rollback: Rollback
  verifier: Verifier
  num_traces: dict[str, int] = dataclasses.field(default_factory=dict)

  def __post_init__(self):
    if (self.codec_in is None) != (self.params.embed is not None):
      raise ValueError(
        "Stage.codec_in: the first stage, which embeds, has none; all others do"
      )
    if (self.codec_out is None) != (self.params.head is not None):
      raise ValueError(
        "Stage.codec_out: the last stage, which has the head, has none; all "
        "others do"
      )
    width = self.config.hidden_size
    self._states = [
      None if codec is None else codec.init(width)
      for codec in (self.codec_in, self.codec_out)
    ]
    self._run_layers = jax.jit(self._trace_layers, donate_argnames=("cache",))
    self._verify = jax.jit(self._trace_verify)
    self._floor = self.shape.slot_buckets[0]
    self.reset()

  @property
  def is_last(self) -> bool:
    return self.codec_out is None

  def reset(self) -> None:
    """Forgets every sequence: the start of a session."""
    self._slots = self.rollback.init(self.shape.capacity)
    self._cancelled = Cancelled()
    self._tail: dict[int, TailSequence] = {}
    self._cache = decoder.init_cache(
      self.config,
      num_layers=len(self.params.layers),
      num_slots=self._floor,
      dtype=jnp.dtype(self.shape.cache_dtype),
    )

  # Device half: traced once per (row bucket, slot bucket). -------------------

  def _count(self, name: str) -> None:
    self.num_traces[name] = self.num_traces.get(name, 0) + 1

  def _trace_layers(self, params, cache, x, slots, positions, mask, states):
    """Decodes what came in, runs the layers, encodes what goes out.

    Only the packed payload leaves the device (the hidden states, on the tail).
    """
    self._count("layers")
    state_in, state_out = states
    if self.codec_in is not None:
      state_in, x = self.codec_in.decode(state_in, x, None)
    y, cache = decoder.stage(
      params,
      cache,
      x,
      slots,
      positions,
      mask,
      config=self.config,
      exact=self.shape.exact,
    )
    if self.codec_out is not None:
      state_out, y = self.codec_out.encode(state_out, y, None)
    return y, cache, [state_in, state_out]

  def _trace_verify(self, params, hidden, walk_in, sampling):
    """Head and walk over one sequence's rows of a run."""
    self._count("verify")
    logits = decoder.head(
      params,
      hidden[walk_in["rows"]],
      config=self.config,
      exact=self.shape.exact,
    )
    return self.verifier.walk(
      logits,
      tokens=walk_in["tokens"],
      parent_rows=walk_in["parent_rows"],
      start_row=walk_in["start"],
      start_position=walk_in["position"],
      num_rows=walk_in["num_rows"],
      sampling=sampling,
    )

  # Host half. ----------------------------------------------------------------

  def cancel(self, cancel: Cancel) -> None:
    """Notes nodes whose rows need not be computed any more."""
    self._cancelled.add(cancel)

  def process(self, run: Run, payload: Any = None) -> Output:
    """Applies what rides on a run, runs its rows, returns what to pass on.

    Cancelled rows are dropped: they take no slot and do not travel on.

    Args:
      run: as it came; without dropped rows the same object goes on.
      payload: hidden states from the previous stage, packed by `codec_in`.

    Raises:
      ValueError, KeyError, RuntimeError: the peer broke a rule; the message
        names it.
    """
    sent_rows = run.num_rows
    run, keep = self._cancelled.filter(run)
    self._apply_riders(run)
    if run.num_rows == 0:
      if self.is_last:
        return Output(Returned(run_id=run.run_id, epoch=run.epoch), None, 0)
      return Output(run, b"", 0)
    hidden, positions = self._layers(run, payload, sent_rows, keep)
    if not self.is_last:
      assert self.codec_out is not None
      packed = self.codec_out.pack(jax.device_get(hidden), run.num_rows)
      return Output(run, packed, run.num_rows)
    verdicts = self._verdicts(run, hidden, positions)
    return Output(
      Returned(run_id=run.run_id, epoch=run.epoch, verdicts=tuple(verdicts)),
      None,
      run.num_rows,
    )

  def _apply_riders(self, run: Run) -> None:
    self._slots = apply_riders(self.rollback, self._slots, run)
    for sequence in run.closes:
      self._tail.pop(sequence, None)
    if run.closes and self.rollback.num_used(self._slots) == 0:
      self._fit_cache(0)
    for opened in run.opens if self.is_last else ():
      if opened.sequence in self._tail:
        raise ValueError(
          f"run {run.run_id}: sequence {opened.sequence} is open already"
        )
      self.verifier.check(opened.sampling)
      self._tail[opened.sequence] = TailSequence(open=opened)

  def _fit_cache(self, num_slots: int) -> None:
    """Grows the cache to the bucket that holds so many slots; shrinks it to the
    smallest when none is in use."""
    wanted = max(num_slots, self._floor)
    bucket = next(b for b in self.shape.slot_buckets if wanted <= b)
    grows = bucket > self._cache.num_slots
    shrinks = num_slots == 0 and bucket < self._cache.num_slots
    if grows or shrinks:
      self._cache = decoder.resize_cache(self._cache, self.config, bucket)

  def _layers(
    self, run: Run, payload: Any, sent_rows: int, keep: np.ndarray | None
  ) -> tuple[Any, np.ndarray]:
    self._slots, slots = place_rows(self.rollback, self._slots, run)
    positions = self.rollback.positions(self._slots, slots)
    self._fit_cache(int(slots.max()) + 1)
    num_slots = self._cache.num_slots
    bucket = self.shape.row_bucket(run.num_rows)
    extra = bucket - run.num_rows
    if self.codec_in is None:
      self._check_tokens(run)
      x = np.pad(run.tokens, (0, extra))
    else:
      sent = self.shape.row_bucket(sent_rows)
      x = self.codec_in.unpack(
        payload, sent_rows, self.config.hidden_size, sent
      )
      if keep is not None:  # padding is whatever row: nobody sees it
        rows = np.pad(keep, (0, extra), mode="edge")
        x = jax.tree.map(lambda column: column[rows], x)
    mask = np.zeros((bucket, num_slots), bool)
    mask[: run.num_rows] = self.rollback.mask(self._slots, slots, num_slots)
    out, self._cache, self._states = self._run_layers(
      self.params,
      cache=self._cache,
      x=x,
      slots=np.pad(slots, (0, extra), constant_values=num_slots),
      positions=np.pad(positions, (0, extra)),
      mask=mask,
      states=self._states,
    )
    return out, positions

  def _check_tokens(self, run: Run) -> None:
    """Raises on an id that the embedding lacks: a gather would clamp it."""
    wrong = np.flatnonzero(run.tokens >= self.config.vocab_size)
    if len(wrong):
      raise ValueError(
        f"run {run.run_id}, row {wrong[0]}: token {run.tokens[wrong[0]]}, the "
        f"model has {self.config.vocab_size}"
      )

  def _verdicts(
    self, run: Run, hidden: jax.Array, positions: np.ndarray
  ) -> list[Verdict]:
    plans = plan_walks(self._tail, run, positions)
    walked = [self._walk(plan, hidden) for plan in plans]  # dispatched first
    verdicts = []
    for plan, result in zip(plans, jax.device_get(walked), strict=True):
      count = int(result.count)
      if not np.isfinite(result.log_probs[:count]).all():
        raise ValueError(
          f"run {run.run_id}, sequence {plan.sequence}: the logits are not "
          "finite"
        )
      verdicts.append(
        conclude(
          self._tail,
          plan,
          tokens=result.tokens[:count],
          last=int(result.last_row),
          log_probs=result.log_probs[:count],
          margins=result.margins[:count],
        )
      )
    return verdicts

  def _walk(self, plan: WalkPlan, hidden: jax.Array):
    num_rows = len(plan.rows)
    bucket = self.shape.row_bucket(num_rows)
    extra = bucket - num_rows
    own = np.arange(bucket, dtype=np.int32)
    own[:num_rows] = plan.parent_rows
    return self._verify(
      self.params,
      hidden,
      {
        "rows": np.pad(plan.rows, (0, extra)),
        "tokens": np.pad(plan.tokens, (0, extra)),
        "parent_rows": own,
        "start": np.int32(plan.start),
        "position": np.int32(plan.position),
        "num_rows": np.int32(num_rows),
      },
      sampling_arrays(self._tail[plan.sequence].open.sampling),
    )

  # Warm-up and profile. ------------------------------------------------------

  def measure(self, *, num_slots: int, repeats: int) -> dict[int, float]:
    """Returns median seconds per row bucket, everything compiled beforehand.

    Times what `process` does for a tree of that many rows: host bookkeeping,
    transfer, layers, codec, and on the tail head and walk. With `repeats` 0
    only compiles (the times are then of the compilation).

    Args:
      num_slots: cache size to measure at, a slot bucket.
      repeats: timed calls per bucket.
    """
    self._floor = num_slots
    try:
      return {
        bucket: self._measure(bucket, repeats)
        for bucket in self.shape.row_buckets
      }
    finally:
      self._floor = self.shape.slot_buckets[0]
      self.reset()

  def _measure(self, bucket: int, repeats: int) -> float:
    self.reset()
    payload = b""
    if self.codec_in is not None:
      width = self.config.hidden_size
      zeros = jnp.zeros((bucket, width), jnp.float32)
      _, encoded = self.codec_in.encode(self.codec_in.init(width), zeros, None)
      payload = self.codec_in.pack(jax.device_get(encoded), bucket)
    spent = []
    for run in _profile_runs(bucket, repeats + 1):
      start = time.perf_counter()
      self.process(run, payload)
      jax.block_until_ready(self._cache)
      spent.append(time.perf_counter() - start)
    return float(np.median(spent[1:] or spent))


@functools.cache
def _profile_runs(num_rows: int, count: int) -> tuple[Run, ...]:
  """Returns runs of one sequence each: a root with a comb of nodes below it."""
  runs = []
  for i in range(count):
    ids = np.arange(num_rows, dtype=np.int64)
    runs.append(
      Run(
        run_id=i,
        opens=(Open(sequence=i, sampling=Sampling()),),
        closes=(i - 1,) if i else (),
        commits=(Commit(sequence=i, root=0),),
        sequences=np.full(num_rows, i, np.int32),
        ids=ids,
        parents=np.maximum(ids - 1, 0) // 2 * 2,
        tokens=np.arange(num_rows, dtype=np.int32) + 1,
        committed=np.zeros(num_rows, bool),
      )
    )
  return tuple(runs)
