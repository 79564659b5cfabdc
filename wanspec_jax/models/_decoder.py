# SPDX-License-Identifier: Apache-2.0
"""Llama-like decoders as pure stage functions over pytrees."""

import dataclasses
from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp

from wanspec_jax.models._config import ModelConfig
from wanspec_jax.models._params import LayerParams, StageParams
from wanspec_jax.models._rope import rope_table, rotate

_MASKED = -1e30  # finite: a row that sees nothing must not become NaN


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class KVCache:
  """Keys and values of one stage, by slot.

  Keys are stored after RoPE at their absolute position, so a row never moves.
  Slots are the last axis of keys: the layout in which XLA's CPU products are
  ten times faster than with slots first (docs/performance.md).

  Attributes:
    keys: per layer, `[K, head_dim, S]` for `K` key-value heads and `S` slots.
    values: per layer, `[K, S, head_dim]`.
    rope: `[S, 2, head_dim / 2]` float32 cosines and sines by position; a
      sequence never has more positions than the cache has slots.
  """

  keys: tuple[jax.Array, ...]
  values: tuple[jax.Array, ...]
  rope: jax.Array

  @property
  def num_slots(self) -> int:
    return self.keys[0].shape[-1]


def init_cache(
  config: ModelConfig,
  *,
  num_layers: int,
  num_slots: int,
  dtype: jnp.dtype = jnp.float32,
) -> KVCache:
  """Returns an empty cache of `num_slots` slots for `num_layers` layers."""
  kv_heads, dim = config.num_kv_heads, config.head_dim
  return KVCache(
    keys=tuple(
      jnp.zeros((kv_heads, dim, num_slots), dtype) for _ in range(num_layers)
    ),
    values=tuple(
      jnp.zeros((kv_heads, num_slots, dim), dtype) for _ in range(num_layers)
    ),
    rope=jnp.asarray(rope_table(config, num_slots)),
  )


def resize_cache(
  cache: KVCache, config: ModelConfig, num_slots: int
) -> KVCache:
  """Returns the cache with `num_slots` slots; rows keep their slots.

  Shrinking drops the slots at the end: the caller knows that they are free.
  """
  grow = num_slots - cache.num_slots

  def fit(x, axis):
    if grow <= 0:
      return jax.lax.slice_in_dim(x, 0, num_slots, axis=axis)
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, grow)
    return jnp.pad(x, widths)

  return KVCache(
    keys=tuple(fit(k, 2) for k in cache.keys),
    values=tuple(fit(v, 1) for v in cache.values),
    rope=jnp.asarray(rope_table(config, num_slots)),
  )


def rms_norm(
  x: jax.Array, weight: jax.Array, eps: float, *, exact: bool = True
) -> jax.Array:
  """Returns x · weight / √(mean(x²) + ε) over the last axis, in float32.

  With `exact` the mean is taken in float64 and rounded: in float32 its last bit
  depends on how many rows there are (XLA's CPU code sums small and large
  reductions in different orders).
  """
  x = x.astype(jnp.float32)
  with jax.enable_x64(exact):
    wide = x.astype(jnp.float64 if exact else jnp.float32)
    mean = jnp.mean(wide * wide, axis=-1, keepdims=True).astype(jnp.float32)
  scale = jax.lax.rsqrt(mean + jnp.float32(eps))
  weight = weight.reshape((1,) * (x.ndim - 1) + weight.shape)
  return x * scale * weight


def _linear(x: jax.Array, weight: jax.Array) -> jax.Array:
  """`[N, in] · [out, in]ᵀ` with inputs in the weight's dtype, float32 out."""
  return jax.lax.dot_general(
    x.astype(weight.dtype),
    weight,
    (((1,), (1,)), ((), ())),
    preferred_element_type=jnp.float32,
  )


