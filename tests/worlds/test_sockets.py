# SPDX-License-Identifier: Apache-2.0
"""Coordinator and stage servers in one loop: what must go right and wrong."""

import asyncio
import contextlib
import dataclasses
import itertools
import random
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drafters
from tests.schedules import bench
from tests.worlds import rings
from wanspec_jax import codecs, models, verify, wire
from wanspec_jax import schedules as sch
from wanspec_jax.base import Nodes
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Commit, Open, Returned, Run, Sampling, Verdict
from wanspec_jax.rollback import mask_rollback
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import (
  SessionFault,
  Stage,
  StageShape,
  VirtualRing,
  _protocol,
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
        run = chain_run(num_rows=1, parents=[5], ids=[6])
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
      with pytest.raises(ValueError, match="capacity of 128 slots"):
        long = rings.request_of(5, text=(1,) * 200, prompt=200)
        await ring.run(rings.driver_of(), [(0.0, long), request[0]])
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

  def slow(state, anchors, budget):
    time.sleep(rng.random() * 0.004)
    return drafter.expand(state, anchors, budget)

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

  def broken(state, anchors, budget):
    raise ArithmeticError("no such node")

  def hanging(state, anchors, budget):
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


# Who may join. --------------------------------------------------------------


def test_a_second_coordinator_is_told_that_the_stage_is_busy():
  async def main():
    async with rings.served(3) as (cluster, _):
      async with rings.ring_of(cluster) as ring:
        with pytest.raises(SessionFault, match=r"stage-0: refused: .*busy"):
          await rings.works(cluster)
        # Nor may it take the verdicts.
        with pytest.raises(wire.PeerRefused, match="no session"):
          async with rings.introduced(cluster, 2, role="return"):
            pass
        assert await rings.decode(ring) == rings.TEXT[3:13]
      await rings.works(cluster)

  rings.run(main)


@pytest.mark.parametrize("moment", ["starting", "idle", "mid-run"])
def test_a_coordinator_that_vanishes_frees_the_ring(moment):
  async def main():
    async with rings.served(3) as (cluster, stages):
      if moment == "starting":
        async with rings.introduced(cluster) as channel:
          channel._writer.transport.abort()
      else:
        ring = await rings.ring_of(cluster).__aenter__()
        stages[1].hook = lambda run: time.sleep(0.01)
        task = asyncio.create_task(asyncio.sleep(0))
        if moment == "mid-run":
          task = asyncio.create_task(rings.decode(ring, 60))
        await asyncio.sleep(0.1)
        for channel in (ring._head, ring.back):
          channel._writer.transport.abort()
        if moment == "mid-run":
          with pytest.raises(SessionFault):
            await task
        await ring.__aexit__(None, None, None)
      await asyncio.sleep(0.05)
      await rings.works(cluster)

  rings.run(main)


def test_a_coordinator_that_falls_silent_frees_the_ring():
  """Its sockets stay open: only missing answers to pings tell."""

  async def main():
    async with (
      rings.served(2, peer_deadline_s=0.5) as (cluster, _),
      rings.introduced(cluster) as channel,
    ):
      await rings.ready(channel)
      for task in channel._tasks:  # neither reads nor writes from now on
        task.cancel()
      with pytest.raises(SessionFault, match="busy"):
        await rings.works(cluster)
      await asyncio.sleep(0.9)
      await rings.works(cluster)

  rings.run(main)


def test_verdicts_nobody_fetches_end_the_session():
  async def main():
    async with rings.served(2, peer_deadline_s=0.4) as (cluster, _):
      async with rings.introduced(cluster) as channel:
        await rings.ready(channel)
        start_s = time.monotonic()
        stage, cause = await rings.fault_on(channel)
        assert time.monotonic() - start_s < 1.5
      assert stage == "coordinator"
      assert "did not connect to stage-1 for the verdicts" in cause
      await rings.works(cluster)

  rings.run(main)


@pytest.mark.parametrize(
  ("field", "changes"),
  [
    ("dtype", {"dtype": "bfloat16"}),
    ("codec", {"codec": "uniform:8:64"}),
    ("verifier", {"verifier": "greedy"}),
    (
      "row_buckets",
      {"shape": dataclasses.replace(rings.SHAPE, row_buckets=(4,))},
    ),
    (
      "slot_buckets",
      {"shape": dataclasses.replace(rings.SHAPE, slot_buckets=(64,))},
    ),
    (
      "cache_dtype",
      {"shape": dataclasses.replace(rings.SHAPE, cache_dtype="bfloat16")},
    ),
    ("model", {"model_hash": "another"}),
  ],
)
@pytest.mark.parametrize("index", [0, 1])
def test_a_stage_of_other_settings_is_named(field, changes, index):
  """Also one in the middle, which the coordinator never talks to."""
  model_hash = changes.get("model_hash", rings.HASH)
  changes = {k: v for k, v in changes.items() if k != "model_hash"}

  async def main():
    cluster = rings.cluster_of(3)
    odd = dataclasses.replace(cluster, **changes)
    servers = [
      rings.server_of(
        stage,
        odd if i == index else cluster,
        i,
        model_hash if i == index else rings.HASH,
      )
      for i, stage in enumerate(rings.recorded(3))
    ]
    async with rings.listening(*servers):
      with pytest.raises(SessionFault) as caught:
        await rings.works(cluster)
      assert caught.value.stage == f"stage-{index}"
      assert caught.value.cause.startswith(
        f"refused: {field} of stage-{index} is "
      )
      # Nobody is left in a session that never began.
      await asyncio.sleep(0.05)
      assert all(server._current is None for server in servers)

  rings.run(main)


def test_other_cuts_lengths_and_orders_are_named():
  async def main():
    async with rings.served(3) as (cluster, _):
      a, b, c = cluster.stages
      for stages, message in (
        ((a, b), "num_stages of stage-0 is 3, 2"),
        ((b, a, c), "stage of stage-1 is 1, 0"),
        (
          (a, b, dataclasses.replace(c, layers=(2, 2))),
          r"layers of stage-0 is \[\[0, 1\], \[1, 1\], \[2, 1\]\]",
        ),
      ):
        hosts = tuple(
          dataclasses.replace(
            host, name=f"stage-{i}", layers=(i, host.layers[1])
          )
          for i, host in enumerate(stages)
        )
        other = dataclasses.replace(cluster, stages=hosts)
        with pytest.raises(SessionFault, match=f"stage-0: refused: {message}"):
          await rings.works(other)
      await rings.works(cluster)

  rings.run(main)


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"role": ["ring"]}, "role .* is unknown"),
    ({"role": None}, "role None is unknown"),
    ({"name": "stage-1"}, "name: coordinator comes before stage-0"),
    ({"name": None}, "name: "),
    ({"session": 7}, "session: "),
    ({"session": "x" * 65}, "session: "),
    ({"dtype": {"a": 1}}, "dtype of stage-0"),
    ({"model": "x" * 900_000}, "model of stage-0"),
    ({"hops": 3}, "hops: must be 3 links"),
    ({"hops": [[0.0, 1e9, 0.0, 0]] * 2}, "hops: must be 3 links"),
    ({"hops": ["slow"] * 3}, "hops: 'slow' is not"),
    ({"hops": [[0.0, 1e9, 0.0, "0"]] * 3}, "hops: "),
    ({"hops": [[0.0, 1e9, 0.0]] * 3}, "hops: "),
    ({"hops": [[0.0, 1e9, 0.0, 0.5]] * 3}, "hops: "),
    ({"hops": [[float("nan"), 1e9, 0.0, 0]] * 3}, "LinkShaper.delay_s"),
    ({"hops": [[0.0, 0.0, 0.0, 0]] * 3}, "LinkShaper.bandwidth_bps"),
    ({"hops": [[0.0, 1e9, 0.0, -1]] * 3}, "LinkShaper.seed"),
    ({"role": "return"}, "stage-0 is not the last"),
  ],
)
def test_introductions_are_not_believed(changes, message):
  async def main():
    async with rings.served(2) as (cluster, _):
      with pytest.raises(wire.PeerRefused, match=message):
        async with rings.introduced(cluster, 0, **changes):
          pass
      await rings.works(cluster)

  rings.run(main)


