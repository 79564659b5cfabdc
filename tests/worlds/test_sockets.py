# SPDX-License-Identifier: Apache-2.0
"""Coordinator and stage servers in one loop: sessions, and equal worlds."""

import asyncio
import itertools
import random
import threading
import time

import jax
import numpy as np
import pytest

import drafters
from tests.schedules import bench
from tests.worlds import rings
from wanspec_jax import codecs, models, verify, wire
from wanspec_jax import schedules as sch
from wanspec_jax.base import Nodes
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Sampling
from wanspec_jax.rollback import mask_rollback
from wanspec_jax.worlds import (
  SessionFault,
  Stage,
  StageShape,
  VirtualRing,
)

# With a model: equal to the virtual world. ------------------------------------

CONFIG = models.ModelConfig(
  family="llama",
  vocab_size=60,
  hidden_size=16,
  intermediate_size=24,
  num_layers=3,
  num_heads=2,
  num_kv_heads=1,
  head_dim=8,
  rms_norm_eps=1e-5,
  rope_theta=1e4,
  max_position=256,
)
MODEL_SHAPE = StageShape(row_buckets=(8,), slot_buckets=(128,))
HOPS = [wire.LinkShaper(delay_s=0.002 * (i + 1)) for i in range(4)]
PROMPTS = ((5, 9, 5, 9, 5), (1, 2, 3, 1, 2, 3, 1), (7,), (40, 41, 40, 41))


@pytest.fixture(scope="module")
def stages():
  """Three compiled stages of a random model."""
  params = models.random_params(jax.random.key(0), CONFIG)
  cut = [
    Stage(
      config=CONFIG,
      params=models.slice_stage(params, CONFIG, first_layer=i, num_layers=1),
      shape=MODEL_SHAPE,
      codec_in=codecs.parse("raw:f32") if i else None,
      codec_out=codecs.parse("raw:f32") if i < 2 else None,
      rollback=mask_rollback(),
      verifier=verify.race(),
    )
    for i in range(3)
  ]
  for stage in cut:
    stage.measure(num_slots=128, repeats=0)
  return cut


def model_request(i, temperature, num_tokens=16):
  return sch.Request(
    prompt=PROMPTS[i],
    max_new_tokens=num_tokens,
    sampling=Sampling(temperature=temperature, seed=i),
    log_probs=True,
  )


def model_driver(on_emit=None):
  return rings.driver_of(
    drafter=drafters.suffix(),
    max_nodes=7,
    shape=MODEL_SHAPE,
    on_emit=on_emit,
  )


def virtually(stages, requests):
  """Returns the outcomes of the virtual world, stages afresh."""
  for stage in stages:
    stage.reset()
  ring = VirtualRing(
    stages=stages,
    hops=HOPS,
    profile=StageProfile(
      buckets=(8,), seconds=((0.001,),) * 3, dtype="float32", device="cpu"
    ),
  )
  result = ring.run(model_driver(), [(0.0, r) for r in requests])
  return result.outcomes


def test_tokens_and_laps_are_those_of_the_virtual_world(stages):
  """Greedy and sampled; one by one, four at once, in several sessions."""
  requests = {
    t: [model_request(i, t) for i in range(len(PROMPTS))] for t in (0.0, 0.8)
  }
  expected = {
    t: [virtually(stages, [r])[0] for r in batch]
    for t, batch in requests.items()
  }

  async def main():
    single, at_once, traces = {}, {}, []
    async with rings.served(
      3, stages, shape=MODEL_SHAPE, peer_deadline_s=5.0
    ) as (cluster, _):
      for t, batch in requests.items():  # a session each
        async with rings.ring_of(cluster, hops=HOPS) as ring:
          single[t] = []
          for request in batch:
            result = await ring.run(model_driver(), [(0.0, request)])
            single[t].append(result.outcomes[0])
            traces.append(dict(ring.num_traces))
          at_once[t] = (
            await ring.run(model_driver(), [(0.0, r) for r in batch])
          ).outcomes
          traces.append(dict(ring.num_traces))
    return single, at_once, traces

  single, at_once, traces = rings.run(main)
  for t, outcomes in expected.items():
    for i, outcome in enumerate(outcomes):
      assert len(outcome.tokens) == 16
      assert single[t][i].tokens == outcome.tokens
      assert single[t][i].log_probs == pytest.approx(outcome.log_probs)
      assert single[t][i].rounds == outcome.rounds  # and so many laps
      assert at_once[t][i].tokens == outcome.tokens
      assert at_once[t][i].reason == outcome.reason == "length"
  assert [len(o.tokens) for o in expected[0.8]] == [16] * 4
  assert any(
    a.tokens != b.tokens
    for a, b in zip(expected[0.0], expected[0.8], strict=True)
  )
  assert min(len(o.rounds) for o in expected[0.0]) < 16  # drafts did help
  assert all(trace == traces[0] for trace in traces)  # nothing compiled anew
  assert traces[0].keys() == {0, 1, 2}


