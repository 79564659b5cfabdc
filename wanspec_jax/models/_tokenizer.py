# SPDX-License-Identifier: Apache-2.0
"""Tokenizers with chat templates, and text that grows token by token."""

import codecs
import datetime
import hashlib
import json
import os
import pathlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jinja2
import jinja2.ext
import jinja2.sandbox
import tokenizers

from wanspec_jax.models._gguf import read_gguf
from wanspec_jax.models._loading import resolve_model
from wanspec_jax.models._safetensors import read_json
from wanspec_jax.models._tokenizer_gguf import build_gguf_tokenizer

# Tokens that end a turn, whether or not the model's files list them.
_END_OF_TURN = (
  "<|im_end|>",
  "<|eot_id|>",
  "<|eom_id|>",
  "<|end_of_text|>",
  "<|endoftext|>",
)
_SPACE = "▁"  # SentencePiece's


class _Generation(jinja2.ext.Extension):
  """`{% generation %}…{% endgeneration %}` marks training targets; here it
  only passes its contents through."""

  tags = {"generation"}  # noqa: RUF012 (jinja2's interface)

  def parse(self, parser: Any) -> Any:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _raise_exception(message: str) -> None:
  raise jinja2.TemplateError(message)


def _to_json(
  value: Any,
  ensure_ascii: bool = False,
  indent: int | None = None,
  separators: tuple[str, str] | None = None,
  sort_keys: bool = False,
) -> str:
  # Jinja's own filter escapes for HTML.
  return json.dumps(
    value,
    ensure_ascii=ensure_ascii,
    indent=indent,
    separators=separators,
    sort_keys=sort_keys,
  )


def _strftime_now(form: str) -> str:
  return datetime.datetime.now().strftime(form)


def _environment() -> jinja2.Environment:
  """The dialect that templates are written for: transformers' settings.

  Templates come with models, so they are untrusted: hence the sandbox.
  """
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=[_Generation, jinja2.ext.loopcontrols],
  )
  environment.filters["tojson"] = _to_json
  names: Any = environment.globals
  names["raise_exception"] = _raise_exception
  names["strftime_now"] = _strftime_now
  return environment


def _byte_alphabet() -> dict[str, int]:
  """Returns which byte each character of byte-level BPE stands for (GPT-2)."""
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  alphabet = {chr(byte): byte for byte in printable}
  others = [byte for byte in range(256) if byte not in printable]
  alphabet.update({chr(256 + i): byte for i, byte in enumerate(others)})
  return alphabet


def _token_bytes(
  tokenizer: tokenizers.Tokenizer,
) -> tuple[dict[int, bytes], bool]:
  """Returns the bytes of each token, and whether a text loses its first space.

  Raises:
    ValueError: if the decoder is neither byte-level nor SentencePiece's.
  """
  decoder = json.loads(tokenizer.to_str())["decoder"] or {}
  steps = decoder.get("decoders", [decoder])
  kinds = [step.get("type") for step in steps]
  vocab = tokenizer.get_vocab(with_added_tokens=True)
  if kinds == ["ByteLevel"]:
    alphabet = _byte_alphabet()

    def spell(token: str) -> bytes:
      if all(character in alphabet for character in token):
        return bytes(alphabet[character] for character in token)
      return token.encode()

    return {i: spell(token) for token, i in vocab.items()}, False
  if "ByteFallback" in kinds:

    def spell(token: str) -> bytes:
      if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
      return token.replace(_SPACE, " ").encode()

    return {i: spell(token) for token, i in vocab.items()}, "Strip" in kinds
  raise ValueError(
    f"tokenizer decoder = {kinds!r}: must be ByteLevel, or a sequence with"
    " ByteFallback"
  )


