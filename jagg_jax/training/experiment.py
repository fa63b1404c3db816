"""From settings to compiled programs: the model, the rollout, the update and the evaluation sampler of one run."""

import dataclasses
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh

from jagg_jax.flow import ODE, SAMPLERS, flow_sigmas, with_guidance
from jagg_jax.grpo import advantage_sum, group_advantages, zero_std_fraction
from jagg_jax.models import merge_params, split_adapters
from jagg_jax.plans import BackwardPlan
from jagg_jax.prompts.order import PromptOrder
from jagg_jax.prompts.source import PromptSource
from jagg_jax.rollout import Transitions, finite_samples, in_micro_batches, initial_noise, rollout
from jagg_jax.training.config import TrainConfig, option
from jagg_jax.training.draws import EVAL_KEYS, backward_plan, keys_for, sample_keys, window_start
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.parts import Decoder, Pipeline
from jagg_jax.training.pipeline import load_pipeline
from jagg_jax.training.sharding import (
    batch_shards,
    by_sample,
    by_step_and_sample,
    make_mesh,
    put,
    put_rows,
    replicated,
    state_shardings,
)
from jagg_jax.update import Objective, TrainState, apply_gradient, policy_gradient


@dataclasses.dataclass(frozen=True)
class Experiment:
    """The parts of a run that its settings decide.

    Attributes:
      config: the settings.
      mesh: the devices.
      pipeline: model, prompts and decoder, without guidance.
      null_condition: of the velocity function, a pytree of arrays [1, ...] on every device.
      frozen: the parameters that never change: the pre-trained ones under adapters, else none.
      initial_trained: the trained ones before training: adapters that change nothing, else the pre-trained ones.
      create_state: compiled trained parameters -> the state before the first update, on buffers of its own.
      learning_rate: optimiser updates applied so far -> learning rate.
      roll_out: compiled (params, reference parameters or None, update, conditions) -> (samples [B, ...], Transitions,
        reference velocities or None).
      advantages: compiled (rewards [B], transitions, reference velocities or None) -> (advantages [B], share of prompts
        whose rewards all agree, `grpo.advantage_sum`).
      update: compiled (state, frozen parameters, transitions, advantages [B], conditions, plan, reference velocities
        or None, use_cached) -> (state, metrics); the state is donated.
      decode: compiled (decoder parameters, samples [B, ...]) -> images float32 [B, H, W, C], nominally in [-1, 1].
    """

    config: TrainConfig
    mesh: Mesh
    pipeline: Pipeline
    null_condition: Any
    frozen: Any
    initial_trained: Any
    create_state: Callable
    learning_rate: Callable
    roll_out: Callable
    advantages: Callable
    update: Callable
    decode: Callable

    def initial_state(self) -> TrainState:
        """The state before the first update, on fresh buffers (the update donates them)."""
        return self.create_state(self.initial_trained)

    def whole(self, trained: Any) -> Any:
        """All parameters of the model, given the trained ones (or an average of them)."""
        return merge_params(self.frozen, trained)

    @property
    def initial_params(self) -> Any:
        """All parameters before training, the reference of the KL penalty: its adapters, if any, change nothing."""
        return self.whole(self.initial_trained)

    def images(self, samples: jax.Array) -> jax.Array:
        """Images float32 [B, H, W, C], nominally in [-1, 1], of samples [B, ...]; both split by sample."""
        return self.decode(self.pipeline.decoder.params, samples)

    def plan(self, update: int, inner: int = 0) -> BackwardPlan:
        """The backward plan of optimiser update `inner` on rollout `update`, for that rollout's trained steps."""
        return backward_plan(self.config, update, inner)

    def prompt_rows(self, update: int) -> np.ndarray:
        """Which training prompts rollout `update` (from 1) draws, int [B], each `num_generations` times in a row.

        They are those of `PromptOrder`: epoch after epoch all training prompts, shuffled by the seed.
        """
        count = self.config.batch_size // self.config.num_generations
        order = PromptOrder(len(self.pipeline.train_prompts.texts), self.config.seed)
        return np.repeat(order.rows((update - 1) * count, count), self.config.num_generations)

    def prompts(self, update: int) -> list[str]:
        """The prompts of rollout `update`, a string a sample."""
        return [self.pipeline.train_prompts.texts[row] for row in self.prompt_rows(update)]

    def conditions(self, update: int) -> tuple[Any, Any]:
        """What the model hears in rollout `update`: of its prompts, arrays [B, ...] split by sample, and of none.

        Every process reads its own samples' rows only.
        """
        rows = self.prompt_rows(update)
        condition = put_rows(lambda places: self.pipeline.train_prompts.read(rows[places]), len(rows), self.mesh)
        return condition, self.null_condition

    def evaluated_params(self, state: TrainState) -> Any:
        """All parameters, the trained ones averaged where the run keeps an average."""
        return self.whole(state.params if state.ema_params is None else state.ema_params)


