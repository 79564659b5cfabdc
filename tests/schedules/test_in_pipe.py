# SPDX-License-Identifier: Apache-2.0
"""In-pipe growth against its closed forms, and trees cut into segments."""

import math

import numpy as np
import pytest

from tests.schedules import bench, virtual
from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor
from wanspec_jax.schedules import _speculation as tree

# In-pipe growth. --------------------------------------------------------------


def _pace(outcome, skip=20):
  """Returns tokens per second behind the first `skip`."""
  times = outcome.emitted_s
  return (len(times) - 1 - skip) / (times[-1] - times[skip])


def _stream(accept, *, tokens, **ring):
  """Decodes one level per tick; returns the share of hits, and the rate."""
  text = virtual.text_of(tokens)
  drafter = virtual.drafter_of(text, accept)
  policy = sch.in_pipe(width=1, in_flight=400)
  outcome, _ = virtual.decode(policy, text, drafter, tokens=tokens, **ring)
  hits = virtual.hits(drafter, text, tokens)[20:-1]
  return sum(hits) / len(hits), _pace(outcome)


@pytest.mark.parametrize("accept", [0.8, 0.9])
@pytest.mark.parametrize(
  ("num_stages", "latency_s", "level_s"),
  [
    pytest.param(4, 0.0, 0.0, id="4"),
    pytest.param(14, 0.0, 0.009, id="14, drafting hidden"),
    pytest.param(30, 0.0, 0.0, id="30"),
    pytest.param(6, 0.24, 0.0, id="wan of 30 ticks"),
  ],
)
def test_one_level_per_tick_has_the_rate_of_the_closed_form(
  accept, num_stages, latency_s, level_s
):
  """(R + 1) / ((R + W) τ), W the lap in ticks; R from the drafts themselves.

  A hit comes a tick after the token before, a miss a lap after it: the share of
  hits fixes the rate, however long the text is.
  """
  tick_s = 0.01
  hit, pace = _stream(
    accept,
    tokens=140,
    stage_s=(tick_s,) * num_stages,
    delay_s=(latency_s / (num_stages + 1),) * (num_stages + 1),
    level_s=level_s,
  )
  assert hit == pytest.approx(accept, abs=0.1)
  window = sch.lap_window(num_stages * tick_s + latency_s, tick_s)
  assert window == round(num_stages + latency_s / tick_s)
  rate = sch.in_pipe_rate(hit, window, tick_s)
  assert pace == pytest.approx(rate, rel=0.01)


def test_a_lap_between_two_ticks_lies_between_two_windows():
  tick_s, lap_s = 0.01, 0.085
  hit, pace = _stream(
    0.8, tokens=300, stage_s=(tick_s,) * 2, delay_s=(0.025, 0.025, 0.015)
  )
  assert sch.lap_window(lap_s, tick_s) == 9
  slow, fast = (sch.in_pipe_rate(hit, w, tick_s) for w in (9, 8.5))
  assert 0.995 * slow <= pace <= 1.005 * fast


def test_a_slow_drafter_sets_the_pace_of_the_levels():
  """A level per draft then, on a ring that could take more. A lap is ten of
  them: no miss finds the drafter in the middle of one."""
  hit, pace = _stream(
    0.8,
    tokens=300,
    stage_s=(0.01,) * 2,
    delay_s=(0.04, 0.04, 0.05),
    level_s=0.015,
  )
  rate = sch.stream_rate(hit, level_s=0.015, tick_s=0.01, lap_s=0.15)
  assert pace == pytest.approx(rate, rel=0.01)


def _fading(first, keep):
  return lambda position, depth: (max(first * keep ** (depth - 1), 0.01),)


