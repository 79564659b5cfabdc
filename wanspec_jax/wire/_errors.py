# SPDX-License-Identifier: Apache-2.0
"""What can go wrong on a wire, by name."""


class WireError(Exception):
  """Base of everything that this package raises about peers and bytes."""


class FrameError(WireError):
  """Bytes that are not a legal frame, or a frame whose body is not legal."""


class VersionError(FrameError):
  """A peer that speaks another protocol version.

  Attributes:
    theirs: version the peer speaks.
    ours: version this side speaks.
  """

  def __init__(self, *, theirs: int, ours: int, detail: str = ""):
    super().__init__(
      f"the peer speaks protocol version {theirs}, this side version {ours}"
      + (f" ({detail})" if detail else "")
    )
    self.theirs = theirs
    self.ours = ours


class PeerRefused(WireError):
  """One side turned the other down: wrong certificate, name or settings.

  Attributes:
    peer: name (or address) of the other side.
    reason: why, in words.
  """

  def __init__(self, peer: str, reason: str):
    super().__init__(f"{peer}: refused: {reason}")
    self.peer = peer
    self.reason = reason


class PeerLost(WireError):
  """A peer that died, hung, left or broke the protocol.

  Attributes:
    peer: name (or address) of the other side.
    cause: the first thing that went wrong on this channel, in words.
    said_goodbye: whether the peer left in good order.
  """

  def __init__(self, peer: str, cause: str, *, said_goodbye: bool = False):
    super().__init__(f"{peer}: lost: {cause}")
    self.said_goodbye = said_goodbye
    self.peer = peer
    self.cause = cause


class DeadlineExceeded(WireError):
  """A wait that took longer than it may; the peer may still be alive."""