def build_experiment(
    config: TrainConfig, devices: Sequence[jax.Device] | None = None, trains: bool = True
) -> Experiment:
    """Loads the weights onto the mesh and prepares the programs; compiles nothing yet.

    Args:
      config: the settings.
      devices: those of the mesh; all by default.
      trains: whether it will draw training batches, which must then divide over the devices.

    Raises:
      ConfigError: the weights are no weights or those of another task, or the mesh fits neither the devices nor the
        batch nor the model.
    """
    mesh = _mesh(config, devices, trains)
    pipeline = load_pipeline(config, mesh)
    sampler = SAMPLERS[config.sampler](config.noise_level)
    kl = None if config.kl == "none" else config.kl
    objective = Objective(sampler, (config.clip_low, config.clip_high), kl, config.kl_weight)
    learning_rate = make_learning_rate(config)
    adamw = optax.adamw(learning_rate, b1=config.beta1, b2=config.beta2, weight_decay=config.weight_decay)
    optimizer = optax.chain(optax.clip_by_global_norm(config.max_grad_norm), adamw)
    velocity_fn = with_guidance(pipeline.velocity_fn, config.guidance)
    create = partial(_create_state, optimizer, config.ema_decay > 0)
    frozen, trained = split_adapters(pipeline.params) if config.lora_rank else ({}, pipeline.params)
    place_all = partial(state_shardings, mesh=mesh, tensor_rules=pipeline.tensor_rules, min_size=config.fsdp_min_size)
    state, fixed = place_all(jax.eval_shape(create, trained)), place_all(frozen)
    params = merge_params(fixed, state.params)
    everywhere, samples, steps = replicated(mesh), by_sample(mesh), by_step_and_sample(mesh)
    conditions = (samples, everywhere)
    transitions = Transitions(steps, steps, everywhere, everywhere, steps, steps)
    in_parts = in_micro_batches(velocity_fn, config.batch_size // config.micro_batch_size)
    roll_out = partial(_roll_out, config, in_parts, sampler, pipeline.latent_shape, mesh)
    placed_decoder = jax.tree.map(lambda array: array.sharding, pipeline.decoder.params)
    return Experiment(
        config=config,
        mesh=mesh,
        pipeline=pipeline,
        null_condition=jax.tree.map(lambda array: put(array, everywhere), pipeline.train_prompts.null),
        frozen=frozen,
        initial_trained=trained,
        create_state=jax.jit(create, in_shardings=(state.params,), out_shardings=state),
        learning_rate=learning_rate,
        roll_out=jax.jit(
            roll_out,
            in_shardings=(params, params if kl else None, everywhere, conditions),
            out_shardings=(samples, transitions, steps if kl else None),
        ),
        advantages=jax.jit(
            partial(_advantages, config),
            in_shardings=(everywhere, transitions, steps if kl else None),
            out_shardings=(samples, everywhere, everywhere),
        ),
        update=jax.jit(
            partial(_update, config, velocity_fn, objective, optimizer),
            in_shardings=(state, fixed, transitions, samples, conditions, everywhere, steps if kl else None),
            out_shardings=(state, everywhere),
            donate_argnums=0,
            static_argnums=7,
        ),
        decode=jax.jit(pipeline.decoder.apply, in_shardings=(placed_decoder, samples), out_shardings=samples),
    )


def make_learning_rate(config: TrainConfig) -> optax.Schedule:
    """Optimiser updates applied so far -> learning rate."""
    warmup = config.warmup_updates * config.updates_per_rollout
    peak, start = config.learning_rate, 0.0 if warmup else config.learning_rate
    if config.schedule == "cosine":
        return optax.warmup_cosine_decay_schedule(start, peak, warmup, config.updates * config.updates_per_rollout)
    return optax.linear_schedule(start, peak, max(warmup, 1))


def make_drawer(
    velocity_fn,
    decoder: Decoder,
    latent_shape: tuple[int, ...],
    num_steps: int,
    shift: float,
    guidance: float,
    seed: int,
    mesh: Mesh,
) -> Callable:
    """The evaluation sampler: (params, prompts, rows [B], indices [B]) -> images [B, H, W, C], by Euler steps (ODE).

    `prompts` is the `PromptSource` whose `rows` are drawn. Sample b starts from the noise of (seed, indices[b]), which
    is never that of a training sample. Every process gets all images, nominally in [-1, 1].
    """
    guided = with_guidance(velocity_fn, guidance)

    def draw(params, decoder_params, condition, null_condition, indices):
        keys = jax.vmap(jax.random.fold_in, (None, 0))(keys_for(seed, EVAL_KEYS), indices)
        noise = jax.lax.with_sharding_constraint(initial_noise(keys, latent_shape), by_sample(mesh))
        sigmas, cond = flow_sigmas(num_steps, shift), _both(condition, null_condition)
        return decoder.apply(decoder_params, rollout(guided, params, noise, sigmas, keys, *cond, sampler=ODE()).samples)

    compiled = jax.jit(draw, out_shardings=replicated(mesh))

    def drawer(params, prompts: PromptSource, rows: np.ndarray, indices: np.ndarray) -> jax.Array:
        condition = put_rows(lambda places: prompts.read(rows[places]), len(rows), mesh)
        null_condition = jax.tree.map(lambda array: put(array, replicated(mesh)), prompts.null)
        indices = put(np.asarray(indices, np.int32), by_sample(mesh))
        return compiled(params, decoder.params, condition, null_condition, indices)

    return drawer


def to_images(images: jax.Array) -> np.ndarray:
    """Images [B, H, W, 1 or 3] in [-1, 1] as float32 [B, H, W, 3] in [0, 1]; what is not finite stays so."""
    images = np.clip((np.asarray(images, np.float32) + 1.0) / 2.0, 0.0, 1.0)
    return np.broadcast_to(images, (*images.shape[:-1], 3))


def _mesh(config: TrainConfig, devices: Sequence[jax.Device] | None, trains: bool) -> Mesh:
    """The mesh of the settings, after the checks that need to know the devices."""
    try:
        mesh = make_mesh(config.data, config.fsdp, config.tensor, devices)
    except ValueError as error:
        raise ConfigError(f"--data {config.data}: {error}") from error
    shards = batch_shards(mesh)
    for field in ("batch_size", "micro_batch_size"):
        size = getattr(config, field)
        if trains and size % shards:
            raise ConfigError(f"{option(field)} {size}: must be a multiple of data x fsdp, which is {shards}")
    return mesh


def _create_state(optimizer, with_ema: bool, params) -> TrainState:
    return TrainState.create(jax.tree.map(jnp.copy, params), optimizer, with_ema)


def _both(condition: Any, null_condition: Any) -> tuple[Any, Any]:
    """The condition [B, ...] and, as often, the null one, given as [1, ...]."""
    return condition, jax.tree.map(lambda null, full: jnp.broadcast_to(null, full.shape), null_condition, condition)


def _roll_out(config, velocity_fn, sampler, latent_shape, mesh, params, reference, update, conditions):
    """One rollout; the reference's velocities come with it, since they don't change with the updates after it."""
    noise_keys, keys = sample_keys(config, update)
    noise = initial_noise(noise_keys, latent_shape, jnp.dtype(config.storage_dtype))
    noise = jax.lax.with_sharding_constraint(noise, by_sample(mesh))
    sigmas = flow_sigmas(config.num_steps, config.shift)
    cond = _both(*conditions)
    trajectory = rollout(velocity_fn, params, noise, sigmas, keys, *cond, sampler=sampler, keep_velocities=True)
    transitions = trajectory.transitions(config.num_train_steps, window_start(config, update))
    reference_velocities = None
    if reference is not None:
        levels = jnp.broadcast_to(transitions.sigmas[:, None], transitions.log_probs.shape)
        steps = (transitions.latents.astype(jnp.float32), levels)
        reference_velocities = jax.lax.map(lambda step: velocity_fn(reference, *step, *cond), steps)
    return trajectory.samples, transitions, reference_velocities


def _advantages(config, rewards, transitions, reference_velocities):
    # the update leaves these samples out; here already, so that the others' advantages still sum to zero
    rewards = jnp.where(finite_samples(transitions, reference_velocities), rewards, jnp.nan)
    advantages = group_advantages(rewards, config.num_generations, config.advantage_std, config.advantage_clip)
    unbalanced = advantage_sum(advantages, config.num_generations)
    return advantages, zero_std_fraction(rewards, config.num_generations), unbalanced


def _update(
    config: TrainConfig,
    velocity_fn,
    objective: Objective,
    optimizer,
    state: TrainState,
    frozen,
    transitions: Transitions,
    advantages: jax.Array,
    conditions: tuple[Any, Any],
    plan: BackwardPlan,
    reference_velocities,
    use_cached: bool,
):
    gradient, metrics = policy_gradient(
        lambda trained, *inputs: velocity_fn(merge_params(frozen, trained), *inputs),
        state.params,
        transitions,
        advantages,
        *_both(*conditions),
        objective=objective,
        plan=plan,
        reference_velocities=reference_velocities,
        use_cached=use_cached,
        batch_anchors=config.batch_anchors,
        num_micro_batches=config.batch_size // config.micro_batch_size,
    )
    state, applied = apply_gradient(state, gradient, optimizer, metrics["loss"], config.ema_decay)
    return state, metrics | applied