class Tokenizer:
  """Text to token ids and back, with the model's chat template.

  Attributes:
    eos_ids: tokens at which generation ends.
    bos_id: token that starts a text, or None.
    chat_template: Jinja source, or None.
    vocab_size: one more than the largest id; a model's embedding may have more
      rows.
  """

  def __init__(
    self,
    tokenizer: tokenizers.Tokenizer,
    *,
    eos_ids: Iterable[int] = (),
    bos_id: int | None = None,
    chat_template: str | None = None,
    variables: Mapping[str, Any] | None = None,
  ):
    """Wraps a tokenizer.

    Args:
      tokenizer: of the `tokenizers` package.
      eos_ids: what the model's files list; special tokens that end a turn by
        their name, such as `<|im_end|>`, are added.
      bos_id: token that starts a text, or None.
      chat_template: Jinja source, or None.
      variables: what the template sees besides the messages, e.g. `bos_token`.

    Raises:
      ValueError: if the tokenizer's decoder is not supported.
    """
    self._tokenizer = tokenizer
    self._bytes, self._strip = _token_bytes(tokenizer)
    added = tokenizer.get_added_tokens_decoder()
    self._special = frozenset(i for i, token in added.items() if token.special)
    ends = {i for i in self._special if added[i].content in _END_OF_TURN}
    self.eos_ids = frozenset(eos_ids) | ends
    self.bos_id = bos_id
    self.chat_template = chat_template
    self.vocab_size = max(self._bytes) + 1
    self._variables = dict(variables or {})

  def encode(self, text: str, *, add_special: bool = False) -> list[int]:
    """Returns token ids.

    Names of special tokens in the text become those tokens, as in the chat
    template; strip them from untrusted text beforehand. Bytes for which the
    vocabulary has no token are dropped (SmolLM2 lacks six control characters
    and the bytes from F1 on), as the `tokenizers` package does.

    Args:
      text: any text.
      add_special: add the tokens that frame a text (such as a start token), if
        the model has any.
    """
    return self._tokenizer.encode(text, add_special_tokens=add_special).ids

  def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
    """Returns the text; bytes that are not UTF-8 become U+FFFD."""
    return self._tokenizer.decode(list(ids), skip_special_tokens=skip_special)

  def render_chat(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
  ) -> str:
    """Returns the chat as the text that the model was trained on.

    Args:
      messages: mappings with `role` and `content`.
      add_generation_prompt: end with the opening of the assistant's turn.
      **variables: passed to the template, e.g. `enable_thinking=False`, or
        `strftime_now` for a template that would otherwise read the clock.

    Raises:
      ValueError: if the model has no chat template, or it refuses.
    """
    if self.chat_template is None:
      raise ValueError("chat_template is missing: the model's files have none")
    try:
      template = _environment().from_string(self.chat_template)
      return template.render(
        messages=[dict(message) for message in messages],
        add_generation_prompt=add_generation_prompt,
        **(self._variables | variables),
      )
    except jinja2.TemplateError as error:
      raise ValueError(f"chat_template: {error}") from error

  def apply_chat_template(
    self,
    messages: Sequence[Mapping[str, Any]],
    *,
    add_generation_prompt: bool = True,
    **variables: Any,
  ) -> list[int]:
    """Returns the token ids of `render_chat`, to which nothing is added."""
    text = self.render_chat(
      messages, add_generation_prompt=add_generation_prompt, **variables
    )
    return self.encode(text, add_special=False)

  def vocab_hash(self) -> str:
    """Returns 16 hexadecimal digits of SHA-256 over ids and their tokens.

    Equal for tokenizers between which ids may be exchanged, as between a
    drafter and its target.
    """
    vocab = self._tokenizer.get_vocab(with_added_tokens=True)
    digest = hashlib.sha256()
    for token, i in sorted(vocab.items(), key=lambda item: (item[1], item[0])):
      digest.update(json.dumps([i, token]).encode())
    return digest.hexdigest()[:16]

  def stream(self, *, skip_special: bool = True) -> "TextStream":
    """Returns an empty `TextStream`."""
    return TextStream(self, skip_special=skip_special)


