# SPDX-License-Identifier: Apache-2.0
"""The outer frame: a short prefix, a length, a body.

  byte 0      0x57 ('W')
  byte 1      protocol version (high nibble) | kind (low nibble)
  varint      length of the body, at most five bytes
  body        a msgpack map, or what `_runs`, `_returned` and `_cancels` pack

This prefix, the kinds HELLO and REFUSE, and the `reason` of a REFUSE are the
same in every protocol version, so that peers of different versions can tell
each other so.
"""

import enum
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import msgpack

from wanspec_jax.wire._errors import FrameError, VersionError
from wanspec_jax.wire._varint import decode_varint, encode_varint

MAGIC = 0x57
PROTOCOL_VERSION = 1
MAX_BODY_BYTES = 256 * 2**20
MAX_CONTROL_BYTES = 2**20  # as objects they take up to 64 times as much
_MAX_LENGTH_BYTES = 5  # a body of at most 2**35 - 1 bytes


class Kind(enum.IntEnum):
  """What a frame carries; four bits."""

  HELLO = 0  # opens a channel: name, role, settings that must agree
  ACCEPT = 1
  REFUSE = 2
  RUN = 3
  RETURNED = 4
  FEATURES = 5  # target features of a run, for drafters
  PING = 6
  PONG = 7
  FAULT = 8  # first cause of a failure and who saw it
  TRACE = 9  # timings and counters
  BYE = 10
  CONTROL = 11  # any other map: requests, tokens for clients, settings
  CANCEL = 12  # nodes that need not be computed any more


CONTROL_KINDS = frozenset(Kind) - {
  Kind.RUN,
  Kind.RETURNED,
  Kind.FEATURES,
  Kind.CANCEL,
}
_SMALL_KINDS = CONTROL_KINDS | {Kind.CANCEL}
_KIND_VALUES = frozenset(kind.value for kind in Kind)
_EVERY_VERSION = (Kind.HELLO, Kind.REFUSE)


class Frame(NamedTuple):
  """A received frame.

  Attributes:
    kind: what it carries.
    body: read-only view of the body; payloads are views into it.
    version: protocol version of the sender.
    num_bytes: length on the wire, prefix included.
  """

  kind: Kind
  body: memoryview
  version: int
  num_bytes: int


def encode_frame(
  kind: Kind,
  *parts: bytes | bytearray | memoryview,
  version: int = PROTOCOL_VERSION,
) -> bytes:
  """Returns one frame whose body is the concatenation of `parts`.

  Raises:
    ValueError: if the body is too long for any receiver.
  """
  length = sum(memoryview(part).nbytes for part in parts)
  if length >= 1 << 7 * _MAX_LENGTH_BYTES:
    raise ValueError(f"frame body = {length} bytes: must be under 2**35")
  prefix = bytes((MAGIC, version << 4 | kind)) + encode_varint(length)
  return b"".join((prefix, *parts))


