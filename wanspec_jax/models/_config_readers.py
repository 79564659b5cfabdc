# SPDX-License-Identifier: Apache-2.0
"""Reads a `ModelConfig` from the metadata that model files carry.

`from_hf` reads the `config.json` of Hugging Face checkpoints, `from_gguf` the
key-value section of GGUF files. Both refuse, naming key, value and rule,
whatever would change the mathematics and is not implemented: a model that loads
and is silently another model is worse than one that does not load.
"""

import math
from collections.abc import Collection, Mapping
from typing import Any

from wanspec_jax.models._config import FAMILIES, ModelConfig, RopeScaling


def _refuse(key: str, value: object, rule: str) -> ValueError:
  return ValueError(f"model config: {key} = {value!r}: {rule}")


_ABSENT = (None, False, 0, [])
_ONE = (None, 1, 1.0)
_NO_MOE = "mixtures of experts are not supported"
_NO_SCALE = "multipliers other than 1 are not supported"
_NO_CAP = "soft-capping is not supported"
_NO_NOPE = "layers without rotary are not supported"

# (key, values under which it changes nothing, the default first; rule)
_HF_INERT = (
  ("hidden_act", ("silu",), "only silu-gated MLPs are supported"),
  ("attention_bias", _ABSENT, "output projection biases are not supported"),
  ("mlp_bias", _ABSENT, "MLP biases are not supported"),
  ("use_sliding_window", _ABSENT, "sliding windows are not supported"),
  ("partial_rotary_factor", _ONE, "rotary must cover whole heads"),
  ("final_logit_softcapping", (None,), _NO_CAP),
  ("attn_logit_softcapping", (None,), _NO_CAP),
  ("query_pre_attn_scalar", (None,), "scores are scaled by head_dim ** -0.5"),
  ("attention_multiplier", (None,), "scores are scaled by head_dim ** -0.5"),
  ("logit_scale", _ONE, _NO_SCALE),
  ("logits_scaling", _ONE, _NO_SCALE),
  ("residual_multiplier", _ONE, _NO_SCALE),
  ("embedding_multiplier", _ONE, _NO_SCALE),
  ("num_experts", _ABSENT, _NO_MOE),
  ("num_local_experts", _ABSENT, _NO_MOE),
  ("no_rope_layers", _ABSENT, _NO_NOPE),
  ("no_rope_layer_interval", _ABSENT, _NO_NOPE),
  ("quantization_config", (None,), "load unquantised weights, or GGUF"),
)

_HF_ROPE_KEYS = {
  "default": set(),
  "linear": {"factor"},
  "llama3": {
    "factor",
    "low_freq_factor",
    "high_freq_factor",
    "original_max_position_embeddings",
  },
  "yarn": {
    "factor",
    "original_max_position_embeddings",
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
    "truncate",
  },
}


def _required(config: Mapping[str, Any], key: str) -> Any:
  if config.get(key) is None:
    raise ValueError(f"model config: {key} is missing")
  return config[key]


def _yarn_magnitude(factor: float, scale: float = 1.0) -> float:
  """Returns YaRN's `1 + 0.1 s ln(factor)`, or 1 where nothing is stretched."""
  return 1.0 + 0.1 * scale * math.log(factor) if factor > 1 else 1.0


def _resolve_yarn(given: dict[str, Any]) -> None:
  """Replaces `mscale` and `mscale_all_dim` by the factor they stand for."""
  if not given.pop("truncate", True):
    rule = "only ramps cut at whole dimensions are supported"
    raise _refuse("rope_scaling.truncate", False, rule)
  mscale = given.pop("mscale", None)
  all_dim = given.pop("mscale_all_dim", None)
  if "attention_factor" not in given:
    factor = given["factor"]
    magnitude = _yarn_magnitude(factor)
    if mscale and all_dim:
      magnitude = _yarn_magnitude(factor, mscale)
      magnitude /= _yarn_magnitude(factor, all_dim)
    given["attention_factor"] = magnitude


def _hf_rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
  """Reads θ and the stretch from either of the two layouts in use."""
  # Transformers lets a legacy `rope_scaling` win over `rope_parameters`.
  rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
  nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
  if nested:
    raise _refuse("rope_parameters", nested, "per-layer rotary not supported")
  theta = float(rope.get("rope_theta") or config.get("rope_theta") or 10000.0)
  kind = rope.get("rope_type") or rope.get("type") or "default"
  if kind not in _HF_ROPE_KEYS:
    rule = f"must be one of {tuple(_HF_ROPE_KEYS)}"
    raise _refuse("rope_type", kind, rule)
  given = {key: value for key, value in rope.items() if value is not None}
  if given.pop("partial_rotary_factor", 1.0) != 1.0:
    value = rope["partial_rotary_factor"]
    raise _refuse(
      "partial_rotary_factor", value, "rotary must cover whole heads"
    )
  for key in ("rope_theta", "rope_type", "type"):
    given.pop(key, None)
  # Older files leave this one behind also where the type does not use it.
  if kind in ("default", "linear"):
    given.pop("original_max_position_embeddings", None)
  for key in sorted(given.keys() - _HF_ROPE_KEYS[kind]):
    raise _refuse(f"rope_scaling.{key}", given[key], f"unknown for {kind} RoPE")
  if kind == "default":
    return theta, None
  longest = _required(config, "max_position_embeddings")
  if kind != "linear":
    origin = config.get("original_max_position_embeddings") or given.pop(
      "original_max_position_embeddings", longest
    )
    given.pop("original_max_position_embeddings", None)
    given["original_max_position"] = int(origin)
    if kind == "yarn" and "factor" not in given:
      given["factor"] = longest / origin
  needed = ["factor"]
  if kind == "llama3":
    needed += ["low_freq_factor", "high_freq_factor"]
  for key in needed:
    if key not in given:
      raise ValueError(f"model config: rope_scaling.{key} is missing ({kind})")
  if kind == "yarn":
    _resolve_yarn(given)
  return theta, RopeScaling(kind=kind, **given)


