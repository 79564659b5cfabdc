# SPDX-License-Identifier: Apache-2.0
"""Occurrence counts of every short substring of a growing text.

A suffix automaton (Blumer et al. 1985,
https://doi.org/10.1016/0304-3975(85)90157-4) merges all contexts that occur at
the same places, so a text of `n` tokens needs at most `2n` states and `3n`
transitions whatever the depth; a depth-limited trie with the same counts needs
up to `n · max_depth` nodes.
"""

from collections.abc import Iterator
from typing import NamedTuple


class Context(NamedTuple):
  """One suffix of a query text that is followed by something in the store.

  Attributes:
    state: automaton state.
    length: tokens matched; all shorter suffixes down to the next context of
      the same query have the same followers.
    total: how often the suffix is followed by a token in the store.
  """

  state: int
  length: int
  total: int


class SuffixCounts:
  """Counts of (context, next token) for contexts of up to `max_depth` tokens.

  Appending is amortised O(1) dictionary operations (transitions are never
  deleted and there are at most `3n`) and at most `max_depth` count updates;
  queries never depend on the length of the text. A mutable host object.

  Attributes:
    num_tokens: tokens appended so far.
    steps: automaton states touched so far by appends and queries, the unit of
      this structure's cost.
  """

  __slots__ = (
    "_active",
    "_count",
    "_last",
    "_length",
    "_link",
    "_max_children",
    "_max_depth",
    "_next",
    "_tail",
    "_top",
    "num_tokens",
    "steps",
  )

  def __init__(self, *, max_depth: int, max_children: int):
    """Makes an empty store.

    Args:
      max_depth: longest context, in tokens, whose counts are kept.
      max_children: followers of a context that `followers` can list.
    """
    self._max_depth = max_depth
    self._max_children = max_children
    # State 0 is the empty context. Its link is itself; loops test for 0.
    self._link = [0]
    self._length = [0]
    self._count = [1]  # the empty string occurs once more than there are tokens
    self._next: list[dict[int, int]] = [{}]
    self._top: list[list[int]] = [[]]
    self._last = 0
    # The state of the last `max_depth + 1` tokens: the followers of a context
    # of `max_depth` tokens need their own counts.
    self._active = 0
    self._tail: frozenset[int] | None = frozenset((0,))
    self.num_tokens = 0
    self.steps = 0

  @property
  def num_states(self) -> int:
    return len(self._link)

  def _new_state(
    self, length: int, count: int, edges: dict[int, int], top: list[int]
  ) -> int:
    self._link.append(0)
    self._length.append(length)
    self._count.append(count)
    self._next.append(edges)
    self._top.append(top)
    return len(self._link) - 1

  def _shorten(self, state: int, length: int) -> int:
    """Returns the state of the last `length` tokens of `state`'s strings."""
    while state and self._length[self._link[state]] >= length:
      state = self._link[state]
      self.steps += 1
    return state

  def append(self, token: int) -> None:
    """Appends one token to the text."""
    link, length, nexts = self._link, self._length, self._next
    old_depth = min(self.num_tokens, self._max_depth + 1)
    new = self._new_state(length[self._last] + 1, 0, {}, [])
    state = self._last
    while token not in nexts[state]:
      self.steps += 1
      nexts[state][token] = new
      if not state:
        break
      state = link[state]
    else:
      target = nexts[state][token]
      if length[target] == length[state] + 1:
        link[new] = target
      else:
        link[new] = self._split(target, state, token)
    self._last = new
    self.num_tokens += 1
    self._tail = None

    # Only suffixes of the old text gain a follower, only suffixes of the new
    # one gain an occurrence. Strings above `max_depth + 1` are never asked for:
    # their counts may go stale, and no later split makes them shorter.
    parent = self._shorten(self._active, old_depth)
    depth = min(self.num_tokens, self._max_depth + 1)
    self._active = self._shorten(nexts[parent][token], depth)
    state = self._active
    count = self._count
    while state:
      self.steps += 1
      count[state] += 1
      state = link[state]
    count[0] += 1
    while True:
      self.steps += 1
      self._promote(parent, token)
      if not parent:
        break
      parent = link[parent]

  def _split(self, target: int, state: int, token: int) -> int:
    """Gives the shorter strings of `target` a state of their own."""
    link, nexts = self._link, self._next
    clone = self._new_state(
      self._length[state] + 1,
      self._count[target],
      dict(nexts[target]),
      list(self._top[target]),
    )
    link[clone] = link[target]
    link[target] = clone
    while nexts[state].get(token) == target:
      self.steps += 1
      nexts[state][token] = clone
      if not state:
        break
      state = link[state]
    return clone

  def _promote(self, state: int, token: int) -> None:
    """Keeps `top` sorted by count, ties by the latest occurrence."""
    top, edges, count = self._top[state], self._next[state], self._count
    mine = count[edges[token]]
    if token in top:
      i = top.index(token)
    elif len(top) < self._max_children:
      i = len(top)
      top.append(token)
    elif mine >= count[edges[top[-1]]]:
      i = len(top) - 1
      top[i] = token
    else:
      return
    while i and count[edges[top[i - 1]]] <= mine:
      top[i] = top[i - 1]
      i -= 1
    top[i] = token

  def end(self) -> tuple[int, int]:
    """Returns the cursor `(state, length)` of the whole text."""
    length = min(self.num_tokens, self._max_depth)
    return self._shorten(self._active, length), length

  def advance(self, cursor: tuple[int, int], token: int) -> tuple[int, int]:
    """Returns the cursor after one more token, without storing the token.

    The cursor stands for the longest suffix (of at most `max_depth` tokens) of
    what was read that occurs in the store.
    """
    state, length = cursor
    while token not in self._next[state]:
      self.steps += 1
      if not state:
        return 0, 0
      state = self._link[state]
      length = self._length[state]
    self.steps += 1
    length = min(length + 1, self._max_depth)
    return self._shorten(self._next[state][token], length), length

  def contexts(self, cursor: tuple[int, int]) -> Iterator[Context]:
    """Yields the suffixes at `cursor` that have followers, longest first.

    Suffixes that occur at the same places are yielded once, as the longest of
    them. The last one is the empty context, unless the store is empty.
    """
    if self._tail is None:
      tail, state = {0}, self._active
      while state:
        self.steps += 1
        tail.add(state)
        state = self._link[state]
      self._tail = frozenset(tail)
    state, length = cursor
    while True:
      self.steps += 1
      # The occurrence at the very end of the text is followed by nothing.
      total = self._count[state] - (state in self._tail)
      if total:
        yield Context(state, length, total)
      if not state:
        return
      state = self._link[state]
      length = self._length[state]

  def followers(self, state: int) -> tuple[list[int], list[int]]:
    """Returns next tokens and their counts: most frequent, then latest first.

    Lists at most `max_children` of them.
    """
    tokens, edges, count = self._top[state], self._next[state], self._count
    self.steps += len(tokens)
    return tokens, [count[edges[token]] for token in tokens]

  def num_followers(self, state: int) -> int:
    """Returns how many distinct tokens follow the context."""
    return len(self._next[state])
