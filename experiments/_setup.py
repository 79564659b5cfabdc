# SPDX-License-Identifier: Apache-2.0
"""What every entry point does before it touches a device."""

import json
import os
import pathlib
from typing import Any

import jax

from wanspec_jax import models

CACHE_VARIABLE = "WANSPEC_CACHE"


def cache_dir() -> pathlib.Path:
  """Returns where compiled programs and profiles are kept between runs."""
  given = os.environ.get(CACHE_VARIABLE)
  if given:
    return pathlib.Path(given)
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "wanspec"


def use_compilation_cache() -> None:
  """Lets stage processes share compiled programs, also across runs."""
  jax.config.update("jax_compilation_cache_dir", str(cache_dir() / "xla"))
  jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


def choice_path(model: str) -> pathlib.Path:
  """Returns where `experiments.profile` keeps its choice for a model here."""
  return cache_dir() / f"choice-{models.model_hash(model)}.json"


def read_choice(model: str) -> dict[str, Any]:
  """Returns `{"dtype", "row_buckets"}` as chosen on this host, or nothing."""
  path = choice_path(model)
  return json.loads(path.read_text()) if path.exists() else {}
