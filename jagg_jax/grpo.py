"""GRPO: advantages within a prompt, the clipped loss, and the divergence from a reference."""

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jagg_jax.flow import CPS, Sampler, expand, sample_mean

ADVANTAGE_STDS = ("group", "global", "none")
KL_KINDS = ("exact", "flow_grpo", "v", "x")

# rewards of one prompt that differ by less than this, relative to their size, agree to float32 noise
FLOAT_NOISE = 1e-6


def group_advantages(
    rewards: jax.Array, num_generations: int, std: str = "group", clip: float | None = 5.0
) -> jax.Array:
    """Advantages of N samples: reward minus the prompt's mean, over a standard deviation, float32 [N].

    The sum over each prompt's samples is zero (to rounding), also after the bound: where an advantage would exceed
    `clip`, all of that prompt's advantages are scaled down together, because advantages that are not centred bias JAGG.
    A prompt with one valid sample, or whose rewards agree to float noise, gets exactly 0. A reward that is not finite
    is masked: its sample gets 0, and the others are treated as if it were not there.

    Args:
      rewards: [N], `num_generations` consecutive entries a prompt.
      num_generations: G; must divide N.
      std: divide by the population standard deviation of the prompt's rewards ("group"), of all rewards ("global"), or
        not at all ("none").
      clip: largest absolute advantage, or None.

    Raises:
      ValueError: `num_generations` does not divide N, an unknown `std`, or a `clip` that is not positive.
    """
    if rewards.ndim != 1 or num_generations < 1 or rewards.shape[0] % num_generations:
        raise ValueError(f"num_generations is {num_generations}; it must divide the rewards, shaped {rewards.shape}")
    if std not in ADVANTAGE_STDS:
        raise ValueError(f"std is {std!r}; it must be one of {', '.join(ADVANTAGE_STDS)}")
    if clip is not None and not clip > 0:
        raise ValueError(f"clip is {clip}; it must be positive, or None")
    rewards = _on_every_device(rewards).astype(jnp.float32).reshape(-1, num_generations)
    valid = jnp.isfinite(rewards)
    rewards = jnp.where(valid, rewards, 0.0)
    size = jnp.max(jnp.abs(rewards), axis=1, keepdims=True)
    centred = _centre(rewards, valid)
    spread = jnp.max(jnp.abs(centred), axis=1, keepdims=True)
    learns = spread > FLOAT_NOISE * size
    centred = jnp.where(learns, centred, 0.0)
    if std == "group":
        advantages = centred / _deviation(centred, valid, axis=1)
    elif std == "global":
        advantages = centred / _deviation(_centre_all(rewards, valid), valid, axis=None)
    else:
        advantages = centred
    if clip is not None:
        largest = jnp.max(jnp.abs(advantages), axis=1, keepdims=True)
        advantages = advantages * jnp.minimum(1.0, clip / jnp.where(largest > 0, largest, 1.0))
    advantages = jnp.where(learns, _centre(advantages, valid), 0.0)
    return advantages.reshape(-1)


def zero_std_fraction(rewards: jax.Array, num_generations: int) -> jax.Array:
    """Share of prompts that teach nothing: all advantages of their samples are 0. Float32 scalar; rewards [N]."""
    advantages = group_advantages(rewards, num_generations, std="none", clip=None)
    return jnp.mean(jnp.all(advantages.reshape(-1, num_generations) == 0.0, axis=1).astype(jnp.float32))


def advantage_sum(advantages: jax.Array, num_generations: int) -> jax.Array:
    """How far advantages [N] are from summing to zero within each prompt: float32 scalar, at least 0.

    The largest |sum over a prompt's samples|, relative to that prompt's largest |advantage|: float noise for
    `group_advantages`, of the order of 1 where one sample was left out or changed afterwards.
    """
    advantages = _on_every_device(advantages).astype(jnp.float32).reshape(-1, num_generations)
    largest = jnp.max(jnp.abs(advantages), axis=1, keepdims=True)
    # divided first, so that the sum can't overflow
    return jnp.max(jnp.abs(jnp.sum(advantages / jnp.where(largest > 0, largest, 1.0), axis=1)))


def ratio_quantiles(log_ratios: jax.Array) -> dict[str, jax.Array]:
    """`ratio_q01`, `ratio_q50` and `ratio_q99` of exp(log_ratios), any shape: float32 scalars, linear in between."""
    quantiles = jnp.quantile(jnp.exp(_on_every_device(log_ratios)), jnp.array([0.01, 0.5, 0.99], jnp.float32))
    return dict(zip(("ratio_q01", "ratio_q50", "ratio_q99"), quantiles, strict=True))


