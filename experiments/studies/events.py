# SPDX-License-Identifier: Apache-2.0
"""Speed of the virtual world: events per second of wall clock.

One sequence on a ring of 64 stages without books (`PassStage`), a tail that
replays a text, and a policy that keeps as many nodes in flight as are asked
for, so every run passes every stage. An event is anything that the virtual
clock handles: a frame's arrival, the end of a stage's work, a draft, a cancel.
"""

import dataclasses
import itertools
import pathlib
import time
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

import drafters
from experiments._rundir import write_json
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import Driver, PassStage, ReplayStage, VirtualRing

_ROW_BYTES = 8192
_SLOTS = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
  """The study.

  Attributes:
    stages: of the ring.
    nodes: in flight.
    per_run: nodes per run.
    tokens: of the text.
    repeats: runs.
    quick: one repeat, a shorter text.
    out: run directory.
  """

  stages: int = 64
  nodes: int = 1024
  per_run: int = 8
  tokens: int = 192
  repeats: int = 5
  quick: bool = False
  out: pathlib.Path | None = None


def run(config: Config) -> dict[str, Any]:
  assert config.out is not None
  repeats = 1 if config.quick else config.repeats
  tokens = min(48, config.tokens) if config.quick else config.tokens
  rows = [_measure(config, tokens, seed) for seed in range(repeats)]
  rates = [row["events"] / row["seconds"] for row in rows]
  write_json(config.out / "events.json", rows)
  figure, axes = plt.subplots(figsize=(5, 3))
  axes.plot(range(1, repeats + 1), rates, "o-")
  axes.set(xlabel="repeat", ylabel="events per second (wall clock)", ylim=0)
  figure.tight_layout()
  figure.savefig(config.out / "events.png", dpi=120)
  plt.close(figure)
  return {
    "events_per_s": float(np.median(rates)),
    "stages": config.stages,
    "nodes": config.nodes,
    "most_in_flight": max(row["most_in_flight"] for row in rows),
  }


def _measure(config: Config, tokens: int, seed: int) -> dict[str, Any]:
  most = 0

  def decide(
    spec: sch.Speculation, pipe: sch.Pipe, time_s: float
  ) -> sch.Answer:
    nonlocal most
    del pipe, time_s
    most = max(most, spec.num_launched)
    room = min(config.nodes - spec.num_launched, spec.max_new_nodes)
    if not spec.drafting and spec.drafted_root != spec.root:
      return sch.Grow((spec.anchor(spec.root),), 2 * config.nodes)
    waiting = (
      n.id for n in spec.nodes.values() if n.run is None and n.id != spec.root
    )
    ids = list(itertools.islice(waiting, max(0, min(room, config.per_run))))
    if ids or not spec.root_launched:
      return sch.Send(tuple(ids))
    return None

  rng = np.random.default_rng(seed)
  text = rng.integers(0, 1000, tokens + 200).tolist()
  num = config.stages
  profile = StageProfile(
    buckets=(8, 64),
    seconds=((0.001, 0.004),) * num,
    dtype="none",
    device="modelled",
  )
  costs = sch.Costs.of_ring(
    Ring.uniform(num_stages=num, lap_s=0.5, bandwidth_bps=1e9),
    profile,
    hop_bytes_model(num_stages=num, ids_bytes_per_node=4, row_bytes=_ROW_BYTES),
    max_rows=64,
  )
  hop = wire.LinkShaper(delay_s=0.5 / (num + 1), bandwidth_bps=1e9)
  ring = VirtualRing(
    stages=[
      *(PassStage(_ROW_BYTES) for _ in range(num - 1)),
      ReplayStage(capacity=_SLOTS, texts={0: text}),
    ],
    hops=[hop] * (num + 1),
    profile=profile,
    trace=False,
  )
  drafter = drafters.synthetic(
    text[4:],
    acceptance=[0.6, 0.2, 0.1],
    vocab_size=1000,
    seed=seed,
  )
  engine = sch.init(
    sch.Policy("flood", decide, 4096), costs, capacity=_SLOTS, prefill_rows=8
  )
  request = sch.Request(
    prompt=tuple(text[:4]), max_new_tokens=tokens, sampling=Sampling()
  )
  start_s = time.perf_counter()
  result = ring.run(Driver(engine, drafter), [(0.0, request)])
  seconds = time.perf_counter() - start_s
  if result.outcomes[0].tokens != text[4 : 4 + tokens]:
    raise RuntimeError("the text differs from the target's")
  return {
    "events": result.num_events,
    "seconds": seconds,
    "most_in_flight": most,
  }