def _hf_window(config: Mapping[str, Any], family: str) -> None:
  """Refuses a sliding window that could ever hide a position."""
  for kind in config.get("layer_types") or ():
    if kind != "full_attention":
      rule = "only full_attention layers are supported"
      raise _refuse("layer_types", kind, rule)
  # Qwen files name a window and switch it off by `use_sliding_window`; Mistral
  # has no switch, and the class default is a window of 4096.
  if family in ("qwen2", "qwen3"):
    return
  default = 4096 if family == "mistral" else None
  window = config.get("sliding_window", default)
  longest = _required(config, "max_position_embeddings")
  if window is not None and window < longest:
    raise _refuse(
      "sliding_window",
      window,
      f"sliding windows below max_position_embeddings = {longest} are not"
      " supported",
    )


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
  """Returns the model that a Hugging Face `config.json` describes.

  Llama (also SmolLM2, TinyLlama), Mistral, Qwen2/2.5 and Qwen3 causal models,
  with rotary parameters in the old (`rope_theta`, `rope_scaling`) or the new
  (`rope_parameters`) layout.

  Args:
    config: the parsed JSON object.

  Raises:
    ValueError: on a missing key, or one whose value asks for mathematics that
      is not implemented; key, value and rule are named.
  """
  family = config.get("model_type")
  if family not in FAMILIES:
    raise _refuse("model_type", family, f"must be one of {FAMILIES}")
  wanted = f"{family.capitalize()}ForCausalLM"
  for name in config.get("architectures") or ():
    if name != wanted:
      raise _refuse("architectures", name, f"must be {wanted}")
  for key, inert, rule in _HF_INERT:
    # `hidden_act` defaults to silu in all four families.
    value = config.get(key, inert[0])
    if value not in inert:
      raise _refuse(key, value, rule)
  _hf_window(config, family)
  theta, scaling = _hf_rope(config)
  heads = _required(config, "num_attention_heads")
  hidden = _required(config, "hidden_size")
  kv_heads = config.get("num_key_value_heads")
  head_dim = config.get("head_dim")
  if kv_heads is None:
    # Only Llama's default is the number of heads; others default to constants.
    if family != "llama":
      _required(config, "num_key_value_heads")
    kv_heads = heads
  if head_dim is None:
    if family == "qwen3":
      head_dim = 128
    elif hidden % heads:
      rule = f"must be a multiple of num_attention_heads = {heads}"
      raise _refuse("hidden_size", hidden, rule)
    else:
      head_dim = hidden // heads
  eos = config.get("eos_token_id")
  if not isinstance(eos, list):
    eos = [] if eos is None else [eos]
  return ModelConfig(
    family=family,
    vocab_size=_required(config, "vocab_size"),
    hidden_size=hidden,
    intermediate_size=_required(config, "intermediate_size"),
    num_layers=_required(config, "num_hidden_layers"),
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=head_dim,
    rms_norm_eps=float(_required(config, "rms_norm_eps")),
    rope_theta=theta,
    rope_scaling=scaling,
    tie_embeddings=bool(config.get("tie_word_embeddings", False)),
    qkv_bias=family == "qwen2",
    qk_norm=family == "qwen3",
    max_position=_required(config, "max_position_embeddings"),
    bos_id=config.get("bos_token_id"),
    eos_ids=tuple(eos),
  )


# Keys below `{arch}.` that are read or change nothing. Any other is refused.
_GGUF_KNOWN = {
  "attention.head_count",
  "attention.head_count_kv",
  "attention.key_length",
  "attention.layer_norm_rms_epsilon",
  "attention.value_length",
  "block_count",
  "context_length",
  "embedding_length",
  "feed_forward_length",
  "rope.dimension_count",
  "rope.freq_base",
  "rope.scale_linear",
  "rope.scaling.factor",
  "rope.scaling.finetuned",
  "rope.scaling.original_context_length",
  "rope.scaling.type",
  "rope.scaling.yarn_beta_fast",
  "rope.scaling.yarn_beta_slow",
  "tensor_data_layout",
  "vocab_size",
}
# Keys that are refused unless they hold the value that changes nothing.
_GGUF_INERT = {
  "attention.causal": True,
  "expert_count": 0,
  "expert_used_count": 0,
  "rope.scaling.attn_factor": 1.0,
  "rope.scaling.yarn_attn_factor": 1.0,
  "rope.scaling.yarn_log_multiplier": 0.0,
}


