# SPDX-License-Identifier: Apache-2.0
"""A chain of drafters, each checked by the next: PipeSpec's hierarchy."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from wanspec_jax.base import Anchor, Drafter, Nodes

_CHOICES = 4  # children asked for per position; the likeliest is the word


@dataclasses.dataclass(slots=True)
class NestedState:
  """States of all models, and what they have done; a mutable host object.

  Attributes:
    states: of each model, smallest first.
    passes: forward passes of each model so far: what they cost is for the
      experiment to say.
  """

  states: list[Any]
  passes: list[int]


def nested(models: Sequence[Drafter], *, window: int = 8) -> Drafter:
  """Returns what the last of several models drafts, found faster by the others.

  PipeSpec (https://arxiv.org/abs/2505.01572) has k + 1 models M₀ (smallest) …
  M_k, of which the last is the target; this is M₀ … M_{k−1} as one drafter. M₀
  drafts `window` tokens, one pass each. M_i (i ≥ 1) takes what M_{i−1} puts
  out, `window` tokens at a time, says in one pass what it would have said at
  each position, keeps the longest prefix that is the same, and adds its own
  token. So what comes out is M_{k−1}'s own chain, token for token, whatever the
  smaller models are; they save passes of it: with agreement α it takes one for

    Ω(γ, α) = (1 − α^{γ+1}) / (1 − α)        γ = `window`

  tokens instead of one for each. The paper's models all run at the same time,
  which is a matter of what passes cost, not of what is drafted:
  `schedules.always_rolling` has the tokens per pass then.

  Args:
    models: smallest first; each is used as a chain: one anchor's likeliest
      child is its word.
    window: tokens that a model checks in one pass. The paper's best is 8 for
      synchronous chains; asynchronous ones take whatever is there.

  Returns:
    A `Drafter` with a `NestedState`. `params` of its `init` is None or one
    item per model. Of several anchors each gets its own chain and an equal
    share of the budget.

  Raises:
    ValueError: no model, `window` not positive, or as many params as models
      are not given.
  """
  models = tuple(models)
  if not models or window < 1:
    raise ValueError(
      f"nested: {len(models)} models, window = {window}: needs at least one of "
      "each"
    )

  def words(
    state: NestedState, which: int, anchors: Sequence[Anchor]
  ) -> list[tuple[int, float] | None]:
    """Returns a model's word (token, log q) behind each anchor: one pass."""
    state.passes[which] += 1
    state.states[which], nodes = models[which].expand(
      state.states[which], anchors, _CHOICES * len(anchors), 1
    )
    best: list[tuple[int, float] | None] = [None] * len(anchors)
    for token, parent, log_q in zip(
      nodes.tokens.tolist(),
      nodes.parents.tolist(),
      nodes.log_q.tolist(),
      strict=True,
    ):
      known = best[parent]
      if known is None or log_q > known[1]:
        best[parent] = (token, log_q)
    return best

  def chain(
    state: NestedState, which: int, anchor: Anchor, length: int
  ) -> list[tuple[int, float]]:
    """Returns up to `length` tokens of a model's own chain below an anchor."""
    out: list[tuple[int, float]] = []
    while len(out) < length:
      path = anchor.path + tuple(token for token, _ in out)
      guess: list[int] = []
      if which:
        most = min(window, length - len(out) - 1)
        below = chain(state, which - 1, Anchor(anchor.id, path), most)
        guess = [token for token, _ in below]
      # Distinct ids tell the anchors apart, should a model look at them.
      anchors = [
        Anchor(anchor.id + i, path + tuple(guess[:i]))
        for i in range(len(guess) + 1)
      ]
      for i, word in enumerate(words(state, which, anchors)):
        if word is None:  # it has nothing to say here
          return out
        out.append(word)
        if i == len(guess) or word[0] != guess[i]:
          break
    return out

  def init(params: Any, prompt: Sequence[int], request_key: int) -> NestedState:
    each = (None,) * len(models) if params is None else tuple(params)
    if len(each) != len(models):
      raise ValueError(
        f"nested: {len(each)} params for {len(models)} models: must be as many"
      )
    states = [
      model.init(one, prompt, request_key)
      for model, one in zip(models, each, strict=True)
    ]
    return NestedState(states, [0] * len(models))

  def expand(
    state: NestedState,
    anchors: Sequence[Anchor],
    budget: int,
    levels: int | None = None,
  ) -> tuple[NestedState, Nodes]:
    nodes: list[tuple[int, int, float]] = []
    for row, anchor in enumerate(anchors):
      share = (budget - len(nodes)) // (len(anchors) - row)
      most = share if levels is None else min(share, levels)
      parent = row
      for token, log_q in chain(state, len(models) - 1, anchor, most):
        nodes.append((token, parent, log_q))
        parent = len(anchors) + len(nodes) - 1
    return state, Nodes(
      np.array([n[0] for n in nodes], np.int32),
      np.array([n[1] for n in nodes], np.int32),
      np.array([n[2] for n in nodes], np.float32),
    )

  def rebase(state: NestedState, root: Anchor) -> NestedState:
    state.states = [
      model.rebase(inner, root)
      for model, inner in zip(models, state.states, strict=True)
    ]
    return state

  def observe(
    state: NestedState, tokens: Sequence[int], features: Any = None
  ) -> NestedState:
    state.states = [
      model.observe(inner, tokens, features)
      for model, inner in zip(models, state.states, strict=True)
    ]
    return state

  name = f"nested({', '.join(model.name for model in models)})"
  return Drafter(name, init, expand, rebase, observe)
