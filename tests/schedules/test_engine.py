# SPDX-License-Identifier: Apache-2.0
"""The engine over replayed texts: tokens, ends, slots and counts."""

import math
import random as random_lib
import re

import pytest
from hypothesis import given

from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax.base import Drafter
from wanspec_jax.messages import Returned
from wanspec_jax.metrics import summarize
from wanspec_jax.worlds import Driver


def _lockstep(random, max_nodes):
  """Returns lockstep with tree sizes chosen at random."""
  return sch.lockstep(
    lambda gains, lap_s: random.randint(0, len(gains)), max_nodes=max_nodes
  )


def _stop(random):
  strings = random.sample(["aab", "ba", "éa", "abab", "aé", "aaaa"], 2)
  return sch.Stop(
    ids=frozenset(random.sample(range(bench.VOCAB), random.randint(0, 1))),
    strings=tuple(strings[: random.randint(0, 2)]),
    text_of=bench.text_of,
  )


def _check(session, requests, texts, capacity, aborted=()):
  """Every text is that of plain decoding; every slot is accounted for."""
  for sequence, request in enumerate(requests):
    outcome = session.driver.outcomes[sequence]
    tokens, reason = bench.plain(texts[sequence], request, capacity)
    assert session.emitted[sequence] == outcome.tokens
    if sequence in aborted and outcome.reason == "aborted":
      assert outcome.tokens == tokens[: len(outcome.tokens)]
    else:
      assert (outcome.tokens, outcome.reason) == (tokens, reason)
    assert sum(r.emitted for r in outcome.rounds) == len(outcome.tokens)
  engine = session.driver.engine
  assert session.driver.done and not engine.runs and not engine.closes
  for stage in session.stages:
    assert int(stage.stage._slots.used.sum()) == 0
    assert not stage.stage._tail
    assert max(stage.used.values(), default=0) <= capacity
    for run_id, expected in session.expected_used.items():
      used = stage.used[run_id]
      assert used <= expected, f"run {run_id}"
      assert session.cancelled or used == expected, f"run {run_id}"


@bench.examples(150)
@given(bench.SEEDS)
def test_any_schedule_gives_the_plain_text(random):
  """Random drafters, tree sizes, capacities, stops, stages, interleavings."""
  capacity = random.choice([6, 9, 14, 30, 80])
  count = random.randint(1, 4)
  texts = bench.random_texts(random, count, capacity + 12)
  max_nodes = random.choice([0, 1, 3, 8])
  requests = [
    bench.request_of(
      texts[s],
      random.randint(1, min(capacity - 1, 8)),
      random.choice([0, 1, 2, 5, 9, 20]),
      seed=s,
      stop=_stop(random),
    )
    for s in range(count)
  ]
  max_rows = random.choice([2, 5, 16])
  policy = _lockstep(random, max_nodes)
  if random.random() < 0.5:
    policy = bench.pipelined(
      random, max_in_flight=random.randint(1, 3), max_nodes=max(max_nodes, 1)
    )
  drafter = bench.drafter_of(
    texts,
    right=random.choice([0.0, 0.5, 0.9, 1.0]),
    size=lambda budget: random.randint(0, budget + 2),
    random=random,
  )
  engine = sch.init(
    policy,
    bench.costs(max_rows),
    capacity=capacity,
    prefill_rows=random.randint(1, max_rows),
  )
  stages = bench.ring(texts, num_stages=random.randint(1, 4), capacity=capacity)
  aborts = random.sample(range(count), random.choice([0, 0, 1]))
  session = bench.play(
    Driver(engine, drafter), stages, requests, random, aborts=aborts
  )
  _check(session, requests, texts, capacity, aborts)
  for run in stages[0].rows.values():
    assert run.num_rows <= max_rows


def _decode(
  *,
  budget,
  drafter=None,
  depth=None,
  size=None,
  max_nodes=8,
  capacity=64,
  prompt=3,
  stop=None,
  text=None,
  max_rows=16,
  prefill_rows=4,
):
  """Decodes one text in lockstep; returns its outcome and the session."""
  random = random_lib.Random(1)
  texts = {0: text or bench.random_texts(random, 1, 100)[0]}
  request = bench.request_of(texts[0], prompt, budget, seed=0, stop=stop)
  if drafter is None:
    drafter = bench.chain_of(texts, max_nodes if depth is None else depth)
  policy = sch.lockstep(
    size or (lambda gains, lap_s: len(gains)), max_nodes=max_nodes
  )
  engine = sch.init(
    policy,
    bench.costs(max_rows),
    capacity=capacity,
    prefill_rows=prefill_rows,
  )
  stages = bench.ring(texts, num_stages=2, capacity=capacity)
  session = bench.play(Driver(engine, drafter), stages, [request], random)
  _check(session, [request], texts, capacity)
  return session.driver.outcomes[0], session


