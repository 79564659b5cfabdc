# SPDX-License-Identifier: Apache-2.0
"""Prompts from the files that published studies use, and from plain ones."""

import collections
import dataclasses
import gzip
import json
import os
import pathlib
import zlib
from collections.abc import Mapping
from typing import Any

_GZIP_MAGIC = b"\x1f\x8b"
_COMPLETE = (
  "Complete the following Python function. Reply with the whole function in "
  "one code block."
)


@dataclasses.dataclass(frozen=True)
class Prompt:
  """One prompt, before any chat template.

  Attributes:
    id: unique within its file.
    category: e.g. `"summarization"`.
    text: the first user message.
    turns: every user message, the first included. What the assistant says in
      between is the target's own answer, so it is not stored.
  """

  id: str
  category: str
  text: str
  turns: tuple[str, ...]

  def __post_init__(self):
    if not self.text.strip():
      raise ValueError("Prompt.text is empty: must have text")
    if not self.turns or self.turns[0] != self.text:
      raise ValueError("Prompt.turns: its first message must be Prompt.text")


def load_prompts(
  path: str | os.PathLike[str],
  *,
  per_category: int | None = None,
  limit: int | None = None,
) -> tuple[Prompt, ...]:
  """Returns the prompts of a file, in file order.

  A file named `*.txt` is one prompt, line breaks included. Any other file holds
  one JSON object a line (empty lines are skipped), each recognised by its keys:

  | keys | source | category | text |
  |---|---|---|---|
  | `turns` | Spec-Bench, MT-Bench | its `category` | the first turn |
  | `task_id`, `prompt` | HumanEval | `coding` | see below |
  | `question` | GSM8K | `math_reasoning` | the question |
  | `prompt` or `text` | your own | `prompt` | as it is |

  HumanEval's prompts are the head of a function, made for models that continue
  text. Here they become a user message: a line that asks for the whole
  function, then the prompt, unchanged, in a Python code block.

  `category` overrides the table's. Ids come from `question_id`, `task_id` or
  `id`; lines without one are called after the file and line, as in `test:12`.
  Reference answers are not read. A file compressed with gzip is recognised by
  its first bytes.

  Args:
    path: the file.
    per_category: keeps the first so many of each category.
    limit: keeps the first so many of what is left.

  Raises:
    ValueError: naming the file, the line and what is wrong with it.
    OSError: if the file cannot be read.

  References:
    Xia et al., "Unlocking Efficiency in Large Language Model Inference"
    (Spec-Bench), https://arxiv.org/abs/2401.07851; Chen et al. (HumanEval),
    https://arxiv.org/abs/2107.03374; Cobbe et al. (GSM8K),
    https://arxiv.org/abs/2110.14168.
  """
  for name, value in (("per_category", per_category), ("limit", limit)):
    if value is not None and value < 1:
      raise ValueError(f"{name} = {value}: must be >= 1")
  path = pathlib.Path(path)
  name = path.name.removesuffix(".gz")
  text = _read(path)
  stem = pathlib.PurePath(name).stem
  if name.endswith(".txt"):
    if not text.strip():
      raise ValueError(f"{path}: has no text")
    prompts = [
      Prompt(
        id=stem, category="prompt", text=text.strip(), turns=(text.strip(),)
      )
    ]
  else:
    prompts = _json_lines(path, text, stem)
  if per_category is not None:
    seen: collections.Counter[str] = collections.Counter()
    kept = []
    for prompt in prompts:
      seen[prompt.category] += 1
      if seen[prompt.category] <= per_category:
        kept.append(prompt)
    prompts = kept
  return tuple(prompts[:limit])


def _read(path: pathlib.Path) -> str:
  data = path.read_bytes()
  if data.startswith(_GZIP_MAGIC):
    try:
      data = gzip.decompress(data)
    except (OSError, EOFError, zlib.error) as error:
      raise ValueError(f"{path}: broken gzip file: {error}") from error
  try:
    return data.decode("utf-8-sig")
  except UnicodeDecodeError as error:
    line = data[: error.start].count(b"\n") + 1
    raise ValueError(f"{path}:{line}: must be UTF-8 text: {error}") from error


def _json_lines(path: pathlib.Path, text: str, stem: str) -> list[Prompt]:
  prompts: dict[str, Prompt] = {}
  # Not splitlines: JSON strings may hold U+2028 and its like unescaped.
  for number, line in enumerate(text.split("\n"), 1):
    if not line.strip():
      continue
    try:
      prompt = _prompt(json.loads(line), f"{stem}:{number}")
      if prompt.id in prompts:
        raise ValueError(f"id {prompt.id!r} is taken by an earlier line")
    except json.JSONDecodeError as error:
      raise ValueError(f"{path}:{number}: not JSON: {error}") from error
    except ValueError as error:
      raise ValueError(f"{path}:{number}: {error}") from error
    prompts[prompt.id] = prompt
  if not prompts:
    raise ValueError(f"{path}: holds no prompts")
  return list(prompts.values())


def _prompt(row: Any, default_id: str) -> Prompt:
  if not isinstance(row, dict):
    raise ValueError(f"a {type(row).__name__}: must be a JSON object")
  if "turns" in row:
    category, turns = "prompt", row["turns"]
    if not isinstance(turns, list) or not turns:
      raise ValueError(f"turns = {turns!r}: must be a list of texts, not empty")
    for i, turn in enumerate(turns):
      _check_text(f"turns[{i}]", turn)
  elif "task_id" in row and "prompt" in row:
    category, turns = "coding", [_as_request(_text(row, "prompt"))]
  elif "question" in row:
    category, turns = "math_reasoning", [_text(row, "question")]
  elif "prompt" in row:
    category, turns = "prompt", [_text(row, "prompt")]
  elif "text" in row:
    category, turns = "prompt", [_text(row, "text")]
  else:
    raise ValueError(
      f"keys {sorted(row)}: must have one of turns, question, prompt, text"
    )
  if "category" in row:
    category = _text(row, "category")
  for key in ("question_id", "task_id", "id"):
    if key in row:
      if isinstance(row[key], bool) or not isinstance(row[key], int | str):
        raise ValueError(f"{key} = {row[key]!r}: must be a number or a text")
      default_id = str(row[key])
      break
  return Prompt(
    id=default_id, category=category, text=turns[0], turns=tuple(turns)
  )


def _text(row: Mapping[str, Any], key: str) -> str:
  _check_text(key, row[key])
  return row[key]


def _check_text(name: str, value: Any) -> None:
  if not isinstance(value, str) or not value.strip():
    raise ValueError(f"{name} = {value!r}: must be a text, not empty")


def _as_request(code: str) -> str:
  line_break = "" if code.endswith("\n") else "\n"
  return f"{_COMPLETE}\n\n```python\n{code}{line_break}```"
