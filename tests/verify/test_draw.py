# SPDX-License-Identifier: Apache-2.0
"""Draws: addressed noise after its specification, and the law of the tokens."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verify import oracle
from wanspec_jax import verify
from wanspec_jax.messages import Sampling

DRAW = jax.jit(verify.draw, static_argnames=("vocab_size", "greedy"))
RACE = int(verify.Purpose.RACE)


@functools.partial(jax.jit, static_argnames="size")
def _bits(key, size):
  return jax.random.bits(key, (size,), jnp.uint32)


NOISE = jax.jit(verify.gumbel_noise, static_argnames="size")


def _draw(logits, *, position=0, vocab_size=None, **fields):
  sampling = verify.sampling_arrays(Sampling(**fields))
  logits = jnp.asarray(logits)
  return DRAW(logits, sampling, position, vocab_size=vocab_size)


def test_threefry_oracle_has_the_published_vectors():
  # Known answers of the Random123 distribution, threefry2x32 with 20 rounds.
  assert oracle.threefry((0, 0), (0, 0)) == (0x6B200159, 0x99BA4EFE)
  ones = (0xFFFFFFFF, 0xFFFFFFFF)
  assert oracle.threefry(ones, ones) == (0x1CB996FC, 0xBB002BE7)
  assert oracle.threefry(
    (0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3)
  ) == (0xC4923A9C, 0x483DF7A0)


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**32 + 7, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 5, 2**31 - 1])
def test_noise_follows_its_specification(seed, position):
  bits = _bits(verify.race_key(seed, position), 8)
  assert bits.tolist() == oracle.race_bits(seed, RACE, position, 8)
  noise = NOISE(verify.race_key(seed, position), 8)
  expected = oracle.gumbel(seed, RACE, position, 8)
  np.testing.assert_allclose(noise, expected, rtol=1e-5, atol=1e-5)


def test_seed_is_that_of_a_jax_key():
  words = (jnp.uint32(0), jnp.uint32(42))
  key = jax.random.fold_in(jax.random.key(42, impl="threefry2x32"), RACE)
  key = jax.random.fold_in(key, 9)
  for seed in (42, words):
    data = jax.random.key_data(verify.race_key(seed, 9))
    np.testing.assert_array_equal(data, jax.random.key_data(key))


def test_addresses_differ_in_every_part():
  keys = [
    verify.address_key(seed, purpose, position, *lanes)
    for seed in (0, 1, 2**32)
    for purpose in verify.Purpose
    for position in (0, 1)
    for lanes in ((), (0,), (1,))
  ]
  data = {tuple(jax.random.key_data(key).tolist()) for key in keys}
  assert len(data) == len(keys) == 90


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_out_of_range_are_refused(seed):
  with pytest.raises(ValueError, match=r"seed = .*\[0, 2\*\*63\)"):
    verify.race_key(seed, 0)


def test_noise_of_a_prefix_is_a_prefix_of_the_noise():
  long = np.asarray(NOISE(verify.race_key(3, 4), 1000))
  for size in (1, 7, 256, 999):
    short = NOISE(verify.race_key(3, 4), size)
    np.testing.assert_array_equal(short, long[:size])


def test_extreme_bits_give_finite_noise(monkeypatch):
  extremes = jnp.array([0, 1, 2**32 - 1, 2**32 - 129, 2**31], jnp.uint32)
  monkeypatch.setattr(jax.random, "bits", lambda *_: extremes)
  noise = np.asarray(verify.gumbel_noise(None, 5))
  u = np.minimum((np.array(extremes, float) + 0.5) / 2**32, 1 - 2.0**-24)
  np.testing.assert_allclose(noise, -np.log(-np.log1p(-u)), rtol=1e-5)
  assert noise.max() == pytest.approx(33 * np.log(2), abs=1e-4)
  assert noise.min() > -2.82


def test_noise_is_gumbel():
  noise = np.asarray(NOISE(verify.race_key(11, 0), 200_000), np.float64)
  # Kolmogorov's distance exceeds 2.69/√n with probability 1e-6.
  cdf = np.sort(np.exp(-np.exp(-noise)))
  grid = np.arange(1, len(cdf) + 1) / len(cdf)
  assert np.abs(cdf - grid).max() < 2.69 / np.sqrt(len(cdf))


@given(
  logits=st.lists(st.integers(-6, 6), min_size=7, max_size=7),
  position=st.integers(0, 10**6),
)
@settings(derandomize=True, deadline=None, max_examples=50)
def test_greedy_takes_the_lowest_best_id(logits, position):
  logits = np.array(logits, np.float32) / 2
  drawn = _draw(logits, position=position, seed=position, top_k=3, top_p=0.5)
  best = max(range(7), key=lambda i: (logits[i], -i))
  ordered = np.sort(logits)[::-1]
  law, _ = oracle.process(logits, temperature=1.0)
  assert drawn.token == best
  assert drawn.margin == ordered[0] - ordered[1]
  np.testing.assert_allclose(drawn.log_prob, np.log(law[best]), rtol=1e-5)
  static = DRAW(
    jnp.asarray(logits),
    verify.sampling_arrays(Sampling(temperature=1.0)),
    position,
    greedy=True,
  )
  chex.assert_trees_all_equal(drawn, static)


@given(
  seed=st.integers(0, 2**63 - 1),
  position=st.integers(0, 2**31 - 1),
  filters=st.sampled_from(
    [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.2}, {"top_k": 1}]
  ),
  temperature=st.sampled_from([0.3, 1.0, 2.0]),
)
@settings(derandomize=True, deadline=None, max_examples=60)
def test_draw_is_the_race_of_the_processed_law(
  seed, position, filters, temperature
):
  rng = np.random.default_rng(seed % 1000)
  logits = rng.normal(size=7).astype(np.float32)
  drawn = _draw(
    logits, position=position, seed=seed, temperature=temperature, **filters
  )
  law, _ = oracle.process(logits, temperature=temperature, **filters)
  with np.errstate(divide="ignore"):
    scores = np.log(law) + oracle.gumbel(seed, RACE, position, 7)
  best, second = np.sort(scores)[::-1][:2]
  np.testing.assert_allclose(drawn.margin, best - second, rtol=1e-4, atol=1e-4)
  if best - second > 1e-4:
    assert drawn.token == np.argmax(scores)
  np.testing.assert_allclose(
    drawn.log_prob, np.log(law[drawn.token]), rtol=1e-4, atol=1e-5
  )


LOGITS = np.array([2.0, 1.0, 0.5, 0.0, -1.0], np.float32)


@functools.partial(jax.jit, static_argnames="count")
def _many(sampling, start, count):
  """Tokens of `count` consecutive positions."""
  positions = start + jnp.arange(count, dtype=jnp.int32)
  return jax.vmap(
    lambda position: verify.draw(jnp.asarray(LOGITS), sampling, position).token
  )(positions)


def test_a_temperature_below_float32_is_not_greedy():
  tied = np.array([1, 2, 2], np.float32)
  tokens = {
    int(_draw(tied, temperature=1e-50, position=position).token)
    for position in range(40)
  }
  assert tokens == {1, 2}


@pytest.mark.parametrize(
  "filters", [{}, {"top_k": 3}, {"top_p": 0.85}, {"min_p": 0.1}]
)
def test_law_of_the_token_over_positions(filters):
  fields = {"temperature": 1.3, **filters}
  sampling = verify.sampling_arrays(Sampling(seed=2024, **fields))
  tokens = np.asarray(_many(sampling, 0, count=200_000))
  law, _ = oracle.process(LOGITS, **fields)
  # Seeded, so it cannot flicker; a right law would fail 1 seed in 10⁶.
  statistic, bound = oracle.chi_square(np.bincount(tokens, minlength=5), law)
  assert statistic < bound
  # The test can see a law that is 2% off.
  shifted = 0.98 * law + 0.02 * np.eye(5)[0]
  statistic, bound = oracle.chi_square(
    np.bincount(tokens, minlength=5), shifted
  )
  assert statistic > bound


def test_positions_and_seeds_are_independent():
  law, _ = oracle.process(LOGITS, temperature=1.0)
  joint = np.outer(law, law)

  def tokens(seed, start):
    sampling = verify.sampling_arrays(Sampling(temperature=1.0, seed=seed))
    return np.asarray(_many(sampling, start, count=200_000))

  base = tokens(1, 0)
  for other in (tokens(1, 1), tokens(2, 0), tokens(1 + 2**32, 0)):
    assert (base != other).any()
    pairs = np.bincount(base * 5 + other, minlength=25)
    statistic, bound = oracle.chi_square(pairs, joint)
    assert statistic < bound


def test_coupled_drafter_matches_as_often_as_the_formula_says():
  p, _ = oracle.process(LOGITS, temperature=1.0)
  q = np.array([0.3, 0.3, 0.1, 0.2, 0.1])

  @jax.jit
  def drafts(positions):
    def one(position):
      noise = verify.gumbel_noise(verify.race_key(5, position), 5)
      return jnp.argmax(jnp.log(jnp.asarray(q, jnp.float32)) + noise)

    return jax.vmap(one)(positions)

  count = 100_000
  drafted = np.asarray(drafts(jnp.arange(count, dtype=jnp.int32)))
  sampling = verify.sampling_arrays(Sampling(temperature=1.0, seed=5))
  drawn = np.asarray(_many(sampling, 0, count=count))
  exact = sum(
    1 / sum(max(p[i] / p[j], q[i] / q[j]) for i in range(5)) for j in range(5)
  )
  sigma = np.sqrt(exact * (1 - exact) / count)
  assert abs((drafted == drawn).mean() - exact) < 4.9 * sigma  # 1e-6


def test_padding_of_the_vocabulary_is_never_drawn_and_changes_nothing():
  padded = np.concatenate([LOGITS, np.full(3, 99, np.float32)])
  for fields in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}):
    for position in range(10):
      fields["seed"] = 3
      plain = _draw(LOGITS, position=position, **fields)
      masked = _draw(padded, position=position, vocab_size=5, **fields)
      chex.assert_trees_all_equal(plain, masked)
  with pytest.raises(ValueError, match=r"vocab_size = 9: must lie in \[1, 8\]"):
    _draw(padded, vocab_size=9)


def test_a_single_possible_token_has_an_infinite_margin():
  drawn = _draw(LOGITS, top_k=1, temperature=1.0)
  assert drawn.token == 0
  assert drawn.margin == np.inf
  assert drawn.log_prob == 0
  assert _draw([1.0]).margin == np.inf


def test_greedy_makes_no_noise():
  sampling = verify.sampling_arrays(Sampling())
  logits = jnp.asarray(LOGITS)
  jaxpr = str(
    jax.make_jaxpr(functools.partial(verify.draw, greedy=True))(
      logits, sampling, 0
    )
  )
  assert "random_bits" not in jaxpr
  jaxpr = jax.make_jaxpr(verify.draw)(logits, sampling, 0)
  outside = {equation.primitive.name for equation in jaxpr.eqns}
  assert "cond" in outside  # the only place where noise is made
  assert "random_bits" in str(jaxpr)
  assert not outside & {"random_bits", "random_fold_in"}


def test_one_trace_for_all_sampling_parameters():
  traced = jax.jit(chex.assert_max_traces(verify.draw, n=1))
  for position, fields in enumerate(
    (
      {},
      {"temperature": 0.5, "seed": 2**62},
      {"temperature": 1.0, "top_k": 2, "top_p": 0.5, "min_p": 0.1},
    )
  ):
    sampling = verify.sampling_arrays(Sampling(**fields))
    traced(jnp.asarray(LOGITS), sampling, position)


def test_same_draw_in_64_bit_mode():
  fields = {"temperature": 0.9, "top_p": 0.9, "seed": 2**63 - 5}
  expected = _draw(LOGITS, position=12, **fields)
  with jax.enable_x64(True):
    drawn = jax.jit(verify.draw)(
      jnp.asarray(LOGITS), verify.sampling_arrays(Sampling(**fields)), 12
    )
  chex.assert_trees_all_equal_dtypes(drawn, expected)
  chex.assert_trees_all_equal(drawn, expected)
