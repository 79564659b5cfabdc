# SPDX-License-Identifier: Apache-2.0
"""What an engine heard and answered, as JSON, and its replay elsewhere.

An engine is a function of its events, so a run over sockets can be gone through
again, step by step, where there are neither sockets nor stages.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from wanspec_jax import messages
from wanspec_jax import schedules as sch
from wanspec_jax.base import Anchor, Nodes
from wanspec_jax.metrics import RoundRecord
from wanspec_jax.schedules._events import Action, Event

if TYPE_CHECKING:
  from wanspec_jax.worlds._driver import Driver

_VERSION = 1
_TYPES: dict[str, type] = {
  kind.__name__: kind
  for kind in (
    *(sch.Submitted, sch.Drafted, sch.Arrived, sch.Aborted, sch.Woke),
    *(sch.Faulted, sch.Draft, sch.Observe, sch.Launch, sch.CancelRows),
    *(sch.Wake, sch.Emit, sch.Admit, sch.Finish, sch.Request, sch.Stop),
    *(messages.Sampling, messages.Open, messages.Commit, messages.Run),
    *(messages.Cancel, messages.Verdict, messages.Returned),
    *(Anchor, Nodes, RoundRecord),
  )
}
_DTYPES = ("bool", "int32", "int64", "float32")


class Step(NamedTuple):
  """One event and the actions that followed, in order."""

  event: Event
  actions: tuple[Action, ...]


class Difference(NamedTuple):
  """Where a replay first leaves its recording.

  Attributes:
    step: index of the event.
    time_s: when it was heard.
    where: path to the value, e.g. `actions[1].run.tokens[3]`.
    recorded: what the recording has there; None for nothing.
    replayed: what the replay has.
  """

  step: int
  time_s: float
  where: str
  recorded: Any
  replayed: Any

  def __str__(self) -> str:
    return (
      f"step {self.step} at {self.time_s:.6f} s: {self.where} was "
      f"{self.recorded!r}, is {self.replayed!r}"
    )


class Recording:
  """Every event that a driver heard, with the actions that followed.

  Attributes:
    steps: in order.
  """

  def __init__(self, steps: Sequence[Step] = ()):
    self.steps = list(steps)

  def add(self, event: Event, actions: Sequence[Action]) -> None:
    """Notes one step."""
    self.steps.append(Step(event, tuple(actions)))

  def to_json(self) -> str:
    """Returns the recording as JSON, one step a line.

    A `Stop.text_of` is left out: it is a function.
    """
    lines = [
      json.dumps(
        {"event": _plain(event), "actions": _plain(actions)}, allow_nan=False
      )
      for event, actions in self.steps
    ]
    return "\n".join([json.dumps({"recording": _VERSION}), *lines, ""])

  @classmethod
  def from_json(cls, text: str, *, text_of: Any = None) -> "Recording":
    """Returns what `to_json` wrote.

    Args:
      text: the JSON lines.
      text_of: `Stop.text_of` of its requests, where they have stop strings.

    Raises:
      ValueError: not a recording of this version, or a value of no known type.
    """
    head, *lines = text.splitlines() or [""]
    try:
      if json.loads(head) != {"recording": _VERSION}:
        raise ValueError(head)
      steps = [json.loads(line) for line in lines]
    except ValueError as error:
      raise ValueError(
        f"not a recording of version {_VERSION}: {error}"
      ) from error
    return cls(
      [
        Step(
          _object(step["event"], text_of),
          tuple(_object(action, text_of) for action in step["actions"]),
        )
        for step in steps
      ]
    )

  def save(self, path: pathlib.Path) -> None:
    """Writes `to_json` to a file."""
    path.write_text(self.to_json())

  @classmethod
  def load(cls, path: pathlib.Path, *, text_of: Any = None) -> "Recording":
    """Reads what `save` wrote; see `from_json`."""
    return cls.from_json(path.read_text(), text_of=text_of)


def replay_events(recording: Recording, driver: "Driver") -> Difference | None:
  """Goes through a recording again; returns where it first differs.

  The driver hears every recorded event at its recorded time. Its engine must
  ask for the same actions, and its drafter, asked again, propose the same
  nodes. Neither stages nor links are needed.

  Args:
    recording: of a whole session.
    driver: a fresh one, with the policy, the costs and the drafter of then.

  Returns:
    The first difference; None if there is none.
  """
  outer, driver.recording = driver.recording, Recording()
  asked: dict[int, sch.Draft] = {}
  try:
    for index, (event, actions) in enumerate(recording.steps):
      found = None
      if isinstance(event, sch.Drafted) and driver.knows(event.sequence):
        # Where the sequence has ended the answer is void, whatever it was.
        draft = asked.pop(event.ticket, None)
        if draft is None:
          found = ("event.ticket", event.ticket, None)
        else:
          again = driver.draft(draft, event.time_s)
          found = _difference("event", event, again)
      if found is None:
        driver.handle(event)
        replayed = driver.recording.steps[-1].actions
        for action in replayed:
          if isinstance(action, sch.Draft):
            asked[action.ticket] = action
        found = _difference("actions", actions, replayed)
      if found is not None:
        return Difference(index, event.time_s, *found)
  finally:
    driver.recording = outer
  return None


def _difference(
  where: str, one: Any, other: Any
) -> tuple[str, Any, Any] | None:
  """Returns `(path, recorded, replayed)` of the first value that differs."""
  if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
    one, other = one.tolist(), other.tolist()
  if type(one) is not type(other):
    return where, one, other
  if isinstance(one, list | tuple) and not hasattr(one, "_fields"):
    for i, (a, b) in enumerate(zip(one, other, strict=False)):
      found = _difference(f"{where}[{i}]", a, b)
      if found is not None:
        return found
    if len(one) == len(other):
      return None
    i = min(len(one), len(other))
    rest = [x[i] if i < len(x) else None for x in (one, other)]
    return f"{where}[{i}]", rest[0], rest[1]
  for name in _fields(one):
    if name == "text_of":
      continue
    found = _difference(
      f"{where}.{name}", getattr(one, name), getattr(other, name)
    )
    if found is not None:
      return found
  if _fields(one) or one == other or (one != one and other != other):
    return None
  return where, one, other


def _fields(value: Any) -> tuple[str, ...]:
  """Returns the names of a record's fields; none for anything else."""
  if dataclasses.is_dataclass(value):
    return tuple(field.name for field in dataclasses.fields(value))
  return getattr(value, "_fields", ())


