# SPDX-License-Identifier: Apache-2.0
"""The suffix automaton against a scan of the text, and what it costs."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from drafters._automaton import SuffixCounts
from tests.drafters._scan import scan

_settings = settings(derandomize=True, deadline=None, max_examples=300)


def _store(text, *, max_depth, max_children=99):
  store = SuffixCounts(max_depth=max_depth, max_children=max_children)
  for token in text:
    store.append(token)
  return store


def _cursor(store, path):
  cursor = store.end()
  for token in path:
    cursor = store.advance(cursor, token)
  return cursor


@_settings
@given(
  text=st.lists(st.integers(0, 3), max_size=40),
  path=st.lists(st.integers(0, 4), max_size=5),
  max_depth=st.integers(1, 7),
)
def test_contexts_and_counts_equal_a_scan(text, path, max_depth):
  store = _store(text, max_depth=max_depth)
  got = list(store.contexts(_cursor(store, path)))
  want = scan(text, text + path, max_depth)
  # A context stands for all lengths down to the next one of the list.
  lengths = [c.length for c in got] + [-1]
  by_length = {}
  for context, shorter in zip(got, lengths[1:], strict=True):
    for m in range(context.length, shorter, -1):
      by_length[m] = context
  assert list(by_length) == [m for m, *_ in want]
  for m, counts, order, _ in want:
    context = by_length[m]
    assert context.total == sum(counts.values())
    assert store.num_followers(context.state) == len(counts)
    assert store.followers(context.state) == (order, [counts[t] for t in order])


@_settings
@given(
  text=st.lists(st.integers(0, 9), max_size=60),
  max_children=st.integers(1, 4),
)
def test_short_lists_keep_the_best_followers(text, max_children):
  short = _store(text, max_depth=3, max_children=max_children)
  full = _store(text, max_depth=3)
  for context in short.contexts(short.end()):
    tokens, counts = full.followers(context.state)
    assert short.followers(context.state) == (
      tokens[:max_children],
      counts[:max_children],
    )


def test_reading_does_not_write():
  store = _store([1, 2, 1, 2, 3, 1], max_depth=4)
  before = [(c, store.followers(c.state)) for c in store.contexts(store.end())]
  for path in ([2], [2, 3], [9, 9, 2], [1, 2, 1, 2, 3, 1, 2]):
    list(store.contexts(_cursor(store, path)))
  after = [(c, store.followers(c.state)) for c in store.contexts(store.end())]
  assert before == after
  assert store.num_tokens == 6


def _texts(num_tokens):
  rng = random.Random(0)
  words = [int(rng.paretovariate(0.8)) % 40_000 for _ in range(num_tokens)]
  return {
    "words": words,
    "one token": [7] * num_tokens,
    "copies": [words[i % 251] for i in range(num_tokens)],
  }


@pytest.mark.parametrize("kind", ["words", "one token", "copies"])
def test_cost_is_flat_in_the_length_of_the_text(kind):
  append, query = {}, {}
  for num_tokens in (1_000, 100_000):
    store = _store(_texts(num_tokens)[kind], max_depth=24, max_children=64)
    assert store.num_states <= 2 * num_tokens
    append[num_tokens] = store.steps / num_tokens
    start = store.steps
    for context in store.contexts(_cursor(store, [7, 7])):
      store.followers(context.state)
    query[num_tokens] = store.steps - start
  # A hundred times the text: not twice the states touched per token, and
  # within the bounds that depth and children set.
  assert append[100_000] < 2 * append[1_000]
  assert append[100_000] <= 2 * 24 + 16
  assert query[100_000] <= 2 * query[1_000] + 64
