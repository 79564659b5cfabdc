# SPDX-License-Identifier: Apache-2.0
"""Messages that several tests of the wire need."""

import numpy as np
from hypothesis import strategies as st

from wanspec_jax.messages import (
  Cancel,
  Commit,
  Open,
  Returned,
  Run,
  Sampling,
  Verdict,
)

INT31 = st.one_of(st.integers(0, 200), st.integers(0, 2**31 - 1))
INT62 = st.one_of(st.integers(0, 200), st.integers(0, 2**62 - 1))


def make_run(rows, *, run_id=0, **fields) -> Run:
  """Returns a run of rows (sequence, id, parent, token, committed)."""
  columns = list(zip(*rows, strict=True)) or [()] * 5
  sequences, ids, parents, tokens = (
    np.array(column, np.int32) for column in columns[:4]
  )
  return Run(
    run_id=run_id,
    sequences=sequences,
    ids=ids,
    parents=parents,
    tokens=tokens,
    committed=np.array(columns[4], np.bool_),
    **fields,
  )


def assert_same_run(a: Run, b: Run) -> None:
  for name in ("run_id", "epoch", "opens", "closes", "commits"):
    assert getattr(a, name) == getattr(b, name), name
  for name in ("sequences", "ids", "parents", "tokens", "committed"):
    x, y = getattr(a, name), getattr(b, name)
    assert x.dtype == y.dtype, name
    np.testing.assert_array_equal(x, y, err_msg=name)


CHAIN = make_run(
  [
    (3, 900, 899, 20000, False),
    (3, 901, 900, 30000, False),
    (3, 902, 901, 40000, False),
    (3, 903, 902, 50000, False),
    (3, 904, 903, 120000, False),
  ],
  run_id=700,
  commits=(Commit(sequence=3, root=900),),
)
EVERYTHING = make_run(
  [
    (5, 0, 0, 17, True),
    (5, 1, 0, 18, True),
    (5, 2, 1, 19, False),
    (2, 40, 33, 7, False),
    (2, 44, 40, 8, False),
    (2, 41, 40, 9, False),
    (5, 3, 2, 300, True),
    (5, 4, 2, 301, False),
    (5, 5, 2, 302, True),
  ],
  run_id=2**40,
  epoch=2,
  opens=(
    Open(
      sequence=5,
      sampling=Sampling(
        temperature=0.7, top_k=40, top_p=0.95, min_p=0.05, seed=2**63 - 1
      ),
      log_probs=True,
    ),
    Open(sequence=6, sampling=Sampling()),
  ),
  closes=(1, 900),
  commits=(Commit(sequence=2, root=33), Commit(sequence=8, root=5)),
)
VERDICTS = Returned(
  run_id=9,
  verdicts=(
    Verdict(sequence=1, tokens=(5,), log_probs=(-0.5,), margins=(2.0,)),
    Verdict(sequence=0, tokens=(300, 1, 2)),
  ),
)
CANCEL = Cancel(
  before_run=700,
  nodes=((3, (901, 902, 903, 904)), (5, (300, 302, 301))),
)


@st.composite
def samplings(draw) -> Sampling:
  positive = st.floats(0, 10, allow_subnormal=True)
  return Sampling(
    temperature=draw(positive),
    top_k=draw(st.integers(0, 2**40)),
    top_p=draw(st.floats(0, 1, exclude_min=True)),
    min_p=draw(st.floats(0, 1)),
    seed=draw(st.integers(0, 2**63 - 1)),
  )


@st.composite
def runs(draw) -> Run:
  """Draws runs of interleaved sequences, ids in any order, any tree."""
  nodes = draw(
    st.lists(
      st.tuples(st.integers(0, 3), st.integers(0, 300)),
      unique=True,
      max_size=24,
    )
  )
  if draw(st.booleans()):
    nodes.sort()
  shift = draw(st.sampled_from([0, 1000, 2**31 - 301]))
  rows = []
  for sequence, number in nodes:
    node = number + shift
    own = {row[1] for row in rows if row[0] == sequence}
    listed = {i + shift for s, i in nodes if s == sequence}
    chosen = [node] if not own else []
    chosen += [i for i in own if i < node]
    chosen += [i for i in range(max(node - 3, 0), node) if i not in listed]
    if not chosen:
      continue
    parent = draw(st.sampled_from(sorted(chosen)))
    rows.append((sequence, node, parent, draw(INT31), draw(st.booleans())))
  if draw(st.booleans()):
    rows = [(*row[:4], index < 3) for index, row in enumerate(rows)]
  unique = {"max_size": 3, "unique": True}
  return make_run(
    rows,
    run_id=draw(INT62),
    epoch=draw(INT31),
    opens=tuple(
      Open(
        sequence=sequence,
        sampling=draw(samplings()),
        log_probs=draw(st.booleans()),
      )
      for sequence in draw(st.lists(INT31, **unique))
    ),
    closes=tuple(draw(st.lists(INT31, **unique))),
    commits=tuple(
      Commit(sequence=sequence, root=draw(INT31))
      for sequence in draw(st.lists(INT31, **unique))
    ),
  )


@st.composite
def returneds(draw) -> Returned:
  numbers = st.floats(width=32, allow_nan=False)
  verdicts = []
  for sequence in draw(st.lists(INT31, max_size=4, unique=True)):
    tokens = draw(st.lists(INT31, min_size=1, max_size=6))
    exact = {"min_size": len(tokens), "max_size": len(tokens)}
    verdicts.append(
      Verdict(
        sequence=sequence,
        tokens=tuple(tokens),
        log_probs=draw(
          st.one_of(st.just(()), st.lists(numbers, **exact).map(tuple))
        ),
        margins=draw(
          st.one_of(st.just(()), st.lists(numbers, **exact).map(tuple))
        ),
      )
    )
  return Returned(
    run_id=draw(INT62), epoch=draw(INT31), verdicts=tuple(verdicts)
  )


@st.composite
def cancels(draw) -> Cancel:
  ids = st.one_of(
    st.lists(INT31, min_size=1, max_size=8, unique=True),
    st.builds(
      lambda first, count: list(range(first, first + count)),
      st.integers(0, 2**31 - 20),
      st.integers(1, 20),
    ),
  )
  return Cancel(
    epoch=draw(INT31),
    before_run=draw(INT62),
    nodes=tuple(
      (sequence, tuple(draw(ids)))
      for sequence in draw(st.lists(INT31, min_size=1, max_size=4, unique=True))
    ),
  )
