"""A model and settings small enough to train in a test."""

import jax
import pytest
from flax import nnx

from jagg_jax.models import DiT, DiTConfig, as_function, model_metadata, save_weights
from jagg_jax.prompts import get_task


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory) -> str:
    """A small random model whose output layer is not zero, so that rewards differ between samples."""
    task = get_task("digits")
    config = DiTConfig(
        image_shape=task.image_shape, vocab_size=task.vocab_size, prompt_length=task.prompt_length,
        patch_shape=(8, 8), width=32, depth=1, num_heads=2,
    )  # fmt: skip
    _, params = as_function(DiT(config, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape), params)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_weights(path, params, model_metadata(config, "digits"))
    return str(path)


@pytest.fixture(scope="session")
def tiny(tiny_weights) -> dict:
    """Settings of a run of four updates on eight devices."""
    return {
        "weights": tiny_weights, "rewards": {"jpeg_compressibility": 1.0}, "eval_rewards": ("jpeg_compressibility",),
        "updates": 4, "batch_size": 16, "num_generations": 4, "micro_batch_size": 8, "num_steps": 5, "train_steps": 4,
        "eval_steps": 3, "eval_prompts": 6, "eval_every": 2, "sample_every": 2, "checkpoint_every": 1,
        "ema_decay": 0.5, "keep_checkpoints": 3,
    }  # fmt: skip
