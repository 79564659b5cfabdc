# SPDX-License-Identifier: Apache-2.0
"""The cluster file: which stage runs where, and what all hosts agree upon."""

import dataclasses
import ipaddress
import json
import pathlib
import re
import ssl
import tomllib
from collections.abc import Collection, Sequence
from typing import Any, Self

from wanspec_jax import codecs, wire
from wanspec_jax.worlds._stage import StageShape

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_TAKEN_NAMES = frozenset(("coordinator", "ca"))


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

  def __post_init__(self):
    rules = (
      *_address_rules(self),
      (
        "layers",
        isinstance(self.layers, tuple)
        and len(self.layers) == 2
        and _is_whole(self.layers[0], 0)
        and _is_whole(self.layers[1], 1),
        "must be [first >= 0, count >= 1]",
      ),
    )
    _hold(self, rules)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Standby:
  """A host that waits to take the place of a stage, with the same layers.

  Attributes:
    name: also the name on its certificate.
    host: as of a stage.
    port: TCP port.
    stage: name of the stage that it stands in for; `for` in the file.
  """

  name: str
  host: str
  port: int
  stage: str

  def __post_init__(self):
    rules = (
      *_address_rules(self),
      ("stage", _is_text(self.stage), "must name a stage"),
    )
    _hold(self, rules)


def _address_rules(
  host: StageHost | Standby,
) -> tuple[tuple[str, Any, str], ...]:
  return (
    (
      "name",
      isinstance(host.name, str) and _NAME.fullmatch(host.name),
      "must be a DNS label (a-z, 0-9, inner hyphens)",
    ),
    (
      "name",
      not isinstance(host.name, str) or host.name not in _TAKEN_NAMES,
      f"{sorted(_TAKEN_NAMES)} are taken",
    ),
    ("host", _is_text(host.host), "must be a name or address"),
    ("port", _is_whole(host.port, 1, 65535), "must lie in [1, 65535]"),
  )


