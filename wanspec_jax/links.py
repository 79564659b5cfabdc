# SPDX-License-Identifier: Apache-2.0
"""Links, rings and what a lap costs.

A ring of `P` stages has `P + 1` hops: coordinator → stage 0 → … → stage P−1 →
coordinator. The formulas are means (jitter is left out), differentiable in
every float argument and vmappable. Host planning uses `lap_model`, which is the
same sum in float64.

Units: seconds, bytes, bits per second.
"""

import dataclasses
import json
import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
import numpy as np

HopBytes = Callable[[Any], np.ndarray]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Link:
  """A directed connection between two neighbours of the ring.

  Attributes:
    rtt_s: `[]` round-trip time; half of it is the one-way delay.
    bandwidth_bps: `[]` bits per second; `inf` for a link that costs no time.
    jitter_s: `[]` standard deviation of the one-way delay.
  """

  rtt_s: jax.typing.ArrayLike
  bandwidth_bps: jax.typing.ArrayLike
  jitter_s: jax.typing.ArrayLike = 0.0


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Ring:
  """The hops of a ring in order, coordinator → stages → coordinator.

  Attributes:
    rtt_s: `[P + 1]` float32 round-trip time of each hop.
    bandwidth_bps: `[P + 1]` float32 bandwidth of each hop.
    jitter_s: `[P + 1]` float32 standard deviation of each one-way delay.
  """

  rtt_s: jax.Array  # [P + 1]
  bandwidth_bps: jax.Array  # [P + 1]
  jitter_s: jax.Array  # [P + 1]

  @property
  def num_stages(self) -> int:
    return self.rtt_s.shape[-1] - 1

  @classmethod
  def from_links(cls, links: Sequence[Link]) -> Self:
    """Returns the ring of `P + 1` links, in hop order."""
    if len(links) < 2:
      raise ValueError(f"links has {len(links)} hops: a ring has at least 2")
    for i, link in enumerate(links):
      for field in ("rtt_s", "bandwidth_bps", "jitter_s"):
        _check_link(f"links[{i}].{field}", getattr(link, field))
    return cls(
      rtt_s=_stack([link.rtt_s for link in links]),
      bandwidth_bps=_stack([link.bandwidth_bps for link in links]),
      jitter_s=_stack([link.jitter_s for link in links]),
    )

  @classmethod
  def uniform(
    cls,
    *,
    num_stages: int,
    lap_s: jax.typing.ArrayLike,
    bandwidth_bps: jax.typing.ArrayLike,
    jitter_s: jax.typing.ArrayLike = 0.0,
  ) -> Self:
    """Returns a ring of equal hops whose one-way delays sum to `lap_s`."""
    if num_stages < 1:
      raise ValueError(f"num_stages = {num_stages}: must be >= 1")
    _check_link("lap_s", lap_s)
    _check_link("bandwidth_bps", bandwidth_bps)
    _check_link("jitter_s", jitter_s)
    hops = num_stages + 1
    rtt_s = jnp.asarray(lap_s, jnp.float32) * (2 / hops)
    return cls(
      rtt_s=jnp.full((hops,), rtt_s, jnp.float32),
      bandwidth_bps=jnp.full((hops,), bandwidth_bps, jnp.float32),
      jitter_s=jnp.full((hops,), jitter_s, jnp.float32),
    )

  def hop(self, index: int) -> Link:
    """Returns hop `h`, which ends at stage `h` (`P`: the coordinator)."""
    return Link(
      rtt_s=self.rtt_s[index],
      bandwidth_bps=self.bandwidth_bps[index],
      jitter_s=self.jitter_s[index],
    )


