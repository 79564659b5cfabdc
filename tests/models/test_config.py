# SPDX-License-Identifier: Apache-2.0
"""Configs: what is read, and what is refused by name."""

import math

import pytest

from wanspec_jax.models import ModelConfig, RopeScaling, from_gguf, from_hf

# The published config.json of Llama-3.1-8B-Instruct, without what only
# describes training.
LLAMA31 = {
  "architectures": ["LlamaForCausalLM"],
  "attention_bias": False,
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "mlp_bias": False,
  "model_type": "llama",
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "pretraining_tp": 1,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "vocab_size": 128256,
}
# Qwen2.5-0.5B-Instruct: a window is named, and switched off.
QWEN25 = {
  "architectures": ["Qwen2ForCausalLM"],
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "hidden_act": "silu",
  "hidden_size": 896,
  "intermediate_size": 4864,
  "max_position_embeddings": 32768,
  "max_window_layers": 21,
  "model_type": "qwen2",
  "num_attention_heads": 14,
  "num_hidden_layers": 24,
  "num_key_value_heads": 2,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000.0,
  "sliding_window": 32768,
  "tie_word_embeddings": True,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
GGUF = {
  "general.architecture": "llama",
  "general.name": "x",
  "llama.block_count": 2,
  "llama.context_length": 128,
  "llama.embedding_length": 32,
  "llama.feed_forward_length": 48,
  "llama.attention.head_count": 4,
  "llama.attention.head_count_kv": 2,
  "llama.attention.layer_norm_rms_epsilon": 1e-5,
  "llama.rope.freq_base": 500.0,
  "llama.rope.dimension_count": 8,
  "tokenizer.ggml.bos_token_id": 1,
  "tokenizer.ggml.eos_token_id": 2,
}


def _gguf(changes=(), **options):
  options = {"vocab_size": 97, "tensor_names": ("output.weight",)} | options
  return from_gguf(GGUF | dict(changes), **options)


def test_llama31_is_read_in_both_rotary_layouts():
  config = from_hf(LLAMA31)
  assert config == ModelConfig(
    family="llama",
    vocab_size=128256,
    hidden_size=4096,
    intermediate_size=14336,
    num_layers=32,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rms_norm_eps=1e-5,
    rope_theta=500000.0,
    rope_scaling=RopeScaling(
      kind="llama3",
      factor=8.0,
      low_freq_factor=1.0,
      high_freq_factor=4.0,
      original_max_position=8192,
    ),
    max_position=131072,
    bos_id=128000,
    eos_ids=(128001, 128008, 128009),
  )
  assert hash(config) == hash(from_hf(LLAMA31))
  modern = dict(LLAMA31)
  scaling = modern.pop("rope_scaling")
  theta = modern.pop("rope_theta")
  modern["rope_parameters"] = {"rope_theta": theta, **scaling}
  assert from_hf(modern) == config


def test_qwen_flags_and_a_window_that_is_off():
  config = from_hf(QWEN25)
  assert config.qkv_bias and not config.qk_norm and config.tie_embeddings
  assert config.head_dim == 64 and config.eos_ids == (151645,)
  changes = {"model_type": "qwen3", "architectures": None, "head_dim": 128}
  qwen3 = from_hf(QWEN25 | changes)
  assert qwen3.qk_norm and not qwen3.qkv_bias
  assert qwen3.q_rows == 14 * 128


@pytest.mark.parametrize(
  ("mscale", "expected"),
  [
    ({}, 1 + 0.1 * math.log(4)),
    ({"attention_factor": 0.7}, 0.7),
    (
      {"mscale": 0.5, "mscale_all_dim": 2.0},
      (1 + 0.05 * math.log(4)) / (1 + 0.2 * math.log(4)),
    ),
  ],
)
def test_yarn_magnitude_is_resolved(mscale, expected):
  rope = {"type": "yarn", "factor": 4.0} | mscale
  scaling = from_hf(QWEN25 | {"rope_scaling": rope}).rope_scaling
  assert scaling is not None and scaling.kind == "yarn"
  assert scaling.original_max_position == 32768
  assert scaling.attention_factor == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize(
  ("base", "changes", "names"),
  [
    (LLAMA31, {"model_type": "gemma2"}, ("model_type", "gemma2")),
    (LLAMA31, {"model_type": "mixtral"}, ("model_type", "mixtral")),
    (
      LLAMA31,
      {"architectures": ["LlamaForSequenceClassification"]},
      ("architectures", "LlamaForSequenceClassification"),
    ),
    (LLAMA31, {"hidden_act": "gelu"}, ("hidden_act", "gelu")),
    (LLAMA31, {"attention_bias": True}, ("attention_bias", "True")),
    (LLAMA31, {"mlp_bias": True}, ("mlp_bias", "True")),
    (
      LLAMA31,
      {"partial_rotary_factor": 0.5},
      ("partial_rotary_factor", "0.5"),
    ),
    (
      LLAMA31,
      {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}},
      ("rope_type", "longrope"),
    ),
    (
      LLAMA31,
      {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
      ("rope_type", "dynamic"),
    ),
    (
      LLAMA31,
      {"rope_scaling": {"type": "linear", "factor": 2.0, "alpha": 3.0}},
      ("rope_scaling.alpha", "3.0"),
    ),
    (
      LLAMA31,
      {"rope_scaling": {"type": "yarn", "factor": 2.0, "truncate": False}},
      ("truncate", "False"),
    ),
    (
      LLAMA31,
      {"rope_scaling": None, "rope_parameters": {"full_attention": {}}},
      ("rope_parameters", "full_attention"),
    ),
    (LLAMA31, {"num_local_experts": 8}, ("num_local_experts", "8")),
    (
      LLAMA31,
      {"final_logit_softcapping": 30.0},
      ("final_logit_softcapping", "30.0"),
    ),
    (
      LLAMA31,
      {"quantization_config": {"quant_method": "awq"}},
      ("quantization_config", "awq"),
    ),
    (
      LLAMA31 | {"model_type": "mistral", "architectures": None},
      {"sliding_window": 4096},
      ("sliding_window", "4096"),
    ),
    (
      LLAMA31 | {"model_type": "mistral", "architectures": None},
      {},
      ("sliding_window", "4096"),
    ),
    (QWEN25, {"use_sliding_window": True}, ("use_sliding_window", "True")),
    (
      QWEN25,
      {"layer_types": ["full_attention", "sliding_attention"]},
      ("layer_types", "sliding_attention"),
    ),
    (LLAMA31, {"num_key_value_heads": 5}, ("num_kv_heads", "5")),
    (LLAMA31, {"rms_norm_eps": None}, ("rms_norm_eps", "missing")),
    (LLAMA31, {"num_hidden_layers": 0}, ("num_layers", "0")),
  ],
)
def test_hf_refusals_name_key_and_value(base, changes, names):
  with pytest.raises(ValueError) as error:
    from_hf(base | changes)
  for name in names:
    assert name in str(error.value)


def test_window_as_long_as_the_context_is_none():
  mistral = LLAMA31 | {
    "model_type": "mistral",
    "architectures": ["MistralForCausalLM"],
    "rope_scaling": None,
  }
  for window in (None, 131072):
    assert from_hf(mistral | {"sliding_window": window}).family == "mistral"


def test_gguf_is_read():
  config = _gguf()
  assert (config.num_layers, config.head_dim, config.vocab_size) == (2, 8, 97)
  assert not config.tie_embeddings and config.rope_scaling is None
  assert config.bos_id == 1 and config.eos_ids == (2,)
  names = (
    "blk.0.attn_q.bias",
    "blk.0.attn_q_norm.weight",
  )
  config = _gguf(tensor_names=names)
  assert config.tie_embeddings and config.qkv_bias and config.qk_norm


def test_gguf_rotary_scaling():
  kind, factor = "llama.rope.scaling.type", "llama.rope.scaling.factor"
  scaling = _gguf({kind: "linear", factor: 2.0}).rope_scaling
  assert scaling == RopeScaling(kind="linear", factor=2.0)
  scaling = _gguf({"llama.rope.scale_linear": 2.0}).rope_scaling
  assert scaling == RopeScaling(kind="linear", factor=2.0)
  origin = "llama.rope.scaling.original_context_length"
  scaling = _gguf({kind: "yarn", factor: 4.0, origin: 32}).rope_scaling
  assert scaling == RopeScaling(
    kind="yarn",
    factor=4.0,
    original_max_position=32,
    attention_factor=1 + 0.1 * math.log(4),
  )
  scaling = _gguf(freq_factors=(1.0, 1.0, 2.0, 8.0)).rope_scaling
  assert scaling == RopeScaling(
    kind="factors", freq_factors=(1.0, 1.0, 2.0, 8.0)
  )


@pytest.mark.parametrize(
  ("changes", "options", "names"),
  [
    ({"general.architecture": "phi3"}, {}, ("architecture", "phi3")),
    ({"llama.expert_count": 8}, {}, ("llama.expert_count", "8")),
    (
      {"llama.attention.sliding_window": 512},
      {},
      ("llama.attention.sliding_window", "512"),
    ),
    ({"llama.logit_scale": 0.5}, {}, ("llama.logit_scale", "0.5")),
    (
      {"llama.rope.dimension_count": 4},
      {},
      ("llama.rope.dimension_count", "4"),
    ),
    (
      {"llama.rope.scaling.type": "longrope"},
      {},
      ("llama.rope.scaling.type", "longrope"),
    ),
    (
      {"llama.attention.head_count": [4, 2]},
      {},
      ("llama.attention.head_count", "[4, 2]"),
    ),
    ({}, {"freq_factors": (1.0, 2.0)}, ("rope_scaling", "freq_factors")),
  ],
)
def test_gguf_refusals_name_key_and_value(changes, options, names):
  with pytest.raises(ValueError) as error:
    _gguf(changes, **options)
  for name in names:
    assert name in str(error.value)
