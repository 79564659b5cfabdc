# SPDX-License-Identifier: Apache-2.0
"""Lost coordinators and what is no fault: duplicates, stalls, jitter."""

import asyncio
import functools
import random as random_lib
import time

import numpy as np
import pytest

from tests.worlds import rings, troubled
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.worlds import (
  Mirror,
  _joined,
  _protocol,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
  """Nobody waits seconds for the last word of somebody on this host."""
  monkeypatch.setattr(_protocol, "SETTLE_S", 0.5)
  monkeypatch.setattr(_joined, "_FIRST_CAUSE_S", 0.4)


# The coordinator. -----------------------------------------------------------


@pytest.mark.parametrize("how", ["cancelled", "broken off", "silent"])
def test_a_lost_coordinator_is_started_elsewhere_from_the_mirror(how):
  """Other links, another policy, another drafter: the same texts."""
  texts = troubled.texts_of()

  async def main():
    async with troubled.ring_of_toys(3, standbys=(1,)) as (cluster, _):
      mirror = Mirror([text.request for text in texts])
      lost = asyncio.Event()
      act = troubled.after_emitting(9, lost.set)

      def on_emit(*what):
        if not lost.is_set():  # a client hears nothing of what came later
          mirror.on_emit(*what)
        act(*what)

      random = random_lib.Random(6)
      ring = await troubled.coordinator(cluster).__aenter__()
      driver = troubled.driver_of(
        troubled.policies(random)[0],
        troubled.drafter_of(texts, random),
        on_emit=on_emit,
      )
      task = asyncio.create_task(
        ring.run(driver, [(0.0, text.request) for text in texts])
      )
      await lost.wait()
      channels = [ring._joined.head, ring.back]
      if how == "broken off":
        for channel in channels:
          channel._writer.transport.abort()
      elif how == "silent":
        for channel in channels:
          for each in channel._tasks:
            each.cancel()
      await rings.cancel(task)
      if how == "cancelled":
        await ring.__aexit__(None, None, None)
      before = [len(mirror.tokens(i)) for i in range(3)]
      assert all(0 < n < 40 for n in before)

      hops = [wire.LinkShaper(delay_s=d * 1e-3) for d in (1, 2, 2, 6)]
      async with troubled.coordinator(cluster, hops=hops) as second:
        random = random_lib.Random(7)
        driver = troubled.driver_of(
          sch.priced(),
          troubled.drafter_of(texts, random, right=0.9),
          on_emit=mirror.on_emit,
        )
        result = await second.run(
          driver, [(0.0, request) for request in mirror.requests()]
        )
        assert second.cluster == cluster  # nobody failed but the coordinator
      for i, text in enumerate(texts):
        assert list(mirror.tokens(i)) == list(text.tokens)
        assert result.outcomes[i].reason == "length"
        assert len(result.outcomes[i].tokens) == 40 - before[i]
      if how != "cancelled":
        for channel in channels:
          channel._lose("the test is over")
        await ring.__aexit__(None, None, None)

  rings.run(main)


# Trouble that is no fault. --------------------------------------------------


def test_frames_that_come_twice_late_or_are_stale(monkeypatch):
  """Runs, verdicts and cancels: what came before is sent again at random."""
  texts = troubled.texts_of()
  send = wire.Channel.send
  random = random_lib.Random(8)
  again = []

  async def send_again(self, frame, classes=None):
    sent = await send(self, frame, classes)
    old = self.__dict__.setdefault("old_frames", [])
    old.append(frame)
    if random.random() < 0.4:
      again.append(frame)
      await send(self, random.choice(old[-6:]))
    return sent

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1,)) as (cluster, hosts),
      troubled.coordinator(cluster) as ring,
    ):
      monkeypatch.setattr(wire.Channel, "send", send_again)
      result = await troubled.decode(ring, texts, policy=1)
      assert result.faults == []
      kill = functools.partial(hosts.kill, "stage-1")
      result = await troubled.decode(
        ring, texts, on_emit=troubled.after_emitting(9, kill)
      )
      assert len(result.faults) == 1

  rings.run(main)
  kinds = {frame[1] & 0x0F for frame in again}
  assert {wire.Kind.RUN, wire.Kind.RETURNED, wire.Kind.CANCEL} <= kinds


def test_stalls_and_jitter_change_nothing():
  """A link holds back all it carries, for long but not for too long."""
  texts = troubled.texts_of()
  hops = [
    wire.LinkShaper(delay_s=0.001, jitter_s=0.004, seed=i) for i in range(4)
  ]

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1,), peer_deadline_s=1.5) as (
        cluster,
        hosts,
      ),
      troubled.coordinator(cluster, hops=hops) as ring,
    ):
      held_s = []

      async def stall(relay):
        start_s = time.monotonic()
        relay.hold()
        await asyncio.sleep(0.3)
        relay.release()
        held_s.append((start_s, time.monotonic()))

      stalls = []

      def stalled(name):
        relay = hosts[name].relay
        stalls.append(asyncio.get_running_loop().create_task(stall(relay)))

      acts = [
        troubled.after_emitting(n, functools.partial(stalled, name))
        for n, name in ((5, "stage-0"), (15, "stage-1"), (25, "stage-2"))
      ]

      def on_emit(*what):
        for act in acts:
          act(*what)

      result = await troubled.decode(ring, texts, on_emit=on_emit)
      await asyncio.gather(*stalls)
      assert result.faults == []
      assert len(held_s) == 3
      # They did hold: each is seen as a gap between two tokens.
      gaps_s = sorted(np.diff(sorted(result.outcomes[0].emitted_s)))
      assert gaps_s[-3] > 0.2

  rings.run(main)
