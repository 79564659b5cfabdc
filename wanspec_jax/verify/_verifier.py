# SPDX-License-Identifier: Apache-2.0
"""Verifiers as records: what they promise, what they need, and their walk."""

import functools
from collections.abc import Callable
from typing import Literal, NamedTuple, Protocol

import jax
from jax.typing import ArrayLike

from wanspec_jax.messages import Sampling
from wanspec_jax.verify._draw import SamplingArrays
from wanspec_jax.verify._walk import WalkResult, walk


class Walk(Protocol):
  """A walk with its static choices made; arguments as of `verify.walk`."""

  def __call__(
    self,
    logits: jax.Array,
    tokens: jax.Array,
    parent_rows: jax.Array,
    *,
    start_row: ArrayLike,
    start_position: ArrayLike,
    num_rows: ArrayLike,
    sampling: SamplingArrays,
  ) -> WalkResult: ...


class Verifier(NamedTuple):
  """A rule by which the tail accepts drafted tokens.

  Attributes:
    name: how configs and the handshake call it.
    guarantee: `"same tokens"`: with the same logits the emitted tokens are
      those of plain decoding with the same seed, whatever tree, drafter,
      schedule or replay; `"same law"`: they are distributed alike.
    needs: what of the draft must reach the tail; `"ids"` is tokens and parents.
    children: `"any"` if nodes may be added, dropped or re-ranked at will;
      `"fixed"` if all children of a node must travel in one run, chosen before
      their identity was known.
    check: `(sampling) -> None`; raises `ValueError` naming the field if the
      verifier cannot honour it.
    walk: the jittable walk.
  """

  name: str
  guarantee: Literal["same tokens", "same law"]
  needs: Literal["ids", "scalars", "full q"]
  children: Literal["any", "fixed"]
  check: Callable[[Sampling], None]
  walk: Walk


def greedy(*, vocab_size: int | None = None) -> Verifier:
  """Returns the verifier of greedy decoding, which compiles no sampling code.

  Args:
    vocab_size: ids from here on are padding of the vocabulary; None if the
      logits have none.
  """

  def check(sampling: Sampling) -> None:
    if sampling.temperature > 0:
      raise ValueError(
        f"Sampling.temperature = {sampling.temperature}: must be 0 with the"
        " greedy verifier; use the race verifier to sample"
      )

  return Verifier(
    name="greedy",
    guarantee="same tokens",
    needs="ids",
    children="any",
    check=check,
    walk=functools.partial(walk, vocab_size=vocab_size, greedy=True),
  )


def race(*, vocab_size: int | None = None) -> Verifier:
  """Returns the verifier whose draws are races addressed by position.

  Temperature 0 is greedy decoding here too, chosen per sequence at run time.
  With noise of one vector per absolute position, nodes of equal depth share
  their noise; at most one of them is on the emitted path, along which all noise
  is independent, so the law is the target's. Drafters may use the same noise
  (`race_key`) to agree more often, or not.

  Args:
    vocab_size: ids from here on are padding of the vocabulary; None if the
      logits have none.
  """

  def check(sampling: Sampling) -> None:
    del sampling  # `Sampling` itself refuses what has no meaning.

  return Verifier(
    name="race",
    guarantee="same tokens",
    needs="ids",
    children="any",
    check=check,
    walk=functools.partial(walk, vocab_size=vocab_size),
  )