def test_two_that_fetch_the_verdicts():
  async def main():
    async with rings.served(2) as (cluster, _):
      async with rings.introduced(cluster) as channel:
        await rings.ready(channel)

        async def fetch(**changes):
          try:
            async with rings.introduced(cluster, 1, role="return", **changes):
              await asyncio.sleep(0.2)
              return "taken"
          except wire.PeerRefused as error:
            return error.reason

        answers = await asyncio.gather(
          fetch(), fetch(), fetch(session="other"), fetch(session=None)
        )
        assert sorted(answers) == sorted(
          [
            "taken",
            "stage-1 returns its verdicts to somebody else already",
            "stage-1 has no session 'other'",
            "stage-1 has no session None",
          ]
        )
      await asyncio.sleep(0.1)
      await rings.works(cluster)

  rings.run(main)


def test_a_peer_of_another_version_is_told_so():
  async def main():
    async with rings.served(2) as (cluster, _):
      reader, writer = await asyncio.open_connection(
        cluster.stages[0].host, cluster.stages[0].port
      )
      hello = rings.hello_of(cluster)
      writer.write(wire.encode_control(Kind.HELLO, hello, version=9))
      answer = (
        wire.split_frame(await reader.readexactly(2 + 1 + 75)[:0] or b"")
        if False
        else await reader.read(4096)
      )
      frame = next(iter(wire.FrameDecoder().feed(answer)))
      assert frame.kind == Kind.REFUSE
      assert "version 9" in wire.decode_control(frame)["reason"]
      writer.close()
      await writer.wait_closed()
      await rings.works(cluster)

    async def newer(channel):
      await channel.recv()
      refusal = {"reason": "version 1 was offered"}
      await channel.send_now(
        wire.encode_control(Kind.REFUSE, refusal, version=9)
      )
      await asyncio.sleep(0.2)

    async with fake_next(newer) as cluster:
      with pytest.raises(
        SessionFault, match="stage-1: the peer speaks protocol version 9"
      ):
        await rings.works(cluster)

  rings.run(main)


