# SPDX-License-Identifier: Apache-2.0
"""The configuration of `experiments.decode`; named ones are in `configs/`."""

import dataclasses
import importlib
import importlib.util
import pathlib
from typing import Literal

from experiments._arms import Links, Speculate
from wanspec_jax.messages import Sampling


@dataclasses.dataclass(frozen=True, kw_only=True)
class RingSettings:
  """The ring that is spawned here when no `--cluster` is given.

  Attributes:
    stages: stage processes.
    model: `smollm2`, a `.gguf` file or a Hugging Face directory.
    dtype: `auto` is what `experiments.profile` chose, else bfloat16.
    codec: of the links between stages.
    row_buckets: rows per compiled program; empty for what
      `experiments.profile` chose, else 8, 16, 32, 64.
    slot_buckets: cache sizes; the last is the capacity.
    cache_dtype: dtype of cached keys and values.
    exact: attention and norms in float64: logits do not depend on slots, run
      splits or buckets (docs/exactness.md).
    verifier: `race` (temperature 0 is greedy there too) or `greedy` alone.
    rollback: how stages take back what was not accepted.
    peer_deadline_s: silence after which a stage counts as lost.
    standbys: stages, by index, that a standby process is started for; it takes
      over if the stage fails.
  """

  stages: int = 4
  model: str = "smollm2"
  dtype: Literal["auto", "float32", "bfloat16"] = "auto"
  codec: str = "raw:bf16"
  row_buckets: tuple[int, ...] = ()
  slot_buckets: tuple[int, ...] = (256, 512, 1024, 2048)
  cache_dtype: Literal["float32", "bfloat16"] = "float32"
  exact: bool = True
  verifier: Literal["race", "greedy"] = "race"
  rollback: Literal["mask"] = "mask"
  peer_deadline_s: float = 10.0
  standbys: tuple[int, ...] = ()

  def __post_init__(self):
    if self.stages < 1:
      raise ValueError(f"ring.stages = {self.stages}: must be >= 1")
    for stage in self.standbys:
      if not 0 <= stage < self.stages:
        raise ValueError(
          f"ring.standbys = {self.standbys}: must be stages 0 to "
          f"{self.stages - 1}"
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class Decode:
  """Decodes prompts over a ring, plainly and speculatively.

  Attributes:
    prompts: prompts file (Spec-Bench, HumanEval, GSM8K, .jsonl or .txt); the
      bundled demo prompts by default.
    text: prompts given here instead.
    per_category: first so many prompts of each category; all by default.
    limit: so many prompts at most.
    max_new_tokens: budget per prompt.
    concurrent: prompts decoded at once.
    stop: texts that end an answer.
    sampling: temperature 0 is greedy; prompt i draws with `seed + i`.
    ring: the ring that is spawned.
    cluster: cluster file of a ring that runs already (see experiments.serve).
    links: emulated links; with `--cluster`, only when `emulate` is on.
    emulate: emulate the links; off leaves them as they are.
    speculate: what is drafted and launched.
    schedule: policy (docs/schedules.md); all but `lockstep` at their defaults.
    world: `sockets` (wall clock) or `virtual` (modelled time, real tokens).
    plain: decode plainly too, for comparison.
    plain_from: run directory whose plain decoding is taken instead; refused if
      it was made on another ring or with other settings.
    profile: stage times (JSON) instead of measuring this ring's.
    stream: print text as it comes.
    out: run directory; a new one under `runs/` by default.
  """

  prompts: pathlib.Path | None = None
  text: tuple[str, ...] = ()
  per_category: int | None = None
  limit: int | None = None
  max_new_tokens: int = 96
  concurrent: int = 1
  stop: tuple[str, ...] = ()
  sampling: Sampling = dataclasses.field(default_factory=Sampling)
  ring: RingSettings = dataclasses.field(default_factory=RingSettings)
  cluster: pathlib.Path | None = None
  links: Links = dataclasses.field(default_factory=Links)
  emulate: bool = True
  speculate: Speculate = dataclasses.field(default_factory=Speculate)
  schedule: Literal[
    "lockstep",
    "priced",
    "continuous",
    "in_pipe",
    "segments",
    "hedged",
    "branched",
    "rate_matched",
  ] = "lockstep"
  world: Literal["sockets", "virtual"] = "sockets"
  plain: bool = True
  plain_from: pathlib.Path | None = None
  profile: pathlib.Path | None = None
  stream: bool = True
  out: pathlib.Path | None = None

  def __post_init__(self):
    for field, holds, rule in (
      ("max_new_tokens", self.max_new_tokens >= 1, "must be >= 1"),
      ("concurrent", self.concurrent >= 1, "must be >= 1"),
      (
        "per_category",
        self.per_category is None or self.per_category >= 1,
        "must be >= 1",
      ),
      ("limit", self.limit is None or self.limit >= 1, "must be >= 1"),
      (
        "text",
        not (self.text and self.prompts),
        "and prompts: give one of the two",
      ),
      (
        "plain_from",
        self.plain_from is None or self.plain,
        "goes with plain",
      ),
      (
        "world",
        self.world == "sockets" or self.cluster is None,
        "= 'virtual' has no cluster to join",
      ),
      (
        "ring",
        self.cluster is None or self.ring == RingSettings(),
        "the cluster file says what the ring is; give one of the two",
      ),
      (
        "world",
        self.world == "sockets" or self.emulate,
        "= 'virtual' needs the emulated links",
      ),
      (
        "concurrent",
        self.speculate.drafter != "synthetic" or self.concurrent == 1,
        "must be 1 with the synthetic drafter, which replays one text",
      ),
      (
        "plain",
        self.speculate.drafter != "synthetic" or self.plain,
        "must be on with the synthetic drafter, which replays its output",
      ),
    ):
      if not holds:
        raise ValueError(f"{field} = {getattr(self, field)!r}: {rule}")


def load_config(name: str) -> Decode:
  """Returns `get_config()` of a module in `experiments/configs` or of a file.

  Raises:
    ValueError: naming what exists.
  """
  here = pathlib.Path(__file__).parent / "configs"
  known = sorted(p.stem for p in here.glob("*.py") if p.stem != "__init__")
  if name in known:
    return importlib.import_module(f"experiments.configs.{name}").get_config()
  path = pathlib.Path(name)
  if path.suffix == ".py" and path.is_file():
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    make = getattr(module, "get_config", None)
    config = make() if callable(make) else None
    if not isinstance(config, Decode):
      raise ValueError(f"--config {name}: must have get_config() -> Decode")
    return config
  raise ValueError(f"--config {name}: must be one of {known} or a .py file")
