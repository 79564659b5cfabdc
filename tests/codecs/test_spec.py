# SPDX-License-Identifier: Apache-2.0
"""Specs name codecs, and only those."""

import jax
import numpy as np
import pytest

from wanspec_jax import codecs

SPECS = ("raw:f32", "raw:bf16", "raw:f16", "uniform:8:64", "uniform:4:64")


@pytest.mark.parametrize("spec", SPECS)
def test_name_is_the_spec_and_parses_to_the_same_behaviour(spec):
  codec = codecs.parse(spec)
  assert codec.name == spec
  assert codec.row_local
  again = codecs.parse(codec.name)
  x = np.random.default_rng(0).normal(size=(4, 70)).astype(np.float32)
  data = codec.pack(jax.jit(codec.encode)((), x, None)[1], 3)
  assert data == again.pack(jax.jit(again.encode)((), x, None)[1], 3)
  assert len(data) == 3 * again.row_bytes(70)


def test_specs_differ_in_what_they_do():
  assert len({codecs.parse(spec).row_bytes(70) for spec in SPECS}) == 4
  assert codecs.parse("uniform:4:16").row_bytes(64) == 4 * 4 + 32


@pytest.mark.parametrize(
  "spec",
  ["", "raw", "raw:f64", "uniform:8", "uniform:8:0", "uniform:08:64",
   "uniform:3:64", "uniform:8:64:", " raw:f32", "uniform:8:-1", "gzip"],
)  # fmt: skip
def test_unknown_specs_are_refused_with_the_known_ones(spec):
  with pytest.raises(ValueError, match=r"codec = .*raw:bf16.*uniform:4:TILE"):
    codecs.parse(spec)
