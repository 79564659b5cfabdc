# SPDX-License-Identifier: Apache-2.0
"""Cancels against the flow over sockets."""

import asyncio
import contextlib
import random as random_lib
import re
import time

import pytest

from tests.worlds import rings, scripted, troubled
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.messages import Cancel
from wanspec_jax.worlds import (
  _joined,
  _session,
)

WAIT_S = 3.0  # for what must come; nothing takes as long

# A root's run, then five that a first verdict kills while they queue.
WRONG = (scripted.WRONG,) * 6


def held(host, **until):
  """Has a stage not end run `i` before `until["run_i"](session)`."""

  def hook(run):
    enough = until.get(f"run_{run.run_id}", lambda session: True)
    begun.append(run.run_id)
    until_s = time.monotonic() + WAIT_S
    while not enough(host.session):
      assert time.monotonic() < until_s, "never came true"
      time.sleep(0.002)

  begun = []
  host.stage.hook = hook
  return begun


def queue(count):
  """Returns whether so many runs wait at a stage."""
  return lambda session: len(session.before._inbox) >= count


def cancelled(session):
  """Returns whether a cancel has come that is not out of date."""
  return session._num_cancelled > 0


@contextlib.asynccontextmanager
async def recorded_ring(num_stages):
  """Yields `(cluster, hosts)` of stages that replay `scripted.TEXT`."""
  texts = dict.fromkeys(range(4), scripted.TEXT)
  cluster = rings.cluster_of(num_stages, peer_deadline_s=5.0)
  hosts = []
  async with contextlib.AsyncExitStack() as stack:
    for i, stage in enumerate(rings.recorded(num_stages, texts)):
      server = rings.server_of(stage, cluster, i)
      (task,) = await stack.enter_async_context(rings.listening(server))
      hosts.append(troubled.Host(server, stage, task, relay=None))
    yield cluster, hosts


def burst_driver(cancels):
  """Returns a driver that launches six runs at once, five of them in vain."""
  policy = scripted.burst(6, cancels=cancels)
  return scripted.driver_of(
    policy,
    scripted.chain_drafter(WRONG),
    capacity=rings.SHAPE.capacity,
    max_rows=rings.SHAPE.max_rows,
  )


def rows_by_run(result, stage):
  """Returns `{run: name of what the stage did}`, by its spans."""
  return {
    span.run: span.name
    for span in result.spans
    if span.lane == f"stage {stage}"
  }


def note_cancels(monkeypatch):
  """Returns where `(stage, cancel)` is noted of all that are dealt with."""
  heard = []
  original = _session.Session._cancel

  async def note(self, frame, source):
    await original(self, frame, source)
    heard.append((self._me, wire.decode_cancel(frame.body)))

  monkeypatch.setattr(_session.Session, "_cancel", note)
  return heard


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("at", ["head", "tail"])
def test_rows_of_queued_runs_are_not_computed(num_stages, at):
  """The runs behind the second wait at a stage until a cancel is there; their
  headers go on, in order, and the text is that of plain decoding."""
  place = 0 if at == "head" else num_stages - 1

  async def main(cancels):
    async with (
      recorded_ring(num_stages) as (cluster, hosts),
      rings.ring_of(cluster) as ring,
    ):
      if cancels:
        held(hosts[place], run_0=queue(5), run_1=cancelled)
      request = rings.request_of(12, text=scripted.TEXT, prompt=1)
      return await ring.run(burst_driver(cancels), [(0.0, request)])

  result = rings.run(lambda: main(True))
  plain = rings.run(lambda: main(False))
  for each in (result, plain):
    assert each.outcomes[0].tokens == scripted.TEXT[1:13]
    assert each.outcomes[0].reason == "length"
  for stage in range(num_stages):
    names = rows_by_run(result, stage)
    told = "1 rows"  # it had passed on all when the cancel came
    if stage >= place:
      told = "0 rows, 1 cancelled" if stage == place else "0 rows"
    assert [names[run] for run in range(2, 6)] == [told] * 4
    everything = rows_by_run(plain, stage)
    assert [everything[run] for run in range(2, 6)] == ["1 rows"] * 4
  # Each run's header comes back, and in order.
  back = [s.run for s in result.spans if s.lane == f"hop {num_stages}"]
  assert back == sorted(back) == list(range(len(back)))
  # What is dropped does not travel on.
  if place < num_stages - 1:
    saved = [
      each.bytes.total(link="hop 1", traffic="activations")
      for each in (plain, result)
    ]
    assert saved[0] - saved[1] == 4 * 16