def _plain(value: Any) -> Any:
  """Returns a value as JSON has it: records as objects that name their type,
  arrays with theirs, numbers that JSON lacks by name."""
  if isinstance(value, np.ndarray):
    items = [_plain(item) for item in value.tolist()]
    return {"$": "array", "dtype": value.dtype.name, "items": items}
  if isinstance(value, frozenset):
    return {"$": "set", "items": sorted(value)}
  if _fields(value):
    fields = {
      name: None if name == "text_of" else _plain(getattr(value, name))
      for name in _fields(value)
    }
    return {"$": type(value).__name__} | fields
  if isinstance(value, list | tuple):
    return [_plain(item) for item in value]
  if isinstance(value, np.generic):
    value = value.item()
  if isinstance(value, float) and not math.isfinite(value):
    return {"$": "float", "value": str(value)}
  return value


def _object(value: Any, text_of: Any) -> Any:
  """Returns what `_plain` was given; only types that may occur are made."""
  if isinstance(value, list):
    return tuple(_object(item, text_of) for item in value)
  if not isinstance(value, dict):
    return value
  fields = {k: _object(v, text_of) for k, v in value.items() if k != "$"}
  match value.get("$"):
    case "float":
      return float(fields["value"])
    case "set":
      return frozenset(fields["items"])
    case "array" if fields["dtype"] in _DTYPES:
      return np.asarray(fields["items"], fields["dtype"])
    case name if name in _TYPES:
      if name == "Stop":
        fields["text_of"] = text_of
      return _TYPES[name](**fields)
  raise ValueError(f"not a recording: a value of type {value.get('$')!r}")