def test_stage_that_fails_to_compute_is_named(stages):
  """An illegal run is refused by the books, not by a crash of the device."""

  async def main():
    async with rings.served(3, stages, shape=MODEL_SHAPE) as (cluster, _):
      async with rings.introduced(cluster) as channel:
        await rings.ready(channel)
        run = rings.chain_run(num_rows=1, parents=[5], ids=[6])
        await channel.send(wire.encode_run(run))
        stage, cause = await rings.fault_on(channel)
      assert stage == "stage-0"
      assert "KeyError" in cause and "node 5 of sequence 0" in cause
      async with rings.ring_of(cluster) as ring:
        result = await ring.run(model_driver(), [(0.0, model_request(0, 0.0))])
        return result.outcomes[0].tokens

  assert rings.run(main) == virtually(stages, [model_request(0, 0.0)])[0].tokens


# Recorded stages: sessions and their order. -----------------------------------


def test_links_are_as_slow_as_they_are_emulated():
  """A plain lap takes the sum of the delays; spans say the same, hop by hop."""
  hops = [wire.LinkShaper(delay_s=d) for d in (0.01, 0.02, 0.03, 0.04)]

  async def main():
    async with (
      rings.served(3) as (cluster, _),
      rings.ring_of(cluster, hops=hops) as ring,
    ):
      return await ring.run(rings.driver_of(), [(0.0, rings.request_of(6))])

  result = rings.run(main)
  emitted_s = result.outcomes[0].emitted_s
  laps_s = np.diff(emitted_s)
  assert np.all(laps_s > 0.1 - 0.002)
  assert np.median(laps_s) < 0.2
  for i, hop in enumerate(hops):
    spent_s = [
      span.end_s - span.start_s
      for span in result.spans
      if span.lane == f"hop {i}"
    ]
    assert len(spent_s) >= 6
    assert np.median(spent_s) == pytest.approx(hop.delay_s, abs=0.005)
  # On one clock: a run is on hop 1 only after it was on hop 0.
  starts = {span.lane: span.start_s for span in result.spans if span.run == 3}
  lanes = [f"hop {i}" for i in range(4)]
  assert all(
    starts[a] < starts[b] + 0.005 for a, b in itertools.pairwise(lanes)
  )


def test_bytes_of_each_run_are_its_own():
  async def main():
    async with (
      rings.served(2) as (cluster, _),
      rings.ring_of(cluster) as ring,
    ):
      request = [(0.0, rings.request_of(12))]
      first, second = [
        (await ring.run(rings.driver_of(), request)).bytes for _ in range(2)
      ]
      long = rings.request_of(5, text=(1,) * 200, prompt=200)
      refused = await ring.run(rings.driver_of(), [(0.0, long)])
      assert refused.outcomes[0].reason == "refused"
      assert "capacity of 128 slots" in refused.outcomes[0].detail
      assert await rings.decode(ring) == rings.TEXT[3:13]  # still usable
    return first, second

  first, second = rings.run(main)
  for traffic in ("ids", "topology", "activations", "verdicts"):
    assert first.total(traffic=traffic) == second.total(traffic=traffic) > 0
  assert first.total(link="hop 1", traffic="activations") == 16 * (
    rings.PROMPT + 11
  )


