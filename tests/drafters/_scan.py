# SPDX-License-Identifier: Apache-2.0
"""Suffix statistics by scanning the whole text: slow and independent."""

import math
from collections import Counter


def scan(text, read, max_depth):
  """Returns `[(m, {follower: count}, [followers, best first], ends)]`.

  One entry per `m`, longest first, for the suffixes of `read` with followers
  in `text`; `ends` are the places where the suffix ends in `text`.
  """
  out = []
  for m in range(min(len(read), max_depth), -1, -1):
    tail = list(read[len(read) - m :])
    ends = [i for i in range(m, len(text) + 1) if text[i - m : i] == tail]
    followers = [text[i] for i in ends if i < len(text)]
    counts = Counter(followers)
    latest = {t: i for i, t in enumerate(followers)}
    order = sorted(counts, key=lambda t: (-counts[t], -latest[t]))
    if counts:
      out.append((m, dict(counts), order, tuple(ends)))
  return out


def blend(text, read, *, max_depth, weights):
  """Returns `{token: P}` as the docstring of `drafters.suffix` defines it."""
  prob, left, previous = {}, 1.0, None
  for m, counts, order, ends in scan(text, read, max_depth):
    if ends == previous:
      continue
    previous = ends
    total = sum(counts.values())
    score = sum(
      w * x
      for w, x in zip(
        weights,
        (
          1.0,
          math.log(1 + m),
          math.log(total),
          math.log(len(counts)),
          counts[order[0]] / total,
        ),
        strict=True,
      )
    )
    trust = 1 / (1 + math.exp(-score))
    for token, count in counts.items():
      prob[token] = prob.get(token, 0.0) + left * trust * count / total
    left *= 1 - trust
  return prob
