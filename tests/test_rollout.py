"""Rollouts: what is stored, what is scored, where the noise goes, and whose key it comes from."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import mlp, mlp_params, normal

from jagg_jax import CPS, ODE, DanceSDE, FlowSDE, flow_sigmas, initial_noise, rollout
from jagg_jax.rollout import step_log_probs

PARAMS = mlp_params()
SIGMAS = flow_sigmas(5, 3.0)
KEYS = jax.random.split(jax.random.key(1), 6)
NOISE = initial_noise(KEYS, (5,))
COND = normal(2, (6, 3))
SAMPLERS = [FlowSDE(0.7), DanceSDE(0.3), CPS(0.5)]


@partial(jax.jit, static_argnames=("sampler", "num_noisy_steps", "keep_velocities"))
def draw(noise, keys, cond, sampler, num_noisy_steps, keep_velocities):
    options = {"sampler": sampler, "num_noisy_steps": num_noisy_steps, "keep_velocities": keep_velocities}
    return rollout(mlp, PARAMS, noise, SIGMAS, keys, cond, **options)


def sample(sampler, noise=NOISE, keys=KEYS, cond=COND, num_noisy_steps=None, keep_velocities=True):
    return draw(noise, keys, cond, sampler, num_noisy_steps, keep_velocities)


@pytest.mark.parametrize("storage", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_what_is_scored_is_what_is_stored(sampler, storage):
    """Log-probabilities follow, step by step, from the stored states and velocities alone."""
    trajectory = sample(sampler, noise=NOISE.astype(storage))
    assert trajectory.latents.dtype == storage
    assert trajectory.latents.shape == (6, 6, 5)
    assert trajectory.log_probs.dtype == jnp.float32
    np.testing.assert_array_equal(trajectory.latents[0], NOISE.astype(storage))
    np.testing.assert_array_equal(trajectory.samples, trajectory.latents[-1])
    for i in range(4):
        state = trajectory.latents[i].astype(jnp.float32)
        velocity = mlp(PARAMS, state, jnp.full(6, SIGMAS[i]), COND)
        np.testing.assert_allclose(trajectory.velocities[i], velocity, rtol=1e-4, atol=1e-5)
        mean, std = sampler.transition(trajectory.velocities[i], state, SIGMAS[i], SIGMAS[i + 1])
        log_prob = sampler.log_prob(trajectory.latents[i + 1], mean, std)
        np.testing.assert_allclose(trajectory.log_probs[i], log_prob, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sampler", [*SAMPLERS, ODE()])
def test_last_step_is_a_plain_euler_step(sampler):
    trajectory = sample(sampler)
    expected = trajectory.latents[-2] - SIGMAS[-2] * trajectory.velocities[-1]
    np.testing.assert_allclose(trajectory.samples, expected, rtol=1e-5, atol=1e-6)
    assert not np.any(trajectory.log_probs[-1])
    other = sample(sampler, keys=jax.random.split(jax.random.key(9), 6))
    assert np.array_equal(other.latents[1], trajectory.latents[1]) == (not sampler.has_log_prob)
    trainable = 4 if sampler.has_log_prob else 0
    assert trajectory.num_noisy_steps == trainable
    with pytest.raises(ValueError, match=f"the first {trainable} steps are"):
        trajectory.transitions(5)


def test_steps_without_noise_are_not_trainable():
    trajectory = sample(FlowSDE(0.7), num_noisy_steps=2)
    assert np.all(trajectory.log_probs[:2] != 0.0)
    assert not np.any(trajectory.log_probs[2:])
    for i in range(2, 5):
        euler = trajectory.latents[i] - (SIGMAS[i] - SIGMAS[i + 1]) * trajectory.velocities[i]
        np.testing.assert_allclose(trajectory.latents[i + 1], euler, rtol=1e-5, atol=1e-6)
    assert trajectory.transitions(2).latents.shape[0] == 2
    with pytest.raises(ValueError, match="the first 2 steps are"):
        trajectory.transitions(3)
    with pytest.raises(ValueError, match="steps 1 to 3"):
        trajectory.transitions(2, start=1)


def test_transitions_are_a_window():
    trajectory = sample(FlowSDE(0.7))
    window = trajectory.transitions(2, start=1)
    np.testing.assert_array_equal(window.latents, trajectory.latents[1:3])
    np.testing.assert_array_equal(window.next_latents, trajectory.latents[2:4])
    np.testing.assert_array_equal(window.sigmas, SIGMAS[1:3])
    np.testing.assert_array_equal(window.next_sigmas, SIGMAS[2:4])
    np.testing.assert_array_equal(window.log_probs, trajectory.log_probs[1:3])
    np.testing.assert_array_equal(window.velocities, trajectory.velocities[1:3])
    without = sample(FlowSDE(0.7), keep_velocities=False)
    assert without.velocities is None
    assert without.transitions(4).velocities is None


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), CPS(0.5)])
def test_a_sample_depends_on_its_own_key_alone(sampler):
    """Permuting keys, noise and cond permutes every output bit for bit; another neighbour changes nothing."""
    trajectory = sample(sampler)
    order = jnp.array([3, 0, 5, 1, 4, 2])
    keys = KEYS[order]
    permuted = sample(sampler, noise=initial_noise(keys, (5,)), keys=keys, cond=COND[order])
    for name in ("latents", "log_probs", "velocities"):
        np.testing.assert_array_equal(getattr(permuted, name), getattr(trajectory, name)[:, order], err_msg=name)
    neighbours = sample(sampler, keys=KEYS.at[1:].set(jax.random.split(jax.random.key(7), 5)))
    np.testing.assert_array_equal(neighbours.latents[:, 0], trajectory.latents[:, 0])
    assert np.all(np.any(neighbours.latents[1, 1:] != trajectory.latents[1, 1:], axis=-1))


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_noise_has_the_mean_and_std_of_the_transition(sampler):
    """10^5 draws: standardised by transition() they are standard normal, and independent of what came before."""
    batch, elements, sigmas = 2048, 16, flow_sigmas(4, 3.0)
    keys = jax.random.split(jax.random.key(3), batch)
    noise = initial_noise(keys, (elements,))

    @jax.jit
    def standardised():
        trajectory = rollout(
            lambda p, x, s: jnp.tanh(p * x),
            jnp.float32(1.5),
            noise,
            sigmas,
            keys,
            sampler=sampler,
            keep_velocities=True,
        )
        steps = trajectory.transitions(3)
        mean, std = jax.vmap(sampler.transition)(steps.velocities, steps.latents, steps.sigmas, steps.next_sigmas)
        return (steps.next_latents - mean) / std[:, None, None]

    draws = np.asarray(standardised(), np.float64)
    count = draws[0].size
    for z in draws:
        assert abs(z.mean()) < 5 / np.sqrt(count)
        assert abs(z.std() - 1) < 5 / np.sqrt(2 * count)
        assert abs((z**4).mean() - 3) < 5 * np.sqrt(96 / count)
    series = [np.asarray(noise, np.float64), *draws]
    for i, first in enumerate(series):
        for second in series[i + 1 :]:
            assert abs((first * second).mean()) < 5 / np.sqrt(count)
    # nor do the elements of a sample, or neighbouring samples, share noise
    assert abs((draws[0][:, 1:] * draws[0][:, :-1]).mean()) < 5 / np.sqrt(count)
    assert abs((draws[0][1:] * draws[0][:-1]).mean()) < 5 / np.sqrt(count)


def test_step_log_probs_are_differentiable():
    """The gradient of the score is the analytic one: d log p / d v = (x' - mean) / std^2 * d mean / d v / count."""
    trajectory = sample(FlowSDE(0.7))
    steps = trajectory.transitions(4)
    sampler = FlowSDE(0.7)

    @jax.jit
    def gradient(velocities):
        def total(v):
            arguments = (steps.latents, steps.next_latents, steps.sigmas, steps.next_sigmas)
            return jnp.sum(step_log_probs(sampler, v, *arguments))

        return jax.grad(total)(velocities)

    actual = gradient(steps.velocities)
    for i in range(4):
        mean, std = sampler.transition(steps.velocities[i], steps.latents[i], SIGMAS[i], SIGMAS[i + 1])
        by_velocity = -(1 + (std**2 / (2 * SIGMAS[i] * (SIGMAS[i] - SIGMAS[i + 1]))) * (1 - SIGMAS[i]))
        by_velocity = by_velocity * (SIGMAS[i] - SIGMAS[i + 1])
        expected = (steps.next_latents[i] - mean) / std**2 * by_velocity / 5
        np.testing.assert_allclose(actual[i], expected, rtol=2e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_noisy_steps": 5}, "num_noisy_steps is 5"),
        ({"num_noisy_steps": -1}, "num_noisy_steps is -1"),
        ({"keys": KEYS[:5]}, r"keys has shape \(5,\)"),
        ({"keys": jax.random.key_data(KEYS)}, r"keys has shape \(6, 2\)"),
        ({"velocity_fn": lambda *args: mlp(*args)[:, :1]}, "velocity_fn returned shape"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {"velocity_fn": mlp, "keys": KEYS, **change}
    velocity_fn, keys = arguments.pop("velocity_fn"), arguments.pop("keys")
    with pytest.raises(ValueError, match=message):
        rollout(velocity_fn, PARAMS, NOISE, SIGMAS, keys, COND, sampler=FlowSDE(0.7), **arguments)


@pytest.mark.parametrize(("num_steps", "start"), [(0, 0), (2, -1), (5, 0), (1, 4)])
def test_bad_windows(num_steps, start):
    with pytest.raises(ValueError, match="not all trainable; the first 4 steps are"):
        sample(FlowSDE(0.7)).transitions(num_steps, start)
