"""The parts of a run that depend on its model's family, whatever the family."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jagg_jax.models import SD3Config
from jagg_jax.models.weights import Place
from jagg_jax.prompts.source import PromptSource
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.sharding import parameter_spec, put, replicated


class Decoder(NamedTuple):
    """Samples to images: `apply(params, samples [B, ...]) -> float32 [B, H, W, 1 or 3]`, nominally in [-1, 1]."""

    apply: Callable
    params: Any


PIXELS = Decoder(lambda _, samples: samples.astype(jnp.float32), {})  # of models whose samples are images


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """The parts of a run that depend on its model's family.

    Attributes:
      velocity_fn: `velocity_fn(params, latents [B, *latent_shape], sigma [B], condition)`.
      params: all of the model's parameters, placed on the mesh.
      num_adapted: how many matrices have an adapter.
      tensor_rules: regular expression -> axis that is split over `tensor`.
      latent_shape: of one sample.
      decoder: from samples to images.
      train_prompts, eval_prompts: the prompts of the two splits.
      find_prompts: texts -> a `PromptSource` of them; ValueError at one that can't be drawn.
      alphabet: the characters that prompts consist of; None where they may say anything.
      sd3_config: of the transformer of a diffusers folder; None for other models.
    """

    velocity_fn: Callable
    params: Any
    num_adapted: int
    tensor_rules: Mapping[str, int]
    latent_shape: tuple[int, ...]
    decoder: Decoder
    train_prompts: PromptSource
    eval_prompts: PromptSource
    find_prompts: Callable[[Sequence[str]], PromptSource]
    alphabet: str | None
    sd3_config: SD3Config | None = None


def placer(mesh: Mesh, tensor_rules: Mapping[str, int], fsdp_min_size: int | None) -> Place:
    """Puts a tensor, given its dotted name, on the mesh, or says where it would go.

    Args:
      mesh: the devices.
      tensor_rules: as `parameter_spec`.
      fsdp_min_size: as `parameter_spec`; None puts everything on every device.
    """

    def place(name: str, tensor: np.ndarray | jax.ShapeDtypeStruct) -> jax.Array | jax.ShapeDtypeStruct:
        sharding = replicated(mesh)
        if fsdp_min_size is not None:
            sharding = NamedSharding(mesh, parameter_spec(name, tensor.shape, mesh, tensor_rules, fsdp_min_size))
        return tensor.update(sharding=sharding) if isinstance(tensor, jax.ShapeDtypeStruct) else put(tensor, sharding)

    return place


def check_heads(heads: int, mesh: Mesh) -> None:
    """Raises ConfigError unless the attention heads divide over `tensor`."""
    tensor = mesh.shape["tensor"]
    if heads % tensor:
        raise ConfigError(f"--tensor {tensor}: must divide the model's {heads} attention heads")
