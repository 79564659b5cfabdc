# SPDX-License-Identifier: Apache-2.0
"""Runs a study: `python -m experiments.study NAME [options]`.

A study is a module of `experiments/studies` whose name does not start with an
underscore. It defines

  Config       a frozen dataclass, every field an option of the command line;
               among them `quick: bool = False` (under a minute on a CPU) and
               `out: pathlib.Path | None = None` (the run's directory);
  run(config)  -> dict, figures by name; `config.out` is there by then.

Without a NAME, or with one that there is not, lists the studies and exits 2.
Each run leaves `config.json`, `versions.json`, `result.json` and what the study
writes itself in its directory, and prints its figures as the last line.
"""

import dataclasses
import datetime
import importlib
import importlib.util
import pathlib
import pkgutil
import sys
import time
import types
from collections.abc import Sequence
from typing import Any

import tyro

from experiments import _setup, studies
from experiments._rundir import (
  config_dict,
  figures_line,
  new_run_dir,
  versions,
  write_json,
)


def names() -> tuple[str, ...]:
  """Returns the names of the studies, sorted."""
  found = (module.name for module in pkgutil.iter_modules(studies.__path__))
  return tuple(sorted(name for name in found if not name.startswith("_")))


def first_line(name: str) -> str:
  """Returns the first line of a study's docstring, without running the file.

  One study that cannot be imported, say for want of a package, must not keep
  the others from being listed.
  """
  import ast  # only a listing reads source

  spec = importlib.util.find_spec(f"{studies.__name__}.{name}")
  if spec is None or spec.origin is None:
    return ""
  try:
    source = pathlib.Path(spec.origin).read_text(encoding="utf-8")
    docstring = ast.get_docstring(ast.parse(source))
  except (OSError, SyntaxError) as error:
    return f"(cannot be read: {error})"
  return (docstring or "").partition("\n")[0]


def load(name: str) -> types.ModuleType:
  """Imports a study and checks that it is one.

  Raises:
    ValueError: naming the module and what it lacks.
  """
  module = importlib.import_module(f"{studies.__name__}.{name}")
  where = f"{module.__name__}.Config"
  config = getattr(module, "Config", None)
  if not (isinstance(config, type) and dataclasses.is_dataclass(config)):
    raise ValueError(f"{where}: must be a dataclass")
  if not getattr(config, "__dataclass_params__").frozen:  # noqa: B009
    raise ValueError(f"{where}: must be frozen")
  fields = {field.name: field for field in dataclasses.fields(config)}
  for field, default in (("quick", False), ("out", None)):
    if field not in fields or fields[field].default is not default:
      raise ValueError(f"{where}: must have {field!r}, by default {default}")
  if not callable(getattr(module, "run", None)):
    raise ValueError(f"{module.__name__}.run: must be a function")
  return module


def run_study(
  name: str, config: Any, module: types.ModuleType
) -> dict[str, Any]:
  """Runs one study with its files around it, and returns its figures.

  Raises:
    ValueError: if `config.out` holds files already.
  """
  if config.out is None:
    out = new_run_dir(name)
  else:
    out = pathlib.Path(config.out)
    out.mkdir(parents=True, exist_ok=True)
    if any(out.iterdir()):
      raise ValueError(f"out = {out}: must be a new or empty directory")
  config = dataclasses.replace(config, out=out)
  write_json(
    out / "config.json", {"study": name, "config": config_dict(config)}
  )
  write_json(out / "versions.json", versions(devices=False))
  print(f"run directory: {out}", flush=True)
  started = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  start_s = time.perf_counter()
  figures = dict(module.run(config))
  write_json(
    out / "result.json",
    {
      "study": name,
      "quick": config.quick,
      "figures": figures,
      "started": started,
      "wall_s": time.perf_counter() - start_s,
    },
  )
  # Only now: starting the backend may take memory that the study's own
  # processes needed.
  write_json(out / "versions.json", versions())
  return figures


def main(argv: Sequence[str] | None = None) -> int:
  """Runs the command line and returns its exit status."""
  argv = list(sys.argv[1:] if argv is None else argv)
  known = names()
  if not argv or argv[0] not in known:
    asked = argv[:1] in (["-h"], ["--help"])
    out = sys.stdout if asked else sys.stderr
    if argv and not asked:
      print(f"there is no study {argv[0]!r}", file=out)
    print("usage: python -m experiments.study NAME [options]\n", file=out)
    print("studies:" if known else "studies: none yet", file=out)
    width = max(map(len, known), default=0)
    for name in known:
      print(f"  {name:{width}}  {first_line(name)}".rstrip(), file=out)
    return 0 if asked else 2
  name, options = argv[0], argv[1:]
  _setup.keep_freed_memory()
  _setup.use_compilation_cache()
  try:
    module = load(name)
  except ValueError as error:
    print(f"experiments.study: {error}", file=sys.stderr)
    return 2
  config = tyro.cli(
    module.Config,
    args=options,
    prog=f"python -m experiments.study {name}",
    description=module.__doc__,
  )
  figures = run_study(name, config, module)
  print(figures_line(**figures))
  return 0


if __name__ == "__main__":
  sys.exit(main())
