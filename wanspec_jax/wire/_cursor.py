# SPDX-License-Identifier: Apache-2.0
"""Reads a frame's body front to back, checks it, and books its bytes."""

import struct

from wanspec_jax.wire._errors import FrameError
from wanspec_jax.wire._varint import decode_varint, decode_varints


class Cursor:
  """A position in a body; every read names the field for its error.

  Attributes:
    classes: bytes booked so far by `mark`, per traffic class.
  """

  def __init__(self, body: bytes | memoryview):
    self.classes: dict[str, int] = {}
    self._body = memoryview(body)
    self._offset = 0
    self._marked = 0

  @property
  def remaining(self) -> int:
    return len(self._body) - self._offset

  def mark(self, traffic: str) -> None:
    """Books the bytes read since the last mark under a traffic class."""
    num_bytes = self._offset - self._marked
    if num_bytes:
      self.classes[traffic] = self.classes.get(traffic, 0) + num_bytes
    self._marked = self._offset

  def varint(self, field: str, limit: int) -> int:
    """Reads an integer in `[0, limit)`."""
    try:
      value, self._offset = decode_varint(self._body, self._offset)
    except FrameError as error:
      raise FrameError(f"{field}: {error}") from error
    if value >= limit:
      raise FrameError(f"{field} = {value}: must lie in [0, {limit})")
    return value

  def varints(self, count: int, field: str, limit: int) -> list[int]:
    """Reads `count` integers in `[0, limit)`."""
    try:
      values, self._offset = decode_varints(self._body, self._offset, count)
    except FrameError as error:
      raise FrameError(f"{field}: {error}") from error
    if values and max(values) >= limit:
      raise FrameError(f"{field} = {max(values)}: must lie in [0, {limit})")
    return values

  def optional(self, field: str, limit: int, present: int) -> int:
    """Reads a positive integer if `present`; zero is never sent."""
    if not present:
      return 0
    value = self.varint(field, limit)
    if value == 0:
      raise FrameError(f"{field}: sent although it is zero")
    return value

  def count(self, field: str, limit: int) -> int:
    """Reads a length in `[1, limit)` of items that take a byte at least."""
    value = self.varint(field, limit)
    if not 0 < value <= self.remaining:
      raise FrameError(
        f"{field}: {value} items in {self.remaining} bytes that are left"
      )
    return value

  def take(self, num_bytes: int, field: str) -> memoryview:
    """Returns a view of the next bytes."""
    if num_bytes > self.remaining:
      raise FrameError(f"{field}: truncated")
    view = self._body[self._offset : self._offset + num_bytes]
    self._offset += num_bytes
    return view

  def byte(self, field: str, limit: int) -> int:
    value = self.take(1, field)[0]
    if value >= limit:
      raise FrameError(f"{field} = {value}: must lie in [0, {limit})")
    return value

  def double(self, field: str) -> float:
    return struct.unpack("<d", self.take(8, field))[0]

  def rest(self) -> memoryview:
    """Returns a view of all that is left."""
    return self.take(self.remaining, "payload")

  def finish(self, traffic: str) -> None:
    """Books the last bytes; raises `FrameError` if some were not read."""
    self.mark(traffic)
    if self.remaining:
      raise FrameError(f"{self.remaining} bytes behind the end of the message")
