"""Advantages, the clipped loss and the divergences, against NumPy in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_models import normal

from jagg_jax import CPS, ODE, DanceSDE, FlowSDE, group_advantages, grpo_loss, kl_to_reference
from jagg_jax.grpo import ADVANTAGE_STDS, KL_KINDS, zero_std_fraction

few = settings(deadline=None, max_examples=40, derandomize=True)
GROUPS, GENERATIONS = 3, 4
compiled = jax.jit(group_advantages, static_argnums=(1, 2, 3))
# away from float noise: every pair of values differs by 1/8 or not at all
reward = st.integers(-80, 80).map(lambda n: n / 8)
rewards_lists = st.lists(reward, min_size=GROUPS * GENERATIONS, max_size=GROUPS * GENERATIONS)


def numpy_advantages(rewards, std, clip):
    """The definition in float64, prompt after prompt; a reward that is not finite is left out."""
    finite = np.isfinite(rewards)
    result = np.zeros(len(rewards))
    for start in range(0, len(rewards), GENERATIONS):
        mine = np.arange(start, start + GENERATIONS)[finite[start : start + GENERATIONS]]
        if len(mine) == 0 or np.ptp(rewards[mine]) == 0:
            continue
        centred = rewards[mine] - rewards[mine].mean()
        deviation = {"group": rewards[mine].std(), "global": rewards[finite].std(), "none": 1.0}[std]
        advantages = centred / deviation
        result[mine] = advantages * min(1.0, (clip or np.inf) / np.abs(advantages).max())
    return result


@few
@given(
    rewards=rewards_lists, std=st.sampled_from(ADVANTAGE_STDS), clip=st.sampled_from([5.0, 0.5, None]), bad=st.data()
)
def test_against_numpy(rewards, std, clip, bad):
    rewards = np.array(rewards)
    where = bad.draw(st.lists(st.integers(0, len(rewards) - 1), max_size=5))
    rewards[where] = bad.draw(st.sampled_from([np.nan, np.inf, -np.inf]))
    advantages = np.asarray(compiled(jnp.asarray(rewards, jnp.float32), GENERATIONS, std, clip))
    assert advantages.dtype == np.float32
    expected = numpy_advantages(rewards, std, clip)
    np.testing.assert_allclose(advantages, expected, rtol=1e-4, atol=1e-4)
    # exactly zero where nothing is learned, centred everywhere, and bounded
    teaches = np.repeat(np.any(expected.reshape(GROUPS, -1) != 0.0, axis=1), GENERATIONS)
    assert not np.any(advantages[~teaches | ~np.isfinite(rewards)])
    np.testing.assert_allclose(advantages.reshape(GROUPS, -1).sum(axis=1), 0.0, atol=1e-5)
    if clip is not None:
        assert np.all(np.abs(advantages) <= clip * (1 + 1e-6))


@pytest.mark.parametrize("std", ADVANTAGE_STDS)
def test_a_bad_reward_never_reaches_another_sample(std):
    """The other prompts have the advantages of a batch without that prompt's bad sample, to the bit."""
    rewards = jnp.arange(12.0) ** 1.5
    for bad in (jnp.nan, jnp.inf, -jnp.inf):
        spoilt = compiled(rewards.at[5].set(bad), GENERATIONS, std, 5.0)
        assert np.all(np.isfinite(spoilt))
        assert spoilt[5] == 0.0
        assert np.all(spoilt[jnp.array([4, 6, 7])] != 0.0)
        if std != "global":
            untouched = jnp.array([0, 1, 2, 3, 8, 9, 10, 11])
            np.testing.assert_array_equal(spoilt[untouched], compiled(rewards, GENERATIONS, std, 5.0)[untouched])
    none_left = compiled(rewards.at[4:8].set(jnp.nan), GENERATIONS, std, 5.0)
    assert not np.any(none_left[4:8])
    assert np.all(none_left[:4] != 0.0)
    np.testing.assert_array_equal(compiled(jnp.full(12, jnp.nan), GENERATIONS, std, 5.0), np.zeros(12))


@pytest.mark.parametrize("std", ADVANTAGE_STDS)
def test_prompts_that_teach_nothing(std):
    def advantages(values, num_generations):
        return np.asarray(compiled(jnp.asarray(values, jnp.float32), num_generations, std, 5.0))

    # a group of one; equal rewards; one valid reward; rewards that agree to float noise
    assert not np.any(advantages([3.0, 7.0], 1))
    noise = np.float32(0.1) + np.float32(0.2), np.float32(0.3), np.nextafter(np.float32(0.3), np.float32(1)), 0.3
    values = [5.0, 5.0, 5.0, 5.0, np.nan, 2.0, np.nan, np.nan, *noise]
    assert not np.any(advantages(values, 4))
    # a small difference that is no noise is a signal
    assert np.all(advantages([1.0, 1.0, 1.0, 1.00001], 4) != 0.0)
    assert float(zero_std_fraction(jnp.asarray([*values, 1.0, 2.0, 3.0, 4.0], jnp.float32), 4)) == 0.75
    assert float(zero_std_fraction(jnp.arange(4.0), 4)) == 0.0