@pytest.mark.parametrize(("first", "keep"), [(0.8, 0.945), (0.9, 0.8)])
def test_the_levels_in_flight_chosen_are_near_the_best_of_a_sweep(first, keep):
  """Acceptance fades with every level ahead, as measured on real rings:
  .796 · .945^(i − 1)."""
  tokens = 120
  text = virtual.text_of(tokens)

  def rate(policy):
    drafter = virtual.drafter_of(text, _fading(first, keep))
    outcome, _ = virtual.decode(
      policy,
      text,
      drafter,
      tokens=tokens,
      stage_s=(0.01,) * 4,
      delay_s=(0.04,) * 5,
    )
    return _pace(outcome)

  sweep = [rate(sch.in_pipe(width=1, in_flight=w)) for w in (2, 4, 8, 24)]
  assert rate(sch.in_pipe(width=1)) >= 0.97 * max(sweep)


def test_filling_is_forced_past_what_the_closed_form_wants():
  """A hopeless level is held back, and sent if the pipe is to be full."""
  costs = sch.Costs(
    delay_s=(0.05, 0.05),
    busy_s=lambda rows: (0.0, 0.01, 0.0),
    max_rows=virtual.MAX_ROWS,
  )
  spec = tree.start(0, (9,), 100)
  spec.max_new_nodes = 50
  chain = bench.nodes_of(range(12), range(12), math.log(0.3))
  tree.add_nodes(spec, (spec.anchor(spec.root),), chain)
  sent = {}
  for fill in (False, True):
    for node in spec.nodes.values():
      node.run = 0 if node.id == spec.root else None
    policy = sch.in_pipe(width=1, fill=fill)
    count = 0
    while True:
      answer = policy.decide(spec, sch.Pipe(costs), 0.0)
      if not isinstance(answer, sch.Send):
        break
      (node,) = answer.ids
      spec.nodes[node].run = 1
      count += 1
    sent[fill] = count
  assert sent[True] == 11 - 1  # a lap has 11 ticks, the root takes one
  # By enumeration: the rate with W levels, from what each of them brings.
  rates = {
    w: sch.window_rates(lambda i: 0.3, lap_s=0.11, tick_s=0.01)[w - 1]
    for w in range(1, 9)
  }
  best = max(rates.values())
  assert sent[False] == min(w for w in rates if rates[w] >= 0.999 * best) - 1


def test_a_level_is_the_likeliest_nodes_of_one_depth():
  """Paths compete across parents; what is left of a level is passed over."""
  spec = tree.start(0, (9,), 100)
  spec.max_new_nodes = 50
  root = spec.nodes[spec.root]
  root.run = 0
  pipe = sch.Pipe(bench.costs(virtual.MAX_ROWS))
  policy = sch.in_pipe(width=2, children=3)
  answer = policy.decide(spec, pipe, 0.0)
  assert answer == sch.Grow((Anchor(root.id),), 3, 1)
  first = bench.nodes_of([1, 2, 3], [0, 0, 0], np.log([0.2, 0.5, 0.3]))
  tree.add_nodes(spec, (spec.anchor(root.id),), first)
  root.grown = 3
  one, two, three = (spec.children[root.id, t] for t in (1, 2, 3))
  assert policy.decide(spec, pipe, 0.0) == sch.Send((two, three))
  spec.nodes[two].run = spec.nodes[three].run = 1
  # Node `one` waits, and is not sent: the level below is next.
  answer = policy.decide(spec, pipe, 0.0)
  assert isinstance(answer, sch.Grow)
  assert [a.id for a in answer.anchors] == [two, three]
  assert (answer.budget, answer.levels) == (6, 1)
  # Paths of .15, .24 and .03.
  second = bench.nodes_of([4, 5, 6], [0, 1, 1], np.log([0.3, 0.8, 0.1]))
  tree.add_nodes(spec, answer.anchors, second)
  four, five = spec.children[two, 4], spec.children[three, 5]
  assert policy.decide(spec, pipe, 0.0) == sch.Send((five, four))
  assert spec.nodes[one].run is None


# Segments. --------------------------------------------------------------------


