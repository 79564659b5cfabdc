# SPDX-License-Identifier: Apache-2.0
"""The virtual ring's clock, bytes and tokens over replayed stages."""

import itertools
import math
import random as random_lib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.schedules import bench
from wanspec_jax import schedules as sch
from wanspec_jax import wire
from wanspec_jax.links import StageProfile
from wanspec_jax.worlds import Driver, ReplayStage, VirtualRing


def _profile(times, draft_s=0.0):
  """Returns a profile whose stages take these seconds, whatever the rows."""
  return StageProfile(
    buckets=(64,),
    seconds=tuple((t,) for t in times),
    dtype="float32",
    device="none",
    draft_s_per_node=draft_s,
  )


def _run(
  texts,
  requests,
  *,
  drafter=None,
  delays=(0.01, 0.02, 0.03),
  times=(0.001, 0.002),
  bandwidth_bps=math.inf,
  jitter_s=0.0,
  draft_s=0.0,
  max_nodes=8,
  prefill_rows=4,
  capacity=200,
  row_bytes=16,
):
  """Decodes `[(time_s, request)]` in lockstep on a ring of recorded stages."""
  hops = [
    wire.LinkShaper(
      delay_s=delay_s, bandwidth_bps=bandwidth_bps, jitter_s=jitter_s, seed=i
    )
    for i, delay_s in enumerate(delays)
  ]
  stages = [
    ReplayStage(capacity=capacity, row_bytes=row_bytes) for _ in times[:-1]
  ]
  stages.append(ReplayStage(capacity=capacity, texts=texts))
  ring = VirtualRing(stages=stages, hops=hops, profile=_profile(times, draft_s))
  engine = sch.init(
    sch.lockstep(max_nodes),
    bench.costs(64),
    capacity=capacity,
    prefill_rows=prefill_rows,
  )
  driver = Driver(engine, drafter or bench.chain_of(texts, 0))
  result = ring.run(driver, requests)
  assert driver.done and result.world == "virtual"
  for stage in stages:
    assert int(stage._slots.used.sum()) == 0
  return result


def _text(length=120):
  return [i * i % 7 % bench.VOCAB for i in range(length)]


def test_plain_decoding_takes_one_lap_per_token():
  texts = {0: _text()}
  request = bench.request_of(texts[0], 1, 6, seed=0)
  outcome = _run(texts, [(0.5, request)], max_nodes=0).outcomes[0]
  lap_s = 0.01 + 0.02 + 0.03 + 0.001 + 0.002
  assert outcome.tokens == texts[0][1:7]
  assert outcome.emitted_s == pytest.approx(
    [0.5 + lap_s * (i + 1) for i in range(6)]
  )
  assert outcome.submitted_s == outcome.admitted_s == 0.5
  assert outcome.finished_s == outcome.emitted_s[-1]
  assert outcome.decode_s == pytest.approx(5 * lap_s)


def test_a_perfect_drafter_divides_laps_by_depth_plus_one():
  texts = {0: _text()}
  request = bench.request_of(texts[0], 3, 20, seed=0)
  draft_s = 0.004
  outcome = _run(
    texts,
    [(0.0, request)],
    drafter=bench.chain_of(texts, 4),
    draft_s=draft_s,
    max_nodes=4,
  ).outcomes[0]
  lap_s = 0.06 + 0.003 + 4 * draft_s  # the draft is not hidden
  times = sorted(set(outcome.emitted_s))
  assert len(times) == 4  # 20 tokens, five a lap
  steps = [b - a for a, b in itertools.pairwise(times)]
  assert steps == pytest.approx([lap_s] * 3)


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_prompt_chunks_follow_each_other(num_stages):
  """First token: one lap and the chunks one after the other, not C laps."""
  texts = {0: _text(200)}
  chunks, rows, delay_s, stage_s = 10, 8, 0.05, 0.003
  request = bench.request_of(texts[0], chunks * rows + 1, 2, seed=0)
  outcome = _run(
    texts,
    [(0.0, request)],
    delays=(delay_s,) * (num_stages + 1),
    times=(stage_s,) * num_stages,
    prefill_rows=rows,
    max_nodes=0,
  ).outcomes[0]
  lap_s = (num_stages + 1) * delay_s + num_stages * stage_s
  assert outcome.emitted_s[0] == pytest.approx(lap_s + chunks * stage_s)
  assert outcome.emitted_s[1] - outcome.emitted_s[0] == pytest.approx(lap_s)


def test_bandwidth_serialises_what_is_sent():
  """Every byte of a frame is paid for on its hop, one frame after another."""
  texts = {0: _text()}
  bandwidth_bps = 80_000.0
  request = bench.request_of(texts[0], 1, 5, seed=0)
  result = _run(
    texts, [(0.0, request)], bandwidth_bps=bandwidth_bps, max_nodes=0
  )
  for span in result.spans:
    if span.lane.startswith("hop"):
      num_bytes = int(span.name.removesuffix(" B"))
      delay_s = (0.01, 0.02, 0.03)[int(span.lane[4:])]
      spent_s = 8 * num_bytes / bandwidth_bps + delay_s
      assert span.end_s - span.start_s == pytest.approx(spent_s)
  # The activations' hop carries at least the row.
  named = [s for s in result.spans if s.lane == "hop 1" and s.run == 0]
  assert int(named[0].name.removesuffix(" B")) > 16


