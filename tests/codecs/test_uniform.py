# SPDX-License-Identifier: Apache-2.0
"""The uniform quantiser against a scalar oracle, its bound and its refusals."""

import functools
import struct

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax import codecs

BF16 = ml_dtypes.bfloat16
TINY = np.finfo(np.float32).tiny


@functools.cache
def _jitted(bits, tile):
  codec = codecs.uniform(bits=bits, tile=tile)
  return codec, jax.jit(codec.encode), jax.jit(codec.decode)


def _round_trip(x, *, bits, tile, n=None):
  codec, encode, decode = _jitted(bits, tile)
  capacity, width = x.shape
  n = capacity if n is None else n
  state = codec.init(width)
  _, payload = encode(state, x, None)
  data = codec.pack(payload, n)
  assert len(data) == n * codec.row_bytes(width)
  _, y = decode(state, codec.unpack(data, n, width, capacity), None)
  return data, np.asarray(y)


def _bf16_floor(value):
  """The largest bfloat16 that is not above `value`, by trying neighbours."""
  near = np.float32(value).astype(BF16)
  if np.float64(near.astype(np.float32)) > np.float64(value):
    near = np.nextafter(near, BF16(-np.inf))
  return near


def _oracle_row(row, *, bits, tile):
  """Returns (wire bytes, reconstruction, half step) of one row, in Python."""
  top = 2**bits - 1
  lows, steps, codes, values, half = [], [], [], [], []
  for begin in range(0, len(row), tile):
    part = [
      np.float32(0) if abs(v) < 2.0**-100 else v for v in row[begin:][:tile]
    ]
    low = np.float32(_bf16_floor(min(part)))
    span = np.float32(max(part)) - low
    step = np.float32(0)
    if span > 0:
      one_over_top = np.nextafter(np.float32(1 / top), np.float32(0))
      step = -np.float32(_bf16_floor(-max(span * one_over_top, TINY)))
    lows.append(low)
    steps.append(step)
    per_step = np.float32(1) / step if step else np.float32(0)
    for value in part:
      scaled = float((value - low) * per_step)
      code = min(max(round(scaled), 0), top)  # Python rounds half to even
      codes.append(code)
      values.append(np.float32(float(low) + code * float(step)))
      half.append(float(step) / 2)
  data = b"".join(struct.pack("<f", value)[2:] for value in (*lows, *steps))
  if bits == 8:
    data += bytes(codes)
  else:
    even = codes + [0] * (len(codes) % 2)
    data += bytes(
      a + 16 * b for a, b in zip(even[0::2], even[1::2], strict=True)
    )
  return data, np.array(values, np.float32), np.array(half)


def _rows(seed, n, width, kind):
  rng = np.random.default_rng(seed)
  x = rng.normal(size=(n, width)).astype(np.float32)
  if kind == "outlier":
    x[:, rng.integers(width)] = 1000.0
  elif kind == "constant":
    x[:] = x[:, :1]
  elif kind == "zero":
    x[:] = 0
  elif kind == "huge":
    x *= np.float32(2e37)
  elif kind == "tiny":
    x *= np.float32(3e-31)  # around the smallest that counts
  elif kind == "offset":
    x = x * np.float32(1e-3) + np.float32(77.7)
  elif kind == "mixed":
    x *= np.exp(rng.normal(size=x.shape) * 6).astype(np.float32)
  return x


KINDS = (
  "normal",
  "outlier",
  "constant",
  "zero",
  "huge",
  "tiny",
  "offset",
  "mixed",
)


