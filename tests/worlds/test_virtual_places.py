# SPDX-License-Identifier: Apache-2.0
"""Where coordinator, drafter and client stand; several texts; a lost host."""

import itertools
import random as random_lib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from tests.schedules import bench
from tests.worlds.scripted import (
  TEXT,
  burst,
  chain_drafter,
  driver_of,
  ring_of,
  taps,
)
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.worlds import Driver, Mirror

# The drafter on a stage's device. --------------------------------------------


def _at_once():
  """Returns a policy that asks for a draft and launches the root, both at
  once, and then nothing but roots."""

  def decide(spec, pipe, time_s):
    if not spec.drafting and spec.ticket == 0 and spec.drafted_root is None:
      return sch.Grow((spec.anchor(spec.root),), 1)
    return None if spec.root_launched else sch.Send(())

  return sch.Policy("at once", decide, max_in_flight=1)


@pytest.mark.parametrize(
  ("where", "first_s"), [(0, 0.05 + 0.004 + 0.01), (None, 0.024)]
)
def test_a_run_waits_for_the_drafter_of_its_stage(where, first_s):
  """The draft takes until 0.05; the root's run is there at 0.01 and waits."""
  stages = taps({0: TEXT}, 1)
  ring = ring_of(
    stages,
    delays=(0.01, 0.01),
    times=(0.004,),
    draft=sch.DraftCosts(per_call_s=0.02, per_level_s=0.03),
    drafter_stage=where,
  )
  driver = driver_of(_at_once(), chain_drafter((TEXT[1],)))
  request = bench.request_of(TEXT, 1, 1, seed=0)
  outcome = ring.run(driver, [(0.0, request)]).outcomes[0]
  assert outcome.emitted_s == pytest.approx([first_s])


@pytest.mark.parametrize(
  ("where", "begin_s", "second_s"),
  [(0, 0.11, 0.16 + 0.1 + 0.02), (None, 0.02, 0.11 + 0.1 + 0.01)],
)
def test_a_draft_waits_for_the_run_on_its_stage(where, begin_s, second_s):
  """A plain run is on the stage from 0.01 to 0.11. A second text's draft, asked
  for at 0.02, takes 0.05; only then is its own run launched."""
  stages = taps({0: TEXT, 1: TEXT}, 1)
  ring = ring_of(
    stages,
    delays=(0.01, 0.01),
    times=(0.1,),
    draft=sch.DraftCosts(per_level_s=0.05),
    drafter_stage=where,
  )

  def decide(spec, pipe, time_s):
    if spec.sequence and not spec.drafting and spec.drafted_root is None:
      return sch.Grow((spec.anchor(spec.root),), 1)
    if spec.drafting or spec.root_launched:
      return None
    return sch.Send(())

  driver = driver_of(
    sch.Policy("second drafts", decide, max_in_flight=1),
    chain_drafter((TEXT[1],)),
  )
  request = bench.request_of(TEXT, 1, 1, seed=0)
  result = ring.run(driver, [(0.0, request), (0.02, request)])
  (draft,) = (s for s in result.spans if s.lane == "drafter")
  assert draft.start_s == pytest.approx(begin_s)
  assert result.outcomes[0].emitted_s == pytest.approx([0.12])
  assert result.outcomes[1].emitted_s == pytest.approx([second_s])


def test_nothing_overlaps_on_a_device_that_is_shared():
  texts = {s: TEXT[s:] for s in range(3)}
  stages = taps(texts, 2)
  ring = ring_of(
    stages,
    delays=(0.01, 0.02, 0.0),
    times=(0.003, 0.007),
    draft=sch.DraftCosts(per_node_s=0.002),
    drafter_stage=1,
  )
  random = random_lib.Random(5)
  drafter = bench.drafter_of(
    texts, right=0.8, size=lambda budget: budget, random=random
  )
  policy = bench.pipelined(random, max_in_flight=3, max_nodes=4)
  requests = [(0.0, bench.request_of(texts[s], 2, 30, seed=s)) for s in texts]
  result = ring.run(driver_of(policy, drafter), requests)
  for s, (_, request) in enumerate(requests):
    assert result.outcomes[s].tokens == bench.plain(texts[s], request, 200)[0]
  shared = sorted(
    (span.start_s, span.end_s)
    for span in result.spans
    if span.lane in ("stage 1", "drafter")
  )
  assert sum(span.lane == "drafter" for span in result.spans) > 10
  for (_, end_s), (start_s, _) in itertools.pairwise(shared):
    assert end_s <= start_s + 1e-12


# The client elsewhere; features. ---------------------------------------------


