# SPDX-License-Identifier: Apache-2.0
import ast
import pathlib
import tracemalloc

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.wire.examples import (
  CANCEL,
  CHAIN,
  EVERYTHING,
  VERDICTS,
  assert_same_run,
  cancels,
  make_run,
  returneds,
  runs,
)
from wanspec_jax import wire
from wanspec_jax.messages import Open, Returned, Run, Sampling, Verdict

REPOSITORY = pathlib.Path(__file__).parents[2]
PACKAGES = ("wanspec_jax", "trees", "drafters", "training", "experiments")

# Hand-derived. A chain of four below its root, which the run commits:
CHAIN_HEX = (
  "57 13 1a"  # 'W', version 1 | RUN, 26 bytes
  "bc 05"  # run 700 = 60 + 5·128
  "18"  # commits (8) and rows (16)
  "03 28"  # sequence 3, 5 rows · 8
  "84 07 01"  # first id 900 = 4 + 7·128; its parent is 1 back
  "a0 9c 01"  # token 20000 = 32 + 28·128 + 1·16384
  "b0 ea 01"  # 30000 = 48 + 106·128 + 1·16384
  "c0 b8 02"  # 40000 = 64 + 56·128 + 2·16384
  "d0 86 03"  # 50000 = 80 + 6·128 + 3·16384
  "c0 a9 07"  # 120000 = 64 + 41·128 + 7·16384
  "01 03 00"  # one commit: sequence 3, root = first id + 0
)
VERDICTS_HEX = (
  "57 14 14"  # 'W', version 1 | RETURNED, 20 bytes
  "09 06 02"  # run 9; verdicts (2), several (4): two
  "01 07 05"  # sequence 1; 1 token · 4, log-probs (1), margins (2); token 5
  "00 00 00 bf"  # -0.5 as a little-endian float32
  "00 00 00 40"  # 2.0
  "00 0c ac 02 01 02"  # sequence 0, 3 tokens · 4; 300 = 44 + 2·128, 1, 2
)
CANCEL_HEX = (
  "57 1c 0c"  # 'W', version 1 | CANCEL, 12 bytes
  "f8 0a"  # before run 700, ·2 = 120 + 10·128
  "03 08 85 07"  # sequence 3, 4 ids · 2; the first is 901 = 5 + 7·128
  "05 07 ac 02"  # sequence 5, 3 ids · 2, irregular (1); 300 = 44 + 2·128
  "02 03"  # to 302: one more than the next (1 → 2); to 301: two less (-2 → 3)
)
FRAMES = {
  "chain": wire.encode_run(CHAIN, b"activations"),
  "everything": wire.encode_run(EVERYTHING),
  "empty": wire.encode_run(make_run([])),
  "verdicts": wire.encode_returned(VERDICTS),
  "placeholder": wire.encode_returned(Returned(run_id=3)),
  "features": wire.encode_features(b"features", run_id=3, tap=2),
  "cancel": wire.encode_cancel(CANCEL),
  "hello": wire.encode_control(wire.Kind.HELLO, {"name": "a", "list": [1.5]}),
}


def decode_any(frame: wire.Frame) -> bytes | None:
  """Decodes any frame; returns it encoded anew if its form is unique."""
  if frame.kind == wire.Kind.RUN:
    run, payload = wire.decode_run(frame.body)
    return wire.encode_run(run, payload)
  if frame.kind == wire.Kind.RETURNED:
    return wire.encode_returned(wire.decode_returned(frame.body))
  if frame.kind == wire.Kind.CANCEL:
    return wire.encode_cancel(wire.decode_cancel(frame.body))
  if frame.kind == wire.Kind.FEATURES:
    run_id, epoch, tap, payload = wire.decode_features(frame.body)
    return wire.encode_features(payload, run_id=run_id, epoch=epoch, tap=tap)
  wire.decode_control(frame)
  return None


def check_bytes(data: bytes) -> None:
  """Refused by name, or legal and the only encoding of what they say."""
  try:
    again = decode_any(wire.split_frame(data))
  except wire.FrameError:
    return
  assert again is None or again == data


def test_golden_run():
  assert wire.encode_run(CHAIN) == bytes.fromhex(CHAIN_HEX)
  run, payload = wire.decode_run(bytes.fromhex(CHAIN_HEX)[3:])
  assert_same_run(run, CHAIN)
  assert payload is None


