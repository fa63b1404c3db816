"""A run on the folder of a Stable Diffusion 3 or 3.5 pipeline: its transformer, its decoder, prompts from caches."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jagg_jax.models import (
    SD3_TENSOR_RULES,
    AdapterError,
    Adapters,
    SD3Config,
    TextEmbeddings,
    VAEConfig,
    load_sd3,
    load_vae_decoder,
    tiled_decode,
)
from jagg_jax.models.diffusers_io import VAEDecoder, read_config
from jagg_jax.prompts.cache import PromptCache
from jagg_jax.prompts.source import PromptSource
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.draws import ADAPTER_KEYS, keys_for
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.parts import Decoder, Pipeline, check_heads, placer
from jagg_jax.training.sharding import batch_shards, by_sample

STAND_IN_LENGTH = (
    77 + 256
)  # tokens of a prompt in a dry run without a cache: CLIP's and T5's as encode_prompts has them


def load_sd3_pipeline(config: TrainConfig, folder: Path, mesh: Mesh) -> Pipeline:
    """Loads the transformer and the decoder straight to their places on the mesh, and opens the caches.

    In a dry run weights are `jax.ShapeDtypeStruct`s, and without a cache the prompts are stand-ins.

    Raises:
      ConfigError: a folder or a cache that can't be used, an image size or a mesh that doesn't fit the model.
    """
    try:
        transformer = read_config(folder / "transformer", SD3Config)
        autoencoder = read_config(folder / "vae", VAEConfig)
    except ValueError as error:
        raise ConfigError(f"--weights {error}") from error
    latent_shape = _latent_shape(config, transformer, autoencoder)
    check_heads(transformer.num_attention_heads, mesh)
    train_prompts, eval_prompts, caches = _prompts(config, folder, transformer)
    adapters = Adapters(config.lora_rank, config.lora_alpha, config.lora_targets) if config.lora_rank else None
    try:
        model = load_sd3(
            folder / "transformer",
            dtype=config.compute_dtype,
            remat=config.remat,
            scan_layers=config.scan_layers,
            adapters=adapters,
            adapter_key=keys_for(config.seed, ADAPTER_KEYS),
            frozen_dtype=jnp.dtype(config.frozen_dtype),
            place=placer(mesh, SD3_TENSOR_RULES, config.fsdp_min_size),
            abstract=config.dry_run,
        )
        vae = load_vae_decoder(folder / "vae", place=placer(mesh, {}, None), abstract=config.dry_run)
    except AdapterError as error:
        raise ConfigError(f"--lora-{error}") from error
    except ValueError as error:
        raise ConfigError(f"--weights {error}") from error
    return Pipeline(
        velocity_fn=model.velocity_fn,
        params=model.params,
        num_adapted=model.num_adapted,
        tensor_rules=SD3_TENSOR_RULES,
        latent_shape=latent_shape,
        decoder=Decoder(_decode_one_a_device(vae, mesh), vae.params),
        train_prompts=train_prompts,
        eval_prompts=eval_prompts,
        find_prompts=partial(_find_prompts, caches),
        alphabet=None,
        sd3_config=model.config,
    )


def _latent_shape(config: TrainConfig, transformer: SD3Config, autoencoder: VAEConfig) -> tuple[int, int, int]:
    """Of one sample, (height, width, channels)."""
    step = autoencoder.downsampling * transformer.patch_size
    largest = step * transformer.pos_embed_max_size
    if config.image_size % step or config.image_size > largest:
        raise ConfigError(f"--image-size {config.image_size}: must be a multiple of {step}, at most {largest}")
    if autoencoder.latent_channels != transformer.in_channels:
        channels = f"{autoencoder.latent_channels} latent channels, the transformer takes {transformer.in_channels}"
        raise ConfigError(f"--weights {config.weights}: the autoencoder has {channels}")
    side = config.image_size // autoencoder.downsampling
    return side, side, transformer.in_channels


def _decode_one_a_device(vae: VAEDecoder, mesh: Mesh):
    """`Decoder.apply` that decodes one image a device at a time, in tiles where it's larger than the trained size."""
    tile = vae.config.sample_size // vae.config.downsampling

    def decode_part(params, part):
        part = jax.lax.with_sharding_constraint(part, by_sample(mesh))
        return tiled_decode(partial(vae.decode, params), part, tile, tile // 4)

    def apply(params, samples):
        shards = batch_shards(mesh)
        rounds = jnp.swapaxes(samples.reshape(shards, -1, *samples.shape[1:]), 0, 1)
        images = jax.lax.map(partial(decode_part, params), rounds)
        return jnp.swapaxes(images, 0, 1).reshape(-1, *images.shape[2:])

    return apply


def _prompts(
    config: TrainConfig, folder: Path, transformer: SD3Config
) -> tuple[PromptSource, PromptSource, list[PromptCache]]:
    """The prompts to train on, those held out, and the caches that they are in."""
    if not config.prompt_cache:
        stand_in = _stand_in(config, transformer)
        return stand_in, stand_in, []
    caches = []
    for name in ("prompt_cache", "eval_prompt_cache"):
        if not getattr(config, name):
            continue
        try:
            cache = PromptCache.open(
                getattr(config, name),
                joint_attention_dim=transformer.joint_attention_dim,
                pooled_projection_dim=transformer.pooled_projection_dim,
                # a folder may come without its text encoders, which are large and not needed here
                model=folder if (folder / "text_encoder").is_dir() else None,
            )
        except ValueError as error:
            raise ConfigError(f"--{name.replace('_', '-')} {error}") from error
        caches.append(cache)
    for field in ("length", "dtype", "negative_prompt", "encoders_digest"):
        ours, theirs = getattr(caches[0].info, field), getattr(caches[-1].info, field)
        if ours != theirs:
            fix = f"has {field} {theirs!r}, --prompt-cache has {ours!r}; encode both alike"
            raise ConfigError(f"--eval-prompt-cache {config.eval_prompt_cache}: {fix}")
    if len(caches) == 2:
        return PromptSource.of_cache(caches[0]), PromptSource.of_cache(caches[1]), caches
    kept = len(caches[0]) - config.eval_prompts
    return PromptSource.of_cache(caches[0], stop=kept), PromptSource.of_cache(caches[0], start=kept), caches


def _stand_in(config: TrainConfig, transformer: SD3Config) -> PromptSource:
    """Embeddings of the right shapes that say nothing."""

    def read(rows: np.ndarray) -> TextEmbeddings:
        shapes = (STAND_IN_LENGTH, transformer.joint_attention_dim), (transformer.pooled_projection_dim,)
        return TextEmbeddings(*(np.zeros((len(rows), *shape), jnp.bfloat16) for shape in shapes))

    return PromptSource(("",) * config.batch_size, read, read(np.zeros(1, np.int64)))


def _find_prompts(caches: Sequence[PromptCache], texts: Sequence[str]) -> PromptSource:
    """Those prompts out of the caches; ValueError at one that's in none."""
    places = {text: (cache, row) for cache in caches for row, text in enumerate(cache.prompts)}
    for text in texts:
        if text not in places:
            raise ValueError(f"{text!r} is in no prompt cache of the run; only encoded prompts can be drawn")

    def read(rows: np.ndarray) -> TextEmbeddings:
        parts = [cache.rows([row]) for cache, row in (places[texts[index]] for index in rows)]
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts)

    return PromptSource(tuple(texts), read, caches[0].negative)
