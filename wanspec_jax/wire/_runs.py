# SPDX-License-Identifier: Apache-2.0
"""Runs, packed tightly.

All integers are varints unless said otherwise. `RUN` body:

  run_id, flags (1 byte), [epoch]
  [closes]    count, sequences
  [opens]     count, each: sequence, flags (1 byte), the fields not at default
  [segments]  [count,] each a stretch of rows of one sequence:
                sequence, num_rows·8 | irregular ids | tree | committed rows,
                [committed: prefix·2, or 1 and a bitmap],
                first id, [zigzag(idᵢ - idᵢ₋₁ - 1)],
                first id - its parent, [idᵢ - parentᵢ],
                tokens
  [commits]   count, each: sequence, zigzag(root - first id of that sequence
                in this run, or - 0)
  [payload]   what is left

Ids of a run are mostly consecutive and a chain's parents are the rows before,
so both usually vanish. Every message has exactly one encoding.
"""

import itertools
import struct
from typing import Any

import numpy as np

from wanspec_jax.messages import Commit, Open, Run, Sampling
from wanspec_jax.wire._cursor import Cursor
from wanspec_jax.wire._errors import FrameError
from wanspec_jax.wire._frames import Kind, encode_frame
from wanspec_jax.wire._varint import (
  encode_varint,
  encode_varints,
  unzigzag,
  zigzag,
)

MAX_ROWS = 65536
INT32_LIMIT = 2**31  # ids, tokens and sequences are int32
RUN_ID_LIMIT = 2**62

_EPOCH, _OPENS, _CLOSES, _COMMITS, _ROWS, _MANY, _PAYLOAD = (
  1 << bit for bit in range(7)
)
_LOG_PROBS, _TEMPERATURE, _TOP_K, _TOP_P, _MIN_P, _SEED = (
  1 << bit for bit in range(6)
)


def check_range(name: str, value: int, limit: int) -> None:
  """Raises `ValueError` unless `0 <= value < limit`."""
  if not 0 <= value < limit:
    raise ValueError(f"{name} = {value}: must lie in [0, {limit})")


def check_run(run: Run, *, max_rows: int = MAX_ROWS) -> None:
  """Raises `ValueError` naming what is wrong with a run, if anything is.

  Ids, tokens and sequences fit int32; no row, open, close or commit is listed
  twice; parents are not younger than their children, and precede them if they
  are in the run; only the first row of a sequence is its own parent.
  """
  check_range("Run.run_id", run.run_id, RUN_ID_LIMIT)
  check_range("Run.epoch", run.epoch, INT32_LIMIT)
  for name, listed in (
    ("opens", [item.sequence for item in run.opens]),
    ("closes", list(run.closes)),
    ("commits", [item.sequence for item in run.commits]),
  ):
    for sequence in listed:
      check_range(f"Run.{name}: sequence", sequence, INT32_LIMIT)
    if len(set(listed)) != len(listed):
      raise ValueError(f"Run.{name}: a sequence is listed twice")
  for commit in run.commits:
    check_range("Run.commits: root", commit.root, INT32_LIMIT)
  rows = run.num_rows
  check_range("Run.num_rows", rows, max_rows + 1)
  for name in ("sequences", "ids", "parents", "tokens", "committed"):
    column = getattr(run, name)
    if column.shape != (rows,):
      raise ValueError(f"Run.{name}: shape {column.shape}, must be ({rows},)")
    if name == "committed":
      if column.dtype != np.bool_:
        raise ValueError(f"Run.committed: dtype {column.dtype}, must be bool")
    elif column.dtype.kind not in "iu":
      raise ValueError(f"Run.{name}: dtype {column.dtype}, must be an integer")
    elif rows:
      values = column.tolist()
      check_range(f"Run.{name}: smallest", min(values), INT32_LIMIT)
      check_range(f"Run.{name}: largest", max(values), INT32_LIMIT)
  _check_topology(run)


