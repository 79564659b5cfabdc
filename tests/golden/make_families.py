# SPDX-License-Identifier: Apache-2.0
"""Makes `families/`: small random Hugging Face models and their logits.

Run with torch and transformers (extra `parity`), from the repository root:
`python tests/golden/make_families.py`. Each folder holds a checkpoint as
transformers writes it and `golden.npz`: 24 `tokens` and the `[24, 97]` float32
`logits` that transformers computes from the checkpoint as read back from disk.
"""

import json
import pathlib
import shutil

import numpy as np
import torch
import transformers

ROOT = pathlib.Path(__file__).parent / "families"
LENGTH = 24

SMALL = {
  "vocab_size": 97,
  "hidden_size": 32,
  "intermediate_size": 48,
  "num_hidden_layers": 3,
  "num_attention_heads": 4,
  "num_key_value_heads": 2,
  "max_position_embeddings": 256,
  "rms_norm_eps": 1e-5,
  "bos_token_id": 1,
  "eos_token_id": 2,
  "tie_word_embeddings": False,
}
LLAMA3 = {
  "rope_type": "llama3",
  "rope_theta": 10000.0,
  "factor": 8.0,
  "low_freq_factor": 1.0,
  "high_freq_factor": 4.0,
  # Short, so that all three of the rule's ranges occur among 24 positions.
  "original_max_position_embeddings": 64,
}
YARN = {
  "rope_type": "yarn",
  "rope_theta": 10000.0,
  "factor": 4.0,
  "beta_fast": 8.0,
  "beta_slow": 1.0,
  "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.5}
PLAIN = {"rope_type": "default", "rope_theta": 500.0}

# name: (model type, config, dtype on disk, shard size, legacy rotary keys)
FAMILIES = {
  "llama_llama3": (
    "llama",
    {"rope_parameters": LLAMA3, "head_dim": 16},
    torch.float32,
    None,
    False,
  ),
  "llama_linear_tied": (
    "llama",
    {"rope_parameters": LINEAR, "tie_word_embeddings": True},
    torch.bfloat16,
    None,
    True,
  ),
  "llama_yarn": (
    "llama",
    {"rope_parameters": YARN, "head_dim": 16},
    torch.bfloat16,
    None,
    True,
  ),
  "mistral_sharded": (
    "mistral",
    {"rope_parameters": PLAIN, "sliding_window": None, "head_dim": 12},
    torch.bfloat16,
    "12KB",
    False,
  ),
  "qwen2": (
    "qwen2",
    {"rope_parameters": PLAIN, "num_hidden_layers": 4},
    torch.float16,
    None,
    True,
  ),
  "qwen3_tied": (
    "qwen3",
    {"rope_parameters": PLAIN, "head_dim": 16, "tie_word_embeddings": True},
    torch.bfloat16,
    None,
    False,
  ),
}


def make(name, model_type, changes, dtype, shard_size, legacy):
  folder = ROOT / name
  config = transformers.AutoConfig.for_model(model_type, **(SMALL | changes))
  model = transformers.AutoModelForCausalLM.from_config(config)
  generator = torch.Generator().manual_seed(sum(name.encode()))
  with torch.no_grad():
    for key, value in model.named_parameters():
      noise = torch.randn(value.shape, generator=generator)
      scale, mean = (0.3, 1.0) if "norm" in key else (0.25, 0.0)
      value.copy_(mean + scale * noise)
  model = model.to(dtype)
  limit = {} if shard_size is None else {"max_shard_size": shard_size}
  model.save_pretrained(folder, **limit)
  (folder / "generation_config.json").unlink()
  for shard in folder.glob("*.safetensors"):
    shard.chmod(0o644)
  path = folder / "config.json"
  written = json.loads(path.read_text())
  if legacy:
    rope = written.pop("rope_parameters")
    written["rope_theta"] = rope.pop("rope_theta")
    if rope["rope_type"] == "default":
      rope = None
    written["rope_scaling"] = rope
  path.write_text(json.dumps(written, indent=1, sort_keys=True) + "\n")

  model = transformers.AutoModelForCausalLM.from_pretrained(
    folder, dtype=torch.float32, attn_implementation="eager"
  )
  tokens = torch.randint(0, 97, (LENGTH,), generator=generator)
  with torch.no_grad():
    logits = model(tokens[None]).logits[0]
  np.savez_compressed(
    folder / "golden.npz",
    tokens=tokens.numpy().astype(np.int32),
    logits=logits.numpy().astype(np.float32),
  )
  print(name, "max |logit|", float(logits.abs().max()))


def main():
  shutil.rmtree(ROOT, ignore_errors=True)
  for name, settings in FAMILIES.items():
    make(name, *settings)


if __name__ == "__main__":
  main()
