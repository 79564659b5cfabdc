# SPDX-License-Identifier: Apache-2.0
"""Each format on lines written here as the published files have them."""

import gzip
import json

import pytest

from experiments import _rundir
from training import Prompt, load_prompts

SPEC_BENCH = [
  {
    "question_id": 81,
    "category": "writing",
    "turns": ["Write a letter.", "Shorten it."],
  },
  {
    "question_id": 241,
    "category": "qa",
    "turns": ["Who wrote it?"],
    "reference": ["x"],
  },
  {"question_id": 82, "category": "writing", "turns": ["Write a poem."]},
  {"question_id": 242, "category": "qa", "turns": ["When was it?"]},
]


def write_lines(path, rows):
  path.write_text("".join(json.dumps(row) + "\n" for row in rows))
  return path


def test_spec_bench(tmp_path):
  prompts = load_prompts(write_lines(tmp_path / "question.jsonl", SPEC_BENCH))
  assert prompts[0] == Prompt(
    id="81",
    category="writing",
    text="Write a letter.",
    turns=("Write a letter.", "Shorten it."),
  )
  assert [p.id for p in prompts] == ["81", "241", "82", "242"]


@pytest.mark.parametrize(
  "options, ids",
  [
    ({"per_category": 1}, ["81", "241"]),
    ({"limit": 3}, ["81", "241", "82"]),
    ({"per_category": 1, "limit": 1}, ["81"]),
    ({"per_category": 9, "limit": 9}, ["81", "241", "82", "242"]),
  ],
)
def test_selection_keeps_file_order(tmp_path, options, ids):
  path = write_lines(tmp_path / "q.jsonl", SPEC_BENCH)
  assert [p.id for p in load_prompts(path, **options)] == ids


def test_human_eval_gz_keeps_the_prompt_verbatim(tmp_path):
  code = 'def twice(x: int) -> int:\n    """Returns 2x.\n    >>> twice(2)\n'
  row = {
    "task_id": "HumanEval/0",
    "prompt": code,
    "entry_point": "twice",
    "canonical_solution": "    return 2 * x\n",
  }
  path = tmp_path / "HumanEval.jsonl.gz"
  path.write_bytes(gzip.compress(json.dumps(row).encode()))
  (prompt,) = load_prompts(path)
  assert (prompt.id, prompt.category) == ("HumanEval/0", "coding")
  request, block = prompt.text.split("\n\n", 1)
  assert "Complete" in request
  assert block == f"```python\n{code}```"
  assert "return 2 * x" not in prompt.text


def test_gzip_is_recognised_without_its_ending(tmp_path):
  path = tmp_path / "prompts.jsonl"
  path.write_bytes(gzip.compress(b'{"text": "Hello."}\n'))
  assert load_prompts(path)[0].text == "Hello."


def test_gsm8k_has_no_ids_of_its_own(tmp_path):
  rows = [{"question": f"{n} + 1?", "answer": "#### 1"} for n in range(2)]
  path = tmp_path / "test.jsonl"
  path.write_text(json.dumps(rows[0]) + "\n\n" + json.dumps(rows[1]))
  prompts = load_prompts(path)
  assert [p.id for p in prompts] == ["test:1", "test:3"]
  assert [p.text for p in prompts] == ["0 + 1?", "1 + 1?"]
  assert {p.category for p in prompts} == {"math_reasoning"}


def test_own_lines_and_line_separators_within_texts(tmp_path):
  path = tmp_path / "own.jsonl"
  path.write_text(
    '\ufeff{"prompt": "a\u2028b", "id": "x", "category": "odd"}\n'
    '{"text": "c"}\n',
    encoding="utf-8",
  )
  first, second = load_prompts(path)
  assert first == Prompt("x", "odd", "a\u2028b", ("a\u2028b",))
  assert (second.id, second.text) == ("own:2", "c")


def test_a_text_file_is_one_prompt(tmp_path):
  path = tmp_path / "question.txt"
  path.write_text('{"prompt": 1}\n\nSecond paragraph.\n')
  (prompt,) = load_prompts(path)
  assert prompt.text == '{"prompt": 1}\n\nSecond paragraph.'
  assert prompt.id == "question"


@pytest.mark.parametrize(
  "line, wrong",
  [
    ("{", "not JSON"),
    ("[1]", "must be a JSON object"),
    ('{"answer": "x"}', "must have one of turns"),
    ('{"turns": []}', "must be a list of texts"),
    ('{"turns": ["a", 3]}', r"turns\[1\] = 3"),
    ('{"question": "  "}', "question = '  '"),
    ('{"text": "a", "category": 3}', "category = 3"),
    ('{"text": "a", "id": true}', "id = True"),
    ('{"text": "a", "id": 1}', "'1' is taken"),
  ],
)
def test_errors_name_file_line_and_fault(tmp_path, line, wrong):
  path = tmp_path / "bad.jsonl"
  path.write_text('{"text": "fine", "id": 1}\n\n' + line + "\n")
  with pytest.raises(ValueError, match=f"bad.jsonl:3: .*{wrong}"):
    load_prompts(path)


def test_broken_files(tmp_path):
  path = tmp_path / "bad.jsonl"
  for data, wrong in (
    (b"\n\n", "holds no prompts"),
    (b'{"text": "a"}\n\xff', "bad.jsonl:2: must be UTF-8"),
    (gzip.compress(b'{"text": "a"}')[:-4], "broken gzip"),
  ):
    path.write_bytes(data)
    with pytest.raises(ValueError, match=wrong):
      load_prompts(path)
  (tmp_path / "empty.txt").write_text(" \n")
  with pytest.raises(ValueError, match=r"empty\.txt: has no text"):
    load_prompts(tmp_path / "empty.txt")


@pytest.mark.parametrize("name", ["per_category", "limit"])
def test_counts_must_be_positive(tmp_path, name):
  path = write_lines(tmp_path / "q.jsonl", SPEC_BENCH)
  with pytest.raises(ValueError, match=f"{name} = 0: must be >= 1"):
    load_prompts(path, **{name: 0})


def test_bundled_prompts():
  prompts = _rundir.bundled_prompts()
  assert 4 <= len(prompts) <= 6
  assert len({p.category for p in prompts}) == len(prompts)
  assert _rundir.bundled_prompts(limit=2) == prompts[:2]
  with pytest.raises(ValueError, match=r"prompts = 'no'.*'demo'"):
    _rundir.bundled_prompts("no")
