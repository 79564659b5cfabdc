# SPDX-License-Identifier: Apache-2.0
"""The engine when nothing comes when expected: drafts that come late, and
commits that no run is there to carry."""

import collections
import random as random_lib

import pytest

from tests.schedules import bench, watched
from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor
from wanspec_jax.messages import Returned, Verdict
from wanspec_jax.worlds import Driver

# Late drafts. -----------------------------------------------------------------


def test_late_drafts_keep_what_still_follows_the_text():
  """Any interleaving; most drafts come when the text has moved on."""
  counts, kept = collections.Counter(), 0
  for seed in range(80):
    random = random_lib.Random(seed)
    texts = bench.random_texts(random, 2, 60, vocab=3)
    engine = sch.init(
      bench.pipelined(random, max_in_flight=4, max_nodes=6),
      bench.costs(16),
      capacity=120,
      prefill_rows=4,
    )
    drafter = bench.drafter_of(
      texts,
      right=0.8,
      size=lambda budget, random=random: random.randint(0, budget + 4),
      random=random,
      vocab=3,
    )
    driver = watched.Watched(engine, drafter)
    requests = [bench.request_of(texts[s], 3, 25, seed=s) for s in texts]
    bench.play(
      driver,
      bench.ring(texts, num_stages=2, capacity=120),
      requests,
      random,
    )
    bench.assert_plain(driver, requests, texts, 120)
    counts += driver.counts
    kept += driver.kept
  late = sum(n for tokens, n in counts.items() if tokens > 1)
  assert late > 100 and kept > 100  # else nothing was tested


def _late_drafts():
  """Returns a policy that drafts below the root, launches the root without
  waiting for the answer, and then whatever is drafted, a run at a time."""

  def decide(spec, pipe, time_s):
    if not spec.drafting and spec.drafted_root != spec.root:
      return sch.Grow((spec.anchor(spec.root),), 8)
    if spec.in_flight:
      return None
    ids = [] if spec.drafting else spec.launchable(spec.max_new_nodes)
    return sch.Send(tuple(ids)) if ids or not spec.root_launched else None

  return sch.Policy("late drafts", decide, max_in_flight=1)


def _arrived(run, *tokens):
  verdict = Verdict(sequence=0, tokens=tokens)
  return sch.Arrived(
    time_s=0.0, returned=Returned(run_id=run.run_id, verdicts=(verdict,))
  )


def _rows(run):
  """Returns `(token, parent's token or None)` of a run's rows."""
  token_of = dict(zip(run.ids.tolist(), run.tokens.tolist(), strict=True))
  return [
    (token, token_of.get(parent) if parent != node else None)
    for node, parent, token in zip(
      run.ids.tolist(), run.parents.tolist(), run.tokens.tolist(), strict=True
    )
  ]


def test_a_draft_that_comes_after_a_commit_still_counts():
  """Asked for below 7; meanwhile 7 -> 1 -> 2 became text, one lap at a time.

  Drafted: 1 -> 2 -> 3 and 2 -> 4 below that, 1 -> 9, and 5 below 7. What lies
  below 1 -> 2 goes on; the rest is about a past that did not come.
  """
  nodes = bench.nodes_of([1, 2, 3, 4, 9, 5], [0, 1, 2, 2, 1, 0])
  engine = sch.init(
    _late_drafts(), bench.costs(16), capacity=64, prefill_rows=4
  )
  driver = Driver(engine, bench.chain_of({0: [7]}, 0))
  request = bench.request_of([7], 1, 20, seed=0)
  work = driver.handle(sch.Submitted(time_s=0.0, sequence=0, request=request))
  (draft,), (first,) = work.drafts, work.runs
  assert _rows(first) == [(7, None)]
  (second,) = driver.handle(_arrived(first, 1)).runs
  assert _rows(second) == [(1, None)]
  (third,) = driver.handle(_arrived(second, 2)).runs
  assert _rows(third) == [(2, None)]
  driver.handle(bench.drafted(draft, nodes))
  spec = driver.engine.sequences[0].spec
  paths = {spec.path(node) for node in spec.nodes}
  assert paths == {(), (3,), (4,)}


# Commits alone. -------------------------------------------------------------


def _scripted(*answers):
  """Returns a policy that answers in this order for sequence 0, each as soon as
  it may; any other drafts once and launches all that it is allowed to."""
  left = collections.deque(answers)

  def decide(spec, pipe, time_s):
    if spec.drafting:
      return None
    if spec.sequence == 0:
      return left.popleft() if left else None
    if spec.drafted_root is None:
      return sch.Grow((spec.anchor(spec.root),), 20)
    ids = spec.launchable(spec.max_new_nodes)
    return sch.Send(tuple(ids)) if ids else None

  return sch.Policy("scripted", decide, max_in_flight=9)


