# SPDX-License-Identifier: Apache-2.0
"""Stages and coordinators that fail in mid-text: standbys, replay, mirrors."""

import asyncio
import contextlib
import functools
import random as random_lib
import threading
import time

import pytest

from tests.worlds import rings, troubled
from wanspec_jax.worlds import (
  SessionFault,
  _joined,
  _protocol,
  _session,
)


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
  """Nobody waits seconds for the last word of somebody on this host."""
  monkeypatch.setattr(_protocol, "SETTLE_S", 0.5)
  monkeypatch.setattr(_joined, "_FIRST_CAUSE_S", 0.4)


# A stage. -------------------------------------------------------------------


async def _fail_and_go_on(cluster, hosts, how, index, policy):
  """Breaks a stage in mid-text, decodes on, and then once more."""
  texts = troubled.texts_of(count=24)
  name = f"stage-{index}"
  async with troubled.coordinator(cluster) as ring:
    hit = functools.partial(getattr(hosts, how), name)
    disturbed = await troubled.decode(
      ring,
      texts,
      seed=index,
      policy=policy,
      on_emit=troubled.after_emitting(9, hit),
    )
    # The session that stands now serves further texts, and calibrations.
    undisturbed = await troubled.decode(ring, texts[1:2], policy=policy)
    await ring.profile(num_slots=256, repeats=1)
    await ring.spacing(num_slots=256, repeats=2)
    assert ring.cluster.stages[index].name == "spare-0"
  ((_, stage, cause),) = disturbed.faults
  assert undisturbed.faults == []
  spare, old = hosts["spare-0"].stage, hosts[name].stage
  assert old.num_resets == spare.num_resets == 1
  # Speculation was in flight, and is on the spare.
  assert {epoch for epoch, *_ in old.runs} == {0}
  assert {epoch for epoch, *_ in spare.runs} == {1}
  assert max(rows for *_, rows in old.runs) > 1
  return stage, cause


@pytest.mark.parametrize(
  ("how", "policy", "cause"),
  [
    ("kill", 0, "connection"),
    ("stop", 1, "no answer for 0.6 s"),
    ("black_hole", 2, "no answer for 0.6 s"),
    ("shut_down", 1, "is shutting down"),
  ],
)
def test_a_standby_takes_the_place_of_a_stage(how, policy, cause):
  """The first, the middle or the last, with several runs in flight: every text
  is that of plain decoding, keys included. One ring each, all at once."""

  async def main():
    async with contextlib.AsyncExitStack() as stack:
      # All up before anybody connects: a connection takes a port as well.
      up = [
        await stack.enter_async_context(
          troubled.ring_of_toys(3, standbys=(index,))
        )
        for index in range(3)
      ]
      return await asyncio.gather(
        *(_fail_and_go_on(*up[i], how, i, policy) for i in range(3))
      )

  for index, (stage, why) in enumerate(rings.run(main)):
    assert stage == f"stage-{index}"
    assert cause in why


def test_a_stage_that_computes_for_ever_is_replaced():
  """Its heart beats: only the stage itself can tell, and does."""
  texts = troubled.texts_of()
  release = threading.Event()

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1,), start_deadline_s=1.0) as (
        cluster,
        hosts,
      ),
      troubled.coordinator(cluster) as ring,
    ):
      hosts["stage-1"].stage.hook = lambda run: (
        run.run_id == 12 and release.wait(10)
      )
      try:
        return (await troubled.decode(ring, texts)).faults
      finally:
        release.set()

  ((_, stage, cause),) = rings.run(main)
  assert stage == "stage-1"
  assert "its work was not done within 1 s" in cause


def test_faults_one_after_another():
  """The spare, the spare's spare, and another stage; one of them while the
  session after the first fault has only begun."""
  texts = troubled.texts_of()

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1, 1, 2)) as (cluster, hosts),
      troubled.coordinator(cluster) as ring,
    ):
      hits = {5: "stage-1", 6: "spare-0", 20: "stage-2"}
      acts = [
        troubled.after_emitting(n, functools.partial(hosts.kill, name))
        for n, name in hits.items()
      ]

      def on_emit(*what):
        for act in acts:
          act(*what)

      result = await troubled.decode(ring, texts, on_emit=on_emit)
      assert [s.name for s in ring.cluster.stages] == [
        "stage-0",
        "spare-1",
        "spare-2",
      ]
      return [stage for _, stage, _ in result.faults]

  assert rings.run(main) == ["stage-1", "spare-0", "stage-2"]


