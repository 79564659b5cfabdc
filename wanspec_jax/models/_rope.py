# SPDX-License-Identifier: Apache-2.0
"""Rotary position embedding: frequencies (host) and rotation (device)."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from wanspec_jax.models._config import ModelConfig


def inverse_frequencies(config: ModelConfig) -> tuple[np.ndarray, float]:
  """Returns RoPE's inverse frequencies and the factor on cos and sin.

  The base frequencies are θ^(-2i/d). Scaling follows the published rules:
  `linear` divides them by the factor; `llama3` divides those whose wavelength
  exceeds the original context, keeps the short ones and interpolates between
  (Llama 3.1); `yarn` blends by the number of rotations over the original
  context and scales attention by `0.1 ln(factor) + 1` unless told otherwise
  (https://arxiv.org/abs/2309.00071).

  Args:
    config: a decoder whose `rope_scaling` has been validated at loading.

  Returns:
    `[head_dim / 2]` float64 frequencies in radians per position, and the
    factor that multiplies cos and sin (1 unless `yarn`).
  """
  dim = config.head_dim
  base = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
  scaling = config.rope_scaling
  if scaling is None:
    return base, 1.0
  if scaling.kind == "linear":
    return base / scaling.factor, 1.0
  if scaling.kind == "factors":  # Llama 3 as GGUF files carry it
    return base / np.asarray(scaling.freq_factors, np.float64), 1.0
  original = scaling.original_max_position or config.max_position
  if scaling.kind == "llama3":
    rotations = original * base / (2 * math.pi)  # over the original context
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    keep = np.clip((rotations - low) / (high - low), 0.0, 1.0)
    return keep * base + (1 - keep) * base / scaling.factor, 1.0
  if scaling.kind == "yarn":
    # Dimension whose frequency makes `r` rotations over the original context.
    def dimension_of(r):
      return (
        dim
        * math.log(original / (r * 2 * math.pi))
        / (2 * math.log(config.rope_theta))
      )

    low = max(math.floor(dimension_of(scaling.beta_fast)), 0)
    high = min(math.ceil(dimension_of(scaling.beta_slow)), dim - 1)
    span = max(high - low, 1e-3)
    interpolate = np.clip((np.arange(dim // 2) - low) / span, 0.0, 1.0)
    blended = interpolate * base / scaling.factor + (1 - interpolate) * base
    attention = scaling.attention_factor
    if attention is None:
      attention = 0.1 * math.log(scaling.factor) + 1.0
    return blended, float(attention)
  raise ValueError(
    f"rope_scaling.kind = {scaling.kind!r}: must be one of 'linear', "
    "'llama3', 'yarn', 'factors'"
  )


def rope_table(config: ModelConfig, num_positions: int) -> np.ndarray:
  """Returns `[num_positions, 2, head_dim / 2]` float32 cosines and sines.

  Made once on the host in float64: a table lookup gives a position the same
  bits whatever the row bucket, which vectorised cosines need not.
  """
  frequencies, factor = inverse_frequencies(config)
  angles = np.arange(num_positions, dtype=np.float64)[:, None] * frequencies
  table = np.stack([np.cos(angles), np.sin(angles)], axis=1) * factor
  return table.astype(np.float32)


def rotate(x: jax.Array, cos_sin: jax.Array) -> jax.Array:
  """Rotates halves: `(a, b) → (a cos − b sin, b cos + a sin)`.

  Args:
    x: `[N, heads, head_dim]` float32 queries or keys.
    cos_sin: `[N, 2, head_dim / 2]` rows of `rope_table`.

  Returns:
    `[N, heads, head_dim]` float32.
  """
  cos = cos_sin[:, None, 0]
  sin = cos_sin[:, None, 1]
  a, b = jnp.split(x, 2, axis=-1)
  return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
