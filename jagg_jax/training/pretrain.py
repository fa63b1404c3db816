"""Rectified-flow pre-training of a small DiT on a task's real images: where GRPO starts from.

x_sigma = (1 - sigma) x0 + sigma noise with x0 = 2 image - 1; the model learns the velocity noise - x0 by mean squared
error, sigma drawn logit-normally (Liu et al. 2022, rectified flow; Esser et al. 2024, SD3, for the distribution).
"""

import dataclasses
import json
import math
import shlex
import sys
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from jagg_jax.models import DiT, Params, VelocityFn, as_function, count_parameters, model_metadata, save_weights
from jagg_jax.prompts import Task, get_task
from jagg_jax.prompts.source import PromptSource
from jagg_jax.rewards import make_rewards
from jagg_jax.training.errors import TrainingError
from jagg_jax.training.evaluate import Evaluator, summarise
from jagg_jax.training.experiment import make_drawer
from jagg_jax.training.parts import PIXELS
from jagg_jax.training.pretrain_config import PretrainConfig, model_config, validate
from jagg_jax.training.progress import Progress
from jagg_jax.training.sharding import make_mesh
from jagg_jax.update import TrainState, apply_gradient

EVAL_REWARDS = ("ocr_edit", "ocr_logprob")
RECENT = 20  # updates whose losses are averaged for the final loss


def flow_matching_loss(
    velocity_fn: VelocityFn, params: Params, images: jax.Array, tokens: jax.Array, key: jax.Array, dropout: float
) -> jax.Array:
    """Mean squared error of the velocity at random noise levels.

    Args:
      images: float32 [B, H, W, C] in [0, 1]. tokens: int32 [B, L].
      key: draws the noise, the noise levels and the prompts that become null.
      dropout: share of null prompts.
    Returns: float32 scalar.
    """
    noise_key, sigma_key, drop_key = jax.random.split(key, 3)
    batch = images.shape[0]
    x0 = 2.0 * images - 1.0
    noise = jax.random.normal(noise_key, x0.shape)
    sigma = jax.nn.sigmoid(jax.random.normal(sigma_key, (batch,)))
    level = sigma.reshape(batch, 1, 1, 1)
    dropped = jax.random.bernoulli(drop_key, dropout, (batch, 1))
    velocity = velocity_fn(params, (1.0 - level) * x0 + level * noise, sigma, jnp.where(dropped, 0, tokens))
    return jnp.square(velocity - (noise - x0)).mean()


def make_optimizer(config: PretrainConfig) -> optax.GradientTransformation:
    """AdamW behind a global-norm clip, with linear warm-up and cosine decay."""
    schedule = optax.warmup_cosine_decay_schedule(
        0.0, config.learning_rate, config.warmup_updates, config.updates, config.final_learning_rate
    )
    adamw = optax.adamw(schedule, b2=0.99, weight_decay=config.weight_decay)
    return optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)


def make_update(
    velocity_fn: VelocityFn, optimizer: optax.GradientTransformation, config: PretrainConfig
) -> Callable[..., tuple[TrainState, jax.Array]]:
    """The compiled update: (state, images, tokens, index) -> (state, loss). Its randomness follows from the index."""

    def update(state: TrainState, images: jax.Array, tokens: jax.Array, index: jax.Array):
        key = jax.random.fold_in(jax.random.key(config.seed), index)
        loss, gradient = jax.value_and_grad(flow_matching_loss, argnums=1)(
            velocity_fn, state.params, images, tokens, key, config.condition_dropout
        )
        state, _ = apply_gradient(state, gradient, optimizer, loss, config.ema_decay)
        return state, loss

    return jax.jit(update, donate_argnums=0)


