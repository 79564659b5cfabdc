# SPDX-License-Identifier: Apache-2.0
"""Stages that behave badly: the first cause is named, nothing hangs."""

import asyncio
import contextlib
import re
import threading
import time

import pytest

from tests.worlds import rings
from wanspec_jax import wire
from wanspec_jax.messages import Returned, Verdict
from wanspec_jax.wire import Kind
from wanspec_jax.worlds import (
  SessionFault,
  _protocol,
)

# A stage that behaves badly. ------------------------------------------------


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
  await channel.send_now(rings.control(op="ready", stages={"a": 1}))
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
    async with rings.fake_next(handler) as cluster:
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
        if run.run_id != 30:  # ids go on where the first text ended
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
        assert "run 30 was not back within 1 s" in fault.cause
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
      rings.control(op="ready", stages=[{"name": "stage-0", "traces": {}}])
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
    (_instead(2, wire.encode_run(rings.chain_run())), "RUN came out of turn"),
    (_instead(2, rings.control(op="x")), "CONTROL came out of turn"),
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
    (_instead(None, rings.control(op="trace")), "CONTROL came out of turn"),
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


def test_verdicts_that_come_twice_or_late_are_dropped():
  """Whenever they come again: at once, or after later ones."""
  sent = []

  def answers(run):
    fresh = plain_answers(run)
    if run is None:
      return fresh
    sent.extend(fresh)
    return [*fresh, fresh[0], sent[len(sent) // 2], sent[0]]

  async def main():
    cluster = rings.cluster_of(1)
    tail = FakeTail(answers)
    async with (
      await wire.listen(tail, port=cluster.stages[0].port),
      rings.ring_of(cluster) as ring,
    ):
      for _ in range(2):  # and those of the text before
        assert await rings.decode(ring, 6) == (1,) * 6

  rings.run(main)
  assert len(sent) > 12


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
