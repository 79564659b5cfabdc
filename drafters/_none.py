# SPDX-License-Identifier: Apache-2.0
"""The drafter that proposes nothing: plain decoding."""

import numpy as np

from wanspec_jax.base import Drafter, Nodes


def none() -> Drafter:
  """Returns a drafter without proposals and without state.

  With it every schedule decodes one token per lap, which is the baseline that
  speed-ups are measured against.

  Example:
    >>> import drafters
    >>> drafter = drafters.none()
    >>> state = drafter.init(None, [1, 2, 3], 0)
    >>> len(drafter.expand(state, [], 64)[1].tokens)
    0
  """

  def init(params, prompt, request_key):
    del params, prompt, request_key
    return None

  def expand(state, anchors, budget, levels=None):
    del anchors, budget, levels
    return state, Nodes(
      np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    )

  def rebase(state, root):
    del root
    return state

  def observe(state, tokens, features=None):
    del tokens, features
    return state

  return Drafter("none", init, expand, rebase, observe)
