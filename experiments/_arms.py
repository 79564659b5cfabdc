# SPDX-License-Identifier: Apache-2.0
"""From settings to what an engine needs: drafter, policy, requests, costs."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

import drafters
import trees
from wanspec_jax import codecs, models, wire
from wanspec_jax import schedules as sch
from wanspec_jax.base import Drafter
from wanspec_jax.links import Ring, StageProfile, hop_bytes_model
from wanspec_jax.messages import Sampling
from wanspec_jax.worlds import Cluster, Driver

# What our frames carry besides hidden states, rounded up from golden frames;
# `tests/experiments/test_arms.py` holds the model to the encoder.
_IDS_BYTES_PER_NODE = 5.0
_HEADER_BYTES = 12.0
_VERDICT_BYTES = 8.0

DRAFTERS = ("none", "suffix", "suffix-chain", "synthetic")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Links:
  """The emulated WAN: P + 1 equal hops.

  Attributes:
    lap_ms: sum of the hops' one-way delays.
    mbps: bandwidth of every hop, megabits per second.
    jitter_ms: half-normal jitter of every frame on every hop.
    jitter_seed: addresses the jitter.
  """

  lap_ms: float = 200.0
  mbps: float = 100.0
  jitter_ms: float = 0.0
  jitter_seed: int = 0

  def __post_init__(self):
    for field, holds, rule in (
      ("lap_ms", self.lap_ms >= 0, "must be >= 0"),
      ("mbps", self.mbps > 0, "must be > 0"),
      ("jitter_ms", self.jitter_ms >= 0, "must be >= 0"),
    ):
      if not holds:
        raise ValueError(f"links.{field} = {getattr(self, field)}: {rule}")

  def ring(self, num_stages: int) -> Ring:
    """Returns the ring's costs."""
    return Ring.uniform(
      num_stages=num_stages,
      lap_s=self.lap_ms / 1e3,
      bandwidth_bps=self.mbps * 1e6,
      jitter_s=self.jitter_ms / 1e3,
    )

  def hops(self, num_stages: int) -> list[wire.LinkShaper]:
    """Returns the ring's shapers."""
    return [
      wire.LinkShaper(
        delay_s=self.lap_ms / 1e3 / (num_stages + 1),
        bandwidth_bps=self.mbps * 1e6,
        jitter_s=self.jitter_ms / 1e3,
        seed=self.jitter_seed * (num_stages + 1) + hop,
      )
      for hop in range(num_stages + 1)
    ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Speculate:
  """What is drafted and how much of it is launched.

  Attributes:
    drafter: `suffix` (tree), `suffix-chain`, `synthetic` (the recorded plain
      output, accepted with `acceptance`) or `none`.
    acceptance: of `synthetic`, per node.
    max_nodes: drafted nodes per lap, at most.
    size: `sized` for the size with the best expected tokens per second on this
      ring, or a number of nodes.
  """

  drafter: str = "suffix"
  acceptance: float = 0.8
  max_nodes: int = 63
  size: str = "sized"

  def __post_init__(self):
    for field, holds, rule in (
      ("drafter", self.drafter in DRAFTERS, f"must be one of {DRAFTERS}"),
      ("acceptance", 0 <= self.acceptance <= 1, "must lie in [0, 1]"),
      ("max_nodes", self.max_nodes >= 0, "must be >= 0"),
      (
        "size",
        self.size == "sized" or self.size.isdecimal(),
        "must be 'sized' or a number of nodes",
      ),
    ):
      if not holds:
        raise ValueError(
          f"speculate.{field} = {getattr(self, field)!r}: {rule}"
        )


def make_drafter(
  settings: Speculate,
  *,
  eos_ids: frozenset[int],
  vocab_size: int,
  recorded: Sequence[int] | None = None,
) -> Drafter:
  """Returns the drafter that the settings name.

  Args:
    settings: see `Speculate`.
    eos_ids: tokens that end a text: drafts stop there.
    vocab_size: of the target.
    recorded: plain output of the one request, for `synthetic`.
  """
  match settings.drafter:
    case "none":
      return drafters.none()
    case "suffix":
      return drafters.suffix(stop_tokens=tuple(sorted(eos_ids)))
    case "suffix-chain":
      return drafters.suffix(shape="chain", stop_tokens=tuple(sorted(eos_ids)))
  if recorded is None:
    raise ValueError(
      "speculate.drafter = 'synthetic': needs the plain output of each prompt; "
      "run with plain decoding on and --concurrent 1"
    )
  return drafters.synthetic(
    recorded, acceptance=settings.acceptance, vocab_size=vocab_size
  )


def make_size(
  settings: Speculate,
) -> Callable[[np.ndarray, Callable[[int], float]], int]:
  """Returns how many candidates `lockstep` launches."""
  if settings.size == "sized":
    return lambda gains, lap_s: trees.best_prefix(gains, lap_s).num_nodes
  count = int(settings.size)
  return lambda gains, lap_s: min(count, len(gains))


def ring_costs(
  cluster: Cluster, links: Links, profile: StageProfile
) -> sch.Costs:
  """Returns what runs and drafts cost on the ring."""
  width = models.load_config(cluster.model).hidden_size
  return sch.Costs.of_ring(
    links.ring(cluster.num_stages),
    profile,
    hop_bytes_model(
      num_stages=cluster.num_stages,
      ids_bytes_per_node=_IDS_BYTES_PER_NODE,
      row_bytes=codecs.parse(cluster.codec).row_bytes(width),
      header_bytes=_HEADER_BYTES,
      verdict_bytes=_VERDICT_BYTES,
    ),
    max_rows=cluster.shape.max_rows,
    draft=sch.DraftCosts(per_node_s=profile.draft_s_per_node),
  )


def profile_of(
  cluster: Cluster,
  seconds: Sequence[Sequence[float]],
  spacing_s: Sequence[float] = (),
) -> StageProfile:
  """Returns measured stage times, and times between runs, as a profile."""
  device = jax.devices()[0]
  return StageProfile(
    buckets=cluster.shape.row_buckets,
    seconds=tuple(tuple(times) for times in seconds),
    dtype=cluster.dtype,
    device=f"{device.platform} {device.device_kind}",
    draft_s_per_node=DRAFT_S_PER_NODE,
    spacing_s=tuple(spacing_s),
  )


# `suffix` makes 64 nodes in 1 to 1.7 ms on a core of docs/results.md.
DRAFT_S_PER_NODE = 2.5e-5


SCHEDULES: dict[str, Callable[[], sch.Policy]] = {
  "priced": sch.priced,
  "continuous": sch.continuous,
  "in_pipe": sch.in_pipe,
  "segments": sch.segments,
  "hedged": sch.hedged,
  "branched": sch.branched,
  "rate_matched": sch.rate_matched,
}


def make_driver(
  *,
  cluster: Cluster,
  costs: sch.Costs,
  settings: Speculate,
  drafter: Drafter,
  schedule: str = "lockstep",
  calibration: sch.Calibration | None = None,
  on_emit: Callable[[int, tuple[int, ...]], None] | None = None,
) -> Driver:
  """Returns an engine with its policy, ready for requests.

  Args:
    cluster: the ring.
    costs: of the ring.
    settings: what is drafted; sizes count for lockstep alone.
    drafter: see `make_drafter`.
    schedule: name of the policy; without a drafter it is plain decoding.
    calibration: what is known of the drafter already.
    on_emit: see `Driver`.
  """
  shape = cluster.shape
  if schedule == "lockstep" or drafter.name == "none":
    max_nodes = 0 if drafter.name == "none" else settings.max_nodes
    policy = sch.lockstep(make_size(settings), max_nodes=max_nodes)
  else:
    policy = SCHEDULES[schedule]()
  engine = sch.init(
    policy,
    costs,
    capacity=shape.capacity,
    prefill_rows=shape.max_rows,
    calibration=calibration,
  )
  return Driver(engine, drafter, on_emit=on_emit)


def make_request(
  prompt: Sequence[int],
  *,
  max_new_tokens: int,
  sampling: Sampling,
  tokenizer: Any,
  stop_strings: tuple[str, ...] = (),
) -> sch.Request:
  """Returns a request that ends at the model's end-of-text tokens."""
  return sch.Request(
    prompt=tuple(prompt),
    max_new_tokens=max_new_tokens,
    sampling=sampling,
    stop=sch.Stop(
      ids=tokenizer.eos_ids,
      strings=stop_strings,
      text_of=tokenizer.decode if stop_strings else None,
    ),
    log_probs=True,
  )