@pytest.mark.parametrize("std", ADVANTAGE_STDS)
def test_huge_rewards(std):
    rewards = jnp.array([1e30, -1e30, 0.0, 5e29, 1.0, 2.0, 3.0, 4.0])
    advantages = np.asarray(compiled(rewards, 4, std, 5.0))
    assert np.all(np.isfinite(advantages))
    assert np.abs(advantages).max() <= 5.0 * (1 + 1e-6)
    np.testing.assert_allclose(advantages.reshape(2, 4).sum(axis=1), 0.0, atol=2e-6)
    assert np.all(np.diff(advantages[4:]) > 0)
    if std == "group":
        expected = np.array([1.0, -1.0, 0.0, 0.5])
        np.testing.assert_allclose(advantages[:4], (expected - expected.mean()) / expected.std(), rtol=1e-5)
    # at the end of the float32 range nothing but the prompt itself is lost
    edge = np.asarray(compiled(rewards.at[:4].multiply(3e8), 4, std, 5.0))
    assert np.all(np.isfinite(edge))


def test_clip_and_zero_sum_together():
    """One outlier of 32: the bound scales the prompt, it does not cut the outlier off."""
    rewards = jnp.zeros(32).at[0].set(1.0)
    free = np.asarray(group_advantages(rewards, 32, clip=None))
    assert free.max() > 5.5
    bounded = np.asarray(group_advantages(rewards, 32, clip=5.0))
    np.testing.assert_allclose(bounded, free * (5.0 / free.max()), rtol=1e-5)
    assert abs(bounded.sum()) < 1e-5


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_prompts_that_straddle_devices(axis_type):
    rewards = normal(0, (16,))
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        sharded = jax.device_put(rewards, NamedSharding(mesh, PartitionSpec("data")))
        advantages = jax.device_get(compiled(sharded, 4, "group", 5.0))
    np.testing.assert_allclose(advantages, compiled(rewards, 4, "group", 5.0), rtol=1e-5, atol=1e-6)


def numpy_loss(log_prob, old, advantages, low, high):
    ratio = np.exp(log_prob - old)
    unclipped, clipped = -advantages * ratio, -advantages * np.clip(ratio, 1 - low, 1 + high)
    gradient = np.where(clipped > unclipped, 0.0, -advantages * ratio) / ratio.size
    metrics = {
        "ratio_mean": ratio.mean(),
        "ratio_max_deviation": np.abs(ratio - 1).max(),
        "clip_fraction": (clipped > unclipped).mean(),
        "approx_kl": (ratio - 1 - np.log(ratio)).mean(),
    }
    return np.maximum(unclipped, clipped).mean(), gradient, metrics


@pytest.mark.parametrize("clip_range", [0.1, (0.05, 0.3), (0.3, 0.02)])
@pytest.mark.parametrize("shape", [(12,), (5, 12)])
def test_loss_against_numpy(shape, clip_range):
    log_prob, old, advantages = 0.3 * normal(0, shape), 0.1 * normal(1, shape), normal(2, shape[-1:])
    loss_fn = jax.value_and_grad(lambda lp: grpo_loss(lp, old, advantages, clip_range), has_aux=True)
    (loss, metrics), gradient = loss_fn(log_prob)
    low, high = clip_range if isinstance(clip_range, tuple) else (clip_range, clip_range)
    expected = numpy_loss(*(np.asarray(a, np.float64) for a in (log_prob, old, advantages)), low, high)
    assert 0 < expected[2]["clip_fraction"] < 1
    np.testing.assert_allclose(loss, expected[0], rtol=1e-5)
    np.testing.assert_allclose(gradient, expected[1], rtol=1e-4, atol=1e-6)
    assert metrics.keys() == expected[2].keys()
    for name, value in expected[2].items():
        np.testing.assert_allclose(metrics[name], value, rtol=1e-4, err_msg=name)


@pytest.mark.parametrize("clip_range", [0.0, (0.0, 0.2), (0.2, 0.0), 0.2])
def test_first_update_is_the_plain_policy_gradient(clip_range):
    """At ratio 1 nothing is clipped, whatever the range: the gradient is -A / n in full."""
    log_prob, advantages = jnp.full((2, 3), -1.0), jnp.array([1.0, -1.0, 2.0])
    gradient = jax.grad(lambda lp: grpo_loss(lp, log_prob, advantages, clip_range)[0])(log_prob)
    np.testing.assert_allclose(gradient, np.broadcast_to(-advantages / 6, (2, 3)), rtol=1e-6)


