# SPDX-License-Identifier: Apache-2.0
"""The command line end to end: the real model, over sockets and virtually."""

import json
import pathlib
import re
import subprocess
import sys

import pytest

from experiments.decode import main

ROOT = pathlib.Path(__file__).resolve().parents[2]


def decode(*arguments, timeout=240):
  return subprocess.run(
    [sys.executable, "-m", "experiments.decode", *arguments],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=timeout,
    check=False,
  )


def tokens_of(directory, arm):
  result = json.loads((directory / "result.json").read_text())
  return [o["tokens"] for o in result["arms"][arm]["outcomes"]]


@pytest.fixture(scope="module")
def ring(tmp_path_factory):
  """Two prompts one after the other, over two stage processes."""
  directory = tmp_path_factory.mktemp("ring")
  done = decode(
    *("--stages", "2", "--limit", "2", "--max-new-tokens", "16"),
    *("--lap-ms", "20", "--row-buckets", "8", "32", "--max-nodes", "31"),
    *("--slot-buckets", "256", "--out", str(directory)),
  )
  assert done.returncode == 0, done.stderr
  return directory, done.stdout


def test_last_line_and_run_directory(ring):
  directory, stdout = ring
  last = stdout.strip().splitlines()[-1]
  found = re.fullmatch(
    r"identical=2/2 tokens_per_lap=([\d.]+) speedup=([\d.]+)", last
  )
  assert found, last
  assert float(found[1]) > 1
  names = {path.name for path in directory.iterdir()}
  assert names >= {
    *("result.json", "plain.json", "profile.json", "timeline.png"),
    *("trace-plain.json", "trace-speculative.json", "cluster.toml"),
    *("stage-0.log", "stage-1.log", "summary.txt"),
  }
  result = json.loads((directory / "result.json").read_text())
  assert result["config"]["max_new_tokens"] == 16
  assert {"python", "jax"} <= set(result["versions"])
  classes = result["arms"]["speculative"]["bytes_per_token"]
  assert classes["activations"] > classes["ids"] > 0


def test_text_is_streamed(ring):
  directory, stdout = ring
  from wanspec_jax import models

  tokenizer = models.load_tokenizer("smollm2")
  for tokens in tokens_of(directory, "plain"):
    first_line = tokenizer.decode(tokens).strip().splitlines()[0]
    assert stdout.count(first_line) == 2, "once plain, once speculative"


def test_virtual_world_decodes_the_same_in_as_many_laps(ring, tmp_path):
  """Same profile: same tokens, same laps per prompt."""
  directory, _ = ring
  done = decode(
    *("--stages", "2", "--limit", "2", "--max-new-tokens", "16"),
    *("--lap-ms", "20", "--row-buckets", "8", "32", "--max-nodes", "31"),
    *("--slot-buckets", "256", "--world", "virtual", "--no-plain"),
    *("--profile", str(directory / "profile.json")),
    *("--out", str(tmp_path), "--no-stream"),
  )
  assert done.returncode == 0, done.stderr
  assert tokens_of(tmp_path, "speculative") == tokens_of(directory, "plain")

  def rounds(path):
    result = json.loads((path / "result.json").read_text())
    return [o["rounds"] for o in result["arms"]["speculative"]["outcomes"]]

  assert rounds(tmp_path) == rounds(directory)


@pytest.mark.parametrize(
  ("arguments", "message"),
  [
    (("--max-new-tokens", "0"), "max_new_tokens"),
    (("--config", "nowhere"), "must be one of"),
    (("--prompts", "missing.jsonl"), "missing.jsonl"),
    (("--model", "missing.gguf"), "missing.gguf"),
    (("--cluster", "missing.toml"), "missing.toml"),
    (("--codec", "zip"), "zip"),
    (("--stages", "31"), "30 layers"),
    (("--no-such-option",), "no-such-option"),
    (("--verifier", "greedy", "--temperature", "0.8"), "greedy verifier"),
  ],
)
def test_wrong_input_is_named_without_a_traceback(arguments, message, capsys):
  with pytest.raises(SystemExit) as ended:
    main(list(arguments))
  captured = capsys.readouterr()
  assert ended.value.code not in (0, None)
  assert message in f"{ended.value.code}{captured.out}{captured.err}"


def test_a_configuration_file_without_a_configuration_is_named(tmp_path):
  path = tmp_path / "mine.py"
  for text in ("", "get_config = 1", "def get_config():\n  return 1"):
    path.write_text(text)
    with pytest.raises(SystemExit, match=r"mine\.py: must have get_config"):
      main(["--config", str(path)])


def test_keys_reports_without_a_traceback(tmp_path):
  done = subprocess.run(
    [
      sys.executable,
      "-m",
      "experiments.keys",
      "--dir",
      str(tmp_path),
      "--hosts",
      "A_B=192.0.2.1",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    timeout=60,
    check=False,
  )
  assert done.returncode == 1 and "Traceback" not in done.stderr
  assert done.stderr.startswith("experiments.keys: ") and "A_B" in done.stderr


def test_the_command_line_reports_without_a_traceback():
  done = decode("--prompts", "missing.jsonl", timeout=60)
  assert done.returncode == 1
  assert "missing.jsonl" in done.stderr
  assert "Traceback" not in done.stderr
