# SPDX-License-Identifier: Apache-2.0
"""Bytes on the wire, by link and by what they were spent on."""

from collections.abc import Mapping

TRAFFIC_CLASSES = (
  "ids",  # tokens of launched nodes
  "verdicts",  # what the tail returns, prefix included
  "topology",  # sequences, node ids and parents of launched nodes
  "activations",  # encoded hidden states
  "features",  # target features for drafters, prefix included
  "control",  # run headers, opens, closes, commits, cancels, handshakes, pings
  "trace",  # what stages tell of their timings: observation, not decoding
)


class ByteCounter:
  """Adds up bytes per link and traffic class.

  A link is any string that names a directed connection, such as
  `"coordinator>stage-0"`. What TLS and TCP add below the frames is not counted.
  """

  def __init__(self) -> None:
    self._bytes: dict[str, dict[str, int]] = {}

  def add(self, link: str, classes: Mapping[str, int]) -> None:
    """Adds `classes` (traffic class → bytes) to a link.

    Raises:
      ValueError: on an unknown class or a negative number of bytes.
    """
    for name, num_bytes in classes.items():
      if name not in TRAFFIC_CLASSES:
        raise ValueError(
          f"traffic class = {name!r}: must be one of {TRAFFIC_CLASSES}"
        )
      if num_bytes < 0:
        raise ValueError(f"classes[{name!r}] = {num_bytes}: must be >= 0")
    row = self._bytes.setdefault(link, dict.fromkeys(TRAFFIC_CLASSES, 0))
    for name, num_bytes in classes.items():
      row[name] += num_bytes

  def total(
    self, *, link: str | None = None, traffic: str | None = None
  ) -> int:
    """Returns the bytes of one link (or all) in one class (or all)."""
    classes = TRAFFIC_CLASSES if traffic is None else (traffic,)
    by_class = self.by_class(link=link)
    return sum(by_class[name] for name in classes)

  def by_class(self, *, link: str | None = None) -> dict[str, int]:
    """Returns the bytes of each class on one link, or on all together."""
    rows = self._bytes.values() if link is None else [self._bytes.get(link, {})]
    return {
      name: sum(row.get(name, 0) for row in rows) for name in TRAFFIC_CLASSES
    }

  def as_dict(self) -> dict[str, dict[str, int]]:
    """Returns a copy as plain dictionaries: link → class → bytes."""
    return {link: dict(row) for link, row in self._bytes.items()}

  def merge(self, other: "ByteCounter") -> "ByteCounter":
    """Returns a new counter with the bytes of both."""
    merged = ByteCounter()
    for counter in (self, other):
      for link, row in counter.as_dict().items():
        merged.add(link, row)
    return merged

  @classmethod
  def from_dict(cls, rows: Mapping[str, Mapping[str, int]]) -> "ByteCounter":
    """Inverts `as_dict`, for counts that travelled as JSON or in a frame."""
    counter = cls()
    for link, row in rows.items():
      counter.add(link, row)
    return counter
