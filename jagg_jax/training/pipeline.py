"""What a run trains, on which prompts, and how its samples become images: by what its weights are."""

from functools import partial

import jax.numpy as jnp
from jax.sharding import Mesh

from jagg_jax.models import TENSOR_RULES, AdapterError, Adapters, load_model
from jagg_jax.prompts import get_task
from jagg_jax.prompts.source import PromptSource
from jagg_jax.training.config import TrainConfig, resolve_weights
from jagg_jax.training.draws import ADAPTER_KEYS, keys_for
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.parts import PIXELS, Pipeline, check_heads, placer
from jagg_jax.training.sd3_pipeline import load_sd3_pipeline


def load_pipeline(config: TrainConfig, mesh: Mesh) -> Pipeline:
    """Loads what the settings name, every tensor straight to its place on the mesh.

    Raises:
      ConfigError: weights that are none or another task's, or that don't fit the mesh, the adapters or the prompts.
    """
    path = resolve_weights(config.weights)
    if path.is_dir():
        return load_sd3_pipeline(config, path, mesh)
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
            place=placer(mesh, TENSOR_RULES, config.fsdp_min_size),
        )
    except AdapterError as error:
        raise ConfigError(f"--lora-{error}") from error
    except ValueError as error:
        raise ConfigError(f"--weights {config.weights}: {error}") from error
    if model.task != config.task:
        raise ConfigError(f"--weights {config.weights}: is a model of task {model.task}, not of --task {config.task}")
    check_heads(model.config.num_heads, mesh)
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
