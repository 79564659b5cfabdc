# SPDX-License-Identifier: Apache-2.0
"""Drafts from the text itself: what followed the same suffixes before."""

import heapq
import math
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from drafters._automaton import Context, SuffixCounts
from wanspec_jax.base import Anchor, Drafter, Nodes

# Weights of `1, ln(1 + m), ln N, ln K, c/N` in the trust in one context. Fitted
# by maximum likelihood, see `suffix`.
_WEIGHTS = (-2.51, 1.16, 1.29, -0.91, 0.91)


class _Text:
  """The committed text of one sequence, counted in bounded memory.

  `main` answers queries; `young` starts when `main` is half full and takes its
  place when `main` is full. So queries see at least the latest half of
  `max_tokens`, and forgetting costs one more append, not a rebuild.
  """

  __slots__ = ("_half", "_limits", "main", "young")

  def __init__(self, *, max_tokens: int, max_depth: int, max_children: int):
    self._half = max_tokens // 2
    self._limits = {"max_depth": max_depth, "max_children": max_children}
    self.main = SuffixCounts(**self._limits)
    self.young = SuffixCounts(**self._limits)

  def extend(self, tokens: Sequence[int]) -> None:
    for token in tokens:
      if self.main.num_tokens == 2 * self._half:
        self.main, self.young = self.young, SuffixCounts(**self._limits)
      if self.main.num_tokens >= self._half:
        self.young.append(int(token))
      self.main.append(int(token))

  def start(self, prompt: Sequence[int]) -> None:
    """Extends an empty text by `prompt`, skipping what would be forgotten."""
    blocks = (len(prompt) - 1) // self._half
    self.extend(prompt[self._half * max(0, blocks - 1) :])


class _Place(NamedTuple):
  """Where a draft may grow: a row of the result and what led to it."""

  row: int
  cursor: tuple[int, int]
  path: tuple[int, ...]  # from the root; anchors' tokens included
  depth: int  # nodes below the anchor
  max_length: int
  log_reach: float  # log-probability of getting here from the anchor


class _Level(NamedTuple):
  """What one context says: `λ c(x) / N` of its followers, and `1 − λ`."""

  shares: tuple[tuple[int, float], ...]
  doubt: float


def _check(**fields: Any) -> None:
  rules = {
    "shape": (lambda x: x in ("tree", "chain"), "must be 'tree' or 'chain'"),
    "max_depth": (lambda x: x >= 1, "must be >= 1"),
    "max_children": (lambda x: x >= 1, "must be >= 1"),
    "max_length": (lambda x: x >= 1, "must be >= 1"),
    "max_spec_factor": (lambda x: x > 0, "must be > 0"),
    "min_prob": (lambda x: 0 < x <= 1, "must lie in (0, 1]"),
    "max_tokens": (lambda x: x >= 2, "must be >= 2"),
    "weights": (lambda x: len(x) == 5, "must hold 5 numbers"),
  }
  for name, value in fields.items():
    holds, rule = rules[name]
    if not holds(value):
      raise ValueError(f"suffix: {name} = {value!r}: {rule}")


