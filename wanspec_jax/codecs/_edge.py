# SPDX-License-Identifier: Apache-2.0
"""What codecs share at the host edge: refusals by name, lengths, padding."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np


def first_true(mask: jax.Array) -> jax.Array:
  """Returns the `[N]` int32 column of each row's first true, D if it has none.

  Args:
    mask: `[N, D]` bool.
  """
  first = jnp.argmax(mask, axis=-1).astype(jnp.int32)
  return jnp.where(jnp.any(mask, axis=-1), first, jnp.int32(mask.shape[-1]))


def check_rows(name: str, refused: Any, n: int, width: int, rule: str) -> None:
  """Refuses to pack rows that the codec cannot represent.

  Args:
    name: the codec's spec, for the message.
    refused: `[N]` int32 first channel that cannot be represented, `width` for
      rows that are fine.
    n: how many rows count.
    width: D.
    rule: what makes a channel impossible.

  Raises:
    ValueError: naming the first such row and channel, or `n` if it exceeds the
      rows that the payload has.
  """
  refused = np.asarray(refused)
  if not 0 <= n <= len(refused):
    raise ValueError(
      f"{name}: pack(n = {n}): must lie in [0, {len(refused)}], the rows of"
      " the payload"
    )
  rows = np.flatnonzero(refused[:n] < width)
  if len(rows):
    raise ValueError(
      f"{name} cannot carry row {rows[0]}, channel {refused[rows[0]]}: {rule}"
    )


def split_rows(
  name: str, data: bytes, n: int, row_bytes: int, capacity: int
) -> np.ndarray:
  """Returns `data` as `[n, row_bytes]` uint8 (a read-only view).

  Raises:
    ValueError: if `n` does not fit `capacity`, or `data` has another length
      than `n` rows have.
  """
  if not 0 <= n <= capacity:
    raise ValueError(
      f"{name}: unpack(n = {n}): must lie in [0, {capacity}], the capacity"
    )
  if len(data) != n * row_bytes:
    raise ValueError(
      f"{name}: {len(data)} bytes for {n} rows: must be {n * row_bytes}"
      f" ({row_bytes} a row)"
    )
  return np.frombuffer(data, np.uint8).reshape(n, row_bytes)


def pad_rows(x: np.ndarray, capacity: int) -> np.ndarray:
  """Returns `[capacity, …]`: the rows of `x`, then zeros."""
  padded = np.zeros((capacity, *x.shape[1:]), x.dtype)
  padded[: len(x)] = x
  return padded


def from_wire(octets: np.ndarray, dtype: Any, columns: int) -> np.ndarray:
  """Returns `[n, columns]` values of `dtype` from little-endian `octets`."""
  size = np.dtype(dtype).itemsize
  words = np.ascontiguousarray(octets).view(f"<u{size}")
  return words.astype(f"=u{size}").view(dtype).reshape(len(octets), columns)


def to_wire(values: np.ndarray) -> np.ndarray:
  """Returns `[n, columns * itemsize]` uint8: `values`, little-endian."""
  size = values.dtype.itemsize
  words = np.ascontiguousarray(values).view(f"=u{size}").astype(f"<u{size}")
  return words.view(np.uint8).reshape(len(values), values.shape[1] * size)
