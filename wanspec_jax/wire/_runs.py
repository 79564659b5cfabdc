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
    elif not np.issubdtype(column.dtype, np.integer):
      raise ValueError(f"Run.{name}: dtype {column.dtype}, must be an integer")
    elif rows:
      check_range(f"Run.{name}: smallest", int(column.min()), INT32_LIMIT)
      check_range(f"Run.{name}: largest", int(column.max()), INT32_LIMIT)
  if rows:
    _check_topology(run)


def _check_topology(run: Run) -> None:
  sequences, ids, parents = (
    np.asarray(column, np.int64)
    for column in (run.sequences, run.ids, run.parents)
  )
  row = np.arange(len(ids))
  keys = sequences << 31 | ids
  order = np.argsort(keys, kind="stable")
  ordered = keys[order]
  if np.any(ordered[1:] == ordered[:-1]):
    raise ValueError("Run.ids: a node is listed twice")
  if np.any(parents > ids):
    raise ValueError("Run.parents: a parent is younger than its child")
  own = parents == ids
  _, first = np.unique(sequences, return_index=True)
  if np.any(own & ~np.isin(row, first)):
    raise ValueError("Run.parents: only a sequence's first row may be its own")
  wanted = sequences << 31 | parents
  place = np.minimum(np.searchsorted(ordered, wanted), len(ids) - 1)
  late = (ordered[place] == wanted) & (order[place] >= row) & ~own
  if np.any(late):
    raise ValueError(
      f"Run.parents: row {int(np.argmax(late))} precedes its parent"
    )


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
    base = _first_ids(run.sequences, run.ids)
    parts.append(encode_varint(len(run.commits)))
    for commit in run.commits:
      root = commit.root - base.get(commit.sequence, 0)
      parts.append(encode_varint(commit.sequence))
      parts.append(encode_varints(zigzag(np.array([root]))))
  if payload is not None:
    parts.append(payload)
  return encode_frame(Kind.RUN, *parts)


def _first_ids(sequences: np.ndarray, ids: np.ndarray) -> dict[int, int]:
  """Returns the first id of each sequence of a run."""
  values, rows = np.unique(sequences, return_index=True)
  return dict(zip(values.tolist(), ids[rows].tolist(), strict=True))


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
  ids = run.ids[rows].astype(np.int64)
  parents = run.parents[rows].astype(np.int64)
  committed = run.committed[rows]
  steps = np.diff(ids) - 1
  irregular = bool(np.any(steps))
  tree = not np.array_equal(parents[1:], ids[:-1])
  head = len(ids) << 3 | irregular | tree << 1 | bool(committed.any()) << 2
  parts = [encode_varint(int(run.sequences[rows.start])), encode_varint(head)]
  if committed.any():
    prefix = int(committed.sum())
    if committed[:prefix].all():
      parts.append(encode_varint(prefix << 1))
    else:
      parts.append(b"\x01" + np.packbits(committed).tobytes())
  parts.append(encode_varint(int(ids[0])))
  if irregular:
    parts.append(encode_varints(zigzag(steps)))
  distances = ids - parents
  parts.append(encode_varints(distances if tree else distances[:1]))
  parts.append(encode_varints(run.tokens[rows]))
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
  columns: list[tuple[np.ndarray, ...]] = []
  for _ in range(num_segments):
    columns.append(_decode_segment(cursor, max_rows))
    max_rows -= len(columns[-1][0])
    if len(columns) > 1 and columns[-1][0][0] == columns[-2][0][0]:
      raise FrameError("segments: two in a row of one sequence")
  empty = (np.zeros(0, np.int64),) * 4 + (np.zeros(0, np.bool_),)
  merged = [np.concatenate(c) for c in zip(empty, *columns, strict=True)]
  sequences, ids, parents, tokens, committed = merged
  if flags & _COMMITS:
    base = _first_ids(sequences, ids)
    for _ in range(cursor.count("commits", limit)):
      sequence = cursor.varint("commit", INT32_LIMIT)
      step = cursor.varint("root", 2 * INT32_LIMIT)
      root = base.get(sequence, 0) + int(unzigzag(np.array([step]))[0])
      commits.append(Commit(sequence=sequence, root=root))
  cursor.mark("control")
  payload = cursor.rest() if flags & _PAYLOAD else None
  cursor.finish("activations")
  for name, column in zip(("ids", "parents"), (ids, parents), strict=True):
    if len(ids) and not 0 <= column.min() <= column.max() < INT32_LIMIT:
      raise FrameError(f"{name}: must lie in [0, {INT32_LIMIT})")
  run = Run(
    run_id=run_id,
    epoch=epoch,
    opens=tuple(opens),
    closes=tuple(closes),
    commits=tuple(commits),
    sequences=sequences.astype(np.int32),
    ids=ids.astype(np.int32),
    parents=parents.astype(np.int32),
    tokens=tokens.astype(np.int32),
    committed=committed,
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


def _decode_segment(cursor: Cursor, max_rows: int) -> tuple[np.ndarray, ...]:
  """Returns sequences, ids, parents and tokens (int64), and committed."""
  sequence = cursor.varint("sequence", INT32_LIMIT)
  head = cursor.varint("segment head", 2**62)
  rows = head >> 3
  if not 0 < rows <= max_rows:
    raise FrameError(f"segment of {rows} rows: must lie in [1, {max_rows}]")
  if rows > cursor.remaining:  # each token takes a byte at least
    raise FrameError("segment truncated")
  committed = np.zeros(rows, np.bool_)
  if head & 4:
    prefix = cursor.varint("committed", 2 * rows + 2)
    if prefix == 1:
      bits = np.frombuffer(cursor.take(-(-rows // 8), "committed"), np.uint8)
      if np.any(np.unpackbits(bits)[rows:]):
        raise FrameError("committed: bits behind the last row")
      committed = np.unpackbits(bits)[:rows].astype(np.bool_)
      if not committed.any() or committed[: committed.sum()].all():
        raise FrameError("committed: a bitmap where a count would do")
    elif prefix & 1 or prefix == 0:
      raise FrameError(f"committed: {prefix} is neither count nor bitmap")
    committed[: prefix >> 1] = True
  first = cursor.varint("id", INT32_LIMIT)
  steps = np.zeros(rows - 1, np.int64)
  if head & 1:
    steps = unzigzag(cursor.varints(rows - 1, "id step", 2 * INT32_LIMIT))
    if not np.any(steps):
      raise FrameError("ids: steps sent although all are one")
  # At most 2**31 rows of steps below 2**32: no overflow.
  ids = first + np.concatenate((np.zeros(1, np.int64), np.cumsum(steps + 1)))
  if head & 2:
    parents = ids - cursor.varints(rows, "parent", INT32_LIMIT)
    if np.array_equal(parents[1:], ids[:-1]):
      raise FrameError("parents: sent although the rows are a chain")
  else:
    distance = cursor.varint("parent", INT32_LIMIT)
    parents = np.concatenate((np.array([first - distance]), ids[:-1]))
  cursor.mark("topology")
  tokens = cursor.varints(rows, "token", INT32_LIMIT)
  cursor.mark("ids")
  return np.full(rows, sequence, np.int64), ids, parents, tokens, committed
