# SPDX-License-Identifier: Apache-2.0
"""What every run leaves behind: its directory, settings, versions, figures."""

import dataclasses
import datetime
import enum
import importlib.metadata
import json
import math
import os
import pathlib
import platform
import subprocess
import tomllib
from typing import Any

import numpy as np

from training import Prompt, load_prompts

_HERE = pathlib.Path(__file__).resolve().parent


def bundled_prompts(
  name: str = "demo",
  *,
  per_category: int | None = None,
  limit: int | None = None,
) -> tuple[Prompt, ...]:
  """Returns prompts that come with the project, so that no download is needed.

  Args:
    name: a file of `experiments/prompts`, without its ending.
    per_category: keeps the first so many of each category.
    limit: keeps the first so many of what is left.

  Raises:
    ValueError: if there is no such file; the message lists those there are.
  """
  there = {p.stem: p for p in (_HERE / "prompts").glob("*.jsonl")}
  if name not in there:
    raise ValueError(f"prompts = {name!r}: must be one of {sorted(there)}")
  return load_prompts(there[name], per_category=per_category, limit=limit)


def new_run_dir(
  name: str, base: str | os.PathLike[str] = "runs"
) -> pathlib.Path:
  """Makes and returns `base/NAME-YYYYmmdd-HHMMSS`, a number added if taken.

  Raises:
    ValueError: if the name is empty or would leave `base`.
  """
  if not name or pathlib.PurePath(name).name != name or name == "..":
    raise ValueError(f"name = {name!r}: must be one plain path component")
  stamp = datetime.datetime.now().strftime("%Y%m%d-%H%M%S")
  base = pathlib.Path(base)
  base.mkdir(parents=True, exist_ok=True)
  number = 1
  while True:
    path = base / f"{name}-{stamp}{f'-{number}' if number > 1 else ''}"
    try:
      path.mkdir()  # atomic: two runs of one second cannot share it
    except FileExistsError:
      number += 1
    else:
      return path


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
  """Writes strict JSON: NaN and infinities, which JSON lacks, become null.

  Takes what results are made of besides JSON's own types: dataclasses and named
  tuples (as objects), numpy and JAX arrays and scalars, paths, enums, sets.

  Raises:
    TypeError: on anything else, naming where in `obj` it is.
  """
  text = json.dumps(
    _plain(obj, "", classes=False),
    indent=2,
    ensure_ascii=False,
    allow_nan=False,
  )
  pathlib.Path(path).write_text(text + "\n", encoding="utf-8")


def config_dict(config: Any) -> dict[str, Any]:
  """Returns a config's effective values, defaults included, ready for JSON.

  Each dataclass, nested ones too, carries its type's name under `"class"`:
  where a field takes one of several types, its values do not say which.

  Raises:
    TypeError: if it is no dataclass, or on a value that JSON cannot hold.
  """
  if not dataclasses.is_dataclass(config) or isinstance(config, type):
    raise TypeError(f"config = {config!r}: must be an instance of a dataclass")
  return _plain(config, "", classes=True)


def versions(*, devices: bool = True) -> dict[str, Any]:
  """Returns what a result depends on besides its config; None where unknown.

  Args:
    devices: whether to ask JAX for its devices. That starts the backend, which
      reserves an accelerator's memory for this process: leave it out as long as
      other processes of the run need the device.
  """
  result: dict[str, Any] = {
    "wanspec": _version("wanspec") or _source_version(),
    "git_commit": _git("rev-parse", "HEAD"),
    "git_dirty": None,
    "python": platform.python_version(),
  }
  if result["git_commit"]:
    status = _git("status", "--porcelain", "--untracked-files=no")
    result["git_dirty"] = None if status is None else bool(status)
  for package in ("jax", "jaxlib", "flax", "numpy"):
    result[package] = _version(package)
  result |= {
    "platform": platform.platform(),
    "cpu_model": _cpu_model(),
    "cpu_count": os.cpu_count(),
    "cpu_usable": _usable_cpus(),
    "device_kind": None,
    "device_count": None,
  }
  if devices:
    import jax  # here, not above: naming a run's versions needs no backend

    found = jax.devices()
    result["device_kind"] = found[0].device_kind
    result["device_count"] = len(found)
  return result


def figures_line(**figures: Any) -> str:
  """Returns `key=value` pairs, in order, that one `split` takes apart again.

  Floats have four significant digits; texts such as `12/12` stay as they are
  but for spaces, which become underscores.
  """
  return " ".join(f"{key}={_figure(value)}" for key, value in figures.items())


def _figure(value: Any) -> str:
  if hasattr(value, "item") and np.ndim(value) == 0:
    value = value.item()
  if isinstance(value, float):
    return f"{value:.4g}"
  return "_".join(str(value).split())


def _plain(value: Any, where: str, *, classes: bool) -> Any:
  def inner(part: Any, name: Any) -> Any:
    return _plain(part, f"{where}.{name}" if where else name, classes=classes)

  if isinstance(value, enum.Enum):
    return value.name
  if value is None or isinstance(value, bool | str | int):
    return value
  if isinstance(value, float):
    return value if math.isfinite(value) else None
  if isinstance(value, os.PathLike):
    return os.fspath(value)
  if isinstance(value, np.dtype):
    return value.name
  if dataclasses.is_dataclass(value) and not isinstance(value, type):
    head = {"class": type(value).__name__} if classes else {}
    names = [field.name for field in dataclasses.fields(value)]
    return head | {name: inner(getattr(value, name), name) for name in names}
  if isinstance(value, dict):
    for key in value:
      if isinstance(key, bool) or not isinstance(key, int | str):
        raise TypeError(f"{where}: key {key!r} must be a text or an integer")
    return {str(key): inner(part, str(key)) for key, part in value.items()}
  if isinstance(value, tuple) and hasattr(value, "_asdict"):
    return {k: inner(v, k) for k, v in value._asdict().items()}
  if isinstance(value, set | frozenset):
    value = sorted(value)
  if isinstance(value, list | tuple):
    return [inner(part, str(i)) for i, part in enumerate(value)]
  if hasattr(value, "tolist"):  # numpy and JAX arrays and scalars
    return _plain(np.asarray(value).tolist(), where, classes=classes)
  if classes and callable(value) and hasattr(value, "__qualname__"):
    return f"{value.__module__}.{value.__qualname__}"
  raise TypeError(
    f"{where or 'value'}: a {type(value).__name__} has no form in JSON"
  )


def _version(package: str) -> str | None:
  try:
    return importlib.metadata.version(package)
  except importlib.metadata.PackageNotFoundError:
    return None


def _source_version() -> str | None:
  """The version of a source tree that runs without being installed."""
  try:
    text = (_HERE.parent / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]["version"]
  except (OSError, KeyError, tomllib.TOMLDecodeError):
    return None


def _git(*args: str) -> str | None:
  try:
    done = subprocess.run(
      ["git", "--no-optional-locks", *args],
      cwd=_HERE,
      capture_output=True,
      text=True,
      timeout=10,
      check=True,
    )
  except (OSError, subprocess.SubprocessError):
    return None
  return done.stdout.strip()


def _cpu_model() -> str | None:
  try:
    text = pathlib.Path("/proc/cpuinfo").read_text(encoding="utf-8")
  except OSError:
    text = ""
  for line in text.splitlines():
    name, _, value = line.partition(":")
    if name.strip() == "model name":
      return value.strip()
  return platform.processor() or platform.machine() or None


def _usable_cpus() -> int | None:
  if hasattr(os, "sched_getaffinity"):
    return len(os.sched_getaffinity(0))
  return os.cpu_count()
