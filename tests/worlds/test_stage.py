# SPDX-License-Identifier: Apache-2.0
"""Stages with a tiny random model: speculation equals plain, bit for bit."""

import dataclasses
import random as random_lib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import drafters
from tests.schedules import bench
from wanspec_jax import codecs, models, verify, wire
from wanspec_jax import schedules as sch
from wanspec_jax.links import StageProfile
from wanspec_jax.messages import Commit, Open, Returned, Run, Sampling
from wanspec_jax.rollback import mask_rollback
from wanspec_jax.worlds import Driver, Stage, StageShape, VirtualRing

CONFIG = models.ModelConfig(
  family="llama",
  vocab_size=61,
  hidden_size=32,
  intermediate_size=48,
  num_layers=2,
  num_heads=4,
  num_kv_heads=2,
  head_dim=8,
  rms_norm_eps=1e-5,
  rope_theta=1000.0,
  max_position=256,
)
SHAPE = StageShape(row_buckets=(8, 16), slot_buckets=(48, 96))
NUM_NEW = 16
# Three ways to draw, at once; the seed names the sequence.
SAMPLINGS = (
  Sampling(seed=0),
  Sampling(seed=1, temperature=0.8),
  Sampling(seed=2, temperature=1.1, top_k=20, top_p=0.9, min_p=0.01),
)
PROMPTS = ((7, 3, 9, 9, 1, 30, 2, 4, 11, 5, 8), (5,), (60, 0, 17, 17))
FORWARD = jax.jit(models.forward_logits, static_argnames=("config",))


@pytest.fixture(scope="module")
def params():
  return models.random_params(jax.random.key(11), CONFIG)


def _stage(params, first_layer, num_layers, *, shape=SHAPE, verifier=None):
  cut = models.slice_stage(
    params, CONFIG, first_layer=first_layer, num_layers=num_layers
  )
  return Stage(
    config=CONFIG,
    params=cut,
    shape=shape,
    codec_in=None if cut.embed is not None else codecs.raw("f32"),
    codec_out=None if cut.head is not None else codecs.raw("f32"),
    rollback=mask_rollback(),
    verifier=verifier or verify.race(),
  )


@pytest.fixture(scope="module")
def whole(params):
  """One stage, compiled for all it will meet."""
  stage = _stage(params, 0, 2)
  for num_slots in SHAPE.slot_buckets:
    stage.measure(num_slots=num_slots, repeats=0)
  return stage


@pytest.fixture(scope="module")
def pair(params):
  """Two stages whose cache has the largest size from the start."""
  shape = dataclasses.replace(SHAPE, slot_buckets=SHAPE.slot_buckets[-1:])
  return [_stage(params, i, 1, shape=shape) for i in range(2)]


def _request(s):
  return sch.Request(
    prompt=PROMPTS[s],
    max_new_tokens=NUM_NEW,
    sampling=SAMPLINGS[s],
    log_probs=True,
  )


def _decode(stages, sequences, *, drafter=None, max_nodes=0, wrap=None):
  """Returns `{sequence: (tokens, log_probs, margins)}` and the driver."""
  for stage in stages:
    stage.reset()
  profile = StageProfile(
    buckets=(SHAPE.max_rows,),
    seconds=((0.001,),) * len(stages),
    dtype="float32",
    device="none",
  )
  ring = VirtualRing(
    stages=[wrap(stage) for stage in stages] if wrap else stages,
    hops=[wire.LinkShaper(delay_s=0.01)] * (len(stages) + 1),
    profile=profile,
  )
  engine = sch.init(
    sch.lockstep(max_nodes),
    bench.costs(SHAPE.max_rows),
    capacity=SHAPE.capacity,
    prefill_rows=8,
  )
  driver = Driver(engine, drafter or drafters.none())
  result = ring.run(driver, [(0.0, _request(s)) for s in sequences])
  for stage in stages:
    assert stage.rollback.num_used(stage._slots) == 0 and not stage._tail
    assert stage._cache.num_slots == stage.shape.slot_buckets[0]
  outcomes = {
    s: (o.tokens, o.log_probs, o.margins)
    for s, o in zip(sequences, result.outcomes.values(), strict=True)
  }
  return outcomes, driver