# What the coordinator sends is not believed either. ---------------------------


def chain_run(
  *, run_id=0, num_rows=3, sequence=0, opens=True, ids=None, parents=None
):
  ids = list(range(num_rows)) if ids is None else ids
  parents = [max(i - 1, 0) for i in ids] if parents is None else parents
  return Run(
    run_id=run_id,
    opens=(Open(sequence=sequence, sampling=Sampling()),) if opens else (),
    sequences=np.full(len(ids), sequence, np.int32),
    ids=np.asarray(ids, np.int64),
    parents=np.asarray(parents, np.int64),
    tokens=np.zeros(len(ids), np.int32),
    committed=np.zeros(len(ids), bool),
  )


def control(**fields):
  return wire.encode_control(Kind.CONTROL, fields)


def _commit_of_stranger():
  return dataclasses.replace(chain_run(), commits=(Commit(sequence=4, root=2),))


@pytest.mark.parametrize(
  ("frames", "stage", "cause"),
  [
    (
      [wire.encode_run(chain_run(ids=[6], parents=[5]))],
      "stage-0",
      "KeyError.*node 5 of sequence 0",
    ),
    (
      [
        wire.encode_run(
          chain_run(
            run_id=i,
            num_rows=8,
            opens=not i,
            ids=list(range(8 * i, 8 * i + 8)),
          )
        )
        for i in range(17)
      ],
      "stage-0",
      "RuntimeError.*8 rows needs as many slots, 0 of 128",
    ),
    (
      [wire.encode_run(chain_run(opens=False))],
      "stage-1",
      "ValueError.*sequence 0 is not open",
    ),
    (
      [wire.encode_run(_commit_of_stranger())],
      "stage-0",
      "KeyError.*node 2 of sequence 4",
    ),
    (
      [wire.encode_run(chain_run(num_rows=9))],
      "stage-0",
      "refused a run of coordinator: segment of 9 rows",
    ),
    (
      [wire.encode_run(chain_run(), b"hidden")],
      "stage-0",
      "refused run 0: hidden states belong",
    ),
    (
      [wire.encode_frame(Kind.RUN, b"\xff\xff\x01\x00garbage")],
      "stage-0",
      "refused a run of coordinator",
    ),
    (
      [wire.encode_returned(Returned(run_id=0))],
      "stage-0",
      "refused RETURNED: has no meaning",
    ),
    (
      [control(op="format")],
      "stage-0",
      "control operation 'format': unknown",
    ),
    ([control()], "stage-0", "control operation None"),
    (
      [wire.encode_frame(Kind.CONTROL, b"\xc1")],
      "coordinator",
      "sent a bad frame: CONTROL",
    ),
    (
      [control(op="measure", num_slots=65, repeats=1, seconds=[])],
      "stage-0",
      "refused num_slots = 65",
    ),
    (
      [control(op="measure", num_slots=64, repeats=10**9, seconds=[])],
      "stage-0",
      "refused repeats = 1000000000",
    ),
    (
      [control(op="measure", num_slots=64, repeats=True, seconds=[])],
      "stage-0",
      "refused repeats = True",
    ),
    (
      [control(op="measure", num_slots=64, repeats=1, seconds="x")],
      "stage-0",
      "refused seconds",
    ),
    ([control(op="measure")], "stage-0", "refused num_slots = None"),
    (
      [wire.encode_control(Kind.FAULT, {"stage": 3})],
      "coordinator",
      "unreadable fault",
    ),
  ],
)
def test_garbage_ends_the_session_and_not_the_server(frames, stage, cause):
  async def main():
    async with rings.served(2) as (cluster, _):
      async with rings.introduced(cluster) as channel:
        await rings.ready(channel)
        async with rings.introduced(cluster, 1, role="return") as back:
          for frame in frames:
            await channel.send(frame, {"control": len(frame)})
          told = [await rings.fault_on(back)]
          if stage != "coordinator":  # who sent a fault is not told of it
            told.append(await rings.fault_on(channel))
      for who, why in told:
        assert who == stage
        assert re.search(cause, why), why
      await rings.works(cluster)

  rings.run(main)