def test_requests_and_tokens_cross_the_clients_link():
  """1 kB/s and 0.2 s: a prompt of 5 tokens is 24 bytes, a token 8 bytes.

  The ring's lap is 0.03 s, so every token waits for nothing but its own lap and
  the link: 8 bytes take 8 ms.
  """
  stages = taps({0: TEXT}, 2)
  client = wire.LinkShaper(delay_s=0.2, bandwidth_bps=8000)
  ring = ring_of(stages, delays=(0.01,) * 3, times=(0.0, 0.0), client=client)
  driver = driver_of(sch.lockstep(0), chain_drafter())
  request = bench.request_of(TEXT, 5, 3, seed=0)
  result = ring.run(driver, [(1.0, request)])
  outcome = result.outcomes[0]
  there_s = 1.0 + 0.024 + 0.2
  assert outcome.submitted_s == 1.0
  assert outcome.admitted_s == pytest.approx(there_s)
  assert outcome.emitted_s == pytest.approx(
    [there_s + 0.03 * lap + 0.008 + 0.2 for lap in (1, 2, 3)]
  )
  assert outcome.finished_s == outcome.emitted_s[-1]
  assert result.bytes.total(link="from client") == 4 + 5 * 4
  assert result.bytes.total(link="to client") == 3 * 8


def test_tokens_queue_on_the_clients_link():
  """8 bytes at 100 B/s take longer than a lap: the link sets the pace."""
  stages = taps({0: TEXT}, 1)
  client = wire.LinkShaper(bandwidth_bps=800)
  ring = ring_of(stages, delays=(0.01, 0.01), times=(0.0,), client=client)
  driver = driver_of(sch.lockstep(0), chain_drafter())
  request = bench.request_of(TEXT, 1, 4, seed=0)
  outcome = ring.run(driver, [(0.0, request)]).outcomes[0]
  first_s = 0.08 + 0.02 + 0.08  # request, lap, token
  assert outcome.emitted_s == pytest.approx(
    [first_s + 0.08 * i for i in range(4)]
  )


def test_features_return_with_the_verdicts():
  """500 bytes per drawn token on the last hop, at 100 kB/s: 5 ms more each."""
  times = {}
  for feature_bytes in (0, 500):
    stages = taps({0: TEXT}, 2)
    ring = ring_of(
      stages,
      delays=(0.01,) * 3,
      times=(0.0, 0.0),
      bandwidth_bps=800_000,
      feature_bytes=feature_bytes,
    )
    driver = driver_of(sch.lockstep(0), chain_drafter())
    request = bench.request_of(TEXT, 1, 4, seed=0)
    result = ring.run(driver, [(0.0, request)])
    times[feature_bytes] = np.diff([0.0, *result.outcomes[0].emitted_s])
    counts = [
      result.bytes.by_class(link=f"hop {hop}")["features"] for hop in range(3)
    ]
    assert counts == [0, 0, 4 * feature_bytes]
  assert times[500] - times[0] == pytest.approx([0.005] * 4)


# Several texts. --------------------------------------------------------------


QUALITIES = (0.0, 0.5, 0.9, 1.0)
DELAYS, TIMES = (0.01,) * 4, (0.001, 0.006, 0.001)


def _times(policy, chosen):
  """Returns how long each chosen text takes, its drafter as good as
  `QUALITIES` says, on a ring whose second stage takes 6 ms a run."""
  texts = {i: TEXT[s:] for i, s in enumerate(chosen)}
  ring = ring_of(taps(texts, 3, capacity=400), delays=DELAYS, times=TIMES)
  drafter = drafters.by_request(
    {
      i: bench.drafter_of(
        texts,
        right=QUALITIES[s],
        size=lambda budget: min(budget, 8),
        random=random_lib.Random(s),
        log_q=lambda: -0.5,
      )
      for i, s in enumerate(chosen)
    }
  )
  busy = (*itertools.chain(*((0.0, t) for t in TIMES)), 0.0)
  costs = sch.Costs(delay_s=DELAYS, busy_s=lambda rows: busy, max_rows=16)
  engine = sch.init(policy, costs, capacity=400, prefill_rows=4)
  requests = [(0.0, bench.request_of(texts[i], 2, 40, seed=i)) for i in texts]
  outcomes = ring.run(Driver(engine, drafter), requests).outcomes
  for i, (_, request) in enumerate(requests):
    assert outcomes[i].tokens == bench.plain(texts[i], request, 400)[0]
  return [outcomes[i].total_s for i in texts]