def _check_topology(run: Run) -> None:
  columns = (run.sequences, run.ids, run.parents)
  rows = list(zip(*(column.tolist() for column in columns), strict=True))
  row_of = {(sequence, node): i for i, (sequence, node, _) in enumerate(rows)}
  if len(row_of) < len(rows):
    raise ValueError("Run.ids: a node is listed twice")
  begun = set()
  for i, (sequence, node, parent) in enumerate(rows):
    if parent > node:
      raise ValueError(f"Run.parents: row {i}'s is younger than its child")
    if parent == node and sequence in begun:
      raise ValueError(
        f"Run.parents: row {i} is its own; only a sequence's first row may be"
      )
    if row_of.get((sequence, parent), i) > i:
      raise ValueError(f"Run.parents: row {i} precedes its parent")
    begun.add(sequence)


def encode_run(
  run: Run,
  payload: bytes | memoryview | None = None,
  *,
  max_rows: int = MAX_ROWS,
) -> bytes:
  """Returns the RUN frame of a run and the activations of its rows, if any.

  Raises:
    ValueError: if the run breaks a rule of `check_run`.
  """
  check_run(run, max_rows=max_rows)
  changes = np.flatnonzero(np.diff(run.sequences)) + 1
  edges = [0, *changes.tolist(), run.num_rows] if run.num_rows else []
  segments = list(itertools.pairwise(edges))
  flags = (
    _EPOCH * (run.epoch > 0)
    | _OPENS * bool(run.opens)
    | _CLOSES * bool(run.closes)
    | _COMMITS * bool(run.commits)
    | _ROWS * bool(segments)
    | _MANY * (len(segments) > 1)
    | _PAYLOAD * (payload is not None)
  )
  parts: list[bytes | memoryview] = [
    encode_varint(run.run_id),
    bytes((flags,)),
  ]
  if run.epoch:
    parts.append(encode_varint(run.epoch))
  if run.closes:
    parts.append(encode_varint(len(run.closes)))
    parts.extend(encode_varint(sequence) for sequence in run.closes)
  if run.opens:
    parts.append(encode_varint(len(run.opens)))
    parts.extend(_encode_open(item) for item in run.opens)
  if len(segments) > 1:
    parts.append(encode_varint(len(segments)))
  for start, stop in segments:
    parts.append(_encode_segment(run, slice(start, stop)))
  if run.commits:
    base = _first_ids(run.sequences.tolist(), run.ids.tolist())
    parts.append(encode_varint(len(run.commits)))
    for commit in run.commits:
      root = commit.root - base.get(commit.sequence, 0)
      parts.append(encode_varint(commit.sequence))
      parts.append(encode_varint(zigzag(root)))
  if payload is not None:
    parts.append(payload)
  return encode_frame(Kind.RUN, *parts)


def _first_ids(sequences: list[int], ids: list[int]) -> dict[int, int]:
  """Returns the first id of each sequence of a run."""
  first: dict[int, int] = {}
  for sequence, node in zip(sequences, ids, strict=True):
    first.setdefault(sequence, node)
  return first


def _encode_open(item: Open) -> bytes:
  sampling = item.sampling
  flags = (
    _LOG_PROBS * item.log_probs
    | _TEMPERATURE * (sampling.temperature != 0)
    | _TOP_K * (sampling.top_k != 0)
    | _TOP_P * (sampling.top_p != 1)
    | _MIN_P * (sampling.min_p != 0)
    | _SEED * (sampling.seed != 0)
  )
  parts = [encode_varint(item.sequence), bytes((flags,))]
  if flags & _TEMPERATURE:
    parts.append(struct.pack("<d", sampling.temperature))
  if flags & _TOP_K:
    parts.append(encode_varint(sampling.top_k))
  if flags & _TOP_P:
    parts.append(struct.pack("<d", sampling.top_p))
  if flags & _MIN_P:
    parts.append(struct.pack("<d", sampling.min_p))
  if flags & _SEED:
    parts.append(encode_varint(sampling.seed))
  return b"".join(parts)


