# SPDX-License-Identifier: Apache-2.0
"""Two endpoints on loopback, in one process."""

import asyncio
import contextlib
import socket
import statistics
import time

import pytest

from tests.wire.examples import CHAIN, VERDICTS
from wanspec_jax import wire

RUN = wire.encode_run(CHAIN, bytes(200))
RETURNED = wire.encode_returned(VERDICTS)
QUICK = wire.ChannelOptions(peer_deadline_s=0.4, ping_interval_s=0.1)
PATIENT = wire.ChannelOptions(peer_deadline_s=20.0)


@contextlib.asynccontextmanager
async def pair(*, options=PATIENT, server_options=None, **kwargs):
  """Yields both ends of a channel: (connecting, accepting)."""
  accepted = asyncio.get_running_loop().create_future()
  done = asyncio.Event()

  async def handler(channel):
    accepted.set_result(channel)
    await done.wait()

  async with await wire.listen(
    handler, options=server_options or options
  ) as listener:
    async with await wire.connect(
      "127.0.0.1", listener.port, peer="server", options=options, **kwargs
    ) as client:
      yield client, await accepted
    done.set()


@contextlib.asynccontextmanager
async def raw_server(talk):
  """Yields the port of a server that runs `talk(reader, writer)`."""

  async def serve(reader, writer):
    with contextlib.suppress(ConnectionError):
      await talk(reader, writer)
    writer.close()

  server = await asyncio.start_server(serve, "127.0.0.1", 0)
  async with server:
    yield server.sockets[0].getsockname()[1]


@contextlib.asynccontextmanager
async def client_of(talk):
  """Yields a channel to a server that runs `talk(reader, writer)`."""
  async with (
    raw_server(talk) as port,
    await wire.connect("127.0.0.1", port, peer="a") as client,
  ):
    yield client


def test_small_frames_are_not_delayed():
  async def main():
    async with pair() as (client, server):
      for channel in (client, server):
        sock = channel.get_extra_info("socket")
        assert sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)

      async def echo():
        while True:
          await server.recv()
          await server.send(RETURNED)

      task = asyncio.create_task(echo())
      times_s = []
      for _ in range(200):
        start_s = time.monotonic()
        await client.send(RUN)
        frame = await client.recv(deadline_s=5.0)
        times_s.append(time.monotonic() - start_s)
        assert wire.decode_returned(frame.body) == VERDICTS
      task.cancel()
      # Nagle's algorithm with delayed acknowledgements would cost 40 ms each.
      assert statistics.median(times_s) < 0.02

  asyncio.run(main())


def test_every_byte_is_counted():
  async def main():
    counter = wire.ByteCounter()
    async with pair(counter=counter, link="c>s") as (client, server):
      await client.send(RUN)
      await client.send(RUN, wire.frame_classes(RUN))
      await server.recv()
      await server.recv()
      client.ping()
      await server.send(RETURNED)
      await client.recv()
    await asyncio.sleep(0.05)
    assert isinstance(server.lost, wire.PeerLost)
    assert server.received_bytes == counter.total(link="c>s") == counter.total()
    expected = wire.frame_classes(RUN)
    for name in ("ids", "topology", "activations"):
      assert counter.total(traffic=name) == 2 * expected[name]
    assert server.counter.total(traffic="verdicts") == len(RETURNED)
    assert server.counter.total(traffic="control") > 0  # the answered ping

  asyncio.run(main())


def test_partial_reads_over_a_socket():
  async def main():
    got = asyncio.Queue()

    async def handler(channel):
      while True:
        await got.put(await channel.recv())

    async with await wire.listen(handler) as listener:
      two = RETURNED + RUN[:40]
      for cut in range(1, len(two)):
        _, writer = await asyncio.open_connection("127.0.0.1", listener.port)
        writer.write(two[:cut])
        await asyncio.sleep(0.001)
        writer.write(two[cut:] + RUN[40:])
        async with asyncio.timeout(5):
          frames = [await got.get(), await got.get()]
        assert [frame.kind for frame in frames] == [
          wire.Kind.RETURNED,
          wire.Kind.RUN,
        ]
        assert frames == [wire.split_frame(RETURNED), wire.split_frame(RUN)]
        writer.close()

  asyncio.run(main())


def test_emulated_link_delivers_on_schedule():
  async def main():
    shaper = wire.LinkShaper(
      delay_s=0.02, bandwidth_bps=8 * 50_000, jitter_s=0.002, seed=5
    )
    async with pair(shaper=shaper) as (client, server):
      state, earliest_s, arrived_s = wire.ShaperState(), [], []

      async def receive():
        for _ in range(8):
          await server.recv(deadline_s=5)
          arrived_s.append(time.monotonic())

      task = asyncio.create_task(receive())
      for _ in range(8):
        # The channel schedules a moment later, so this is a lower bound.
        state, when_s = shaper.schedule(state, time.monotonic(), len(RUN))
        earliest_s.append(when_s)
        await client.send(RUN)
      await task
      late_s = [a - e for a, e in zip(arrived_s, earliest_s, strict=True)]
      assert min(late_s) >= 0
      assert statistics.median(late_s) < 0.02
      client.ping()  # heartbeats pass the emulated link
      await asyncio.sleep(0.01)
      while client.rtt_s is None:
        await asyncio.sleep(0.001)
      assert client.rtt_s < 0.02
      # Both ends read the same clock.
      assert abs(client.clock_offset_s) <= client.rtt_s / 2

  asyncio.run(main())


