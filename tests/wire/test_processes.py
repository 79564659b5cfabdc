# SPDX-License-Identifier: Apache-2.0
"""A peer in a process of its own, stopped or killed."""

import asyncio
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from tests.wire.examples import CHAIN
from wanspec_jax import wire

REPOSITORY = pathlib.Path(__file__).parents[2]
RUN = wire.encode_run(CHAIN, bytes(200))
OPTIONS = wire.ChannelOptions(peer_deadline_s=0.8, ping_interval_s=0.2)
CHILD = """
import asyncio
from wanspec_jax import wire

async def handler(channel):
  await wire.answer(channel, lambda hello: None)
  while True:
    await channel.recv()
    await channel.send(wire.encode_control(wire.Kind.CONTROL, {}))

async def main():
  listener = await wire.listen(handler)
  print(listener.port, flush=True)
  await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.parametrize(
  ("sent_signal", "cause"),
  [
    (signal.SIGSTOP, "no answer for 0.8 s"),
    (signal.SIGKILL, "connection (closed|lost)"),
  ],
)
def test_stopped_and_killed_processes_are_told_apart(sent_signal, cause):
  async def main(process, port):
    async with await wire.connect(
      "127.0.0.1", port, peer="stage-1", options=OPTIONS
    ) as client:
      await wire.offer(client, {"name": "coordinator"})
      await client.send(RUN)
      await client.recv(deadline_s=5)
      os.kill(process.pid, sent_signal)
      start_s = time.monotonic()
      with pytest.raises(wire.PeerLost, match=f"stage-1: lost: {cause}"):
        await client.recv(deadline_s=10)
      assert time.monotonic() - start_s < 5.0

  with subprocess.Popen(
    [sys.executable, "-c", CHILD],
    cwd=REPOSITORY,
    stdout=subprocess.PIPE,
    text=True,
  ) as process:
    try:
      asyncio.run(main(process, int(process.stdout.readline())))
    finally:
      process.kill()
