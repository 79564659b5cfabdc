# SPDX-License-Identifier: Apache-2.0
"""One drafter per request, behind one interface."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from wanspec_jax.base import Drafter


class _State(NamedTuple):
  """A sequence's own drafter and that one's state."""

  drafter: Drafter
  inner: Any


def by_request(drafters: Mapping[int, Drafter]) -> Drafter:
  """Returns a drafter that hands each sequence to the one of its request.

  For several sequences at once where a drafter knows one text only, such as
  `synthetic`, or where requests are to be drafted by different means.

  Args:
    drafters: by request key (`Sampling.seed`).

  Returns:
    A `Drafter`; all share its `params`.

  Raises:
    ValueError: by `init`, if a request's key has none.

  Example:
    >>> import drafters
    >>> from wanspec_jax.base import Anchor
    >>> right = dict(acceptance=1.0, vocab_size=10)
    >>> drafter = drafters.by_request({
    ...   0: drafters.synthetic([4, 5], **right),
    ...   1: drafters.synthetic([6, 7], **right),
    ... })
    >>> state = drafter.init(None, [3], 1)
    >>> drafter.expand(state, [Anchor(0)], 2)[1].tokens.tolist()
    [6, 7]
  """
  known = dict(drafters)

  def init(params, prompt, request_key):
    if request_key not in known:
      raise ValueError(
        f"by_request: no drafter for request key {request_key}: must be one of "
        f"{sorted(known)}"
      )
    drafter = known[request_key]
    return _State(drafter, drafter.init(params, prompt, request_key))

  def expand(state, anchors, budget, levels=None):
    inner, nodes = state.drafter.expand(state.inner, anchors, budget, levels)
    return state._replace(inner=inner), nodes

  def rebase(state, root):
    return state._replace(inner=state.drafter.rebase(state.inner, root))

  def observe(state, tokens, features=None):
    return state._replace(
      inner=state.drafter.observe(state.inner, tokens, features)
    )

  names = sorted({drafter.name for drafter in known.values()})
  return Drafter(
    f"by_request({', '.join(names)})", init, expand, rebase, observe
  )
