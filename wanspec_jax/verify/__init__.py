# SPDX-License-Identifier: Apache-2.0
"""Exact verification of draft trees by the target's own, addressed draws."""

from wanspec_jax.verify._draw import Draw as Draw
from wanspec_jax.verify._draw import Purpose as Purpose
from wanspec_jax.verify._draw import SamplingArrays as SamplingArrays
from wanspec_jax.verify._draw import address_key as address_key
from wanspec_jax.verify._draw import draw as draw
from wanspec_jax.verify._draw import gumbel_noise as gumbel_noise
from wanspec_jax.verify._draw import race_key as race_key
from wanspec_jax.verify._draw import sampling_arrays as sampling_arrays
from wanspec_jax.verify._processing import process as process
from wanspec_jax.verify._verifier import Verifier as Verifier
from wanspec_jax.verify._verifier import Walk as Walk
from wanspec_jax.verify._verifier import greedy as greedy
from wanspec_jax.verify._verifier import race as race
from wanspec_jax.verify._walk import WalkResult as WalkResult
from wanspec_jax.verify._walk import walk as walk
