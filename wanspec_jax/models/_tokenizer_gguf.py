# SPDX-License-Identifier: Apache-2.0
"""Builds a `tokenizers.Tokenizer` from the vocabulary in GGUF metadata."""

from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers
from tokenizers import (
  AddedToken,
  Regex,
  decoders,
  models,
  normalizers,
  pre_tokenizers,
  processors,
)

# tokenizer.ggml.token_type
_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
# DIGITS stands for how many digits a piece may have.
_TIKTOKEN = (
  _CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS"
  r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# Applied one after the other. `default` is what llama.cpp does with files that
# name no pre-tokenizer.
_SPLITS = {
  "llama-bpe": (_TIKTOKEN.replace("DIGITS", "{1,3}"),),
  "qwen2": (_TIKTOKEN.replace("DIGITS", ""),),
  "default": (
    r"[\p{P}\$\+<=>\^~\|]+",
    r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)",
    r"\p{N}+",
    r"[0-9][0-9][0-9]",
  ),
}
_DIGITS_FIRST = ("smollm", "starcoder", "refact", "command-r")
PRE_TOKENIZERS = ("gpt-2", *_DIGITS_FIRST, *_SPLITS)


def _required(metadata: Mapping[str, Any], key: str) -> Any:
  if key not in metadata:
    raise ValueError(f"GGUF metadata: {key} is missing")
  return metadata[key]


def merges_from_scores(
  tokens: Sequence[str], scores: Sequence[float]
) -> list[tuple[str, str]]:
  """Returns BPE merges that act as a SentencePiece vocabulary with scores.

  SentencePiece joins the neighbours whose concatenation has the highest score.
  So every way to cut a piece into two others is a merge of the rank of that
  piece's score.
  """
  ids = {token: i for i, token in enumerate(tokens)}
  ranked = []
  for token, score in zip(tokens, scores, strict=True):
    for cut in range(1, len(token)):
      left, right = token[:cut], token[cut:]
      if left in ids and right in ids:
        ranked.append((-score, ids[token], ids[left], ids[right], left, right))
  ranked.sort()
  return [(left, right) for *_, left, right in ranked]


def _byte_level(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """GPT-2 style: byte-level BPE behind a pre-tokenizer that has a name."""
  pre = metadata.get("tokenizer.ggml.pre", "default")
  if pre not in PRE_TOKENIZERS:
    raise ValueError(
      f"GGUF metadata: tokenizer.ggml.pre = {pre!r}: must be one of"
      f" {PRE_TOKENIZERS}"
    )
  tokens = _required(metadata, "tokenizer.ggml.tokens")
  merges = _required(metadata, "tokenizer.ggml.merges")
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=[_pair(merge) for merge in merges],
      # A piece that is a token is that token, whatever the merges say.
      ignore_merges=pre == "llama-bpe",
    )
  )
  steps: list[Any] = []
  if pre in _DIGITS_FIRST:
    steps.append(pre_tokenizers.Digits(individual_digits=True))
  for pattern in _SPLITS.get(pre, ()):
    steps.append(pre_tokenizers.Split(Regex(pattern), "isolated"))
  steps.append(
    pre_tokenizers.ByteLevel(
      add_prefix_space=False, use_regex=pre not in _SPLITS
    )
  )
  if pre == "qwen2":
    tokenizer.normalizer = normalizers.NFC()
  tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
  tokenizer.decoder = decoders.ByteLevel()
  return tokenizer


def _pair(merge: str) -> tuple[str, str]:
  left, _, right = merge.partition(" ")
  return left, right


def _sentencepiece(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Llama 2 style: BPE over text with `▁` for spaces, bytes as a fallback."""
  tokens = _required(metadata, "tokenizer.ggml.tokens")
  scores = _required(metadata, "tokenizer.ggml.scores")
  unknown = metadata.get("tokenizer.ggml.unknown_token_id", 0)
  tokenizer = tokenizers.Tokenizer(
    models.BPE(
      vocab={token: i for i, token in enumerate(tokens)},
      merges=merges_from_scores(tokens, scores),
      unk_token=tokens[unknown],
      fuse_unk=True,
      byte_fallback=True,
    )
  )
  spaces: list[Any] = [normalizers.Replace(" ", "▁")]
  strip: list[Any] = []
  if metadata.get("tokenizer.ggml.add_space_prefix", True):
    spaces.insert(0, normalizers.Prepend("▁"))
    strip.append(decoders.Strip(content=" ", left=1, right=0))
  tokenizer.normalizer = normalizers.Sequence(spaces)
  tokenizer.decoder = decoders.Sequence(
    [
      decoders.Replace("▁", " "),
      decoders.ByteFallback(),
      decoders.Fuse(),
      *strip,
    ]
  )
  return tokenizer


def _add_special(
  tokenizer: tokenizers.Tokenizer, metadata: Mapping[str, Any]
) -> None:
  """Declares control tokens and the tokens that frame a text."""
  tokens = metadata["tokenizer.ggml.tokens"]
  types = metadata.get("tokenizer.ggml.token_type", [1] * len(tokens))
  special = [
    AddedToken(token, special=True, normalized=False)
    for token, kind in zip(tokens, types, strict=True)
    if kind in (_UNKNOWN, _CONTROL)
  ]
  user = [
    AddedToken(token, special=False, normalized=False)
    for token, kind in zip(tokens, types, strict=True)
    if kind == _USER_DEFINED
  ]
  tokenizer.add_special_tokens(special)
  tokenizer.add_tokens(user)

  # The defaults are llama.cpp's for files that do not say.
  starts = (
    metadata["tokenizer.ggml.model"] == "llama"
    or metadata.get("tokenizer.ggml.pre") == "llama-bpe"
  )
  template = ["$A"]
  framing = []
  bos = metadata.get("tokenizer.ggml.bos_token_id")
  eos = metadata.get("tokenizer.ggml.eos_token_id")
  if metadata.get("tokenizer.ggml.add_bos_token", starts) and bos is not None:
    template.insert(0, tokens[bos])
    framing.append((tokens[bos], bos))
  if metadata.get("tokenizer.ggml.add_eos_token", False) and eos is not None:
    template.append(tokens[eos])
    framing.append((tokens[eos], eos))
  if framing:
    tokenizer.post_processor = processors.TemplateProcessing(
      single=template, special_tokens=framing
    )


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
  """Returns the tokenizer that GGUF metadata describes.

  Models `gpt2` (byte-level BPE, with a pre-tokenizer among `PRE_TOKENIZERS`)
  and `llama` (SentencePiece BPE with scores).

  Raises:
    ValueError: naming the key that is missing or has an unsupported value.
  """
  builders = {"gpt2": _byte_level, "llama": _sentencepiece}
  model = metadata.get("tokenizer.ggml.model")
  if model not in builders:
    raise ValueError(
      f"GGUF metadata: tokenizer.ggml.model = {model!r}: must be one of"
      f" {tuple(builders)}"
    )
  tokenizer = builders[model](metadata)
  _add_special(tokenizer, metadata)
  return tokenizer
