# SPDX-License-Identifier: Apache-2.0
"""Activation codecs: rows of hidden states to bytes and back."""

from wanspec_jax.codecs._raw import RawPayload as RawPayload
from wanspec_jax.codecs._raw import raw as raw
from wanspec_jax.codecs._spec import parse as parse
from wanspec_jax.codecs._uniform import UniformPayload as UniformPayload
from wanspec_jax.codecs._uniform import uniform as uniform