@pytest.fixture(scope="module")
def plain(whole):
  """Plain decoding, one sequence at a time, one token a lap."""
  outcomes = {}
  for s in range(3):
    outcomes |= _decode([whole], [s])[0]
  return outcomes


@pytest.fixture(scope="module")
def texts(plain):
  """Prompt and output of each sequence, by its seed."""
  return {s: [*PROMPTS[s], *plain[s][0]] for s in range(3)}


def test_plain_decoding_equals_a_full_forward_per_token(params, texts, plain):
  """No cache, no ring, no tree: prefill everything anew for each token."""
  length = 32
  draw = jax.jit(verify.draw)
  for s in range(3):
    text = list(PROMPTS[s])
    sampling = verify.sampling_arrays(SAMPLINGS[s])
    for i in range(NUM_NEW):
      padded = jnp.asarray(text + [0] * (length - len(text)), jnp.int32)
      logits = FORWARD(params, padded, config=CONFIG)[len(text) - 1]
      drawn = draw(logits, sampling, len(text))
      assert plain[s][1][i] == float(drawn.log_prob)  # prefill's bits
      assert plain[s][2][i] == float(drawn.margin)
      text.append(int(drawn.token))
    assert text == texts[s]


def _drafter(texts, kind, seed):
  random = random_lib.Random(seed)
  if kind == "chain":
    return bench.chain_of(texts, 6)
  return bench.drafter_of(
    texts,
    right=0.7,
    size=lambda budget: random.randint(0, budget),
    random=random,
    vocab=CONFIG.vocab_size,
  )


@pytest.mark.parametrize("kind", ["chain", "tree"])
@pytest.mark.parametrize("num_stages", [1, 2])
def test_speculation_equals_plain(whole, pair, texts, plain, kind, num_stages):
  """Three sequences that are drawn differently, at once: the same bits.

  Tokens, log-probabilities and margins are those of plain decoding of each
  sequence alone on one stage: other runs, slots, cache sizes, rows, cuts.
  """
  stages = [whole] if num_stages == 1 else pair
  sizes = set()

  class Watched:
    def __init__(self, stage):
      self.stage = stage

    def reset(self):
      self.stage.reset()

    def process(self, run, payload=None):
      out = self.stage.process(run, payload)
      sizes.add(self.stage._cache.num_slots)
      return out

  for seed in range(3 if kind == "tree" else 1):
    outcomes, driver = _decode(
      stages,
      range(3),
      drafter=_drafter(texts, kind, seed),
      max_nodes=12,
      wrap=Watched,
    )
    assert outcomes == plain
    rounds = [o.rounds for o in driver.outcomes.values()]
    if kind == "chain":
      assert {len(r) for r in rounds} == {3}  # 7 + 7 + 2 tokens
    else:
      assert all(3 <= len(r) < NUM_NEW for r in rounds)
  assert sizes == set(stages[0].shape.slot_buckets)  # the cache did grow


def test_two_stages_equal_one(pair, plain):
  """Cuts and the f32 codec change no bit of plain decoding."""
  assert _decode(pair, [0])[0] == {0: plain[0]}


def test_dead_and_free_slots_are_never_seen(whole, texts, plain):
  """Huge values in every slot that nobody holds, after every run (C27)."""

  class Poisoned:
    def __init__(self, stage):
      self.stage = stage

    def reset(self):
      self.stage.reset()

    def process(self, run, payload=None):
      out = self.stage.process(run, payload)
      cache = self.stage._cache
      free = ~self.stage._slots.used[: cache.num_slots]
      keys = [np.array(k) for k in cache.keys]
      values = [np.array(v) for v in cache.values]
      for k, v in zip(keys, values, strict=True):
        k[:, :, free] = np.nan
        v[:, free] = -3e38
      self.stage._cache = dataclasses.replace(
        cache,
        keys=tuple(map(jnp.asarray, keys)),
        values=tuple(map(jnp.asarray, values)),
      )
      return out

  outcomes, _ = _decode(
    [whole],
    range(3),
    drafter=_drafter(texts, "tree", 5),
    max_nodes=12,
    wrap=Poisoned,
  )
  assert outcomes == plain


