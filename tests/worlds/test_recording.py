# SPDX-License-Identifier: Apache-2.0
"""Recordings: what an engine heard and did, written, read and gone through."""

import dataclasses
import json
import math
import random as random_lib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import drafters
from tests.schedules import bench
from tests.worlds import rings
from tests.worlds.scripted import TEXT, driver_of, ring_of, taps
from wanspec_jax import schedules as sch
from wanspec_jax.messages import Returned, Verdict
from wanspec_jax.worlds import (
  Difference,
  Kill,
  Recording,
  Step,
  Weather,
  replay_events,
)

POLICIES = {
  "lockstep": lambda: sch.lockstep(lambda gains, lap_s: 3, max_nodes=6),
  "continuous": lambda: sch.continuous(nodes=2),
  "segments": lambda: sch.segments(segment=3, initial=8, expand=4),
  "priced": sch.priced,
  "floor": lambda: sch.with_floor(sch.in_pipe(width=2)),
}


def _drafter(count, quality=(0.6, 0.2)):
  return drafters.by_request(
    {
      s: drafters.synthetic(
        TEXT[s + 2 :], acceptance=quality, vocab_size=bench.VOCAB, seed=s
      )
      for s in range(count)
    }
  )


def _record(random, policy):
  """Decodes on a ring with kills; returns the recording and a fresh driver."""
  count, num_stages = random.randint(1, 3), random.randint(1, 3)
  texts = {s: TEXT[s:] for s in range(count)}
  stop = sch.Stop(
    ids=frozenset(random.sample(range(bench.VOCAB), random.randint(0, 1))),
    strings=("aab",) * random.randint(0, 1),
    text_of=bench.text_of,
  )
  weather = Weather(
    duplicates=random.choice([0.0, 0.3]),
    kills=(Kill(0, random.uniform(0, 0.5), 0.1),) * random.randint(0, 1),
  )
  ring = ring_of(
    taps(texts, num_stages),
    delays=[random.uniform(0, 0.02) for _ in range(num_stages + 1)],
    times=[random.uniform(0, 0.01) for _ in range(num_stages)],
    draft=sch.DraftCosts(per_node_s=random.choice([0.0, 0.01])),
    weather=weather,
  )

  def fresh():
    return driver_of(POLICIES[policy](), _drafter(count))

  driver = fresh()
  driver.recording = Recording()
  requests = [
    (0.05 * s, bench.request_of(texts[s], 2, 15, seed=s, stop=stop))
    for s in range(count)
  ]
  result = ring.run(driver, requests)
  for s, (_, request) in enumerate(requests):
    outcome = result.outcomes[s]
    assert (outcome.tokens, outcome.reason) == bench.plain(
      texts[s], request, 200
    )
  return driver.recording, fresh


@settings(derandomize=True, deadline=None, max_examples=8)
@given(random=st.integers(0, 2**32).map(random_lib.Random))
@pytest.mark.parametrize("policy", POLICIES)
def test_a_recording_is_read_and_gone_through_again(policy, random):
  """Through JSON, with several sequences, stops, late drafts and faults."""
  recording, fresh = _record(random, policy)
  text = recording.to_json()
  again = Recording.from_json(text, text_of=bench.text_of)
  assert again.to_json() == text
  assert replay_events(again, fresh()) is None
  lines = [json.loads(line) for line in text.splitlines()[1:]]
  assert [step["event"]["time_s"] for step in lines] == [
    event.time_s for event, _ in recording.steps
  ]
  runs = [
    action["run"]["tokens"]["items"]
    for step in lines
    for action in step["actions"]
    if action["$"] == "Launch"
  ]
  assert runs == [
    action.run.tokens.tolist()
    for _, actions in recording.steps
    for action in actions
    if isinstance(action, sch.Launch)
  ]


