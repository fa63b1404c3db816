"""Schedules and transitions against the reference numbers and closed forms."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import load_reference, normal

from jagg_jax import CPS, ODE, DanceSDE, FlowSDE, dynamic_shift, flow_sigmas, with_guidance
from jagg_jax.flow import SAMPLERS, rounded, sample_mean

few = settings(deadline=None, max_examples=15, derandomize=True)


@pytest.mark.parametrize(("prefix", "sampler_type"), [("flow", FlowSDE), ("dance", DanceSDE)])
def test_reference_steps(prefix, sampler_type):
    """Means and log-probabilities of the authors' own PyTorch functions, every step, to 1e-5 relative."""
    data = load_reference("sde_steps_shift3_T10")
    sampler, sigmas = sampler_type(float(data["eta"])), data["sigmas"]
    np.testing.assert_allclose(flow_sigmas(10, 3.0), sigmas, rtol=1e-6, atol=1e-7)

    @jax.jit
    def step(velocity, latents, next_latents, sigma, sigma_next):
        mean, std = sampler.transition(velocity, latents, sigma, sigma_next)
        return mean, sampler.log_prob(next_latents, mean, std), std

    names = ("velocity", "latents", "next_latents")
    stds = []
    for i in range(10):
        arrays = (jnp.asarray(data[name][i])[None] for name in names)
        mean, log_prob, std = step(*arrays, jnp.float32(sigmas[i]), jnp.float32(sigmas[i + 1]))
        expected = data[f"{prefix}_mean"][i]
        assert np.linalg.norm(mean[0] - expected) < 1e-5 * np.linalg.norm(expected), i
        np.testing.assert_allclose(log_prob[0], data[f"{prefix}_log_prob"][i], rtol=1e-5)
        stds.append(float(std))
    if prefix == "flow":
        np.testing.assert_allclose(stds, data["flow_noise_scale"] * np.sqrt(-np.diff(sigmas)), rtol=1e-5)


@few
@given(num_steps=st.integers(1, 60), shift=st.floats(0.1, 20.0))
def test_flow_sigmas_closed_form(num_steps, shift):
    sigmas = np.asarray(flow_sigmas(num_steps, shift))
    t = 1.0 - np.arange(num_steps + 1) / num_steps
    assert sigmas.dtype == np.float32
    np.testing.assert_allclose(sigmas, shift * t / (1 + (shift - 1) * t), atol=1e-6)
    assert sigmas[0] == 1.0
    assert sigmas[-1] == 0.0
    assert np.all(np.diff(sigmas) < 0)


def test_dynamic_shift_closed_form():
    assert dynamic_shift(256) == pytest.approx(math.exp(0.5))
    assert dynamic_shift(4096) == pytest.approx(math.exp(1.15))
    assert dynamic_shift(1024) == pytest.approx(math.exp(0.5 + 0.65 * 768 / 3840))
    # FLUX shifts time by exp(mu) / (exp(mu) + 1 / t - 1)
    t, mu = np.linspace(1.0, 0.1, 10), math.log(dynamic_shift(1024))
    np.testing.assert_allclose(
        flow_sigmas(10, dynamic_shift(1024))[:10], math.exp(mu) / (math.exp(mu) + 1 / t - 1), rtol=1e-6
    )


def random_step(shape=(3, 4, 2)):
    return [normal(seed, shape) for seed in range(3)]