def attend(
  queries: jax.Array,
  keys: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  *,
  exact: bool = True,
) -> jax.Array:
  """Returns attention over slots, independent of where rows sit.

  All of it is computed in float64 and rounded to float32 at the end. In float32
  the last bits of the sums depend on the order of the slots, those of the
  scores on how many slots and rows there are (XLA's CPU products switch
  kernels with the shape), those of the exponentials on how many scores (small
  maxima are fused with them); a near-tie later turns a bit into another token.

  Args:
    queries: `[N, H, head_dim]` float32, rotated.
    keys: `[K, head_dim, S]`, rotated; `H` is a multiple of `K`.
    values: `[K, S, head_dim]`.
    mask: `[N, S]` bool, true where the row sees the slot.
    exact: accumulate in float64; off, in float32 as accelerators without fast
      float64 must, and bits then depend on slots.

  Returns:
    `[N, H · head_dim]` float32. Rows that see nothing get the mean of all
    slots: padding, which nobody reads.
  """
  num_rows, num_heads, dim = queries.shape
  kv_heads = keys.shape[0]
  group = num_heads // kv_heads
  q = queries * jnp.float32(dim**-0.5)
  q = q.reshape(num_rows, kv_heads, group, dim).transpose(1, 2, 0, 3)
  q = q.reshape(kv_heads, group * num_rows, dim).astype(keys.dtype)
  with jax.enable_x64(exact):
    wide = jnp.float64 if exact else jnp.float32
    if exact:
      q, keys = q.astype(wide), keys.astype(wide)
    scores = jax.lax.dot_general(
      q,
      keys,
      (((2,), (1,)), ((0,), (0,))),
      # Of float64 operands it is float64; to say so breaks their gradient.
      preferred_element_type=None if exact else jnp.float32,
    )
    scores = scores.reshape(kv_heads, group, num_rows, -1)
    scores = jnp.where(mask[None, None], scores, jnp.asarray(_MASKED, wide))
    weights = jnp.exp(scores - jnp.max(scores, axis=-1, keepdims=True))
    weights = weights.reshape(kv_heads, group * num_rows, -1)
    out = jax.lax.dot_general(
      weights, values.astype(wide), (((2,), (1,)), ((0,), (0,)))
    )
    out = out / jnp.sum(weights, axis=-1, keepdims=True)
    out = out.astype(jnp.float32)
  out = out.reshape(kv_heads, group, num_rows, dim).transpose(2, 0, 1, 3)
  return out.reshape(num_rows, num_heads * dim)


