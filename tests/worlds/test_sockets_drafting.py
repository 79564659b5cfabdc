# SPDX-License-Identifier: Apache-2.0
"""Drafting that is charged over sockets."""

import itertools
import random as random_lib
import time

import numpy as np
import pytest

from tests.worlds import rings, troubled
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import (
  Recording,
  SessionFault,
)
from wanspec_jax.worlds._virtual import draft_size

WAIT_S = 3.0  # for what must come; nothing takes as long


def test_drafts_are_charged_one_after_the_other():
  """An answer is heard when it was begun plus what it costs, or later; those
  of several sequences are made one at a time, in the order of asking."""
  texts = troubled.texts_of(count=16)
  costs = sch.DraftCosts(per_call_s=0.004, per_level_s=0.006, per_node_s=1e-4)
  random = random_lib.Random(1)
  drafter = troubled.drafter_of(texts, random)
  made = []

  def expand(state, anchors, budget, levels=None):
    state, nodes = drafter.expand(state, anchors, budget, levels)
    answer = sch.Drafted(
      time_s=0.0, sequence=0, ticket=0, anchors=anchors, nodes=nodes
    )
    made.append(costs.seconds(*draft_size(answer)))
    return state, nodes

  async def main():
    async with (
      troubled.ring_of_toys(3) as (cluster, _),
      troubled.coordinator(cluster) as ring,
    ):
      recording = Recording()
      driver = troubled.driver_of(
        troubled.bench.pipelined(random, max_in_flight=4, max_nodes=6),
        drafter._replace(expand=expand),
        recording=recording,
      )
      requests = [(0.0, text.request) for text in texts]
      result = await ring.run(driver, requests, draft=costs)
      troubled.check(result, texts)
      return result, recording

  result, recording = rings.run(main)
  spans = [span for span in result.spans if span.lane == "drafter"]
  assert len(spans) > 5
  # Nobody is asked on behalf of a text that has ended meanwhile.
  charged = iter(made)
  for span in spans:
    cost_s = next(charged) if span.name != "0 nodes" else costs.per_call_s
    assert span.end_s - span.start_s >= cost_s - 1e-9
  for before, after in itertools.pairwise(spans):
    assert after.start_s >= before.end_s
  asked, answered = [], []
  for step in recording.steps:
    if isinstance(step.event, sch.Drafted):
      answered.append((step.event.time_s, step.event.ticket))
    asked += [a.ticket for a in step.actions if isinstance(a, sch.Draft)]
  assert asked == sorted(asked)
  tickets = [ticket for _, ticket in answered]
  assert tickets == sorted(tickets)
  # A text's last draft may come when it has ended: nobody hears of that.
  ends_s = [span.end_s for span in spans]
  for time_s, ticket in answered:
    assert time_s >= ends_s[asked.index(ticket)] - 1e-9


def test_a_drafter_that_takes_longer_is_not_charged_on_top():
  """Its cost is a least: what it took counts towards it."""
  texts = troubled.texts_of(count=8)[:1]
  random = random_lib.Random(2)
  drafter = troubled.drafter_of(texts, random)

  def expand(*args):
    time.sleep(0.02)
    return drafter.expand(*args)

  async def main(costs):
    async with (
      troubled.ring_of_toys(3) as (cluster, _),
      troubled.coordinator(cluster) as ring,
    ):
      driver = troubled.driver_of(
        sch.continuous(), drafter._replace(expand=expand)
      )
      result = await ring.run(driver, [(0.0, texts[0].request)], draft=costs)
      troubled.check(result, texts)
      spans = [span for span in result.spans if span.lane == "drafter"]
      return min(span.end_s - span.start_s for span in spans)

  least_s = rings.run(lambda: main(sch.DraftCosts(per_call_s=0.02)))
  assert 0.02 <= least_s < 0.035


def test_answers_of_another_form_end_the_run():
  """Also where their cost cannot be told."""
  texts = troubled.texts_of(count=8)[:1]
  drafter = troubled.drafter_of(texts, random_lib.Random(3))

  def expand(state, anchors, budget, levels=None):
    return state, troubled.bench.Nodes(
      np.zeros(2, np.int32), np.array([7, 9], np.int32), np.zeros(2, np.float32)
    )

  async def main():
    async with (
      troubled.ring_of_toys(2) as (cluster, _),
      troubled.coordinator(cluster) as ring,
    ):
      driver = troubled.driver_of(
        sch.continuous(), drafter._replace(expand=expand), num_stages=2
      )
      requests = [(0.0, texts[0].request)]
      start_s = time.monotonic()
      with pytest.raises(IndexError):
        await ring.run(
          driver, requests, draft=sch.DraftCosts(per_level_s=0.001)
        )
      assert time.monotonic() - start_s < WAIT_S
      with pytest.raises(SessionFault, match="gave up half-way"):
        await ring.run(driver, requests)

  rings.run(main)
