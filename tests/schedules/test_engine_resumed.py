# SPDX-License-Identifier: Apache-2.0
"""The engine over texts that go on: resumed anywhere, and after faults."""

import collections
import random as random_lib

from hypothesis import given

from tests.schedules import bench, watched
from wanspec_jax import schedules as sch
from wanspec_jax.messages import Returned
from wanspec_jax.worlds import Driver


def _policy(random):
  if random.random() < 0.3:
    return sch.lockstep(
      lambda gains, lap_s: random.randint(0, len(gains)), max_nodes=4
    )
  return bench.pipelined(random, max_in_flight=3, max_nodes=4)


@bench.examples(120)
@given(bench.SEEDS)
def test_a_text_resumed_anywhere_ends_as_if_never_interrupted(random):
  """Cut at any token, the end included; stop strings may span the cut."""
  count = random.randint(1, 3)
  capacity = random.choice([14, 60])
  texts = bench.random_texts(random, count, capacity + 12)
  whole, requests = [], []
  for s in range(count):
    stop = sch.Stop(
      ids=frozenset(random.sample(range(bench.VOCAB), random.randint(0, 1))),
      strings=tuple(
        random.sample(["aab", "ba", "éa", "abab"], random.randint(0, 2))
      ),
      text_of=bench.text_of,
    )
    request = bench.request_of(
      texts[s],
      random.randint(1, 6),
      random.choice([0, 1, 5, 20]),
      seed=s,
      stop=stop,
    )
    tokens, reason = bench.plain(texts[s], request, capacity)
    cut = random.randint(0, len(tokens))
    whole.append((tokens, reason, cut))
    requests.append(
      sch.Request(
        prompt=request.prompt,
        max_new_tokens=request.max_new_tokens,
        sampling=request.sampling,
        stop=stop,
        emitted=tuple(tokens[:cut]),
      )
    )
  engine = sch.init(
    _policy(random), bench.costs(8), capacity=capacity, prefill_rows=3
  )
  drafter = bench.drafter_of(
    texts,
    right=random.choice([0.0, 0.7, 1.0]),
    size=lambda budget: random.randint(0, budget),
    random=random,
  )
  stages = bench.ring(texts, num_stages=2, capacity=capacity)
  driver = Driver(engine, drafter)
  session = bench.play(driver, stages, requests, random)
  for s, (tokens, reason, cut) in enumerate(whole):
    outcome = driver.outcomes[s]
    assert (outcome.tokens, outcome.reason) == (tokens[cut:], reason)
    assert sum(r.emitted for r in outcome.rounds) == len(tokens) - cut
  for stage in session.stages:
    assert int(stage.stage._slots.used.sum()) == 0
    assert max(stage.used.values(), default=0) <= capacity
    for run_id, expected in session.expected_used.items():
      assert stage.used[run_id] <= expected


def test_a_text_that_had_ended_launches_nothing():
  text = [0, 1, 0, 1, 3, 0, 0]
  for emitted, stop, reason in (
    ((0, 1, 3), sch.Stop(ids=frozenset({3})), "stop"),
    ((0, 1), sch.Stop(strings=("aab",), text_of=bench.text_of), "stop_string"),
    ((0, 1, 3, 0), sch.Stop(), "length"),
  ):
    engine = sch.init(
      bench.pipelined(random_lib.Random(0), max_in_flight=2, max_nodes=2),
      bench.costs(8),
      capacity=30,
      prefill_rows=4,
    )
    request = sch.Request(
      prompt=tuple(text[:2]), max_new_tokens=4, stop=stop, emitted=emitted
    )
    event = sch.Submitted(time_s=0.0, sequence=0, request=request)
    engine, actions = sch.step(engine, event)
    assert actions == [sch.Finish(sequence=0, reason=reason)]
    assert not engine.sequences


# Faults. --------------------------------------------------------------------


@bench.examples(120)
@given(bench.SEEDS)
def test_what_an_older_epoch_sends_is_void(random):
  _break(random)


def test_older_epochs_do_send_something_here():
  assert sum(_break(random_lib.Random(seed)) > 0 for seed in range(40)) >= 10


def _break(random):
  """The ring breaks at any moment; verdicts and drafts of before come late, in
  any order with what follows. Returns how many such verdicts came."""
  count = random.randint(1, 3)
  texts = bench.random_texts(random, count, 70)
  requests = [
    bench.request_of(texts[s], random.randint(1, 6), 20, seed=s)
    for s in range(count)
  ]
  engine = sch.init(
    _policy(random), bench.costs(8), capacity=90, prefill_rows=3
  )
  drafter = bench.drafter_of(
    texts,
    right=0.7,
    size=lambda budget: random.randint(0, budget),
    random=random,
  )
  driver = watched.Watched(engine, drafter)
  stages = bench.ring(texts, num_stages=2, capacity=90)
  hops = [collections.deque() for _ in range(3)]
  stray: list[Returned] = []
  asked: collections.deque[sch.Draft] = collections.deque()
  faults, num_void = random.randint(1, 3), 0

  def hear(event):
    work = driver.handle(event)
    assert all(run.epoch == driver.engine.epoch for run in work.runs)
    hops[0].extend((run, None) for run in work.runs)
    asked.extend(work.drafts)

  for s, request in enumerate(requests):
    hear(sch.Submitted(time_s=0.0, sequence=s, request=request))
  while any(hops) or asked or stray:
    moves = [("hop", i) for i, hop in enumerate(hops) if hop]
    moves += [("draft", 0)] * bool(asked) + [("stray", 0)] * bool(stray)
    if faults and random.random() < 0.02:
      moves = [("fault", 0)]
    match random.choice(moves):
      case ("fault", _):
        faults -= 1
        before = {s: list(o.tokens) for s, o in driver.outcomes.items()}
        stray += [returned for returned, _ in hops[2]]
        for hop in hops:
          hop.clear()
        for stage in stages:
          stage.stage.reset()
        hear(sch.Faulted(time_s=0.0))
        # Nothing is taken back, nothing emitted twice.
        assert before == {s: o.tokens for s, o in driver.outcomes.items()}
      case ("stray", _):
        num_void += 1
        held = {s: list(o.tokens) for s, o in driver.outcomes.items()}
        returned = stray.pop(random.randrange(len(stray)))
        hear(sch.Arrived(time_s=0.0, returned=returned))
        assert held == {s: o.tokens for s, o in driver.outcomes.items()}
      case ("draft", _):
        hear(driver.draft(asked.popleft(), 0.0))
      case ("hop", 2):
        hear(sch.Arrived(time_s=0.0, returned=hops[2].popleft()[0]))
      case ("hop", i):
        out = stages[i].process(*hops[i].popleft())
        hops[i + 1].append((out.message, out.payload))
  bench.assert_plain(driver, requests, texts, 90)
  assert driver.done and not driver.engine.runs
  return num_void
