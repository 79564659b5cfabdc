# SPDX-License-Identifier: Apache-2.0
"""Who may join a ring, and who is refused, by name."""

import asyncio
import dataclasses
import time

import jax.numpy as jnp
import pytest

from tests.worlds import rings
from wanspec_jax import wire
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import (
  SessionFault,
)

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
        for channel in (ring._joined.head, ring.back):
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

    async with rings.fake_next(newer) as cluster:
      with pytest.raises(
        SessionFault, match="stage-1: the peer speaks protocol version 9"
      ):
        await rings.works(cluster)

  rings.run(main)


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
    ({"hops": [wire.LinkShaper()] * 4}, "hops: 4 given, 2 stages need 3"),
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