def test_sleep_until_is_never_early():
  async def main():
    late_s = []
    for k in range(20):
      when_s = time.monotonic() + 0.003 + 0.0007 * (k % 5)
      await wire.sleep_until(when_s)
      late_s.append(time.monotonic() - when_s)
    assert min(late_s) >= 0
    assert min(late_s) < 1e-3  # most are, but the machine may be busy

  asyncio.run(main())


def test_silent_peer_is_lost_within_the_deadline():
  async def main():
    async def never_answer(reader, writer):
      await reader.read()

    options = wire.ChannelOptions(peer_deadline_s=0.8, ping_interval_s=0.2)
    async with (
      raw_server(never_answer) as port,
      await wire.connect(
        "127.0.0.1", port, peer="stage-1", options=options
      ) as client,
    ):
      start_s = time.monotonic()
      with pytest.raises(wire.DeadlineExceeded, match=r"no frame within 0\.05"):
        await client.recv(deadline_s=0.05)
      with pytest.raises(
        wire.PeerLost, match=r"no answer for 0\.8 s"
      ) as caught:
        await client.recv()
      assert 0.7 < time.monotonic() - start_s < 5.0
      assert caught.value.peer == "stage-1"
      with pytest.raises(
        wire.PeerLost, match="no answer"
      ):  # it stays the cause
        await client.send(RUN)
    assert client.lost.cause == "no answer for 0.8 s"

  asyncio.run(main())


def test_idle_channel_lives_on_heartbeats():
  async def main():
    async with pair(options=QUICK) as (client, server):
      await asyncio.sleep(1.0)
      time.sleep(0.8)  # a process that stood still blames nobody
      await asyncio.sleep(0.3)
      await client.send(RUN)
      assert (await server.recv(deadline_s=1)).kind == wire.Kind.RUN
      assert client.rtt_s is not None

  asyncio.run(main())


def test_closed_peer_is_lost_after_its_last_frame():
  async def main():
    async def send_and_leave(reader, writer):
      writer.write(RETURNED)

    async def leave_midway(reader, writer):
      writer.write(RETURNED[:-1])

    async with client_of(send_and_leave) as client:
      assert (await client.recv(deadline_s=1)).kind == wire.Kind.RETURNED
      with pytest.raises(wire.PeerLost, match=r"a: lost: connection closed$"):
        await client.recv(deadline_s=1)
    async with client_of(leave_midway) as client:
      with pytest.raises(wire.PeerLost, match="closed in the middle of a fr"):
        await client.recv(deadline_s=1)

  asyncio.run(main())


def test_bad_bytes_end_the_channel_by_name_and_nothing_else():
  async def main():
    async def garbage(reader, writer):
      writer.write(b"\x80\x04\x95pickled")
      await reader.read(1)

    async with client_of(garbage) as client:
      with pytest.raises(wire.PeerLost, match="bad magic byte 0x80") as caught:
        await client.recv(deadline_s=1)
      assert isinstance(caught.value.__cause__, wire.FrameError)

    async def handler(channel):
      await channel.recv()
      await channel.send(RUN)

    async with await wire.listen(handler) as listener:
      reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
      writer.write(b"GET / HTTP/1.1\r\n")
      bye = wire.split_frame(await reader.read())
      assert "bad magic byte 0x47" in wire.decode_control(bye)["reason"]
      writer.close()
      async with await wire.connect(
        "127.0.0.1", listener.port, peer="a"
      ) as client:
        await client.send(RUN)
        assert (await client.recv(deadline_s=1)).kind == wire.Kind.RUN
      assert "bad magic byte 0x47" in listener.refusals[0]

  asyncio.run(main())


def test_goodbye_tells_the_first_cause():
  async def main():
    async def handler(channel):
      raise wire.PeerLost("stage-2", "out of memory")

    async with await wire.listen(handler) as listener:
      client = await wire.connect("127.0.0.1", listener.port, peer="stage-1")
      with pytest.raises(wire.PeerLost) as caught:
        await client.recv(deadline_s=2)
      await client.close()
      assert caught.value.peer == "stage-1"
      assert caught.value.cause == "said goodbye (stage-2: lost: out of memory)"

  asyncio.run(main())


def test_full_queues_hold_the_sender_back_but_keep_the_peer():
  async def main():
    big = wire.encode_run(CHAIN, bytes(2**20))
    sender = wire.ChannelOptions(
      peer_deadline_s=0.5,
      ping_interval_s=0.1,
      max_outgoing_bytes=2**21,
      send_deadline_s=0.2,
    )
    receiver = wire.ChannelOptions(
      peer_deadline_s=0.5, ping_interval_s=0.1, max_incoming_bytes=2**21
    )
    async with pair(options=sender, server_options=receiver) as ends:
      client, server = ends
      sent = 0
      with pytest.raises(wire.DeadlineExceeded, match="no room to send"):
        while sent < 200:
          await client.send(big)
          sent += 1
      assert sent < 50  # two queues and the socket buffers
      await asyncio.sleep(1.0)  # twice the deadline, unread bytes waiting
      for _ in range(sent):
        frame = await server.recv(deadline_s=2)
        assert frame.num_bytes == len(big)
      await server.send(RETURNED)
      assert (await client.recv(deadline_s=2)).kind == wire.Kind.RETURNED

  asyncio.run(main())


