# SPDX-License-Identifier: Apache-2.0
"""Hidden states as plain floats: what every other codec is compared with."""

from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import numpy as np

from wanspec_jax.base import Codec
from wanspec_jax.codecs import _edge

DTYPES = {"f32": jnp.float32, "bf16": jnp.bfloat16, "f16": jnp.float16}

_RULES = {
  "f32": "beyond ±3.4028e38, so infinite in float32",
  "bf16": "beyond ±3.3895e38, so infinite in bfloat16",
  "f16": "not finite, or beyond ±65504, so infinite in float16",
}


class RawPayload(NamedTuple):
  """Rows on their way.

  Attributes:
    values: `[N, D]` the rows in the wire's dtype.
    refused: `[N]` int32 first channel that the dtype cannot represent, D if the
      row is fine.
  """

  values: Any
  refused: Any


def raw(dtype: str = "bf16") -> Codec:
  """Returns the codec that sends every channel as a little-endian float.

  Rounding is to the nearest, ties to even, without a state or any dependence on
  other rows. No finite number ever becomes an infinity silently: `pack` raises
  `ValueError` naming row and channel. Infinities and NaNs of the input itself
  travel as they are with f32 and bf16; with f16, where they could not be told
  from an overflow downstream, `pack` refuses them as well.

  Args:
    dtype: `"f32"` (lossless for float32 rows), `"bf16"` (lossless for bfloat16
      rows) or `"f16"` (three more bits of precision, range ±65504).

  Raises:
    ValueError: for any other `dtype`.
  """
  if dtype not in DTYPES:
    raise ValueError(f"raw.dtype = {dtype!r}: must be one of {list(DTYPES)}")
  name = f"raw:{dtype}"
  wire_dtype = jnp.dtype(DTYPES[dtype])

  def row_bytes(width: int) -> int:
    return width * wire_dtype.itemsize

  def encode(state: Any, x: jax.Array, side: Any = None):
    del side
    chex.assert_rank(x, 2)
    values = x.astype(wire_dtype)
    refused = ~jnp.isfinite(values)
    if dtype != "f16":
      refused &= jnp.isfinite(x)
    return state, RawPayload(values, _edge.first_true(refused))

  def decode(state: Any, payload: RawPayload, side: Any = None):
    del side
    return state, payload.values.astype(jnp.float32)

  def pack(payload: RawPayload, n: int) -> bytes:
    width = payload.values.shape[1]
    _edge.check_rows(name, payload.refused, n, width, _RULES[dtype])
    return _edge.to_wire(np.asarray(payload.values)[:n]).tobytes()

  def unpack(data: bytes, n: int, width: int, capacity: int) -> RawPayload:
    octets = _edge.split_rows(name, data, n, row_bytes(width), capacity)
    values = _edge.from_wire(octets, wire_dtype, width)
    if dtype == "f16" and not np.isfinite(values).all():
      row, channel = np.argwhere(~np.isfinite(values))[0]
      raise ValueError(
        f"{name}: row {row}, channel {channel} is not finite; `pack` never"
        " sends that"
      )
    return RawPayload(
      values=_edge.pad_rows(values, capacity),
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