def test_bytes_that_are_no_frame():
  async def main():
    async with rings.served(2) as (cluster, _):
      async with rings.introduced(cluster) as channel:
        await rings.ready(channel)
        async with rings.introduced(cluster, 1, role="return") as back:
          channel._writer.write(b"GET / HTTP/1.1\r\n\r\n")
          assert await rings.fault_on(back) == (
            "coordinator",
            "sent a frame that was refused: bad magic byte 0x47",
          )
      await rings.works(cluster)

  rings.run(main)


def test_a_run_before_the_ring_is_ready_is_refused():
  async def main():
    stages = rings.recorded(2)
    stages[1].reset = lambda: time.sleep(0.3)
    async with (
      rings.served(2, stages) as (cluster, _),
      rings.introduced(cluster) as channel,
    ):
      await channel.send(wire.encode_run(chain_run()))
      assert await rings.fault_on(channel) == (
        "stage-0",
        "refused RUN: came before 'ready'",
      )

  rings.run(main)


# A stage that behaves badly. ------------------------------------------------


@contextlib.asynccontextmanager
async def fake_next(handler, **settings):
  """Yields a cluster of three whose middle stage runs `handler(channel)`."""
  cluster = rings.cluster_of(
    3, **{"peer_deadline_s": 0.5, "start_deadline_s": 1.0} | settings
  )
  there = cluster.stages[1]
  first, _, last = rings.recorded(3)
  async with (
    rings.listening(
      rings.server_of(first, cluster, 0), rings.server_of(last, cluster, 2)
    ),
    await wire.listen(handler, port=there.port),
  ):
    yield cluster


