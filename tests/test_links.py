# SPDX-License-Identifier: Apache-2.0
"""Lap formulas against sums written out by hand and in exact arithmetic."""

import json
import math

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanspec_jax import links

settings = hypothesis.settings(derandomize=True, deadline=None, max_examples=40)

break_even = jax.jit(links.break_even_bandwidth_bps)


def two_stages():
  return links.Ring.from_links(
    [
      links.Link(rtt_s=0.02, bandwidth_bps=8e6),
      links.Link(rtt_s=0.1, bandwidth_bps=80e6, jitter_s=0.001),
      links.Link(rtt_s=0.06, bandwidth_bps=800e6),
    ]
  )


def profile(**changes):
  fields = {
    "buckets": (1, 4, 16),
    "seconds": ((0.01, 0.02, 0.05), (0.03, 0.04, 0.08)),
    "dtype": "float32",
    "device": "cpu",
    "draft_s_per_node": 0.002,
  }
  return links.StageProfile(**fields | changes)


def test_lap_by_hand():
  ring = two_stages()
  assert ring.num_stages == 2
  assert float(ring.hop(1).jitter_s) == pytest.approx(0.001)
  # One-way .01 + .05 + .03; 1000 B at 1 MB/s, 20 kB at 10 MB/s, 100 B at 100.
  got = links.lap_time_s(ring, [1000, 20_000, 100], [0.01, 0.02], 0.005)
  want = 0.09 + 0.001 + 0.002 + 0.000001 + 0.03 + 0.005
  assert float(got) == pytest.approx(want, rel=1e-6)
  busy = links.occupancy_s(ring, [1000, 20_000, 100], [0.001, 0.0015])
  assert float(busy) == pytest.approx(0.002, rel=1e-6)
  busy = links.occupancy_s(ring, [1000, 20_000, 100], [0.001, 0.015])
  assert float(busy) == pytest.approx(0.015, rel=1e-6)
  busy = links.occupancy_s(ring, [1000, 20_000, 100], [0.001, 0.015], 0.7)
  assert float(busy) == pytest.approx(0.7, rel=1e-6)


def test_uniform_ring_has_the_lap_it_was_asked_for():
  ring = links.Ring.uniform(
    num_stages=4, lap_s=0.25, bandwidth_bps=20e6, jitter_s=0.003
  )
  assert ring.rtt_s.shape == (5,)
  lap = links.lap_time_s(ring, [0] * 5, [0] * 4)
  assert float(lap) == pytest.approx(0.25, rel=1e-6)
  assert ring.jitter_s.tolist() == pytest.approx([0.003] * 5)
  # A link without limit costs its delay only.
  free = links.Ring.uniform(num_stages=1, lap_s=0.1, bandwidth_bps=math.inf)
  assert float(links.lap_time_s(free, [1e9, 1e9], [0])) == pytest.approx(0.1)


def test_leading_axes_gradients_and_vmap():
  ring = two_stages()
  sizes = jnp.array([[1000, 20_000, 100], [0, 0, 0]], jnp.float32)
  stage_s = jnp.array([0.01, 0.02], jnp.float32)
  both = links.lap_time_s(ring, sizes, stage_s)
  assert both.shape == (2,)
  assert float(both[1]) == pytest.approx(0.12, rel=1e-6)
  # dT/d rtt_h = 1/2 and dT/d bandwidth_h = −8 bytes_h / bandwidth_h².
  grads = jax.grad(links.lap_time_s)(ring, sizes[0], stage_s)
  assert grads.rtt_s.tolist() == pytest.approx([0.5] * 3)
  assert grads.bandwidth_bps.tolist() == pytest.approx(
    [-8000 / 64e12, -160_000 / 64e14, -800 / 64e16], rel=1e-5
  )
  assert not grads.jitter_s.any()

  def lap_of(lap_s):
    ring = links.Ring.uniform(num_stages=2, lap_s=lap_s, bandwidth_bps=1e6)
    return links.lap_time_s(ring, sizes[1], stage_s)

  laps = jnp.array([0.05, 0.2], jnp.float32)
  assert jax.jit(jax.vmap(lap_of))(laps).tolist() == pytest.approx(
    [0.08, 0.23], rel=1e-6
  )


def test_break_even_of_the_textbook_case():
  # H = 4096 fp16, n = 32, τ = 4.5, L = 200 ms, no compute, activations on the
  # 4 hops between 5 stages: 27.5 · 8192 · 8 bit / 0.7 s per aggregated link.
  ring = links.Ring.uniform(num_stages=5, lap_s=0.2, bandwidth_bps=1e6)
  row = np.array([0, 8192, 8192, 8192, 8192, 0])
  case = {
    "tokens_per_lap": 4.5,
    "tree_bytes": 32 * row,
    "plain_bytes": row,
    "tree_stage_s": [0.0] * 5,
    "plain_stage_s": [0.0] * 5,
  }
  got = links.break_even_bandwidth_bps(ring, **case)
  want = 4 * 27.5 * 8192 * 8 / 0.7
  assert got.tolist() == pytest.approx([want] * 6, rel=1e-5)
  assert want == pytest.approx(10e6, rel=0.05)
  # Drafting for longer than all the time saved: never.
  never = links.break_even_bandwidth_bps(ring, **case, draft_s=0.8)
  assert np.isinf(never).all()
  # Fewer rows than tokens: always.
  always = links.break_even_bandwidth_bps(
    ring, **case | {"tree_bytes": 4 * row}
  )
  assert not always.any()
  free = links.Ring.uniform(num_stages=5, lap_s=0.2, bandwidth_bps=math.inf)
  assert not links.break_even_bandwidth_bps(free, **case).any()


