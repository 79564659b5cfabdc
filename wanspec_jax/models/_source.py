# SPDX-License-Identifier: Apache-2.0
"""The interface between a model's files and the parameters built from them."""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from wanspec_jax.models._config import ModelConfig

EMBED = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

_WINDOWS = 4  # per tensor
_WINDOW_BYTES = 64


class TensorSource(NamedTuple):
  """Tensors of one model by their Hugging Face names, read one at a time.

  Whatever the file format, matrices come as `[out, in]` and the rows of query
  and key projections in the rotate-half order of Hugging Face.

  Attributes:
    names: all tensors there are.
    describe: `name -> (shape, dtype as the file calls it)`, from headers only.
    read: `name -> array` in float32, float16 or bfloat16; may be a view of a
      memory-mapped file, so copy before keeping it.
    raw: `name -> [bytes] uint8` view of what the file stores.
  """

  names: frozenset[str]
  describe: Callable[[str], tuple[tuple[int, ...], str]]
  read: Callable[[str], np.ndarray]
  raw: Callable[[str], np.ndarray]


def layer_prefix(layer: int) -> str:
  """Returns what the names of a layer's tensors begin with."""
  return f"model.layers.{layer}."


def layer_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each tensor of a layer, by its name in the layer."""
  width, inner = config.hidden_size, config.intermediate_size
  q, kv = config.q_rows, config.kv_rows
  shapes: dict[str, tuple[int, ...]] = {
    "input_layernorm.weight": (width,),
    "self_attn.q_proj.weight": (q, width),
    "self_attn.k_proj.weight": (kv, width),
    "self_attn.v_proj.weight": (kv, width),
    "self_attn.o_proj.weight": (width, q),
    "post_attention_layernorm.weight": (width,),
    "mlp.gate_proj.weight": (inner, width),
    "mlp.up_proj.weight": (inner, width),
    "mlp.down_proj.weight": (width, inner),
  }
  if config.qkv_bias:
    shapes["self_attn.q_proj.bias"] = (q,)
    shapes["self_attn.k_proj.bias"] = (kv,)
    shapes["self_attn.v_proj.bias"] = (kv,)
  if config.qk_norm:
    shapes["self_attn.q_norm.weight"] = (config.head_dim,)
    shapes["self_attn.k_norm.weight"] = (config.head_dim,)
  return shapes


def stage_shapes(
  config: ModelConfig, layers: Iterable[int], *, first: bool, last: bool
) -> dict[str, tuple[int, ...]]:
  """Returns the shape of each tensor that a stage needs, by full name.

  Args:
    config: the model.
    layers: the stage's layers.
    first: the stage embeds.
    last: the stage has the final norm and the head (which, when tied, is the
      embedding matrix).
  """
  matrix = (config.vocab_size, config.hidden_size)
  shapes: dict[str, tuple[int, ...]] = {}
  if first or (last and config.tie_embeddings):
    shapes[EMBED] = matrix
  if last:
    shapes[FINAL_NORM] = (config.hidden_size,)
    if not config.tie_embeddings:
      shapes[HEAD] = matrix
  for layer in layers:
    for name, shape in layer_shapes(config).items():
      shapes[layer_prefix(layer) + name] = shape
  return shapes


def check_tensors(
  config: ModelConfig,
  source: TensorSource,
  layers: Iterable[int],
  *,
  first: bool,
  last: bool,
) -> dict[str, tuple[int, ...]]:
  """Returns `stage_shapes` once the source agrees with them.

  Raises:
    ValueError: naming the tensor that is missing, has another shape, or lies in
      one of these layers (or outside all layers) and would not be used.
  """
  layers = list(layers)
  shapes = stage_shapes(config, layers, first=first, last=last)
  for name, shape in shapes.items():
    if name not in source.names:
      raise ValueError(f"model tensor {name} {list(shape)} is missing")
    found, _ = source.describe(name)
    if found != shape:
      raise ValueError(
        f"model tensor {name} has shape {list(found)}: must be {list(shape)}"
      )
  own = {layer_prefix(layer) for layer in layers}
  for name in sorted(source.names - shapes.keys() - {EMBED, FINAL_NORM, HEAD}):
    # Early Llama checkpoints store this table, which follows from the config.
    if name.endswith("rotary_emb.inv_freq"):
      continue
    parts = name.split(".")
    in_layer = name.startswith("model.layers.") and len(parts) > 3
    if not in_layer or ".".join(parts[:3]) + "." in own:
      raise ValueError(f"model tensor {name} is not used by {config.family}")
  return shapes


def hash_tensors(config: ModelConfig, source: TensorSource) -> str:
  """Returns 16 hexadecimal digits that identify a model on every host.

  SHA-256 over the config's fields, and over the name, shape, stored dtype and
  4 evenly spaced windows of 64 bytes of every tensor the model uses. It depends
  on neither paths nor shards, and costs a few kilobytes of reading per layer.
  It tells models, quantisations and finetunes apart; it is no checksum: damage
  between the windows goes unseen.

  Raises:
    ValueError: as `check_tensors`.
  """
  digest = hashlib.sha256()
  fields = dataclasses.asdict(config)
  digest.update(json.dumps(fields, sort_keys=True).encode())
  layers = range(config.num_layers)
  shapes = check_tensors(config, source, layers, first=True, last=True)
  for name in sorted(shapes):
    shape, dtype = source.describe(name)
    digest.update(json.dumps([name, shape, dtype]).encode())
    raw = source.raw(name)
    span = max(raw.size - _WINDOW_BYTES, 0)
    for k in range(_WINDOWS):
      start = span * k // (_WINDOWS - 1)
      digest.update(raw[start : start + _WINDOW_BYTES].tobytes())
  return digest.hexdigest()[:16]
