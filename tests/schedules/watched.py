# SPDX-License-Identifier: Apache-2.0
"""A driver that checks what every draft adds to the tree."""

import collections

from wanspec_jax import schedules as sch
from wanspec_jax.worlds import Driver


def _paths(spec):
  """Returns the tree as a set of whole texts, one per node below the root."""
  head = tuple(spec.tokens)
  return {head + spec.path(node) for node in spec.nodes if node != spec.root}


class Watched(Driver):
  """Checks every tree after a draft against sets of whole texts.

  What a draft adds are those of its texts that go on from what is committed by
  then; nothing, if it was asked for before a fault. The check knows neither
  nodes nor anchors nor trails.

  Attributes:
    counts: of drafts, by how many tokens were committed meanwhile.
    kept: nodes that late drafts have added.
  """

  def __init__(self, *args):
    super().__init__(*args)
    self.counts = collections.Counter()
    self.kept = 0
    self._asked = {}

  def handle(self, event):
    expected = None
    if isinstance(event, sch.Drafted):
      entry = self.engine.sequences.get(event.sequence)
      head, epoch = self._asked.pop(event.ticket)
      if entry is not None:
        before = _paths(entry.spec)
        expected = before
        if epoch == self.engine.epoch:
          now = tuple(entry.spec.tokens)
          drafted = self._texts(event, head)
          expected = before | {
            t for t in drafted if t[: len(now)] == now and len(t) > len(now)
          }
          late = len(now) - len(head)
          self.counts[late] += 1
          self.kept += len(expected - before) * (late > 0)
    held = self.engine.policy
    if expected is not None:  # look at the tree before the policy grows it
      self.engine.policy = held._replace(
        decide=lambda spec, pipe, time_s: self._look(
          held, spec, pipe, time_s, event.sequence, expected
        )
      )
    work = super().handle(event)
    self.engine.policy = held
    for action in work.drafts:
      spec = self.engine.sequences[action.sequence].spec
      self._asked[action.ticket] = tuple(spec.tokens), self.engine.epoch
    return work

  def _look(self, policy, spec, pipe, time_s, sequence, expected):
    if spec.sequence == sequence:
      assert _paths(spec) == expected
    return policy.decide(spec, pipe, time_s)

  @staticmethod
  def _texts(event, head):
    rows = [head + tuple(anchor.path) for anchor in event.anchors]
    for token, parent in zip(
      event.nodes.tokens.tolist(), event.nodes.parents.tolist(), strict=True
    ):
      rows.append((*rows[parent], token))
    return rows[len(event.anchors) :]
