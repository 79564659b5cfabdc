# SPDX-License-Identifier: Apache-2.0
"""What a coordinator sends is not believed before it is checked."""

import dataclasses
import re
import time

import pytest

from tests.worlds import rings
from wanspec_jax import wire
from wanspec_jax.messages import Commit, Returned
from wanspec_jax.wire import Kind

# What the coordinator sends is not believed either. ---------------------------


def _commit_of_stranger():
  return dataclasses.replace(
    rings.chain_run(), commits=(Commit(sequence=4, root=2),)
  )


@pytest.mark.parametrize(
  ("frames", "stage", "cause"),
  [
    (
      [wire.encode_run(rings.chain_run(ids=[6], parents=[5]))],
      "stage-0",
      "KeyError.*node 5 of sequence 0",
    ),
    (
      [
        wire.encode_run(
          rings.chain_run(
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
      [wire.encode_run(rings.chain_run(opens=False))],
      "stage-1",
      "ValueError.*sequence 0 is not open",
    ),
    (
      [wire.encode_run(_commit_of_stranger())],
      "stage-0",
      "KeyError.*node 2 of sequence 4",
    ),
    (
      [wire.encode_run(rings.chain_run(num_rows=9))],
      "stage-0",
      "refused a run of coordinator: segment of 9 rows",
    ),
    (
      [wire.encode_run(rings.chain_run(), b"hidden")],
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
      [rings.control(op="format")],
      "stage-0",
      "control operation 'format': unknown",
    ),
    ([rings.control()], "stage-0", "control operation None"),
    (
      [wire.encode_frame(Kind.CONTROL, b"\xc1")],
      "coordinator",
      "sent a bad frame: CONTROL",
    ),
    (
      [rings.control(op="measure", num_slots=65, repeats=1, seconds=[])],
      "stage-0",
      "refused num_slots = 65",
    ),
    (
      [rings.control(op="measure", num_slots=64, repeats=10**9, seconds=[])],
      "stage-0",
      "refused repeats = 1000000000",
    ),
    (
      [rings.control(op="measure", num_slots=64, repeats=True, seconds=[])],
      "stage-0",
      "refused repeats = True",
    ),
    (
      [rings.control(op="measure", num_slots=64, repeats=1, seconds="x")],
      "stage-0",
      "refused seconds",
    ),
    ([rings.control(op="measure")], "stage-0", "refused num_slots = None"),
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
      await channel.send(wire.encode_run(rings.chain_run()))
      assert await rings.fault_on(channel) == (
        "stage-0",
        "refused RUN: came before 'ready'",
      )

  rings.run(main)