def test_a_cancel_passes_every_stage_and_is_counted(monkeypatch):
  """As control bytes of each link that it crosses, against the flow."""
  num_stages = 3
  heard = note_cancels(monkeypatch)
  # Nothing else that is counted so crosses these links once a session stands.
  monkeypatch.setattr(wire.Channel, "ping", lambda self: None)

  async def main():
    async with (
      recorded_ring(num_stages) as (cluster, hosts),
      rings.ring_of(cluster) as ring,
    ):
      request = [(0.0, rings.request_of(6, text=scripted.TEXT, prompt=1))]
      # Handshakes are of the first.
      await ring.run(scripted_plain(), request)
      heard.clear()
      first = ring.first_run
      until = {f"run_{first}": queue(5), f"run_{first + 1}": cancelled}
      held(hosts[0], **until)
      result = await ring.run(burst_driver(True), request)
      assert all(host.session._num_cancelled == 0 for host in hosts)
      return first, result

  first, result = rings.run(main)
  assert result.outcomes[0].tokens == scripted.TEXT[1:7]
  assert [name for name, _ in heard] == ["stage-2", "stage-1", "stage-0"]
  (cancel,) = {cancel for _, cancel in heard}
  ((sequence, ids),) = cancel.nodes
  assert sequence == 0 and len(ids) == 5 and cancel.before_run > first + 5
  size = len(wire.encode_cancel(cancel))
  for link in ("back 1", "back 2", "back 3"):
    assert result.bytes.total(link=link, traffic="control") == size
    spans = [span for span in result.spans if span.lane == link]
    assert [span.name for span in spans] == ["cancel"]
  assert result.bytes.total(link="back 0", traffic="control") == 0


def scripted_plain():
  """Returns a driver of plain decoding."""
  return scripted.driver_of(
    sch.lockstep(0),
    scripted.chain_drafter(),
    capacity=rings.SHAPE.capacity,
    max_rows=rings.SHAPE.max_rows,
  )


@contextlib.asynccontextmanager
async def joined(cluster):
  """Yields a session that is open, without an engine, and its events."""
  events = asyncio.Queue()
  session = _joined.Joined(
    cluster,
    model_hash=rings.HASH,
    hops=None,
    client_ssl=None,
    events=events,
  )
  await session.open()
  try:
    yield session, events
  finally:
    await session.close()


async def returned(events, count):
  """Returns the next runs that come back, by epoch and id."""
  found = []
  async with asyncio.timeout(WAIT_S):
    while len(found) < count:
      _, _, frame = await events.get()
      assert frame.kind == wire.Kind.RETURNED
      run = wire.decode_returned(frame.body)
      found.append((run.epoch, run.run_id))
  return found


def single(run_id, node, *, epoch=0):
  """Returns the frame of a run of one node in a chain."""
  run = rings.chain_run(
    run_id=run_id, opens=run_id == 0, ids=[node], parents=[max(node - 1, 0)]
  )
  return wire.encode_run(rings.dataclasses.replace(run, epoch=epoch))


def cancel_of(node, *, before_run=9, epoch=0):
  return wire.encode_cancel(
    Cancel(epoch=epoch, before_run=before_run, nodes=((0, (node,)),))
  )


@pytest.mark.parametrize(
  ("cancels", "computed"),
  [
    ([cancel_of(2, epoch=2)], [1, 1, 0, 1]),
    ([cancel_of(2, epoch=2)] * 2, [1, 1, 0, 1]),  # it came twice
    ([cancel_of(2, epoch=1)], [1, 1, 1, 1]),  # of before a fault
    ([cancel_of(1, epoch=2)], [1, 1, 1, 1]),  # what has begun goes on
    ([cancel_of(2, epoch=2, before_run=2)], [1, 1, 1, 1]),  # out of date
    # Of an earlier text, held up by the network, behind one of this text.
    (
      [cancel_of(3, epoch=2), cancel_of(2, epoch=2, before_run=1)],
      [1, 1, 1, 0],
    ),
  ],
)
def test_what_a_cancel_means(monkeypatch, cancels, computed):
  """They are heard while run 1 of epoch 2 is computed."""
  heard = note_cancels(monkeypatch)

  async def main():
    async with recorded_ring(1) as (cluster, (host,)):
      rows = []
      begun = held(host, run_1=lambda _: len(heard) == len(cancels))
      process = host.stage.process

      def noting(run, payload=None):
        out = process(run, payload)
        rows.append(out.num_rows)
        return out

      host.stage.process = noting
      async with joined(cluster) as (session, events):
        for i in range(3):
          await session.launch(single(i, i, epoch=2))
        await rings.until(lambda: 1 in begun)
        for cancel in cancels:
          await session.cancel(cancel)
        # The next node hangs below the first, which nobody kills.
        run = rings.chain_run(run_id=3, opens=False, ids=[3], parents=[0])
        run = rings.dataclasses.replace(run, epoch=2)
        await session.launch(wire.encode_run(run))
        assert await returned(events, 4) == [(2, i) for i in range(4)]
      return rows

  assert rings.run(main) == computed


