# SPDX-License-Identifier: Apache-2.0
"""Decoders: configs, loading, tokenizers, stage functions."""

from wanspec_jax.models._config import ModelConfig as ModelConfig
from wanspec_jax.models._config import RopeScaling as RopeScaling
from wanspec_jax.models._config_readers import from_gguf as from_gguf
from wanspec_jax.models._config_readers import from_hf as from_hf
from wanspec_jax.models._gguf import find_default_model as find_default_model
from wanspec_jax.models._loading import load_config as load_config
from wanspec_jax.models._loading import load_stage as load_stage
from wanspec_jax.models._loading import model_hash as model_hash
from wanspec_jax.models._loading import open_model as open_model
from wanspec_jax.models._loading import resolve_model as resolve_model
from wanspec_jax.models._params import LayerParams as LayerParams
from wanspec_jax.models._params import StageParams as StageParams
from wanspec_jax.models._params import even_cuts as even_cuts
from wanspec_jax.models._params import random_params as random_params
from wanspec_jax.models._params import random_stage as random_stage
from wanspec_jax.models._params import slice_stage as slice_stage
from wanspec_jax.models._source import TensorSource as TensorSource
from wanspec_jax.models._tokenizer import TextStream as TextStream
from wanspec_jax.models._tokenizer import Tokenizer as Tokenizer
from wanspec_jax.models._tokenizer import load_tokenizer as load_tokenizer