def _until_verdict(capacity):
  """Returns an engine with two runs in flight, ids in parentheses:
  0 = [root (1), A (2), five wrong siblings (3 to 7)], 1 = [A's child B (8)].

  The text has a prompt of 2 and a budget of 6: 8 slots. The seven nodes hold
  one more each until they are text or a commit has freed them.
  """
  anchor = Anchor(id=1)
  policy = _scripted(
    sch.Grow((anchor,), 7), sch.Send((2, 3, 4, 5, 6, 7)), sch.Send((8,))
  )
  engine = sch.init(policy, bench.costs(16), capacity=capacity, prefill_rows=4)
  request = sch.Request(prompt=(0, 1), max_new_tokens=6)
  submitted = sch.Submitted(time_s=0.0, sequence=0, request=request)
  engine, actions = sch.step(engine, submitted)
  (draft,) = (a for a in actions if isinstance(a, sch.Draft))
  nodes = bench.nodes_of([10, 11, 12, 13, 14, 15, 20], [0, 0, 0, 0, 0, 0, 1])
  engine, actions = sch.step(engine, bench.drafted(draft, nodes, time_s=0.1))
  runs = [a.run for a in actions if isinstance(a, sch.Launch)]
  assert [run.ids.tolist() for run in runs] == [[1, 2, 3, 4, 5, 6, 7], [8]]
  return engine, runs


def _verdict(engine, run_id):
  """The tail takes A (10) and draws B (20), which is on its way."""
  verdict = Verdict(sequence=0, tokens=(10, 20))
  return sch.step(
    engine,
    sch.Arrived(
      time_s=1.0, returned=Returned(run_id=run_id, verdicts=(verdict,))
    ),
  )


def _submit(engine, prompt, budget):
  request = sch.Request(prompt=(5,) * prompt, max_new_tokens=budget)
  return sch.step(
    engine, sch.Submitted(time_s=0.5, sequence=1, request=request)
  )


def test_a_commit_goes_alone_where_a_request_waits_for_its_slots():
  """8 slots reserved, 7 held by nodes, 20 in all: a request of 10 waits.

  The verdict frees the five siblings for whoever gets the commit; B's slot, and
  A's, are reserved ones then. 8 + 10 + nothing fits 20.
  """
  engine, runs = _until_verdict(capacity=20)
  engine, actions = _submit(engine, 4, 6)
  assert actions == [] and len(engine.queue) == 1
  engine, actions = _verdict(engine, runs[0].run_id)
  launches = [a.run for a in actions if isinstance(a, sch.Launch)]
  alone = launches[0]
  assert alone.num_rows == 0
  assert [(c.sequence, c.root) for c in alone.commits] == [(0, 8)]
  assert any(isinstance(a, sch.Admit) and a.sequence == 1 for a in actions)
  opened = [run for run in launches if run.opens]
  assert opened and opened[0].run_id > alone.run_id
  assert not engine.queue


def test_a_commit_waits_for_the_next_run_where_slots_are_plenty():
  """Nobody waits and 20 slots are more than 8 and 5: no run for it alone."""
  engine, runs = _until_verdict(capacity=20)
  engine, actions = _verdict(engine, runs[0].run_id)
  assert not [a for a in actions if isinstance(a, sch.Launch)]
  assert engine.sequences[0].spec.dead_held == 5
  # B is back: its successor is a new root, whose run carries the commit.
  verdict = Verdict(sequence=0, tokens=(30,))
  engine, actions = sch.step(
    engine,
    sch.Arrived(
      time_s=2.0,
      returned=Returned(run_id=runs[1].run_id, verdicts=(verdict,)),
    ),
  )
  (run,) = (a.run for a in actions if isinstance(a, sch.Launch))
  assert run.num_rows == 1 and run.commits[0].root == int(run.ids[0])
  assert engine.sequences[0].spec.dead_held == 0


@pytest.mark.parametrize(("capacity", "is_sent"), [(22, True), (23, False)])
def test_a_commit_goes_alone_where_no_slot_is_left(capacity, is_sent):
  """Two texts reserve 8 and 4 slots; 10 or 11 are left, 5 for each of them.

  The first holds 7, taken while it was alone, so the second gets 3 or 4. The
  verdict frees two of the first one's, which are text now. The second takes up
  to its 5: all 10 are in use then, five of them by the dead, but not all 11.
  """
  engine, runs = _until_verdict(capacity=capacity)
  engine, actions = _submit(engine, 2, 2)
  (draft,) = (a for a in actions if isinstance(a, sch.Draft))
  nodes = bench.nodes_of(list(range(20)), [0] * 20)
  engine, actions = sch.step(engine, bench.drafted(draft, nodes, time_s=0.6))
  assert engine.sequences[1].spec.num_launched == capacity - 8 - 4 - 7
  engine, actions = _verdict(engine, runs[0].run_id)
  launches = [a.run for a in actions if isinstance(a, sch.Launch)]
  assert engine.sequences[1].spec.num_launched == 5
  assert launches[0].sequences.tolist() == [1] * len(launches[0].ids)
  alone = launches[1:]
  assert [run.num_rows for run in alone] == [0] * is_sent
  for run in alone:
    assert [(c.sequence, c.root) for c in run.commits] == [(0, 8)]