async def _accept(channel):
  await wire.answer(channel, lambda hello: None)


async def silent(channel):
  """Takes the connection, then neither reads nor answers pings."""
  for task in channel._tasks:
    task.cancel()
  await asyncio.sleep(30)


async def silent_later(channel):
  await _accept(channel)
  await silent(channel)


async def closing(channel):
  await _accept(channel)
  await channel.close("I have had enough")


async def aborting(channel):
  await _accept(channel)
  channel._writer.transport.abort()


async def never_ready(channel):
  await _accept(channel)
  await asyncio.sleep(30)


async def babbling(channel):
  await _accept(channel)
  await channel.send_now(control(op="ready", stages={"a": 1}))
  await asyncio.sleep(30)


async def untimely(channel):
  await _accept(channel)
  await channel.send_now(wire.encode_returned(Returned(run_id=0)))
  await asyncio.sleep(30)


@pytest.mark.parametrize(
  ("handler", "cause"),
  [
    (silent, "no (frame within|answer for) 0.5 s"),
    (silent_later, "no answer for 0.5 s"),
    (closing, "said goodbye .I have had enough"),
    (aborting, "connection (lost|closed)"),
    (never_ready, "not ready within 1 s"),
    (babbling, "sent a 'ready' of another form"),
    (untimely, "RETURNED came out of turn"),
  ],
)
def test_a_bad_stage_in_the_middle_is_named_in_time(handler, cause):
  async def main():
    async with fake_next(handler) as cluster:
      start_s = time.monotonic()
      with pytest.raises(SessionFault) as caught:
        await rings.works(cluster)
      assert time.monotonic() - start_s < 2.5
      assert caught.value.stage == "stage-1"
      assert re.search(cause, caught.value.cause), caught.value.cause
      # Stage 0 is free again: the next is not told that it is busy.
      with pytest.raises(SessionFault, match="stage-1: "):
        await rings.works(cluster)

  rings.run(main)


def test_a_stage_that_is_not_there_is_named_in_time():
  async def main():
    cluster = rings.cluster_of(3, peer_deadline_s=0.4)
    first, middle, _ = rings.recorded(3)
    async with rings.listening(
      rings.server_of(first, cluster, 0), rings.server_of(middle, cluster, 1)
    ):
      start_s = time.monotonic()
      with pytest.raises(SessionFault, match="stage-2: no connection to"):
        await rings.works(cluster)
      assert time.monotonic() - start_s < 2
    with pytest.raises(SessionFault, match="stage-0: no connection to"):
      await rings.works(cluster)

  rings.run(main)


def test_a_stage_that_comes_up_late_is_waited_for():
  async def main():
    cluster = rings.cluster_of(2)
    first, last = [
      rings.server_of(stage, cluster, i)
      for i, stage in enumerate(rings.recorded(2))
    ]
    async with rings.listening(first):
      task = asyncio.create_task(rings.works(cluster))
      await asyncio.sleep(0.3)
      async with rings.listening(last):
        await task

  rings.run(main)


