"""Rollout: a velocity function, a sampler and keys become a trajectory whose steps are scored as they are stored."""

import dataclasses
from functools import partial, reduce

import jax
import jax.numpy as jnp

from jagg_jax.flow import ODE, Sampler


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("latents", "next_latents", "sigmas", "next_sigmas", "log_probs", "velocities"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class Transitions:
    """N consecutive denoising steps of B samples, step-major.

    Attributes:
      latents: [N, B, ...], the states the steps start from, in the storage dtype.
      next_latents: [N, B, ...], the states they lead to.
      sigmas: float32 [N], the noise levels the steps start from.
      next_sigmas: float32 [N], those they lead to.
      log_probs: float32 [N, B], under the parameters that sampled them; 0 at a step without noise.
      velocities: [N, B, ...], the velocities they were sampled with, or None when they were not kept.
    """

    latents: jax.Array
    next_latents: jax.Array
    sigmas: jax.Array
    next_sigmas: jax.Array
    log_probs: jax.Array
    velocities: jax.Array | None


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("latents", "sigmas", "log_probs", "velocities"),
    meta_fields=("num_noisy_steps",),
)
@dataclasses.dataclass(frozen=True)
class Trajectory:
    """A rollout of T steps.

    Attributes:
      latents: [T + 1, B, ...], from noise to the finished sample, in the storage dtype.
      sigmas: float32 [T + 1], the schedule.
      log_probs: float32 [T, B]; 0 at a step without noise.
      velocities: [T, B, ...] in the model's dtype, or None when they were not kept.
      num_noisy_steps: how many of the first steps took noise; only they can be trained.
    """

    latents: jax.Array
    sigmas: jax.Array
    log_probs: jax.Array
    velocities: jax.Array | None
    num_noisy_steps: int

    @property
    def samples(self) -> jax.Array:
        """The finished samples, [B, ...]."""
        return self.latents[-1]

    def transitions(self, num_steps: int, start: int | jax.Array = 0) -> Transitions:
        """The `num_steps` steps from `start` on.

        Args:
          num_steps: how many steps; static.
          start: the first of them. It may be traced, so that one program serves all windows; a traced start can't be
            checked and is moved to the nearest one that fits.

        Raises:
          ValueError: a window that is empty or holds a step without noise, which the last one always is.
        """
        noisy = self.num_noisy_steps
        known = not isinstance(start, jax.core.Tracer)
        if num_steps < 1 or num_steps > noisy or (known and not 0 <= start <= noisy - num_steps):
            first, after = (start, start + num_steps) if known else (0, num_steps)
            raise ValueError(f"steps {first} to {after} are not all trainable; the first {noisy} steps are")
        start = start if known else jnp.clip(start, 0, noisy - num_steps)

        def window(values: jax.Array, offset: int = 0) -> jax.Array:
            return jax.lax.dynamic_slice_in_dim(values, start + offset, num_steps)

        return Transitions(
            latents=window(self.latents),
            next_latents=window(self.latents, 1),
            sigmas=window(self.sigmas),
            next_sigmas=window(self.sigmas, 1),
            log_probs=window(self.log_probs),
            velocities=None if self.velocities is None else window(self.velocities),
        )


def finite_samples(transitions: Transitions, reference_velocities: jax.Array | None = None) -> jax.Array:
    """Which samples' transitions (and `reference_velocities`, [N, B, ...]) hold finite numbers only: bool [B]."""
    t = transitions
    arrays = (t.latents, t.next_latents, t.log_probs, t.velocities, reference_velocities)
    checks = [jnp.all(jnp.isfinite(x), axis=(0, *range(2, x.ndim))) for x in arrays if x is not None]
    return reduce(jnp.logical_and, checks)


