"""Flax modules, pure functions made of them, and their weights on disk."""

from jagg_jax.models.diffusers_io import load_sd3, load_vae_decoder, save_lora, save_sd3
from jagg_jax.models.dit import TENSOR_RULES, DiT, DiTConfig
from jagg_jax.models.functional import Params, VelocityFn, as_function, count_parameters
from jagg_jax.models.lora import AdapterError, Adapters, merge_params, split_adapters
from jagg_jax.models.sd3 import SD3, SD3_TENSOR_RULES, TextEmbeddings
from jagg_jax.models.sd3_config import SD3Config
from jagg_jax.models.vae import AutoencoderKL, tiled_decode
from jagg_jax.models.vae_config import VAEConfig
from jagg_jax.models.weights import (
    LoadedModel,
    load_model,
    load_weights,
    model_metadata,
    read_metadata,
    save_weights,
)

__all__ = [
    "SD3",
    "SD3_TENSOR_RULES",
    "TENSOR_RULES",
    "AdapterError",
    "Adapters",
    "AutoencoderKL",
    "DiT",
    "DiTConfig",
    "LoadedModel",
    "Params",
    "SD3Config",
    "TextEmbeddings",
    "VAEConfig",
    "VelocityFn",
    "as_function",
    "count_parameters",
    "load_model",
    "load_sd3",
    "load_vae_decoder",
    "load_weights",
    "merge_params",
    "model_metadata",
    "read_metadata",
    "save_lora",
    "save_sd3",
    "save_weights",
    "split_adapters",
    "tiled_decode",
]
