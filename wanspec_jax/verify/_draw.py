# SPDX-License-Identifier: Apache-2.0
"""Addressed draws: the same seed and position give the same token anywhere.

Specification, in integers up to the last step, so that any other program can
reproduce the noise. T(k, c) is Threefry-2x32 with 20 rounds
(https://doi.org/10.1145/2063384.2063405), k and c pairs of 32-bit words:

  k₀ = (seed >> 32, seed mod 2³²)
  k₁ = T(k₀, (0, purpose)),   k₂ = T(k₁, (0, position))
  (a, b) = T(k₂, (0, i)),   bitsᵢ = a xor b                 for token id i

`position` is the absolute position of the token being produced, never that of
the token that it follows. This is what `jax.random.fold_in` and
`jax.random.bits` compute with the implementation pinned and JAX's default
`jax_threefry_partitionable`. The bits do not depend on the backend, on 64-bit
mode, on how many ids follow `i`, or on the row and batch of the draw.
"""

import dataclasses
import enum
from typing import NamedTuple

import chex
import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from wanspec_jax.messages import Sampling
from wanspec_jax.verify._processing import TINY, process

_BELOW_ONE = 1.0 - 2.0**-24  # the largest float32 below 1


class Purpose(enum.IntEnum):
  """What a key is for; streams of different purposes are independent.

  The numbers are part of every recorded run: append, never renumber.
  """

  RACE = 1  # the target's token; shared with drafters, which couples them
  DRAFT = 2  # a drafter's private draws
  ACCEPT = 3  # coins of ratio tests
  RESIDUAL = 4  # what a ratio test emits after its last rejection
  POLICY = 5  # schedules that explore


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingArrays:
  """`messages.Sampling` as scalars on the device.

  Attributes:
    temperature: `[]` float32; 0 means greedy.
    top_k: `[]` int32; 0 keeps all.
    top_p: `[]` float32; 1 keeps all.
    min_p: `[]` float32; 0 keeps all.
    seed_hi: `[]` uint32 high word of the seed.
    seed_lo: `[]` uint32 low word.
  """

  temperature: jax.Array  # []
  top_k: jax.Array  # []
  top_p: jax.Array  # []
  min_p: jax.Array  # []
  seed_hi: jax.Array  # []
  seed_lo: jax.Array  # []


def sampling_arrays(sampling: Sampling) -> SamplingArrays:
  """Returns the device form of `sampling`.

  A positive temperature too small for float32 becomes the smallest normal one,
  not 0: it shares ties evenly instead of taking the lowest id.
  """
  temperature = sampling.temperature
  if temperature > 0:
    temperature = max(temperature, TINY)
  hi, lo = _words(sampling.seed)
  return SamplingArrays(
    temperature=jnp.asarray(temperature, jnp.float32),
    top_k=jnp.asarray(min(sampling.top_k, 2**31 - 1), jnp.int32),
    top_p=jnp.asarray(sampling.top_p, jnp.float32),
    min_p=jnp.asarray(sampling.min_p, jnp.float32),
    seed_hi=hi,
    seed_lo=lo,
  )


def address_key(
  seed: int | tuple[ArrayLike, ArrayLike],
  purpose: Purpose,
  position: ArrayLike,
  *lanes: ArrayLike,
) -> jax.Array:
  """Returns the key of one address: fold_in of seed, purpose, position, lanes.

  Args:
    seed: the request's seed in [0, 2⁶³), or its two 32-bit words, high first.
    purpose: what the draw is for.
    position: `[]` absolute position of the token being produced, from 0.
    *lanes: `[]` integers that tell apart draws for one position, such as the
      rank among siblings or the lane of a multi-lane race.

  Raises:
    ValueError: if an integer `seed` is out of range.
  """
  hi, lo = seed if isinstance(seed, tuple) else _words(seed)
  words = jnp.stack([jnp.asarray(hi, jnp.uint32), jnp.asarray(lo, jnp.uint32)])
  key = jax.random.wrap_key_data(words, impl="threefry2x32")
  for part in (int(purpose), position, *lanes):
    key = jax.random.fold_in(key, jnp.asarray(part).astype(jnp.uint32))
  return key


def race_key(
  seed: int | tuple[ArrayLike, ArrayLike], position: ArrayLike
) -> jax.Array:
  """Returns the key that drafter and verifier share for one position.

  A drafter that proposes the largest `log q + gumbel_noise(race_key(…), V)`
  matches the target's draw with probability at least (1 − TV) / (1 + TV)
  (Daliri et al., https://arxiv.org/abs/2408.07978) and cannot change it. For
  its arguments see `address_key`.
  """
  return address_key(seed, Purpose.RACE, position)


