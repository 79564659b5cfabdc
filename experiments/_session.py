# SPDX-License-Identifier: Apache-2.0
"""A ring that is brought up, compiled and profiled, for studies to use."""

import asyncio
import contextlib
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import rich.console

from experiments import _arms, _local, _setup
from experiments._settings import Decode
from wanspec_jax import models
from wanspec_jax import schedules as sch
from wanspec_jax.links import StageProfile, StageProfiles
from wanspec_jax.worlds import (
  Cluster,
  Driver,
  SessionResult,
  SocketRing,
  Stage,
  StageShape,
  VirtualRing,
  load_stage,
  local_cluster,
  verifier_of,
)

_PROFILE_REPEATS = 5  # timed calls per bucket, virtual world
_PROFILE_LAPS = 3  # laps per bucket, over sockets
_PROFILE_STREAM = 8  # runs per bucket, one behind the other
_DEFAULT_DTYPE = "bfloat16"
_DEFAULT_BUCKETS = (8, 16, 32, 64)


class Session:
  """A ring that is up, with what all arms share.

  Attributes:
    settings: the effective configuration.
    cluster: the ring.
    tokenizer: of the model.
    vocab_size: of the model.
    profiles: stage times by cache size.
    directory: run directory.
  """

  def __init__(
    self,
    settings: Decode,
    cluster: Cluster,
    world: Any,
    profiles: StageProfiles,
    directory: pathlib.Path,
  ):
    self.settings = settings
    self.cluster = cluster
    self.profiles = profiles
    self.directory = directory
    self.tokenizer = models.load_tokenizer(cluster.model)
    self.vocab_size = models.load_config(cluster.model).vocab_size
    self._world = world
    # One per drafter: what verdicts on one prompt taught serves the next.
    self._calibrations: dict[str, sch.Calibration] = {}

  def profile_for(self, requests: Sequence[sch.Request]) -> StageProfile:
    """Returns the stage times at the cache size that requests decoded at once
    have half-way, with a full run in flight."""
    slots = sum(len(r.prompt) + r.max_new_tokens // 2 for r in requests)
    return self.profiles.at(slots + self.cluster.shape.max_rows)

  async def run(
    self,
    driver: Driver,
    requests: Sequence[sch.Request],
    *,
    draft: sch.DraftCosts | None = None,
  ) -> SessionResult:
    """Runs requests that come all at once.

    Args:
      driver: a fresh one.
      requests: in the order of their sequence numbers.
      draft: what drafts are charged, over sockets; a virtual ring has its own.
    """
    timed = [(0.0, request) for request in requests]
    if isinstance(self._world, SocketRing):
      return await self._world.run(driver, timed, draft=draft)
    ring = self._world(self.profile_for(requests))
    return await asyncio.to_thread(ring.run, driver, timed)

  def driver(
    self,
    speculate: _arms.Speculate,
    requests: Sequence[sch.Request],
    *,
    recorded: Sequence[int] | None = None,
    on_emit=None,
  ) -> Driver:
    """Returns a fresh engine and drafter for requests that come at once."""
    return _arms.make_driver(
      cluster=self.cluster,
      costs=_arms.ring_costs(
        self.cluster, self.settings.links, self.profile_for(requests)
      ),
      schedule=self.settings.schedule,
      calibration=self._calibrations.setdefault(
        speculate.drafter, sch.Calibration()
      ),
      settings=speculate,
      drafter=_arms.make_drafter(
        speculate,
        eos_ids=self.tokenizer.eos_ids,
        vocab_size=self.vocab_size,
        recorded=recorded,
      ),
      on_emit=on_emit,
    )


@contextlib.asynccontextmanager
async def open_session(
  settings: Decode,
  directory: pathlib.Path,
  *,
  max_length: int,
  profile_length: int | None = None,
):
  """Brings a ring up, profiles it, and yields a `Session`.

  Args:
    settings: what ring.
    directory: gets the cluster file, logs and the profile.
    max_length: longest prompt plus budget of all that are decoded at once;
      decides which cache sizes are compiled beforehand.
    profile_length: the longest of those that are decoded by themselves: stages
      are timed at the cache sizes up to there; `max_length` by default.

  Raises:
    ValueError: the ring's verifier cannot sample as the settings say.
    SessionFault: naming the stage that failed, and why.
  """
  say = rich.console.Console(stderr=True, highlight=False).print
  async with contextlib.AsyncExitStack() as stack:
    if settings.cluster is not None:
      cluster = Cluster.from_toml(settings.cluster)
    else:
      cluster = make_cluster(settings)
    # A stage that refused it would count as one that failed.
    verifier_of(cluster).check(settings.sampling)
    shape = cluster.shape
    hops = settings.links.hops(cluster.num_stages)
    spare = settings.speculate.max_nodes
    if settings.schedule != "lockstep":  # several runs hold nodes at once
      spare *= 4
    sizes = sizes_needed(shape, max_length + spare)
    timed = sizes_needed(shape, (profile_length or max_length) + shape.max_rows)
    profiles = read_profiles(settings)
    if settings.world == "virtual":
      stages = [load_stage(cluster, i) for i in range(cluster.num_stages)]
      profiles = profiles or _measure(cluster, stages, timed)

      def world(profile: StageProfile) -> VirtualRing:
        return VirtualRing(stages=stages, hops=hops, profile=profile)

      yield Session(settings, cluster, world, profiles, directory)
      return
    started_s = time.monotonic()
    if settings.cluster is None:
      stack.enter_context(_local.spawn(cluster, directory))
      say(
        f"{cluster.num_stages} stages up in "
        f"{time.monotonic() - started_s:.1f} s"
      )
    ring = await stack.enter_async_context(
      SocketRing(
        cluster,
        model_hash=models.model_hash(cluster.model),
        hops=hops if settings.emulate else None,
        recover=bool(cluster.standbys),
      )
    )
    started_s = time.monotonic()
    for num_slots in sizes:
      await ring.measure(num_slots=num_slots, repeats=0)
    if profiles is None:
      profiles = StageProfiles(
        tuple(timed),
        tuple(
          [
            _arms.profile_of(
              cluster,
              await ring.profile(num_slots=size, repeats=_PROFILE_LAPS),
              await ring.spacing(num_slots=size, repeats=_PROFILE_STREAM),
            )
            for size in timed
          ]
        ),
      )
    say(f"compiled and profiled in {time.monotonic() - started_s:.1f} s")
    (directory / "profile.json").write_text(profiles.to_json())
    yield Session(settings, cluster, ring, profiles, directory)


def make_cluster(settings: Decode) -> Cluster:
  """Returns the loopback cluster that the settings ask for."""
  ring = settings.ring
  chosen = _setup.read_choice(ring.model)
  dtype = ring.dtype
  if dtype == "auto":
    dtype = chosen.get("dtype", _DEFAULT_DTYPE)
  buckets = ring.row_buckets or tuple(
    chosen.get("row_buckets", _DEFAULT_BUCKETS)
  )
  return local_cluster(
    num_stages=ring.stages,
    model=ring.model,
    dtype=dtype,
    codec=ring.codec,
    shape=StageShape(
      row_buckets=tuple(buckets),
      slot_buckets=ring.slot_buckets,
      cache_dtype=ring.cache_dtype,
      exact=ring.exact,
    ),
    verifier=ring.verifier,
    rollback=ring.rollback,
    peer_deadline_s=ring.peer_deadline_s,
    standbys=ring.standbys,
  )


def sizes_needed(shape: StageShape, max_slots: int) -> list[int]:
  """Returns the cache sizes that a text of so many slots passes through."""
  needed = []
  for bucket in shape.slot_buckets:
    needed.append(bucket)
    if bucket >= max_slots:
      break
  return needed


def read_profiles(settings: Decode) -> StageProfiles | None:
  if settings.profile is None:
    return None
  return StageProfiles.from_json(settings.profile.read_text())


def _measure(
  cluster: Cluster, stages: Sequence[Stage], sizes: Sequence[int]
) -> StageProfiles:
  """Returns the times of stages of this process, each by itself."""
  profiles = []
  for size in sizes:
    times = [
      stage.measure(num_slots=size, repeats=_PROFILE_REPEATS)
      for stage in stages
    ]
    buckets = cluster.shape.row_buckets
    profiles.append(
      _arms.profile_of(cluster, [[t[b] for b in buckets] for t in times])
    )
  return StageProfiles(tuple(sizes), tuple(profiles))
