# SPDX-License-Identifier: Apache-2.0
"""Small virtual rings whose times can be worked out by hand."""

import collections
import math

import numpy as np

from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.base import Drafter, Nodes
from wanspec_jax.links import StageProfile
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing

TEXT = [i * i % 7 % bench.VOCAB for i in range(200)]
WRONG = 50  # a token that no text has


class Tap:
  """A stage that notes what it is given and what it passes on.

  Attributes:
    heard: runs given, in order.
    sent: `(message, payload)` passed on, in order.
    num_resets: how often it was reset.
  """

  def __init__(self, stage):
    self.stage = stage
    self.heard = []
    self.sent = []
    self.num_resets = 0

  def reset(self):
    self.num_resets += 1
    self.stage.reset()

  def cancel(self, cancel):
    self.stage.cancel(cancel)

  def process(self, run, payload=None):
    self.heard.append(run)
    output = self.stage.process(run, payload)
    self.sent.append((output.message, output.payload))
    return output

  @property
  def num_used(self):
    return int(self.stage._slots.used.sum())


def taps(texts, num_stages, *, capacity=200, row_bytes=16):
  """Returns recorded stages with taps."""
  stages = [
    ReplayStage(capacity=capacity, row_bytes=row_bytes)
    for _ in range(num_stages - 1)
  ]
  return [
    Tap(s) for s in (*stages, ReplayStage(capacity=capacity, texts=texts))
  ]


def ring_of(stages, *, delays, times, bandwidth_bps=math.inf, **settings):
  """Returns a ring whose stages take `times`, whatever the rows."""
  return VirtualRing(
    stages=stages,
    hops=[
      wire.LinkShaper(delay_s=delay_s, bandwidth_bps=bandwidth_bps)
      for delay_s in delays
    ],
    profile=StageProfile(
      buckets=(64,),
      seconds=tuple((t,) for t in times),
      dtype="none",
      device="none",
    ),
    **settings,
  )


def driver_of(policy, drafter, *, capacity=200, max_rows=16, **settings):
  engine = sch.init(
    policy, bench.costs(max_rows), capacity=capacity, prefill_rows=4
  )
  return Driver(engine, drafter, **settings)


def burst(count, *, cancels=True):
  """Returns a policy that drafts once, then launches the root with its first
  node and every other node in a run of its own, all at the same moment."""

  def decide(spec, pipe, time_s):
    if spec.drafting:
      return None
    if spec.drafted_root is None and spec.ticket == 0:
      return sch.Grow((spec.anchor(spec.root),), count)
    ids = [node.id for node in spec.unlaunched()][:1]
    return sch.Send(tuple(ids)) if ids or not spec.root_launched else None

  return sch.Policy("burst", decide, max_in_flight=99, cancels=cancels)


def chain_drafter(*chains):
  """Returns a drafter that answers with these chains of tokens, one a call,
  and with nothing once they are used up."""
  left = collections.deque(chains)

  def expand(state, anchors, budget, levels=None):
    tokens = left.popleft() if left else ()
    return state, Nodes(
      np.asarray(tokens, np.int32),
      np.arange(len(tokens), dtype=np.int32),
      np.full(len(tokens), math.log(0.5), np.float32),
    )

  return Drafter(
    "scripted",
    lambda params, prompt, key: None,
    expand,
    lambda state, root: state,
    lambda state, tokens, features=None: state,
  )
