# SPDX-License-Identifier: Apache-2.0
"""Strict JAX settings for every test; they precede the first device use."""

import os

# Tests share two cores with the stage processes that some of them start.
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import pytest

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_legacy_prng_key", "error")
jax.config.update("jax_debug_key_reuse", True)


@pytest.fixture(autouse=True)
def _no_leaked_x64():
  """Fails a test that leaves 64-bit mode on for those behind it."""
  yield
  assert not jax.config.jax_enable_x64
