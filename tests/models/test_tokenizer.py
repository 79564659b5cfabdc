# SPDX-License-Identifier: Apache-2.0
"""Tokenizers: ids, chat templates, and text that grows token by token."""

import itertools
import json
import pathlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax.models import Tokenizer, load_tokenizer
from wanspec_jax.models._tokenizer import _byte_alphabet
from wanspec_jax.models._tokenizer_gguf import (
  PRE_TOKENIZERS,
  build_gguf_tokenizer,
)

GOLDEN = pathlib.Path(__file__).parents[1] / "golden"
CHAT = (
  "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' + m.content"
  " + '<|im_end|>\\n' }}{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
HYPOTHESIS = {"derandomize": True, "deadline": None}


def _bytes_metadata(pre="smollm", merges=(), **changes):
  """A byte-level vocabulary: 3 control tokens, 256 bytes, what merges make."""
  control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
  tokens = control + sorted(_byte_alphabet())
  tokens += [left + right for left, right in merges]
  return {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": pre,
    "tokenizer.ggml.tokens": tokens,
    "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3),
    "tokenizer.ggml.merges": [" ".join(pair) for pair in merges],
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
  } | changes


PIECES = ("▁", "a", "b", "c", "ab", "▁a", "bc", "ca", "▁ab", "abc", "▁▁", "aa")


def _scores_metadata(**changes):
  """A SentencePiece vocabulary; later pieces score lower."""
  tokens = ["<unk>", "<s>", "</s>"]
  tokens += [f"<0x{byte:02X}>" for byte in range(256)]
  types = [2, 3, 3] + [6] * 256 + [1] * len(PIECES)
  scores = [0.0] * len(tokens) + [-float(i) for i in range(len(PIECES))]
  return {
    "tokenizer.ggml.model": "llama",
    "tokenizer.ggml.tokens": [*tokens, *PIECES],
    "tokenizer.ggml.token_type": types,
    "tokenizer.ggml.scores": scores,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
  } | changes


def _pieces(pre, text):
  """How a pre-tokenizer cuts a text (`Ġ` is a space)."""
  built = build_gguf_tokenizer(_bytes_metadata(pre))
  return [piece for piece, _ in built.pre_tokenizer.pre_tokenize_str(text)]


@pytest.fixture(scope="module")
def smollm2():
  return load_tokenizer("smollm2")


@pytest.fixture(scope="module")
def small():
  return Tokenizer(
    build_gguf_tokenizer(_bytes_metadata()),
    eos_ids=[2],
    bos_id=1,
    chat_template=CHAT,
  )


def test_smollm2_ids_are_those_of_transformers(smollm2):
  cases = json.loads((GOLDEN / "smollm2_greedy.json").read_text("utf-8"))
  for case in cases["cases"]:
    messages = [{"role": "user", "content": case["prompt"]}]
    assert smollm2.apply_chat_template(messages) == case["prompt_ids"]
    assert smollm2.decode(case["tokens"]) == case["text"]
  assert smollm2.eos_ids == {0, 2} and smollm2.vocab_size == 49152
  assert smollm2.encode("<|im_end|>") == [2]


# SmolLM2 has no tokens for six control characters and for bytes F1 and above;
# `<`, `>` and `|` could spell a special token.
SMOLLM2_TEXT = st.characters(
  max_codepoint=0x3FFFF,
  exclude_characters="<>|\x04\x06\x13\x14\x16\x1d",
  exclude_categories=("Cs",),
)


@settings(max_examples=60, **HYPOTHESIS)
@given(st.text(alphabet=SMOLLM2_TEXT, max_size=40))
def test_smollm2_round_trip(smollm2, text):
  ids = smollm2.encode(text)
  assert smollm2.decode(ids, skip_special=False) == text
  stream = smollm2.stream()
  assert "".join(stream.push([i]) for i in ids) + stream.finish() == text


@settings(max_examples=60, **HYPOTHESIS)
@given(st.lists(st.integers(0, 49151), max_size=30), st.booleans())
def test_smollm2_stream_of_random_ids(smollm2, ids, skip):
  stream = smollm2.stream(skip_special=skip)
  text = "".join(stream.push([i]) for i in ids) + stream.finish()
  assert text == smollm2.decode(ids, skip_special=skip)


# Bytes above 127 only: most sequences are broken UTF-8, some are not.
@settings(max_examples=200, **HYPOTHESIS)
@given(st.lists(st.integers(0, 258) | st.integers(130, 258), max_size=12))
def test_stream_is_decode_of_all_whatever_the_bytes(small, ids):
  stream = small.stream()
  parts = [stream.push([i]) for i in ids]
  assert "".join(parts) + stream.finish() == small.decode(ids)


@settings(max_examples=100, **HYPOTHESIS)
@given(st.text(min_size=1, max_size=12))
def test_stream_gives_whole_characters_as_soon_as_possible(small, text):
  text = text.replace("<", "").replace("|", "")
  data, stream = text.encode(), small.stream()
  alphabet = {byte: char for char, byte in _byte_alphabet().items()}
  tokens = _bytes_metadata()["tokenizer.ggml.tokens"]
  ids = {token: i for i, token in enumerate(tokens)}
  given_out = ""
  for count, byte in enumerate(data, 1):
    given_out += stream.push([ids[alphabet[byte]]])
    # What the bytes so far spell in full, computed afresh.
    assert given_out == data[:count].decode(errors="ignore")
  assert stream.finish() == ""


def test_stream_does_not_decode_again(small):
  stream = small.stream()
  ids = small.encode("naïve – ünïcode 🚀 " * 3)
  expected = small.decode(ids)
  inner, small._tokenizer = small._tokenizer, None
  try:
    text = "".join(stream.push([i]) for i in ids) + stream.finish()
  finally:
    small._tokenizer = inner
  assert text == expected
  assert stream.push([10**6]) == ""  # a padded row of an embedding


def test_pre_tokenizers_cut_as_their_models_do():
  text = "I'll pay 1234 dollars"
  assert _pieces("smollm", text) == [
    "I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġdollars",
  ]  # fmt: skip
  assert _pieces("gpt-2", text) == ["I", "'ll", "Ġpay", "Ġ1234", "Ġdollars"]
  assert _pieces("llama-bpe", text) == [
    "I", "'ll", "Ġpay", "Ġ", "123", "4", "Ġdollars",
  ]  # fmt: skip
  assert _pieces("qwen2", text) == [
    "I", "'ll", "Ġpay", "Ġ", "1", "2", "3", "4", "Ġdollars",
  ]  # fmt: skip
  assert _pieces("qwen2", "x=(1)\n\n y") == [
    "x", "=(", "1", ")ĊĊ", "Ġy",
  ]  # fmt: skip
  assert _pieces("default", "a 1234!?") == ["a", "Ġ", "123", "4", "!?"]


@pytest.mark.parametrize("pre", PRE_TOKENIZERS)
def test_every_pre_tokenizer_round_trips(pre):
  merges = [("Ġ", "a"), ("Ã", "©"), ("1", "2"), ("Ġa", "b")]
  built = Tokenizer(build_gguf_tokenizer(_bytes_metadata(pre, merges)))
  text = "ab ab 12é — naïve\r\n\n  1234 'LL 𝔘"
  assert built.decode(built.encode(text)) == text
  assert built.encode(" ab") == [262]


def test_unknown_kinds_are_refused_by_name():
  with pytest.raises(ValueError, match=r"tokenizer\.ggml\.pre = 'tekken'"):
    build_gguf_tokenizer(_bytes_metadata("tekken"))
  with pytest.raises(ValueError, match=r"tokenizer\.ggml\.model = 'bert'"):
    build_gguf_tokenizer({"tokenizer.ggml.model": "bert"})
  metadata = _bytes_metadata()
  del metadata["tokenizer.ggml.merges"]
  with pytest.raises(ValueError, match=r"tokenizer\.ggml\.merges is missing"):
    build_gguf_tokenizer(metadata)


def test_start_and_end_tokens_are_added_when_asked_for():
  def framed(**changes):
    changes = {f"tokenizer.ggml.{k}": v for k, v in changes.items()}
    built = Tokenizer(build_gguf_tokenizer(_bytes_metadata(**changes)))
    plain = built.encode("hi")
    both = built.encode("hi", add_special=True)
    assert len(plain) == 2 and plain == [i for i in both if i > 2]
    return both[: both.index(plain[0])], both[both.index(plain[1]) + 1 :]

  assert framed() == ([], [])
  assert framed(add_bos_token=True) == ([1], [])
  assert framed(add_bos_token=True, add_eos_token=True) == ([1], [2])
  assert framed(pre="llama-bpe") == ([1], [])
  spm = Tokenizer(build_gguf_tokenizer(_scores_metadata()))
  assert spm.encode("a", add_special=True)[0] == 1


def _sentencepiece(text):
  """SentencePiece's own rule: join the best-scoring neighbours, leftmost first;
  characters without a piece become bytes."""
  parts = list("▁" + text.replace(" ", "▁"))
  while True:
    joins = [
      (PIECES.index(a + b), i)
      for i, (a, b) in enumerate(itertools.pairwise(parts))
      if a + b in PIECES
    ]
    if not joins:
      break
    _, i = min(joins)
    parts[i : i + 2] = ["".join(parts[i : i + 2])]
  ids = []
  for part in parts:
    if part in PIECES:
      ids.append(259 + PIECES.index(part))
    else:
      ids.extend(3 + byte for byte in part.encode())
  return ids


@settings(max_examples=200, **HYPOTHESIS)
@given(st.text(alphabet="ab cé🚀", min_size=1, max_size=14))
def test_scores_act_as_in_sentencepiece(text):
  built = Tokenizer(build_gguf_tokenizer(_scores_metadata()))
  ids = built.encode(text)
  assert ids == _sentencepiece(text)
  assert built.decode(ids) == text
  stream = built.stream()
  assert "".join(stream.push([i]) for i in ids) + stream.finish() == text


def test_chat_template_dialect(small):
  def render(template, **variables):
    chat = Tokenizer(
      small._tokenizer, chat_template=template, variables={"bos_token": "<s>"}
    )
    return chat.render_chat([{"role": "user", "content": "é<"}], **variables)

  assert render("{{ bos_token }}{{ messages[0].role }}") == "<s>user"
  assert render("{{ messages[0] | tojson }}") == (
    '{"role": "user", "content": "é<"}'
  )
  assert render("  {% if true %}\nx\n  {% endif %}\ny") == "x\ny"
  assert render("{% for m in [1, 2] %}{{ m }}{% break %}{% endfor %}") == "1"
  assert render("{% generation %}a{{ 1 }}{% endgeneration %}b") == "a1b"
  assert len(render("{{ strftime_now('%Y') }}")) == 4
  clock = lambda form: f"<{form}>"  # noqa: E731
  assert render("{{ strftime_now('%Y') }}", strftime_now=clock) == "<%Y>"
  with pytest.raises(ValueError, match="chat_template: no system role"):
    render("{{ raise_exception('no system role') }}")
  for attack in ("{{ messages.append(1) }}", "{{ ''.__class__.__mro__ }}"):
    with pytest.raises(ValueError, match="chat_template"):
      render(attack)
  with pytest.raises(ValueError, match="chat_template is missing"):
    Tokenizer(small._tokenizer).apply_chat_template([])


def test_chat_ids(small):
  messages = [{"role": "user", "content": "hi"}]
  ids = small.apply_chat_template(messages)
  text = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
  assert small.render_chat(messages) == text
  assert ids.count(1) == 2 and ids.count(2) == 1
  assert small.decode(ids, skip_special=False) == text
  assert small.decode(ids) == "user\nhi\nassistant\n"
  shorter = small.apply_chat_template(messages, add_generation_prompt=False)
  assert ids[: len(shorter)] == shorter and len(shorter) < len(ids)


def test_vocab_hash_compares_ids_and_tokens(small):
  same = Tokenizer(build_gguf_tokenizer(_bytes_metadata("qwen2")))
  assert same.vocab_hash() == small.vocab_hash()
  longer = _bytes_metadata(merges=[("a", "b")])
  other = Tokenizer(build_gguf_tokenizer(longer))
  assert other.vocab_hash() != small.vocab_hash()


@pytest.mark.parametrize("kind", [_bytes_metadata, _scores_metadata])
def test_hugging_face_directory(kind, tmp_path):
  built = build_gguf_tokenizer(kind())
  built.save(str(tmp_path / "tokenizer.json"))
  ends = [2, 0]
  files = {
    "config.json": {"bos_token_id": 1, "eos_token_id": 2},
    "generation_config.json": {"eos_token_id": ends},
    "tokenizer_config.json": {
      "bos_token": {"content": built.id_to_token(1)},
      "eos_token": built.id_to_token(2),
      "chat_template": [{"name": "default", "template": "{{ eos_token }}!"}],
    },
  }
  for name, value in files.items():
    (tmp_path / name).write_text(json.dumps(value))
  loaded = load_tokenizer(tmp_path)
  reference = Tokenizer(built)
  text = "ab é 🚀 12"
  assert loaded.encode(text) == reference.encode(text)
  assert loaded.vocab_hash() == reference.vocab_hash()
  assert loaded.eos_ids == {0, 2} and loaded.bos_id == 1
  assert loaded.render_chat([]) == built.id_to_token(2) + "!"
  (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}?")
  assert load_tokenizer(tmp_path).render_chat([]) == built.id_to_token(1) + "?"
  (tmp_path / "tokenizer.json").unlink()
  with pytest.raises(ValueError, match=r"tokenizer\.json is missing"):
    load_tokenizer(tmp_path)


def test_unsupported_decoder_is_refused():
  built = build_gguf_tokenizer(_bytes_metadata())
  built.decoder = None
  with pytest.raises(ValueError, match="decoder"):
    Tokenizer(built)
