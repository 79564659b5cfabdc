# SPDX-License-Identifier: Apache-2.0
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax.wire import FrameError
from wanspec_jax.wire._varint import (
  decode_varint,
  decode_varints,
  encode_varint,
  encode_varints,
  unzigzag,
  zigzag,
)

# From the LEB128 and Protocol Buffers documentation, and the two ends.
KNOWN = {
  0: "00",
  1: "01",
  127: "7f",
  128: "8001",
  300: "ac02",
  624485: "e58e26",
  2**63 - 1: "ffffffffffffffff7f",
}
NUMBERS = st.one_of(
  st.integers(0, 300),
  st.integers(0, 2**63 - 1),
  st.integers(0, 62).map(lambda bits: 1 << bits),
)


@pytest.mark.parametrize(("value", "encoded"), KNOWN.items())
def test_known_encodings(value, encoded):
  data = bytes.fromhex(encoded)
  assert encode_varint(value) == data
  assert encode_varints([value]) == data
  assert decode_varint(data + b"\x55", 0) == (value, len(data))


@settings(derandomize=True, deadline=None)
@given(st.lists(NUMBERS, max_size=120), st.binary(max_size=3))
def test_many_agree_with_one_at_a_time(values, behind):
  data = b"".join(map(encode_varint, values))
  assert encode_varints(values) == data
  decoded, offset = decode_varints(b"\x07" + data + behind, 1, len(values))
  assert decoded == values
  assert offset == 1 + len(data)


@pytest.mark.parametrize(
  ("encoded", "message"),
  [
    ("", "truncated"),
    ("80", "truncated"),
    ("8000", "needless"),
    ("ff" * 9 + "01", "longer than 9"),
  ],
)
def test_bad_encodings_are_refused(encoded, message):
  data = bytes.fromhex(encoded)
  with pytest.raises(FrameError, match=message):
    decode_varint(data, 0)
  with pytest.raises(FrameError):
    decode_varints(b"\x01" + data, 0, 2)
  with pytest.raises(FrameError):  # many at once, too
    decode_varints(b"\x01" * 99 + data, 0, 100)


@pytest.mark.parametrize("value", [-1, 2**63])
def test_out_of_range_is_refused(value):
  with pytest.raises(ValueError, match="varint value"):
    encode_varint(value)
  with pytest.raises(ValueError, match="varint value"):
    encode_varints([0] * 99 + [value])


def test_zigzag_keeps_small_numbers_small():
  assert [zigzag(value) for value in (0, -1, 1, -2, 2)] == [0, 1, 2, 3, 4]
  for value in (*range(-9, 9), -(2**31), 2**31 - 1):
    assert unzigzag(zigzag(value)) == value