class FrameDecoder:
  """Cuts a byte stream into frames; never reads, waits or looks at bodies.

  The body grows with the bytes that arrive, whatever its length field claims,
  and a length over the cap is refused before the body starts.
  """

  def __init__(self, *, max_body_bytes: int = MAX_BODY_BYTES):
    if not 0 < max_body_bytes < 1 << 7 * _MAX_LENGTH_BYTES:
      raise ValueError(
        f"max_body_bytes = {max_body_bytes}: must lie in (0, 2**35)"
      )
    self._max_body_bytes = max_body_bytes
    self._prefix = bytearray()
    self._body = bytearray()
    self._length: int | None = None
    self._error: str | None = None

  @property
  def mid_frame(self) -> bool:
    """Whether a frame has begun and not ended."""
    return bool(self._prefix)

  def feed(self, data: bytes | bytearray | memoryview) -> Iterator[Frame]:
    """Yields the frames that end within `data`; to be exhausted.

    Raises:
      FrameError: on bytes that cannot be a frame, and ever after.
      VersionError: on a frame of another protocol version.
    """
    if self._error is not None:
      raise FrameError(f"stream already refused: {self._error}")
    view = memoryview(data)
    offset = 0
    while offset < len(view):
      try:
        if self._length is None:
          self._prefix.append(view[offset])
          offset += 1
          self._length = self._check_prefix()
        else:
          end = offset + self._length - len(self._body)
          self._body += view[offset:end]
          offset = min(end, len(view))
      except FrameError as error:
        self._error = str(error)
        raise
      if self._length is not None and len(self._body) == self._length:
        yield self._finish()

  def _check_prefix(self) -> int | None:
    """Returns the body's length once the prefix is complete."""
    prefix = self._prefix
    if prefix[0] != MAGIC:
      hint = " (a TLS peer?)" if prefix[0] in (0x15, 0x16) else ""
      raise FrameError(f"bad magic byte 0x{prefix[0]:02x}{hint}")
    if len(prefix) == 1:
      return None
    version, kind = divmod(prefix[1], 16)
    if version != PROTOCOL_VERSION and kind not in _EVERY_VERSION:
      raise VersionError(theirs=version, ours=PROTOCOL_VERSION)
    if kind not in _KIND_VALUES:
      raise FrameError(f"unknown frame kind {kind}")
    if len(prefix) == 2 or (
      prefix[-1] >= 0x80 and len(prefix) < 2 + _MAX_LENGTH_BYTES
    ):
      return None
    if prefix[-1] >= 0x80:
      raise FrameError(f"length field over {_MAX_LENGTH_BYTES} bytes")
    length, _ = decode_varint(bytes(prefix), 2)
    cap = self._max_body_bytes
    if kind in _SMALL_KINDS:
      cap = min(cap, MAX_CONTROL_BYTES)
    if length > cap:
      raise FrameError(
        f"{Kind(kind).name} body of {length} bytes: over the cap of {cap}"
      )
    return length

  def _finish(self) -> Frame:
    version, kind = divmod(self._prefix[1], 16)
    frame = Frame(
      Kind(kind),
      memoryview(self._body).toreadonly(),
      version,
      len(self._prefix) + len(self._body),
    )
    self._prefix = bytearray()
    self._body = bytearray()  # a new one: the frame keeps the old
    self._length = None
    return frame


def split_frame(data: bytes | bytearray | memoryview) -> Frame:
  """Returns the one frame that `data` consists of.

  Raises:
    FrameError: if it is not exactly one frame.
  """
  decoder = FrameDecoder()
  frames = list(decoder.feed(data))
  if len(frames) != 1 or decoder.mid_frame:
    raise FrameError(f"{len(data)} bytes: not exactly one frame")
  return frames[0]


def encode_control(
  kind: Kind, fields: Mapping[str, Any], *, version: int = PROTOCOL_VERSION
) -> bytes:
  """Returns a frame whose body is a msgpack map with string keys.

  Raises:
    ValueError: if `kind` has a body of another form, or the body is too large.
  """
  if kind not in CONTROL_KINDS:
    raise ValueError(f"kind = {kind!r}: its body is not a map")
  body = cast(bytes, msgpack.packb(dict(fields), use_bin_type=True))
  if len(body) > MAX_CONTROL_BYTES:
    raise ValueError(
      f"{kind.name} body = {len(body)} bytes: must be <= {MAX_CONTROL_BYTES}"
    )
  return encode_frame(kind, body, version=version)


def _no_extensions(code: int, data: bytes) -> Any:
  raise ValueError(f"extension type {code}")


def decode_control(frame: Frame) -> dict[str, Any]:
  """Returns the map that a control frame carries.

  Values are None, bool, int, float, str, bytes, lists and maps of those, with
  string keys; msgpack extensions are refused.

  Raises:
    FrameError: if the body is anything else.
  """
  if frame.kind not in CONTROL_KINDS:
    raise FrameError(f"{frame.kind.name}: the body is not a map")
  try:
    fields = msgpack.unpackb(
      frame.body,
      raw=False,
      strict_map_key=True,
      max_ext_len=0,
      ext_hook=_no_extensions,
    )
  except (
    ValueError,
    TypeError,
    RecursionError,
    msgpack.exceptions.UnpackException,
  ) as error:
    raise FrameError(f"{frame.kind.name}: malformed map ({error})") from error
  if not isinstance(fields, dict):
    raise FrameError(f"{frame.kind.name}: the body is not a map")
  if not all(isinstance(key, str) for key in fields):
    raise FrameError(f"{frame.kind.name}: the keys must be strings")
  return fields
