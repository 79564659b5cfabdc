# SPDX-License-Identifier: Apache-2.0
"""Finds a model's files and loads its config, identity and stages from them."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from wanspec_jax.models import _source
from wanspec_jax.models._config import ModelConfig
from wanspec_jax.models._config_readers import from_hf
from wanspec_jax.models._gguf import (
  find_default_model,
  gguf_config,
  open_gguf,
  read_gguf,
)
from wanspec_jax.models._params import LayerParams, StageParams, stage_ends
from wanspec_jax.models._safetensors import open_safetensors, read_json
from wanspec_jax.models._source import TensorSource

DEFAULT_NAME = "smollm2"
MODEL_VARIABLE = "WANSPEC_MODEL"

_DTYPES = (np.dtype(np.float32), np.dtype(jnp.bfloat16))


def resolve_model(name_or_path: str | os.PathLike[str]) -> pathlib.Path:
  """Returns the GGUF file or Hugging Face directory that a name stands for.

  Args:
    name_or_path: `"smollm2"` for the default model (environment variable
      `WANSPEC_MODEL`, if set, else the installed package), a `.gguf` file, or a
      directory with `config.json` and safetensors.

  Raises:
    ValueError: saying what is missing.
  """
  wanted = os.fspath(name_or_path)
  if wanted == DEFAULT_NAME:
    override = os.environ.get(MODEL_VARIABLE)
    if not override:
      return find_default_model()
    wanted = override
  path = pathlib.Path(wanted)
  if path.is_dir():
    if not (path / "config.json").exists():
      raise ValueError(f"model {wanted!r}: config.json is missing")
    return path
  if path.suffix == ".gguf" and path.is_file():
    return path
  raise ValueError(
    f"model {wanted!r}: must be {DEFAULT_NAME!r}, an existing .gguf file or an"
    " existing directory with config.json and safetensors"
  )


def open_model(
  name_or_path: str | os.PathLike[str],
) -> tuple[ModelConfig, TensorSource]:
  """Returns a model's config and its tensors, none of which is read yet.

  Raises:
    ValueError: if files are missing or the model is not supported.
  """
  path = resolve_model(name_or_path)
  if path.is_dir():
    config = from_hf(read_json(path / "config.json"))
    return config, open_safetensors(path)
  file = read_gguf(path)
  config = gguf_config(file)
  return config, open_gguf(file, config)


def load_config(name_or_path: str | os.PathLike[str]) -> ModelConfig:
  """Returns what the model computes; refuses what is not supported."""
  path = resolve_model(name_or_path)
  if path.is_dir():
    return from_hf(read_json(path / "config.json"))
  return gguf_config(read_gguf(path))


def model_hash(name_or_path: str | os.PathLike[str]) -> str:
  """Returns 16 hexadecimal digits that identify the model on all hosts.

  It covers the config, every tensor's name, shape and dtype, and samples of
  every tensor's bytes (`hash_tensors` has the details); all shards must be
  present. Quantisations of one model differ.
  """
  return _source.hash_tensors(*open_model(name_or_path))


def load_stage(
  name_or_path: str | os.PathLike[str],
  config: ModelConfig,
  *,
  first_layer: int,
  num_layers: int,
  dtype: DTypeLike = jnp.float32,
  source: TensorSource | None = None,
) -> StageParams:
  """Returns one stage's parameters; reads no tensor of any other stage.

  Args:
    name_or_path: as for `resolve_model`.
    config: what `load_config` said of it.
    first_layer: first layer of the stage; 0 embeds.
    num_layers: how many; the stage that reaches `config.num_layers` has the
      final norm and the head.
    dtype: of the matrices, float32 or bfloat16; norms and biases are float32.
    source: where to read from instead of the files.

  Raises:
    ValueError: if the range leaves the model, the dtype is another one, or a
      tensor is missing, has the wrong shape, or would not be used.
  """
  first, last = stage_ends(config, first_layer, num_layers)
  kind = np.dtype(dtype)
  if kind not in _DTYPES:
    raise ValueError(f"dtype = {kind}: must be float32 or bfloat16")
  if source is None:
    _, source = open_model(name_or_path)
  layers = range(first_layer, first_layer + num_layers)
  _source.check_tensors(config, source, layers, first=first, last=last)
  embed = None
  if first or (last and config.tie_embeddings):
    embed = _stack(source, [_source.EMBED], kind)
  head = None
  if last:
    tied = config.tie_embeddings
    head = embed if tied else _stack(source, [_source.HEAD], kind)
  return StageParams(
    embed=embed if first else None,
    layers=tuple(_load_layer(source, config, i, kind) for i in layers),
    final_norm=(
      _stack(source, [_source.FINAL_NORM], np.dtype(np.float32))
      if last
      else None
    ),
    head=head,
  )


def _stack(
  source: TensorSource, names: list[str], dtype: np.dtype
) -> jax.Array:
  """Returns tensors on top of each other, copied out of the file's map."""
  shapes = [source.describe(name)[0] for name in names]
  rows = sum(shape[0] for shape in shapes)
  out = np.empty((rows, *shapes[0][1:]), dtype)
  start = 0
  for name, shape in zip(names, shapes, strict=True):
    out[start : start + shape[0]] = source.read(name)
    start += shape[0]
  return jnp.asarray(out)


def _load_layer(
  source: TensorSource, config: ModelConfig, layer: int, dtype: np.dtype
) -> LayerParams:
  prefix = _source.layer_prefix(layer)

  def matrix(*names: str) -> jax.Array:
    return _stack(source, [f"{prefix}{name}.weight" for name in names], dtype)

  def vector(*names: str) -> jax.Array:
    return _stack(
      source, [prefix + name for name in names], np.dtype(np.float32)
    )

  qkv = [f"self_attn.{name}_proj" for name in "qkv"]
  bias, qk_norm = config.qkv_bias, config.qk_norm
  return LayerParams(
    attn_norm=vector("input_layernorm.weight"),
    wqkv=matrix(*qkv),
    bqkv=vector(*(f"{name}.bias" for name in qkv)) if bias else None,
    q_norm=vector("self_attn.q_norm.weight") if qk_norm else None,
    k_norm=vector("self_attn.k_norm.weight") if qk_norm else None,
    wo=matrix("self_attn.o_proj"),
    mlp_norm=vector("post_attention_layernorm.weight"),
    w_gate_up=matrix("mlp.gate_proj", "mlp.up_proj"),
    w_down=matrix("mlp.down_proj"),
  )
