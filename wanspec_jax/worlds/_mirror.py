# SPDX-License-Identifier: Apache-2.0
"""What a client keeps so that a lost coordinator can be restarted elsewhere."""

import dataclasses
from collections.abc import Sequence

from wanspec_jax import schedules as sch


class Mirror:
  """Each request, and the tokens of its text that the client has.

  Draws are addressed by position, so a request that is resumed behind what was
  emitted ends as if nothing had happened:

    mirror = Mirror(requests)
    driver = Driver(engine, drafter, on_emit=mirror.on_emit)
    ...  # the coordinator is lost with its engine, the ring starts anew
    driver = Driver(new_engine, drafter, on_emit=mirror.on_emit)
    ring.run(driver, [(0.0, request) for request in mirror.requests()])

  Resumed requests keep their places, so sequence numbers stay the same and one
  mirror serves any number of coordinators. A text whose end the client has
  already ends at once, for the same reason. Log-probabilities are not kept.

  Args:
    requests: in the order of their sequence numbers.
  """

  def __init__(self, requests: Sequence[sch.Request]):
    self._requests = tuple(requests)
    self._tokens = [list(request.emitted) for request in requests]

  def on_emit(self, sequence: int, tokens: Sequence[int]) -> None:
    """Appends what a verdict emitted; the `on_emit` of a `Driver`."""
    self._tokens[sequence].extend(tokens)

  def tokens(self, sequence: int) -> tuple[int, ...]:
    """Returns the text so far, prompt excluded."""
    return tuple(self._tokens[sequence])

  def requests(self) -> tuple[sch.Request, ...]:
    """Returns the requests as a new coordinator must be asked them."""
    return tuple(
      dataclasses.replace(request, emitted=tuple(tokens))
      for request, tokens in zip(self._requests, self._tokens, strict=True)
    )