def _layer(
  params: LayerParams,
  keys: jax.Array,
  values: jax.Array,
  x: jax.Array,
  *,
  slots: jax.Array,
  cos_sin: jax.Array,
  mask: jax.Array,
  config: ModelConfig,
  exact: bool,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  heads, kv_heads, dim = (
    config.num_heads,
    config.num_kv_heads,
    config.head_dim,
  )
  num_rows = x.shape[0]
  h = rms_norm(x, params.attn_norm, config.rms_norm_eps, exact=exact)
  qkv = _linear(h, params.wqkv)
  if params.bqkv is not None:
    qkv = qkv + params.bqkv[None]
  q, k, v = jnp.split(qkv, [heads * dim, (heads + kv_heads) * dim], axis=-1)
  q = q.reshape(num_rows, heads, dim)
  k = k.reshape(num_rows, kv_heads, dim)
  v = v.reshape(num_rows, kv_heads, dim)
  if params.q_norm is not None and params.k_norm is not None:
    q = rms_norm(q, params.q_norm, config.rms_norm_eps, exact=exact)
    k = rms_norm(k, params.k_norm, config.rms_norm_eps, exact=exact)
  q, k = rotate(q, cos_sin), rotate(k, cos_sin)
  # A weight of 0 does not silence a NaN: an overflow in a row that nobody may
  # see must not reach others. The row itself stays NaN in its residual stream.
  v = jnp.where(jnp.isfinite(v), v, jnp.float32(0))
  # Padding rows carry the slot S, which `drop` discards.
  keys = keys.at[:, :, slots].set(
    k.transpose(1, 2, 0).astype(keys.dtype), mode="drop"
  )
  values = values.at[:, slots].set(
    v.transpose(1, 0, 2).astype(values.dtype), mode="drop"
  )
  x = x + _linear(attend(q, keys, values, mask, exact=exact), params.wo)
  h = rms_norm(x, params.mlp_norm, config.rms_norm_eps, exact=exact)
  gate, up = jnp.split(_linear(h, params.w_gate_up), 2, axis=-1)
  x = x + _linear(jax.nn.silu(gate) * up, params.w_down)
  return x, keys, values


def stage(
  params: StageParams,
  cache: KVCache,
  x: jax.Array,
  slots: jax.Array,
  positions: jax.Array,
  mask: jax.Array,
  *,
  config: ModelConfig,
  exact: bool = True,
) -> tuple[jax.Array, KVCache]:
  """Runs a contiguous range of layers over `N` rows.

  Args:
    params: this stage's layers; with `embed` if it is the first.
    cache: this stage's keys and values, `S` slots.
    x: `[N]` int32 tokens on the first stage, else `[N, D]` float32 residual
      stream.
    slots: `[N]` int32 slot that each row writes to; `S` for padding rows.
    positions: `[N]` int32 absolute position of each row (its depth below the
      first token, never its row).
    mask: `[N, S]` bool, true where a row sees a slot; a row's own slot
      included.
    config: the model, static.
    exact: see `attend` and `rms_norm`, static.

  Returns:
    `[N, D]` float32 residual stream after this stage's layers, and the cache.
  """
  chex.assert_rank([slots, positions, mask], [1, 1, 2])
  num_rows = slots.shape[0]
  chex.assert_shape(positions, (num_rows,))
  chex.assert_shape(mask, (num_rows, cache.num_slots))
  if params.embed is not None:
    chex.assert_shape(x, (num_rows,))
    x = params.embed[x].astype(jnp.float32)
  else:
    chex.assert_shape(x, (num_rows, config.hidden_size))
  cos_sin = cache.rope[positions]
  keys, values = list(cache.keys), list(cache.values)
  # Unrolled: `lax.scan` over stacked weights copies each layer's slice, which
  # costs twice the time of the layer itself on a CPU.
  for i, layer in enumerate(params.layers):
    x, keys[i], values[i] = _layer(
      layer,
      keys[i],
      values[i],
      x,
      slots=slots,
      cos_sin=cos_sin,
      mask=mask,
      config=config,
      exact=exact,
    )
  return x, dataclasses.replace(cache, keys=tuple(keys), values=tuple(values))


def head(
  params: StageParams,
  x: jax.Array,
  *,
  config: ModelConfig,
  exact: bool = True,
) -> jax.Array:
  """Returns `[N, V]` float32 logits of the last stage's residual stream.

  Args:
    params: the last stage's.
    x: `[N, D]` float32.
    config: the model, static.
    exact: see `rms_norm`, static.

  Raises:
    ValueError: if the stage has no head.
  """
  if params.head is None or params.final_norm is None:
    raise ValueError("head: params must be the last stage's, which has one")
  chex.assert_shape(x, (None, config.hidden_size))
  return _linear(
    rms_norm(x, params.final_norm, config.rms_norm_eps, exact=exact),
    params.head,
  )


def forward_logits(
  params: StageParams,
  tokens: Sequence[int] | jax.Array,
  *,
  config: ModelConfig,
) -> jax.Array:
  """Returns `[T, V]` logits of a whole model over one text, without a cache.

  The plain reading of the model, for parity tests and small studies.
  """
  length = len(tokens)
  index = jnp.arange(length, dtype=jnp.int32)
  cache = init_cache(config, num_layers=len(params.layers), num_slots=length)
  hidden, _ = stage(
    params,
    cache,
    jnp.asarray(tokens, jnp.int32),
    index,
    index,
    index[None, :] <= index[:, None],
    config=config,
  )
  return head(params, hidden, config=config)
