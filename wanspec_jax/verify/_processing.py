# SPDX-License-Identifier: Apache-2.0
"""The law that tokens are drawn from: temperature, top-k, top-p and min-p.

Nothing is sorted. A boundary of the kept set is found by bisection over the
bits of a float32 (31 passes of compare-and-add over the vocabulary), which on a
CPU costs a tenth of a sort, and nothing at all when the filter is off.
"""

import chex
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

TINY = float(np.finfo(np.float32).tiny)  # smallest normal float32


def process(
  logits: jax.Array,
  *,
  temperature: ArrayLike,
  top_k: ArrayLike,
  top_p: ArrayLike,
  min_p: ArrayLike,
) -> jax.Array:
  """Returns the log-probabilities that sampling really draws from.

  Filters act in this order, each on what the one before has kept:

  1. temperature: p ∝ exp(logits / temperature);
  2. top-k: the `top_k` most likely tokens;
  3. top-p: the shortest prefix of the tokens, most likely first, whose mass
     (renormalised after top-k) reaches `top_p`; the token that crosses the
     line is kept (https://arxiv.org/abs/1904.09751);
  4. min-p: tokens with p ≥ `min_p` · max p (https://arxiv.org/abs/2407.01082);
     a ratio, so renormalising does not move it.

  Equal tokens at a boundary are kept lowest id first. At least the most likely
  token always stays. All parameters are dynamic: changing them never
  recompiles. Under `jax.vmap` the filters that are off are computed as well.

  Args:
    logits: `[V]` float logits, at least one finite, none NaN or +inf; -inf
      excludes a token.
    temperature: `[]` positive; values below the smallest normal float32 count
      as that. Greedy decoding (temperature 0) is the caller's affair: it is
      an argmax and needs no law.
    top_k: `[]` int32; 0, or at least V, keeps all.
    top_p: `[]` in (0, 1]; 1 keeps all.
    min_p: `[]` in [0, 1]; 0 keeps all.

  Returns:
    `[V]` float32 normalised log-probabilities, -inf outside the kept set.
  """
  chex.assert_rank(logits, 1)
  size = logits.shape[0]
  logits = logits.astype(jnp.float32)
  temperature = jnp.maximum(jnp.asarray(temperature, jnp.float32), TINY)
  top_k = jnp.asarray(top_k, jnp.int32)
  top_p = jnp.asarray(top_p, jnp.float32)
  min_p = jnp.asarray(min_p, jnp.float32)

  # `cost` = log(max p / p) ≥ 0: its bits, read as an integer, grow with it.
  cost = (jnp.max(logits) - logits) / temperature
  weights = jnp.exp(-cost)
  keep = jax.lax.cond(
    (top_k > 0) & (top_k < size),
    lambda: _cheapest(cost, jnp.ones((size,), jnp.int32), top_k),
    lambda: jnp.ones((size,), jnp.bool_),
  )
  keep = jax.lax.cond(
    top_p < 1.0,
    lambda: _nucleus(cost, weights, keep, top_p),
    lambda: keep,
  )
  keep &= weights >= min_p
  log_weights = jnp.where(keep, -cost, -jnp.inf)
  return log_weights - jnp.log(jnp.sum(jnp.exp(log_weights)))


def _nucleus(
  cost: jax.Array, weights: jax.Array, keep: jax.Array, top_p: jax.Array
) -> jax.Array:
  """Returns the `[V]` mask of the top-p set within `keep`."""
  weights = jnp.where(keep, weights, 0.0)
  # A positive goal keeps the most likely token even if the product underflows.
  goal = jnp.maximum(top_p * jnp.sum(weights), TINY)
  return keep & _cheapest(cost, weights, goal)


def _cheapest(
  cost: jax.Array, weights: jax.Array, goal: jax.Array
) -> jax.Array:
  """Returns the shortest prefix, in order of (cost, id), that weighs `goal`.

  Args:
    cost: `[V]` float32, non-negative.
    weights: `[V]` non-negative weights, equal wherever costs and masks are.
    goal: `[]` positive, at most the sum of the weights.

  Returns:
    `[V]` bool mask. A token is kept iff what precedes it weighs less than
    `goal`.
  """
  bits = jax.lax.bitcast_convert_type(cost, jnp.uint32)

  def weight_below(bound):
    # A masked sum in one fixed order: monotone in `bound` despite rounding.
    return jnp.sum(jnp.where(bits < bound, weights, 0), dtype=weights.dtype)

  def body(i, bound):
    # The sign bit is never set, so 31 bits suffice.
    higher = bound | (jnp.uint32(1) << (jnp.uint32(30) - i))
    return jnp.where(weight_below(higher) < goal, higher, bound)

  # The largest bound below which there is too little: the boundary's own cost.
  bound = jax.lax.fori_loop(jnp.uint32(0), jnp.uint32(31), body, jnp.uint32(0))
  ties = bits == bound
  # Exclusive: what precedes a tie is all that is cheaper, and earlier ties.
  tied = jnp.cumsum(jnp.where(ties, weights, 0), dtype=weights.dtype)
  before = weight_below(bound) + tied - jnp.where(ties, weights, 0)
  return (bits < bound) | (ties & (before < goal))