def test_requests_come_at_their_time():
  async def main():
    async with (
      rings.served(2) as (cluster, _),
      rings.ring_of(cluster) as ring,
    ):
      request = rings.request_of(8)
      return await ring.run(
        rings.driver_of(), [(0.0, request), (0.3, request), (0.1, request)]
      )

  outcomes = rings.run(main).outcomes
  assert [o.submitted_s for o in outcomes.values()] == pytest.approx(
    [0.0, 0.3, 0.3], abs=0.1
  )
  assert [tuple(o.tokens) for o in outcomes.values()] == [rings.TEXT[3:11]] * 3


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_sessions_one_after_another(num_stages):
  async def main():
    async with rings.served(num_stages) as (cluster, stages):
      for count in range(1, 6):
        await rings.works(cluster)  # the next comes at once
        assert [stage.num_resets for stage in stages] == [count] * num_stages

  rings.run(main)


def test_several_runs_in_flight_with_a_drafter_on_its_thread():
  """Verdicts that come while a draft is made never overtake it."""
  texts = {i: [i * k * k % 7 % bench.VOCAB for k in range(70)] for i in (1, 2)}
  served_texts = {i: texts[i + 1] for i in (0, 1)}
  rng = random.Random(3)
  drafter = bench.drafter_of(
    texts, right=0.7, size=lambda budget: min(budget, 3), random=rng
  )

  def slow(state, anchors, budget, levels=None):
    time.sleep(rng.random() * 0.004)
    return drafter.expand(state, anchors, budget, levels)

  async def main():
    stages = rings.recorded(2, served_texts)
    hops = [wire.LinkShaper(delay_s=0.001)] * 3
    async with (
      rings.served(2, stages) as (cluster, _),
      rings.ring_of(cluster, hops=hops) as ring,
    ):
      driver = rings.driver_of(
        drafter=drafter._replace(expand=slow),
        policy=bench.pipelined(rng, max_in_flight=3, max_nodes=6),
      )
      requests = [
        (0.0, rings.request_of(40, text=texts[i], prompt=4, seed=i))
        for i in (1, 2)
      ]
      return await ring.run(driver, requests)

  outcomes = rings.run(main).outcomes
  for i in (1, 2):
    assert outcomes[i - 1].tokens == texts[i][4:44]


def test_a_drafter_that_fails_or_hangs_ends_the_run():
  release = threading.Event()

  def broken(state, anchors, budget, levels=None):
    raise ArithmeticError("no such node")

  def hanging(state, anchors, budget, levels=None):
    release.wait(10)
    return state, Nodes(
      np.zeros(0, np.int32), np.zeros(0, np.int32), np.zeros(0, np.float32)
    )

  async def main():
    async with rings.served(2) as (cluster, _):
      async with rings.ring_of(cluster) as ring:
        drafter = drafters.none()._replace(expand=broken)
        with pytest.raises(ArithmeticError, match="no such node"):
          await rings.decode(ring, drafter=drafter, max_nodes=4)
        with pytest.raises(SessionFault, match="the session is over"):
          await rings.decode(ring)
      async with rings.ring_of(cluster, lap_deadline_s=0.3) as ring:
        drafter = drafters.none()._replace(expand=hanging)
        with pytest.raises(
          SessionFault, match=r"drafter: no answer within 0\.3"
        ):
          await rings.decode(ring, drafter=drafter, max_nodes=4)
      release.set()
      await rings.works(cluster)

  rings.run(main)


def test_one_run_at_a_time_and_none_after_one_was_given_up():
  async def main():
    async with rings.served(2) as (cluster, stages):
      stages[0].hook = lambda run: time.sleep(0.02)
      async with rings.ring_of(cluster) as ring:
        task = asyncio.create_task(rings.decode(ring, 50))
        await asyncio.sleep(0.1)
        with pytest.raises(RuntimeError, match="one run or measurement"):
          await rings.decode(ring)
        await rings.cancel(task)
        with pytest.raises(SessionFault, match="gave up half-way"):
          await rings.decode(ring)
        with pytest.raises(SessionFault, match="the session is over"):
          await ring.measure(num_slots=64, repeats=0)
      await rings.works(cluster)

  rings.run(main)