def _segments_spec():
  """Returns a launched root with two chains: .7 .49 .343 and .2 .18 .162."""
  spec = tree.start(0, (9,), 100)
  spec.max_new_nodes = 50
  spec.nodes[spec.root].run = 0
  spec.drafted_root = spec.root
  spec.nodes[spec.root].grown = 7
  nodes = bench.nodes_of(
    [1, 2, 3, 4, 5, 6],
    [0, 1, 2, 0, 4, 5],
    np.log([0.7, 0.7, 0.7, 0.2, 0.9, 0.9]),
  )
  tree.add_nodes(spec, (spec.anchor(spec.root),), nodes)
  return spec


def test_segments_go_in_the_order_of_their_scores():
  spec, pipe = _segments_spec(), sch.Pipe(bench.costs(virtual.MAX_ROWS))
  policy = sch.segments(segment=2, top_k=0)
  sent = []
  while True:
    answer = policy.decide(spec, pipe, 0.0)
    if not isinstance(answer, sch.Send):
      break
    sent.append([spec.nodes[n].token for n in answer.ids])
    for node in answer.ids:
      spec.nodes[node].run = len(sent)
  assert answer is None
  assert sent == [[1, 2], [3, 4], [5, 6]]


def test_a_verdict_keeps_what_is_below_and_the_draft_adds_to_it():
  spec, pipe = _segments_spec(), sch.Pipe(bench.costs(virtual.MAX_ROWS))
  policy = sch.segments(segment=2, expand=5, levels=3, top_k=0)
  first = policy.decide(spec, pipe, 0.0)
  assert isinstance(first, sch.Send)
  for node in first.ids:
    spec.nodes[node].run = 1
  one, two = first.ids
  tree.commit_tokens(spec, (1,))
  assert spec.root == one and spec.nodes[two].run == 1
  three = spec.children[two, 3]
  assert [n.token for n in spec.unlaunched()] == [3]
  # The tree below the new root is drafted again; what is known stays.
  answer = policy.decide(spec, pipe, 0.0)
  assert answer == sch.Grow((Anchor(one),), 5, 3)
  again = bench.nodes_of(
    [2, 3, 7, 8], [0, 1, 0, 2], np.log([0.7, 0.7, 0.25, 0.6])
  )
  tree.add_nodes(spec, answer.anchors, again)
  spec.drafted_root = spec.root
  assert spec.children[one, 2] == two and spec.children[two, 3] == three
  seven, eight = spec.children[one, 7], spec.children[three, 8]
  # .49 for 3, .294 for 8, .25 for 7; 2 is under way.
  assert policy.decide(spec, pipe, 0.0) == sch.Send((three, eight))
  spec.nodes[three].run = spec.nodes[eight].run = 2
  assert policy.decide(spec, pipe, 0.0) == sch.Send((seven,))
  # A miss begins anew: the root waits for its tree.
  tree.commit_tokens(spec, (99,))
  answer = policy.decide(spec, pipe, 0.0)
  assert answer == sch.Grow((Anchor(spec.root),), 80, 3)


def test_segments_fill_the_pipe_and_outrun_one_tree_in_lockstep():
  text = virtual.text_of(150)

  def seconds(policy):
    drafter = virtual.drafter_of(text, (0.7, 0.15, 0.05))
    outcome, runs = virtual.decode(
      policy,
      text,
      drafter,
      tokens=150,
      stage_s=(0.01,) * 6,
      records=True,
    )
    assert max(run.num_rows for run in runs) <= 16
    return outcome.decode_s

  one_tree = sch.lockstep(15)
  assert seconds(sch.segments()) < seconds(one_tree)


@pytest.mark.parametrize(
  ("call", "match"),
  [
    (lambda: sch.in_pipe(width=0), "width = 0"),
    (lambda: sch.segments(segment=0), "segment = 0"),
  ],
)
def test_what_makes_no_sense_is_refused_by_name(call, match):
  with pytest.raises(ValueError, match=match):
    call()