@pytest.mark.parametrize("index", [0, 1, 2])
@pytest.mark.parametrize("how", ["raises", "stops", "breaks off", "hangs"])
def test_a_stage_that_fails_mid_run_is_named(index, how):
  """Both its neighbours notice, and tell; nobody else is blamed."""

  async def main():
    cluster = rings.cluster_of(3, peer_deadline_s=0.5)
    stages = rings.recorded(3)
    servers = [rings.server_of(s, cluster, i) for i, s in enumerate(stages)]
    async with contextlib.AsyncExitStack() as stack:
      tasks = []
      for server in servers:
        tasks += await stack.enter_async_context(rings.listening(server))
      ring = await stack.enter_async_context(
        rings.ring_of(cluster, lap_deadline_s=1.0)
      )
      assert await rings.decode(ring) == rings.TEXT[3:13]
      done = threading.Event()

      def hook(run):
        if run.run_id != 6:
          return
        match how:
          case "raises":
            raise MemoryError("out of memory")
          case "hangs":
            done.wait(3)
          case "stops":
            loop.call_soon_threadsafe(tasks[index].cancel)
            done.wait(0.2)
          case "breaks off":
            loop.call_soon_threadsafe(break_off)
            done.wait(0.2)

      def break_off():
        session = servers[index]._current
        channels = [session.before, session._next]
        if index == 2:
          channels[1] = session._back.result()
        for channel in channels:
          channel._writer.transport.abort()

      loop = asyncio.get_running_loop()
      stages[index].hook = hook
      start_s = time.monotonic()
      with pytest.raises(SessionFault) as caught:
        await rings.decode(ring, 50)
      done.set()
      assert time.monotonic() - start_s < 2.5
      fault = caught.value
      if how == "hangs":  # its heart goes on beating
        assert fault.stage == "ring"
        assert "run 6 was not back within 1 s" in fault.cause
      elif how != "breaks off":
        assert fault.stage == f"stage-{index}"
        assert {
          "raises": "MemoryError: out of memory",
          "stops": "is shutting down",
        }[how] in fault.cause
      else:  # a link is as good a suspect as the stages at its ends
        assert "connection" in fault.cause
        ends = ["coordinator", "stage-0", "stage-1", "stage-2", "coordinator"]
        assert fault.stage in ends[index : index + 3]
      if how == "stops":
        return
      stages[index].hook = None
      await ring.__aexit__(None, None, None)
      await rings.works(cluster)

  rings.run(main)


class FakeTail:
  """A last stage that answers runs with frames of the test's choice."""

  def __init__(self, answers):
    self.answers = answers
    self.back = None

  async def __call__(self, channel):
    hello = await wire.answer(channel, lambda hello: None)
    if hello["role"] == "return":
      self.back = channel
      await asyncio.sleep(30)
    await channel.send_now(
      control(op="ready", stages=[{"name": "stage-0", "traces": {}}])
    )
    while True:
      frame = await channel.recv()
      if frame.kind == Kind.RUN:
        run, _ = wire.decode_run(frame.body)
        for answer in self.answers(run):
          await self.back.send(answer, {"control": len(answer)})
      else:
        for answer in self.answers(None):
          await channel.send_now(answer)


def trace(**changes):
  fields = {
    "stage": 0,
    "spans": [["stage 0", "1 rows", 0.0, 1.0, 0]],
    "last": True,
    "bytes": {},
    "traces": {},
  }
  return wire.encode_control(Kind.TRACE, fields | changes)


def plain_answers(run):
  """Returns what an honest tail of a constant text would."""
  if run is None:
    return [trace()]
  verdicts = ()
  if run.num_rows and not run.committed.all():
    verdicts = (Verdict(sequence=0, tokens=(1,)),)
  return [wire.encode_returned(Returned(run_id=run.run_id, verdicts=verdicts))]


def _instead(run_id, *frames):
  def answers(run):
    if (None if run is None else run.run_id) == run_id:
      return list(frames)
    return plain_answers(run)

  return answers


def _returned(run_id, **fields):
  return wire.encode_returned(Returned(run_id=run_id, **fields))


