# SPDX-License-Identifier: Apache-2.0
"""The chaos study's own rules, and its faults over sockets one by one."""

import dataclasses

import pytest

from experiments.studies import _chaos_sockets, _scenarios
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import Kill, Stall, Weather


def _find(condition):
  """Returns the first seed of a scenario that fits."""
  return next(s for s in range(1000) if condition(_scenarios.scenario(s)))


@pytest.mark.parametrize(
  ("kill", "position"),
  [
    ("broken off", "first"),
    ("broken off", "last"),
    ("black-holed", "last"),
    ("shut down", "first"),
  ],
)
def test_a_killed_stage_is_replaced(kill, position, monkeypatch):
  """Whatever becomes of it: the texts are plain decoding's, the fault is told
  by the name of the stage that failed first."""
  monkeypatch.setattr(_chaos_sockets, "_KILLS", (kill,))
  seed = _find(
    lambda c: len(c.stage_s) >= 3 and c.policy == "priced" and c.quality < 0.6
  )
  case = _chaos_sockets.scaled(_scenarios.scenario(seed))
  stage = 0 if position == "first" else len(case.stage_s) - 1
  case = dataclasses.replace(
    case,
    lost_at_s=None,
    weather=Weather(kills=(Kill(stage, 0.15, 0.0),)),
  )
  report = _chaos_sockets.asyncio.run(_chaos_sockets._play(case))
  assert report["hung"] == report["diverged"] == 0
  assert len(report["faults"]) == 1
  assert report["faults"][0].startswith(f"stage-{stage}: ")


def test_a_lost_coordinator_and_a_stall_change_nothing():
  seed = _find(lambda c: c.temperature > 0 and len(c.prompts) > 1)
  case = _chaos_sockets.scaled(_scenarios.scenario(seed))
  case = dataclasses.replace(
    case, lost_at_s=0.3, weather=Weather(stalls=(Stall(0, 0.1, 0.25),))
  )
  report = _chaos_sockets.asyncio.run(_chaos_sockets._play(case))
  assert report["hung"] == report["diverged"] == 0
  assert report["faults"] == []


def test_what_diverges_is_counted(monkeypatch):
  """A target that answers otherwise than plain decoding is noticed."""
  seed = _find(lambda c: c.quality > 0.4 and not c.weather.kills)
  case = _scenarios.scenario(seed)
  texts = _scenarios.texts_of(case)
  prompt, text = texts[0]
  wrong = [(prompt, [*text[:20], (text[20] + 1) % _scenarios.VOCAB])]
  outcomes, hung = _scenarios._decode(case, texts, _scenarios.policy_of(case))
  assert not hung
  assert _scenarios._diverged(case, texts, outcomes) == 0
  assert _scenarios._diverged(case, wrong + texts[1:], outcomes) == 1


def test_both_meet_the_same_faults_from_the_33rd_token_on():
  """A stall of a second costs either of them a second, whenever it gets
  there."""
  seed = _find(
    lambda c: (
      c.is_timed
      and c.quality == 0.9
      and not c.weather.stalls
      and not c.jitter_s
      and c.policy == "priced"
    )
  )
  case = dataclasses.replace(_scenarios.scenario(seed), weather=Weather())
  texts = _scenarios.texts_of(case)
  stalled = dataclasses.replace(
    case, weather=Weather(stalls=(Stall(0, 0.0, 1.0),))
  )
  for policy in (_scenarios.policy_of(case), sch.lockstep(0)):
    report = {"hung": 0, "diverged": 0}
    fair_s, foul_s = (
      _scenarios._timed_s(c, texts, policy, report) for c in (case, stalled)
    )
    lap_s = sum(case.delays_s) + sum(case.stage_s)
    assert foul_s - fair_s == pytest.approx(
      len(texts) * 1.0, abs=2 * len(texts) * lap_s
    )
    assert not report["hung"] and not report["diverged"]


def test_weather_begins_when_it_is_told_to():
  weather = Weather(loss=0.5, stalls=(Stall(1, 0.5, 2.0),), start_s=10.0)
  at_zero = dataclasses.replace(weather, start_s=0.0)
  for hop in (0, 1):
    for sent_s in (0.0, 0.4, 3.01, 7.71):
      later = weather.delivery_s(hop, 10 + sent_s, 10.1 + sent_s)
      assert later - 10 == pytest.approx(
        at_zero.delivery_s(hop, sent_s, sent_s + 0.1)
      )
  assert weather.delivery_s(1, 9.9, 10.6) == 10.6


def test_the_start_is_found_without_playing_to_the_end():
  """The first 33rd token of a whole run in fair weather, whatever the
  scenario's own weather is."""
  seed = _find(
    lambda c: (
      c.is_timed and c.has_foul_weather and c.jitter_s and len(c.prompts) > 1
    )
  )
  case = _scenarios.scenario(seed)
  fair = dataclasses.replace(case, weather=Weather())
  texts = _scenarios.texts_of(case)
  for policy in (_scenarios.policy_of(case), sch.lockstep(0)):
    whole, _ = _scenarios._decode(fair, texts, policy)
    first_s = min(o.emitted_s[_scenarios.SKIP - 1] for o in whole)
    # A floor keeps purses: one per engine.
    policy = _scenarios.policy_of(case) if "floor" in policy.name else policy
    assert _scenarios._start_s(case, texts, policy) == first_s


def test_only_weather_that_takes_time_is_foul():
  seed = _find(lambda c: c.is_timed and c.weather.duplicates)
  case = _scenarios.scenario(seed)
  for weather, is_foul in (
    (Weather(seed=3, duplicates=0.1), False),
    (Weather(loss=0.01), True),
    (Weather(stalls=(Stall(0, 0.0, 1.0),)), True),
    (Weather(kills=(Kill(0, 0.1, 0.1),)), True),
  ):
    one = dataclasses.replace(case, weather=weather)
    assert one.has_foul_weather == is_foul
  texts = _scenarios.texts_of(case)
  ends = [
    [o.emitted_s for o in _scenarios._decode(c, texts, policy)[0]]
    for duplicates in (0.0, 0.5)
    for policy in [_scenarios.policy_of(case)]
    for c in [dataclasses.replace(case, weather=Weather(duplicates=duplicates))]
  ]
  assert ends[0] == ends[1]
