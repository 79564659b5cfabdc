# SPDX-License-Identifier: Apache-2.0
"""Uniform quantisation of hidden states, tile by tile within each row.

Why affine (lowest value and step) and not symmetric (largest magnitude): hidden
states have a few channels that are large on one side. On the residual stream
of SmolLM2-135M (Q4_1 weights; 600 tokens of GSM8K problems; after layers 8, 15
and 23; the first token left out), the root-mean-square error relative to that
of the rows was, at the same rate:

| bits a channel | affine, tiles of 64 | symmetric, tiles of 32 |
|---|---|---|
| 8.5 | 0.8-0.9% | 1.0% |
| 4.5 | 14-15% | 15-17% |

(Gaussian rows: 0.54% for both, and 9.0% against 9.7%.) One channel far
above the others costs its whole tile precision, whatever the quantiser; that
needs a transform in front.
"""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from wanspec_jax.base import Codec
from wanspec_jax.codecs import _edge

_TINY = float(np.finfo(np.float32).tiny)  # smallest normal, in bfloat16 too

# With nothing but zero below this, differences are multiples of 2^-123: no
# subnormal arises, so that backends which flush them agree with the others.
_SMALLEST = 2.0**-100

_RULE = "not finite, or in a tile whose range exceeds float32"


class UniformPayload(NamedTuple):
  """Quantised rows; `G` = ⌈D / tile⌉ tiles.

  Attributes:
    lows: `[N, G]` bfloat16 lowest value of each tile, rounded down.
    steps: `[N, G]` bfloat16 quantiser step, rounded up; 0 where all values
      equal `lows`.
    codes: `[N, D]` uint8 integers in `[0, 2^bits)`.
    refused: `[N]` int32 first channel that cannot be represented, D if none.
  """

  lows: Any
  steps: Any
  codes: Any
  refused: Any