def suffix(
  *,
  shape: Literal["tree", "chain"] = "tree",
  max_depth: int = 48,
  max_children: int = 64,
  max_length: int = 64,
  max_spec_factor: float = math.inf,
  min_prob: float = 1e-3,
  max_tokens: int = 65536,
  stop_tokens: Sequence[int] = (),
  weights: Sequence[float] = _WEIGHTS,
) -> Drafter:
  """Returns a drafter that continues the text as it was continued before.

  The prompt and the committed output are kept in a suffix automaton with
  counts. The followers of the contexts that end the text, of `m = max_depth …
  0` tokens, are blended from the longest down, as in interpolated back-off and
  prediction by partial matching (Cleary and Witten 1984,
  https://doi.org/10.1109/TCOM.1984.1096090):

    P(x) = Σⱼ λⱼ Πᵢ﹤ⱼ (1 − λᵢ) · cⱼ(x) / Nⱼ,
    λ = σ(w · [1, ln(1 + m), ln N, ln K, c₁ / N])

  where a context of `m` matched tokens was followed by something `N` times, by
  `K` distinct tokens, by `x` `c(x)` times and by its most frequent follower
  `c₁` times; contexts with the same occurrences count once. What is left over
  is the probability that no proposal is right.

  `shape="tree"` grows the tree best first by the product of these
  probabilities: long matches go deep, and what they leave of the budget hedges
  at every node with followers of shorter ones. SuffixDecoding
  (https://arxiv.org/abs/2411.04975) takes the tree below a single match length
  instead. `shape="chain"` follows the most frequent follower (the latest, on a
  tie) of the longest match, as SuffixDecoding's path and n-gram drafters do,
  and stops where not even the last token has been seen before.

  `log_q` estimates acceptance under a greedy target: the default `weights`
  maximise the likelihood of greedy SmolLM2-135M-Instruct answers (128 tokens
  each) to the third to fifth question of each of the 13 Spec-Bench categories.
  On the first questions (96 tokens, 64 nodes a lap; not used for fitting) the
  tree gains 1.85 tokens per lap, a chain of 16 gains 1.38, and the tree gets
  552 nodes accepted where its probabilities add up to 491. The draft is
  deterministic, so verify it by sample-and-match or with a one-hot law, never
  with `log_q` as the law drawn from.

  The state is a mutable host object: every function updates its argument and
  returns it, so treat the argument as donated. It belongs to one sequence;
  nothing is shared between sequences. Memory is about 600 bytes (1.3 states)
  per stored token, of which there are at most `1.5 max_tokens`. Older text is
  forgotten in blocks: at least the latest `max_tokens / 2` tokens (half of it
  rounded down), at most `max_tokens`, are counted. The cost of a token and of
  an expansion does not grow with the text.

  A token that some anchor already stands for is not proposed again, and
  anchors of equal paths grow once. Each anchor counts as reached: the drafter
  does not weigh anchors against each other. A smaller budget returns a prefix
  of what a larger one does.

  Args:
    shape: "tree" or "chain".
    max_depth: longest match, in tokens.
    max_children: followers of one context that are considered.
    max_length: largest number of nodes below each other.
    max_spec_factor: α, at most `⌈α (m + 1)⌉` nodes below each other, where `m`
      is the match at the anchor; infinite leaves it to the probabilities.
    min_prob: nodes are drafted if the product of probabilities from their
      anchor reaches this.
    max_tokens: capacity of the store.
    stop_tokens: tokens below which nothing is drafted (end of text).
    weights: `w` above.

  Returns:
    A `Drafter`; `params`, `request_key` and `features` are ignored.

  Raises:
    ValueError: an argument outside its range; at `init`, an empty prompt.

  Example:
    >>> import drafters
    >>> from wanspec_jax.base import Anchor
    >>> drafter = drafters.suffix(shape="chain")
    >>> state = drafter.init(None, [7, 8, 9, 7], 0)
    >>> drafter.expand(state, [Anchor(3)], 3)[1].tokens.tolist()
    [8, 9, 7]
  """
  _check(
    shape=shape,
    max_depth=max_depth,
    max_children=max_children,
    max_length=max_length,
    max_spec_factor=max_spec_factor,
    min_prob=min_prob,
    max_tokens=max_tokens,
    weights=weights,
  )
  stops = frozenset(int(t) for t in stop_tokens)
  bias, w_match, w_total, w_kinds, w_peak = (float(w) for w in weights)
  log_min = math.log(min_prob)

  def level(store: SuffixCounts, context: Context) -> _Level:
    tokens, counts = store.followers(context.state)
    score = (
      bias
      + w_match * math.log1p(context.length)
      + w_total * math.log(context.total)
      + w_kinds * math.log(store.num_followers(context.state))
      + w_peak * counts[0] / context.total
    )
    doubt = 1.0 / (1.0 + math.exp(min(score, 700.0)))  # exp overflows at 710
    share = (1.0 - doubt) / context.total
    return _Level(
      tuple(zip(tokens, (share * c for c in counts), strict=True)), doubt
    )

  def followers(
    store: SuffixCounts, place: _Place, levels: dict[Context, _Level]
  ) -> dict[int, float]:
    """Returns `{token: P}`; the first key is the longest match's favourite."""
    prob: dict[int, float] = {}
    reach = math.exp(place.log_reach)
    left = 1.0
    for context in store.contexts(place.cursor):
      if shape == "chain" and not prob and not context.length:
        break
      if context not in levels:
        levels[context] = level(store, context)
      shares, doubt = levels[context]
      # Terms too small to matter end the (sorted) list: most nodes sit deep,
      # where short contexts, the ones with long lists, add next to nothing.
      least = min_prob / (8.0 * left * reach)
      for token, share in shares:
        if share < least and prob:
          break
        prob[token] = prob.get(token, 0.0) + left * share
      left *= doubt
      if left * reach < min_prob:
        break
    return prob

  def init(params, prompt, request_key):
    del params, request_key
    if not len(prompt):
      raise ValueError("prompt: must hold at least one token, got none")
    text = _Text(
      max_tokens=max_tokens, max_depth=max_depth, max_children=max_children
    )
    text.start(prompt)
    return text

  def expand(
    state,
    anchors: Sequence[Anchor],
    budget: int,
    levels: int | None = None,
  ):
    store = state.main
    deepest = max_length if levels is None else levels
    taken = {anchor.path for anchor in anchors}
    # (-log reach, creation order, log P, token, parent): ties go to the older.
    heap: list[tuple[float, int, float, int, _Place]] = []
    made = 0
    known: dict[Context, _Level] = {}

    def push_children(place: _Place):
      nonlocal made
      if place.depth >= place.max_length or not stops.isdisjoint(place.path):
        return
      prob = followers(store, place, known)
      if shape == "chain":
        prob = dict(list(prob.items())[:1])
      for token, p in prob.items():
        if p <= 0.0:  # a context that is not trusted at all
          continue
        log_p = min(math.log(p), 0.0)
        log_reach = place.log_reach + log_p
        if log_reach >= log_min and (*place.path, token) not in taken:
          made += 1
          heapq.heappush(heap, (-log_reach, made, log_p, token, place))

    grown = set()
    for row, anchor in enumerate(anchors):
      if anchor.path in grown:
        continue
      grown.add(anchor.path)
      cursor = store.end()
      for token in anchor.path:
        cursor = store.advance(cursor, token)
      match = next((c.length for c in store.contexts(cursor)), 0)
      longest = min(
        math.ceil(min(max_spec_factor * (match + 1), max_length)), deepest
      )
      push_children(_Place(row, cursor, anchor.path, 0, longest, 0.0))

    tokens: list[int] = []
    parents: list[int] = []
    log_q: list[float] = []
    while heap and len(tokens) < budget:
      negative, _, log_p, token, parent = heapq.heappop(heap)
      place = _Place(
        row=len(anchors) + len(tokens),
        cursor=store.advance(parent.cursor, token),
        path=(*parent.path, token),
        depth=parent.depth + 1,
        max_length=parent.max_length,
        log_reach=-negative,
      )
      tokens.append(token)
      parents.append(parent.row)
      log_q.append(log_p)
      push_children(place)
    return state, Nodes(
      np.array(tokens, np.int32),
      np.array(parents, np.int32),
      np.array(log_q, np.float32),
    )

  def rebase(state, root):
    del root  # the text moves with `observe`; nothing guessed is kept
    return state

  def observe(state, tokens, features=None):
    del features
    state.extend(tokens)
    return state

  return Drafter(f"suffix:{shape}", init, expand, rebase, observe)
