# SPDX-License-Identifier: Apache-2.0
"""Real weights: a row's logits do not depend on how it was sent."""

import dataclasses

import jax
import numpy as np
import pytest

from experiments import _bits, _rundir
from wanspec_jax import models

BUCKETS = (8, 16, 64)
SLOTS = (128, 1024)  # XLA's float32 products switch kernels in between


@pytest.fixture(scope="module")
def text():
  tokenizer = models.load_tokenizer("smollm2")
  return tokenizer.encode(_rundir.bundled_prompts(limit=1)[0].text)[:72]


@pytest.fixture(scope="module")
def prober():
  """The first layers of the real model, with its real head."""
  return _bits.Prober(*_bits.load_whole("smollm2", "bfloat16", num_layers=4))


@pytest.fixture(scope="module")
def reference(prober, text):
  return prober.logits(text, _bits.ways(buckets=BUCKETS, num_slots=SLOTS)[0])


@pytest.mark.parametrize(
  "way",
  _bits.ways(buckets=BUCKETS, num_slots=SLOTS)[1:],
  ids=lambda way: way.name,
)
def test_logits_are_bit_equal(prober, reference, text, way):
  if jax.default_backend() != "cpu":
    pytest.fail("not measured here: run experiments.study bit_equality")
  difference = _bits.compare(reference, prober.logits(text, way, seed=1))
  assert difference.rows == len(text)
  assert difference.different == 0, difference


def test_the_comparison_sees_one_bit(reference):
  other = reference.copy()
  other[3, 5] = np.nextafter(other[3, 5], np.float32(np.inf))
  found = _bits.compare(reference, other)
  assert (found.different, found.flips) == (1, 0)
  other[4] = -other[4]
  assert _bits.compare(reference, other).flips == 1


def test_float32_sums_depend_on_where_rows_sit(prober, text):
  """The negative control: without `exact`, scattering rows shows."""
  params, config = prober._params, prober._config
  loose = _bits.Prober(params, config)
  loose._stage = jax.jit(
    lambda p, c, *a: models.stage(p, c, *a, config=config, exact=False)
  )
  way = dataclasses.replace(
    _bits.ways(buckets=BUCKETS, num_slots=SLOTS)[0], scattered=True
  )
  straight = dataclasses.replace(way, scattered=False)
  found = _bits.compare(
    loose.logits(text, straight), loose.logits(text, way, seed=1)
  )
  assert found.different > 0
