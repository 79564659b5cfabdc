# SPDX-License-Identifier: Apache-2.0
"""What returns from the tail, packed tightly, and the bytes of every frame.

All integers are varints unless said otherwise. `RETURNED` body:

  run_id, flags (1 byte), [epoch]
  [verdicts]  [count,] each: sequence, num_tokens·4 | log_probs | margins,
                tokens, [f32 each], [f32 each]

`FEATURES` body: run_id, epoch, tap, payload.
"""

import numpy as np

from wanspec_jax.messages import Returned, Verdict
from wanspec_jax.wire._cursor import Cursor
from wanspec_jax.wire._errors import FrameError
from wanspec_jax.wire._frames import Frame, Kind, encode_frame, split_frame
from wanspec_jax.wire._runs import (
  INT32_LIMIT,
  MAX_ROWS,
  RUN_ID_LIMIT,
  check_range,
  read_run,
)
from wanspec_jax.wire._varint import encode_varint, encode_varints

_EPOCH, _VERDICTS, _MANY = (1 << bit for bit in range(3))


def encode_returned(returned: Returned) -> bytes:
  """Returns the RETURNED frame; log-probabilities are rounded to float32.

  Raises:
    ValueError: if a verdict is empty, repeated or out of range, if its lists
      differ in length, or if a number is NaN.
  """
  check_range("Returned.run_id", returned.run_id, RUN_ID_LIMIT)
  check_range("Returned.epoch", returned.epoch, INT32_LIMIT)
  verdicts = returned.verdicts
  if len({verdict.sequence for verdict in verdicts}) != len(verdicts):
    raise ValueError("Returned.verdicts: a sequence is listed twice")
  flags = (
    _EPOCH * (returned.epoch > 0)
    | _VERDICTS * bool(verdicts)
    | _MANY * (len(verdicts) > 1)
  )
  parts = [encode_varint(returned.run_id), bytes((flags,))]
  if returned.epoch:
    parts.append(encode_varint(returned.epoch))
  if len(verdicts) > 1:
    parts.append(encode_varint(len(verdicts)))
  for verdict in verdicts:
    check_range("Verdict.sequence", verdict.sequence, INT32_LIMIT)
    if not verdict.tokens:
      raise ValueError("Verdict.tokens: must not be empty")
    for token in verdict.tokens:
      check_range("Verdict.tokens: token", token, INT32_LIMIT)
    head = len(verdict.tokens) << 2
    head |= bool(verdict.log_probs) | bool(verdict.margins) << 1
    parts.append(encode_varint(verdict.sequence))
    parts.append(encode_varint(head))
    parts.append(encode_varints(verdict.tokens))
    for name in ("log_probs", "margins"):
      numbers = getattr(verdict, name)
      if not numbers:
        continue
      if len(numbers) != len(verdict.tokens):
        raise ValueError(
          f"Verdict.{name}: {len(numbers)} for {len(verdict.tokens)} tokens"
        )
      with np.errstate(over="ignore"):
        rounded = np.array(numbers, np.float64).astype("<f4")
      if np.any(np.isnan(rounded)):
        raise ValueError(f"Verdict.{name}: NaN")
      parts.append(rounded.tobytes())
  return encode_frame(Kind.RETURNED, *parts)


def decode_returned(
  body: bytes | memoryview, *, max_rows: int = MAX_ROWS
) -> Returned:
  """Returns what a RETURNED body says.

  Raises:
    FrameError: if the body is not exactly one legal message.
  """
  return _decode_returned(Cursor(body), max_rows)


def _decode_returned(cursor: Cursor, max_rows: int) -> Returned:
  run_id = cursor.varint("run_id", RUN_ID_LIMIT)
  flags = cursor.byte("flags", 1 << 7)
  if flags & ~(_EPOCH | _VERDICTS | _MANY):
    raise FrameError(f"flags 0x{flags:02x}: unknown bit")
  epoch = cursor.optional("epoch", INT32_LIMIT, flags & _EPOCH)
  if flags & _MANY and not flags & _VERDICTS:
    raise FrameError("flags: several verdicts and none")
  num_verdicts = 1 if flags & _VERDICTS else 0
  if flags & _MANY:
    num_verdicts = cursor.count("verdicts", max_rows + 1)
    if num_verdicts < 2:
      raise FrameError("verdicts: one is not several")
  verdicts = []
  for _ in range(num_verdicts):
    sequence = cursor.varint("sequence", INT32_LIMIT)
    head = cursor.varint("verdict head", 2**62)
    num_tokens = head >> 2
    if not 0 < num_tokens <= max_rows:
      raise FrameError(f"verdict of {num_tokens} tokens: at most {max_rows}")
    max_rows -= num_tokens
    tokens = cursor.varints(num_tokens, "token", INT32_LIMIT)
    numbers: list[tuple[float, ...]] = []
    for name, bit in (("log_probs", 1), ("margins", 2)):
      if not head & bit:
        numbers.append(())
        continue
      values = np.frombuffer(cursor.take(4 * num_tokens, name), "<f4")
      if np.any(np.isnan(values)):
        raise FrameError(f"{name}: NaN")
      numbers.append(tuple(values.tolist()))
    verdicts.append(
      Verdict(
        sequence=sequence,
        tokens=tuple(tokens),
        log_probs=numbers[0],
        margins=numbers[1],
      )
    )
  cursor.finish("verdicts")
  if len({verdict.sequence for verdict in verdicts}) != len(verdicts):
    raise FrameError("verdicts: a sequence is listed twice")
  return Returned(run_id=run_id, epoch=epoch, verdicts=tuple(verdicts))


def encode_features(
  payload: bytes | memoryview, *, run_id: int, epoch: int = 0, tap: int
) -> bytes:
  """Returns the FEATURES frame of a run's hidden states behind layer `tap`."""
  check_range("run_id", run_id, RUN_ID_LIMIT)
  check_range("epoch", epoch, INT32_LIMIT)
  check_range("tap", tap, INT32_LIMIT)
  header = b"".join(encode_varint(value) for value in (run_id, epoch, tap))
  return encode_frame(Kind.FEATURES, header, payload)


def decode_features(
  body: bytes | memoryview,
) -> tuple[int, int, int, memoryview]:
  """Returns run id, epoch, tap and a view of the payload of a FEATURES body."""
  cursor = Cursor(body)
  run_id = cursor.varint("run_id", RUN_ID_LIMIT)
  epoch = cursor.varint("epoch", INT32_LIMIT)
  tap = cursor.varint("tap", INT32_LIMIT)
  return run_id, epoch, tap, cursor.rest()


def frame_classes(
  frame: bytes | Frame, *, max_rows: int = MAX_ROWS
) -> dict[str, int]:
  """Returns how many bytes of a frame belong to each traffic class.

  The prefix belongs to what it introduces: control for runs, whose rows and
  payload are apart, and the whole class for verdicts and features. The values
  add up to the length of the frame.

  Raises:
    FrameError: if the frame is not legal.
  """
  if not isinstance(frame, Frame):
    frame = split_frame(frame)
  cursor = Cursor(frame.body)
  prefix_bytes = frame.num_bytes - len(frame.body)
  if frame.kind == Kind.RUN:
    read_run(cursor, max_rows)
    classes = cursor.classes
    classes["control"] = classes.get("control", 0) + prefix_bytes
    return classes
  if frame.kind == Kind.RETURNED:
    return {"verdicts": frame.num_bytes}
  if frame.kind == Kind.FEATURES:
    return {"features": frame.num_bytes}
  if frame.kind == Kind.TRACE:
    return {"trace": frame.num_bytes}
  return {"control": frame.num_bytes}