def _encode_segment(run: Run, rows: slice) -> bytes:
  ids = run.ids[rows].tolist()
  parents = run.parents[rows].tolist()
  committed = run.committed[rows].tolist()
  num_committed = sum(committed)
  steps = [zigzag(b - a - 1) for a, b in itertools.pairwise(ids)]
  irregular = any(steps)
  tree = parents[1:] != ids[:-1]
  head = len(ids) << 3 | irregular | tree << 1 | (num_committed > 0) << 2
  parts = [encode_varint(int(run.sequences[rows.start])), encode_varint(head)]
  if num_committed:
    if all(committed[:num_committed]):
      parts.append(encode_varint(num_committed << 1))
    else:
      parts.append(b"\x01" + np.packbits(run.committed[rows]).tobytes())
  parts.append(encode_varint(ids[0]))
  if irregular:
    parts.append(encode_varints(steps))
  num_parents = len(ids) if tree else 1
  parts.append(
    encode_varints([ids[i] - parents[i] for i in range(num_parents)])
  )
  parts.append(encode_varints(run.tokens[rows].tolist()))
  return b"".join(parts)


def decode_run(
  body: bytes | memoryview, *, max_rows: int = MAX_ROWS
) -> tuple[Run, memoryview | None]:
  """Returns the run of a RUN body and a view of its payload, not a copy.

  Raises:
    FrameError: if the body is not exactly one legal run.
  """
  return read_run(Cursor(body), max_rows)


def read_run(cursor: Cursor, max_rows: int) -> tuple[Run, memoryview | None]:
  """Decodes a RUN body from its start and books each byte on the cursor."""
  run_id = cursor.varint("run_id", RUN_ID_LIMIT)
  flags = cursor.byte("flags", 1 << 7)
  epoch = cursor.optional("epoch", INT32_LIMIT, flags & _EPOCH)
  limit = max_rows + 1  # of every list, so that memory stays bounded
  closes, opens, commits = [], [], []
  if flags & _CLOSES:
    for _ in range(cursor.count("closes", limit)):
      closes.append(cursor.varint("close", INT32_LIMIT))
  if flags & _OPENS:
    for _ in range(cursor.count("opens", limit)):
      opens.append(_decode_open(cursor))
  if flags & _MANY and not flags & _ROWS:
    raise FrameError("flags: several segments and no rows")
  num_segments = 1 if flags & _ROWS else 0
  if flags & _MANY:
    num_segments = cursor.count("segments", limit)
    if num_segments < 2:
      raise FrameError("segments: one is not several")
  cursor.mark("control")
  sequences: list[int] = []
  columns: tuple[list[int], ...] = ([], [], [], [])
  for _ in range(num_segments):
    sequence, *segment = _decode_segment(cursor, max_rows - len(sequences))
    if sequences and sequences[-1] == sequence:
      raise FrameError("segments: two in a row of one sequence")
    sequences.extend([sequence] * len(segment[0]))
    for column, values in zip(columns, segment, strict=True):
      column.extend(values)
  ids, parents, tokens, committed = columns
  if flags & _COMMITS:
    base = _first_ids(sequences, ids)
    for _ in range(cursor.count("commits", limit)):
      sequence = cursor.varint("commit", INT32_LIMIT)
      step = cursor.varint("root", 2 * INT32_LIMIT)
      root = base.get(sequence, 0) + unzigzag(step)
      commits.append(Commit(sequence=sequence, root=root))
  cursor.mark("control")
  payload = cursor.rest() if flags & _PAYLOAD else None
  cursor.finish("activations")
  for name, column in zip(("ids", "parents"), (ids, parents), strict=True):
    if column and not 0 <= min(column) <= max(column) < INT32_LIMIT:
      raise FrameError(f"{name}: must lie in [0, {INT32_LIMIT})")
  run = Run(
    run_id=run_id,
    epoch=epoch,
    opens=tuple(opens),
    closes=tuple(closes),
    commits=tuple(commits),
    sequences=np.array(sequences, np.int32),
    ids=np.array(ids, np.int32),
    parents=np.array(parents, np.int32),
    tokens=np.array(tokens, np.int32),
    committed=np.array(committed, np.bool_),
  )
  try:
    check_run(run, max_rows=len(ids))
  except ValueError as error:
    raise FrameError(str(error)) from error
  return run, payload