def test_golden_verdicts():
  assert wire.encode_returned(VERDICTS) == bytes.fromhex(VERDICTS_HEX)
  assert wire.decode_returned(bytes.fromhex(VERDICTS_HEX)[3:]) == VERDICTS


def test_golden_cancel():
  assert wire.encode_cancel(CANCEL) == bytes.fromhex(CANCEL_HEX)
  assert wire.decode_cancel(bytes.fromhex(CANCEL_HEX)[3:]) == CANCEL


def test_byte_budgets():
  # Five rows and three tokens of three bytes each.
  assert len(wire.encode_run(CHAIN)) <= 30
  three = Verdict(sequence=3, tokens=(20000, 30000, 40000))
  returned = Returned(run_id=700, verdicts=(three,))
  assert len(wire.encode_returned(returned)) <= 18
  assert len(wire.encode_returned(Returned(run_id=700))) <= 6


@settings(derandomize=True, deadline=None, max_examples=150)
@given(runs(), st.one_of(st.none(), st.binary(max_size=20)))
def test_runs_round_trip(run, payload):
  frame = wire.encode_run(run, payload)
  decoded, view = wire.decode_run(wire.split_frame(frame).body)
  assert_same_run(decoded, run)
  assert (None if view is None else bytes(view)) == payload
  classes = wire.frame_classes(frame)
  assert sum(classes.values()) == len(frame)
  assert classes.get("activations", 0) == len(payload or b"")
  # A token below 2**31 takes one byte per seven bits, and one at least.
  sizes = [max(1, -(-int(t).bit_length() // 7)) for t in run.tokens]
  assert classes.get("ids", 0) == sum(sizes)


@settings(derandomize=True, deadline=None, max_examples=60)
@given(returneds())
def test_returns_round_trip(returned):
  frame = wire.encode_returned(returned)
  assert wire.decode_returned(wire.split_frame(frame).body) == returned
  assert wire.frame_classes(frame) == {"verdicts": len(frame)}


@settings(derandomize=True, deadline=None, max_examples=100)
@given(cancels())
def test_cancels_round_trip(cancel):
  frame = wire.encode_cancel(cancel)
  assert wire.decode_cancel(wire.split_frame(frame).body) == cancel
  assert wire.frame_classes(frame) == {"control": len(frame)}


def test_payload_is_not_copied():
  payload = np.arange(10, dtype=np.uint8)
  frame = wire.split_frame(wire.encode_run(CHAIN, payload.data))
  _, view = wire.decode_run(frame.body)
  assert view is not None
  assert view.obj is frame.body.obj
  assert view.readonly
  np.testing.assert_array_equal(np.frombuffer(view, np.uint8), payload)


def test_byte_classes_by_hand():
  classes = wire.frame_classes(wire.encode_run(CHAIN, b"xyz"))
  # Prefix 3, run 2, flags 1, commit 3; segment 2, id 2, parent 1; 5 tokens.
  assert classes == {
    "control": 9,
    "topology": 5,
    "ids": 15,
    "activations": 3,
  }
  features = FRAMES["features"]
  assert wire.frame_classes(features) == {"features": len(features)}
  hello = FRAMES["hello"]
  assert wire.frame_classes(hello) == {"control": len(hello)}


def test_features_round_trip():
  frame = wire.split_frame(
    wire.encode_features(b"abc", run_id=2**50, epoch=3, tap=11)
  )
  run_id, epoch, tap, payload = wire.decode_features(frame.body)
  assert (run_id, epoch, tap, bytes(payload)) == (2**50, 3, 11, b"abc")


def test_log_probs_are_rounded_to_float32():
  verdict = Verdict(
    sequence=0, tokens=(1, 2), log_probs=(-0.1, -1e300), margins=(0.1, np.inf)
  )
  frame = wire.encode_returned(Returned(run_id=0, verdicts=(verdict,)))
  decoded = wire.decode_returned(wire.split_frame(frame).body).verdicts[0]
  assert decoded.log_probs == (float(np.float32(-0.1)), -np.inf)
  assert decoded.margins == (float(np.float32(0.1)), np.inf)


@pytest.mark.parametrize("name", FRAMES)
def test_every_truncation_is_refused(name):
  data = FRAMES[name]
  for stop in range(len(data)):
    with pytest.raises(wire.FrameError):
      wire.split_frame(data[:stop])
  frame = wire.split_frame(data)
  open_ended = {"chain", "features"}  # whose payload may end anywhere
  payload_bytes = {"chain": 11, "features": 8}.get(name, 0)
  # A cancel may end behind any sequence: a body's length is in its prefix.
  whole = {"cancel": {6}}.get(name, set())
  for stop in set(range(len(frame.body) - payload_bytes)) - whole:
    with pytest.raises(wire.FrameError):
      decode_any(frame._replace(body=frame.body[:stop]))
  if name not in open_ended:
    with pytest.raises(wire.FrameError):
      decode_any(frame._replace(body=memoryview(bytes(frame.body) + b"\0")))


@pytest.mark.parametrize("name", FRAMES)
def test_every_flipped_bit_is_refused_or_legal(name):
  data = FRAMES[name]
  for bit in range(8 * len(data)):
    flipped = bytearray(data)
    flipped[bit // 8] ^= 1 << bit % 8
    check_bytes(bytes(flipped))


@settings(derandomize=True, deadline=None, max_examples=300)
@given(
  st.sampled_from(list(wire.Kind)),
  st.one_of(
    st.binary(max_size=24),
    st.lists(st.sampled_from([0, 1, 2, 3, 8, 16, 48, 127, 128]), max_size=24),
  ),
)
def test_any_bytes_are_refused_or_legal(kind, body):
  check_bytes(wire.encode_frame(kind, bytes(body)))


def test_partial_reads_at_every_offset():
  data = b"".join(FRAMES.values())
  expected = [wire.split_frame(frame) for frame in FRAMES.values()]
  for cut in range(len(data) + 1):
    decoder = wire.FrameDecoder()
    frames = [*decoder.feed(data[:cut]), *decoder.feed(data[cut:])]
    assert frames == expected
    assert not decoder.mid_frame
  decoder = wire.FrameDecoder()
  pieces = [frame for byte in data for frame in decoder.feed(bytes([byte]))]
  assert pieces == expected


@pytest.mark.parametrize(
  ("head", "message"),
  [
    ("58", "bad magic byte 0x58"),
    ("16 03 01", r"bad magic byte 0x16 \(a TLS peer"),
    ("57 23 00", "speaks protocol version 2, this side version 1"),
    ("57 1f 00", "unknown frame kind 15"),
    ("57 13 ff ff ff ff ff", "length field over 5 bytes"),
    ("57 13 80 00", "needless"),
    ("57 13 ff ff ff ff 7f", "over the cap of 268435456"),
    ("57 10 81 80 40", "HELLO body of 1048577 bytes: over the cap"),
    ("57 1c 81 80 40", "CANCEL body of 1048577 bytes: over the cap"),
  ],
)
def test_corrupt_prefixes_are_named(head, message):
  decoder = wire.FrameDecoder()
  with pytest.raises(wire.FrameError, match=message):
    list(decoder.feed(bytes.fromhex(head)))
  with pytest.raises(wire.FrameError, match="already refused"):
    list(decoder.feed(FRAMES["chain"]))


def test_foreign_hello_and_refuse_are_readable():
  for kind in (wire.Kind.HELLO, wire.Kind.REFUSE):
    data = wire.encode_control(kind, {"reason": "no"}, version=7)
    frame = wire.split_frame(data)
    assert frame.version == 7
    assert wire.decode_control(frame) == {"reason": "no"}


def test_memory_grows_only_with_what_arrives():
  claims = [
    bytes.fromhex("57 13 ff ff ff 7f") + b"x" * 1000,  # 256 MiB - 1
    wire.encode_frame(wire.Kind.RUN, bytes.fromhex("00 10 00 f8ffffff7f 00")),
    wire.encode_frame(wire.Kind.RUN, bytes.fromhex("00 02 ffffffff07 00")),
    wire.encode_frame(wire.Kind.RETURNED, bytes.fromhex("00 02 00 fcffffff3f")),
    wire.encode_frame(wire.Kind.CANCEL, bytes.fromhex("02 00 feffffff07 00")),
    wire.encode_frame(wire.Kind.CANCEL, bytes.fromhex("02 00 ffff07 00 02")),
    wire.encode_frame(wire.Kind.HELLO, bytes.fromhex("dfffffffff")),
    wire.encode_frame(wire.Kind.HELLO, bytes.fromhex("81 a161 c6ffffffff")),
  ]
  check_bytes(claims[1])  # imports and caches, before measuring
  tracemalloc.start()
  for data in claims:
    with pytest.raises(wire.FrameError):
      decode_any(wire.split_frame(data))
  _, peak_bytes = tracemalloc.get_traced_memory()
  tracemalloc.stop()
  assert peak_bytes < 2**20


def test_caps_are_configurable():
  frame = wire.encode_run(CHAIN, bytes(100))
  decoder = wire.FrameDecoder(max_body_bytes=64)
  with pytest.raises(wire.FrameError, match="over the cap of 64"):
    list(decoder.feed(frame))
  body = wire.split_frame(frame).body
  with pytest.raises(wire.FrameError, match=r"5 rows: must lie in \[1, 4\]"):
    wire.decode_run(body, max_rows=4)
  with pytest.raises(ValueError, match=r"num_rows = 5: must lie in \[0, 5\)"):
    wire.encode_run(CHAIN, max_rows=4)


def test_large_prompt_round_trips():
  n = 5000
  rows = [(0, i, max(i - 1, 0), 7 * i, i < n - 1) for i in range(n)]
  run = make_run(rows, opens=(Open(sequence=0, sampling=Sampling()),))
  frame = wire.encode_run(run, bytes(2**20))
  decoded, payload = wire.decode_run(wire.split_frame(frame).body)
  assert_same_run(decoded, run)
  assert payload is not None
  assert len(payload) == 2**20
  assert wire.frame_classes(frame)["topology"] < 12  # whatever its length


@pytest.mark.parametrize(
  "body",
  [
    b"",
    msgpack.packb([1]),
    msgpack.packb({1: 2}, use_bin_type=True),
    msgpack.packb({b"a": 2}, use_bin_type=True),
    msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
    msgpack.packb({"a": msgpack.ExtType(5, b"")}),
    msgpack.packb({"a": msgpack.Timestamp(1)}),
    msgpack.packb({"a": 1}) + b"\0",
    b"\x81\xa1\xff\x01",  # the key is not UTF-8
    b"\x81\xa1a" + b"\x91" * 100_000,
    b"\x80\x04\x95.",  # the head of a pickle
  ],
)
def test_bad_maps_are_refused(body):
  frame = wire.split_frame(wire.encode_frame(wire.Kind.CONTROL, body))
  with pytest.raises(wire.FrameError, match="CONTROL"):
    wire.decode_control(frame)


def test_control_round_trip_and_rules():
  fields = {"a": 1, "b": [None, True, 2.5, "é"], "c": {"d": b"\0\xff"}}
  frame = wire.split_frame(wire.encode_control(wire.Kind.TRACE, fields))
  assert wire.decode_control(frame) == fields
  with pytest.raises(ValueError, match="its body is not a map"):
    wire.encode_control(wire.Kind.RUN, {})
  with pytest.raises(ValueError, match="must be <= 1048576"):
    wire.encode_control(wire.Kind.TRACE, {"a": bytes(2**20)})
  with pytest.raises(wire.FrameError, match="not a map"):
    wire.decode_control(wire.split_frame(FRAMES["chain"]))


def _imports(path: pathlib.Path) -> set[str]:
  names = set()
  for node in ast.walk(ast.parse(path.read_text())):
    if isinstance(node, ast.Import):
      names |= {alias.name.partition(".")[0] for alias in node.names}
    elif isinstance(node, ast.ImportFrom) and node.module:
      names.add(node.module.partition(".")[0])
  return names


def test_wire_needs_no_jax_and_nothing_unpickles():
  files = [p for name in PACKAGES for p in (REPOSITORY / name).rglob("*.py")]
  here = [p for p in files if p.parent.name == "wire"]
  assert len(here) > 10
  for path in here:
    assert not _imports(path) & {"jax", "jaxlib", "flax", "torch"}, path
  unsafe = {"pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}
  for path in files:
    assert not _imports(path) & unsafe, path
    assert "allow_pickle=True" not in path.read_text(), path


def test_decoded_types_are_plain():
  run, _ = wire.decode_run(wire.split_frame(FRAMES["everything"]).body)
  assert isinstance(run, Run)
  assert type(run.commits[0].root) is int
  assert type(run.opens[0].sampling.temperature) is float