def _changed(recording, kind, change):
  """Returns the recording with the middle one of its actions of a kind
  changed, and where that is."""
  found = [
    (i, j)
    for i, (_, actions) in enumerate(recording.steps)
    for j, action in enumerate(actions)
    if isinstance(action, kind)
  ]
  i, j = found[len(found) // 2]
  steps = list(recording.steps)
  actions = list(steps[i].actions)
  actions[j : j + 1] = change(actions[j])
  steps[i] = Step(steps[i].event, tuple(actions))
  return Recording(steps), i, j


def _recorded(seed=3):
  return _record(random_lib.Random(seed), "segments")


def test_the_first_difference_is_named():
  recording, fresh = _recorded()

  def other_token(action):
    tokens = action.run.tokens.copy()
    tokens[-1] += 7
    run = dataclasses.replace(action.run, tokens=tokens)
    return [dataclasses.replace(action, run=run)]

  changed, i, j = _changed(recording, sch.Launch, other_token)
  difference = replay_events(changed, fresh())
  run = recording.steps[i].actions[j].run
  where = f"actions[{j}].run.tokens[{run.num_rows - 1}]"
  token = int(run.tokens[-1])
  event = recording.steps[i].event
  assert difference == Difference(i, event.time_s, where, token + 7, token)
  assert f"step {i} at" in str(difference) and where in str(difference)


def test_an_action_too_many_or_too_few_is_named():
  recording, fresh = _recorded()
  changed, i, j = _changed(recording, sch.Emit, lambda action: [])
  difference = replay_events(changed, fresh())
  assert (difference.step, difference.where) == (i, f"actions[{j}]")
  assert isinstance(difference.replayed, sch.Emit)
  changed, i, j = _changed(recording, sch.Finish, lambda action: [action] * 2)
  difference = replay_events(changed, fresh())
  assert (difference.step, difference.where) == (i, f"actions[{j + 1}]")
  assert isinstance(difference.recorded, sch.Finish)


def test_another_drafter_or_policy_shows():
  recording, _ = _recorded()
  policy = POLICIES["segments"]
  count = len({e.sequence for e, _ in recording.steps if hasattr(e, "request")})
  assert replay_events(recording, driver_of(policy(), _drafter(count))) is None
  other = driver_of(policy(), _drafter(count, quality=(0.9, 0.05)))
  assert replay_events(recording, other).where.startswith("event.nodes.")
  other = driver_of(POLICIES["continuous"](), _drafter(count))
  assert replay_events(recording, other).where.startswith("actions")


def test_an_answer_that_nobody_asked_for_is_named():
  recording, fresh = _recorded()
  steps = list(recording.steps)
  i = next(i for i, s in enumerate(steps) if isinstance(s.event, sch.Drafted))
  event = dataclasses.replace(steps[i].event, ticket=99)
  steps[i] = Step(event, steps[i].actions)
  difference = replay_events(Recording(steps), fresh())
  assert difference == Difference(i, event.time_s, "event.ticket", 99, None)


def test_numbers_that_json_lacks_come_through():
  verdict = Verdict(
    sequence=0,
    tokens=(1, 2),
    log_probs=(-math.inf, -0.1),
    margins=(math.inf, math.nan),
  )
  returned = Returned(run_id=0, verdicts=(verdict,))
  recording = Recording([Step(sch.Arrived(time_s=0.1, returned=returned), ())])
  text = recording.to_json()
  assert "Infinity" not in text and "NaN" not in text
  (step,) = Recording.from_json(text).steps
  again = step.event.returned.verdicts[0]
  assert again.log_probs == verdict.log_probs and step.event.time_s == 0.1
  assert again.margins[0] == math.inf and math.isnan(again.margins[1])


def test_what_is_no_recording_is_refused():
  head = '{"recording": 1}\n'
  with pytest.raises(ValueError, match="not a recording of version 1"):
    Recording.from_json('{"recording": 2}\n')
  with pytest.raises(ValueError, match="not a recording of version 1"):
    Recording.from_json("")
  with pytest.raises(ValueError, match="not a recording of version 1"):
    Recording.from_json(head + "{")
  with pytest.raises(ValueError, match="a value of type 'Driver'"):
    Recording.from_json(head + '{"event": {"$": "Driver"}, "actions": []}')
  with pytest.raises(ValueError, match="a value of type 'array'"):
    Recording.from_json(
      head
      + '{"event": {"$": "array", "dtype": "object", "items": []}, '
      + '"actions": []}'
    )


def test_stop_strings_need_their_decoder():
  stop = sch.Stop(strings=("a",), text_of=bench.text_of)
  request = bench.request_of(TEXT, 2, 3, seed=0, stop=stop)
  event = sch.Submitted(time_s=0.0, sequence=0, request=request)
  text = Recording([Step(event, ())]).to_json()
  with pytest.raises(ValueError, match=r"needs Stop\.text_of"):
    Recording.from_json(text)
  (step,) = Recording.from_json(text, text_of=bench.text_of).steps
  assert step.event == event


@pytest.mark.parametrize("policy", ["lockstep", "segments"])
def test_a_run_over_sockets_is_gone_through_without_any(policy, tmp_path):
  """Two sequences on loopback; written to a file, read, replayed."""
  texts = {0: rings.TEXT, 1: rings.TEXT[5:]}

  def fresh():
    drafter = drafters.by_request(
      {
        s: drafters.synthetic(
          text[rings.PROMPT :], acceptance=[0.7, 0.2], vocab_size=11, seed=s
        )
        for s, text in texts.items()
      }
    )
    return rings.driver_of(drafter=drafter, policy=POLICIES[policy]())

  async def main():
    stages = rings.recorded(2, texts)
    async with (
      rings.served(2, stages) as (cluster, _),
      rings.ring_of(cluster) as ring,
    ):
      driver = fresh()
      driver.recording = Recording()
      requests = [
        (0.0, rings.request_of(20, text=texts[s], seed=s)) for s in texts
      ]
      result = await ring.run(driver, requests)
      for s, text in texts.items():
        tokens = result.outcomes[s].tokens
        assert tokens == list(text[rings.PROMPT :][:20])
      return driver.recording

  recording = rings.run(main)
  recording.save(tmp_path / "run.jsonl")
  again = Recording.load(tmp_path / "run.jsonl")
  assert replay_events(again, fresh()) is None
  assert sum(isinstance(e, sch.Drafted) for e, _ in again.steps) > 2
  assert np.diff([event.time_s for event, _ in again.steps]).min() >= 0
