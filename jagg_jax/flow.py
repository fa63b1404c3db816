"""Noise schedules and transitions: what one denoising step does to the latents, and how probable its outcome was.

Flow matching convention: latents x_sigma = (1 - sigma) x_0 + sigma noise, velocity v = dx/dsigma = noise - x_0, and
sigma falls from 1 (noise) to 0 (data). All arithmetic is float32, whatever the model computes in. A sampler is a frozen
value with two pure methods; it remembers no step. A sigma is a scalar or one value a sample, [B].
"""

import abc
import dataclasses
import functools
import math
import operator
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np

LOG_SQRT_2PI = 0.5 * math.log(2.0 * math.pi)


def flow_sigmas(num_steps: int, shift: float = 1.0) -> jax.Array:
    """Noise levels of a sampler with `num_steps` steps, float32 [num_steps + 1], from 1 to 0.

    sigma = shift t / (1 + (shift - 1) t) on a uniform grid of t from 1 to 0; shift > 1 spends more steps at high noise
    (Stable Diffusion 3, arXiv 2403.03206, eq. 23). `dynamic_shift` gives a shift that follows the resolution.

    Raises:
      ValueError: `num_steps` below 1 or `shift` not positive.
    """
    if num_steps < 1:
        raise ValueError(f"num_steps is {num_steps}; it must be at least 1")
    if not (shift > 0 and math.isfinite(shift)):
        raise ValueError(f"shift is {shift}; it must be positive and finite")
    t = np.linspace(1.0, 0.0, num_steps + 1)
    return jnp.asarray(shift * t / (1.0 + (shift - 1.0) * t), jnp.float32)


def dynamic_shift(
    num_tokens: int, base_tokens: int = 256, max_tokens: int = 4096, base_shift: float = 0.5, max_shift: float = 1.15
) -> float:
    """Resolution-dependent shift exp(mu), with mu linear in the number of image tokens (FLUX's published schedule).

    mu is `base_shift` at `base_tokens` and `max_shift` at `max_tokens`; diffusers calls it `use_dynamic_shifting` with
    `time_shift_type="exponential"`. Hand the result to `flow_sigmas(num_steps, shift)`.

    Raises:
      ValueError: `num_tokens` below 1, or `max_tokens` equal to `base_tokens`.
    """
    if num_tokens < 1:
        raise ValueError(f"num_tokens is {num_tokens}; it must be at least 1")
    if max_tokens == base_tokens:
        raise ValueError(f"max_tokens equals base_tokens ({base_tokens}); they must differ")
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return math.exp(base_shift + slope * (num_tokens - base_tokens))


def expand(values: jax.Array, like: jax.Array) -> jax.Array:
    """A scalar or [B] as float32, shaped to broadcast against `like` [B, ...]."""
    values = jnp.asarray(values, jnp.float32)
    return values if values.ndim == 0 else values.reshape(values.shape + (1,) * (like.ndim - values.ndim))


def rounded(product: jax.Array) -> jax.Array:
    """A float32 product that is about to be added to something, rounded to 22 bits of mantissa.

    Compilers contract a product and an addition into one fused multiply-add, which rounds once instead of twice, where
    it suits the program around it. A product that is rounded in between has the same bits in every program.
    """
    return jax.lax.reduce_precision(product, exponent_bits=8, mantissa_bits=22)


def sample_mean(values: jax.Array) -> jax.Array:
    """Mean over all elements of each sample, [B, ...] -> float32 [B], summed in an order that nothing changes.

    `jnp.mean` leaves the order to the compiler, which chooses it by the batch a device or a micro-batch happens to
    hold. Here every sum is a chain of at most eight element-wise additions, so that a sample's mean has the same bits
    in the rollout, in any micro-batch and on any number of devices.
    """
    values = values.astype(jnp.float32).reshape(values.shape[0], -1)
    # scaled before the sum: afterwards it would be one more product that a caller's addition may be fused with
    values = rounded(values * (1.0 / values.shape[1]))
    while values.shape[1] > 1:
        terms = min(8, values.shape[1])
        values = jnp.pad(values, ((0, 0), (0, -values.shape[1] % terms)))
        # a barrier a level: none is fused into the next, whose code would repeat it eight times
        columns = jax.lax.optimization_barrier(values.reshape(values.shape[0], terms, -1))
        values = functools.reduce(operator.add, (columns[:, term] for term in range(terms)))
    return jax.lax.optimization_barrier(values[:, 0])