def test_cancels_take_bounded_memory(monkeypatch):
  """What is too much is forgotten: that only costs time."""
  monkeypatch.setattr(_session, "_MAX_CANCELLED", 10)
  heard = note_cancels(monkeypatch)

  async def main():
    async with recorded_ring(2) as (cluster, hosts):
      sent = asyncio.Event()
      begun = held(hosts[0], run_1=lambda _: sent.is_set())
      for host in hosts[1:]:
        held(host, run_1=lambda _: sent.is_set())
      async with joined(cluster) as (session, events):
        for i in range(3):
          await session.launch(single(i, i))
        await returned(events, 1)
        await rings.until(lambda: 1 in begun)
        for _ in range(200):
          for node in (50, 51, 52):
            await session.cancel(cancel_of(node, before_run=3))
        await rings.until(lambda: len(heard) == 1200)
        for host in hosts:
          assert host.session._num_cancelled == 10
          assert len(host.session._cancelled) == 10
          assert len(host.session._cancels) == 10
        sent.set()
        await returned(events, 2)
        await session.launch(single(3, 3))
        await returned(events, 1)
        for host in hosts:
          assert host.session._num_cancelled == 0
          assert not host.session._cancelled and not host.session._cancels
          cancelled = host.stage._stage._cancelled
          assert not cancelled._dead and not cancelled._cancels

  rings.run(main)


@pytest.mark.parametrize(
  ("frame", "cause"),
  [
    (wire.encode_frame(wire.Kind.CANCEL, b"\x04\x00"), "refused a cancel"),
    (single(0, 0), "RUN came out of turn"),
  ],
)
def test_nonsense_against_the_flow_is_refused(frame, cause):
  async def main():
    async with recorded_ring(2) as (cluster, _):
      async with joined(cluster) as (session, events):
        await session.back.send(frame, {"control": len(frame)})
        async with asyncio.timeout(WAIT_S):
          while True:
            what, _, detail = await events.get()
            if what == "frame" and detail.kind == wire.Kind.FAULT:
              message = wire.decode_control(detail)
              break
      assert re.search(cause, message["cause"]), message
      await rings_work(cluster)

  rings.run(main)


async def rings_work(cluster):
  """Asserts that a ring of `scripted.TEXT` serves a session of its own."""
  async with rings.ring_of(cluster) as ring:
    request = rings.request_of(5, text=scripted.TEXT, prompt=1)
    result = await ring.run(scripted_plain(), [(0.0, request)])
    assert result.outcomes[0].tokens == scripted.TEXT[1:6]


def test_a_cancel_does_not_come_round_the_ring():
  """It has a meaning against the flow only."""

  async def main():
    async with (
      recorded_ring(2) as (cluster, _),
      rings.introduced(cluster) as channel,
    ):
      await rings.ready(channel)
      await channel.send(cancel_of(1))
      assert await rings.fault_on(channel) == (
        "stage-0",
        "refused CANCEL: has no meaning here",
      )

  rings.run(main)


@pytest.mark.parametrize("seed", range(2))
def test_cancels_at_random_change_no_text(seed):
  """Stages of random speed, several texts at once, against each stage's own
  count of what it was spared."""
  texts = troubled.texts_of(num_stages=2, count=24)

  async def main():
    async with (
      troubled.ring_of_toys(2) as (cluster, hosts),
      troubled.coordinator(cluster, recover=False) as ring,
    ):
      for host, random in (
        (host, random_lib.Random(seed)) for host in hosts.values()
      ):
        host.stage.hook = lambda run, random=random: time.sleep(
          random.choice((0.0, 0.0, 0.01))
        )
      random = random_lib.Random(seed)
      driver = troubled.driver_of(
        troubled.bench.pipelined(random, max_in_flight=6, max_nodes=3),
        troubled.drafter_of(texts, random, right=0.5),
        num_stages=2,
      )
      result = await ring.run(driver, [(0.0, t.request) for t in texts])
      troubled.check(result, texts)
      for i, host in enumerate(hosts.values()):
        told = rows_by_run(result, i)
        assert len(told) == len(host.stage.runs)
        for _, run_id, rows in host.stage.runs:
          assert told[run_id].split(" ")[0] == str(rows)
      return sum(
        "cancelled" in name for name in rows_by_run(result, 1).values()
      )

  assert rings.run(main) > 0