def grpo_loss(
    log_prob: jax.Array,
    old_log_prob: jax.Array,
    advantages: jax.Array,
    clip_range: float | tuple[float, float],
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Clipped policy-gradient loss (PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300), mean over steps and samples.

    ratio = exp(log_prob - old_log_prob); loss = mean of max(-A ratio, -A clip(ratio, 1 - low, 1 + high)).

    Args:
      log_prob: float32 [..., B], under the current parameters.
      old_log_prob: float32 [..., B], under the parameters that sampled.
      advantages: float32 [B].
      clip_range: epsilon, or (low, high).

    Returns:
      The loss, and metrics: `ratio_mean`; `ratio_max_deviation`, the largest |ratio - 1|; `clip_fraction`, the share
      whose gradient clipping removes; `approx_kl`, the mean of ratio - 1 - log ratio (never negative).

    Raises:
      ValueError: shapes that don't agree, or a clip range that is negative.
    """
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    if low < 0 or high < 0:
        raise ValueError(f"clip_range is {clip_range}; both sides must be at least 0")
    if log_prob.shape != old_log_prob.shape or log_prob.shape[-1:] != advantages.shape:
        shapes = f"{log_prob.shape}, {old_log_prob.shape} and {advantages.shape}"
        raise ValueError(f"log_prob, old_log_prob and advantages have shapes {shapes}; expected [..., B] twice and [B]")
    log_ratio = log_prob.astype(jnp.float32) - old_log_prob.astype(jnp.float32)
    ratio = jnp.exp(log_ratio)
    advantages = jnp.broadcast_to(advantages.astype(jnp.float32), ratio.shape)
    unclipped = -advantages * ratio
    clipped = -advantages * jnp.clip(ratio, 1.0 - low, 1.0 + high)
    metrics = {
        "ratio_mean": jnp.mean(ratio),
        "ratio_max_deviation": jnp.max(jnp.abs(ratio - 1.0)),
        "clip_fraction": jnp.mean((clipped > unclipped).astype(jnp.float32)),
        "approx_kl": jnp.mean(ratio - 1.0 - log_ratio),
    }
    # not jnp.maximum: it would halve the gradient wherever both agree, which a clip range of 0 does at ratio 1
    return jnp.mean(jnp.where(clipped > unclipped, clipped, unclipped)), metrics


def kl_to_reference(
    kind: str,
    sampler: Sampler,
    velocity: jax.Array,
    reference_velocity: jax.Array,
    latents: jax.Array,
    sigma: jax.Array,
    sigma_next: jax.Array,
) -> jax.Array:
    """Divergence of one step from the reference model's, averaged over the elements of a sample: float32 [B].

    `exact`: (mu - mu_ref)^2 / (2 std^2), the Kullback-Leibler divergence of the two Gaussians. `flow_grpo`: the same
    with the noise scale s in place of std, as Flow-GRPO's code computes it. `v`: (v - v_ref)^2. `x`: the squared
    difference of the predicted clean samples, sigma^2 (v - v_ref)^2. Gradient flows through `velocity` only.

    Args:
      kind: one of `KL_KINDS`.
      sampler: the sampler of the rollout.
      velocity: [B, ...], the current model's.
      reference_velocity: [B, ...], the reference's at the same latents.
      latents: [B, ...].
      sigma: scalar or [B], the step's noise level.
      sigma_next: scalar or [B], the next one.

    Raises:
      ValueError: an unknown kind, or one that the sampler has no meaning for.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kl is {kind!r}; it must be one of {', '.join(KL_KINDS)}")
    if kind in ("exact", "flow_grpo") and not sampler.has_log_prob:
        raise ValueError(f"kl {kind!r} divides by the noise, which {type(sampler).__name__} has not; use 'v' or 'x'")
    if kind == "flow_grpo" and isinstance(sampler, CPS):
        raise ValueError("kl 'flow_grpo' needs a noise scale, which CPS has not; use 'exact', 'v' or 'x'")
    reference_velocity = jax.lax.stop_gradient(reference_velocity.astype(jnp.float32))
    difference = velocity.astype(jnp.float32) - reference_velocity
    if kind == "v":
        return sample_mean(difference**2)
    if kind == "x":
        return sample_mean((expand(sigma, latents) * difference) ** 2)
    mean, std = sampler.transition(velocity, latents, sigma, sigma_next)
    reference_mean, _ = sampler.transition(reference_velocity, latents, sigma, sigma_next)
    scale = std if kind == "exact" else sampler.noise_scale(sigma, sigma_next)
    return sample_mean((mean - reference_mean) ** 2) / (2.0 * scale**2)


def _on_every_device(values: jax.Array) -> jax.Array:
    """The same values, whole on every device of an explicit mesh, where what belongs together may lie on several."""
    sharding = jax.typeof(values).sharding
    if any(sharding.spec):
        return jax.sharding.reshard(values, NamedSharding(sharding.mesh, PartitionSpec()))
    return values


def _centre(values: jax.Array, valid: jax.Array) -> jax.Array:
    """Values minus the mean of each row's valid entries, 0 where invalid; the second pass removes rounding."""
    count = jnp.maximum(jnp.sum(valid, axis=1, keepdims=True), 1).astype(jnp.float32)
    for _ in range(2):
        values = jnp.where(valid, values - jnp.sum(values, axis=1, keepdims=True) / count, 0.0)
    return values


def _centre_all(values: jax.Array, valid: jax.Array) -> jax.Array:
    return _centre(values.reshape(1, -1), valid.reshape(1, -1)).reshape(values.shape)


def _deviation(centred: jax.Array, valid: jax.Array, axis: int | None) -> jax.Array:
    """Root mean square of the valid entries along `axis` (kept); 1 where all are 0; cannot overflow."""
    largest = jnp.max(jnp.abs(centred), axis=axis, keepdims=True)
    largest = jnp.where(largest > 0, largest, 1.0)
    count = jnp.maximum(jnp.sum(valid, axis=axis, keepdims=True), 1).astype(jnp.float32)
    deviation = largest * jnp.sqrt(jnp.sum((centred / largest) ** 2, axis=axis, keepdims=True) / count)
    return jnp.where(deviation > 0, deviation, 1.0)
