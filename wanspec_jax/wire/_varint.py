# SPDX-License-Identifier: Apache-2.0
"""LEB128 variable-length integers: seven bits a byte, lowest first.

Values lie in `[0, 2**63)` and take one to nine bytes. Each value has exactly
one legal encoding, the shortest; longer ones are refused, so that equal
messages are equal bytes.
"""

from collections.abc import Sequence

import numpy as np

from wanspec_jax.wire._errors import FrameError

MAX_VARINT_BYTES = 9  # 63 bits
_FEW = 48  # below it a plain loop beats NumPy


def encode_varint(value: int) -> bytes:
  """Returns the encoding of one integer.

  Raises:
    ValueError: if `value` is outside `[0, 2**63)`.
  """
  if not 0 <= value < 2**63:
    raise ValueError(f"varint value = {value}: must lie in [0, 2**63)")
  out = bytearray()
  while value > 0x7F:
    out.append(value & 0x7F | 0x80)
    value >>= 7
  out.append(value)
  return bytes(out)


def decode_varint(data: bytes | memoryview, offset: int) -> tuple[int, int]:
  """Returns the integer at `offset` and the offset behind it.

  Raises:
    FrameError: if `data` ends early, or the encoding is longer than needed.
  """
  value = 0
  for position, byte in enumerate(data[offset : offset + MAX_VARINT_BYTES]):
    value |= (byte & 0x7F) << (7 * position)
    if byte < 0x80:
      if byte == 0 and position > 0:
        raise FrameError("varint with needless trailing zero byte")
      return value, offset + position + 1
  if len(data) - offset >= MAX_VARINT_BYTES:
    raise FrameError(f"varint longer than {MAX_VARINT_BYTES} bytes")
  raise FrameError("varint truncated")


def encode_varints(values: Sequence[int]) -> bytes:
  """Returns the concatenated encodings of several integers.

  Raises:
    ValueError: if a value is outside `[0, 2**63)`.
  """
  if len(values) < _FEW:
    return b"".join(map(encode_varint, values))
  if not 0 <= min(values) <= max(values) < 2**63:
    raise ValueError("varint values: must lie in [0, 2**63)")
  array = np.array(values, np.int64)
  lengths = np.ones(array.shape, np.int64)
  for k in range(1, MAX_VARINT_BYTES):
    lengths += array >= np.int64(1) << np.int64(7 * k)
  ends = np.cumsum(lengths)
  position = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
  septets = (np.repeat(array, lengths) >> (7 * position)) & 0x7F
  more = position < np.repeat(lengths, lengths) - 1
  return (septets | np.where(more, 0x80, 0)).astype(np.uint8).tobytes()


def decode_varints(
  data: bytes | memoryview, offset: int, count: int
) -> tuple[list[int], int]:
  """Returns `count` integers at `offset`, and the offset behind them.

  Memory is bounded by the bytes at hand, never by `count` alone.

  Raises:
    FrameError: as `decode_varint`.
  """
  few = []
  if count < _FEW:
    for _ in range(count):
      value, offset = decode_varint(data, offset)
      few.append(value)
    return few, offset
  if count > len(data) - offset:  # each takes a byte at least
    raise FrameError("varint truncated")
  window = np.frombuffer(data, np.uint8, offset=offset)
  window = window[: MAX_VARINT_BYTES * count]
  ends = np.flatnonzero(window < 0x80)[:count]
  if len(ends) < count:
    raise FrameError("varint truncated")
  starts = np.concatenate((np.zeros(1, np.int64), ends[:-1] + 1))
  lengths = ends - starts + 1
  if lengths.max() > MAX_VARINT_BYTES:
    raise FrameError(f"varint longer than {MAX_VARINT_BYTES} bytes")
  if np.any((window[ends] == 0) & (lengths > 1)):
    raise FrameError("varint with needless trailing zero byte")
  used = window[: ends[-1] + 1].astype(np.int64)
  position = np.arange(len(used)) - np.repeat(starts, lengths)
  values = np.add.reduceat((used & 0x7F) << (7 * position), starts)
  return values.tolist(), offset + len(used)


def zigzag(value: int) -> int:
  """Maps signed to unsigned so that small stays small: 0, -1, 1 → 0, 1, 2."""
  return value << 1 if value >= 0 else -value * 2 - 1


def unzigzag(value: int) -> int:
  """Inverts `zigzag`."""
  return value >> 1 if value & 1 == 0 else -(value + 1 >> 1)