def kl_problem():
    velocity, reference, latents = (normal(seed, (2, 3, 2)) for seed in range(3))
    return velocity, reference, latents, jnp.float32(0.8), jnp.float32(0.6)


@pytest.mark.parametrize(
    ("kind", "sampler"),
    [
        *((kind, FlowSDE(0.7)) for kind in KL_KINDS),
        *((kind, CPS(0.5)) for kind in ("exact", "v", "x")),
        ("exact", DanceSDE(0.3)),
        ("flow_grpo", DanceSDE(0.3)),
    ],
)
def test_divergences(kind, sampler):
    velocity, reference, latents, sigma, sigma_next = kl_problem()
    arguments = (sampler, velocity, reference, latents, sigma, sigma_next)
    (mean, std), (reference_mean, _) = (
        sampler.transition(v, latents, sigma, sigma_next) for v in (velocity, reference)
    )
    squared = np.asarray(mean - reference_mean, np.float64) ** 2
    difference = np.asarray(velocity - reference, np.float64)
    expected = {
        "exact": squared / (2 * float(std) ** 2),
        # the noise scale s is std / sqrt(step size)
        "flow_grpo": squared / (2 * float(std) ** 2 / 0.2),
        "v": difference**2,
        "x": 0.8**2 * difference**2,
    }[kind].mean(axis=(1, 2))
    divergence = kl_to_reference(kind, *arguments)
    assert divergence.shape == (2,)
    assert divergence.dtype == jnp.float32
    np.testing.assert_allclose(divergence, expected, rtol=1e-4)
    assert not np.any(kl_to_reference(kind, sampler, velocity, velocity, latents, sigma, sigma_next))

    def total(*arrays):
        return jnp.sum(kl_to_reference(kind, sampler, *arrays, latents, sigma, sigma_next))

    by_velocity, by_reference = jax.grad(total, argnums=(0, 1))(velocity, reference)
    # quadratic in the velocity: Euler's identity
    np.testing.assert_allclose(jnp.sum(by_velocity * (velocity - reference)), 2 * expected.sum(), rtol=1e-4)
    assert not np.any(by_reference)


def test_exact_divergence_is_that_of_two_gaussians():
    """E[log p - log q] over samples of p, element by element, is what `exact` says."""
    velocity, reference, latents, sigma, sigma_next = kl_problem()
    sampler = FlowSDE(0.7)
    (mean, std), (reference_mean, _) = (
        sampler.transition(v, latents, sigma, sigma_next) for v in (velocity, reference)
    )
    draws = mean[None] + std * normal(5, (20000, *mean.shape))
    log_prob = jax.vmap(sampler.log_prob, (0, None, None))
    sampled = (log_prob(draws, mean, std) - log_prob(draws, reference_mean, std)).mean(axis=0)
    exact = kl_to_reference("exact", sampler, velocity, reference, latents, sigma, sigma_next)
    np.testing.assert_allclose(sampled, exact, rtol=0.05)


@pytest.mark.parametrize(
    ("kind", "sampler", "message"),
    [
        ("k3", FlowSDE(0.7), "kl is 'k3'"),
        ("flow_grpo", CPS(0.5), "CPS has not"),
        ("flow_grpo", ODE(), "ODE has not"),
        ("exact", ODE(), "ODE has not"),
    ],
)
def test_bad_divergences(kind, sampler, message):
    with pytest.raises(ValueError, match=message):
        kl_to_reference(kind, sampler, *kl_problem())


LOG_PROB = jnp.zeros((2, 4))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: group_advantages(jnp.ones(6), 4), "num_generations is 4"),
        (lambda: group_advantages(jnp.ones(6), 0), "num_generations is 0"),
        (lambda: group_advantages(jnp.ones((2, 3)), 3), "num_generations is 3"),
        (lambda: group_advantages(jnp.ones(6), 3, "batch"), "std is 'batch'"),
        (lambda: group_advantages(jnp.ones(6), 3, clip=0.0), "clip is 0.0"),
        (lambda: group_advantages(jnp.ones(6), 3, clip=float("nan")), "clip is nan"),
        (lambda: grpo_loss(LOG_PROB, LOG_PROB, jnp.ones(4), -0.1), "clip_range is -0.1"),
        (lambda: grpo_loss(LOG_PROB, LOG_PROB, jnp.ones(4), (0.1, -0.1)), "clip_range is"),
        (lambda: grpo_loss(LOG_PROB, LOG_PROB[:1], jnp.ones(4), 0.1), "have shapes"),
        (lambda: grpo_loss(LOG_PROB, LOG_PROB, jnp.ones(3), 0.1), "have shapes"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