class Sampler(Protocol):
    """What a rollout needs of a sampler; `FlowSDE`, `DanceSDE`, `CPS` and `ODE` provide it.

    `has_log_prob` says whether its steps are drawn from a distribution, so that they can be scored and trained.
    """

    has_log_prob: bool

    def transition(
        self, velocity: jax.Array, latents: jax.Array, sigma: jax.Array, sigma_next: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Mean [B, ...] and standard deviation (shaped like `sigma`) of the next latents, float32."""

    def log_prob(self, next_latents: jax.Array, mean: jax.Array, std: jax.Array) -> jax.Array:
        """Log-probability of `next_latents`, averaged over the elements of a sample: float32 [B]."""


@dataclasses.dataclass(frozen=True)
class _EulerMaruyama(abc.ABC):
    """The kernel that `FlowSDE` and `DanceSDE` share; they differ in the noise scale s.

    mean = x (1 - s^2 D / (2 sigma)) - v (1 + s^2 (1 - sigma) / (2 sigma)) D and std = s sqrt(D), with D the step size
    sigma - sigma_next. The log-probability is the Gaussian one, averaged over the elements of a sample.

    Attributes:
      noise_level: eta, at least 0; 0 is the deterministic Euler step and has no finite log-probability.

    Raises:
      ValueError: `noise_level` negative or not finite.
    """

    noise_level: float
    has_log_prob = True

    def __post_init__(self):
        if not (self.noise_level >= 0 and math.isfinite(self.noise_level)):
            raise ValueError(f"noise_level is {self.noise_level}; it must be finite and at least 0")

    @abc.abstractmethod
    def noise_scale(self, sigma: jax.Array, sigma_next: jax.Array) -> jax.Array:
        """s, float32, shaped like `sigma`."""

    def transition(self, velocity, latents, sigma, sigma_next):
        """Mean [B, ...] and standard deviation (shaped like `sigma`) of the next latents, float32."""
        scale = expand(self.noise_scale(sigma, sigma_next), latents)
        x, v = latents.astype(jnp.float32), velocity.astype(jnp.float32)
        level = expand(sigma, latents)
        step = level - expand(sigma_next, latents)
        drift = scale**2 / (2.0 * level)
        kept = rounded(x * (1.0 - rounded(drift * step)))
        mean = kept - rounded(v * (1.0 + rounded(drift * (1.0 - level))) * step)
        std = rounded(scale * jnp.sqrt(step))
        return mean, std.reshape(jnp.shape(sigma))

    def log_prob(self, next_latents, mean, std):
        """Gaussian log-density of `next_latents`, averaged over the elements of a sample: float32 [B]."""
        std = jnp.asarray(std, jnp.float32)
        distance = (next_latents.astype(jnp.float32) - mean) * expand(1.0 / std, mean)
        return -0.5 * sample_mean(distance**2) - jnp.log(std) - LOG_SQRT_2PI


class FlowSDE(_EulerMaruyama):
    """Flow-GRPO's sampler (arXiv 2505.05470): s = eta sqrt(sigma / (1 - sigma)).

    At sigma = 1 the denominator takes the schedule's second entry, 1 - sigma_1, which is the step's `sigma_next`.
    """

    def noise_scale(self, sigma, sigma_next):
        """s, float32, shaped like `sigma`."""
        sigma, sigma_next = jnp.asarray(sigma, jnp.float32), jnp.asarray(sigma_next, jnp.float32)
        return rounded(self.noise_level * jnp.sqrt(sigma / (1.0 - jnp.where(sigma == 1.0, sigma_next, sigma))))


class DanceSDE(_EulerMaruyama):
    """DanceGRPO's sampler (arXiv 2505.07818), also used by the JAGG authors: s = eta at every step."""

    def noise_scale(self, sigma, sigma_next):
        """s, float32, shaped like `sigma`."""
        del sigma_next
        return jnp.full(jnp.shape(sigma), self.noise_level, jnp.float32)


@dataclasses.dataclass(frozen=True)
class CPS:
    """Coefficients-preserving sampling (Flow-CPS, arXiv 2509.05952): noise replaces part of the predicted noise.

    std = sigma_next sin(pi eta / 2), mean = (1 - sigma_next) x0_hat + sqrt(sigma_next^2 - std^2) x1_hat with
    x0_hat = x - sigma v and x1_hat = x + (1 - sigma) v, so that the latents keep the schedule's noise level. Its score
    is -mean((x' - mean)^2), without a normaliser, as published.

    Attributes:
      noise_level: eta in [0, 1].

    Raises:
      ValueError: `noise_level` outside [0, 1].
    """

    noise_level: float
    has_log_prob = True

    def __post_init__(self):
        if not 0.0 <= self.noise_level <= 1.0:
            raise ValueError(f"noise_level is {self.noise_level}; CPS needs a value in [0, 1]")

    def transition(self, velocity, latents, sigma, sigma_next):
        """Mean [B, ...] and standard deviation (shaped like `sigma`) of the next latents, float32."""
        x, v = latents.astype(jnp.float32), velocity.astype(jnp.float32)
        level, level_next = expand(sigma, latents), expand(sigma_next, latents)
        angle = 0.5 * math.pi * self.noise_level
        clean, noise = x - rounded(level * v), x + rounded((1.0 - level) * v)
        mean = rounded((1.0 - level_next) * clean) + rounded(level_next * math.cos(angle) * noise)
        return mean, jnp.broadcast_to(jnp.asarray(sigma_next, jnp.float32) * math.sin(angle), jnp.shape(sigma))

    def log_prob(self, next_latents, mean, std):
        """Score of `next_latents`, -mean((x' - mean)^2) over the elements of a sample: float32 [B]."""
        del std
        return -sample_mean((next_latents.astype(jnp.float32) - mean) ** 2)


@dataclasses.dataclass(frozen=True)
class ODE:
    """The deterministic Euler step, mean = x - D v: for evaluation. Its steps have no probability."""

    has_log_prob = False

    def transition(self, velocity, latents, sigma, sigma_next):
        """Next latents [B, ...] and a standard deviation of 0 (shaped like `sigma`), float32."""
        step = expand(sigma, latents) - expand(sigma_next, latents)
        mean = latents.astype(jnp.float32) - step * velocity.astype(jnp.float32)
        return mean, jnp.zeros(jnp.shape(sigma), jnp.float32)

    def log_prob(self, next_latents, mean, std):
        """Raises ValueError: a deterministic step cannot be scored."""
        raise ValueError("ODE has no log-probability; train with FlowSDE, DanceSDE or CPS")


SAMPLERS = {"flow_sde": FlowSDE, "dance_sde": DanceSDE, "cps": CPS}


def with_guidance(velocity_fn, scale: float):
    """Classifier-free guidance (arXiv 2207.12598) as a velocity function: null + scale (conditional - null).

    Args:
      velocity_fn: `velocity_fn(params, latents, sigma, cond) -> velocity`.
      scale: guidance weight; 1 is the conditional velocity alone and costs one evaluation, others cost two, vmapped.

    Returns:
      `guided(params, latents [B, ...], sigma [B], cond, null_cond)`, `cond` and `null_cond` pytrees of arrays [B, ...];
      velocity float32 [B, ...].
    """

    def guided(params, latents, sigma, cond, null_cond):
        if scale == 1.0:
            return velocity_fn(params, latents, sigma, cond).astype(jnp.float32)
        # a new axis, not a longer batch: a batch axis sharded over devices stays where it is
        both = jax.tree.map(lambda *pair: jnp.stack(pair), cond, null_cond)
        velocities = jax.vmap(velocity_fn, (None, None, None, 0))(params, latents, sigma, both).astype(jnp.float32)
        return velocities[1] + scale * (velocities[0] - velocities[1])

    return guided
