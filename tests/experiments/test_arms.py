# SPDX-License-Identifier: Apache-2.0
"""Settings become the right drafters, sizes, links and costs."""

import dataclasses
import pathlib

import numpy as np
import pytest

from experiments import _arms
from experiments._settings import Decode, RingSettings, load_config
from wanspec_jax import models, wire
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Commit, Returned, Run, Sampling, Verdict
from wanspec_jax.worlds import StageShape, local_cluster

SHAPE = StageShape(row_buckets=(8, 16, 64), slot_buckets=(256,))


@pytest.fixture(scope="module")
def cluster():
  return local_cluster(
    num_stages=3,
    model="smollm2",
    dtype="bfloat16",
    codec="raw:bf16",
    shape=SHAPE,
  )


def frame_bytes(num_rows, *, payload):
  """Bytes of a real frame in the middle of a long text."""
  ids = np.arange(700, 700 + num_rows)
  run = Run(
    run_id=300,
    commits=(Commit(sequence=0, root=700),),
    sequences=np.zeros(num_rows, np.int32),
    ids=ids,
    parents=np.maximum(ids - 3, 699),
    tokens=np.full(num_rows, 40_000, np.int32),
    committed=np.zeros(num_rows, bool),
  )
  return len(wire.encode_run(run, payload))


@pytest.mark.parametrize("num_rows", [1, 5, 16, 64])
def test_byte_model_is_close_to_real_frames(cluster, num_rows):
  """The modelled lap counts bytes; the encoder says how many there are."""
  links = _arms.Links(lap_ms=0.0, mbps=8e-6)  # a byte a second
  nothing = StageProfile(
    buckets=(64,), seconds=((0.0,),) * 3, dtype="bfloat16", device="none"
  )
  width = models.load_config("smollm2").hidden_size
  verdict = Verdict(
    sequence=0, tokens=(40_000,), log_probs=(-1.0,), margins=(1.0,)
  )
  real = (
    frame_bytes(num_rows, payload=None)
    + 2 * frame_bytes(num_rows, payload=bytes(2 * width * num_rows))
    + len(wire.encode_returned(Returned(run_id=300, verdicts=(verdict,))))
  )
  modelled = _arms.ring_costs(cluster, links, nothing).lap_s(num_rows)
  assert modelled == pytest.approx(real, rel=0.02)


def test_links_agree_with_themselves():
  """The emulated hops add up to the ring that sizes are computed for."""
  links = _arms.Links(lap_ms=120.0, mbps=50.0, jitter_ms=3.0)
  hops, ring = links.hops(4), links.ring(4)
  assert len(hops) == 5
  assert sum(hop.delay_s for hop in hops) == pytest.approx(0.12)
  assert float(np.sum(ring.rtt_s)) / 2 == pytest.approx(0.12)
  assert np.asarray(ring.bandwidth_bps) == pytest.approx(50e6)
  assert len({hop.seed for hop in hops}) == 5, "hops do not jitter in step"


def test_sizes():
  gains = np.array([0.9, 0.5, 0.01])
  fixed = _arms.make_size(_arms.Speculate(size="2"))
  assert fixed(gains, lambda n: 1.0) == 2
  assert fixed(gains[:1], lambda n: 1.0) == 1
  sized = _arms.make_size(_arms.Speculate(size="sized"))
  assert sized(gains, lambda n: 1.0) == 3, "free rows are all taken"
  assert sized(gains, float) == 0, "a row that costs a lap never pays"
  assert sized(gains, lambda n: 1.0 + 0.2 * n) == 2


def test_synthetic_needs_the_plain_output():
  settings = _arms.Speculate(drafter="synthetic")
  with pytest.raises(ValueError, match="needs the plain output"):
    _arms.make_drafter(settings, eos_ids=frozenset({2}), vocab_size=100)


@pytest.mark.parametrize(
  ("make", "message"),
  [
    (lambda: _arms.Links(mbps=0), r"links\.mbps = 0"),
    (lambda: _arms.Links(lap_ms=-1), r"links\.lap_ms = -1"),
    (lambda: _arms.Speculate(drafter="psychic"), r"speculate\.drafter"),
    (lambda: _arms.Speculate(size="many"), r"speculate\.size = 'many'"),
    (lambda: _arms.Speculate(acceptance=1.5), r"acceptance = 1\.5"),
    (lambda: RingSettings(stages=0), r"ring\.stages = 0"),
    (lambda: Sampling(top_p=0.0), r"Sampling\.top_p = 0\.0"),
    (lambda: Decode(max_new_tokens=0), "max_new_tokens = 0"),
    (lambda: Decode(concurrent=0), "concurrent = 0"),
    (
      lambda: Decode(
        cluster=pathlib.Path("x.toml"), ring=RingSettings(stages=2)
      ),
      "the cluster file says what the ring is",
    ),
    (
      lambda: Decode(plain=False, plain_from=pathlib.Path("x")),
      "plain_from = .*: goes with plain",
    ),
    (
      lambda: Decode(
        concurrent=2, speculate=_arms.Speculate(drafter="synthetic")
      ),
      "concurrent = 2: must be 1 with the synthetic",
    ),
    (
      lambda: Decode(text=("a",), prompts=pathlib.Path("b")),
      "give one of the two",
    ),
    (
      lambda: load_config("nowhere"),
      r"--config nowhere: must be one of .*wan4",
    ),
  ],
)
def test_impossible_settings_are_refused_by_name(make, message):
  with pytest.raises(ValueError, match=message):
    make()


def test_the_demo_is_what_the_readme_says():
  demo = load_config("wan4")
  assert demo.ring.stages == 4
  assert (demo.links.lap_ms, demo.links.mbps) == (200.0, 100.0)
  assert dataclasses.replace(demo) == demo
