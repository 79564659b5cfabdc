# SPDX-License-Identifier: Apache-2.0
"""Socket rings of toy stages behind relays, with standbys, and their ends."""

import asyncio
import contextlib
import dataclasses
import itertools
import random as random_lib

from tests.schedules import bench
from tests.worlds import rings
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import (
  Driver,
  SocketRing,
  StageShape,
  Standby,
  ToyStage,
  toy_text,
)
from wanspec_jax.worlds._local import free_ports

SHAPE = StageShape(row_buckets=(8, 16), slot_buckets=(256,))
DEADLINE_S = 0.6
VOCAB = 6


class Toy:
  """What a server asks of a stage, of a `ToyStage`.

  Attributes:
    hook: called with every run, on the stage's thread.
    runs: `(epoch, run id, rows computed)` of every run.
    num_resets: sessions so far.
  """

  def __init__(self, *, index, num_stages, hook=None):
    self.shape = SHAPE
    self.num_traces = {}
    self.hook = hook
    self.runs = []
    self.num_resets = 0
    self._toy = ToyStage(
      capacity=SHAPE.capacity,
      is_first=index == 0,
      is_last=index == num_stages - 1,
      vocab=VOCAB,
    )

  def reset(self):
    self.num_resets += 1
    self._toy.reset()

  def cancel(self, cancel):
    self._toy.cancel(cancel)

  def process(self, run, payload=None):
    if self.hook is not None:
      self.hook(run)
    out = self._toy.process(run, payload)
    self.runs.append((run.epoch, run.run_id, out.num_rows))
    return out

  def measure(self, *, num_slots, repeats):
    del num_slots, repeats
    return dict.fromkeys(SHAPE.row_buckets, 1e-3)


class Relay:
  """Passes the bytes of one port on to another, until it does not."""

  def __init__(self, port, target):
    self._ports = port, target
    self._tasks = set()
    self._writers = []
    self.flows = []  # one per connection, in order

  async def __aenter__(self):
    self._server = await asyncio.start_server(
      self._serve, "127.0.0.1", self._ports[0]
    )
    return self

  async def __aexit__(self, *exc_info):
    self._server.close()
    for writer in self._writers:
      writer.transport.abort()
    for task in self._tasks:
      task.cancel()
    await asyncio.gather(*self._tasks, return_exceptions=True)

  async def _serve(self, reader, writer):
    task = asyncio.current_task()
    self._tasks.add(task)
    flow = asyncio.Event()
    flow.set()
    self.flows.append(flow)
    self._writers.append(writer)
    try:
      there, back = await asyncio.open_connection("127.0.0.1", self._ports[1])
      self._writers.append(back)
      await asyncio.gather(
        self._pump(reader, back, flow), self._pump(there, writer, flow)
      )
    except (OSError, asyncio.CancelledError):
      pass  # a task of the server's making: nobody else waits for it
    finally:
      writer.close()
      self._tasks.discard(task)

  async def _pump(self, reader, writer, flow):
    try:
      while data := await reader.read(2**16):
        await flow.wait()
        writer.write(data)
        await writer.drain()
      await flow.wait()
      writer.close()
    except OSError:  # one side broke off: so does the other
      await flow.wait()
      writer.transport.abort()

  def hold(self, index=None):
    """Holds back what the connections of now carry; all, or one of them."""
    for flow in self.flows if index is None else [self.flows[index]]:
      flow.clear()

  def release(self):
    """Lets everything pass again."""
    for flow in self.flows:
      flow.set()


@dataclasses.dataclass
class Host:
  """A stage or standby that is up."""

  server: object
  stage: Toy
  task: asyncio.Task
  relay: Relay

  @property
  def session(self):
    return self.server._current

  def channels(self):
    """Returns the channels of its session."""
    session = self.session
    channels = [session.before, session._next]
    if session._back.done() and not session._back.cancelled():
      channels.append(session._back.result())
    return [channel for channel in channels if channel is not None]


class Hosts(dict):
  """Hosts by name, with ways for them to fail."""

  def kill(self, name):
    """As SIGKILL does: connections break off, nobody listens any more."""
    host = self[name]
    if host.session is not None:
      for channel in host.channels():
        channel._writer.transport.abort()
    host.task.cancel()

  def shut_down(self, name):
    """It says goodbye."""
    self[name].task.cancel()

  def stop(self, name):
    """As SIGSTOP does: it neither reads nor writes; sockets stay open."""
    for channel in self[name].channels():
      for task in channel._tasks:
        task.cancel()
      self.frozen.append(channel)

  def black_hole(self, name):
    """All its links swallow what is sent over them, both ways."""
    host = self[name]
    host.relay.hold()
    after = host.session._there
    if after is not None:
      self[after.name].relay.hold(0)  # the stage before came first

  frozen: list