def test_a_fault_while_the_committed_tokens_are_replayed():
  """The first run of the new session finds that it is broken as well."""
  texts = troubled.texts_of()

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1, 1)) as (cluster, hosts),
      troubled.coordinator(cluster) as ring,
    ):
      loop = asyncio.get_running_loop()
      replayed = []

      def hook(run):
        if not replayed and run.committed.any():
          replayed.append(run.epoch)
          loop.call_soon_threadsafe(hosts.kill, "spare-0")

      hosts["spare-0"].stage.hook = hook
      kill = functools.partial(hosts.kill, "stage-1")
      result = await troubled.decode(
        ring, texts, on_emit=troubled.after_emitting(9, kill)
      )
      assert replayed == [1]
      assert {run[0] for run in hosts["spare-1"].stage.runs} == {2}
      return [stage for _, stage, _ in result.faults]

  assert rings.run(main) == ["stage-1", "spare-0"]


def test_two_stages_at_once():
  """Both are named, whichever is noticed first."""
  texts = troubled.texts_of(num_stages=4)

  async def main():
    async with (
      troubled.ring_of_toys(4, standbys=(1, 2)) as (cluster, hosts),
      troubled.coordinator(cluster) as ring,
    ):

      def hit():
        hosts.kill("stage-1")
        hosts.kill("stage-2")

      result = await troubled.decode(
        ring, texts, on_emit=troubled.after_emitting(9, hit)
      )
      return sorted(stage for _, stage, _ in result.faults)

  assert rings.run(main) == ["stage-1", "stage-2"]


def test_a_standby_that_is_dead_itself():
  """The next one serves; where none is left the first cause is named."""
  texts = troubled.texts_of()

  async def main(standbys):
    async with (
      troubled.ring_of_toys(3, standbys=standbys, dead=(0,)) as (
        cluster,
        hosts,
      ),
      troubled.coordinator(cluster) as ring,
    ):
      kill = functools.partial(hosts.kill, "stage-1")
      result = await troubled.decode(
        ring, texts, on_emit=troubled.after_emitting(9, kill)
      )
      return [(stage, cause) for _, stage, cause in result.faults]

  faults = rings.run(lambda: main((1, 1)))
  assert [stage for stage, _ in faults] == ["stage-1", "spare-0"]
  assert "no connection to" in faults[1][1]
  with pytest.raises(SessionFault) as caught:
    rings.run(lambda: main((1, 2)))  # that of another stage is of no use
  assert caught.value.stage == "stage-1"
  assert "connection" in caught.value.cause
  assert "; then spare-0: no connection to" in caught.value.cause


@pytest.mark.parametrize(
  ("standbys", "recover"), [((), True), ((0, 2), True), ((1,), False)]
)
def test_a_fault_that_may_not_be_survived_is_raised(standbys, recover):
  """No standby, none for this stage, or not asked for."""
  texts = troubled.texts_of()

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=standbys) as (cluster, hosts),
      troubled.coordinator(cluster, recover=recover) as ring,
    ):
      kill = functools.partial(hosts.kill, "stage-1")
      with pytest.raises(SessionFault) as caught:
        await troubled.decode(
          ring, texts, on_emit=troubled.after_emitting(9, kill)
        )
      with pytest.raises(SessionFault, match="the session is over"):
        await troubled.decode(ring, texts)
      return caught.value

  fault = rings.run(main)
  assert fault.stage == "stage-1"
  assert "connection" in fault.cause and "then" not in fault.cause
  assert fault.__cause__ is not fault


def test_a_stage_that_is_gone_before_the_session_begins():
  texts = troubled.texts_of()

  async def main():
    async with troubled.ring_of_toys(3, standbys=(2,)) as (cluster, hosts):
      await rings.cancel(hosts["stage-2"].task)
      with pytest.raises(SessionFault, match="stage-2: connection"):
        async with troubled.coordinator(cluster, recover=False, hops=None):
          pass
      async with troubled.coordinator(cluster) as ring:
        assert ring.cluster.stages[2].name == "spare-0"
        await troubled.decode(ring, texts)

  rings.run(main)


def test_a_busy_ring_is_waited_for_and_nobody_is_replaced():
  texts = troubled.texts_of()

  async def main():
    async with troubled.ring_of_toys(3, standbys=(0,)) as (cluster, hosts):
      async with troubled.coordinator(cluster) as first:
        second = troubled.coordinator(cluster)
        opening = asyncio.create_task(second.__aenter__())
        await troubled.decode(first, texts)
        assert not opening.done()
      await opening
      assert second.cluster == cluster
      await troubled.decode(second, texts)
      assert hosts["spare-0"].stage.num_resets == 0
      await second.__aexit__(None, None, None)

  rings.run(main)


# At any moment. -------------------------------------------------------------