def draw_batch(task: Task, config: PretrainConfig, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Images float32 [B, H, W, C] and tokens int32 [B, L] of update `index`; the same whenever it is asked for."""
    rng = np.random.default_rng([config.seed, index])
    prompts = task.prompts("train")
    chosen = [prompts[i] for i in rng.integers(len(prompts), size=config.batch_size)]
    return task.render(rng, chosen), task.encode(chosen)


def held_out_scores(velocity_fn: VelocityFn, params: Params, task: Task, config: PretrainConfig) -> dict[str, float]:
    """Mean `EVAL_REWARDS` over held-out prompts, drawn without guidance from the noise that evaluations use."""
    mesh = make_mesh(devices=jax.local_devices()[:1])
    evaluator = Evaluator(
        prompts=PromptSource.of_task(task, task.prompts("eval")[: config.eval_prompts]),
        draw=make_drawer(velocity_fn, PIXELS, task.image_shape, config.eval_steps, 1.0, 1.0, 0, mesh),
        batch_size=config.eval_prompts,
        shards=1,
        rewards=make_rewards(EVAL_REWARDS, task.alphabet),
    )
    return {name: values["mean"] for name, values in summarise(evaluator(params)[1]).items()}


def train_weights(config: PretrainConfig) -> tuple[VelocityFn, Params, float]:
    """Trains, with a progress bar on stderr.

    Returns: the model, its averaged weights and the mean loss of the last updates.
    Raises:
      TrainingError: the loss is not finite any more.
    """
    task = get_task(config.task)
    velocity_fn, params = as_function(DiT(model_config(config), rngs=nnx.Rngs(config.seed)))
    optimizer = make_optimizer(config)
    state = TrainState.create(params, optimizer, with_ema=True)
    update = make_update(velocity_fn, optimizer, config)
    losses, pending = [], None
    with Progress(config.updates, lines=10) as progress:
        for index in range(config.updates):
            state, loss = update(state, *draw_batch(task, config, index), index)
            # The loss of the update before: reading the newest would leave the device idle.
            if pending is not None:
                losses.append(_finite(pending, index))
                progress.update(index, loss=losses[-1])
            pending = loss
        losses.append(_finite(pending, config.updates))
        progress.update(config.updates, loss=losses[-1])
    return velocity_fn, state.ema_params, float(np.mean(losses[-RECENT:]))


def pretrain(config: PretrainConfig) -> dict[str, str]:
    """Trains a model and writes its averaged weights to `config.output`.

    Returns: the metadata of the file: what `load_model` needs, the command, the settings, and what was measured.
    Raises:
      ConfigError: settings that can't be used; nothing has been computed or written.
      TrainingError: the training diverged; nothing has been written.
    """
    validate(config)
    task, start = get_task(config.task), time.perf_counter()
    velocity_fn, params, loss = train_weights(config)
    seconds = time.perf_counter() - start
    scores = held_out_scores(velocity_fn, params, task, config) if config.eval_prompts else {}
    settings = {field: value for field, value in dataclasses.asdict(config).items() if field != "output"}
    metadata = model_metadata(model_config(config), config.task) | {
        "command": shlex.join([Path(sys.orig_argv[0]).name, *sys.orig_argv[1:]]),
        "settings": json.dumps(settings),
        "seed": str(config.seed),
        "updates": str(config.updates),
        "seconds": f"{seconds:.1f}",
        "loss": f"{loss:.4f}",
        "jax": jax.__version__,
        **{f"eval/{name}": f"{value:.4f}" for name, value in scores.items()},
    }
    save_weights(config.output, params, metadata)
    measured = "".join(f", held-out {name} {value:.3f}" for name, value in scores.items())
    size = count_parameters(params)
    print(
        f"{config.output}: {size:,} parameters, {config.updates} updates in {seconds:.0f} s, loss {loss:.3f}{measured}"
    )
    return metadata


def _finite(loss: jax.Array, update: int) -> float:
    """The loss as a number. Raises TrainingError where it is none."""
    value = float(loss)
    if not math.isfinite(value):
        raise TrainingError(f"the loss of update {update} is {value}; lower --learning-rate")
    return value