@contextlib.asynccontextmanager
async def ring_of_toys(num_stages, *, standbys=(), dead=(), **settings):
  """Yields `(cluster, hosts)`.

  Args:
    num_stages: `P`.
    standbys: stage of each standby; they are named `spare-0`, ….
    dead: standbys that nobody starts, by index.
    **settings: of the cluster.
  """
  ports = free_ports(2 * (num_stages + len(standbys)))
  outside, inside = ports[::2], ports[1::2]
  cluster = rings.cluster_of(
    num_stages,
    **{"shape": SHAPE, "peer_deadline_s": DEADLINE_S} | settings,
  )
  cluster = dataclasses.replace(
    cluster,
    stages=tuple(
      dataclasses.replace(stage, port=port)
      for stage, port in zip(cluster.stages, outside, strict=False)
    ),
    standbys=tuple(
      Standby(
        name=f"spare-{i}", host="127.0.0.1", port=port, stage=f"stage-{stage}"
      )
      for i, (stage, port) in enumerate(
        zip(standbys, outside[num_stages:], strict=True)
      )
    ),
  )
  hosts = Hosts()
  hosts.frozen = []
  async with contextlib.AsyncExitStack() as stack:
    for i in range(num_stages + len(standbys)):
      own, index = cluster, i
      if i >= num_stages:
        if i - num_stages in dead:
          continue
        own = cluster.standing_in(f"spare-{i - num_stages}")
        index = own.index(f"spare-{i - num_stages}")
      here = own.stages[index]
      relay = await stack.enter_async_context(Relay(here.port, inside[i]))
      own = dataclasses.replace(
        own,
        stages=tuple(
          dataclasses.replace(s, port=inside[i]) if s is here else s
          for s in own.stages
        ),
      )
      stage = Toy(index=index, num_stages=num_stages)
      server = rings.server_of(stage, own, index)
      (task,) = await stack.enter_async_context(rings.listening(server))
      hosts[here.name] = Host(server, stage, task, relay)
    try:
      yield cluster, hosts
    finally:
      for channel in hosts.frozen:  # nobody waits for them
        channel._lose("the test is over")


class Text:
  """A request and what plain decoding makes of it, computed without a ring.

  Args:
    seed: of the request; each in a session needs its own.
    prompt: its tokens, or how many.
    count: tokens to draw.
    temperature: of the target.
    num_stages: the toy's law depends on the cuts.
  """

  def __init__(
    self, seed, *, prompt=5, count=40, temperature=0.8, num_stages=3
  ):
    self.prompt = tuple((seed + i * i) % VOCAB for i in range(prompt))
    self.sampling = Sampling(temperature=temperature, seed=seed)
    # Some more than is asked for: drafts run ahead.
    more = toy_text(
      self.prompt,
      self.sampling,
      count + 40,
      num_stages=num_stages,
      vocab=VOCAB,
    )
    self.tokens = more[:count]
    self.whole = (*self.prompt, *more)

  @property
  def request(self):
    return sch.Request(
      prompt=self.prompt,
      max_new_tokens=len(self.tokens),
      sampling=self.sampling,
    )


def texts_of(num_stages=3, **settings):
  """Returns three texts: greedy, and sampled at 0.8 and 1.1."""
  return [
    Text(seed, temperature=t, num_stages=num_stages, **settings)
    for seed, t in ((11, 0.0), (12, 0.8), (13, 1.1))
  ]


def costs_of(num_stages):
  """Returns the costs of a ring whose every hop takes 2 ms."""
  return sch.Costs(
    delay_s=(0.002,) * (num_stages + 1),
    busy_s=lambda rows: (1e-4,) * (2 * num_stages + 1),
    max_rows=SHAPE.max_rows,
  )


def hops_of(num_stages):
  return [wire.LinkShaper(delay_s=0.002)] * (num_stages + 1)


def drafter_of(texts, random, *, right=0.7):
  """Returns a drafter of random trees that knows the texts, more or less."""
  return bench.drafter_of(
    {text.sampling.seed: text.whole for text in texts},
    right=right,
    size=lambda budget: min(budget, 4),
    random=random,
    vocab=VOCAB,
  )


def driver_of(policy, drafter, *, num_stages=3, **settings):
  """Returns a fresh engine and drafter."""
  engine = sch.init(
    policy,
    costs_of(num_stages),
    capacity=SHAPE.capacity,
    prefill_rows=SHAPE.row_buckets[0],
  )
  return Driver(engine, drafter, **settings)


def coordinator(cluster, **settings):
  """Returns a ring to open, links emulated, which recovers from faults."""
  defaults = {
    "model_hash": rings.HASH,
    "hops": hops_of(cluster.num_stages),
    "lap_deadline_s": 5.0,
    "recover": True,
  }
  return SocketRing(cluster, **defaults | settings)


def after_emitting(count, act, *, sequence=0):
  """Returns an `on_emit` that acts once, when so many tokens are out."""
  emitted = itertools.count(1)

  def on_emit(who, tokens):
    if who == sequence and count in [next(emitted) for _ in tokens]:
      act()

  return on_emit


def check(result, texts):
  """Asserts that all texts and the reasons of their ends are as plain."""
  for i, text in enumerate(texts):
    outcome = result.outcomes[i]
    assert list(outcome.tokens) == list(text.tokens), f"text {i}"
    assert outcome.reason == "length"


def policies(random):
  """Returns policies that have several runs in flight."""
  return (
    bench.pipelined(random, max_in_flight=4, max_nodes=6),
    sch.priced(),
    sch.continuous(),
  )


async def decode(ring, texts, *, seed=0, policy=0, on_emit=None, **settings):
  """Returns the result of all texts at once, and asserts that they are right.

  Args:
    ring: open.
    texts: to decode.
    seed: of the drafter and the policy.
    policy: which of `policies`.
    on_emit: of the driver.
    **settings: of the run.
  """
  random = random_lib.Random(seed)
  driver = driver_of(
    policies(random)[policy],
    drafter_of(texts, random),
    num_stages=ring.cluster.num_stages,
    on_emit=on_emit,
  )
  result = await ring.run(
    driver, [(0.0, text.request) for text in texts], **settings
  )
  check(result, texts)
  return result
