# SPDX-License-Identifier: Apache-2.0
"""Plain decoding that an earlier run recorded, and when it may be reused."""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from experiments import _report, _rundir
from experiments._session import Session
from wanspec_jax import metrics, models, wire
from wanspec_jax import schedules as sch
from wanspec_jax.worlds import Outcome


def ring_identity(session: Session) -> dict[str, Any]:
  """Returns all that must be equal for a recorded plain decoding to count."""
  settings, cluster = session.settings, session.cluster
  return {
    "model": models.model_hash(cluster.model),
    "cluster": {
      "dtype": cluster.dtype,
      "codec": cluster.codec,
      "verifier": cluster.verifier,
      "rollback": cluster.rollback,
      "row_buckets": list(cluster.shape.row_buckets),
      "slot_buckets": list(cluster.shape.slot_buckets),
      "cache_dtype": cluster.shape.cache_dtype,
      "exact": cluster.shape.exact,
      "layers": [list(stage.layers) for stage in cluster.stages],
    },
    "links": dataclasses.asdict(settings.links) if settings.emulate else None,
    "sampling": dataclasses.asdict(settings.sampling),
    "max_new_tokens": settings.max_new_tokens,
    "concurrent": settings.concurrent,
    "stop": list(settings.stop),
    "world": settings.world,
    "versions": {
      k: v for k, v in _rundir.versions().items() if k in ("jax", "jaxlib")
    },
  }


def recorded_plain(
  path: pathlib.Path,
  identity: dict[str, Any],
  requests: Sequence[sch.Request],
) -> _report.Arm:
  """Returns the plain arm that an earlier run wrote.

  Raises:
    ValueError: naming what differs.
  """
  file = path / "plain.json"
  try:
    data = json.loads(file.read_text())
  except OSError as error:
    raise ValueError(f"plain_from: {file} cannot be read ({error})") from error
  theirs = data["identity"]
  for field in identity:
    if theirs.get(field) != identity[field]:
      raise ValueError(
        f"plain_from: {field} was {theirs.get(field)!r} there and is "
        f"{identity[field]!r} here"
      )
  known = {tuple(o["prompt"]): o for o in data["outcomes"]}
  outcomes = []
  for i, request in enumerate(requests):
    if request.prompt not in known:
      raise ValueError(f"plain_from: prompt {i} was not decoded there")
    outcomes.append(_outcome(known[request.prompt]))
  return _report.Arm(
    name="plain (recorded)",
    world=identity["world"],
    outcomes=outcomes,
    bytes=wire.ByteCounter.from_dict(data["bytes"]),
  )


def _outcome(fields: dict[str, Any]) -> Outcome:
  """Returns an outcome from its JSON form."""
  rounds = tuple(metrics.RoundRecord(**r) for r in fields["rounds"])
  return Outcome(
    **fields | {"prompt": tuple(fields["prompt"]), "rounds": rounds}
  )