@given(
  seed=st.integers(0, 2**32 - 1),
  kind=st.sampled_from(KINDS),
  layout=st.sampled_from(
    [(8, 64, 128), (4, 64, 128), (4, 64, 100), (8, 16, 37), (4, 1, 7)]
  ),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_bytes_and_values_equal_the_oracle_within_half_a_step(
  seed, kind, layout
):
  bits, tile, width = layout
  x = _rows(seed, 4, width, kind)
  data, y = _round_trip(x, bits=bits, tile=tile)
  expected = [_oracle_row(row, bits=bits, tile=tile) for row in x]
  assert data == b"".join(wire for wire, _, _ in expected)
  np.testing.assert_array_equal(y, np.stack([v for _, v, _ in expected]))
  half = np.stack([h for _, _, h in expected])
  error = np.abs(y.astype(np.float64) - x)
  # Float32 rounds (x - low) / step, at most 255, and ŷ; below 2^-100 is zero.
  rounding = 2.0**-13 * half + 2.0**-23 * np.abs(y) + 2.0**-100
  assert (error <= half + rounding).all()


def test_jit_does_not_move_near_ties():
  x = _rows(0, 4, 64, "offset")  # has channels half a step between two codes
  codec, encode, decode = _jitted(8, 64)
  payload = codec.encode((), jnp.asarray(x), None)[1]
  chex.assert_trees_all_equal(payload, encode((), x, None)[1])
  y = codec.decode((), payload, None)[1]
  np.testing.assert_array_equal(y, decode((), payload, None)[1])


@pytest.mark.parametrize("bits", [8, 4])
def test_zero_rows_come_back_as_zeros_beside_wild_ones(bits):
  x = np.zeros((4, 100), np.float32)
  x[1] = 1e6
  x[3, 70] = -3.0  # only the second tile of this row
  _, y = _round_trip(x, bits=bits, tile=64)
  np.testing.assert_array_equal(y[[0, 2]], 0)
  np.testing.assert_array_equal(y[3, :64], 0)


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("value", [1.0, -77.7, 1 / 3, 3e38, -1e-29])
def test_constant_tiles_keep_bfloat16_precision_and_more(bits, value):
  x = np.full((4, 64), value, np.float32)
  _, y = _round_trip(x, bits=bits, tile=64)
  # The step is what rounding `low` down left over, divided by the codes.
  bound = abs(value) * 2.0**-7 / (2**bits - 1)
  assert (np.abs(y - x) <= bound).all()


def test_one_outlier_costs_its_own_tile_only():
  rng = np.random.default_rng(0)
  x = rng.normal(size=(4, 128)).astype(np.float32)
  x[:, 5] = 1000
  _, y = _round_trip(x, bits=8, tile=64)
  error = np.sqrt(np.mean((y - x) ** 2, axis=0))
  others = np.r_[0:5, 6:64]
  # One step is about 4 there: nearly all that the neighbours carried is lost,
  # which an error relative to the outlier would hide.
  assert np.sqrt(np.mean(error[others] ** 2)) > 0.5
  assert np.sqrt(np.mean(error[64:] ** 2)) < 0.01


@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_is_bit_equal_alone_and_among_others_in_any_bucket(bits):
  rng = np.random.default_rng(1)
  x = rng.normal(size=(64, 100)).astype(np.float32)
  x[7] = np.nan  # a neighbour that cannot be sent
  x[8] *= 1e30
  row = rng.normal(size=100).astype(np.float32)
  codec, encode, decode = _jitted(bits, 64)
  seen = set()
  for bucket, place in ((1, 0), (4, 0), (16, 9), (64, 63), (64, 0)):
    batch = x[:bucket].copy()
    batch[place] = row
    _, payload = encode((), batch, None)
    _, y = decode((), payload, None)
    alone = jax.tree.map(lambda a, i=place: a[i : i + 1], payload)
    seen.add((codec.pack(alone, 1), np.asarray(y)[place].tobytes()))
  assert len(seen) == 1


def test_only_the_first_rows_count():
  rng = np.random.default_rng(2)
  codec, _, _ = _jitted(4, 64)
  rows = rng.normal(size=(64, 100)).astype(np.float32)
  whole, _ = _round_trip(rows, bits=4, tile=64)
  size = codec.row_bytes(100)
  for n in range(65):
    x = rows.copy()
    x[n:] = np.nan  # garbage in the padding
    data, y = _round_trip(x, bits=4, tile=64, n=n)
    assert data == whole[: n * size]
    np.testing.assert_array_equal(y[n:], 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_non_finite_channels_are_refused_by_row_and_channel(value):
  x = np.ones((4, 64), np.float32)
  x[2, 17] = value
  codec, encode, _ = _jitted(8, 64)
  _, payload = encode((), x, None)
  assert len(codec.pack(payload, 2)) == 2 * codec.row_bytes(64)
  with pytest.raises(ValueError, match=r"uniform:8:64 .* row 2, channel 17:"):
    codec.pack(payload, 3)


def test_a_range_beyond_float32_is_refused_by_row_and_tile():
  x = np.zeros((4, 128), np.float32)
  x[1, 64], x[1, 65] = 3e38, -3e38
  codec, encode, _ = _jitted(8, 64)
  with pytest.raises(ValueError, match=r"row 1, channel 64: .* range"):
    codec.pack(encode((), x, None)[1], 4)


def test_golden_bytes():
  codec, encode, _ = _jitted(4, 2)
  # Tile (0, 15): low 0, step 1. Tile (-1.5, 6): low -1.5, step 0.5.
  # Short tile (2.5,): low 2.5, no step.
  x = np.array([[0, 15, -1.5, 6, 2.5]] * 4, np.float32)
  data = codec.pack(encode((), x, None)[1], 1)
  lows = bytes.fromhex("0000c0bf2040")
  steps = bytes.fromhex("803f003f0000")
  assert data == lows + steps + bytes.fromhex("f0f000")
  codec, encode, _ = _jitted(8, 3)
  x = np.array([[0, 2.5, 255]] * 4, np.float32)  # half to even: code 2
  assert codec.pack(encode((), x, None)[1], 1) == bytes.fromhex(
    "0000803f0002ff"
  )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_rows_are_quantised_as_their_float32_values(dtype):
  x = np.random.default_rng(3).normal(size=(4, 64)).astype(jnp.dtype(dtype))
  data, _ = _round_trip(x, bits=8, tile=64)
  same, _ = _round_trip(x.astype(np.float32), bits=8, tile=64)
  assert data == same


def test_malformed_data_is_refused():
  codec, encode, _ = _jitted(8, 64)
  data = codec.pack(encode((), np.ones((4, 64), np.float32), None)[1], 4)
  for bad in (b"", data[:-1], data + b"\0"):
    with pytest.raises(ValueError, match=r"bytes for 4 rows: must be 272"):
      codec.unpack(bad, 4, 64, 4)
  with pytest.raises(ValueError, match="capacity"):
    codec.unpack(data, 4, 64, 3)
  with pytest.raises(ValueError, match=r"n = 5"):
    codec.pack(encode((), np.ones((4, 64), np.float32), None)[1], 5)
  for pair in ("807f0000", "c07f0000", "0000807f", "000080bf"):
    bad = data[:68] + bytes.fromhex(pair) + data[72:]
    with pytest.raises(ValueError, match="row 1, tile 0: low ="):
      codec.unpack(bad, 4, 64, 4)


def test_same_bytes_in_64_bit_mode():
  x = np.random.default_rng(4).normal(size=(4, 64)).astype(np.float32)
  data, y = _round_trip(x, bits=4, tile=32)
  codec = codecs.uniform(bits=4, tile=32)
  with jax.enable_x64(True):
    _, payload = jax.jit(codec.encode)((), x, None)
    wide = codec.pack(payload, 4)
    _, decoded = jax.jit(codec.decode)((), payload, None)
    assert decoded.dtype == jnp.float32
  assert wide == data
  np.testing.assert_array_equal(decoded, y)


@pytest.mark.parametrize(
  "arguments", [{"bits": 3}, {"bits": 8, "tile": 0}, {"bits": 16}]
)
def test_impossible_settings_are_refused(arguments):
  with pytest.raises(ValueError, match=r"uniform\.(bits|tile) = "):
    codecs.uniform(**arguments)