@pytest.mark.parametrize(("sigma", "sigma_next"), [(1.0, 0.9), (0.8, 0.55), (0.2, 0.05)])
def test_transitions_in_float64(sigma, sigma_next):
    """The formulas, in NumPy float64."""
    velocity, latents, next_latents = random_step()
    v, x, x_next = (np.asarray(a, np.float64) for a in (velocity, latents, next_latents))

    @partial(jax.jit, static_argnums=0)
    def transition_and_score(sampler, sigma, sigma_next):
        mean, std = sampler.transition(velocity, latents, sigma, sigma_next)
        return mean, std, sampler.log_prob(next_latents, mean, std)

    step, eta = sigma - sigma_next, 0.6
    flow_scale = eta * math.sqrt(sigma / (1 - (sigma_next if sigma == 1.0 else sigma)))
    for sampler, scale in ((FlowSDE(eta), flow_scale), (DanceSDE(eta), eta)):
        mean, std, log_prob = transition_and_score(sampler, sigma, sigma_next)
        drift = scale**2 / (2 * sigma)
        expected = x * (1 - drift * step) - v * (1 + drift * (1 - sigma)) * step
        np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(std, scale * math.sqrt(step), rtol=1e-5)
        density = -((x_next - expected) ** 2) / (2 * std**2) - np.log(std) - 0.5 * math.log(2 * math.pi)
        np.testing.assert_allclose(log_prob, density.mean((1, 2)), rtol=1e-4)
    mean, std, log_prob = transition_and_score(CPS(eta), sigma, sigma_next)
    np.testing.assert_allclose(std, sigma_next * math.sin(math.pi * eta / 2), rtol=1e-5)
    clean, noise = x - sigma * v, x + (1 - sigma) * v
    expected = (1 - sigma_next) * clean + np.sqrt(sigma_next**2 - np.float64(std) ** 2) * noise
    np.testing.assert_allclose(mean, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(log_prob, -((x_next - expected) ** 2).mean((1, 2)), rtol=1e-4)


@pytest.mark.parametrize("sampler", [FlowSDE(0.0), DanceSDE(0.0), CPS(0.0), ODE()])
def test_without_noise_all_samplers_are_euler(sampler):
    velocity, latents, _ = random_step()
    for sigma, sigma_next in ((1.0, 0.8), (0.5, 0.3)):
        mean, std = sampler.transition(velocity, latents, jnp.float32(sigma), jnp.float32(sigma_next))
        np.testing.assert_allclose(mean, latents - (sigma - sigma_next) * velocity, atol=1e-6)
        assert float(std) == 0.0


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), DanceSDE(0.3), CPS(0.5), ODE()])
def test_one_sigma_a_sample(sampler):
    """[B] sigmas do to each sample what a scalar does to all; bfloat16 inputs are computed with in float32."""
    velocity, latents, next_latents = random_step()
    sigma, sigma_next = jnp.array([1.0, 0.7, 0.3]), jnp.array([0.9, 0.4, 0.1])
    mean, std = sampler.transition(velocity, latents, sigma, sigma_next)
    assert std.shape == (3,)
    for b in range(3):
        one_mean, one_std = sampler.transition(velocity, latents, sigma[b], sigma_next[b])
        np.testing.assert_allclose(mean[b], one_mean[b], atol=1e-6)
        np.testing.assert_allclose(std[b], one_std, atol=1e-6)
        if sampler.has_log_prob:
            together = sampler.log_prob(next_latents, mean, std)
            np.testing.assert_allclose(together[b], sampler.log_prob(next_latents, one_mean, one_std)[b], rtol=1e-5)
    low = [a.astype(jnp.bfloat16) for a in (velocity, latents)]
    low_mean, _ = sampler.transition(*low, sigma, sigma_next)
    assert low_mean.dtype == jnp.float32
    np.testing.assert_array_equal(
        low_mean, sampler.transition(*(a.astype(jnp.float32) for a in low), sigma, sigma_next)[0]
    )


def test_cps_keeps_the_noise_level():
    """Started at the schedule's noise level, CPS stays there: mean and noise together have variance sigma_next^2."""
    noise = normal(0, (1, 4000))
    sigma, sigma_next = jnp.float32(0.8), jnp.float32(0.5)
    mean, std = CPS(0.7).transition(noise, sigma * noise, sigma, sigma_next)
    np.testing.assert_allclose(jnp.std(mean) ** 2 + std**2, sigma_next**2, rtol=0.05)