@pytest.mark.parametrize(
  "policy",
  [
    sch.lockstep(0),
    sch.continuous(nodes=2),
    sch.segments(segment=3, initial=8, expand=4),
    sch.priced(),
  ],
  ids=lambda policy: policy.name,
)
def test_no_text_starves(policy):
  """Drafters from useless to perfect share a ring: a fair share of it is a
  quarter, so no text takes more than four times what it takes alone."""
  together = _times(policy, range(4))
  for s, time_s in enumerate(together):
    (alone_s,) = _times(policy, [s])
    assert time_s <= 4 * alone_s


@settings(derandomize=True, deadline=None, max_examples=15)
@given(st.integers(0, 2**32).map(random_lib.Random))
def test_each_of_several_equals_its_single_run(random):
  """Texts, reasons; acceptance as ragged as drafters make it."""
  texts = {
    s: [random.randrange(bench.VOCAB) for _ in range(80)] for s in range(3)
  }
  requests = [
    (
      random.uniform(0, 0.2),
      bench.request_of(texts[s], random.randint(1, 9), 20, seed=s),
    )
    for s in texts
  ]

  def decode(chosen):
    own = {i: texts[s] for i, s in enumerate(chosen)}
    ring = ring_of(taps(own, 2), delays=(0.01,) * 3, times=(0.002, 0.003))
    drafter = bench.drafter_of(
      texts, right=0.7, size=lambda budget: budget, random=random
    )
    policy = bench.pipelined(random, max_in_flight=3, max_nodes=4)
    result = ring.run(driver_of(policy, drafter), [requests[s] for s in chosen])
    return [(o.tokens, o.reason) for _, o in sorted(result.outcomes.items())]

  assert decode([0, 1, 2]) == [decode([s])[0] for s in texts]


# The coordinator's host. -----------------------------------------------------


@settings(derandomize=True, deadline=None, max_examples=40)
@given(st.integers(0, 2**32).map(random_lib.Random))
def test_a_lost_coordinator_is_restarted_from_the_clients_mirror(random):
  """Lost up to three times, at any moment; the client tells the next one."""
  count = random.randint(1, 3)
  texts = {
    s: [random.randrange(bench.VOCAB) for _ in range(80)] for s in range(count)
  }
  stop = sch.Stop(
    ids=frozenset(random.sample(range(bench.VOCAB), random.randint(0, 1))),
    strings=tuple(random.sample(["aab", "ba", "abab"], random.randint(0, 1))),
    text_of=bench.text_of,
  )
  requests = [
    bench.request_of(texts[s], 2, random.randint(0, 25), seed=s, stop=stop)
    for s in texts
  ]
  ring = ring_of(taps(texts, 2), delays=(0.01,) * 3, times=(0.002, 0.003))
  mirror = Mirror(requests)
  policy = bench.pipelined(random, max_in_flight=3, max_nodes=4)
  drafter = bench.drafter_of(
    texts, right=0.7, size=lambda budget: budget, random=random
  )
  losses = [random.uniform(0, 0.4) for _ in range(random.randint(1, 3))]
  for until_s in (*losses, float("inf")):
    driver = driver_of(policy, drafter, on_emit=mirror.on_emit)
    result = ring.run(
      driver, [(0.0, r) for r in mirror.requests()], until_s=until_s
    )
  assert driver.done
  for s, request in enumerate(requests):
    text, reason = bench.plain(texts[s], request, 200)
    assert list(mirror.tokens(s)) == text
    assert result.outcomes[s].reason == reason


def test_what_the_lost_coordinator_had_in_flight_is_lost():
  """Laps of 0.02, lost at 0.05 with the third on its way: two tokens known;
  the next coordinator's first is the third, one lap after it was asked."""
  ring = ring_of(taps({0: TEXT}, 1), delays=(0.01, 0.01), times=(0.0,))
  mirror = Mirror([bench.request_of(TEXT, 1, 4, seed=0)])
  driver = driver_of(burst(0), chain_drafter(), on_emit=mirror.on_emit)
  ring.run(driver, [(0.0, mirror.requests()[0])], until_s=0.05)
  assert mirror.tokens(0) == tuple(TEXT[1:3])
  (resumed,) = mirror.requests()
  assert resumed.emitted == tuple(TEXT[1:3])
  driver = driver_of(sch.lockstep(0), chain_drafter(), on_emit=mirror.on_emit)
  outcome = ring.run(driver, [(0.0, resumed)]).outcomes[0]
  assert outcome.tokens == TEXT[3:5] and outcome.reason == "length"
  assert outcome.emitted_s == pytest.approx([0.02, 0.04])
  assert mirror.tokens(0) == tuple(TEXT[1:5])
