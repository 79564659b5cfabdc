# SPDX-License-Identifier: Apache-2.0
"""Stage functions against a slow float64 transformer, and bit for bit."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from wanspec_jax import models
from wanspec_jax.models import RopeScaling
from wanspec_jax.models._decoder import attend
from wanspec_jax.models._rope import inverse_frequencies, rotate

CONFIG = models.ModelConfig(
  family="qwen3",
  vocab_size=61,
  hidden_size=32,
  intermediate_size=48,
  num_layers=3,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rms_norm_eps=1e-5,
  rope_theta=1000.0,
  qkv_bias=True,
  qk_norm=True,
  max_position=256,
)
STAGE = jax.jit(models.stage, static_argnames=("config",))
HEAD = jax.jit(models.head, static_argnames=("config",))
# A text of 5 tokens, then a tree: parents of rows, the first row its own.
PARENTS = np.array([0, 0, 1, 2, 3, 4, 4, 5, 5, 6, 7, 9, 4, 10])
NUM_ROWS, SLOTS = len(PARENTS), 64


@pytest.fixture(scope="module")
def params():
  return models.random_params(jax.random.key(3), CONFIG)


@pytest.fixture(scope="module")
def tokens():
  return np.random.default_rng(0).integers(0, CONFIG.vocab_size, NUM_ROWS)


def _path(row):
  """Returns the rows from the first to this one."""
  path = [row]
  while PARENTS[path[-1]] != path[-1]:
    path.append(int(PARENTS[path[-1]]))
  return path[::-1]


ANCESTORS = np.array(
  [[j in _path(i) for j in range(NUM_ROWS)] for i in range(NUM_ROWS)]
)
DEPTHS = np.array([len(_path(i)) - 1 for i in range(NUM_ROWS)])


# A slow reading of the model. -------------------------------------------------


def _norm(x, weight):
  x = x / np.sqrt((x * x).mean(-1, keepdims=True) + CONFIG.rms_norm_eps)
  return x * np.asarray(weight, np.float64)


def _rotated(x, positions):
  """Rotates `[T, heads, d]` as complex numbers."""
  half = CONFIG.head_dim // 2
  angles = np.array(
    [
      [p * CONFIG.rope_theta ** (-2 * i / CONFIG.head_dim) for i in range(half)]
      for p in positions
    ]
  )
  z = (x[..., :half] + 1j * x[..., half:]) * np.exp(1j * angles)[:, None]
  return np.concatenate([z.real, z.imag], -1)


def _slow_logits(params, tokens):
  """Returns `[T, V]` float64 logits of one text, head by head."""
  x = np.asarray(params.embed, np.float64)[np.asarray(tokens)]
  length, heads = len(tokens), CONFIG.num_heads
  kv_heads, dim = CONFIG.num_kv_heads, CONFIG.head_dim
  for layer in params.layers:
    w = jax.tree.map(lambda a: np.asarray(a, np.float64), layer)
    qkv = _norm(x, w.attn_norm) @ w.wqkv.T + w.bqkv
    q, k, v = (
      part.reshape(length, -1, dim)
      for part in np.split(qkv, [heads * dim, (heads + kv_heads) * dim], -1)
    )
    q = _rotated(_norm(q, w.q_norm), range(length))
    k = _rotated(_norm(k, w.k_norm), range(length))
    out = np.zeros((length, heads, dim))
    for h in range(heads):
      kv = h // (heads // kv_heads)
      for t in range(length):
        scores = k[: t + 1, kv] @ q[t, h] / math.sqrt(dim)
        weights = np.exp(scores - scores.max())
        out[t, h] = weights @ v[: t + 1, kv] / weights.sum()
    x = x + out.reshape(length, -1) @ w.wo.T
    gate, up = np.split(_norm(x, w.mlp_norm) @ w.w_gate_up.T, 2, -1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w.w_down.T
  head = np.asarray(params.head, np.float64)
  return _norm(x, params.final_norm) @ head.T


def _close(logits, expected):
  error = np.abs(np.asarray(logits, np.float64) - expected).max()
  return error / np.abs(expected).max() < 2e-5


# Running rows. ----------------------------------------------------------------


def _feed(params, cache, tokens, rows, slot_of, *, bucket):
  """Runs some rows of the tree; returns their logits and the cache."""
  extra = bucket - len(rows)
  slots = np.array([slot_of[r] for r in rows])
  mask = np.zeros((bucket, cache.num_slots), bool)
  for i, row in enumerate(rows):
    mask[i, [slot_of[a] for a in _path(row)]] = True
  hidden, cache = STAGE(
    params,
    cache,
    jnp.asarray(np.pad(tokens[rows], (0, extra)), jnp.int32),
    jnp.asarray(
      np.pad(slots, (0, extra), constant_values=cache.num_slots), jnp.int32
    ),
    jnp.asarray(np.pad(DEPTHS[rows], (0, extra)), jnp.int32),
    jnp.asarray(mask),
    config=CONFIG,
  )
  logits = HEAD(params, hidden, config=CONFIG)
  return np.asarray(logits)[: len(rows)], cache


def _empty(num_slots=SLOTS, fill=0.0):
  cache = models.init_cache(CONFIG, num_layers=3, num_slots=num_slots)
  return dataclasses.replace(
    cache,
    keys=tuple(jnp.full_like(k, fill) for k in cache.keys),
    values=tuple(jnp.full_like(v, fill) for v in cache.values),
  )


def _whole(params, tokens, *, slot_of=range(NUM_ROWS), cache=None):
  """Returns the logits of the tree as one run of 16 rows."""
  rows = np.arange(NUM_ROWS)
  cache = _empty() if cache is None else cache
  return _feed(params, cache, tokens, rows, slot_of, bucket=16)


def _split(params, tokens, cuts, *, slot_of=range(NUM_ROWS), cache=None):
  """Returns the logits of the tree as several runs of 8 rows at most."""
  cache = _empty() if cache is None else cache
  logits = []
  for rows in np.split(np.arange(NUM_ROWS), cuts):
    out, cache = _feed(params, cache, tokens, rows, slot_of, bucket=8)
    logits.append(out)
  return np.concatenate(logits), cache


# Tests. -----------------------------------------------------------------------


def test_forward_equals_a_slow_transformer(params, tokens):
  logits = models.forward_logits(params, tokens, config=CONFIG)
  assert _close(logits, _slow_logits(params, tokens))


def test_tree_rows_equal_plain_forwards_over_their_paths(params, tokens):
  logits, _ = _whole(params, tokens)
  for row in range(NUM_ROWS):
    path = _path(row)
    assert _close(logits[row], _slow_logits(params, tokens[path])[-1]), row


def test_nothing_but_ancestors_is_seen(params, tokens):
  """Huge keys and values anywhere else move no bit, one slot at a time."""
  clean, cache = _whole(params, tokens)
  last = NUM_ROWS - 1  # a leaf: run again over a poisoned cache
  rows = np.array([last])
  slot_of = range(NUM_ROWS)
  expected, _ = _feed(params, cache, tokens, rows, slot_of, bucket=8)
  np.testing.assert_array_equal(expected[0], clean[last])
  for slot in [s for s in range(NUM_ROWS) if s not in _path(last)] + [40]:
    poisoned = dataclasses.replace(
      cache,
      keys=tuple(k.at[:, :, slot].set(jnp.nan) for k in cache.keys),
      values=tuple(v.at[:, slot].set(3e38) for v in cache.values),
    )
    logits, _ = _feed(params, poisoned, tokens, rows, slot_of, bucket=8)
    np.testing.assert_array_equal(logits, expected)
  for slot in _path(last)[:-1]:  # and the test can tell
    poisoned = dataclasses.replace(
      cache, values=tuple(v.at[:, slot].set(9.0) for v in cache.values)
    )
    logits, _ = _feed(params, poisoned, tokens, rows, slot_of, bucket=8)
    assert (logits != expected).any()


@pytest.mark.parametrize("seed", range(4))
def test_slots_and_holes_change_no_bit(params, tokens, seed):
  expected, _ = _whole(params, tokens)
  slot_of = np.random.default_rng(seed).permutation(SLOTS)[:NUM_ROWS]
  logits, _ = _whole(params, tokens, slot_of=slot_of, cache=_empty(fill=1e30))
  np.testing.assert_array_equal(logits, expected)


@pytest.mark.parametrize(
  "cuts", [range(1, NUM_ROWS), [5, 12], [1, 2, 10], [8]], ids=str
)
def test_run_splits_change_no_bit(params, tokens, cuts):
  """Row by row as in plain decoding, or in any runs of another bucket."""
  expected, cache = _whole(params, tokens)
  logits, split_cache = _split(params, tokens, list(cuts))
  np.testing.assert_array_equal(logits, expected)
  jax.tree.map(np.testing.assert_array_equal, split_cache, cache)


def test_cache_growth_changes_no_bit(params, tokens):
  expected, _ = _whole(params, tokens)
  rows = np.arange(NUM_ROWS)
  slot_of = range(NUM_ROWS)
  _, cache = _feed(params, _empty(32), tokens, rows[:7], slot_of, bucket=8)
  grown = models.resize_cache(cache, CONFIG, 160)
  assert grown.num_slots == 160
  logits, grown = _feed(params, grown, tokens, rows[7:], slot_of, bucket=8)
  np.testing.assert_array_equal(logits, expected[7:])
  shrunk = models.resize_cache(grown, CONFIG, SLOTS)
  assert shrunk.rope.shape[0] == SLOTS
  logits, _ = _feed(params, shrunk, tokens, rows[-3:], slot_of, bucket=8)
  np.testing.assert_array_equal(logits, expected[-3:])


@pytest.mark.parametrize("shape", [(4, 2, 8), (9, 3, 64)], ids=str)
def test_attention_depends_on_no_size(shape):
  """Rows and slots around it change no bit of a row: products, maxima and sums
  of other sizes are computed by other code."""
  heads, kv_heads, dim = shape
  rng = np.random.default_rng(2)
  queries = rng.normal(size=(64, heads, dim)).astype(np.float32)
  keys = rng.normal(size=(kv_heads, dim, 1024)).astype(np.float32)
  values = rng.normal(size=(kv_heads, 1024, dim)).astype(np.float32)
  mask = np.zeros((64, 1024), bool)
  mask[:, :40] = rng.random((64, 40)) < 0.6
  mask[:, 0] = True
  run = jax.jit(attend)
  first = None
  for num_rows, num_slots in ((1, 48), (8, 64), (8, 1024), (32, 96), (64, 256)):
    out = run(
      queries[:num_rows],
      keys[:, :, :num_slots],
      values[:, :num_slots],
      mask[:num_rows, :num_slots],
    )
    first = np.asarray(out)[:1] if first is None else first
    np.testing.assert_array_equal(np.asarray(out)[:1], first)
    if num_rows == 8 and num_slots == 64:
      eight = np.asarray(out)
    if num_rows >= 8:
      np.testing.assert_array_equal(np.asarray(out)[:8], eight)


def test_64_bit_mode_changes_no_bit(params, tokens):
  expected, _ = _whole(params, tokens)
  with jax.enable_x64(True):
    logits, cache = _whole(params, tokens)
  assert logits.dtype == np.float32
  assert {a.dtype for a in jax.tree.leaves(cache)} == {np.dtype(np.float32)}
  np.testing.assert_array_equal(logits, expected)


def test_padding_rows_write_nothing(params, tokens):
  cache = _empty(fill=7.0)
  _, cache = _feed(
    params, cache, tokens, np.arange(3), range(NUM_ROWS), bucket=8
  )
  for keys, values in zip(cache.keys, cache.values, strict=True):
    assert (np.asarray(keys)[:, :, 3:] == 7.0).all()
    assert (np.asarray(values)[:, 3:] == 7.0).all()
    assert (np.asarray(keys)[:, :, :3] != 7.0).all()


def test_cuts_compose(params, tokens):
  """Two stages, one after the other, are the whole model bit for bit."""
  expected, _ = _whole(params, tokens)
  rows = jnp.arange(NUM_ROWS, dtype=jnp.int32)
  x = jnp.asarray(tokens, jnp.int32)
  mask = np.zeros((NUM_ROWS, SLOTS), bool)
  mask[:, :NUM_ROWS] = ANCESTORS
  for first, count in ((0, 2), (2, 1)):
    cut = models.slice_stage(
      params, CONFIG, first_layer=first, num_layers=count
    )
    x, _ = STAGE(
      cut,
      models.init_cache(CONFIG, num_layers=count, num_slots=SLOTS),
      x,
      rows,
      jnp.asarray(DEPTHS, jnp.int32),
      jnp.asarray(mask),
      config=CONFIG,
    )
  logits = HEAD(params, x, config=CONFIG)
  np.testing.assert_array_equal(np.asarray(logits), expected)


def test_gradients_prove_causality(params, tokens):
  """∂ logits[i] / ∂ x[j] is exactly zero unless j is i or above it."""
  inner = dataclasses.replace(params, embed=None)
  x = params.embed[jnp.asarray(tokens, jnp.int32)]
  mask = np.zeros((NUM_ROWS, SLOTS), bool)
  mask[:, :NUM_ROWS] = ANCESTORS

  def logits_of(x):
    hidden, _ = models.stage(
      inner,
      _empty(),
      x,
      jnp.arange(NUM_ROWS, dtype=jnp.int32),
      jnp.asarray(DEPTHS, jnp.int32),
      jnp.asarray(mask),
      config=CONFIG,
    )
    # Another weight for each logit: their sum could be blind.
    logits = models.head(inner, hidden, config=CONFIG)
    return logits @ jnp.linspace(-1.0, 2.0, CONFIG.vocab_size)

  jacobian = np.asarray(jax.jit(jax.jacrev(logits_of))(x))  # [N, N, D]
  np.testing.assert_array_equal((jacobian != 0).any(-1), ANCESTORS)
  assert (jacobian == 0).all(-1)[~ANCESTORS].all()


def test_only_the_last_stage_has_a_head(params):
  cut = models.slice_stage(params, CONFIG, first_layer=0, num_layers=1)
  with pytest.raises(ValueError, match="head: params must be the last"):
    models.head(cut, jnp.zeros((1, 32), jnp.float32), config=CONFIG)


# Rotary embedding. ------------------------------------------------------------


def _llama3(frequency, s):
  wavelength = 2 * math.pi / frequency
  if wavelength < s.original_max_position / s.high_freq_factor:
    return frequency
  if wavelength > s.original_max_position / s.low_freq_factor:
    return frequency / s.factor
  smooth = s.original_max_position / wavelength - s.low_freq_factor
  smooth /= s.high_freq_factor - s.low_freq_factor
  return (1 - smooth) * frequency / s.factor + smooth * frequency


def _yarn(frequency, s, i, dim, theta):
  def corner(rotations):
    full = s.original_max_position / (rotations * 2 * math.pi)
    return dim * math.log(full) / (2 * math.log(theta))

  low = max(math.floor(corner(s.beta_fast)), 0)
  high = min(math.ceil(corner(s.beta_slow)), dim - 1)
  ramp = min(max((i - low) / (high - low), 0.0), 1.0)
  return frequency / s.factor * ramp + frequency * (1 - ramp)


SCALINGS = [
  None,
  RopeScaling(kind="linear", factor=4.0),
  RopeScaling(
    kind="llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position=64,
  ),
  RopeScaling(kind="yarn", factor=4.0, original_max_position=128),
  RopeScaling(kind="factors", freq_factors=tuple(1.0 + i for i in range(16))),
]


@pytest.mark.parametrize(
  "scaling", SCALINGS, ids=lambda s: s.kind if s else "none"
)
def test_rope_table_equals_the_published_rules(scaling):
  config = dataclasses.replace(CONFIG, head_dim=32, rope_scaling=scaling)
  expected = []
  for i in range(16):
    frequency = config.rope_theta ** (-2 * i / 32)
    if scaling is not None:
      frequency = {
        "linear": lambda f, i=i: f / scaling.factor,
        "llama3": lambda f, i=i: _llama3(f, scaling),
        "yarn": lambda f, i=i: _yarn(f, scaling, i, 32, config.rope_theta),
        "factors": lambda f, i=i: f / scaling.freq_factors[i],
      }[scaling.kind](frequency)
    expected.append(frequency)
  factor = 1.0
  if scaling is not None and scaling.kind == "yarn":
    factor = 0.1 * math.log(scaling.factor) + 1.0
  frequencies, got_factor = inverse_frequencies(config)
  np.testing.assert_allclose(frequencies, expected, rtol=1e-12)
  assert got_factor == pytest.approx(factor)
  table = models.rope_table(config, 90)
  assert table.dtype == np.float32 and table.shape == (90, 2, 16)
  for position in (0, 1, 17, 89):
    for i in range(16):
      angle = position * expected[i]
      assert table[position, :, i] == pytest.approx(
        [factor * math.cos(angle), factor * math.sin(angle)], abs=1e-6
      )


def test_a_longer_rope_table_starts_with_the_shorter():
  np.testing.assert_array_equal(
    models.rope_table(CONFIG, 200)[:64], models.rope_table(CONFIG, 64)
  )


def test_scores_depend_on_relative_positions_only():
  rng = np.random.default_rng(1)
  q, k = (jnp.asarray(rng.normal(size=(1, 1, 8)), jnp.float32) for _ in "qk")
  table = jnp.asarray(models.rope_table(CONFIG, 60))

  def score(m, n):
    return float(
      jnp.sum(rotate(q, table[m : m + 1]) * rotate(k, table[n : n + 1]))
    )

  for shift in (1, 20, 39):
    assert score(12 + shift, 5 + shift) == pytest.approx(score(12, 5), abs=1e-5)
  assert abs(score(12, 5) - score(12, 6)) > 1e-3


def test_bfloat16_is_near_float32(params, tokens):
  """Matrices and cache in bfloat16, sums in float32: the same model."""
  half = jax.tree.map(
    lambda a: a.astype(jnp.bfloat16) if a.ndim == 2 else a, params
  )
  cache = models.init_cache(
    CONFIG, num_layers=3, num_slots=SLOTS, dtype=jnp.bfloat16
  )
  logits, cache = _whole(half, tokens, cache=cache)
  assert logits.dtype == np.float32 and cache.keys[0].dtype == jnp.bfloat16
  exact, _ = _whole(params, tokens)
  error = np.abs(logits - exact).max() / np.abs(exact).max()
  assert 0 < error < 0.05