@pytest.mark.parametrize(
  ("answers", "cause"),
  [
    (_instead(2, _returned(7)), "returned run 7 of epoch 0, run 2"),
    (_instead(2, _returned(2, epoch=1)), "returned run 2 of epoch 1"),
    (
      _instead(2, *plain_answers(chain_run(run_id=2)) * 2),
      "returned run 2 of epoch 0, run (3|None) .*was due",
    ),
    (_instead(2, wire.encode_frame(Kind.RETURNED, b"\xff")), "bad verdict"),
    (
      _instead(
        2,
        _returned(2, verdicts=(Verdict(sequence=0, tokens=(1,) * 9),)),
      ),
      "bad verdict: verdict of 9 tokens",
    ),
    (
      _instead(2, _returned(2)),
      "returned run 2 without the verdict that is due on sequence 0",
    ),
    (
      _instead(2, _returned(2, verdicts=(Verdict(sequence=3, tokens=(1,)),))),
      r"verdicts on sequences \[3\], which run 2 does not carry",
    ),
    (
      _instead(2, _returned(2, verdicts=(Verdict(sequence=0, tokens=(1, 2)),))),
      "accepts a token which was not launched",
    ),
    (_instead(2, wire.encode_run(chain_run())), "RUN came out of turn"),
    (_instead(2, control(op="x")), "CONTROL came out of turn"),
    (_instead(2, b"XX\x00"), "sent a frame that was refused: bad magic"),
    (_instead(None, trace(spans=[[1, 2]])), "sent a bad trace"),
    (_instead(None, trace(spans=None)), "sent a bad trace"),
    (
      _instead(None, trace(spans=[["a", "b", float("nan"), 0.0, 0]])),
      "sent a bad trace",
    ),
    (_instead(None, trace(stage=4)), "more traces than there can be"),
    (_instead(None, trace(last=False), trace(stage="x")), "sent a bad trace"),
    (_instead(None, trace(bytes={"hop 1": {"ids": -5}})), "sent a bad trace"),
    (_instead(None, trace(bytes={"hop 1": {"idle": 5}})), "sent a bad trace"),
    (_instead(None, trace(traces=[1])), "sent a bad trace"),
    (_instead(None, control(op="trace")), "CONTROL came out of turn"),
    (_instead(None), "no trace within 1 s"),
  ],
)
def test_a_tail_is_not_believed(answers, cause):
  async def main():
    cluster = rings.cluster_of(1, peer_deadline_s=1.0)
    tail = FakeTail(answers)
    async with (
      await wire.listen(tail, port=cluster.stages[0].port),
      rings.ring_of(cluster) as ring,
    ):
      with pytest.raises(SessionFault) as caught:
        await rings.decode(ring, 6)
    assert caught.value.stage == "stage-0"
    assert re.search(cause, caught.value.cause), caught.value.cause

  rings.run(main)


def test_an_honest_fake_tail_passes():
  """What the test before this one rests on."""

  async def main():
    cluster = rings.cluster_of(1)
    tail = FakeTail(plain_answers)
    async with (
      await wire.listen(tail, port=cluster.stages[0].port),
      rings.ring_of(cluster) as ring,
    ):
      assert await rings.decode(ring, 6) == (1,) * 6

  rings.run(main)


def test_long_sessions_are_traced_in_parts(monkeypatch):
  monkeypatch.setattr(_protocol, "SPANS_PER_FRAME", 7)
  monkeypatch.setattr(_protocol, "MAX_SPANS", 50)

  async def main():
    async with (
      rings.served(3) as (cluster, _),
      rings.ring_of(cluster) as ring,
    ):
      results = [
        await ring.run(rings.driver_of(), [(0.0, rings.request_of(num_tokens))])
        for num_tokens in (10, 40)
      ]
    return results

  few, many = rings.run(main)
  counts = {
    lane: sum(span.lane == lane for span in few.spans)
    for lane in ("stage 0", "stage 1", "stage 2", "hop 3")
  }
  assert len(set(counts.values())) == 1 and counts["stage 0"] >= 11
  for i in range(3):  # the latest, no more
    mine = [
      span for span in many.spans if span.lane in (f"stage {i}", f"hop {i + 1}")
    ]
    assert len(mine) == 50
    assert max(span.run for span in mine) >= 40


# Certificates. --------------------------------------------------------------


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
  directory = tmp_path_factory.mktemp("keys") / "cluster"
  wire.create_authority(directory)
  for name in ("coordinator", "stage-0", "stage-1"):
    wire.issue(directory, name, ["127.0.0.1"])
  return str(directory)