def gumbel_noise(key: jax.Array, size: int) -> jax.Array:
  """Returns `[size]` float32 standard Gumbel noise; sizes share prefixes.

  g = −log(−log(1 − u)), u = (bits + ½) / 2³² with 32 bits, so 0 < u < 1. The
  end that decides races is where u is small, and there float32 resolves the
  whole 2⁻³² grid. Tails: g ≤ log 2³³ = 22.9, so a token less likely than about
  10⁻¹⁰ never wins a race that it should win that seldom; u is cut at 1 − 2⁻²⁴,
  hence g ≥ −2.82, among losers only.

  Args:
    key: a typed key, see `race_key`.
    size: V.
  """
  bits = jax.random.bits(key, (size,), jnp.uint32)
  u = (bits.astype(jnp.float32) + 0.5) * jnp.float32(2.0**-32)
  u = jnp.minimum(u, jnp.float32(_BELOW_ONE))
  return -jnp.log(-jnp.log1p(-u))


class Draw(NamedTuple):
  """One drawn token.

  Attributes:
    token: `[]` int32.
    log_prob: `[]` float32 its log-probability: under the processed law, or for
      a greedy draw under the softmax of the logits (temperature 1).
    margin: `[]` float32 gap between the best and the second best score, in
      nats: logits for a greedy draw, else processed log p plus noise. Infinite
      when nothing else could have been drawn. Gaps near the rounding of the
      logits are near-ties, which other hardware may resolve otherwise.
  """

  token: jax.Array
  log_prob: jax.Array
  margin: jax.Array


def draw(
  logits: jax.Array,
  sampling: SamplingArrays,
  position: ArrayLike,
  *,
  vocab_size: int | None = None,
  greedy: bool = False,
) -> Draw:
  """Returns the target's own token for one position.

  Greedy (temperature 0): argmax, lowest id on ties. Otherwise
  argmax(log p + g), p as `process` defines it and g the Gumbel noise of
  (seed, position): distributed as p, exactly up to the noise's grid, and a
  function of logits, sampling and position alone. A greedy draw makes no
  noise; under `jax.vmap` it does, unless `greedy` says so statically.

  Args:
    logits: `[V]` float logits, see `process`.
    sampling: scalars, all dynamic.
    position: `[]` absolute position of the token being produced.
    vocab_size: static; ids from here on are padding of the vocabulary and are
      never drawn. The result is that of logits without the padding.
    greedy: static; true ignores `sampling` and compiles no noise at all.

  Raises:
    ValueError: if `vocab_size` does not lie in [1, V].
  """
  chex.assert_rank(logits, 1)
  if vocab_size is not None:
    if not 1 <= vocab_size <= logits.shape[0]:
      raise ValueError(
        f"draw.vocab_size = {vocab_size}: must lie in [1, {logits.shape[0]}]"
      )
    logits = logits[:vocab_size]
  # The barrier keeps what surrounds the draw out of its arithmetic.
  logits = jax.lax.optimization_barrier(logits).astype(jnp.float32)
  if greedy:
    return _best(logits, jax.nn.log_softmax(logits))

  def race() -> Draw:
    log_probs = process(
      logits,
      temperature=sampling.temperature,
      top_k=sampling.top_k,
      top_p=sampling.top_p,
      min_p=sampling.min_p,
    )
    key = race_key((sampling.seed_hi, sampling.seed_lo), position)
    noise = gumbel_noise(key, logits.shape[0])
    return _best(log_probs + noise, log_probs)

  return jax.lax.cond(
    sampling.temperature > 0,
    race,
    lambda: _best(logits, jax.nn.log_softmax(logits)),
  )


def _best(scores: jax.Array, log_probs: jax.Array) -> Draw:
  """Returns the argmax of `scores` (lowest id on ties) with its margin."""
  token = jnp.argmax(scores).astype(jnp.int32)
  others = jnp.where(
    jnp.arange(scores.shape[0], dtype=jnp.int32) == token, -jnp.inf, scores
  )
  return Draw(
    token=token,
    log_prob=log_probs[token],
    margin=scores[token] - jnp.max(others),
  )


def _words(seed: int) -> tuple[jax.Array, jax.Array]:
  """Returns the high and the low 32-bit word of `seed`."""
  if not 0 <= seed < 2**63:
    raise ValueError(f"seed = {seed}: must lie in [0, 2**63)")
  return (
    jnp.asarray(seed >> 32, jnp.uint32),
    jnp.asarray(seed & 0xFFFFFFFF, jnp.uint32),
  )