def _gguf_rope(
  values: Mapping[str, Any], arch: str, freq_factors: tuple[float, ...]
) -> RopeScaling | None:
  kind = values.get("rope.scaling.type", "none")
  # Before `rope.scaling.*`, linear stretch was one key.
  factor = float(
    values.get("rope.scaling.factor") or values.get("rope.scale_linear") or 1.0
  )
  if "rope.scaling.type" not in values and factor != 1.0:
    kind = "linear"
  if kind not in ("none", "linear", "yarn"):
    rule = "must be none, linear or yarn"
    raise _refuse(f"{arch}.rope.scaling.type", kind, rule)
  if freq_factors:
    if kind != "none":
      rule = "must be none beside the tensor rope_freqs.weight"
      raise _refuse(f"{arch}.rope.scaling.type", kind, rule)
    return RopeScaling(kind="factors", freq_factors=freq_factors)
  if kind == "none":
    return None
  if kind == "linear":
    return RopeScaling(kind=kind, factor=factor)
  return RopeScaling(
    kind=kind,
    factor=factor,
    original_max_position=int(
      values.get("rope.scaling.original_context_length")
      or values["context_length"]
    ),
    beta_fast=float(values.get("rope.scaling.yarn_beta_fast", 32.0)),
    beta_slow=float(values.get("rope.scaling.yarn_beta_slow", 1.0)),
    attention_factor=_yarn_magnitude(factor),
  )


def from_gguf(
  metadata: Mapping[str, Any],
  *,
  vocab_size: int,
  tensor_names: Collection[str],
  freq_factors: tuple[float, ...] = (),
) -> ModelConfig:
  """Returns the model that GGUF metadata describes.

  Architectures `llama` (which Mistral files also bear), `qwen2` and `qwen3`.

  Args:
    metadata: key-value section as plain Python values.
    vocab_size: rows of `token_embd.weight`; the metadata need not hold it.
    tensor_names: GGUF names of the file's tensors; tied embeddings (no
      `output.weight`), biases and q/k norms follow from them.
    freq_factors: contents of `rope_freqs.weight`, which is how GGUF files
      carry Llama 3 rotary scaling; empty if the file has no such tensor.

  Raises:
    ValueError: as `from_hf`; any key of the architecture that is not known to
      leave the mathematics alone is refused.
  """
  arch = metadata.get("general.architecture")
  families = ("llama", "qwen2", "qwen3")
  if arch not in families:
    rule = f"must be one of {families}"
    raise _refuse("general.architecture", arch, rule)
  prefix = f"{arch}."
  values = {
    key.removeprefix(prefix): value
    for key, value in metadata.items()
    if key.startswith(prefix)
  }
  for key in sorted(values.keys() - _GGUF_KNOWN):
    if key not in _GGUF_INERT:
      raise _refuse(prefix + key, values[key], "not known to this reader")
    if values[key] != _GGUF_INERT[key]:
      rule = f"only {_GGUF_INERT[key]!r} is supported"
      raise _refuse(prefix + key, values[key], rule)

  def size(key: str, default: int | None = None) -> int:
    value = values.get(key, default)
    if value is None:
      raise ValueError(f"model config: {prefix}{key} is missing")
    if not isinstance(value, int):
      raise _refuse(prefix + key, value, "must be one integer for all layers")
    return value

  heads = size("attention.head_count")
  hidden = size("embedding_length")
  head_dim = size("attention.key_length", hidden // heads)
  for key in ("attention.value_length", "rope.dimension_count"):
    if size(key, head_dim) != head_dim:
      rule = f"must equal the key length {head_dim}"
      raise _refuse(prefix + key, values[key], rule)
  if values.get("attention.layer_norm_rms_epsilon") is None:
    key = "attention.layer_norm_rms_epsilon"
    raise ValueError(f"model config: {prefix}{key} is missing")
  eos = metadata.get("tokenizer.ggml.eos_token_id")
  return ModelConfig(
    family=arch,
    vocab_size=vocab_size,
    hidden_size=hidden,
    intermediate_size=size("feed_forward_length"),
    num_layers=size("block_count"),
    num_heads=heads,
    num_kv_heads=size("attention.head_count_kv", heads),
    head_dim=head_dim,
    rms_norm_eps=float(values["attention.layer_norm_rms_epsilon"]),
    rope_theta=float(values.get("rope.freq_base", 10000.0)),
    rope_scaling=_gguf_rope(values, arch, freq_factors),
    tie_embeddings="output.weight" not in tensor_names,
    qkv_bias="blk.0.attn_q.bias" in tensor_names,
    qk_norm="blk.0.attn_q_norm.weight" in tensor_names,
    max_position=size("context_length"),
    bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
    eos_ids=() if eos is None else (eos,),
  )
