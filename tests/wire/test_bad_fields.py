# SPDX-License-Identifier: Apache-2.0
"""Messages that are wrong: refused by name, sent or received."""

import dataclasses

import numpy as np
import pytest

from tests.wire.examples import CHAIN, make_run
from wanspec_jax import wire
from wanspec_jax.messages import Cancel, Commit, Returned, Verdict


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([(0, 4, 4, 1, False), (0, 4, 3, 1, False)], "a node is listed twice"),
    ([(0, 4, 5, 1, False)], "row 0's is younger than its child"),
    ([(0, 5, 4, 1, False), (0, 4, 3, 1, False)], "row 0 precedes its parent"),
    ([(0, 1, 0, 1, False), (0, 2, 2, 1, False)], "row 1 is its own"),
    ([(0, 1, 0, -1, False)], r"tokens: smallest = -1: must lie in"),
    ([(-1, 1, 0, 1, False)], r"sequences: smallest = -1: must lie in"),
  ],
)
def test_bad_rows_are_named(rows, message):
  with pytest.raises(ValueError, match=message):
    wire.encode_run(make_run(rows))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"run_id": 2**62}, "Run.run_id"),
    ({"epoch": -1}, "Run.epoch"),
    ({"closes": (1, 1)}, "Run.closes: a sequence is listed twice"),
    ({"commits": (Commit(sequence=0, root=-1),)}, "commits: root = -1"),
    ({"commits": (Commit(sequence=0, root=1),) * 2}, "listed twice"),
    ({"tokens": np.zeros(4, np.int32)}, r"shape \(4,\), must be \(5,\)"),
    ({"tokens": np.zeros(5, np.float32)}, "dtype float32"),
    ({"committed": np.zeros(5, np.int32)}, "committed: dtype int32"),
    ({"ids": np.arange(5) + 2**31 - 2}, "ids: largest"),
  ],
)
def test_bad_run_fields_are_named(fields, message):
  with pytest.raises(ValueError, match=message):
    wire.encode_run(dataclasses.replace(CHAIN, **fields))


def test_bad_topology_is_refused_on_arrival():
  # One tree segment: ids 5, 4 (step zigzag(-2) = 3), both one from the parent.
  bodies = {
    "precedes its parent": "00 10 00 13 05 03 01 01 01 01",
    "must lie in": "00 10 00 10 00 01 01 01",  # parent of 0 is -1
    "row 1 is its own": "00 10 00 12 05 01 00 01 01",
    "needless": "00 10 00 08 8500 01 01",
  }
  for message, body in bodies.items():
    with pytest.raises(wire.FrameError, match=message):
      wire.decode_run(bytes.fromhex(body))


@pytest.mark.parametrize(
  ("verdicts", "message"),
  [
    ((Verdict(sequence=0, tokens=()),), "must not be empty"),
    ((Verdict(sequence=0, tokens=(1,)),) * 2, "listed twice"),
    ((Verdict(sequence=-1, tokens=(1,)),), "Verdict.sequence"),
    ((Verdict(sequence=0, tokens=(2**31,)),), "tokens: token"),
    ((Verdict(sequence=0, tokens=(1,), log_probs=(0.0, 1.0)),), "2 for 1"),
    ((Verdict(sequence=0, tokens=(1,), margins=(np.nan,)),), "NaN"),
  ],
)
def test_bad_verdicts_are_named(verdicts, message):
  with pytest.raises(ValueError, match=message):
    wire.encode_returned(Returned(run_id=0, verdicts=verdicts))


@pytest.mark.parametrize(
  ("fields", "message"),
  [
    ({"nodes": ()}, "must not be empty"),
    ({"nodes": ((0, ()),)}, "sequence 0 has no ids"),
    ({"nodes": ((0, (1,)), (0, (2,)))}, "a sequence is listed twice"),
    ({"nodes": ((0, (1, 2, 1)),)}, "an id listed twice"),
    ({"nodes": ((0, (-1,)),)}, "smallest id = -1"),
    ({"nodes": ((0, (1, 2**31)),)}, "largest id"),
    ({"nodes": ((-1, (1,)),)}, "sequence = -1"),
    ({"nodes": ((0, tuple(range(9))),)}, r"ids = 9: must lie in \[0, 9\)"),
    ({"before_run": 2**62}, "Cancel.before_run"),
    ({"epoch": -1}, "Cancel.epoch"),
  ],
)
def test_bad_cancels_are_named(fields, message):
  cancel = dataclasses.replace(
    Cancel(before_run=1, nodes=((0, (1,)),)), **fields
  )
  with pytest.raises(ValueError, match=message):
    wire.encode_cancel(cancel, max_nodes=8)


@pytest.mark.parametrize(
  ("body", "message"),
  [
    ("02", "must not be empty"),
    ("03 00 00 02 05", "epoch: sent although it is zero"),
    ("02 00 00 05", r"cancel of 0 ids: must lie in \[1, 8\]"),
    ("02 00 12 05", r"cancel of 9 ids: must lie in \[1, 8\]"),
    ("02 00 0c 05 01 06 07", r"cancel of 3 ids: must lie in \[1, 2\]"),
    ("02 00 05 05 00", "steps sent although all are one"),
    ("02 00 03 05", "steps sent although all are one"),  # a single id
    ("02 00 05 05 01", "an id listed twice"),  # 5, 5
    ("02 00 05 00 03", "smallest id = -1"),
    ("02 00 04 ffffffff07", "largest id"),
    ("02 00 02 05 00 02 06", "a sequence is listed twice"),
  ],
)
def test_bad_cancel_bodies_are_named(body, message):
  with pytest.raises(wire.FrameError, match=message):
    wire.decode_cancel(bytes.fromhex(body), max_nodes=8)