def _decode_open(cursor: Cursor) -> Open:
  sequence = cursor.varint("open", INT32_LIMIT)
  flags = cursor.byte("open flags", 1 << 6)
  fields: dict[str, Any] = {}
  if flags & _TEMPERATURE:
    fields["temperature"] = cursor.double("temperature")
  if flags & _TOP_K:
    fields["top_k"] = cursor.varint("top_k", 2**63)
  if flags & _TOP_P:
    fields["top_p"] = cursor.double("top_p")
  if flags & _MIN_P:
    fields["min_p"] = cursor.double("min_p")
  if flags & _SEED:
    fields["seed"] = cursor.varint("seed", 2**63)
  defaults = Sampling()
  for name, value in fields.items():
    if value == getattr(defaults, name):
      raise FrameError(f"{name}: sent although it has its default")
  try:
    sampling = Sampling(**fields)
  except ValueError as error:
    raise FrameError(str(error)) from error
  return Open(
    sequence=sequence, sampling=sampling, log_probs=bool(flags & _LOG_PROBS)
  )


def _decode_segment(
  cursor: Cursor, max_rows: int
) -> tuple[int, list[int], list[int], list[int], list[int]]:
  """Returns the sequence; ids, parents, tokens and committed of its rows."""
  sequence = cursor.varint("sequence", INT32_LIMIT)
  head = cursor.varint("segment head", 2**62)
  rows = head >> 3
  if not 0 < rows <= max_rows:
    raise FrameError(f"segment of {rows} rows: must lie in [1, {max_rows}]")
  if rows > cursor.remaining:  # each token takes a byte at least
    raise FrameError("segment truncated")
  committed = _decode_committed(cursor, rows) if head & 4 else [0] * rows
  ids = [cursor.varint("id", INT32_LIMIT)]
  if head & 1:
    steps = cursor.varints(rows - 1, "id step", 2 * INT32_LIMIT)
    if not any(steps):
      raise FrameError("ids: steps sent although all are one")
    for step in steps:
      ids.append(ids[-1] + 1 + unzigzag(step))
  else:
    ids.extend(range(ids[0] + 1, ids[0] + rows))
  num_parents = rows if head & 2 else 1
  distances = cursor.varints(num_parents, "parent", INT32_LIMIT)
  parents = [a - b for a, b in zip(ids, distances, strict=False)]
  if not head & 2:
    parents.extend(ids[:-1])
  elif parents[1:] == ids[:-1]:
    raise FrameError("parents: sent although the rows are a chain")
  cursor.mark("topology")
  tokens = cursor.varints(rows, "token", INT32_LIMIT)
  cursor.mark("ids")
  return sequence, ids, parents, tokens, committed


def _decode_committed(cursor: Cursor, rows: int) -> list[int]:
  """Returns `rows` flags that were sent as a count or as a bitmap."""
  prefix = cursor.varint("committed", 2 * rows + 1)
  if prefix == 1:
    packed = np.frombuffer(cursor.take(-(-rows // 8), "committed"), np.uint8)
    bits = np.unpackbits(packed).tolist()
    if any(bits[rows:]):
      raise FrameError("committed: bits behind the last row")
    if all(bits[: sum(bits)]):
      raise FrameError("committed: a bitmap where a count would do")
    return bits[:rows]
  if prefix & 1 or prefix == 0:
    raise FrameError(f"committed: {prefix} is neither count nor bitmap")
  return [1] * (prefix >> 1) + [0] * (rows - (prefix >> 1))