class TextStream:
  """Text that grows token by token; what has been given out is final.

  Bytes wait until they complete a character, so no partial UTF-8 sequence is
  ever given out. Each token costs its own length only. The pieces together are
  `Tokenizer.decode` of all tokens; for SentencePiece vocabularies only where
  the bytes are UTF-8 (its decoder turns a whole invalid run of byte tokens into
  U+FFFD, valid characters included, which cannot be known in time).
  """

  def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
    self._bytes = tokenizer._bytes
    self._skipped = tokenizer._special if skip_special else frozenset()
    self._strip = tokenizer._strip
    self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

  def push(self, ids: Iterable[int]) -> str:
    """Returns the text that these tokens complete; ids without a token, which
    embeddings padded beyond the vocabulary have, add nothing."""
    return self._emit(
      b"".join(self._bytes.get(i, b"") for i in ids if i not in self._skipped),
      final=False,
    )

  def finish(self) -> str:
    """Returns U+FFFD for an incomplete character, else nothing; starts anew."""
    text = self._emit(b"", final=True)
    self._decoder.reset()
    return text

  def _emit(self, data: bytes, *, final: bool) -> str:
    text = self._decoder.decode(data, final)
    if self._strip and text:
      self._strip = False
      text = text.removeprefix(" ")
    return text


def _optional_json(path: pathlib.Path) -> dict[str, Any]:
  return read_json(path) if path.exists() else {}


def _content(token: Any) -> str | None:
  """Special tokens are strings or objects with the string in `content`."""
  return token.get("content") if isinstance(token, Mapping) else token


def _hf_template(directory: pathlib.Path, settings: dict) -> str | None:
  path = directory / "chat_template.jinja"
  if path.exists():
    return path.read_text(encoding="utf-8")
  template = settings.get("chat_template")
  if isinstance(template, list):
    named = {entry["name"]: entry["template"] for entry in template}
    return named.get("default")
  return template


def _load_hf(directory: pathlib.Path) -> Tokenizer:
  path = directory / "tokenizer.json"
  if not path.exists():
    raise ValueError(f"{path} is missing")
  tokenizer = tokenizers.Tokenizer.from_file(os.fspath(path))
  settings = _optional_json(directory / "tokenizer_config.json")
  config = _optional_json(directory / "config.json")
  generation = _optional_json(directory / "generation_config.json")
  variables = {
    key: _content(value)
    for key, value in settings.items()
    if key.endswith("_token") and _content(value) is not None
  }
  ends = set()
  for source in (generation, config):
    listed = source.get("eos_token_id")
    ends.update(listed if isinstance(listed, list) else [listed])
  if isinstance(variables.get("eos_token"), str):
    ends.add(tokenizer.token_to_id(variables["eos_token"]))
  bos_id = config.get("bos_token_id")
  if isinstance(variables.get("bos_token"), str):
    bos_id = tokenizer.token_to_id(variables["bos_token"])
  return Tokenizer(
    tokenizer,
    eos_ids=[i for i in ends if i is not None],
    bos_id=bos_id,
    chat_template=_hf_template(directory, settings),
    variables=variables,
  )


def _load_gguf(path: pathlib.Path) -> Tokenizer:
  metadata = read_gguf(path).metadata
  tokenizer = build_gguf_tokenizer(metadata)
  tokens = metadata["tokenizer.ggml.tokens"]
  ids = {
    kind: metadata.get(f"tokenizer.ggml.{kind}_token_id")
    for kind in ("bos", "eos", "eot", "eom")
  }
  return Tokenizer(
    tokenizer,
    eos_ids=[i for kind, i in ids.items() if kind != "bos" and i is not None],
    bos_id=ids["bos"],
    chat_template=metadata.get("tokenizer.chat_template"),
    variables={
      f"{kind}_token": tokens[ids[kind]]
      for kind in ("bos", "eos")
      if ids[kind] is not None
    },
  )


def load_tokenizer(name_or_path: str | os.PathLike[str]) -> Tokenizer:
  """Returns the tokenizer that a model's files carry.

  Args:
    name_or_path: as for `resolve_model`; of a directory, `tokenizer.json` and,
      where present, `tokenizer_config.json`, `chat_template.jinja`,
      `config.json` and `generation_config.json` are read.

  Raises:
    ValueError: naming the file that is missing, or the kind of tokenizer that
      is not supported.
  """
  path = resolve_model(name_or_path)
  return _load_hf(path) if path.is_dir() else _load_gguf(path)