def split_batch(x: jax.Array, axis: int, num_parts: int) -> jax.Array:
    """Cuts the batch axis into `num_parts` along a new leading axis; sample i goes to part i % num_parts.

    Strided, not in blocks: when the batch is sharded over devices in blocks, every part then has samples on each.
    """
    shape = (*x.shape[:axis], x.shape[axis] // num_parts, num_parts, *x.shape[axis + 1 :])
    return jnp.moveaxis(x.reshape(shape), axis + 1, 0)


def in_micro_batches(velocity_fn, num_parts: int):
    """The same velocity function, evaluated on one part of the batch after the other, which takes less memory.

    Args:
      velocity_fn: `velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`.
      num_parts: how many parts; must divide B. 1 is `velocity_fn` itself.
    """
    if num_parts == 1:
        return velocity_fn

    def in_parts(params, *inputs):
        parts = jax.tree.map(lambda x: split_batch(x, 0, num_parts), inputs)
        velocities = jax.lax.map(lambda part: velocity_fn(params, *part), parts)
        return jnp.moveaxis(velocities, 0, 1).reshape(-1, *velocities.shape[2:])

    return in_parts


def initial_noise(keys: jax.Array, shape: tuple[int, ...], dtype: jnp.dtype = jnp.float32) -> jax.Array:
    """One standard normal sample a key, [B, *shape]: a sample depends on its own key alone, not on its place."""
    return jax.vmap(lambda key: jax.random.normal(key, shape, jnp.float32))(keys).astype(dtype)


def rollout(
    velocity_fn,
    params,
    noise: jax.Array,
    sigmas: jax.Array,
    keys: jax.Array,
    *cond,
    sampler: Sampler,
    num_noisy_steps: int | None = None,
    keep_velocities: bool = False,
) -> Trajectory:
    """Samples B trajectories of T steps in one `lax.scan`; what is scored is what is stored.

    Each new state is rounded to the storage dtype before anything else is computed from it. The last step is a plain
    Euler step without noise, as are all steps from `num_noisy_steps` on.

    Args:
      velocity_fn: `velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`.
      params: the model's parameters; nothing is differentiated.
      noise: [B, ...], the states at sigmas[0]; its dtype is the storage dtype of the latents.
      sigmas: [T + 1], decreasing to 0.
      keys: PRNG keys [B]; sample b draws its step noise from keys[b] alone.
      *cond: pytrees handed to every evaluation.
      sampler: `FlowSDE`, `DanceSDE`, `CPS`, or `ODE` for evaluation (its log_probs are all 0).
      num_noisy_steps: how many steps take noise; T - 1 by default, which is also the most.
      keep_velocities: whether the trajectory keeps the velocities (the first update after it can then reuse them).

    Raises:
      ValueError: `num_noisy_steps` outside [0, T - 1], keys that don't match the batch, or velocities that don't match
        the latents.
    """
    num_steps, batch = sigmas.shape[0] - 1, noise.shape[0]
    if num_noisy_steps is None:
        num_noisy_steps = num_steps - 1
    if not 0 <= num_noisy_steps <= num_steps - 1:
        raise ValueError(f"num_noisy_steps is {num_noisy_steps}; with {num_steps} steps it is 0 to {num_steps - 1}")
    if keys.shape != (batch,):
        raise ValueError(f"keys has shape {keys.shape}; give one PRNG key for each of the {batch} samples")
    sigmas = jnp.asarray(sigmas, jnp.float32)
    if not sampler.has_log_prob:
        num_noisy_steps = 0
    is_noisy = jnp.arange(num_steps) < num_noisy_steps

    def step(latents, inputs):
        index, noisy, sigma, sigma_next = inputs
        velocity = velocity_fn(params, latents.astype(jnp.float32), jnp.full(batch, sigma), *cond)
        if velocity.shape != latents.shape:
            raise ValueError(f"velocity_fn returned shape {velocity.shape}; it must be that of noise, {latents.shape}")
        mean, std = sampler.transition(velocity, latents, sigma, sigma_next)
        euler, _ = ODE().transition(velocity, latents, sigma, sigma_next)
        draws = initial_noise(jax.vmap(jax.random.fold_in, (0, None))(keys, index), latents.shape[1:])
        next_latents = jnp.where(noisy, mean + std * draws, euler).astype(latents.dtype)
        return next_latents, (next_latents, velocity)

    inputs = (jnp.arange(num_steps), is_noisy, sigmas[:-1], sigmas[1:])
    _, (states, velocities) = jax.lax.scan(step, noise, inputs)
    latents = jnp.concatenate([noise[None], states])
    if sampler.has_log_prob:
        log_probs = step_log_probs(sampler, velocities, latents[:-1], latents[1:], sigmas[:-1], sigmas[1:])
        log_probs = jnp.where(is_noisy[:, None], log_probs, 0.0)
    else:
        log_probs = jnp.zeros((num_steps, batch), jnp.float32)
    return Trajectory(latents, sigmas, log_probs, velocities if keep_velocities else None, num_noisy_steps)


def step_log_probs(
    sampler: Sampler,
    velocities: jax.Array,
    latents: jax.Array,
    next_latents: jax.Array,
    sigmas: jax.Array,
    next_sigmas: jax.Array,
) -> jax.Array:
    """Log-probabilities of N steps, float32 [N, B], from velocities, latents and next_latents [N, B, ...].

    Rollout and update both score through this one loop over steps: its body is compiled on its own, so that the same
    inputs give the same bits in both programs, and the ratio of the first update is exactly 1.
    """

    @jax.checkpoint
    def score(step):
        # the barriers keep XLA from fusing, and so rounding, this arithmetic together with its surroundings
        velocity, state, next_state, sigma, sigma_next = jax.lax.optimization_barrier(step)
        mean, std = sampler.transition(velocity, state, sigma, sigma_next)
        return jax.lax.optimization_barrier(sampler.log_prob(next_state, mean, std))

    return jax.lax.map(score, (velocities, latents, next_latents, sigmas, next_sigmas))
