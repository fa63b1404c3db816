"""What a run trains, on which prompts, and how its samples become images."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from jagg_jax.models import TENSOR_RULES, AdapterError, Adapters, load_model
from jagg_jax.prompts import get_task
from jagg_jax.prompts.source import PromptSource
from jagg_jax.training.config import TrainConfig, resolve_weights
from jagg_jax.training.draws import ADAPTER_KEYS, keys_for
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.sharding import parameter_spec, put


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
      alphabet: the characters that prompts consist of.
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
    alphabet: str


def load_pipeline(config: TrainConfig, mesh: Mesh) -> Pipeline:
    """Loads what the settings name, every tensor straight to its place on the mesh.

    Raises:
      ConfigError: weights that are none or another task's, or that don't fit the mesh or the adapters.
    """
    path = resolve_weights(config.weights)
    adapters = Adapters(config.lora_rank, config.lora_alpha, config.lora_targets) if config.lora_rank else None
    try:
        model = load_model(
            path,
            dtype=config.compute_dtype,
            remat=config.remat,
            scan_layers=config.scan_layers,
            adapters=adapters,
            adapter_key=keys_for(config.seed, ADAPTER_KEYS),
            frozen_dtype=jnp.dtype(config.frozen_dtype),
            place=_placer(config, mesh),
        )
    except AdapterError as error:
        raise ConfigError(f"--lora-{error}") from error
    except ValueError as error:
        raise ConfigError(f"--weights {config.weights}: {error}") from error
    if model.task != config.task:
        raise ConfigError(f"--weights {config.weights}: is a model of task {model.task}, not of --task {config.task}")
    heads, tensor = model.config.num_heads, mesh.shape["tensor"]
    if heads % tensor:
        raise ConfigError(f"--tensor {tensor}: must divide the model's {heads} attention heads")
    task = get_task(config.task)
    return Pipeline(
        velocity_fn=model.velocity_fn,
        params=model.params,
        num_adapted=model.num_adapted,
        tensor_rules=TENSOR_RULES,
        latent_shape=task.image_shape,
        decoder=PIXELS,
        train_prompts=PromptSource.of_task(task, task.prompts("train")),
        eval_prompts=PromptSource.of_task(task, task.prompts("eval")),
        find_prompts=partial(PromptSource.of_task, task),
        alphabet=task.alphabet,
    )


def _placer(config: TrainConfig, mesh: Mesh) -> Callable[[str, np.ndarray], jax.Array]:
    """Puts a tensor, given its dotted name, on the mesh."""

    def place(name: str, tensor: np.ndarray) -> jax.Array:
        spec = parameter_spec(name, tensor.shape, mesh, TENSOR_RULES, config.fsdp_min_size)
        return put(tensor, NamedSharding(mesh, spec))

    return place
