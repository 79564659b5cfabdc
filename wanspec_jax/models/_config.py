# SPDX-License-Identifier: Apache-2.0
"""What a decoder computes, as one frozen, hashable record."""

import dataclasses

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_KINDS = ("linear", "llama3", "yarn", "factors")


def _check(record: object, rules) -> None:
  for field, holds, rule in rules:
    if not holds:
      name = type(record).__name__
      raise ValueError(f"{name}.{field} = {getattr(record, field)!r}: {rule}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling:
  """How the rotary frequencies `ωᵢ = θ^(-2i/head_dim)` are stretched.

  Attributes:
    kind: `linear` (`ωᵢ / factor`), `llama3` (wavelengths above
      `original_max_position / low_freq_factor` are stretched, those below
      `original_max_position / high_freq_factor` kept, a ramp between), `yarn`
      (https://arxiv.org/abs/2309.00071: a ramp between `beta_fast` and
      `beta_slow` rotations over the original context) or `factors`
      (`ωᵢ / freq_factors[i]`, as GGUF files carry it).
    factor: the stretch.
    low_freq_factor: llama3 only.
    high_freq_factor: llama3 only.
    original_max_position: context length before stretching; llama3 and yarn.
    beta_fast: yarn only.
    beta_slow: yarn only.
    attention_factor: yarn only: multiplies cosines and sines; None means
      `1 + 0.1 ln(factor)`. The readers always resolve it to a number.
    freq_factors: `head_dim / 2` divisors; `factors` only.
  """

  kind: str
  factor: float = 1.0
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_position: int = 0
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  freq_factors: tuple[float, ...] = ()

  def __post_init__(self):
    has_origin = self.kind in ("llama3", "yarn")
    _check(
      self,
      (
        ("kind", self.kind in ROPE_KINDS, f"must be one of {ROPE_KINDS}"),
        ("factor", self.factor > 0, "must be > 0"),
        (
          "original_max_position",
          self.original_max_position > 0 or not has_origin,
          f"must be > 0 for {self.kind}",
        ),
        (
          "high_freq_factor",
          self.high_freq_factor > self.low_freq_factor or self.kind != "llama3",
          "must be > low_freq_factor",
        ),
        (
          "beta_fast",
          self.beta_fast > self.beta_slow > 0 or self.kind != "yarn",
          "must be > beta_slow > 0",
        ),
        (
          "freq_factors",
          bool(self.freq_factors) == (self.kind == "factors"),
          "goes with kind 'factors', and only with it",
        ),
        (
          "freq_factors",
          all(factor > 0 for factor in self.freq_factors),
          "must all be > 0",
        ),
      ),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
  """A decoder: pre-norm blocks of RoPE attention and a SiLU-gated MLP.

  Hashable, so it may be a static argument of `jax.jit`.

  Attributes:
    family: name only; what is computed follows from the other fields.
    vocab_size: `V`, rows of the embedding (may exceed the tokenizer's).
    hidden_size: `D`.
    intermediate_size: `F`, width of the gated MLP.
    num_layers: `L`.
    num_heads: query heads `H`.
    num_kv_heads: key/value heads; divides `num_heads`.
    head_dim: width of a head; `num_heads * head_dim` need not be `D`.
    rms_norm_eps: added to the mean square in every RMS norm.
    rope_theta: base of the rotary frequencies.
    rope_scaling: their stretch, or None.
    tie_embeddings: the output head is the embedding matrix.
    qkv_bias: q, k and v projections have biases (Qwen2).
    qk_norm: RMS norm over each head of q and k before RoPE (Qwen3).
    max_position: longest context the model claims.
    bos_id: token that starts a text, or None.
    eos_ids: tokens that end a text, as the model's files list them.
  """

  family: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rms_norm_eps: float
  rope_theta: float
  rope_scaling: RopeScaling | None = None
  tie_embeddings: bool = False
  qkv_bias: bool = False
  qk_norm: bool = False
  max_position: int
  bos_id: int | None = None
  eos_ids: tuple[int, ...] = ()

  def __post_init__(self):
    sizes = (
      "vocab_size",
      "hidden_size",
      "intermediate_size",
      "num_layers",
      "num_heads",
      "num_kv_heads",
      "head_dim",
      "max_position",
    )
    for field in sizes:
      value = getattr(self, field)
      if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
          f"ModelConfig.{field} = {value!r}: must be an integer >= 1"
        )
    scaling = self.rope_scaling
    _check(
      self,
      (
        ("family", self.family in FAMILIES, f"must be one of {FAMILIES}"),
        (
          "num_kv_heads",
          self.num_heads % self.num_kv_heads == 0,
          f"must divide num_heads = {self.num_heads}",
        ),
        ("head_dim", self.head_dim % 2 == 0, "must be even (rotary pairs)"),
        ("rms_norm_eps", self.rms_norm_eps > 0, "must be > 0"),
        ("rope_theta", self.rope_theta > 0, "must be > 0"),
        (
          "rope_scaling",
          scaling is None
          or scaling.kind != "factors"
          or len(scaling.freq_factors) == self.head_dim // 2,
          f"needs head_dim / 2 = {self.head_dim // 2} freq_factors",
        ),
        (
          "eos_ids",
          all(0 <= i < self.vocab_size for i in self.eos_ids),
          f"ids must lie in [0, vocab_size = {self.vocab_size})",
        ),
      ),
    )

  @property
  def q_rows(self) -> int:
    """Rows of the query projection, `H * head_dim`."""
    return self.num_heads * self.head_dim

  @property
  def kv_rows(self) -> int:
    """Rows of the key (or value) projection, `num_kv_heads * head_dim`."""
    return self.num_kv_heads * self.head_dim
