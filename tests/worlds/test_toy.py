# SPDX-License-Identifier: Apache-2.0
"""The toy target notices every fault of bookkeeping; the real books have none.

The expected text comes from `toy_text`, which knows neither slots nor runs.
"""

import collections
import random as random_lib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Sampling
from wanspec_jax.rollback import mask_rollback
from wanspec_jax.worlds import (
  Driver,
  Kill,
  Stall,
  ToyStage,
  VirtualRing,
  Weather,
  toy_text,
)

VOCAB = 6
CAPACITY = 120


def _stages(count, rollback=None):
  return [
    ToyStage(
      capacity=CAPACITY,
      is_first=i == 0,
      is_last=i == count - 1,
      vocab=VOCAB,
      rollback=rollback,
    )
    for i in range(count)
  ]


def _play(random, *, policy, stages, temperature, weather=None, count=1):
  """Decodes; returns what was emitted and what should have been."""
  texts, requests = {}, []
  for s in range(count):
    prompt = tuple(random.randrange(VOCAB) for _ in range(random.randint(1, 5)))
    sampling = Sampling(temperature=temperature, seed=s)
    tokens = random.randint(4, 24)
    expected = toy_text(
      prompt, sampling, tokens + 30, num_stages=len(stages), vocab=VOCAB
    )
    texts[s] = [*prompt, *expected]
    requests.append(
      sch.Request(prompt=prompt, max_new_tokens=tokens, sampling=sampling)
    )
  ring = VirtualRing(
    stages=stages,
    hops=[
      wire.LinkShaper(
        delay_s=random.uniform(0, 0.02),
        jitter_s=random.choice([0.0, 0.01]),
        seed=i,
      )
      for i in range(len(stages) + 1)
    ],
    profile=StageProfile(
      buckets=(16,),
      seconds=tuple((random.uniform(0, 0.02),) for _ in stages),
      dtype="toy",
      device="none",
    ),
    draft=sch.DraftCosts(per_level_s=random.choice([0.0, 0.003])),
    weather=weather,
  )
  engine = sch.init(policy, bench.costs(16), capacity=CAPACITY, prefill_rows=4)
  drafter = bench.drafter_of(
    texts,
    right=random.choice([0.0, 0.6, 0.95]),
    size=lambda budget: random.randint(0, budget),
    random=random,
    vocab=VOCAB,
  )
  result = ring.run(
    Driver(engine, drafter),
    [(random.uniform(0, 0.1), request) for request in requests],
  )
  got = {s: (o.tokens, o.reason) for s, o in result.outcomes.items()}
  want = {
    s: (texts[s][len(r.prompt) : len(r.prompt) + r.max_new_tokens], "length")
    for s, r in enumerate(requests)
  }
  return got, want


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@settings(derandomize=True, deadline=None, max_examples=60)
@given(seed=st.integers(0, 2**32))
def test_any_policy_and_weather_give_the_plain_text(temperature, seed):
  random = random_lib.Random(seed)
  num_stages = random.randint(1, 3)
  policy = random.choice(
    [
      bench.pipelined(random, max_in_flight=4, max_nodes=6),
      sch.priced(),
      sch.continuous(nodes=2),
      sch.segments(segment=3, initial=8, expand=4),
      sch.with_floor(sch.in_pipe(width=2)),
    ]
  )
  weather = Weather(
    seed=seed % 1000,
    loss=random.choice([0.0, 0.2]),
    duplicates=random.choice([0.0, 0.3]),
    stalls=(Stall(random.randint(0, num_stages), 0.1, 0.4),),
    kills=tuple(
      Kill(random.randrange(num_stages), random.uniform(0, 0.5), 0.1)
      for _ in range(random.choice([0, 0, 1, 2]))
    ),
  )
  got, want = _play(
    random,
    policy=policy,
    stages=_stages(num_stages),
    temperature=temperature,
    weather=weather,
    count=random.randint(1, 3),
  )
  assert got == want


def _shows_the_dead(state, slots, num_slots):
  return np.broadcast_to(state.used[:num_slots], (len(slots), num_slots))


FAULTS = {
  "mask shows other branches": {"mask": _shows_the_dead},
  "mask hides the parent": {
    "mask": lambda state, slots, n: np.eye(n, dtype=bool)[slots]
  },
  "positions off by one": {
    "positions": lambda state, slots: state.positions[slots] + 1
  },
  "commit forgotten": {
    "commit": lambda state, sequence, root, parent=None: state
  },
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_on_one_stage_shows_in_the_text(fault):
  """Each of these loses at least one text in a few, or breaks a rule."""
  wrong = collections.Counter()
  for seed in range(12):
    random = random_lib.Random(seed)
    stages = _stages(2)
    stages[1] = ToyStage(
      capacity=CAPACITY,
      is_first=False,
      is_last=True,
      vocab=VOCAB,
      rollback=mask_rollback()._replace(**FAULTS[fault]),
    )
    try:
      got, want = _play(
        random,
        policy=sch.segments(segment=3, initial=8, expand=6),
        stages=stages,
        temperature=0.0,
      )
      wrong[got != want] += 1
    except (AssertionError, RuntimeError, KeyError):
      wrong[True] += 1
  assert wrong[True] > 0


def test_the_text_depends_on_prompt_cuts_temperature_and_seed():
  base = {"prompt": (1, 2), "count": 12, "num_stages": 2}
  plain = toy_text(sampling=Sampling(), **base)
  assert plain == toy_text(sampling=Sampling(), **base)
  others = [
    toy_text(sampling=Sampling(), **base | {"prompt": (2, 2)}),
    toy_text(sampling=Sampling(), **base | {"num_stages": 3}),
    toy_text(sampling=Sampling(temperature=0.8), **base),
    toy_text(sampling=Sampling(temperature=0.8, seed=1), **base),
  ]
  assert len({tuple(t) for t in [plain, *others]}) == 5