def test_no_traces_after_warm_up(whole, texts):
  """50 rounds and more of any tree, acceptance and occupancy (C31)."""
  before = dict(whole.num_traces)
  # Layers per (row, slot) bucket; head and walk per row bucket.
  assert before == {"layers": 4, "verify": 2}
  rounds = 0
  for seed in range(4):
    _, driver = _decode(
      [whole], range(3), drafter=_drafter(texts, "tree", seed), max_nodes=12
    )
    rounds += sum(len(o.rounds) for o in driver.outcomes.values())
  assert rounds > 50
  assert whole.num_traces == before


# Single runs. ----------------------------------------------------------------


def _run(rows, *, run_id=0, opens=(), commits=(), closes=()):
  """Returns a run of rows (sequence, id, parent, token, committed)."""
  columns = list(zip(*rows, strict=True)) or [()] * 5
  sequences, ids, parents, tokens = (np.array(c, np.int32) for c in columns[:4])
  return Run(
    run_id=run_id,
    opens=tuple(
      Open(sequence=s, sampling=SAMPLINGS[s], log_probs=True) for s in opens
    ),
    closes=tuple(closes),
    commits=tuple(Commit(sequence=s, root=r) for s, r in commits),
    sequences=sequences,
    ids=ids,
    parents=parents,
    tokens=tokens,
    committed=np.array(columns[4], bool),
  )


def _prompt_rows(s, texts, extra=0):
  """Returns the prompt's rows, its root, and `extra` true nodes below."""
  length = len(PROMPTS[s])
  return [
    (s, i, max(i - 1, 0), texts[s][i], i < length - 1)
    for i in range(length + extra)
  ]


def test_sequences_in_one_run_do_not_touch(whole, texts, plain):
  """Rows of two sequences, mixed, prompts and all: the verdicts of each."""
  whole.reset()
  a, b = _prompt_rows(1, texts, 5), _prompt_rows(2, texts, 4)
  mixed = []
  while a or b:
    for rows in (b, b, a):
      mixed += [rows.pop(0)] if rows else []
  roots = [(1, len(PROMPTS[1]) - 1), (2, len(PROMPTS[2]) - 1)]
  out = whole.process(_run(mixed, opens=(1, 2), commits=roots))
  assert isinstance(out.message, Returned) and out.payload is None
  verdicts = {v.sequence: v for v in out.message.verdicts}
  for s, count in ((1, 6), (2, 5)):
    assert verdicts[s].tokens == tuple(plain[s][0][:count])
    assert verdicts[s].log_probs == tuple(plain[s][1][:count])
    assert verdicts[s].margins == tuple(plain[s][2][:count])


def test_nodes_of_several_runs_are_walked_when_they_come(whole, texts, plain):
  """The drawn token's node comes later, behind wrong ones, in another run."""
  whole.reset()
  rows, wrong = _prompt_rows(1, texts, 3), (texts[1][3] + 1) % 61
  whole.process(_run([rows[0]], opens=(1,), commits=[(1, 0)]))
  second = [(1, 1, 0, (texts[1][1] + 1) % 61, False), (1, 2, 0, *rows[1][3:])]
  third = [(1, 3, 2, wrong, False), (1, 4, 2, *rows[2][3:])]
  nothing = whole.process(_run(second[:1], run_id=1)).message
  assert nothing == Returned(run_id=1)
  (verdict,) = whole.process(_run(second[1:], run_id=2)).message.verdicts
  assert verdict.tokens == tuple(plain[1][0][1:2])
  assert verdict.margins == tuple(plain[1][2][1:2])
  (verdict,) = whole.process(_run(third, run_id=3)).message.verdicts
  assert verdict.tokens == tuple(plain[1][0][2:3])
  assert verdict.margins == tuple(plain[1][2][2:3])


