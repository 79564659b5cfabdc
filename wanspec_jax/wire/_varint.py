# SPDX-License-Identifier: Apache-2.0
"""LEB128 variable-length integers: seven bits a byte, lowest first.

Values lie in `[0, 2**63)` and take one to nine bytes. Each value has exactly
one legal encoding, the shortest; longer ones are refused, so that equal
messages are equal bytes.
"""

import numpy as np

from wanspec_jax.wire._errors import FrameError

MAX_VARINT_BYTES = 9  # 63 bits


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


def encode_varints(values: np.ndarray) -> bytes:
  """Returns the concatenated encodings of `[n]` integers.

  Raises:
    ValueError: if a value is outside `[0, 2**63)`.
  """
  values = np.asarray(values, np.int64)
  if values.size == 0:
    return b""
  if values.min() < 0:
    raise ValueError(f"varint value = {values.min()}: must not be negative")
  lengths = np.ones(values.shape, np.int64)
  for k in range(1, MAX_VARINT_BYTES):
    lengths += values >= np.int64(1) << np.int64(7 * k)
  ends = np.cumsum(lengths)
  position = np.arange(ends[-1]) - np.repeat(ends - lengths, lengths)
  septets = (np.repeat(values, lengths) >> (7 * position)) & 0x7F
  more = position < np.repeat(lengths, lengths) - 1
  return (septets | np.where(more, 0x80, 0)).astype(np.uint8).tobytes()


def decode_varints(
  data: bytes | memoryview, offset: int, count: int
) -> tuple[np.ndarray, int]:
  """Returns `[count]` int64 integers at `offset`, and the offset behind them.

  Memory is bounded by the bytes at hand, never by `count` alone.

  Raises:
    FrameError: as `decode_varint`.
  """
  if count == 0:
    return np.zeros(0, np.int64), offset
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
  return values, offset + len(used)


def zigzag(values: np.ndarray) -> np.ndarray:
  """Maps signed to unsigned so that small stays small: 0, -1, 1 → 0, 1, 2.

  Args:
    values: `[n]` integers in `(-2**62, 2**62)`.
  """
  values = np.asarray(values, np.int64)
  return (values << 1) ^ (values >> 63)


def unzigzag(values: np.ndarray) -> np.ndarray:
  """Inverts `zigzag`."""
  values = np.asarray(values, np.int64)
  return (values >> 1) ^ -(values & 1)