@pytest.fixture(scope="module")
def strangers(tmp_path_factory):
  directory = tmp_path_factory.mktemp("keys") / "strangers"
  wire.create_authority(directory)
  wire.issue(directory, "coordinator", ["127.0.0.1"])
  wire.issue(directory, "stage-1", ["127.0.0.1"])
  return str(directory)


def test_a_ring_with_certificates(keys, strangers, tmp_path):
  async def main():
    async with rings.served(2, keys=keys) as (cluster, _):
      async with rings.ring_of(cluster) as ring:
        assert await rings.decode(ring) == rings.TEXT[3:13]
      await rings.works(cluster)
      unknown = dataclasses.replace(cluster, keys=strangers)
      with pytest.raises(SessionFault, match=r"stage-0: .*certificate"):
        await rings.works(unknown)
      plain = dataclasses.replace(cluster, keys=None)
      with pytest.raises(SessionFault, match="stage-0: "):
        await rings.works(plain)
      # A member, but not the one that comes before stage 0.
      context = wire.client_context(keys, "stage-1")
      there = cluster.stages[0]
      async with await wire.connect(
        there.host, there.port, peer="stage-0", ssl_context=context
      ) as channel:
        hello = rings.hello_of(cluster, name="stage-1")
        with pytest.raises(wire.PeerRefused, match="name: coordinator comes"):
          await wire.offer(channel, hello)
      async with await wire.connect(
        there.host, there.port, peer="stage-0", ssl_context=context
      ) as channel:
        with pytest.raises(wire.PeerRefused, match="not that of the certif"):
          await wire.offer(channel, rings.hello_of(cluster))
      # Members in each other's place.
      swapped = dataclasses.replace(
        cluster,
        stages=tuple(
          dataclasses.replace(host, port=other.port)
          for host, other in zip(
            cluster.stages, cluster.stages[::-1], strict=True
          )
        ),
      )
      with pytest.raises(SessionFault, match="stage-0: refused: certificate"):
        await rings.works(swapped)
      await rings.works(cluster)
    # A stage whose certificate the others do not know.
    cluster = rings.cluster_of(2, keys=keys)
    alien = dataclasses.replace(cluster, keys=strangers)
    first, last = rings.recorded(2)
    async with rings.listening(
      rings.server_of(first, cluster, 0), rings.server_of(last, alien, 1)
    ):
      with pytest.raises(
        SessionFault, match="stage-1: refused: certificate not accepted"
      ):
        await rings.works(cluster)

  rings.run(main)
  missing = rings.cluster_of(2, keys=str(tmp_path))
  with pytest.raises(ValueError, match=r"Cluster\.keys = .*ca\.pem"):
    rings.ring_of(missing)
  with pytest.raises(ValueError, match=r"Cluster\.keys = .*ca\.pem"):
    rings.server_of(rings.Recorded(), missing, 0)


@pytest.mark.parametrize(
  ("settings", "message"),
  [
    ({"hops": HOPS}, "hops: 4 given, 2 stages need 3"),
    ({"lap_deadline_s": 0.0}, "lap_deadline_s = 0.0: must be > 0"),
  ],
)
def test_settings_are_refused_before_anything_starts(settings, message):
  with pytest.raises(ValueError, match=message):
    rings.ring_of(rings.cluster_of(2), **settings)


def test_measured_times_come_stage_by_stage():
  async def main():
    async with rings.served(3) as (cluster, _):
      async with rings.ring_of(cluster) as ring:
        times = await ring.measure(num_slots=64, repeats=2)
        assert jnp.shape(jnp.asarray(times)) == (3, 2)
        assert times == [[b * 64 * 2 * 1e-6 for b in (4, 8)]] * 3
        assert await rings.decode(ring) == rings.TEXT[3:13]
        with pytest.raises(SessionFault, match="stage-0: refused num_slots"):
          await ring.measure(num_slots=63, repeats=2)
      await rings.works(cluster)

  rings.run(main)
