# SPDX-License-Identifier: Apache-2.0
"""Makes `smollm2_greedy.json`: SmolLM2's greedy text as transformers sees it.

Run with torch, transformers, gguf and accelerate (which transformers asks for
when it reads GGUF), from the repository root:
`python tests/golden/make_smollm2.py FOLDER/SmolLM2-135M-Instruct.Q4_1.gguf`.
Prompts go through the chat template and the tokenizer that transformers builds
from the GGUF file; the model runs in float32 over dequantised weights.
"""

import json
import pathlib
import sys

import torch
import transformers

OUT = pathlib.Path(__file__).parent / "smollm2_greedy.json"
NUM_TOKENS = 64

PROMPTS = (
  "Write a Python function that returns the n-th Fibonacci number.",
  "List 7 things to pack for a 3-day hike, one per line.",
  "Tell me a short story about a lighthouse keeper who finds a bottle.",
  "A shop sells pens at $1.25 each. What do 48 pens cost? Show the steps.",
  "Translate into French: “The weather is lovely, isn’t it?”",
)


def main(path):
  path = pathlib.Path(path)
  tokenizer = transformers.AutoTokenizer.from_pretrained(
    path.parent, gguf_file=path.name
  )
  model = transformers.AutoModelForCausalLM.from_pretrained(
    path.parent,
    gguf_file=path.name,
    dtype=torch.float32,
    attn_implementation="eager",
  )
  cases = []
  for prompt in PROMPTS:
    ids = tokenizer.apply_chat_template(
      [{"role": "user", "content": prompt}],
      add_generation_prompt=True,
      return_dict=False,
    )
    tokens, margins = [], []
    past, feed = None, torch.tensor([ids])
    with torch.no_grad():
      for _ in range(NUM_TOKENS):
        out = model(feed, past_key_values=past, use_cache=True)
        past = out.past_key_values
        values, indices = out.logits[0, -1].topk(2)
        tokens.append(int(indices[0]))
        margins.append(round(float(values[0] - values[1]), 4))
        feed = indices[:1][None]
    cases.append(
      {
        "prompt": prompt,
        "prompt_ids": list(ids),
        "tokens": tokens,
        "margins": margins,
        "text": tokenizer.decode(tokens, skip_special_tokens=True),
      }
    )
    print(repr(cases[-1]["text"]), "smallest margin", min(margins))
  versions = {
    "torch": torch.__version__,
    "transformers": transformers.__version__,
  }
  lines = ",\n".join(json.dumps(case, ensure_ascii=False) for case in cases)
  OUT.write_text(
    f'{{"versions": {json.dumps(versions)}, "cases": [\n{lines}\n]}}\n',
    encoding="utf-8",
  )


if __name__ == "__main__":
  main(sys.argv[1])
