# SPDX-License-Identifier: Apache-2.0
"""The cluster file: which stage runs where, and what all hosts agree upon."""

import dataclasses
import pathlib
import tomllib
from typing import Any, Self

from wanspec_jax import codecs
from wanspec_jax.worlds._stage import StageShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class StageHost:
  """One stage of the ring.

  Attributes:
    name: also the name on its certificate.
    host: name or address that the stage before it, and for the last one the
      coordinator, connect to.
    port: TCP port.
    layers: first layer and number of layers.
  """

  name: str
  host: str
  port: int
  layers: tuple[int, int]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
  """A ring of stages.

  Attributes:
    stages: first to last.
    model: `smollm2`, a `.gguf` file or a Hugging Face directory, on each host.
    dtype: of the weights and products, `float32` or `bfloat16`.
    codec: of every link between two stages, e.g. `raw:bf16`.
    shape: sizes that stages are compiled for.
    verifier: `race` or `greedy`.
    rollback: `mask`.
    keys: directory with the cluster's certificates; None for plain TCP, which
      only loopback addresses may use.
    peer_deadline_s: silence after which a peer counts as lost.
    start_deadline_s: longest wait for a stage to be up.
  """

  stages: tuple[StageHost, ...]
  model: str = "smollm2"
  dtype: str = "bfloat16"
  codec: str = "raw:bf16"
  shape: StageShape
  verifier: str = "race"
  rollback: str = "mask"
  keys: str | None = None
  peer_deadline_s: float = 10.0
  start_deadline_s: float = 180.0

  def __post_init__(self):
    rules = (
      ("stages", bool(self.stages), "must have a stage or more"),
      ("dtype", self.dtype in ("float32", "bfloat16"), "unknown dtype"),
      ("verifier", self.verifier in ("race", "greedy"), "unknown verifier"),
      ("rollback", self.rollback == "mask", "unknown rollback mechanism"),
      ("peer_deadline_s", self.peer_deadline_s > 0, "must be > 0"),
      ("start_deadline_s", self.start_deadline_s > 0, "must be > 0"),
    )
    for field, holds, rule in rules:
      if not holds:
        raise ValueError(f"Cluster.{field} = {getattr(self, field)!r}: {rule}")
    codecs.parse(self.codec)
    names = [stage.name for stage in self.stages]
    if len(set(names)) != len(names):
      raise ValueError(f"Cluster.stages: names {names} must differ")
    expected = 0
    for stage in self.stages:
      first, count = stage.layers
      if first != expected or count < 1:
        raise ValueError(
          f"Cluster.stages[{stage.name!r}].layers = {list(stage.layers)}: must "
          f"be [first, count] with first = {expected} and count >= 1"
        )
      expected = first + count
      if self.keys is None and not _is_loopback(stage.host):
        raise ValueError(
          f"Cluster.keys = None: {stage.name} is at {stage.host!r}; without "
          "certificates a ring runs on loopback only (experiments.keys makes "
          "them)"
        )

  @property
  def num_stages(self) -> int:
    return len(self.stages)

  def agreement(self, stage: int, model_hash: str) -> dict[str, Any]:
    """Returns what the peers of a stage must have in common with it."""
    return {
      "model": model_hash,
      "dtype": self.dtype,
      "codec": codecs.parse(self.codec).name,
      "verifier": self.verifier,
      "rollback": self.rollback,
      "row_buckets": list(self.shape.row_buckets),
      "slot_buckets": list(self.shape.slot_buckets),
      "cache_dtype": self.shape.cache_dtype,
      "num_stages": self.num_stages,
      "stage": stage,
      "layers": list(self.stages[stage].layers),
    }

  @classmethod
  def from_toml(cls, path: str | pathlib.Path) -> Self:
    """Reads a cluster file.

    Raises:
      ValueError: naming the file and the field that is unknown, missing or
        wrong.
    """
    path = pathlib.Path(path)
    try:
      data = tomllib.loads(path.read_text())
    except OSError as error:
      raise ValueError(f"cluster file {path}: cannot be read ({error})") from (
        error
      )
    except tomllib.TOMLDecodeError as error:
      raise ValueError(f"cluster file {path}: not TOML ({error})") from error
    try:
      return cls._from_dict(data, path.parent)
    except (TypeError, ValueError) as error:
      raise ValueError(f"cluster file {path}: {error}") from error

  @classmethod
  def _from_dict(cls, data: dict[str, Any], base: pathlib.Path) -> Self:
    ring = dict(data.get("ring", {}))
    _only("file", data, {"ring", "stage"})
    shape_fields = {f.name for f in dataclasses.fields(StageShape)}
    own_fields = {f.name for f in dataclasses.fields(cls)}
    _only("[ring]", ring, (own_fields - {"stages", "shape"}) | shape_fields)
    shape = {k: ring.pop(k) for k in shape_fields & ring.keys()}
    for field in ("row_buckets", "slot_buckets"):
      if field not in shape:
        raise ValueError(f"[ring] {field} is missing")
      shape[field] = tuple(shape[field])
    if ring.get("keys") is not None:
      ring["keys"] = str(base / ring["keys"])
    stages = []
    for i, entry in enumerate(data.get("stage", [])):
      fields = {f.name for f in dataclasses.fields(StageHost)}
      _only(f"[[stage]] {i}", entry, fields)
      missing = fields - entry.keys() - {"name"}
      if missing:
        raise ValueError(f"[[stage]] {i}: {sorted(missing)} missing")
      layers = entry["layers"]
      if not isinstance(layers, list) or len(layers) != 2:
        raise ValueError(
          f"[[stage]] {i}: layers = {layers!r}, must be [first, count]"
        )
      stages.append(
        StageHost(
          **{"name": f"stage-{i}"} | entry | {"layers": tuple(layers)}
        )
      )
    return cls(stages=tuple(stages), shape=StageShape(**shape), **ring)

  def to_toml(self) -> str:
    """Returns the cluster file's text; `from_toml` reads it back."""
    ring = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ("stages", "shape")
    } | dataclasses.asdict(self.shape)
    lines = ["[ring]"]
    lines += [f"{k} = {_toml(v)}" for k, v in ring.items() if v is not None]
    for stage in self.stages:
      lines += ["", "[[stage]]"]
      lines += [
        f"{k} = {_toml(v)}" for k, v in dataclasses.asdict(stage).items()
      ]
    return "\n".join(lines) + "\n"


def _is_loopback(host: str) -> bool:
  return host in ("localhost", "::1") or host.startswith("127.")


def _only(where: str, given: dict[str, Any], known: set[str]) -> None:
  unknown = sorted(given.keys() - known)
  if unknown:
    raise ValueError(f"{where}: unknown {unknown}, known are {sorted(known)}")


def _toml(value: Any) -> str:
  if isinstance(value, str):
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
  if isinstance(value, (list, tuple)):
    return "[" + ", ".join(_toml(v) for v in value) + "]"
  return str(value)
