# SPDX-License-Identifier: Apache-2.0
"""Cluster files: what they say, and what is wrong with them."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax.worlds import Cluster, StageHost, StageShape

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
  layers=st.lists(st.integers(1, 9), min_size=1, max_size=5),
)
def test_round_trip(tmp_path_factory, model, keys, exact, deadline_s, layers):
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
