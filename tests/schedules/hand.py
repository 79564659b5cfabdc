# SPDX-License-Identifier: Apache-2.0
"""Trees drawn by hand, for policies that are asked about them directly."""

import dataclasses
import math

from tests.schedules import virtual
from wanspec_jax import schedules as sch
from wanspec_jax.schedules import _speculation as tree


def spec_of(*, remaining=50, slots=50):
  """Returns the tree of a text that has nothing but its root."""
  spec = tree.start(0, (7,), remaining)
  spec.max_new_nodes = slots
  return spec


def add(spec, parent, *stated, first=10):
  """Adds children with these probabilities, of tokens from `first` on; returns
  their ids."""
  return [
    tree.add_child(spec, parent, first + i, math.log(p)).id
    for i, p in enumerate(stated)
  ]


def chain(spec, *stated):
  """Adds a chain below the root; returns its ids."""
  at, ids = spec.root, []
  for p in stated:
    spec.nodes[at].grown = 1
    at = add(spec, at, p)[0]
    ids.append(at)
  return ids


def launch(spec, ids=(), *, time_s=0.0, return_s=1.0):
  """Launches nodes, and the root where it was not launched yet."""
  ids = tuple(ids) if spec.root_launched else (spec.root, *ids)
  spec.launches += 1
  for node in ids:
    spec.nodes[node].run = len(spec.flights)
  spec.flights.append(
    sch.Flight(
      run=len(spec.flights),
      ids=ids,
      launched_s=time_s,
      tail_s=return_s,
      return_s=return_s,
    )
  )


def pipe_of(level_s=0.0, lap_s=1.0):
  """Returns an empty pipe of one sequence whose laps take `lap_s`."""
  costs = sch.Costs.constant(lap_s, max_rows=virtual.MAX_ROWS)
  draft = sch.DraftCosts(per_level_s=level_s)
  pipe = sch.Pipe(dataclasses.replace(costs, draft=draft))
  pipe.num_sequences = 1
  return pipe


def row_costs(row_s, *, max_rows):
  """Returns costs of one stage, `row_s` a row, a delay of 0.1 s before and
  behind it."""
  return sch.Costs(
    delay_s=(0.1, 0.1),
    busy_s=lambda rows: (0.0, row_s * rows, 0.0),
    max_rows=max_rows,
  )