@settings
@hypothesis.given(
  rtt=st.lists(st.floats(0, 0.5), min_size=3, max_size=3),
  ratios=st.lists(st.floats(1e5, 1e8), min_size=3, max_size=3),
  rows=st.integers(2, 64),
  tokens=st.floats(1.0, 6.0),
  compute=st.floats(0, 0.05),
  draft_s=st.floats(0, 0.1),
)
def test_laps_cross_over_at_the_break_even(
  rtt, ratios, rows, tokens, compute, draft_s
):
  model = links.hop_bytes_model(
    num_stages=2, ids_bytes_per_node=8, row_bytes=1024, header_bytes=32
  )
  ring = links.Ring(
    rtt_s=jnp.array(rtt, jnp.float32),
    bandwidth_bps=jnp.array(ratios, jnp.float32),
    jitter_s=jnp.zeros((3,), jnp.float32),
  )
  case = {
    "tokens_per_lap": tokens,
    "tree_bytes": model(rows),
    "plain_bytes": model(1),
    "tree_stage_s": [compute, 2 * compute],
    "plain_stage_s": [compute / 3, compute],
    "draft_s": draft_s,
  }
  got = np.asarray(break_even(ring, **case), np.float64)

  def gain_s(bandwidths):
    """Time that a tree lap saves over its tokens' plain laps, in float64."""

    def lap(size, stage_s):
      delay = sum(float(r) for r in ring.rtt_s) / 2
      return delay + float(np.sum(8 * size / bandwidths)) + sum(stage_s)

    plain = lap(case["plain_bytes"], case["plain_stage_s"])
    tree = lap(case["tree_bytes"], case["tree_stage_s"]) + draft_s
    return tokens * plain - tree

  widest = gain_s(np.full(3, np.inf))
  hypothesis.assume(abs(widest) > 1e-4)  # clear of float32 cancellation
  if np.isinf(got).all():
    assert widest < 0
  elif not got.any():
    assert widest > 0 and gain_s(np.asarray(ring.bandwidth_bps)) > 0
  else:
    assert gain_s(got * 1.05) > 0 > gain_s(got * 0.95)
    np.testing.assert_allclose(
      got / got[0], np.asarray(ratios) / ratios[0], rtol=1e-4
    )


def test_break_even_has_finite_gradients():
  ring = links.Ring.uniform(num_stages=1, lap_s=0.2, bandwidth_bps=1e6)

  def total(tokens_per_lap):
    return links.break_even_bandwidth_bps(
      ring,
      tokens_per_lap=tokens_per_lap,
      tree_bytes=[8000.0, 80.0],
      plain_bytes=[1000.0, 80.0],
      tree_stage_s=[0.02],
      plain_stage_s=[0.01],
    )[0]

  slope = float(jax.grad(total)(jnp.float32(3.0)))
  # x* = 8 (8080 − 1080 τ) / (.2 (τ − 1) + .01 τ − .02) bit/s
  numerator, denominator = 8 * (8080 - 3 * 1080), 0.4 + 0.03 - 0.02
  want = (-8640 * denominator - numerator * 0.21) / denominator**2
  assert slope == pytest.approx(want, rel=1e-4)
  assert np.isfinite(float(jax.grad(total)(jnp.float32(1.0))))


def test_bytes_of_each_hop():
  model = links.hop_bytes_model(
    num_stages=3,
    ids_bytes_per_node=12,
    row_bytes=(1000, 250.5),
    header_bytes=64,
    verdict_bytes=20,
  )
  assert model(1).tolist() == [76, 1076, 326.5, 84]
  assert model(10).tolist() == [184, 10184, 2689, 84]
  assert model(np.array([[1, 10]])).shape == (1, 2, 4)
  single = links.hop_bytes_model(
    num_stages=1, ids_bytes_per_node=12, row_bytes=1000
  )
  assert single(2).tolist() == [24, 0]


def test_profile_picks_the_bucket_that_holds_the_rows():
  p = profile()
  assert p.num_stages == 2
  for num_rows, want in (
    (0, [0, 0]),
    (1, [0.01, 0.03]),
    (2, [0.02, 0.04]),
    (4, [0.02, 0.04]),
    (5, [0.05, 0.08]),
    (16, [0.05, 0.08]),
    (17, [0.06, 0.11]),  # 16 + 1
    (35, [0.12, 0.20]),  # 16 + 16 + 3
  ):
    assert p.stage_s(num_rows).tolist() == pytest.approx(want), num_rows


