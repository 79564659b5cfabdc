# SPDX-License-Identifier: Apache-2.0
"""The policy that docs/schedules.md shows is one."""

import pathlib
import random as random_lib
import re

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import Driver

DOCS = pathlib.Path(__file__).parents[2] / "docs" / "schedules.md"


def _example():
  (code,) = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)
  assert len(code.splitlines()) < 60
  names = {}
  exec(code, names)
  return names["two_chains"]


def _decode(random, *, right, policy, tokens=40):
  texts = {0: [random.randrange(bench.VOCAB) for _ in range(120)]}
  engine = sch.init(policy, bench.costs(8), capacity=100, prefill_rows=4)
  drafter = bench.drafter_of(
    texts,
    right=right,
    size=lambda budget: budget,
    random=random,
    log_q=lambda: -0.1,
  )
  request = bench.request_of(texts[0], 3, tokens, seed=0)
  stages = bench.ring(texts, num_stages=2, capacity=100)
  session = bench.play(Driver(engine, drafter), stages, [request], random)
  assert session.driver.outcomes[0].tokens == texts[0][3 : 3 + tokens]
  return session.driver.outcomes[0].rounds


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**32).map(random_lib.Random))
def test_the_example_gives_the_plain_text(random):
  _decode(random, right=random.choice([0.0, 0.5, 1.0]), policy=_example()())


def test_the_example_speculates():
  rounds = _decode(random_lib.Random(1), right=1.0, policy=_example()(nodes=2))
  assert sum(r.accepted for r in rounds) >= 20
