# SPDX-License-Identifier: Apache-2.0
"""Tensors of Hugging Face directories: one safetensors file, or shards.

Format: 8 bytes little-endian header length, a JSON header that gives each
tensor's dtype, shape and byte range, then the bytes
(https://huggingface.co/docs/safetensors).
"""

import functools
import json
import pathlib
from typing import NamedTuple

import ml_dtypes
import numpy as np
import safetensors

from wanspec_jax.models._source import TensorSource

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

_DTYPES = {
  "F32": np.dtype(np.float32),
  "F16": np.dtype(np.float16),
  "BF16": np.dtype(ml_dtypes.bfloat16),
}


class _Shard(NamedTuple):
  header: dict[str, dict]
  data: np.ndarray  # [bytes] uint8, memory-mapped, header excluded


def _open_shard(path: pathlib.Path) -> _Shard:
  try:
    # Checks the header and that the byte ranges tile the file; the bytes are
    # taken from a map of our own because numpy lacks bfloat16, which older
    # releases of the package cannot return.
    with safetensors.safe_open(path, framework="numpy"):
      pass
  except safetensors.SafetensorError as error:
    raise ValueError(f"{path}: {error}") from error
  with path.open("rb") as file:
    length = int.from_bytes(file.read(8), "little")
    header = json.loads(file.read(length))
  header.pop("__metadata__", None)
  size = path.stat().st_size - 8 - length
  if size == 0:
    return _Shard(header, np.zeros(0, np.uint8))
  data = np.memmap(path, np.uint8, mode="r", offset=8 + length, shape=(size,))
  return _Shard(header, data)


def read_json(path: pathlib.Path) -> dict:
  """Returns the JSON object in a file.

  Raises:
    ValueError: naming the file if it is missing or holds no JSON object.
  """
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise ValueError(f"{path} is missing") from None
  except ValueError as error:
    raise ValueError(f"{path}: {error}") from error
  if not isinstance(value, dict):
    raise ValueError(f"{path}: must hold a JSON object")
  return value


def open_safetensors(directory: pathlib.Path) -> TensorSource:
  """Returns the tensors of a Hugging Face model directory.

  A shard is opened when a tensor in it is first asked for, so a host needs to
  hold only the shards of its own stage.

  Args:
    directory: holds `model.safetensors`, or `model.safetensors.index.json` and
      the shards that it names.

  Raises:
    ValueError: naming the file that is missing or malformed.
  """
  index = directory / INDEX
  shard = functools.lru_cache(maxsize=None)(_open_shard)
  if index.exists():
    files = read_json(index).get("weight_map")
    if not isinstance(files, dict):
      raise ValueError(f"{index}: weight_map is missing")
  elif (directory / SINGLE).exists():
    files = dict.fromkeys(shard(directory / SINGLE).header, SINGLE)
  else:
    raise ValueError(f"{directory}: holds neither {SINGLE} nor {INDEX}")

  def locate(name: str) -> tuple[_Shard, dict]:
    path = directory / files[name]
    if path.parent != directory:
      raise ValueError(f"{index}: {files[name]!r} is not a plain file name")
    if not path.exists():
      raise ValueError(f"{path}, which holds tensor {name}, is missing")
    found = shard(path)
    if name not in found.header:
      raise ValueError(f"{path}: tensor {name} is missing")
    return found, found.header[name]

  def describe(name: str) -> tuple[tuple[int, ...], str]:
    _, entry = locate(name)
    return tuple(entry["shape"]), entry["dtype"]

  def raw(name: str) -> np.ndarray:
    found, entry = locate(name)
    start, stop = entry["data_offsets"]
    return found.data[start:stop]

  def read(name: str) -> np.ndarray:
    shape, dtype = describe(name)
    if dtype not in _DTYPES:
      raise ValueError(
        f"model tensor {name} has dtype {dtype}: must be one of"
        f" {tuple(_DTYPES)}"
      )
    return raw(name).view(_DTYPES[dtype]).reshape(shape)

  return TensorSource(
    names=frozenset(files), describe=describe, read=read, raw=raw
  )
