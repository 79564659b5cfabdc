# SPDX-License-Identifier: Apache-2.0
"""Logits and greedy text equal what transformers computes (tests/golden)."""

import json
import pathlib

import numpy as np
import pytest

from wanspec_jax.models import load_config, load_stage, load_tokenizer
from wanspec_jax.models._decoder import forward_logits

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
FAMILIES = sorted(path.name for path in (GOLDEN / "families").iterdir())


def test_all_families_are_here():
  kinds = {load_config(GOLDEN / "families" / name).family for name in FAMILIES}
  assert kinds == {"llama", "mistral", "qwen2", "qwen3"}


@pytest.mark.parametrize("name", FAMILIES)
def test_family_logits(name):
  path = GOLDEN / "families" / name
  golden = np.load(path / "golden.npz")
  config = load_config(path)
  params = load_stage(path, config, first_layer=0, num_layers=config.num_layers)
  logits = np.asarray(forward_logits(params, golden["tokens"], config=config))
  expected = golden["logits"]
  error = np.max(np.abs(logits - expected)) / np.max(np.abs(expected))
  assert error < 1e-4


def test_smollm2_greedy_text():
  """Greedy decoding of the embedded model gives the tokens of transformers.

  One forward over prompt and golden text: greedy decoding yields the golden
  tokens if and only if each is the argmax after those before it.
  """
  cases = json.loads((GOLDEN / "smollm2_greedy.json").read_text("utf-8"))[
    "cases"
  ]
  tokenizer = load_tokenizer("smollm2")
  config = load_config("smollm2")
  params = load_stage(
    "smollm2", config, first_layer=0, num_layers=config.num_layers
  )
  assert len(cases) == 5
  for case in cases:
    messages = [{"role": "user", "content": case["prompt"]}]
    prompt = tokenizer.apply_chat_template(messages)
    assert prompt == case["prompt_ids"]
    text = prompt + case["tokens"]
    padded = np.zeros(128, np.int32)  # one length, one compilation
    padded[: len(text)] = text
    logits = np.asarray(forward_logits(params, padded, config=config))
    logits = logits[len(prompt) - 1 : len(text) - 1]
    assert logits.argmax(axis=-1).tolist() == case["tokens"]
    top = np.sort(logits, axis=-1)
    margins = top[:, -1] - top[:, -2]
    np.testing.assert_allclose(margins, case["margins"], atol=1e-3)
    assert tokenizer.decode(case["tokens"]) == case["text"]