def test_handshake_accepts_and_refuses():
  async def main():
    results = asyncio.Queue()

    def check(hello):
      if hello.get("codec") != "uniform:8":
        return f"codec {hello.get('codec')!r}, must be 'uniform:8'"
      return None

    async def handler(channel):
      try:
        hello = await wire.answer(channel, check, accept={"layers": [0, 4]})
      except wire.PeerRefused as error:
        await results.put(error)
        raise
      await results.put((channel.peer, hello))
      await channel.recv()

    async with await wire.listen(handler) as listener:
      hello = {"name": "stage-0", "codec": "uniform:8"}
      async with await wire.connect(
        "127.0.0.1", listener.port, peer="stage-1"
      ) as client:
        accept = await wire.offer(client, hello)
        assert accept == {"layers": [0, 4]}
        assert await results.get() == ("stage-0", hello)
      async with await wire.connect(
        "127.0.0.1", listener.port, peer="stage-1"
      ) as client:
        with pytest.raises(wire.PeerRefused) as caught:
          await wire.offer(client, {"name": "stage-0", "codec": "raw"})
        assert caught.value.peer == "stage-1"
        reason = "codec 'raw', must be 'uniform:8'"
        assert caught.value.reason == (await results.get()).reason == reason

  asyncio.run(main())


def test_version_mismatch_names_both_on_both_sides():
  async def main():
    async def handler(channel):
      await wire.answer(channel, lambda hello: None)

    async with await wire.listen(handler) as listener:
      # A peer of the future asks; the fields of its HELLO are beyond us.
      reader, writer = await asyncio.open_connection("127.0.0.1", listener.port)
      writer.write(wire.encode_frame(wire.Kind.HELLO, b"\xc1", version=9))
      decoder = wire.FrameDecoder()
      refuse = next(decoder.feed(await reader.read(1000)))
      writer.close()
      assert refuse.kind == wire.Kind.REFUSE
      reason = wire.decode_control(refuse)["reason"]
      assert "version 9 was offered, version 1 is spoken here" in reason
      while not listener.refusals:
        await asyncio.sleep(0.01)
      assert "speaks protocol version 9, this side 1" in listener.refusals[
        0
      ].replace("this side version", "this side")

    async def refuse_us(reader, writer):
      await reader.read(1000)
      fields = {"reason": "version 1 was offered"}
      writer.write(wire.encode_control(wire.Kind.REFUSE, fields, version=9))

    async def accept_us(reader, writer):
      await reader.read(1000)
      writer.write(wire.encode_control(wire.Kind.ACCEPT, {}, version=9))

    for talk in (refuse_us, accept_us):
      async with client_of(talk) as client:
        with pytest.raises(
          wire.VersionError,
          match="peer speaks protocol version 9, this side version 1",
        ):
          await wire.offer(client, {"name": "b"})

  asyncio.run(main())


def test_connecting_fails_by_name():
  async def main():
    with socket.create_server(("127.0.0.1", 0)) as sock:
      port = sock.getsockname()[1]
    with pytest.raises(wire.PeerLost, match=f"cannot connect to .*:{port}"):
      await wire.connect("127.0.0.1", port, peer="a")
    with pytest.raises(wire.DeadlineExceeded, match=r"within 0\.3 s"):
      await wire.connect(
        "127.0.0.1", port, peer="a", retry=True, deadline_s=0.3
      )

    async def handler(channel):
      await channel.recv()

    async def listen_later():
      await asyncio.sleep(0.2)
      return await wire.listen(handler, port=port)

    task = asyncio.create_task(listen_later())
    client = await wire.connect("127.0.0.1", port, peer="a", retry=True)
    await client.close()
    await (await task).close()

  asyncio.run(main())


def test_connections_are_bounded():
  async def main():
    async def handler(channel):
      await channel.recv()

    async with (
      await wire.listen(handler, max_connections=1) as listener,
      await wire.connect("127.0.0.1", listener.port, peer="a"),
      await wire.connect("127.0.0.1", listener.port, peer="a") as client,
    ):
      with pytest.raises(wire.PeerLost):
        await client.recv(deadline_s=2)
      assert "over 1 connections" in listener.refusals[0]

  asyncio.run(main())


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"peer_deadline_s": 0.0}, "peer_deadline_s = 0.0: must be > 0"),
    ({"max_body_bytes": -1}, "max_body_bytes"),
    ({"peer_deadline_s": 1.0, "ping_interval_s": 0.6}, "ping_interval_s = 0.6"),
  ],
)
def test_bad_options_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    wire.ChannelOptions(**fields)
