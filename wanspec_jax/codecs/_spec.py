# SPDX-License-Identifier: Apache-2.0
"""Codecs by name: what configs, the command line and the handshake use."""

import re

from wanspec_jax.base import Codec
from wanspec_jax.codecs._raw import raw
from wanspec_jax.codecs._uniform import uniform

KNOWN = (
  "raw:f32",
  "raw:bf16",
  "raw:f16",
  "uniform:8:TILE",
  "uniform:4:TILE",
)


def parse(spec: str) -> Codec:
  """Returns the codec that `spec` names.

  `Codec.name` is the canonical spec: `parse(codec.name)` behaves like `codec`.

  Args:
    spec: `"raw:DTYPE"` or `"uniform:BITS:TILE"`, e.g. `"uniform:4:64"`.

  Raises:
    ValueError: if no codec has that name; the message lists the known ones.
  """
  if match := re.fullmatch(r"raw:(f32|bf16|f16)", spec):
    return raw(match[1])
  if match := re.fullmatch(r"uniform:([48]):([1-9][0-9]{0,5})", spec):
    return uniform(bits=int(match[1]), tile=int(match[2]))
  raise ValueError(f"codec = {spec!r}: must be one of {', '.join(KNOWN)}")
