# SPDX-License-Identifier: Apache-2.0
"""Speculative decoding over pipeline-parallel inference across a WAN: the core.

Import the rooms you need: `models`, `verify`, `rollback`, `codecs`,
`schedules`, `links`, `wire`, `worlds`. This module imports none, so that
`wanspec_jax.wire` stays free of JAX.
"""
