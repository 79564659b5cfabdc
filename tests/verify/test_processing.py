# SPDX-License-Identifier: Apache-2.0
"""The processed law against an explicit sort in float64."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.verify import oracle
from wanspec_jax import verify

PROCESS = jax.jit(verify.process)
FILTERS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def _law(logits, **filters):
  return np.exp(np.asarray(PROCESS(jnp.asarray(logits), **FILTERS | filters)))


@given(
  logits=st.lists(
    # A coarse grid makes ties common.
    st.integers(-8, 8).map(lambda i: i / 2) | st.floats(-30, 30, width=32),
    min_size=9,
    max_size=9,
  ),
  temperature=st.sampled_from([0.1, 0.7, 1.0, 2.5]),
  top_k=st.integers(0, 12),
  top_p=st.sampled_from([1e-6, 0.3, 0.55, 0.9, 0.999, 1.0]),
  min_p=st.sampled_from([0.0, 0.03, 0.3, 1.0]),
)
@settings(derandomize=True, deadline=None, max_examples=400)
def test_equals_an_explicit_sort(logits, temperature, top_k, top_p, min_p):
  logits = np.array(logits, np.float32)
  filters = {
    "temperature": temperature,
    "top_k": top_k,
    "top_p": top_p,
    "min_p": min_p,
  }
  # The oracle orders the float32 quotients, as ties are decided there.
  scaled = (logits.max() - logits) / np.float32(temperature)
  expected, gap = oracle.process(-scaled, **filters | {"temperature": 1.0})
  assume(gap > 1e-5 or min_p == 1.0)
  log_probs = np.asarray(PROCESS(logits, **filters))
  law = np.exp(log_probs)
  np.testing.assert_array_equal(np.isneginf(log_probs), expected == 0)
  np.testing.assert_allclose(law, expected, rtol=1e-4, atol=1e-7)


# log 8, 4, 2, 1, 1: probabilities .5, .25, .125, .0625, .0625 exactly.
DYADIC = np.log(np.array([1, 8, 2, 4, 1], np.float32))


@pytest.mark.parametrize(
  ("filters", "kept"),
  [
    ({}, [0, 1, 2, 3, 4]),
    ({"top_k": 2}, [1, 3]),
    ({"top_k": 4}, [0, 1, 2, 3]),  # a tie: the lowest id stays
    ({"top_k": 5}, [0, 1, 2, 3, 4]),
    ({"top_k": 2**31 - 1}, [0, 1, 2, 3, 4]),
    ({"top_p": 0.45}, [1]),  # the ascending-sort bug would keep the tail
    ({"top_p": 0.55}, [1, 3]),  # the token that crosses the line stays
    ({"top_p": 0.80}, [1, 2, 3]),
    ({"top_p": 0.90}, [0, 1, 2, 3]),
    ({"top_p": 1e-45}, [1]),
    ({"min_p": 0.20}, [1, 2, 3]),
    ({"min_p": 1.0}, [1]),
    # After top-k 2 the mass is renormalised to 2/3, 1/3.
    ({"top_k": 2, "top_p": 0.6}, [1]),
    ({"top_p": 0.6, "min_p": 0.6}, [1]),
  ],
)
def test_keeps_the_right_tokens(filters, kept):
  law = _law(DYADIC, **filters)
  assert np.flatnonzero(law).tolist() == kept
  exact = np.array([1, 8, 2, 4, 1]) / 16
  np.testing.assert_allclose(law[kept], exact[kept] / exact[kept].sum(), 1e-5)


def test_equal_tokens_are_kept_lowest_id_first():
  logits = np.zeros(8, np.float32)
  assert np.flatnonzero(_law(logits, top_p=0.3)).tolist() == [0, 1, 2]
  assert np.flatnonzero(_law(logits, top_p=0.25)).tolist() == [0, 1]
  assert np.flatnonzero(_law(logits, top_k=3)).tolist() == [0, 1, 2]
  signed = np.array([0.0, -0.0, 0.0, -0.0], np.float32)
  assert np.flatnonzero(_law(signed, top_k=2)).tolist() == [0, 1]


def test_temperature_comes_first():
  # At temperature 1/2 the top token has .5²/Σp² = .727 of the mass.
  assert np.flatnonzero(_law(DYADIC, top_p=0.7)).tolist() == [1, 3]
  law = _law(DYADIC, top_p=0.7, temperature=0.5)
  assert np.flatnonzero(law).tolist() == [1]


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e30])
def test_extreme_temperatures_are_finite(temperature):
  law = _law([3.0, -2.0, 3.0, 1.0], temperature=temperature)
  even = [0.5, 0, 0.5, 0] if temperature < 1 else [0.25] * 4
  np.testing.assert_allclose(law, even, rtol=1e-5)


def test_excluded_tokens_stay_excluded():
  logits = np.array([-np.inf, 1.0, -np.inf, 0.5], np.float32)
  for filters in ({}, {"top_k": 3}, {"top_p": 0.99}, {"min_p": 0.1}):
    law = _law(logits, **filters)
    np.testing.assert_array_equal(law[[0, 2]], 0)
    assert law.sum() == pytest.approx(1)


def test_a_real_vocabulary_with_ties():
  rng = np.random.default_rng(0)
  logits = rng.normal(size=50_000).astype(jnp.bfloat16).astype(np.float32) * 3
  for top_k, top_p in ((50, 1.0), (0, 0.9), (1000, 0.8)):
    law = _law(logits, top_k=top_k, top_p=top_p)
    expected, _ = oracle.process(
      logits, temperature=1.0, top_k=top_k, top_p=top_p
    )
    # One token more or less is float32's rounding of the cumulative mass.
    assert abs(int((law > 0).sum()) - int((expected > 0).sum())) <= 1
    assert oracle.total_variation(law, expected) < 1e-4


def test_one_trace_for_all_parameters():
  traced = jax.jit(chex.assert_max_traces(verify.process, n=1))
  logits = jnp.asarray(DYADIC)
  for temperature, top_k, top_p, min_p in (
    (1.0, 0, 1.0, 0.0),
    (0.5, 3, 0.9, 0.1),
    (2.0, 1, 0.2, 1.0),
  ):
    traced(
      logits,
      temperature=temperature,
      top_k=top_k,
      top_p=top_p,
      min_p=min_p,
    )


def test_filters_that_are_off_cost_no_passes():
  # Every pass over the bits sits in a branch that the others do not run.
  jaxpr = jax.make_jaxpr(verify.process)(jnp.asarray(DYADIC), **FILTERS)
  outside = {equation.primitive.name for equation in jaxpr.eqns}
  assert "cond" in outside
  assert not outside & {"while", "scan", "sort", "top_k", "cumsum"}


def test_same_law_in_64_bit_mode():
  expected = _law(DYADIC, top_k=4, top_p=0.8)
  with jax.enable_x64(True):
    log_probs = jax.jit(verify.process)(
      jnp.asarray(DYADIC), **FILTERS | {"top_k": 4, "top_p": 0.8}
    )
    assert log_probs.dtype == jnp.float32
  np.testing.assert_array_equal(np.exp(np.asarray(log_probs)), expected)