@pytest.mark.parametrize("count", [1, 8, 9, 777])
def test_sample_mean(count):
    """Right, and of the same bits whatever the batch around the sample."""
    values = np.random.default_rng(count).normal(size=(3, count)).astype(np.float32)
    mean = jax.jit(sample_mean)
    np.testing.assert_allclose(mean(values), values.astype(np.float64).mean(axis=1), atol=1e-6)
    np.testing.assert_array_equal(mean(values[1:2]), mean(values)[1:2])


def test_a_rounded_product_is_never_contracted():
    """Contracted into the addition, x y - rounded(x y) would be the product's rounding error; it is exactly 0."""
    x, y = (jnp.asarray(np.random.default_rng(seed).uniform(1.0, 1.9, 1000), jnp.float32) for seed in (0, 1))
    exact = np.asarray(x, np.float64) * np.asarray(y, np.float64)
    product = jax.jit(lambda a, b: rounded(a * b))(x, y)
    np.testing.assert_allclose(product, exact, rtol=2.0**-22)
    # no mantissa bit below the 22nd is left, and two programs agree
    assert not np.any(np.asarray(product).view(np.uint32) & 1)
    np.testing.assert_array_equal(jax.jit(lambda a, b, c: c + rounded(a * b))(x, y, -product), np.zeros(1000))
    gradient = jax.grad(lambda a: jnp.sum(rounded(a * y)))(x)
    np.testing.assert_allclose(gradient, y, rtol=1e-6)


def test_guidance():
    def velocity_fn(params, latents, sigma, cond):
        return (params * latents * sigma[:, None] + cond["text"]).astype(jnp.bfloat16)

    latents, sigma = random_step(shape=(3, 4))[0], jnp.array([0.9, 0.5, 0.1])
    cond, null = {"text": jnp.ones((3, 4))}, {"text": jnp.zeros((3, 4))}
    conditional, unconditional = (velocity_fn(2.0, latents, sigma, c).astype(jnp.float32) for c in (cond, null))
    for scale, expected in (
        (1.0, conditional),
        (0.0, unconditional),
        (3.5, unconditional + 3.5 * (conditional - unconditional)),
    ):
        guided = with_guidance(velocity_fn, scale)(2.0, latents, sigma, cond, null)
        assert guided.dtype == jnp.float32
        np.testing.assert_allclose(guided, expected, atol=1e-5)


def test_samplers_are_values():
    assert FlowSDE(0.7) == FlowSDE(0.7) != FlowSDE(0.6)
    assert FlowSDE(0.7) != DanceSDE(0.7)
    assert len({FlowSDE(0.7), FlowSDE(0.7), DanceSDE(0.7), CPS(0.7), ODE()}) == 4
    assert set(SAMPLERS.values()) == {FlowSDE, DanceSDE, CPS}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: flow_sigmas(0), "num_steps is 0"),
        (lambda: flow_sigmas(4, 0.0), "shift is 0.0"),
        (lambda: flow_sigmas(4, float("inf")), "shift is inf"),
        (lambda: flow_sigmas(4, float("nan")), "shift is nan"),
        (lambda: dynamic_shift(0), "num_tokens is 0"),
        (lambda: dynamic_shift(16, 256, 256), "max_tokens equals base_tokens"),
        (lambda: FlowSDE(-0.1), "noise_level is -0.1"),
        (lambda: DanceSDE(float("nan")), "noise_level is nan"),
        (lambda: FlowSDE(float("inf")), "noise_level is inf"),
        (lambda: CPS(1.1), "noise_level is 1.1"),
        (lambda: CPS(-0.1), "noise_level is -0.1"),
        (lambda: CPS(float("nan")), "noise_level is nan"),
        (lambda: ODE().log_prob(*random_step()), "ODE has no log-probability"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