def _hold(record: Any, rules: Sequence[tuple[str, Any, str]]) -> None:
  """Raises `ValueError` on the first rule that does not hold."""
  for field, holds, rule in rules:
    if not holds:
      raise ValueError(
        f"{type(record).__name__}.{field} = {getattr(record, field)!r}: {rule}"
      )


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
    standbys: who may take a stage's place.
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
  standbys: tuple[Standby, ...] = ()

  def __post_init__(self):
    rules = (
      ("stages", bool(self.stages), "must have a stage or more"),
      ("model", _is_text(self.model), "must be a name or path"),
      ("dtype", self.dtype in ("float32", "bfloat16"), "unknown dtype"),
      ("codec", _is_text(self.codec), "must name a codec"),
      ("verifier", self.verifier in ("race", "greedy"), "unknown verifier"),
      ("rollback", self.rollback == "mask", "unknown rollback mechanism"),
      ("keys", self.keys is None or _is_text(self.keys), "must be a path"),
      *(
        (field, _is_positive(getattr(self, field)), "must be a number > 0")
        for field in ("peer_deadline_s", "start_deadline_s")
      ),
    )
    _hold(self, rules)
    codecs.parse(self.codec)
    hosts = (*self.stages, *self.standbys)
    names = [host.name for host in hosts]
    addresses = [(host.host, host.port) for host in hosts]
    for field, values in (("names", names), ("addresses", addresses)):
      if len(set(values)) != len(values):
        raise ValueError(f"Cluster.stages: {field} {values} must differ")
    for standby in self.standbys:
      if standby.stage not in names[: len(self.stages)]:
        raise ValueError(
          f"Cluster.standbys[{standby.name!r}].stage = {standby.stage!r}: must "
          f"be one of {names[: len(self.stages)]}"
        )
    expected = 0
    for stage in self.stages:
      first, count = stage.layers
      if first != expected:
        raise ValueError(
          f"Cluster.stages[{stage.name!r}].layers = {list(stage.layers)}: must "
          f"be [first, count] with first = {expected}"
        )
      expected = first + count
    for host in hosts:
      if self.keys is None and not _is_loopback(host.host):
        raise ValueError(
          f"Cluster.keys = None: {host.name} is at {host.host!r}; without "
          "certificates a ring runs on loopback only (experiments.keys makes "
          "them)"
        )

  @property
  def num_stages(self) -> int:
    return len(self.stages)

  def index(self, name: str) -> int:
    """Returns the position of a stage.

    Raises:
      ValueError: if there is none of this name.
    """
    names = [stage.name for stage in self.stages]
    if name not in names:
      raise ValueError(f"stage {name!r}: must be one of {names}")
    return names.index(name)

  def standing_in(self, name: str) -> Self:
    """Returns the ring with a standby in its stage's place, and that stage
    among the standbys.

    Raises:
      ValueError: if no standby has this name.
    """
    known = {standby.name: standby for standby in self.standbys}
    if name not in known:
      raise ValueError(f"standby {name!r}: must be one of {sorted(known)}")
    new = known[name]
    old = self.stages[self.index(new.stage)]
    return dataclasses.replace(
      self,
      stages=tuple(
        stage
        if stage is not old
        else StageHost(
          name=new.name, host=new.host, port=new.port, layers=old.layers
        )
        for stage in self.stages
      ),
      standbys=tuple(
        Standby(name=old.name, host=old.host, port=old.port, stage=new.name)
        if standby is new
        else dataclasses.replace(
          standby,
          stage=new.name if standby.stage == old.name else standby.stage,
        )
        for standby in self.standbys
      ),
    )

  def spare(self, stage: str, failed: Collection[str]) -> str | None:
    """Returns the first standby of a stage that is not among the failed."""
    for standby in self.standbys:
      if standby.stage == stage and standby.name not in failed:
        return standby.name
    return None

  def arranged(self, names: Sequence[str]) -> Self:
    """Returns the ring of these members, first to last.

    Raises:
      ValueError: if one of them is neither the stage of that position nor a
        standby for it.
    """
    if len(names) != self.num_stages:
      raise ValueError(f"ring: must have {self.num_stages} members")
    ring = self
    for name, stage in zip(names, self.stages, strict=True):
      if name == stage.name:
        continue
      if not any(
        s.name == name and s.stage == stage.name for s in self.standbys
      ):
        raise ValueError(
          f"ring: {name[:64]!r} does not stand in for {stage.name}"
        )
      ring = ring.standing_in(name)
    return ring

  def agreement(self, stage: int, model_hash: str) -> dict[str, Any]:
    """Returns what all members must have in common, as a stage sees it."""
    return {
      "model": model_hash,
      "dtype": self.dtype,
      "codec": codecs.parse(self.codec).name,
      "verifier": self.verifier,
      "rollback": self.rollback,
      "row_buckets": list(self.shape.row_buckets),
      "slot_buckets": list(self.shape.slot_buckets),
      "cache_dtype": self.shape.cache_dtype,
      "exact": self.shape.exact,
      "num_stages": self.num_stages,
      "stage": stage,
      "layers": [list(host.layers) for host in self.stages],
    }

  def tls(
    self, name: str
  ) -> tuple[ssl.SSLContext | None, ssl.SSLContext | None]:
    """Returns a member's contexts, to connect and to listen; None for TCP.

    Raises:
      ValueError: a certificate or key is missing here or cannot be used.
    """
    if self.keys is None:
      return None, None
    try:
      return (
        wire.client_context(self.keys, name),
        wire.server_context(self.keys, name),
      )
    except OSError as error:  # ssl.SSLError is one
      raise ValueError(f"Cluster.keys = {self.keys!r}: {error}") from error

  @classmethod
  def from_toml(cls, path: str | pathlib.Path) -> Self:
    """Reads a cluster file.

    Raises:
      ValueError: naming the file and the field that is unknown, missing or
        wrong.
    """
    path = pathlib.Path(path)
    try:
      data = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
      raise ValueError(f"cluster file {path}: cannot be read ({error})") from (
        error
      )
    except ValueError as error:  # not UTF-8, or not TOML
      raise ValueError(f"cluster file {path}: not TOML ({error})") from error
    try:
      return cls._from_dict(data, path.parent)
    except ValueError as error:
      raise ValueError(f"cluster file {path}: {error}") from error

  @classmethod
  def _from_dict(cls, data: dict[str, Any], base: pathlib.Path) -> Self:
    _only("file", data, {"ring", "stage", "standby"})
    ring = data.get("ring", {})
    if not isinstance(ring, dict):
      raise ValueError("[ring] must be one table")
    for name in ("stage", "standby"):
      entries = data.get(name, [])
      if not isinstance(entries, list) or not all(
        isinstance(entry, dict) for entry in entries
      ):
        raise ValueError(f"[[{name}]] must be tables, one per {name}")
    ring = dict(ring)
    shape_fields = {f.name for f in dataclasses.fields(StageShape)}
    own_fields = {f.name for f in dataclasses.fields(cls)}
    own_fields -= {"stages", "standbys", "shape"}
    _only("[ring]", ring, own_fields | shape_fields)
    shape = {k: ring.pop(k) for k in shape_fields & ring.keys()}
    for field in ("row_buckets", "slot_buckets"):
      if field not in shape:
        raise ValueError(f"[ring] {field} is missing")
      sizes = shape[field]
      if not isinstance(sizes, list) or not all(_is_whole(n, 1) for n in sizes):
        raise ValueError(f"[ring] {field} = {sizes!r}: must be whole numbers")
      shape[field] = tuple(sizes)
    if not isinstance(shape.get("exact", True), bool):
      raise ValueError(f"[ring] exact = {shape['exact']!r}: must be a boolean")
    if _is_text(ring.get("keys")):
      ring["keys"] = str((base / ring["keys"]).absolute())
    stages = []
    for i, entry in enumerate(data.get("stage", [])):
      fields = {f.name for f in dataclasses.fields(StageHost)}
      _only(f"[[stage]] {i}", entry, fields)
      missing = fields - entry.keys() - {"name"}
      if missing:
        raise ValueError(f"[[stage]] {i}: {sorted(missing)} missing")
      entry = {"name": f"stage-{i}"} | entry
      if isinstance(entry["layers"], list):
        entry["layers"] = tuple(entry["layers"])
      stages.append(StageHost(**entry))
    standbys = []
    for i, entry in enumerate(data.get("standby", [])):
      fields = {"name", "host", "port", "for"}
      _only(f"[[standby]] {i}", entry, fields)
      if missing := fields - entry.keys():
        raise ValueError(f"[[standby]] {i}: {sorted(missing)} missing")
      own = {k: v for k, v in entry.items() if k != "for"}
      standbys.append(Standby(stage=entry["for"], **own))
    return cls(
      stages=tuple(stages),
      standbys=tuple(standbys),
      shape=StageShape(**shape),
      **ring,
    )

  def to_toml(self) -> str:
    """Returns the cluster file's text; `from_toml` reads it back."""
    ring = {
      field.name: getattr(self, field.name)
      for field in dataclasses.fields(self)
      if field.name not in ("stages", "standbys", "shape")
    } | dataclasses.asdict(self.shape)
    lines = ["[ring]"]
    lines += [f"{k} = {_toml(v)}" for k, v in ring.items() if v is not None]
    for stage in self.stages:
      lines += ["", "[[stage]]"]
      lines += [
        f"{k} = {_toml(v)}" for k, v in dataclasses.asdict(stage).items()
      ]
    for standby in self.standbys:
      lines += ["", "[[standby]]"]
      lines += [
        f"{'for' if k == 'stage' else k} = {_toml(v)}"
        for k, v in dataclasses.asdict(standby).items()
      ]
    return "\n".join(lines) + "\n"


def _is_text(value: Any) -> bool:
  return isinstance(value, str) and bool(value)


def _is_whole(value: Any, low: int, high: int | None = None) -> bool:
  return type(value) is int and low <= value and (high is None or value <= high)


def _is_positive(value: Any) -> bool:
  return type(value) in (int, float) and value > 0


def _is_loopback(host: str) -> bool:
  try:
    return ipaddress.ip_address(host).is_loopback
  except ValueError:
    return host == "localhost"


def _only(where: str, given: dict[str, Any], known: set[str]) -> None:
  unknown = sorted(given.keys() - known)
  if unknown:
    raise ValueError(f"{where}: unknown {unknown}, known are {sorted(known)}")


def _toml(value: Any) -> str:
  if isinstance(value, bool):
    return str(value).lower()
  if isinstance(value, str):
    # JSON's escapes are TOML's, but for one character that it leaves alone.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
  if isinstance(value, (list, tuple)):
    return "[" + ", ".join(_toml(v) for v in value) + "]"
  return str(value)
