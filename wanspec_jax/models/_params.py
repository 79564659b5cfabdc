# SPDX-License-Identifier: Apache-2.0
"""Parameters of a stage as pytrees; cutting a model; random models."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from wanspec_jax.models._config import ModelConfig


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerParams:
  """One decoder block. Matrices are `[out, in]`, as checkpoints store them.

  `D` is the model width, `F` the MLP width, `H` and `K` the query and key/value
  heads, `d` the head width. Norms and biases are float32, matrices of one
  dtype. Rows of q and k are in rotate-half order.
  """

  attn_norm: jax.Array  # [D]
  wqkv: jax.Array  # [(H + 2K) d, D]: rows of q, then of k, then of v
  bqkv: jax.Array | None  # [(H + 2K) d]
  q_norm: jax.Array | None  # [d]
  k_norm: jax.Array | None  # [d]
  wo: jax.Array  # [D, H d]
  mlp_norm: jax.Array  # [D]
  w_gate_up: jax.Array  # [2F, D]: rows of gate, then of up
  w_down: jax.Array  # [D, F]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class StageParams:
  """A contiguous range of layers, with what the ends of the model need.

  Attributes:
    embed: `[V, D]` embedding; None but on the first stage.
    layers: the blocks, first to last.
    final_norm: `[D]` float32; None but on the last stage.
    head: `[V, D]` output head; None but on the last stage. With tied
      embeddings it is the embedding matrix (the same array, not a copy, on a
      stage that has both).
  """

  embed: jax.Array | None
  layers: tuple[LayerParams, ...]
  final_norm: jax.Array | None
  head: jax.Array | None


def even_cuts(num_layers: int, num_stages: int) -> tuple[tuple[int, int], ...]:
  """Returns `(first_layer, num_layers)` of each stage, as even as possible.

  What does not divide goes to the first stages, one layer each: the last stage
  has the output head's work besides.

  Raises:
    ValueError: if there are no stages, or more stages than layers.
  """
  if not 1 <= num_stages <= num_layers:
    raise ValueError(
      f"num_stages = {num_stages}: must lie in [1, num_layers = {num_layers}]"
    )
  base, extra = divmod(num_layers, num_stages)
  cuts, first = [], 0
  for stage in range(num_stages):
    size = base + (stage < extra)
    cuts.append((first, size))
    first += size
  return tuple(cuts)


def stage_ends(
  config: ModelConfig, first_layer: int, num_layers: int
) -> tuple[bool, bool]:
  """Returns whether a range of layers is the model's first and last stage.

  Raises:
    ValueError: if the range is empty or leaves the model.
  """
  last_layer = first_layer + num_layers
  if first_layer < 0 or num_layers < 1 or last_layer > config.num_layers:
    raise ValueError(
      f"(first_layer, num_layers) = {(first_layer, num_layers)}: must be a"
      f" non-empty range within {config.num_layers} layers"
    )
  return first_layer == 0, last_layer == config.num_layers


def slice_stage(
  params: StageParams,
  config: ModelConfig,
  *,
  first_layer: int,
  num_layers: int,
) -> StageParams:
  """Returns one stage of a whole model, sharing its arrays.

  Raises:
    ValueError: if `params` is not the whole model, or the range leaves it.
  """
  if len(params.layers) != config.num_layers:
    raise ValueError(
      f"params.layers has {len(params.layers)} layers: must be the whole"
      f" model's {config.num_layers}"
    )
  first, last = stage_ends(config, first_layer, num_layers)
  return StageParams(
    embed=params.embed if first else None,
    layers=params.layers[first_layer : first_layer + num_layers],
    final_norm=params.final_norm if last else None,
    head=params.head if last else None,
  )


def random_stage(
  key: jax.Array,
  config: ModelConfig,
  *,
  first_layer: int,
  num_layers: int,
  dtype: DTypeLike = jnp.float32,
) -> StageParams:
  """Returns a stage of a random model, for tests and timings.

  Matrices are normal with variance 1 / (inputs), embeddings standard normal,
  norms and biases scattered around 1 and 0. Keys are addressed by layer and
  tensor: stages made apart, with one key, are cuts of one model.

  Args:
    key: a typed key.
    config: the model.
    first_layer: first layer of the stage.
    num_layers: how many.
    dtype: of the matrices.

  Raises:
    ValueError: if the range leaves the model.
  """
  first, last = stage_ends(config, first_layer, num_layers)
  width, inner = config.hidden_size, config.intermediate_size
  qkv_rows = config.q_rows + 2 * config.kv_rows
  ends_key, layers_key = (jax.random.fold_in(key, i) for i in range(2))

  def matrix(key, index, shape, scale):
    values = jax.random.normal(
      jax.random.fold_in(key, index), shape, jnp.float32
    )
    return (values * jnp.float32(scale)).astype(dtype)

  def vector(key, index, size, mean):
    values = jax.random.normal(
      jax.random.fold_in(key, index), (size,), jnp.float32
    )
    return jnp.float32(mean) + jnp.float32(0.1) * values

  def layer(index):
    key = jax.random.fold_in(layers_key, index)
    qk_norm, bias = config.qk_norm, config.qkv_bias
    return LayerParams(
      attn_norm=vector(key, 0, width, 1.0),
      wqkv=matrix(key, 1, (qkv_rows, width), width**-0.5),
      bqkv=vector(key, 2, qkv_rows, 0.0) if bias else None,
      q_norm=vector(key, 3, config.head_dim, 1.0) if qk_norm else None,
      k_norm=vector(key, 4, config.head_dim, 1.0) if qk_norm else None,
      wo=matrix(key, 5, (width, config.q_rows), config.q_rows**-0.5),
      mlp_norm=vector(key, 6, width, 1.0),
      w_gate_up=matrix(key, 7, (2 * inner, width), width**-0.5),
      w_down=matrix(key, 8, (width, inner), inner**-0.5),
    )

  table = (config.vocab_size, width)
  needs_embed = first or (last and config.tie_embeddings)
  embed = matrix(ends_key, 0, table, 1.0) if needs_embed else None
  head = None
  if last:
    untied = not config.tie_embeddings
    head = matrix(ends_key, 1, table, 1 / math.sqrt(width)) if untied else embed
  return StageParams(
    embed=embed if first else None,
    layers=tuple(layer(first_layer + i) for i in range(num_layers)),
    final_norm=vector(ends_key, 2, width, 1.0) if last else None,
    head=head,
  )


def random_params(
  key: jax.Array, config: ModelConfig, *, dtype: DTypeLike = jnp.float32
) -> StageParams:
  """Returns a whole random model; see `random_stage`."""
  return random_stage(
    key, config, first_layer=0, num_layers=config.num_layers, dtype=dtype
  )
