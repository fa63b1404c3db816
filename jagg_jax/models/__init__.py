"""Flax modules, pure functions made of them, and their weights on disk."""

from jagg_jax.models.dit import TENSOR_RULES, DiT, DiTConfig
from jagg_jax.models.functional import Params, VelocityFn, as_function, count_parameters
from jagg_jax.models.weights import (
    LoadedModel,
    load_model,
    load_weights,
    model_metadata,
    read_metadata,
    save_weights,
)

__all__ = [
    "TENSOR_RULES",
    "DiT",
    "DiTConfig",
    "LoadedModel",
    "Params",
    "VelocityFn",
    "as_function",
    "count_parameters",
    "load_model",
    "load_weights",
    "model_metadata",
    "read_metadata",
    "save_weights",
]
