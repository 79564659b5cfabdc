# SPDX-License-Identifier: Apache-2.0
"""Walks over any tree emit the tokens of plain decoding."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.verify import oracle
from wanspec_jax import verify
from wanspec_jax.messages import Sampling

DRAW = jax.jit(verify.draw, static_argnames=("vocab_size", "greedy"))
WALK = jax.jit(verify.race().walk)
GREEDY_WALK = jax.jit(verify.greedy().walk)
SIZE, BUCKET = 4, 12  # vocabulary, rows


def _logits_of(path):
  """A toy target: logits are a function of the tokens since the tip."""
  rng = np.random.default_rng([len(path), *path])
  return rng.normal(size=SIZE).astype(np.float32) * 2


def _plain(sampling, position, count):
  """Sequential decoding: one `Draw` per token, no tree anywhere."""
  path, draws = (), []
  for step in range(count):
    logits = jnp.asarray(_logits_of(path))
    drawn = DRAW(logits, sampling, position + step + 1)
    draws.append(jax.device_get(drawn))
    path = (*path, int(drawn.token))
  return draws


@st.composite
def _trees(draw):
  """Rows of one run: strangers, the tip, its tree mixed with others, padding.

  Tokens are either free or "what plain decoding says at that depth", so that
  short and long acceptances both occur.
  """
  start = draw(st.integers(0, 4))
  num_rows = draw(st.integers(start + 1, BUCKET))
  parents = list(range(start + 1))
  hints = [None] * (start + 1)
  for row in range(start + 1, BUCKET):
    # Its own row: a stranger whose parent is not in this run.
    parents.append(draw(st.sampled_from([*range(start, row), row, 0])))
    hints.append(draw(st.none() | st.integers(0, SIZE - 1)))
  return start, num_rows, parents, hints


FIELDS = (
  {"temperature": 0.0},
  {"temperature": 1.0},
  {"temperature": 0.6, "top_k": 2},
  {"temperature": 1.5, "top_p": 0.7},
  {"temperature": 1.0, "min_p": 0.3, "top_k": 3},
)
CHAIN = (0, BUCKET, [0, *range(BUCKET - 1)], [None] * BUCKET)  # all accepted
FAN = (0, BUCKET, [0] * BUCKET, [0, 0, 0, 1, 1, 2, 2, 3, 3, 0, 1, 2])
PADDING = (2, 3, [0, 1, 2] + [2] * (BUCKET - 3), [None] * BUCKET)


@given(
  tree=_trees(),
  fields=st.sampled_from(FIELDS),
  seed=st.integers(0, 2**63 - 1),
  position=st.integers(0, 10**6),
)
@example(tree=CHAIN, fields=FIELDS[0], seed=0, position=0)
@example(tree=CHAIN, fields=FIELDS[1], seed=1, position=7)
@example(tree=FAN, fields=FIELDS[1], seed=2, position=7)
@example(tree=PADDING, fields=FIELDS[0], seed=3, position=7)
@settings(derandomize=True, deadline=None, max_examples=100)
def test_any_tree_gives_the_tokens_of_plain_decoding(
  tree, fields, seed, position
):
  start, num_rows, parents, hints = tree
  sampling = verify.sampling_arrays(Sampling(seed=seed, **fields))
  plain = _plain(sampling, position, BUCKET)
  target = [int(drawn.token) for drawn in plain]

  tokens = np.zeros(BUCKET, np.int32)
  logits = np.full((BUCKET, SIZE), np.nan, np.float32)  # poison
  paths = {start: ()}
  for row in range(start, BUCKET):
    parent = parents[row]
    depth = len(paths[parent]) if parent in paths else 0
    tokens[row] = target[depth] if hints[row] is None else hints[row]
    if row > start and parent in paths and parent != row:
      paths[row] = (*paths[parent], int(tokens[row]))
    if row in paths and row < num_rows:
      logits[row] = _logits_of(paths[row])
  # The walk by hand.
  rows = [start]
  while True:
    wanted = target[len(rows) - 1]
    matches = [
      row
      for row in range(num_rows)
      if row != rows[-1] and parents[row] == rows[-1] and tokens[row] == wanted
    ]
    if not matches:
      break
    rows.append(matches[0])

  run = WALK if fields["temperature"] else GREEDY_WALK
  result = jax.device_get(
    run(
      jnp.asarray(logits),
      jnp.asarray(tokens),
      jnp.asarray(parents, jnp.int32),
      start_row=start,
      start_position=position,
      num_rows=num_rows,
      sampling=sampling,
    )
  )
  count = len(rows)
  assert result.count == count
  assert result.last_row == rows[-1]
  assert result.tokens[:count].tolist() == target[:count]
  for field in ("log_probs", "margins"):
    expected = [getattr(drawn, field[:-1]) for drawn in plain[:count]]
    np.testing.assert_array_equal(getattr(result, field)[:count], expected)
  for field in ("tokens", "log_probs", "margins"):
    assert not getattr(result, field)[count:].any()


def _chain_walk(logits, tokens, num_rows, **fields):
  tokens = jnp.asarray(tokens, jnp.int32)
  parents = jnp.maximum(jnp.arange(len(tokens), dtype=jnp.int32) - 1, 0)
  return WALK(
    jnp.asarray(logits),
    tokens,
    parents,
    start_row=0,
    start_position=fields.pop("position", 0),
    num_rows=num_rows,
    sampling=verify.sampling_arrays(Sampling(**fields)),
  )


def test_a_single_draft_is_verified_too():
  # The prompt is 1 1 1, the draft proposes 1, the target wants 2.
  logits = np.zeros((4, 4), np.float32)
  logits[:, 2] = 5
  result = _chain_walk(logits, [1, 1, 0, 0], 2)
  assert (result.count, result.tokens[0], result.last_row) == (1, 2, 0)


def test_padding_is_never_accepted_even_if_its_token_is_wanted():
  logits = np.zeros((4, 4), np.float32)
  logits[:, 0] = 5  # the target wants token 0 everywhere
  for num_rows in (1, 2, 3, 4):
    result = _chain_walk(logits, [0, 0, 0, 0], num_rows)
    assert result.count == num_rows
    assert result.tokens.tolist() == [0] * 4
    assert result.last_row == num_rows - 1


def test_a_start_row_in_the_padding_draws_nothing():
  result = _chain_walk(np.zeros((4, 4), np.float32), [0] * 4, 0)
  assert (result.count, result.last_row) == (0, 0)


@pytest.mark.parametrize(
  ("dtype", "size"), [(jnp.float32, 1003), (jnp.bfloat16, 4096)]
)
def test_a_draw_is_bit_equal_in_any_row_of_any_bucket(dtype, size):
  rng = np.random.default_rng(0)
  row_logits = jnp.asarray(rng.normal(size=size) * 3, dtype)
  for fields in ({"temperature": 0.0}, {"temperature": 0.8, "top_p": 0.9}):
    sampling = verify.sampling_arrays(Sampling(seed=5, **fields))
    alone = DRAW(row_logits, sampling, 30)
    for bucket, place in ((4, 0), (64, 0), (64, 63)):
      logits = jnp.asarray(rng.normal(size=(bucket, size)) * 9, dtype)
      result = WALK(
        logits.at[place].set(row_logits),
        jnp.zeros((bucket,), jnp.int32),
        jnp.arange(bucket, dtype=jnp.int32),
        start_row=place,
        start_position=29,
        num_rows=bucket,
        sampling=sampling,
      )
      assert result.count == 1
      same = verify.Draw(
        result.tokens[0], result.log_probs[0], result.margins[0]
      )
      chex.assert_trees_all_equal(same, alone)


def test_joint_law_of_two_tokens_is_the_targets():
  # All children of the tip are drafted, so every walk emits two tokens.
  rng = np.random.default_rng(1)
  logits = rng.normal(size=(4, 3)).astype(np.float32)
  sampling = verify.sampling_arrays(Sampling(temperature=0.8, seed=77))

  @jax.jit
  def pairs(positions):
    def one(position):
      result = verify.walk(
        jnp.asarray(logits),
        jnp.array([0, 0, 1, 2], jnp.int32),
        jnp.zeros(4, jnp.int32),
        start_row=0,
        start_position=position,
        num_rows=4,
        sampling=sampling,
      )
      return result.count, result.tokens[0] * 3 + result.tokens[1]

    return jax.vmap(one)(positions)

  # Every other position: the two draws of each walk are its own.
  counts, drawn = pairs(jnp.arange(0, 100_000, 2, dtype=jnp.int32))
  assert set(counts.tolist()) == {2}
  laws = [oracle.process(row, temperature=0.8)[0] for row in logits]
  joint = np.stack([laws[0][token] * laws[token + 1] for token in range(3)])
  statistic, bound = oracle.chi_square(np.bincount(drawn, minlength=9), joint)
  assert statistic < bound


def test_drawing_anew_on_a_mismatch_would_change_the_law():
  target = np.array([2, 1.5, 1, 0.5, 0, -0.5], np.float32)
  draft = np.array([1, 2, 0.5, 0.4, 0.3, 0.2], np.float32)
  fields = {"temperature": 0.7}
  p, _ = oracle.process(target, **fields)
  q, _ = oracle.process(draft, **fields)
  # By enumeration over (draft x, draw t, second draw): the law of what is
  # emitted if the draw itself is, and if a second one is upon a mismatch.
  same, anew = np.zeros(6), np.zeros(6)
  for x in range(6):
    for t in range(6):
      same[t] += q[x] * p[t]
      if t == x:
        anew[t] += q[x] * p[t]
      else:
        anew += q[x] * p[t] * p
  assert oracle.total_variation(same, p) < 1e-12
  assert oracle.total_variation(anew, p) == pytest.approx(0.093, abs=5e-4)

  sampling = verify.sampling_arrays(Sampling(seed=9, **fields))
  tip = jnp.asarray(np.stack([target, target]))

  @jax.jit
  def emit(positions):
    def one(position):
      key = verify.address_key(9, verify.Purpose.DRAFT, position)
      noise = verify.gumbel_noise(key, 6)
      x = jnp.argmax(jnp.asarray(draft) / 0.7 + noise).astype(jnp.int32)
      result = verify.walk(
        tip,
        jnp.stack([jnp.int32(0), x]),
        jnp.zeros(2, jnp.int32),
        start_row=0,
        start_position=position,
        num_rows=2,
        sampling=sampling,
      )
      fresh = verify.draw(tip[0], sampling, position + 1_000_000)
      t = result.tokens[0]
      return t, jnp.where(t == x, t, fresh.token)

    return jax.vmap(one)(positions)

  drawn, redrawn = emit(jnp.arange(50_000, dtype=jnp.int32))
  for tokens, law, holds in (
    (drawn, p, True),
    (redrawn, anew, True),
    (redrawn, p, False),
  ):
    counts = np.bincount(tokens, minlength=6)
    statistic, bound = oracle.chi_square(counts, law)
    assert (statistic < bound) == holds


def test_one_trace_for_all_trees_and_parameters():
  traced = jax.jit(chex.assert_max_traces(verify.walk, n=1))
  rng = np.random.default_rng(2)
  for step in range(12):
    parents = [int(rng.integers(0, max(row, 1))) for row in range(8)]
    fields = FIELDS[step % len(FIELDS)]
    traced(
      jnp.asarray(rng.normal(size=(8, 4)), jnp.float32),
      jnp.asarray(rng.integers(0, 4, 8), jnp.int32),
      jnp.asarray(parents, jnp.int32),
      start_row=step % 3,
      start_position=step * 100,
      num_rows=3 + step % 6,
      sampling=verify.sampling_arrays(Sampling(seed=step, **fields)),
    )


def _noise_shapes(jaxpr):
  """Shapes of all random bits made anywhere inside `jaxpr`."""
  shapes = set()
  for equation in jaxpr.eqns:
    if equation.primitive.name == "random_bits":
      shapes.add(equation.outvars[0].aval.shape)
    for inner in jax.tree.leaves(
      equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")
    ):
      inner = getattr(inner, "jaxpr", inner)
      if hasattr(inner, "eqns"):
        shapes |= _noise_shapes(inner)
  return shapes


@pytest.mark.parametrize(
  ("walk", "shapes"),
  [(verify.race().walk, {(5,)}), (verify.greedy().walk, set())],
)
def test_noise_is_made_for_one_row_at_a_time_or_not_at_all(walk, shapes):
  call = functools.partial(
    walk,
    start_row=0,
    start_position=0,
    num_rows=8,
    sampling=verify.sampling_arrays(Sampling(temperature=1.0)),
  )
  rows = jnp.zeros(8, jnp.int32)
  closed = jax.make_jaxpr(call)(jnp.zeros((8, 5), jnp.float32), rows, rows)
  assert _noise_shapes(closed.jaxpr) == shapes


def test_same_walk_in_64_bit_mode():
  logits = np.random.default_rng(3).normal(size=(4, 4)).astype(np.float32)
  fields = {"temperature": 1.0, "top_k": 4, "seed": 2**40 + 1}
  expected = _chain_walk(logits, [0, 1, 2, 3], 4, **fields)
  with jax.enable_x64(True):
    wide = _chain_walk(logits, [0, 1, 2, 3], 4, **fields)
  chex.assert_trees_all_equal_dtypes(wide, expected)
  chex.assert_trees_all_equal(wide, expected)


def test_verifiers_say_what_they_promise_and_refuse_what_they_cannot():
  greedy, race = verify.greedy(), verify.race()
  assert (greedy.name, race.name) == ("greedy", "race")
  for verifier in (greedy, race):
    assert verifier.guarantee == "same tokens"
    assert verifier.needs == "ids"
    assert verifier.children == "any"
    verifier.check(Sampling())
  race.check(Sampling(temperature=0.7, top_p=0.9))
  with pytest.raises(ValueError, match=r"Sampling\.temperature = 0\.7: must"):
    greedy.check(Sampling(temperature=0.7))


def test_verifiers_never_draw_padding_of_the_vocabulary():
  logits = np.zeros((4, 6), np.float32)
  logits[:, 4:] = 50
  logits[:, 1] = 2
  rows = jnp.zeros(4, jnp.int32)
  for verifier, temperature in (
    (verify.greedy(vocab_size=4), 0.0),
    (verify.race(vocab_size=4), 1e-3),
  ):
    result = jax.jit(verifier.walk)(
      jnp.asarray(logits),
      rows,
      rows,
      start_row=0,
      start_position=0,
      num_rows=4,
      sampling=verify.sampling_arrays(Sampling(temperature=temperature)),
    )
    assert result.tokens[0] == 1