def test_a_one_token_prompt_and_a_child_that_repeats_it(whole, texts, plain):
  """The child is not the root once more: its children are its own."""
  whole.reset()
  root = texts[1][0]
  rows = [
    (1, 0, 0, root, False),
    (1, 1, 0, root, False),
    (1, 2, 1, texts[1][1], False),  # right after the root, wrong here
    (1, 3, 0, texts[1][1], False),
  ]
  out = whole.process(_run(rows, opens=(1,), commits=[(1, 0)]))
  (verdict,) = out.message.verdicts
  assert verdict.tokens == tuple(plain[1][0][:2])
  assert verdict.log_probs == tuple(plain[1][1][:2])


def test_runs_without_rows_pass(pair, whole, texts):
  for stage in (*pair, whole):
    stage.reset()
  run = _run([], run_id=4)
  assert pair[0].process(run) == (run, b"", 0)
  assert pair[1].process(run, b"").message == Returned(run_id=4)
  whole.process(_run(_prompt_rows(1, texts), opens=(1,), commits=[(1, 0)]))
  assert whole.process(_run([], closes=(1,))).message == Returned(run_id=0)
  assert whole.rollback.num_used(whole._slots) == 0


def test_broken_rules_are_named(whole, texts):
  whole.reset()
  rows = _prompt_rows(2, texts)
  with pytest.raises(ValueError, match="run 0: sequence 2 is not open"):
    whole.process(_run(rows, commits=[(2, 3)]))
  whole.reset()
  whole.process(_run(rows, opens=(2,), commits=[(2, 3)]))
  with pytest.raises(ValueError, match="run 5: sequence 2 is open already"):
    whole.process(_run([], run_id=5, opens=(2,)))
  with pytest.raises(KeyError, match="node 99 of sequence 2"):
    whole.process(_run([(2, 100, 99, 1, False)]))
  whole.reset()
  flat = [(2, i, max(i - 1, 0), 1, True) for i in range(17)]
  with pytest.raises(ValueError, match="17 rows: the largest row bucket is 16"):
    whole.process(_run(flat, opens=(2,)))
  whole.reset()


def test_impossible_stages_are_refused_by_name(params, whole):
  with pytest.raises(ValueError, match=r"Stage\.codec_in: the first stage"):
    dataclasses.replace(whole, codec_in=codecs.raw("f32"), num_traces={})
  with pytest.raises(ValueError, match=r"Stage\.codec_out: the last stage"):
    dataclasses.replace(whole, codec_out=codecs.raw("f32"), num_traces={})
  with pytest.raises(ValueError, match=r"row_buckets = \(8, 8\)"):
    StageShape(row_buckets=(8, 8), slot_buckets=(8,))
  with pytest.raises(ValueError, match=r"slot_buckets = \(\)"):
    StageShape(row_buckets=(8,), slot_buckets=())
  with pytest.raises(ValueError, match="cache_dtype = 'int8'"):
    StageShape(row_buckets=(8,), slot_buckets=(8,), cache_dtype="int8")


def test_a_greedy_tail_refuses_to_sample(params):
  stage = _stage(params, 1, 1, verifier=verify.greedy())
  with pytest.raises(ValueError, match=r"temperature = 0\.8: must be 0"):
    stage.process(_run([], opens=(1,)), b"")


def test_measuring_leaves_a_fresh_stage(whole):
  traces = dict(whole.num_traces)
  times = whole.measure(num_slots=48, repeats=3)
  assert sorted(times) == [8, 16] and all(t > 0 for t in times.values())
  assert whole.num_traces == traces
  assert whole.rollback.num_used(whole._slots) == 0 and not whole._tail