def uniform(bits: int = 8, tile: int = 64) -> Codec:
  """Returns the affine quantiser with one (low, step) pair per tile of a row.

  With m = 2^bits − 1, for the channels x of one tile:

    low  = min x, rounded down to bfloat16
    step = (max x − low) / m, rounded up to bfloat16
    q    = min(round((x − low) / step), m),    x̂ = low + q · step

  which is step 4 of TAH-Quant (https://arxiv.org/abs/2506.01352). Rounding
  outwards, and quantising with what was rounded, keeps |x − x̂| ≤ step / 2, ends
  included, but for float32's own rounding (2⁻¹³ of that, and one unit in the
  last place of x̂). bfloat16 has float32's range, so magnitude never overflows
  a pair, and q · step has at most 16 significant bits, hence x̂ is rounded once
  and is the same number on every backend, fused multiply-add or not. Both
  divisions are products with reciprocals, because XLA turns some divisions into
  that, depending on what surrounds them.

  Zero tiles come back as exact zeros. Channels below 2⁻¹⁰⁰ in magnitude count
  as zero. Rounding is half to even. A row's bytes depend on that row alone.
  `pack` refuses non-finite channels, and tiles whose range exceeds float32, and
  names row and channel. The last tile is shorter when `tile` does not divide
  the width.

  On the wire a row is its lows, its steps (little-endian bfloat16) and its
  codes; 4-bit codes travel two to a byte, even channel in the low half, with
  a zero half at the end of an odd row.

  Args:
    bits: 8 or 4.
    tile: channels per tile, at least 1.

  Raises:
    ValueError: for other `bits` or `tile`.
  """
  if bits not in (4, 8):
    raise ValueError(f"uniform.bits = {bits!r}: must be 4 or 8")
  if tile < 1:
    raise ValueError(f"uniform.tile = {tile!r}: must be at least 1")
  name = f"uniform:{bits}:{tile}"
  top = 2**bits - 1
  # Rounded down, so that a range of exactly m steps does not gain a step's ulp.
  per_top = np.nextafter(np.float32(1 / top), np.float32(0))

  def num_tiles(width: int) -> int:
    return -(-width // tile)

  def row_bytes(width: int) -> int:
    return 4 * num_tiles(width) + -(-width * bits // 8)

  def encode(state: Any, x: jax.Array, side: Any = None):
    del side
    chex.assert_rank(x, 2)
    width = x.shape[1]
    x = x.astype(jnp.float32)
    finite = jnp.isfinite(x)
    x = jnp.where(jnp.abs(x) < _SMALLEST, jnp.float32(0), x)
    tiles = _to_tiles(x, tile)
    lows = _round_down(jnp.min(tiles, axis=-1))
    low = lows.astype(jnp.float32)
    span = jnp.max(tiles, axis=-1) - low
    steps = -_round_down(-jnp.maximum(span * per_top, _TINY))
    steps = jnp.where(span > 0, steps, jnp.bfloat16(0))
    step = steps.astype(jnp.float32)
    per_step = 1 / jnp.where(step > 0, step, jnp.float32(1))
    scaled = (tiles - low[..., None]) * per_step[..., None]
    codes = jnp.minimum(jnp.round(scaled), top).astype(jnp.uint8)
    # The largest code must decode to something finite as well.
    fits = jnp.repeat(jnp.isfinite(low + top * step), tile, axis=-1)
    refused = ~(finite & fits[:, :width])
    # A non-finite channel is the cause; what it does to its tile is not.
    refused = jnp.where(
      jnp.all(finite, axis=-1, keepdims=True), refused, ~finite
    )
    return state, UniformPayload(
      lows=lows,
      steps=steps,
      codes=codes.reshape(len(x), -1)[:, :width],
      refused=_edge.first_true(refused),
    )

  def decode(state: Any, payload: UniformPayload, side: Any = None):
    del side
    rows, width = payload.codes.shape
    codes = _to_tiles(payload.codes, tile).astype(jnp.float32)
    low = payload.lows.astype(jnp.float32)[..., None]
    step = payload.steps.astype(jnp.float32)[..., None]
    return state, (low + codes * step).reshape(rows, -1)[:, :width]

  def pack(payload: UniformPayload, n: int) -> bytes:
    codes = np.asarray(payload.codes)[:n]
    _edge.check_rows(name, payload.refused, n, codes.shape[1], _RULE)
    if bits == 4:
      codes = np.pad(codes, ((0, 0), (0, codes.shape[1] % 2)))
      codes = codes[:, 0::2] | codes[:, 1::2] << 4
    lows = _edge.to_wire(np.asarray(payload.lows)[:n])
    steps = _edge.to_wire(np.asarray(payload.steps)[:n])
    return np.concatenate([lows, steps, codes], axis=1).tobytes()

  def unpack(data: bytes, n: int, width: int, capacity: int):
    octets = _edge.split_rows(name, data, n, row_bytes(width), capacity)
    groups = num_tiles(width)
    lows = _edge.from_wire(octets[:, : 2 * groups], jnp.bfloat16, groups)
    steps = _edge.from_wire(
      octets[:, 2 * groups : 4 * groups], jnp.bfloat16, groups
    )
    sound = np.isfinite(lows) & np.isfinite(steps) & (steps >= 0)
    if not sound.all():
      row, group = np.argwhere(~sound)[0]
      raise ValueError(
        f"{name}: row {row}, tile {group}: low = {lows[row, group]}, step ="
        f" {steps[row, group]}: must be finite, and the step not negative"
      )
    codes = octets[:, 4 * groups :]
    if bits == 4:
      pairs = np.stack([codes & 15, codes >> 4], axis=-1)
      codes = pairs.reshape(n, 2 * codes.shape[1])[:, :width]
    return UniformPayload(
      lows=_edge.pad_rows(lows, capacity),
      steps=_edge.pad_rows(steps, capacity),
      codes=_edge.pad_rows(codes, capacity),
      refused=np.full(capacity, width, np.int32),
    )

  return Codec(
    name=name,
    init=lambda width: (),
    encode=encode,
    decode=decode,
    pack=pack,
    unpack=unpack,
    row_bytes=row_bytes,
    row_local=True,
  )


def _to_tiles(x: jax.Array, tile: int) -> jax.Array:
  """Returns `[N, G, tile]`; a short last tile repeats its last channel."""
  short = -x.shape[1] % tile
  x = jnp.pad(x, ((0, 0), (0, short)), mode="edge")
  return x.reshape(x.shape[0], -1, tile)


def _round_down(x: jax.Array) -> jax.Array:
  """Returns the largest bfloat16 not above each float32 (0 for ±0)."""
  bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
  # Truncating a magnitude rounds towards zero: away from it for negatives.
  away = jnp.where(x < 0, jnp.uint32(0xFFFF), jnp.uint32(0))
  bits = jnp.where(x == 0, jnp.uint32(0), bits + away)
  high = (bits >> jnp.uint32(16)).astype(jnp.uint16)
  return jax.lax.bitcast_convert_type(high, jnp.bfloat16)