def test_profile_round_trip():
  p = profile(seconds=((0.1 + 0.2, 1 / 3, 1.0),))
  assert links.StageProfile.from_json(p.to_json()) == p
  fields = json.loads(p.to_json())
  with pytest.raises(ValueError, match="colour"):
    links.StageProfile.from_json(json.dumps(fields | {"colour": 1}))
  del fields["device"]
  with pytest.raises(ValueError, match="device"):
    links.StageProfile.from_json(json.dumps(fields))
  with pytest.raises(ValueError, match="StageProfile"):
    links.StageProfile.from_json("[1]")


def test_profiles_by_cache_size():
  small, large = profile(), profile(draft_s_per_node=1e-3)
  both = links.StageProfiles((256, 512), (small, large))
  for num_slots, want in (
    (1, small),
    (256, small),
    (257, large),
    (9999, large),
  ):
    assert both.at(num_slots) is want, num_slots
  assert links.StageProfiles.from_json(both.to_json()) == both
  single = links.StageProfiles.from_json(small.to_json())
  assert single.at(1) == single.at(9999) == small


@pytest.mark.parametrize(
  ("slots", "count", "message"),
  [
    ((), 0, "slots"),
    ((2, 1), 2, "slots"),
    ((0,), 1, "slots"),
    ((1,), 2, "2 of"),
  ],
)
def test_profiles_that_do_not_fit(slots, count, message):
  with pytest.raises(ValueError, match=message):
    links.StageProfiles(slots, (profile(),) * count)


@pytest.mark.parametrize("text", ["[1]", "{}", '{"256": {}}', '{"256": 3}'])
def test_profiles_documents_that_are_none(text):
  with pytest.raises(ValueError, match="StageProfile"):
    links.StageProfiles.from_json(text)


@pytest.mark.parametrize("num_rows", [1, 3, 16, 40])
def test_lap_model_is_the_lap_formula(num_rows):
  ring = two_stages()
  model = links.hop_bytes_model(
    num_stages=2, ids_bytes_per_node=12, row_bytes=1152, header_bytes=64
  )
  lap_s = links.lap_model(ring, profile(), model)
  want = links.lap_time_s(
    ring,
    model(num_rows),
    profile().stage_s(num_rows),
    0.002 * (num_rows - 1),
  )
  assert isinstance(lap_s(num_rows), float)
  assert lap_s(num_rows) == pytest.approx(float(want), rel=1e-6)


@pytest.mark.parametrize(
  ("call", "words"),
  [
    (
      lambda: links.Ring.uniform(num_stages=0, lap_s=1, bandwidth_bps=1),
      "num_stages = 0",
    ),
    (
      lambda: links.Ring.uniform(num_stages=1, lap_s=-1, bandwidth_bps=1),
      "lap_s = -1",
    ),
    (
      lambda: links.Ring.uniform(num_stages=1, lap_s=1, bandwidth_bps=0),
      "bandwidth_bps = 0",
    ),
    (lambda: links.Ring.from_links([]), "at least 2"),
    (
      lambda: links.Ring.from_links(
        [links.Link(rtt_s=1.0, bandwidth_bps=1.0, jitter_s=math.nan)] * 2
      ),
      r"links\[0\].jitter_s",
    ),
    (
      lambda: links.lap_time_s(two_stages(), [1, 2], [0, 0]),
      r"hop_bytes has shape \(2,\)",
    ),
    (
      lambda: links.lap_time_s(two_stages(), [1, 2, 3], [0]),
      r"stage_s has shape \(1,\)",
    ),
    (
      lambda: links.hop_bytes_model(
        num_stages=3, ids_bytes_per_node=1, row_bytes=(1, 2, 3)
      ),
      "row_bytes",
    ),
    (
      lambda: links.hop_bytes_model(
        num_stages=3, ids_bytes_per_node=-1, row_bytes=1
      ),
      "bytes per hop",
    ),
    (lambda: profile(buckets=(4, 1, 16)), "ascending"),
    (lambda: profile(seconds=()), "seconds"),
    (lambda: profile(seconds=((0.1, 0.2),)), r"seconds\[0\]"),
    (lambda: profile(seconds=((0.1, 0.2, math.nan),)), r"seconds\[0\]"),
    (lambda: profile(draft_s_per_node=-1.0), "draft_s_per_node"),
    (lambda: profile().stage_s(-1), "num_rows"),
    (
      lambda: links.lap_model(
        two_stages(),
        profile(seconds=((0.1, 0.2, 0.3),)),
        links.hop_bytes_model(num_stages=2, ids_bytes_per_node=1, row_bytes=1),
      ),
      "profile.num_stages = 1",
    ),
    (
      lambda: links.lap_model(
        two_stages(),
        profile(),
        links.hop_bytes_model(num_stages=3, ids_bytes_per_node=1, row_bytes=1),
      ),
      "hop_bytes",
    ),
  ],
)
def test_refusals(call, words):
  with pytest.raises(ValueError, match=words):
    call()