@pytest.mark.parametrize("depth", [1, 2, 4, 7])
def test_a_perfect_chain_of_depth_d_gives_d_plus_one_tokens_a_lap(depth):
  budget = 5 * (depth + 1)
  outcome, session = _decode(budget=budget, depth=depth)
  assert [r.emitted for r in outcome.rounds] == [depth + 1] * 5
  assert [r.accepted for r in outcome.rounds] == [depth] * 5
  assert [r.tested for r in outcome.rounds] == [depth] * 5
  assert [r.drafted for r in outcome.rounds] == [depth] * 5
  laps = [
    run for run in session.stages[0].rows.values() if not run.committed.all()
  ]
  assert len(laps) == summarize(outcome.rounds).laps == 5


@pytest.mark.parametrize("k", [1, 3, 6])
def test_budgets_cut_inside_a_block(k):
  for budget in (0, 1, 2, k, k + 1, k + 2):
    outcome, _ = _decode(budget=budget, depth=k)
    assert len(outcome.tokens) == budget
    assert outcome.reason == "length"
    # No path is longer than what the text can still use.
    left = budget
    for record in outcome.rounds:
      assert record.drafted <= left - 1
      left -= record.emitted


@pytest.mark.parametrize("at", range(9))
def test_stop_id_anywhere_in_a_block(at):
  """Neither tokens nor counts include what lies behind the end."""
  text = [0, 1, 0] + [1] * at + [3] + [0] * 40
  outcome, _ = _decode(
    budget=30,
    depth=4,
    text=text,
    stop=sch.Stop(ids=frozenset({3})),
  )
  assert outcome.tokens == [1] * at + [3]
  assert outcome.reason == "stop"
  assert sum(r.emitted for r in outcome.rounds) == at + 1
  last = outcome.rounds[-1]
  assert last.emitted == at % 5 + 1
  assert last.accepted == min(last.emitted, 4)


@pytest.mark.parametrize("depth", [2, 8])
@pytest.mark.parametrize("at", range(9))
def test_stop_string_over_tokens_and_blocks(depth, at):
  """`aé`: a, then é in two halves; ends at every place of a block."""
  text = [0, 1, 0] + [1] * at + [0, 3, 4] + [0] * 40
  outcome, _ = _decode(
    budget=30,
    depth=depth,
    text=text,
    stop=sch.Stop(strings=("aé",), text_of=bench.text_of),
  )
  assert outcome.tokens == [1] * at + [0, 3, 4]
  assert outcome.reason == "stop_string"


@pytest.mark.parametrize("gap", [1, 9, 30])
def test_stop_string_around_tokens_without_text(gap):
  """Special tokens have no text; any number may sit inside the string."""
  text = [0, 1, 0, 0] + [2] * gap + [5] + [0] * 60
  outcome, _ = _decode(
    budget=50,
    depth=3,
    text=text,
    stop=sch.Stop(strings=("ab",), text_of=bench.text_of),
  )
  assert outcome.tokens == [0] + [2] * gap + [5]
  assert outcome.reason == "stop_string"


def _wrong():
  """Returns a drafter whose nodes are never right: flat, distinct tokens."""

  def expand(state, anchors, budget, levels=None):
    tokens = [100 + i for i in range(budget)]
    return state, bench.nodes_of(tokens, [0] * budget, -1.0)

  return Drafter(
    "wrong",
    lambda params, prompt, key: None,
    expand,
    lambda state, root: state,
    lambda state, tokens, features=None: state,
  )


def test_dead_slots_are_free_for_the_run_that_kills_them():
  """The commit rides on the next run: all spare slots serve every lap."""
  budget, prompt, spare = 12, 3, 5
  outcome, _ = _decode(
    budget=budget,
    prompt=prompt,
    drafter=_wrong(),
    capacity=budget + prompt + spare,
    max_nodes=8,
  )
  assert [r.drafted for r in outcome.rounds] == [spare] * 11 + [0]


def test_full_cache_shortens_trees_and_ends_with_length():
  """Prompt and budget take all slots: nothing is left to speculate with."""
  outcome, _ = _decode(budget=50, prompt=4, capacity=12)
  assert len(outcome.tokens) == 8 and outcome.reason == "length"
  assert all(r.drafted == 0 for r in outcome.rounds)


