# SPDX-License-Identifier: Apache-2.0
"""Offline acceptance: hand-drawn rounds and off-by-one traps."""

import math

import numpy as np
import pytest

import drafters
from wanspec_jax.base import Anchor, Drafter, Nodes


def _nodes(rows):
  tokens, parents, log_q = zip(*rows, strict=True) if rows else ((), (), ())
  return Nodes(
    np.array(tokens, np.int32),
    np.array(parents, np.int32),
    np.array(log_q, np.float32),
  )


def _scripted(trees, log):
  """Proposes the trees in turn and writes down what it is told."""

  def init(params, prompt, request_key):
    log.append(("init", params, tuple(prompt), request_key))
    return 0

  def expand(state, anchors, budget):
    log.append(("expand", tuple(anchors), budget))
    return state + 1, _nodes(trees[state])

  def rebase(state, root):
    log.append(("rebase", root))
    return state

  def observe(state, tokens, features=None):
    log.append(("observe", tuple(tokens)))
    return state

  return Drafter("scripted", init, expand, rebase, observe)


HALF = math.log(0.5)


def test_rounds_of_hand_drawn_trees():
  trees = [
    # Found: 4, then 6 below it; nothing is tested below 6.
    [(5, 0, HALF), (4, 0, HALF), (6, 2, HALF)],
    # Root tested, no child right.
    [(1, 0, HALF)],
    # Nothing drafted.
    [],
    # The recording ends at the accepted node: no token of the target's own.
    [(2, 0, HALF), (3, 1, HALF), (3, 0, HALF)],
  ]
  log = []
  rounds = drafters.replay(
    _scripted(trees, log),
    [8, 9],
    [4, 6, 7, 9, 9, 2],
    budget=5,
    params="p",
    request_key=3,
  )
  assert rounds == [
    drafters.Round(3, 2, 2, 3, pytest.approx(1.25)),
    drafters.Round(1, 1, 0, 1, pytest.approx(0.5)),
    drafters.Round(0, 0, 0, 1, 0.0),
    # The node of depth 2 lies beyond the recording: nothing to expect.
    drafters.Round(3, 1, 1, 1, pytest.approx(1.0)),
  ]
  # The drafter learns committed tokens only, and in the contract's order.
  assert log == [
    ("init", "p", (8, 9), 3),
    ("expand", (Anchor(2),), 5),
    ("observe", (4, 6, 7)),
    ("rebase", Anchor(4, (4, 6, 7))),
    ("expand", (Anchor(5),), 5),
    ("observe", (9,)),
    ("rebase", Anchor(5, (9,))),
    ("expand", (Anchor(6),), 5),
    ("observe", (9,)),
    ("rebase", Anchor(6, (9,))),
    ("expand", (Anchor(7),), 5),
    ("observe", (2,)),
    ("rebase", Anchor(7, (2,))),
  ]


def test_size_fn_keeps_a_prefix():
  tree = [(4, 0, HALF), (6, 1, HALF)]
  seen = []

  def size_fn(log_reach):
    seen.append(log_reach.tolist())
    return 1

  rounds = drafters.replay(_scripted([tree], []), [9], [4, 6], size_fn=size_fn)
  assert rounds == [drafters.Round(1, 1, 1, 2, pytest.approx(0.5))]
  assert seen == [pytest.approx([HALF, 2 * HALF])]
  with pytest.raises(ValueError, match="size_fn: 3 is outside"):
    drafters.replay(_scripted([tree], []), [9], [4], size_fn=lambda _: 3)


@pytest.mark.parametrize("depth", [1, 2, 5])
@pytest.mark.parametrize("length", [1, 11, 12, 13])
def test_perfect_drafter_gains_depth_plus_one(depth, length):
  output = [i % 7 for i in range(length)]
  perfect = drafters.synthetic(output, acceptance=1.0, vocab_size=7)
  rounds = drafters.replay(perfect, [3], output, budget=depth)
  assert len(rounds) == math.ceil(length / (depth + 1))
  assert [r.emitted for r in rounds[:-1]] == [depth + 1] * (len(rounds) - 1)
  assert sum(r.emitted for r in rounds) == length
  assert all(r.accepted == r.tested == r.expected for r in rounds)


def test_none_decodes_one_token_per_lap():
  drafter = drafters.none()
  rounds = drafters.replay(drafter, [1], [2, 3, 4])
  assert rounds == [drafters.Round(0, 0, 0, 1, 0.0)] * 3
  nodes = drafter.expand(drafter.init(None, [1], 0), [Anchor(0)], 8)[1]
  assert [x.dtype for x in nodes] == [np.int32, np.int32, np.float32]


def test_no_output_no_rounds_and_no_prompt_no_replay():
  assert drafters.replay(drafters.none(), [1], []) == []
  with pytest.raises(ValueError, match="prompt: must hold"):
    drafters.replay(drafters.none(), [], [1])


@pytest.mark.parametrize(
  ("rows", "message"),
  [
    ([(1, 0, HALF)] * 4, "budget = 3"),
    ([(1, 1, HALF)], r"parents\[0\] = 1"),
    ([(1, -1, HALF)], r"parents\[0\] = -1"),
    ([(1, 0, HALF), (1, 0, HALF)], "same token"),
    ([(1, 0, 0.1)], "log_q"),
    ([(1, 0, float("nan"))], "log_q"),
  ],
)
def test_broken_nodes_are_refused(rows, message):
  with pytest.raises(ValueError, match=message):
    drafters.check_nodes(_nodes(rows), 1, 3)


def test_unequal_lengths_are_refused():
  nodes = _nodes([(1, 0, HALF)])._replace(log_q=np.zeros(2, np.float32))
  with pytest.raises(ValueError, match="must be equal"):
    drafters.check_nodes(nodes, 1, 3)


def test_cumulative_log_q_with_two_anchors():
  nodes = _nodes([(1, 1, -1.0), (2, 0, -2.0), (3, 2, -4.0)])
  assert drafters.cumulative_log_q(nodes, 2).tolist() == [-1.0, -2.0, -5.0]
