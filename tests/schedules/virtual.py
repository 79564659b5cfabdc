# SPDX-License-Identifier: Apache-2.0
"""Policies on rings in virtual time: replayed texts, drafts of known quality.

Whatever is decoded here is compared with the text that plain decoding gives.
"""

import random as random_lib

import drafters
from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.base import Anchor
from wanspec_jax.links import Ring, StageProfile, hop_bytes_model
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing

VOCAB = 500
MAX_ROWS = 64


def text_of(tokens, *, seed=5):
  """Returns a random text, longer than a prompt of one and `tokens` more."""
  random = random_lib.Random(seed)
  return [random.randrange(VOCAB) for _ in range(tokens + 300)]


def drafter_of(text, acceptance, *, seed=0):
  """Returns a drafter of that acceptance for a text behind its first token."""
  return drafters.synthetic(
    text[1:], acceptance=acceptance, vocab_size=VOCAB, seed=seed
  )


def _run(
  policy,
  drafter,
  texts,
  *,
  tokens,
  capacity,
  stage_s,
  hops,
  costs_of,
  row_bytes=0,
  level_s=0.0,
  records=False,
  weather=None,
  drafter_stage=None,
):
  """Decodes all texts from their first token on; returns what came of it.

  Args:
    policy: a `Policy`.
    drafter: one that knows all texts.
    texts: `{seed: whole text}`, all submitted at time 0.
    tokens: how many to decode of each.
    capacity: slots of every stage.
    stage_s: seconds per run of each stage, whatever its rows.
    hops: link shapers, one more than stages.
    costs_of: `(profile, draft costs) -> Costs` that the engine believes in.
    row_bytes: size of a hidden state.
    level_s: seconds that the drafter takes per level.
    records: whether the first stage keeps every run it sees.
    weather: faults.
    drafter_stage: the stage whose device the drafter shares.

  Returns:
    The outcomes by sequence, and the first stage.
  """
  profile = StageProfile(
    buckets=(MAX_ROWS,),
    seconds=tuple((t,) for t in stage_s),
    dtype="none",
    device="modelled",
  )
  draft = sch.DraftCosts(per_level_s=level_s)
  stages = [
    ReplayStage(capacity=capacity, row_bytes=row_bytes) for _ in stage_s[1:]
  ]
  stages.append(ReplayStage(capacity=capacity, texts=texts))
  if records:
    stages[0] = bench.Recorder(stages[0])
  ring = VirtualRing(
    stages=stages,
    hops=hops,
    profile=profile,
    draft=draft,
    weather=weather,
    drafter_stage=drafter_stage,
    trace=False,
  )
  engine = sch.init(
    policy, costs_of(profile, draft), capacity=capacity, prefill_rows=8
  )
  requests = [
    (0.0, bench.request_of(text, 1, tokens, seed=s))
    for s, text in texts.items()
  ]
  outcomes = ring.run(Driver(engine, drafter), requests).outcomes
  for s, text in texts.items():
    assert outcomes[s].tokens == text[1 : 1 + tokens]
  return outcomes, stages[0]


def decode(
  policy,
  text,
  drafter,
  *,
  tokens,
  stage_s=(0.01,),
  delay_s=None,
  jitter_s=0.0,
  level_s=0.0,
  records=False,
):
  """Decodes one text over links that take no time but their delays.

  Args:
    policy: a `Policy`.
    text: of `text_of`.
    drafter: one that knows it.
    tokens: how many to decode.
    stage_s: seconds per run of each stage.
    delay_s: seconds of each hop; none by default.
    jitter_s: of every hop; the engine knows nothing of it.
    level_s: seconds that the drafter takes per level.
    records: whether to return the runs.

  Returns:
    The outcome, and every run as the first stage saw it, if asked for.
  """
  delay_s = delay_s or (0.0,) * (len(stage_s) + 1)
  busy_s = tuple(x for t in stage_s for x in (0.0, t))
  outcomes, first = _run(
    policy,
    drafter,
    {0: text},
    tokens=tokens,
    capacity=1024,
    stage_s=stage_s,
    hops=[
      wire.LinkShaper(delay_s=d, jitter_s=jitter_s, seed=i)
      for i, d in enumerate(delay_s)
    ],
    costs_of=lambda profile, draft: sch.Costs(
      delay_s=delay_s,
      busy_s=lambda rows: (*busy_s, 0.0),
      max_rows=MAX_ROWS,
      draft=draft,
    ),
    level_s=level_s,
    records=records,
  )
  return outcomes[0], list(first.rows.values()) if records else []


def decode_texts(
  policy,
  *,
  accept,
  tokens,
  stage_s=(0.1,),
  lap_s=0.0,
  mbps=1e6,
  row_bytes=0,
  level_s=0.0,
  jitter_s=0.0,
  weather=None,
  drafter_stage=None,
  sequences=1,
):
  """Decodes texts that share a uniform ring, whose costs the engine knows.

  Texts, drafts and faults are the same for all policies.

  Args:
    policy: a `Policy`.
    accept: acceptance of `drafters.synthetic`.
    tokens: how many to decode of each text.
    stage_s: seconds per run of each stage.
    lap_s: propagation delay of a lap, shared evenly by the hops.
    mbps: bandwidth of every hop, in Mbit/s.
    row_bytes: size of a hidden state.
    level_s: seconds that the drafter takes per level.
    jitter_s: of every hop.
    weather: faults.
    drafter_stage: the stage whose device the drafter shares.
    sequences: how many texts.

  Returns:
    The outcomes, the drafters and the texts, by sequence.
  """
  random = random_lib.Random(5)
  texts = {
    s: [random.randrange(VOCAB) for _ in range(tokens + 200)]
    for s in range(sequences)
  }
  models = {s: drafter_of(text, accept, seed=s) for s, text in texts.items()}
  num = len(stage_s)
  links = Ring.uniform(
    num_stages=num, lap_s=lap_s, bandwidth_bps=mbps * 1e6, jitter_s=jitter_s
  )
  hop_bytes = hop_bytes_model(
    num_stages=num, ids_bytes_per_node=0, row_bytes=row_bytes
  )
  outcomes, _ = _run(
    policy,
    drafters.by_request(models),
    texts,
    tokens=tokens,
    capacity=sequences * (tokens + 1100),
    stage_s=stage_s,
    hops=[
      wire.LinkShaper(
        delay_s=lap_s / (num + 1),
        bandwidth_bps=mbps * 1e6,
        jitter_s=jitter_s,
        seed=i,
      )
      for i in range(num + 1)
    ],
    costs_of=lambda profile, draft: sch.Costs.of_ring(
      links, profile, hop_bytes, max_rows=MAX_ROWS, draft=draft
    ),
    row_bytes=row_bytes,
    level_s=level_s,
    weather=weather,
    drafter_stage=drafter_stage,
  )
  return outcomes, models, texts


def time_s(policy, *, skip=32, **setting):
  """Returns virtual seconds from token `skip` on, summed over the texts."""
  outcomes, _, _ = decode_texts(policy, **setting)
  return sum(o.emitted_s[-1] - o.emitted_s[skip] for o in outcomes.values())


def hits(drafter, text, count):
  """Returns whether the likeliest child of each position is the true token."""
  state = drafter.init(None, text[:1], 0)
  found = []
  for token in text[1 : count + 1]:
    state, nodes = drafter.expand(state, [Anchor(0)], 1, 1)
    found.append(int(nodes.tokens[0]) == token)
    state = drafter.observe(state, [token])
  return found