@pytest.mark.parametrize("index", [0, 2])
def test_a_fault_during_a_prompt(index):
  """Chunks of a long prompt are still on their way."""
  texts = [
    troubled.Text(21, prompt=60, count=12),
    troubled.Text(22, prompt=50, count=12),
  ]

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(index,)) as (cluster, hosts),
      troubled.coordinator(cluster) as ring,
    ):
      loop = asyncio.get_running_loop()
      prompts = []

      def hook(run):
        prompts.append(bool(run.committed.all()))
        if run.run_id == 3:
          loop.call_soon_threadsafe(hosts.kill, f"stage-{index}")
          time.sleep(0.05)

      hosts[f"stage-{index}"].stage.hook = hook
      result = await troubled.decode(ring, texts)
      assert all(prompts) and len(prompts) >= 4
      assert all(
        o.emitted_s[0] > result.faults[0][0] for o in _outcomes(result)
      )
      return [stage for _, stage, _ in result.faults]

  assert rings.run(main) == [f"stage-{index}"]


def _outcomes(result):
  return result.outcomes.values()


def test_a_request_that_comes_while_a_fault_is_being_survived():
  """It waits for the new session; the others go on where they stood."""
  first, second = troubled.texts_of()[1:]

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1,)) as (cluster, hosts),
      troubled.coordinator(cluster) as ring,
    ):
      broken = asyncio.Event()

      def hit():
        hosts.black_hole("stage-1")
        broken.set()

      random = random_lib.Random(4)
      driver = troubled.driver_of(
        troubled.policies(random)[0],
        troubled.drafter_of([first, second], random),
        on_emit=troubled.after_emitting(5, hit),
      )
      submitted = []
      post = ring.post

      def posting(what, *rest):
        if what == "submit":
          submitted.append((time.monotonic(), broken.is_set()))
        post(what, *rest)

      ring.post = posting
      start_s = time.monotonic()
      # Noticed after 0.6 s without an answer; the second comes before that.
      result = await ring.run(
        driver, [(0.0, first.request), (0.45, second.request)]
      )
      troubled.check(result, [first, second])
      ((fault_s, stage, _),) = result.faults
      assert stage == "stage-1"
      assert [was_broken for _, was_broken in submitted] == [False, True]
      assert submitted[1][0] - start_s < fault_s + 0.1
      assert result.outcomes[1].emitted_s[0] > fault_s

  rings.run(main)


@pytest.mark.parametrize("ending", ["answers", "fails", "hangs"])
def test_a_fault_while_a_draft_is_made(ending):
  """Its answer comes into the new session, and is of no use there."""
  texts = troubled.texts_of()
  release = threading.Event()

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1,)) as (cluster, hosts),
      troubled.coordinator(cluster, lap_deadline_s=1.0) as ring,
    ):
      loop = asyncio.get_running_loop()
      random = random_lib.Random(5)
      drafter = troubled.drafter_of(texts, random)
      calls = []

      def expand(*args):
        calls.append(hosts["spare-0"].stage.num_resets)
        if len(calls) == 6:
          loop.call_soon_threadsafe(hosts.kill, "stage-1")
          while not hosts["spare-0"].stage.num_resets:
            time.sleep(0.01)
          if ending == "fails":
            raise ArithmeticError("no such node")
          if ending == "hangs":
            release.wait(10)
        return drafter.expand(*args)

      driver = troubled.driver_of(
        troubled.policies(random)[0], drafter._replace(expand=expand)
      )
      work = ring.run(driver, [(0.0, text.request) for text in texts])
      try:
        match ending:
          case "answers":
            result = await work
            troubled.check(result, texts)
            assert [stage for _, stage, _ in result.faults] == ["stage-1"]
            assert len(calls) > 6
          case "fails":
            with pytest.raises(ArithmeticError, match="no such node"):
              await work
          case "hangs":
            with pytest.raises(SessionFault, match="drafter: no answer"):
              await work
      finally:
        release.set()

  rings.run(main)


def test_faults_while_the_stages_are_asked_what_they_did(monkeypatch):
  """The texts are all there: a fault then, and another, lose nothing."""
  texts = troubled.texts_of()
  original = _session.Session._send_trace
  victims = ["stage-0", "stage-1"]

  async def main():
    async with (
      troubled.ring_of_toys(3, standbys=(1, 0)) as (cluster, hosts),
      troubled.coordinator(cluster) as ring,
    ):

      async def send_trace(self):
        if self._me in victims[:1]:
          hosts.kill(victims.pop(0))
        else:
          await original(self)

      monkeypatch.setattr(_session.Session, "_send_trace", send_trace)
      result = await troubled.decode(ring, texts)
      again = await troubled.decode(ring, texts)
      assert again.faults == []
      lanes = {span.lane for span in again.spans}
      assert {"stage 0", "stage 1", "stage 2"} <= lanes
      return [stage for _, stage, _ in result.faults]

  assert rings.run(main) == ["stage-0", "stage-1"]