def _check_clock(result, delays):
  """Nothing overlaps on a stage, nothing overtakes, nothing is early."""
  by_lane = {}
  for span in result.spans:
    by_lane.setdefault(span.lane, []).append(span)
  for lane, spans in by_lane.items():
    if lane.startswith("stage"):
      for a, b in itertools.pairwise(spans):
        assert a.run < b.run and a.end_s <= b.start_s
    if lane.startswith("hop"):
      for a, b in itertools.pairwise(spans):
        assert a.run < b.run and a.end_s <= b.end_s
      delay_s = delays[int(lane[4:])]
      assert all(s.end_s - s.start_s >= delay_s - 1e-12 for s in spans)
  arrived = {(s.lane, s.run): s.end_s for s in result.spans if "hop" in s.lane}
  left = {(s.lane, s.run): s.start_s for s in result.spans if "hop" in s.lane}
  for span in result.spans:
    if span.lane.startswith("stage"):
      i = int(span.lane[6:])
      assert span.start_s >= arrived[f"hop {i}", span.run]
      assert left[f"hop {i + 1}", span.run] == span.end_s


@settings(derandomize=True, deadline=None, max_examples=60)
@given(st.integers(0, 2**32).map(random_lib.Random))
def test_any_ring_gives_the_plain_texts(random):
  """Random rings, jitter, drafters, several sequences; twice, the same."""
  count = random.randint(1, 3)
  texts = {
    s: [random.randrange(bench.VOCAB) for _ in range(60)] for s in range(count)
  }
  num_stages = random.randint(1, 4)
  delays = [random.random() * 0.05 for _ in range(num_stages + 1)]
  requests = [
    (
      random.random() * 0.2,
      bench.request_of(
        texts[s], random.randint(1, 12), random.randint(0, 12), seed=s
      ),
    )
    for s in range(count)
  ]
  options = {
    "delays": delays,
    "times": [random.random() * 0.01 for _ in range(num_stages)],
    "bandwidth_bps": random.choice([math.inf, 1e5, 1e6]),
    "jitter_s": random.choice([0.0, 0.01]),
    "draft_s": random.choice([0.0, 0.002]),
    "prefill_rows": random.randint(1, 6),
    "capacity": random.choice([26, 60]),
  }
  seed = random.random()

  def decode():
    drafts = random_lib.Random(seed)
    drafter = bench.drafter_of(
      texts, right=0.7, size=lambda budget: budget, random=drafts
    )
    return _run(texts, requests, drafter=drafter, **options)

  result = decode()
  for s, (time_s, request) in enumerate(requests):
    outcome = result.outcomes[s]
    tokens, reason = bench.plain(texts[s], request, options["capacity"])
    assert (outcome.tokens, outcome.reason) == (tokens, reason)
    assert outcome.submitted_s == time_s
    assert len(outcome.emitted_s) == len(tokens)
    assert outcome.emitted_s == sorted(outcome.emitted_s)
    assert sum(r.emitted for r in outcome.rounds) == len(tokens)
    laps = {t for t in outcome.emitted_s}
    assert len(laps) == len(outcome.rounds)
  _check_clock(result, delays)
  by_hop = {}
  for span in result.spans:
    if span.lane.startswith("hop"):
      size = int(span.name.removesuffix(" B"))
      by_hop[span.lane] = by_hop.get(span.lane, 0) + size
  counted = {
    link: sum(classes.values())
    for link, classes in result.bytes.as_dict().items()
  }
  assert counted == by_hop
  again = decode()
  assert again.spans == result.spans


def test_two_sequences_share_the_stages():
  """The second waits for the stage, not for the first one's text."""
  texts = {0: _text(), 1: _text()[3:]}
  requests = [(0.0, bench.request_of(texts[s], 1, 4, seed=s)) for s in range(2)]
  result = _run(
    texts, requests, delays=(0.01, 0.01), times=(0.004,), max_nodes=0
  )
  lap_s = 0.024
  first, second = (result.outcomes[s].emitted_s for s in range(2))
  assert first == pytest.approx([lap_s * (i + 1) for i in range(4)])
  assert second == pytest.approx([t + 0.004 for t in first])


def test_sizes_that_do_not_fit_are_refused_by_name():
  stage = ReplayStage(capacity=4, texts={})
  shaper = wire.LinkShaper()
  with pytest.raises(ValueError, match="hops: 1 given, 1 stages need 2"):
    VirtualRing(stages=[stage], hops=[shaper], profile=_profile((0.0,)))
  with pytest.raises(ValueError, match=r"profile\.num_stages = 2: must be 1"):
    VirtualRing(stages=[stage], hops=[shaper] * 2, profile=_profile((0.0, 0.0)))


def test_replayed_stages_refuse_what_they_cannot_know():
  with pytest.raises(ValueError, match=r"give row_bytes .* or texts"):
    ReplayStage(capacity=4)
  with pytest.raises(ValueError, match=r"give row_bytes .* or texts"):
    ReplayStage(capacity=4, row_bytes=1, texts={})
  texts = {0: [0, 1, 2]}
  request = sch.Request(prompt=(0, 1), max_new_tokens=5)
  with pytest.raises(ValueError, match=r"texts\[0\] has 3 tokens: position 3"):
    _run(texts, [(0.0, request)], max_nodes=0)
