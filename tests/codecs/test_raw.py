# SPDX-License-Identifier: Apache-2.0
"""Raw codecs: exact bytes, lossless where they claim it, no silent infinity."""

import struct

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax import codecs

NUMPY = {"f32": np.float32, "bf16": ml_dtypes.bfloat16, "f16": np.float16}
JITTED = {
  dtype: (
    codec := codecs.raw(dtype),
    jax.jit(codec.encode),
    jax.jit(codec.decode),
  )
  for dtype in NUMPY
}


def _round_trip(dtype, x, n):
  codec, encode, decode = JITTED[dtype]
  state = codec.init(x.shape[1])
  data = codec.pack(encode(state, x, None)[1], n)
  payload = codec.unpack(data, n, x.shape[1], len(x))
  return data, np.asarray(decode(state, payload, None)[1])


@pytest.mark.parametrize("dtype", list(NUMPY))
@given(
  seed=st.integers(0, 2**32 - 1),
  scale=st.sampled_from([1e-42, 1e-8, 1.0, 1e4]),
  n=st.integers(0, 16),
)
@settings(derandomize=True, deadline=None, max_examples=30)
def test_round_trip_is_numpys_rounding_for_any_number_of_rows(
  dtype, seed, scale, n
):
  rng = np.random.default_rng(seed)
  x = (rng.normal(size=(16, 5)) * scale).astype(np.float32)
  x[n:] = np.nan  # garbage in the padding
  data, y = _round_trip(dtype, x, n)
  expected = x[:n].astype(NUMPY[dtype])
  assert len(data) == n * codecs.raw(dtype).row_bytes(5)
  words = expected.view(f"u{expected.itemsize}")
  assert data == words.astype(f"<u{expected.itemsize}").tobytes()
  np.testing.assert_array_equal(y[:n], expected.astype(np.float32))
  np.testing.assert_array_equal(y[n:], 0)


def test_golden_bytes():
  x = np.array([[1.0, -2.5]], np.float32)
  assert _round_trip("f32", x, 1)[0] == struct.pack("<ff", 1, -2.5)
  assert _round_trip("f16", x, 1)[0] == struct.pack("<ee", 1, -2.5)
  assert _round_trip("bf16", x, 1)[0] == bytes.fromhex("803f20c0")


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_infinities_and_nans_travel(dtype):
  x = np.array([[np.nan, np.inf, -np.inf, 1.0]], np.float32)
  np.testing.assert_array_equal(_round_trip(dtype, x, 1)[1], x)


def test_bfloat16_rows_are_lossless():
  x = np.random.default_rng(0).normal(size=(4, 64)).astype(jnp.bfloat16)
  _, y = _round_trip("bf16", x, 4)
  np.testing.assert_array_equal(y.astype(jnp.bfloat16), x)


@pytest.mark.parametrize(
  ("dtype", "good", "bad"),
  [("f16", 65519.0, 65520.0), ("bf16", 3.395e38, 3.3962e38)],
)
def test_finite_overflow_is_refused_by_row_and_channel(dtype, good, bad):
  x = np.zeros((4, 8), np.float32)
  x[2, 5] = -good
  assert np.isfinite(_round_trip(dtype, x, 4)[1]).all()
  x[2, 5] = -bad
  _round_trip(dtype, x, 2)  # not among the rows that count
  with pytest.raises(
    ValueError, match=rf"raw:{dtype} cannot carry row 2, channel 5: "
  ):
    _round_trip(dtype, x, 3)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_f16_refuses_what_it_could_not_tell_from_an_overflow(value):
  x = np.zeros((4, 8), np.float32)
  x[1, 3] = value
  with pytest.raises(ValueError, match="row 1, channel 3"):
    _round_trip("f16", x, 4)
  with pytest.raises(ValueError, match="row 0, channel 1 is not finite"):
    codecs.raw("f16").unpack(struct.pack("<ee", 0, value), 1, 2, 1)


def test_a_row_is_bit_equal_in_any_bucket():
  row = np.random.default_rng(1).normal(size=64).astype(np.float32)
  for dtype in NUMPY:
    seen = set()
    for bucket, place in ((4, 0), (16, 9), (64, 63)):
      x = np.full((bucket, 64), 7e4, np.float32)
      x[place] = row
      payload = JITTED[dtype][1]((), x, None)[1]
      alone = jax.tree.map(lambda a, i=place: a[i : i + 1], payload)
      seen.add(codecs.raw(dtype).pack(alone, 1))
    assert len(seen) == 1


def test_malformed_data_is_refused():
  codec = codecs.raw("f16")
  with pytest.raises(ValueError, match="5 bytes for 2 rows: must be 12"):
    codec.unpack(b"12345", 2, 3, 4)
  with pytest.raises(ValueError, match="capacity"):
    codec.unpack(b"", 5, 3, 4)
  with pytest.raises(ValueError, match=r"raw\.dtype = 'f8'"):
    codecs.raw("f8")