def _small():
  """Returns an engine of six slots that does not speculate."""
  return sch.init(
    sch.lockstep(0),
    bench.costs(8),
    capacity=6,
    prefill_rows=4,
  )


def test_a_prompt_that_does_not_fit_is_refused_by_name():
  engine = _small()
  request = bench.request_of([0] * 9, 6, 1, seed=0)
  engine, (finish,) = sch.step(
    engine, sch.Submitted(time_s=0.0, sequence=0, request=request)
  )
  assert finish.reason == "refused" and not engine.queue
  assert re.search(r"Request\.prompt of 6 tokens.*6 slots", finish.detail)


@pytest.mark.parametrize(
  ("field", "change"),
  [("capacity", {"capacity": 0}), ("prefill_rows", {"prefill_rows": 9})],
)
def test_impossible_sizes_are_refused_by_name(field, change):
  sizes = {"capacity": 4, "prefill_rows": 4} | change
  with pytest.raises(ValueError, match=f"{field} = "):
    sch.init(sch.lockstep(0), bench.costs(8), **sizes)


def test_admission_leaves_no_room_to_overflow():
  """A sequence is not let in on slots that another's tree still holds."""
  texts = {0: [0] * 80, 1: [1] * 80}
  engine = sch.init(
    sch.lockstep(24),
    bench.costs(32),
    capacity=40,
    prefill_rows=32,
  )
  driver = Driver(engine, _wrong())
  stages = bench.ring(texts, num_stages=1, capacity=40)
  requests = [
    bench.request_of(texts[0], 4, 8, seed=0),
    bench.request_of(texts[1], 24, 2, seed=1),
  ]
  runs, drafts, *_ = driver.handle(
    sch.Submitted(time_s=0.0, sequence=0, request=requests[0])
  )
  more, *_ = driver.handle(driver.draft(drafts[0], 0.0))
  late, drafts, *_ = driver.handle(
    sch.Submitted(time_s=0.0, sequence=1, request=requests[1])
  )
  assert more[-1].num_rows == 25  # 24 nodes and the root are on their way
  answers = [stages[0].process(run) for run in [*runs, *more, *late]]
  # It is let in as soon as they are free, long before the first one ends.
  for _ in range(3):
    todo = []
    for answer in answers:
      event = sch.Arrived(time_s=0.0, returned=answer.message)
      sent, asked, *_ = driver.handle(event)
      todo += sent
      for action in [*drafts, *asked]:
        todo += driver.handle(driver.draft(action, 0.0))[0]
      drafts = []
    answers = [stages[0].process(run) for run in todo]
  assert driver.outcomes[1].reason == "length"
  assert 0 in driver.engine.sequences


def test_abort_of_a_request_that_still_waits_is_reported():
  texts = {s: [0] * 40 for s in range(2)}
  engine = sch.init(
    sch.lockstep(0),
    bench.costs(8),
    capacity=20,
    prefill_rows=8,
  )
  driver = Driver(engine, bench.chain_of(texts, 0))
  for s in range(2):
    driver.handle(
      sch.Submitted(
        time_s=float(s),
        sequence=s,
        request=bench.request_of(texts[s], 4, 10, seed=s),
      )
    )
  assert len(driver.engine.queue) == 1
  driver.handle(sch.Aborted(time_s=7.0, sequence=1))
  assert driver.outcomes[1].reason == "aborted"
  assert driver.outcomes[1].finished_s == 7.0


@bench.examples(25)
@given(bench.SEEDS)
def test_several_sequences_equal_single_runs(random):
  texts = bench.random_texts(random, 3, 60)
  requests = [
    bench.request_of(
      texts[s], random.randint(1, 9), random.randint(1, 20), seed=s
    )
    for s in range(3)
  ]

  def decode(chosen):
    engine = sch.init(
      _lockstep(random, 6), bench.costs(16), capacity=60, prefill_rows=4
    )
    drafter = bench.drafter_of(
      texts, right=0.7, size=lambda budget: budget, random=random
    )
    local = {i: texts[s] for i, s in enumerate(chosen)}
    session = bench.play(
      Driver(engine, drafter),
      bench.ring(local, num_stages=2, capacity=60),
      [requests[s] for s in chosen],
      random,
    )
    return [session.driver.outcomes[i].tokens for i in range(len(chosen))]

  together = decode([0, 1, 2])
  assert together == [decode([s])[0] for s in range(3)]


