# SPDX-License-Identifier: Apache-2.0
"""Cancels, packed tightly: ids only, against the flow of the runs.

All integers are varints. `CANCEL` body:

  before_run·2 | epoch is sent, [epoch],
  [to the end]  each: sequence, num_ids·2 | irregular ids, first id,
                  [zigzag(idᵢ - idᵢ₋₁ - 1)]

What a verdict kills was mostly drafted together, so most ids follow each other
and a stretch of them takes two numbers. Every message has exactly one encoding.
"""

import itertools

from wanspec_jax.messages import Cancel
from wanspec_jax.wire._cursor import Cursor
from wanspec_jax.wire._errors import FrameError
from wanspec_jax.wire._frames import Kind, encode_frame
from wanspec_jax.wire._runs import (
  INT32_LIMIT,
  MAX_ROWS,
  RUN_ID_LIMIT,
  check_range,
)
from wanspec_jax.wire._varint import (
  encode_varint,
  encode_varints,
  unzigzag,
  zigzag,
)


def _check(cancel: Cancel, max_nodes: int) -> None:
  check_range("Cancel.before_run", cancel.before_run, RUN_ID_LIMIT)
  check_range("Cancel.epoch", cancel.epoch, INT32_LIMIT)
  if not cancel.nodes:
    raise ValueError("Cancel.nodes: must not be empty")
  if len({sequence for sequence, _ in cancel.nodes}) != len(cancel.nodes):
    raise ValueError("Cancel.nodes: a sequence is listed twice")
  for sequence, ids in cancel.nodes:
    check_range("Cancel.nodes: sequence", sequence, INT32_LIMIT)
    if not ids:
      raise ValueError(f"Cancel.nodes: sequence {sequence} has no ids")
    check_range("Cancel.nodes: smallest id", min(ids), INT32_LIMIT)
    check_range("Cancel.nodes: largest id", max(ids), INT32_LIMIT)
    if len(set(ids)) != len(ids):
      raise ValueError(
        f"Cancel.nodes: sequence {sequence} has an id listed twice"
      )
  total = sum(len(ids) for _, ids in cancel.nodes)
  check_range("Cancel.nodes: ids", total, max_nodes + 1)


def encode_cancel(cancel: Cancel, *, max_nodes: int = MAX_ROWS) -> bytes:
  """Returns the CANCEL frame.

  Raises:
    ValueError: if it names no node, one twice, or more than `max_nodes`, or if
      a number is out of range.
  """
  _check(cancel, max_nodes)
  parts = [encode_varint(cancel.before_run << 1 | (cancel.epoch > 0))]
  if cancel.epoch:
    parts.append(encode_varint(cancel.epoch))
  for sequence, ids in cancel.nodes:
    steps = [zigzag(b - a - 1) for a, b in itertools.pairwise(ids)]
    irregular = any(steps)
    parts.append(encode_varint(sequence))
    parts.append(encode_varint(len(ids) << 1 | irregular))
    parts.append(encode_varint(ids[0]))
    if irregular:
      parts.append(encode_varints(steps))
  return encode_frame(Kind.CANCEL, *parts)


def decode_cancel(
  body: bytes | memoryview, *, max_nodes: int = MAX_ROWS
) -> Cancel:
  """Returns what a CANCEL body says.

  Raises:
    FrameError: if the body is not exactly one legal message of at most
      `max_nodes` ids.
  """
  cursor = Cursor(body)
  head = cursor.varint("before_run", 2 * RUN_ID_LIMIT)
  epoch = cursor.optional("epoch", INT32_LIMIT, head & 1)
  nodes: list[tuple[int, tuple[int, ...]]] = []
  left = max_nodes
  while cursor.remaining:
    sequence = cursor.varint("sequence", INT32_LIMIT)
    count = cursor.varint("cancel head", 2**62)
    irregular, count = count & 1, count >> 1
    if not 0 < count <= left:
      raise FrameError(f"cancel of {count} ids: must lie in [1, {left}]")
    left -= count
    ids = [cursor.varint("id", INT32_LIMIT)]
    if irregular:
      steps = cursor.varints(count - 1, "id step", 2 * INT32_LIMIT)
      if not any(steps):
        raise FrameError("ids: steps sent although all are one")
      for step in steps:
        ids.append(ids[-1] + 1 + unzigzag(step))
    else:
      ids.extend(range(ids[0] + 1, ids[0] + count))
    nodes.append((sequence, tuple(ids)))
  cancel = Cancel(epoch=epoch, before_run=head >> 1, nodes=tuple(nodes))
  try:
    _check(cancel, max_nodes)
  except ValueError as error:
    raise FrameError(str(error)) from error
  return cancel