def lap_time_s(
  ring: Ring,
  hop_bytes: jax.typing.ArrayLike,
  stage_s: jax.typing.ArrayLike,
  draft_s: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
  """Returns the time of one lap with nothing else in flight.

  T = Σ_h (rtt_h / 2 + 8 bytes_h / bandwidth_h) + Σ_s t_s + t_draft

  Args:
    ring: `P + 1` hops.
    hop_bytes: `[..., P + 1]` bytes that each hop carries, headers included.
    stage_s: `[..., P]` time that each stage computes.
    draft_s: `[...]` drafting time not hidden behind the lap.

  Returns:
    `[...]` float32 seconds.
  """
  hops = _hop_times_s(ring, hop_bytes)
  stages = _stages(ring, stage_s)
  delay_s = jnp.sum(ring.rtt_s) / 2
  return (
    delay_s
    + jnp.sum(hops, axis=-1)
    + jnp.sum(stages, axis=-1)
    + jnp.asarray(draft_s, jnp.float32)
  )


def occupancy_s(
  ring: Ring,
  hop_bytes: jax.typing.ArrayLike,
  stage_s: jax.typing.ArrayLike,
  draft_s: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
  """Returns how long one run keeps the busiest link, stage or drafter busy.

  max(max_h 8 bytes_h / bandwidth_h, max_s t_s, t_draft): with several runs in
  flight no two runs can follow each other more closely than this, whatever the
  delays are. Arguments and shapes are those of `lap_time_s`.
  """
  busiest = jnp.maximum(
    jnp.max(_hop_times_s(ring, hop_bytes), axis=-1),
    jnp.max(_stages(ring, stage_s), axis=-1),
  )
  return jnp.maximum(busiest, jnp.asarray(draft_s, jnp.float32))


def break_even_bandwidth_bps(
  ring: Ring,
  *,
  tokens_per_lap: jax.typing.ArrayLike,
  tree_bytes: jax.typing.ArrayLike,
  plain_bytes: jax.typing.ArrayLike,
  tree_stage_s: jax.typing.ArrayLike,
  plain_stage_s: jax.typing.ArrayLike,
  draft_s: jax.typing.ArrayLike = 0.0,
) -> jax.Array:
  """Returns the hop bandwidths above which a tree beats one-token laps.

  A lap of τ tokens beats τ plain laps iff T(tree) < τ T(plain). Let every
  bandwidth of the ring be scaled by x, at kept ratios w_h, and L = Σ rtt_h / 2:

    x > x* = Σ_h 8 (bytes_h − τ bytes¹_h) / w_h
             ÷ [(τ − 1) L + τ Σ t¹_s − Σ t_s − t_draft]

  The result is x* w_h. It is 0 where the tree pays at any bandwidth, and `inf`
  where no bandwidth is wide enough (the denominator is not positive). On equal
  hops that each carry n rows of s bytes this is the familiar
  (n − τ) s / [(τ − 1) L + τ C(1) − C(n) − T_draft] per hop.

  Args:
    ring: delays, and bandwidths of which only the ratios matter.
    tokens_per_lap: `[]` τ, the target's own token included.
    tree_bytes: `[P + 1]` bytes per hop of the tree's lap.
    plain_bytes: `[P + 1]` bytes per hop of a one-token lap.
    tree_stage_s: `[P]` stage times of the tree's lap.
    plain_stage_s: `[P]` stage times of a one-token lap.
    draft_s: `[]` drafting time not hidden behind the lap.

  Returns:
    `[P + 1]` float32 bits per second.
  """
  tau = jnp.asarray(tokens_per_lap, jnp.float32)
  extra_bytes = _floats(tree_bytes) - tau * _floats(plain_bytes)
  excess_s = jnp.sum(_hop_times_s(ring, extra_bytes), axis=-1)
  spare_s = (
    (tau - 1) * jnp.sum(ring.rtt_s) / 2
    + tau * jnp.sum(_stages(ring, plain_stage_s), axis=-1)
    - jnp.sum(_stages(ring, tree_stage_s), axis=-1)
    - jnp.asarray(draft_s, jnp.float32)
  )
  pays = spare_s > 0
  # The inner `where` keeps the gradient of the unused branch finite.
  scale = jnp.maximum(excess_s, 0) / jnp.where(pays, spare_s, 1)
  always = (spare_s == 0) & (excess_s < 0)
  scale = jnp.where(pays, scale, jnp.where(always, 0.0, jnp.inf))
  # A hop without limit (inf) needs no more than the others where scale is 0.
  return jnp.where(scale > 0, scale * ring.bandwidth_bps, 0.0)


def hop_bytes_model(
  *,
  num_stages: int,
  ids_bytes_per_node: float,
  row_bytes: float | Sequence[float],
  header_bytes: float = 0.0,
  verdict_bytes: float = 0.0,
) -> HopBytes:
  """Returns a function from row counts `[...]` to hop bytes `[..., P + 1]`.

  Every frame pays its header. Ids and parents travel with the rows on every
  hop as far as the tail, since each stage builds its own mask from them; hidden
  states travel between stages only; the last hop carries the verdict.

  Args:
    num_stages: `P`.
    ids_bytes_per_node: ids, parents and tokens of one row.
    row_bytes: one row of hidden states as the codec sends it; one number, or
      one per link between stages (`P - 1`).
    header_bytes: per frame.
    verdict_bytes: per returned frame, header not included.
  """
  if num_stages < 1:
    raise ValueError(f"num_stages = {num_stages}: must be >= 1")
  rows = np.asarray(row_bytes, np.float64)
  if rows.ndim > 0 and rows.shape != (num_stages - 1,):
    raise ValueError(
      f"row_bytes has shape {rows.shape}: must be a number or "
      f"num_stages - 1 = {num_stages - 1} numbers"
    )
  fixed = np.full((num_stages + 1,), header_bytes, np.float64)
  fixed[-1] += verdict_bytes
  per_row = np.full((num_stages + 1,), ids_bytes_per_node, np.float64)
  per_row[1:-1] += rows
  per_row[-1] = 0
  for field, values in (("fixed", fixed), ("per row", per_row)):
    if not (np.isfinite(values).all() and (values >= 0).all()):
      raise ValueError(
        f"{field} bytes per hop = {values}: must be finite and >= 0"
      )

  def hop_bytes(num_rows: Any) -> np.ndarray:
    return fixed + np.asarray(num_rows, np.float64)[..., None] * per_row

  return hop_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageProfile:
  """Measured stage times by row bucket.

  Attributes:
    buckets: row counts that stages are compiled for, ascending.
    seconds: `[P][num_buckets]` time of each stage for each bucket, measured
      with all stage processes loaded.
    dtype: computation dtype, e.g. `"float32"`.
    device: what it was measured on.
    draft_s_per_node: drafting time of one node on the coordinator, for drafts
      that are not hidden behind the lap.
    spacing_s: `[num_buckets]` least time between two runs of that many rows,
      measured on runs launched one behind the other. Empty where nothing but
      the busiest stage or link decides it; stages that share a host, its cores
      or its memory's bandwidth slow each other down.
  """

  buckets: tuple[int, ...]
  seconds: tuple[tuple[float, ...], ...]
  dtype: str
  device: str
  draft_s_per_node: float = 0.0
  spacing_s: tuple[float, ...] = ()

  def __post_init__(self):
    sizes = tuple(self.buckets)
    if not sizes or sizes[0] < 1 or sizes != tuple(sorted(set(sizes))):
      raise ValueError(
        f"StageProfile.buckets = {sizes}: must be positive and ascending"
      )
    if not self.seconds:
      raise ValueError("StageProfile.seconds = (): must have a stage or more")
    for i, times in enumerate(self.seconds):
      if len(times) != len(sizes) or not all(
        math.isfinite(t) and t >= 0 for t in times
      ):
        raise ValueError(
          f"StageProfile.seconds[{i}] = {times}: must be {len(sizes)} finite "
          "times >= 0, one per bucket"
        )
    if not (
      math.isfinite(self.draft_s_per_node) and self.draft_s_per_node >= 0
    ):
      raise ValueError(
        f"StageProfile.draft_s_per_node = {self.draft_s_per_node}: "
        "must be finite and >= 0"
      )
    if self.spacing_s and (
      len(self.spacing_s) != len(sizes)
      or not all(math.isfinite(t) and t >= 0 for t in self.spacing_s)
    ):
      raise ValueError(
        f"StageProfile.spacing_s = {self.spacing_s}: must be empty or "
        f"{len(sizes)} finite times >= 0, one per bucket"
      )

  @property
  def num_stages(self) -> int:
    return len(self.seconds)

  def stage_s(self, num_rows: int) -> np.ndarray:
    """Returns the `[P]` float64 times of a run of `num_rows` rows.

    The bucket that holds the rows is what is paid; more rows than the largest
    bucket go as several chunks, one after the other. No rows cost nothing.
    """
    return self._of_rows(np.asarray(self.seconds, np.float64), num_rows)

  def run_spacing_s(self, num_rows: int) -> float:
    """Returns the least time between two runs of `num_rows` rows, as far as
    `spacing_s` tells; 0 where it is empty."""
    if not self.spacing_s:
      return 0.0
    spacing = np.asarray(self.spacing_s, np.float64)[None]
    return float(self._of_rows(spacing, num_rows)[0])

  def _of_rows(self, seconds: np.ndarray, num_rows: int) -> np.ndarray:
    if num_rows < 0:
      raise ValueError(f"num_rows = {num_rows}: must be >= 0")
    chunks, rest = divmod(num_rows, self.buckets[-1])
    total = chunks * seconds[:, -1]
    if rest:
      total = total + seconds[:, np.searchsorted(self.buckets, rest)]
    return total

  def to_json(self) -> str:
    """Returns a small JSON document; `from_json` reads it back unchanged."""
    return json.dumps(dataclasses.asdict(self), indent=1)

  @classmethod
  def from_json(cls, text: str) -> Self:
    """Returns the profile of `to_json`, or `ValueError` naming wrong fields."""
    data = json.loads(text)
    known = {field.name for field in dataclasses.fields(cls)}
    needed = known - {"draft_s_per_node", "spacing_s"}
    if not isinstance(data, dict) or not needed <= set(data) <= known:
      found = sorted(data) if isinstance(data, dict) else type(data).__name__
      raise ValueError(f"StageProfile: fields {found}: must be {sorted(known)}")
    return cls(
      **data
      | {
        "buckets": tuple(int(n) for n in data["buckets"]),
        "seconds": tuple(
          tuple(float(t) for t in times) for times in data["seconds"]
        ),
        "spacing_s": tuple(float(t) for t in data.get("spacing_s", ())),
      }
    )


@dataclasses.dataclass(frozen=True)
class StageProfiles:
  """Stage times by cache size: attention reads every slot, used or not.

  Attributes:
    slots: cache sizes, ascending.
    profiles: one per size.
  """

  slots: tuple[int, ...]
  profiles: tuple[StageProfile, ...]

  def __post_init__(self):
    sizes = tuple(self.slots)
    if not sizes or sizes[0] < 1 or sizes != tuple(sorted(set(sizes))):
      raise ValueError(
        f"StageProfiles.slots = {sizes}: must be positive and ascending"
      )
    if len(self.profiles) != len(sizes):
      raise ValueError(
        f"StageProfiles.profiles: {len(self.profiles)} of them, but "
        f"{len(sizes)} cache sizes"
      )

  def at(self, num_slots: int) -> StageProfile:
    """Returns the profile of the smallest size that holds so many slots; of the
    largest one if none does."""
    at = int(np.searchsorted(self.slots, num_slots))
    return self.profiles[min(at, len(self.profiles) - 1)]

  def to_json(self) -> str:
    """Returns a JSON document; `from_json` reads it back unchanged."""
    return json.dumps(
      {
        str(size): dataclasses.asdict(profile)
        for size, profile in zip(self.slots, self.profiles, strict=True)
      },
      indent=1,
    )

  @classmethod
  def from_json(cls, text: str) -> Self:
    """Returns the profiles of `to_json`; the document of a single
    `StageProfile` is read as one that holds for any size.

    Raises:
      ValueError: naming wrong fields.
    """
    data = json.loads(text)
    if isinstance(data, dict) and data and all(k.isdecimal() for k in data):
      items = sorted((int(k), json.dumps(v)) for k, v in data.items())
      return cls(
        tuple(size for size, _ in items),
        tuple(StageProfile.from_json(profile) for _, profile in items),
      )
    return cls((1,), (StageProfile.from_json(text),))


def lap_model(
  ring: Ring, profile: StageProfile, hop_bytes: HopBytes
) -> Callable[[int], float]:
  """Returns `lap_s(num_rows)`, the cost that tree builders take.

  `num_rows` counts the root, which is computed but not drafted. The sum is
  `lap_time_s` evaluated in float64 on the host, fast enough to be asked for
  every size.

  Raises:
    ValueError: if ring, profile and byte model disagree on the stage count.
  """
  hops = ring.num_stages + 1
  if profile.num_stages != ring.num_stages:
    raise ValueError(
      f"profile.num_stages = {profile.num_stages}: must be the ring's "
      f"{ring.num_stages}"
    )
  shape = hop_bytes(1).shape
  if shape != (hops,):
    raise ValueError(f"hop_bytes(1) has shape {shape}: must be ({hops},)")
  delay_s = float(np.sum(np.asarray(ring.rtt_s, np.float64))) / 2
  s_per_byte = 8 / np.asarray(ring.bandwidth_bps, np.float64)

  def lap_s(num_rows: int) -> float:
    return (
      delay_s
      + float(np.sum(hop_bytes(num_rows) * s_per_byte))
      + float(np.sum(profile.stage_s(num_rows)))
      + profile.draft_s_per_node * max(num_rows - 1, 0)
    )

  return lap_s


def _check_link(field: str, value: jax.typing.ArrayLike) -> None:
  """Checks a concrete value; traced ones (jit, grad, vmap) pass."""
  if isinstance(value, jax.core.Tracer):
    return
  number = np.asarray(value)
  if number.shape != ():
    raise ValueError(f"{field} has shape {number.shape}: must be one number")
  if field.endswith("bandwidth_bps"):
    if not number > 0:
      raise ValueError(f"{field} = {value}: must be > 0")
  elif not (np.isfinite(number) and number >= 0):
    raise ValueError(f"{field} = {value}: must be finite and >= 0")


def _floats(values: jax.typing.ArrayLike) -> jax.Array:
  return jnp.asarray(values, jnp.float32)


def _stack(values: Sequence[jax.typing.ArrayLike]) -> jax.Array:
  return jnp.stack([_floats(value) for value in values])


def _hop_times_s(ring: Ring, hop_bytes: jax.typing.ArrayLike) -> jax.Array:
  """Returns `[..., P + 1]` serialisation times, delay not included."""
  sizes = _floats(hop_bytes)
  hops = ring.num_stages + 1
  if sizes.ndim < 1 or sizes.shape[-1] != hops:
    raise ValueError(
      f"hop_bytes has shape {sizes.shape}: must be [..., {hops}]"
    )
  return 8 * sizes / jnp.broadcast_to(ring.bandwidth_bps, sizes.shape)


def _stages(ring: Ring, stage_s: jax.typing.ArrayLike) -> jax.Array:
  times = _floats(stage_s)
  if times.ndim < 1 or times.shape[-1] != ring.num_stages:
    raise ValueError(
      f"stage_s has shape {times.shape}: must be [..., {ring.num_stages}]"
    )
  return times
