# SPDX-License-Identifier: Apache-2.0
"""What the wan4 study runs: conditions, arms, and a virtual world to choose in.

The virtual world replays what plain decoding of the real model gave, at the
stage times measured on this ring: hundreds of settings in seconds, of which the
best are then run over sockets.
"""

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence

from experiments import _arms
from wanspec_jax import codecs, models
from wanspec_jax import schedules as sch
from wanspec_jax.links import StageProfile
from wanspec_jax.worlds import (
  Cluster,
  Driver,
  Outcome,
  ReplayStage,
  SessionResult,
  VirtualRing,
)

SIZES = (1, 2, 4, 8, 16, 32, 64)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Condition:
  """What one comparison holds fixed.

  Attributes:
    name: prefix of its figures.
    drafter: `suffix` or `synthetic`.
    mbps: of every hop.
    level_s: charged per draft level.
    target: least ratio of `priced` to the best lockstep.
  """

  name: str
  drafter: str
  mbps: float
  level_s: float
  target: float

  @property
  def draft(self) -> sch.DraftCosts:
    """Costs of an answer; the drafters here cost next to nothing themselves."""
    return sch.DraftCosts(per_level_s=self.level_s)


CONDITIONS = (
  Condition(
    name="suffix", drafter="suffix", mbps=100, level_s=0.0, target=0.98
  ),
  Condition(
    name="synthetic", drafter="synthetic", mbps=100, level_s=0.0, target=0.98
  ),
  Condition(
    name="costly_suffix", drafter="suffix", mbps=100, level_s=0.02, target=1.25
  ),
  Condition(
    name="costly_synthetic",
    drafter="synthetic",
    mbps=100,
    level_s=0.02,
    target=1.25,
  ),
  Condition(
    name="slow_suffix", drafter="suffix", mbps=5, level_s=0.0, target=1.15
  ),
  Condition(
    name="slow_synthetic", drafter="synthetic", mbps=5, level_s=0.0, target=1.15
  ),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Measured:
  """Rates of one arm of one condition.

  Attributes:
    tokens_per_s: after the first block, over all prompts.
    misses_per_token: tokens that no launched node bore ÷ tokens, likewise.
    smallest_lap_s: of a run of one row on this ring, nothing else in flight.
  """

  tokens_per_s: float
  misses_per_token: float
  smallest_lap_s: float

  @property
  def bound(self) -> float:
    """Tokens/s if only misses cost time, and each of them the smallest lap."""
    if not self.misses_per_token:
      return math.inf
    return 1 / (self.smallest_lap_s * self.misses_per_token)


def measured(outcomes: Sequence[Outcome], smallest_lap_s: float) -> Measured:
  """Returns an arm's rates; what the prompt's lap brought is left out."""
  tokens, misses, seconds = 0, 0, 0.0
  for outcome in outcomes:
    rest = outcome.rounds[1:]
    tokens += sum(r.emitted for r in rest)
    misses += sum(r.emitted - r.accepted for r in rest)
    seconds += outcome.decode_s
  return Measured(
    tokens_per_s=tokens / seconds if seconds else math.nan,
    misses_per_token=misses / tokens if tokens else math.nan,
    smallest_lap_s=smallest_lap_s,
  )


def median_lap_s(outcomes: Sequence[Outcome]) -> float:
  """Returns the median time between two tokens of plain decoding."""
  return statistics.median(
    b - a
    for o in outcomes
    for a, b in zip(o.emitted_s, o.emitted_s[1:], strict=False)
  )


def costs_of(
  cluster: Cluster, condition: Condition, lap_ms: float, profile: StageProfile
) -> sch.Costs:
  """Returns what runs and drafts cost under a condition."""
  links = _arms.Links(lap_ms=lap_ms, mbps=condition.mbps)
  costs = _arms.ring_costs(cluster, links, profile)
  return dataclasses.replace(costs, draft=condition.draft)


class Replay:
  """The ring in virtual time, for texts that plain decoding has recorded.

  Args:
    cluster: the ring.
    profile_of: `(request) -> StageProfile`, the stage times it meets.
    lap_ms: summed one-way delays.
    requests: one per prompt.
    texts: what plain decoding made of each.
    drafter_of: `(condition, text) -> Drafter`.
  """

  def __init__(
    self,
    cluster: Cluster,
    profile_of: Callable[[sch.Request], StageProfile],
    lap_ms: float,
    requests: Sequence[sch.Request],
    texts: Sequence[Sequence[int]],
    drafter_of: Callable,
  ):
    self._cluster = cluster
    self._profile_of = profile_of
    self._lap_ms = lap_ms
    self._requests = requests
    self._texts = texts
    self._drafter_of = drafter_of
    width = models.load_config(cluster.model).hidden_size
    self._row_bytes = codecs.parse(cluster.codec).row_bytes(width)

  def run(self, condition: Condition, policy: sch.Policy) -> list[Outcome]:
    """Returns the outcomes of all prompts, one after the other."""
    calibration = sch.Calibration()
    outcomes = []
    for request, text in zip(self._requests, self._texts, strict=True):
      profile = self._profile_of(request)
      costs = costs_of(self._cluster, condition, self._lap_ms, profile)
      driver = Driver(
        sch.init(
          policy,
          costs,
          capacity=self._cluster.shape.capacity,
          prefill_rows=self._cluster.shape.max_rows,
          calibration=calibration,
        ),
        self._drafter_of(condition, text),
      )
      outcomes.append(self._decode(condition, driver, request, text))
    return outcomes

  def _decode(
    self,
    condition: Condition,
    driver: Driver,
    request: sch.Request,
    text: Sequence[int],
  ) -> Outcome:
    num = self._cluster.num_stages
    links = _arms.Links(lap_ms=self._lap_ms, mbps=condition.mbps)
    # Behind the end of the text any token does: nothing there is emitted.
    whole = [*request.prompt, *text, *[0] * 256]
    stages = [
      ReplayStage(
        capacity=self._cluster.shape.capacity,
        row_bytes=math.ceil(self._row_bytes),
      )
      for _ in range(num - 1)
    ]
    stages.append(
      ReplayStage(capacity=self._cluster.shape.capacity, texts={0: whole})
    )
    ring = VirtualRing(
      stages=stages,
      hops=links.hops(num),
      profile=self._profile_of(request),
      draft=condition.draft,
      trace=False,
    )
    # The text itself says where it ends: its budget is its length.
    request = dataclasses.replace(request, max_new_tokens=len(text))
    result: SessionResult = ring.run(driver, [(0.0, request)])
    return result.outcomes[0]