@bench.examples(60)
@given(bench.SEEDS)
def test_counts_of_nodes_agree_with_what_travelled(random):
  """Launched nodes are drafted; those on the text are accepted."""
  texts = bench.random_texts(random, 1, 80)
  request = bench.request_of(texts[0], 3, 30, seed=0)
  policy = _lockstep(random, 6)
  if random.random() < 0.7:
    policy = bench.pipelined(random, max_in_flight=3, max_nodes=5)
  engine = sch.init(policy, bench.costs(16), capacity=200, prefill_rows=4)
  drafter = bench.drafter_of(
    texts, right=0.7, size=lambda budget: budget, random=random
  )
  stages = bench.ring(texts, num_stages=2, capacity=200)
  session = bench.play(Driver(engine, drafter), stages, [request], random)
  _check(session, [request], texts, 200)
  rounds = session.driver.outcomes[0].rounds
  total = summarize(rounds)
  runs = [r for _, r in sorted(stages[0].rows.items())]
  nodes = {}  # id -> (token path from the start, launched as a new root)
  for run in runs:
    roots = {c.root for c in run.commits}
    rows = zip(
      run.ids.tolist(), run.parents.tolist(), run.tokens.tolist(), strict=True
    )
    for node, parent, token in rows:
      above = () if parent == node else nodes[parent][0]
      nodes[node] = ((*above, token), node in roots)
  text = tuple(texts[0])
  last_verdict = max(run.run_id for run in runs if run.num_rows)
  drafts = [p for i, (p, root) in nodes.items() if i >= 3 and not root]
  on_text = [p for p in drafts if p == text[: len(p)] and len(p) <= 33]
  # The last verdict ends the text: what was launched behind it brings none.
  assert total.drafted <= len(drafts)
  assert total.accepted == len(on_text)
  if policy.max_in_flight == 1:
    assert total.drafted == len(drafts)
    assert all(r.emitted - r.accepted <= 1 for r in rounds)
  assert total.laps <= last_verdict + 1


def test_a_policy_that_breaks_the_rules_is_named():
  texts = {0: [0] * 40}

  def launch(ids):
    policy = sch.Policy(
      name="rogue",
      decide=lambda spec, pipe, time_s: sch.Send(ids=ids),
      max_in_flight=1,
    )
    engine = sch.init(policy, bench.costs(4), capacity=30, prefill_rows=4)
    driver = Driver(engine, bench.chain_of(texts, 0))
    request = bench.request_of(texts[0], 2, 9, seed=0)
    driver.handle(sch.Submitted(time_s=0.0, sequence=0, request=request))

  with pytest.raises(RuntimeError, match="rogue: more than max_in_flight"):
    launch(())
  with pytest.raises(RuntimeError, match="rogue: 5 nodes launched, 3 slots"):
    launch((2, 3, 4, 5, 6))


def test_unknown_events_are_refused():
  engine = _small()
  with pytest.raises(TypeError, match="not an event"):
    sch.step(engine, Returned(run_id=0))


@pytest.mark.parametrize("size", [0, 1, 5])
def test_a_number_stands_for_the_likeliest_so_many(size):
  def launched(policy):
    texts = {0: bench.random_texts(random_lib.Random(2), 1, 80)[0]}
    engine = sch.init(policy, bench.costs(8), capacity=60, prefill_rows=4)
    request = bench.request_of(texts[0], 3, 30, seed=0)
    random = random_lib.Random(3)
    drafter = bench.drafter_of(
      texts, right=0.6, size=lambda budget: 7, random=random
    )
    stages = bench.ring(texts, num_stages=1, capacity=60)
    driver = Driver(engine, drafter)
    bench.play(driver, stages, [request], random)
    rounds = driver.outcomes[0].rounds
    assert max(r.drafted for r in rounds) == size
    return rounds

  def likeliest(gains, lap_s):
    assert list(gains) == sorted(gains, reverse=True)
    return min(size, len(gains))

  same = sch.lockstep(likeliest, max_nodes=size)
  assert launched(sch.lockstep(size)) == launched(same)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: sch.lockstep(lambda g, t: 0, max_nodes=-1), "max_nodes = -1"),
    (lambda: sch.lockstep(3, max_nodes=-1), "max_nodes = -1"),
    (lambda: sch.lockstep(-1), "size = -1"),
    (lambda: sch.lockstep(lambda g, t: 0), "max_nodes = None"),
  ],
)
def test_sizes_that_make_no_sense_are_named(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_nothing_is_drafted_that_no_lap_can_use():
  """The last token of a budget needs no tree."""
  outcome, session = _decode(budget=1, depth=4)
  assert outcome.rounds[0].drafted == 0
  assert math.isclose(summarize(outcome.rounds).tokens_per_lap, 1.0)
  assert all(
    not run.num_rows or run.committed.all() or run.num_rows == 1
    for run in session.stages[0].rows.values()
  )
