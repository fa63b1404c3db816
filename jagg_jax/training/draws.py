"""What a run draws at random, and the backward plans: all by (seed, purpose, update), never by device."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jagg_jax.flow import flow_sigmas
from jagg_jax.plans import BackwardPlan, exact_plan, hat_plan, jagg_plan, subset_plan
from jagg_jax.training.config import TrainConfig

# what a seed's keys are for: the same seed never serves two purposes with the same key
ROLLOUT_KEYS, PLAN_KEYS, EVAL_KEYS, ADAPTER_KEYS, WINDOW_KEYS = range(5)


def keys_for(seed: int, purpose: int) -> jax.Array:
    """The key from which all of one purpose's keys follow."""
    return jax.random.fold_in(jax.random.key(seed), purpose)


def sample_keys(config: TrainConfig, update: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Keys [B] of the initial noises and [B] of the step noises, by (seed, update, prompt, generation)."""
    key = jax.random.fold_in(keys_for(config.seed, ROLLOUT_KEYS), update)
    prompts = jnp.arange(config.batch_size // config.num_generations)
    prompt_keys = jax.vmap(jax.random.fold_in, (None, 0))(key, prompts)
    fold_generations = jax.vmap(jax.random.fold_in, (None, 0))
    generations = jnp.arange(config.num_generations)
    keys = jax.vmap(fold_generations, (0, None))(prompt_keys, generations).reshape(-1)
    pairs = jax.vmap(jax.random.split)(keys)
    return pairs[:, 0], pairs[:, 1]


def window_start(config: TrainConfig, update: int | jax.Array) -> int | jax.Array:
    """The first trained step of rollout `update`: 0, or, for a random window, an int32 scalar that every start is.

    `update` may be traced; the same one gives the same start inside and outside a program.
    """
    if config.train_window == "first":
        return 0
    return jax.random.randint(_window_key(config, update), (), 0, config.num_steps - config.num_train_steps)


def backward_plan(config: TrainConfig, update: int, inner: int = 0) -> BackwardPlan:
    """The plan of optimiser update `inner` on rollout `update`, for the trained steps and their own noise levels."""
    start, num_steps = int(window_start(config, update)), config.num_train_steps
    # on the host: sliced on a device, every start would be one more small program
    sigmas = np.asarray(flow_sigmas(config.num_steps, config.shift))[start : start + num_steps]
    if config.plan == "exact":
        return exact_plan(num_steps)
    if config.plan == "jagg":
        return jagg_plan(sigmas, config.steps_per_group, config.jagg_frac, config.alpha)
    if config.plan == "hat":
        return hat_plan(sigmas, config.steps_per_group, config.jagg_frac, _hat_phase(config, update, inner))
    key = jax.random.fold_in(_plan_key(config, update), inner)
    return subset_plan(key, num_steps, config.subset_steps)


def describe(config: TrainConfig, update: int, plan: BackwardPlan) -> dict[str, Any]:
    """What the log says about the draws of rollout `update`, whose first optimiser update has this plan.

    `window_start`; `trained_steps`, the rollout's steps that are backpropagated in that update; `hat_phase` with plan
    hat; and, where they were used, `window_key` and `plan_key` as two uint32. Optimiser update i on the rollout draws
    from `fold_in(plan_key, i)`.
    """
    start = int(window_start(config, update))
    drawn = {"window_start": start, "trained_steps": sorted((start + np.asarray(plan.anchors)).tolist())}
    if config.train_window == "random":
        drawn["window_key"] = jax.random.key_data(_window_key(config, update)).tolist()
    if config.plan == "subset" or config.hat_phase == "random":
        drawn["plan_key"] = jax.random.key_data(_plan_key(config, update)).tolist()
    if config.plan == "hat":
        drawn["hat_phase"] = _hat_phase(config, update, 0)
    return drawn


def _hat_phase(config: TrainConfig, update: int, inner: int) -> int:
    """How far the grid of plan hat is moved, below its spacing."""
    if config.hat_phase == "fixed":
        return 0
    key = jax.random.fold_in(_plan_key(config, update), inner)
    return int(jax.random.randint(key, (), 0, config.steps_per_group - 1))


def _plan_key(config: TrainConfig, update: int) -> jax.Array:
    return jax.random.fold_in(keys_for(config.seed, PLAN_KEYS), update)


def _window_key(config: TrainConfig, update: int | jax.Array) -> jax.Array:
    return jax.random.fold_in(keys_for(config.seed, WINDOW_KEYS), update)
