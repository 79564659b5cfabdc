# SPDX-License-Identifier: Apache-2.0
"""What every entry point does before it touches a device."""

import ctypes
import json
import os
import pathlib
from typing import Any

import jax

from wanspec_jax import models

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h
CACHE_VARIABLE = "WANSPEC_CACHE"


def cache_dir() -> pathlib.Path:
  """Returns where compiled programs and profiles are kept between runs."""
  given = os.environ.get(CACHE_VARIABLE)
  if given:
    return pathlib.Path(given)
  base = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
  return pathlib.Path(base) / "wanspec"


def keep_freed_memory() -> None:
  """Makes glibc keep what XLA frees, instead of returning it to the system.

  A CPU program's scratch memory is allocated anew for each call; above 32 MB
  glibc maps and unmaps it each time, and zeroing the pages cost as much as
  attention over 1,024 slots. Elsewhere than on glibc nothing happens.
  """
  mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
  if mallopt is not None:
    mallopt(_M_MMAP_THRESHOLD, 2**30)
    mallopt(_M_TRIM_THRESHOLD, 2**31 - 1)


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
