# SPDX-License-Identifier: Apache-2.0
"""Cluster files: what they say, and what is wrong with them."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax.worlds import Cluster, StageHost, StageShape, Standby

GOOD = """
[ring]
model = "some/directory"
dtype = "float32"
codec = "uniform:8:64"
row_buckets = [8, 64]
slot_buckets = [256, 512]
peer_deadline_s = 3

[[stage]]
host = "127.0.0.1"
port = 7000
layers = [0, 2]

[[stage]]
name = "gpu-b"
host = "localhost"
port = 7000
layers = [2, 1]
"""
SPARE = """
[[standby]]
name = "spare"
host = "::1"
port = 7001
for = "gpu-b"
"""


def write(tmp_path, text):
  path = tmp_path / "cluster.toml"
  path.write_text(text)
  return path


def test_reads_what_is_written(tmp_path):
  cluster = Cluster.from_toml(write(tmp_path, GOOD))
  assert cluster == Cluster(
    stages=(
      StageHost(name="stage-0", host="127.0.0.1", port=7000, layers=(0, 2)),
      StageHost(name="gpu-b", host="localhost", port=7000, layers=(2, 1)),
    ),
    model="some/directory",
    dtype="float32",
    codec="uniform:8:64",
    shape=StageShape(row_buckets=(8, 64), slot_buckets=(256, 512)),
    peer_deadline_s=3,
  )
  assert cluster.num_stages == 2


def test_keys_lie_beside_the_file(tmp_path):
  remote = GOOD.replace('"localhost"', '"192.0.2.7"')
  path = write(tmp_path, remote.replace("[ring]", '[ring]\nkeys = "keys"'))
  assert Cluster.from_toml(path).keys == str(tmp_path / "keys")


@settings(derandomize=True, deadline=None, max_examples=60)
@given(
  model=st.text(st.characters(codec="utf-8"), min_size=1, max_size=12),
  keys=st.none() | st.just('/some/wh\\e"re'),
  exact=st.booleans(),
  deadline_s=st.floats(1e-9, 1e300) | st.integers(1, 100),
  spares=st.lists(st.integers(0, 99), max_size=4),
  layers=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_round_trip(
  tmp_path_factory, model, keys, exact, deadline_s, spares, layers
):
  firsts = [sum(layers[:i]) for i in range(len(layers))]
  cluster = Cluster(
    stages=tuple(
      StageHost(name=f"s{i}", host="::1", port=7000 + i, layers=(first, count))
      for i, (first, count) in enumerate(zip(firsts, layers, strict=True))
    ),
    model=model,
    shape=StageShape(
      row_buckets=(2, 3),
      slot_buckets=(64,),
      cache_dtype="bfloat16",
      exact=exact,
    ),
    keys=keys,
    verifier="greedy",
    start_deadline_s=deadline_s,
    standbys=tuple(
      Standby(
        name=f"b{i}", host="::1", port=8000 + i, stage=f"s{k % len(layers)}"
      )
      for i, k in enumerate(spares)
    ),
  )
  path = tmp_path_factory.getbasetemp() / "round-trip.toml"
  path.write_text(cluster.to_toml(), encoding="utf-8")
  assert Cluster.from_toml(path) == cluster


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    ("[ring]", "[ring", "not TOML"),
    ('"float32"', '"float16"', "Cluster.dtype = 'float16'"),
    ('"float32"', "32", "Cluster.dtype = 32"),
    ('"uniform:8:64"', '"zip"', "codec = 'zip'"),
    ('"uniform:8:64"', "8", "Cluster.codec = 8"),
    ('"some/directory"', '""', "Cluster.model = ''"),
    ('"some/directory"', "1", "Cluster.model = 1"),
    ("dtype", "dtpye", r"\[ring\]: unknown \['dtpye'\]"),
    ("[ring]", '[ring]\nverifier = "ratio"', "Cluster.verifier = 'ratio'"),
    ("[ring]", '[ring]\nrollback = "copy"', "Cluster.rollback = 'copy'"),
    ("[ring]", "[ring]\nkeys = 3", "Cluster.keys = 3"),
    ("[ring]", "[ring]\nexact = 1", "exact = 1"),
    ("[ring]", "[ring]\nstages = 1", r"unknown \['stages'\]"),
    ("_s = 3", '_s = "3"', "Cluster.peer_deadline_s = '3'"),
    ("_s = 3", "_s = 0", "Cluster.peer_deadline_s = 0"),
    ("_s = 3", "_s = nan", "Cluster.peer_deadline_s = nan"),
    ("_s = 3", "_s = true", "Cluster.peer_deadline_s = True"),
    ("row_buckets = [8, 64]", "", "row_buckets is missing"),
    ("[8, 64]", "8", "row_buckets = 8"),
    ("[8, 64]", "[64, 8]", "row_buckets"),
    ("[8, 64]", '["8"]', "row_buckets"),
    ("[8, 64]", "[0, 8]", "row_buckets"),
    ("[8, 64]", "[]", "row_buckets"),
    ("layers = [2, 1]", "", r"\[\[stage\]\] 1: \['layers'\] missing"),
    ("[2, 1]", "[1, 2]", "gpu-b.*first = 2"),
    ("[2, 1]", "[2, 0]", r"StageHost.layers = \(2, 0\)"),
    ("[2, 1]", "[2]", "StageHost.layers"),
    ("[2, 1]", '[2, "1"]', "StageHost.layers"),
    ("[2, 1]", "3", "StageHost.layers = 3"),
    ("gpu-b", "stage-0", "names .* must differ"),
    ("gpu-b", "GPU b", "StageHost.name = 'GPU b'"),
    ("gpu-b", "coordinator", "StageHost.name = 'coordinator'"),
    ("gpu-b", "ca", "StageHost.name = 'ca'"),
    ('"gpu-b"', "1", "StageHost.name = 1"),
    ('"gpu-b"', '["gpu-b"]', r"StageHost.name = \['gpu-b'\]"),
    ('"localhost"', '"127.0.0.1"', "addresses .* must differ"),
    ('"localhost"', '"192.0.2.7"', "gpu-b is at '192.0.2.7'"),
    ('"localhost"', '"127.example.com"', "gpu-b is at '127.example.com'"),
    ('"localhost"', '"127.0.0.1.example"', "gpu-b is at"),
    ('"localhost"', '"0.0.0.0"', "gpu-b is at"),
    ('"localhost"', "4", "StageHost.host = 4"),
    ("7000", "0", "StageHost.port = 0"),
    ("7000", "65536", "StageHost.port = 65536"),
    ("7000", '"7000"', "StageHost.port = '7000'"),
    ("[[stage]]", "[[stages]]", r"file: unknown \['stages'\]"),
    ("[ring]", "[[ring]]", r"\[ring\] must be one table"),
  ],
)
def test_what_is_wrong_is_named(tmp_path, old, new, message):
  assert old in GOOD
  path = write(tmp_path, GOOD.replace(old, new))
  with pytest.raises(ValueError, match=message) as caught:
    Cluster.from_toml(path)
  assert str(path) in str(caught.value)


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "row_buckets is missing"),
    ("ring = 3", r"\[ring\] must be one table"),
    (GOOD.split("[[stage]]")[0], "stages = .*: must have a stage or more"),
    (GOOD.split("[[stage]]")[0] + "[stage]\nport = 1", "must be tables"),
    ("stage = [1, 2]", "must be tables"),
  ],
)
def test_files_of_another_form(tmp_path, text, message):
  with pytest.raises(ValueError, match=message):
    Cluster.from_toml(write(tmp_path, text))


def test_files_that_cannot_be_read(tmp_path):
  with pytest.raises(ValueError, match=r"nowhere\.toml: cannot be read"):
    Cluster.from_toml(tmp_path / "nowhere.toml")
  with pytest.raises(ValueError, match="cannot be read"):
    Cluster.from_toml(tmp_path)
  path = tmp_path / "binary.toml"
  path.write_bytes(b"\xff\xfe\x00")
  with pytest.raises(ValueError, match=r"binary\.toml: not TOML"):
    Cluster.from_toml(path)


def test_agreement_covers_every_setting_that_changes_tokens(tmp_path):
  """All fields but where the stages are and how long anyone waits."""
  cluster = Cluster.from_toml(write(tmp_path, GOOD))
  ours = cluster.agreement(0, "hash")
  for changes in (
    {"dtype": "bfloat16"},
    {"codec": "raw:f32"},
    {"verifier": "greedy"},
    {"shape": dataclasses.replace(cluster.shape, row_buckets=(8,))},
    {"shape": dataclasses.replace(cluster.shape, slot_buckets=(256,))},
    {"shape": dataclasses.replace(cluster.shape, cache_dtype="bfloat16")},
    {"shape": dataclasses.replace(cluster.shape, exact=False)},
    {"stages": cluster.stages[:1]},
  ):
    assert dataclasses.replace(cluster, **changes).agreement(0, "hash") != ours
  assert cluster.agreement(1, "hash") != ours
  assert cluster.agreement(0, "other") != ours
  elsewhere = dataclasses.replace(cluster, peer_deadline_s=1.0, model="x")
  assert elsewhere.agreement(0, "hash") == ours


# Standbys. ------------------------------------------------------------------


@pytest.mark.parametrize(
  ("old", "new", "message"),
  [
    (
      '"gpu-b"',
      '"gpu-c"',
      r"standbys\['spare'\]\.stage = 'gpu-c': must be one",
    ),
    ('"gpu-b"', '"spare"', r"standbys\['spare'\]\.stage = 'spare'"),
    ('"gpu-b"', "1", "Standby.stage = 1"),
    ('for = "gpu-b"', "", r"\[\[standby\]\] 0: \['for'\] missing"),
    ('name = "spare"', "", r"\[\[standby\]\] 0: \['name'\] missing"),
    ("for =", "stage =", r"\[\[standby\]\] 0: unknown \['stage'\]"),
    ("port =", "layers = [2, 1]\nport =", r"unknown \['layers'\]"),
    ('"spare"', '"stage-0"', "names .* must differ"),
    ('"spare"', '"Spare"', "Standby.name = 'Spare'"),
    ('"spare"', '"coordinator"', "Standby.name = 'coordinator'"),
    ('"::1"\nport = 7001', '"localhost"\nport = 7000', "addresses .* must"),
    ('"::1"', '"192.0.2.9"', "spare is at '192.0.2.9'"),
    ("7001", "0", "Standby.port = 0"),
    ("[[standby]]", "[standby]", r"\[\[standby\]\] must be tables"),
  ],
)
def test_what_is_wrong_with_a_standby_is_named(tmp_path, old, new, message):
  assert old in SPARE
  path = write(tmp_path, GOOD + SPARE.replace(old, new))
  with pytest.raises(ValueError, match=message):
    Cluster.from_toml(path)


def ring_of_three():
  """Returns a ring with two standbys for its second stage, one for its third;
  hosts are told apart by their ports."""
  return Cluster(
    stages=tuple(
      StageHost(name=f"s{i}", host="::1", port=7000 + i, layers=(2 * i, 2))
      for i in range(3)
    ),
    shape=StageShape(row_buckets=(8,), slot_buckets=(64,)),
    standbys=tuple(
      Standby(name=name, host="::1", port=port, stage=stage)
      for name, port, stage in (
        ("a", 8000, "s1"),
        ("b", 8001, "s1"),
        ("c", 8002, "s2"),
      )
    ),
  )


def members(cluster):
  """Returns `(name, port, first layer)` of the ring, and who waits for whom."""
  return (
    [(s.name, s.port, s.layers[0]) for s in cluster.stages],
    [(s.name, s.port, s.stage) for s in cluster.standbys],
  )


def test_a_standby_changes_places_with_its_stage():
  ring = ring_of_three()
  assert members(ring.standing_in("a")) == (
    [("s0", 7000, 0), ("a", 8000, 2), ("s2", 7002, 4)],
    [("s1", 7001, "a"), ("b", 8001, "a"), ("c", 8002, "s2")],
  )
  assert ring.standing_in("a").standing_in("s1") == ring
  assert members(ring.standing_in("a").standing_in("b").standing_in("c")) == (
    [("s0", 7000, 0), ("b", 8001, 2), ("c", 8002, 4)],
    [("s1", 7001, "b"), ("a", 8000, "b"), ("s2", 7002, "c")],
  )
  with pytest.raises(ValueError, match=r"standby 's0': .* \['a', 'b', 'c'\]"):
    ring.standing_in("s0")


@pytest.mark.parametrize("own", ["s1", "a", "b"])
def test_all_members_arrange_the_same_ring(own):
  """Whoever's view it is: a standby's has itself in its stage's place."""
  ring = ring_of_three()
  view = ring if own == "s1" else ring.standing_in(own)
  for middle in ("s1", "a", "b"):
    for last in ("s2", "c"):
      arranged = view.arranged(["s0", middle, last])
      assert [s.name for s in arranged.stages] == ["s0", middle, last]
      ports = {"s0": 7000, "s1": 7001, "s2": 7002}
      ports |= {"a": 8000, "b": 8001, "c": 8002}
      assert all(s.port == ports[s.name] for s in arranged.stages)
      assert [s.layers for s in arranged.stages] == [(0, 2), (2, 2), (4, 2)]
      assert arranged.agreement(1, "hash") == ring.agreement(1, "hash")


@pytest.mark.parametrize(
  ("names", "message"),
  [
    (["s0", "s1"], "must have 3 members"),
    (["s0", "c", "s2"], "'c' does not stand in for s1"),
    (["s0", "s2", "s1"], "'s2' does not stand in for s1"),
    (["s0", "a", "a"], "'a' does not stand in for s2"),
    (["s0", "x" * 999, "s2"], "'x{64}' does not"),
  ],
)
def test_rings_that_nobody_may_ask_for(names, message):
  with pytest.raises(ValueError, match=message):
    ring_of_three().arranged(names)


def test_a_spare_is_the_first_that_has_not_failed():
  ring = ring_of_three()
  assert ring.spare("s1", ()) == "a"
  assert ring.spare("s1", {"a"}) == "b"
  assert ring.spare("s1", {"a", "b", "c"}) is None
  assert ring.spare("s0", ()) is None
  assert ring.spare("nobody", ()) is None
  after = ring.standing_in("a")
  assert after.spare("a", {"s1"}) == "b"
  assert after.spare("a", {"s1", "b"}) is None
  assert after.spare("s1", ()) is None
