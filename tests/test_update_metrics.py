"""What an update says about itself: quantiles of the ratio, and what its own forward makes of the stored steps."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import mlp, mlp_params, normal

from jagg_jax import FlowSDE, flow_sigmas, initial_noise, jagg_plan, rollout, subset_plan
from jagg_jax.grpo import ratio_quantiles
from jagg_jax.update import Objective, policy_gradient

NUM_STEPS, BATCH = 5, 6
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)
SAMPLER = FlowSDE(0.7)
PARAMS = mlp_params()
KEYS = jax.random.split(jax.random.key(1), BATCH)
COND = normal(2, (BATCH, 3))
ADVANTAGES = jnp.array([1.0, -2.0, 1.0, 0.5, -1.0, 0.5])
PLAN = jagg_plan(SIGMAS[:NUM_STEPS], 3)


@partial(jax.jit, static_argnames=("use_cached", "batch_anchors", "num_micro_batches"))
def metrics_of(params, transitions, plan=PLAN, **options):
    objective = Objective(SAMPLER, (0.01, 0.02))
    return policy_gradient(mlp, params, transitions, ADVANTAGES, COND, objective=objective, plan=plan, **options)[1]


def roll_out(params, dtype=jnp.float32):
    noise = initial_noise(KEYS, (5,), dtype)
    run = jax.jit(lambda p: rollout(mlp, p, noise, SIGMAS, KEYS, COND, sampler=SAMPLER, keep_velocities=True))
    return run(params).transitions(NUM_STEPS)


@pytest.fixture(scope="module")
def transitions():
    return roll_out(PARAMS)


def log_probs_by_hand(params, transitions):
    """Step by step, by the definition: [N, B]."""
    rows = []
    for i in range(NUM_STEPS):
        state, levels = transitions.latents[i], (transitions.sigmas[i], transitions.next_sigmas[i])
        velocity = mlp(params, state.astype(jnp.float32), jnp.full(BATCH, levels[0]), COND)
        mean, std = SAMPLER.transition(velocity, state, *levels)
        rows.append(SAMPLER.log_prob(transitions.next_latents[i], mean, std))
    return np.asarray(jnp.stack(rows), np.float64)


def moved(scale):
    return {name: p + scale * normal(seed, p.shape) for seed, (name, p) in enumerate(PARAMS.items())}


def test_quantiles_are_of_all_steps_and_samples(transitions):
    params = moved(0.05)
    ratios = np.exp(log_probs_by_hand(params, transitions) - transitions.log_probs)
    expected = np.quantile(ratios, [0.01, 0.5, 0.99])
    assert expected[0] < 0.99 < 1.01 < expected[2]
    whole = None
    for num_micro_batches in (1, 2, 6):
        metrics = metrics_of(params, transitions, num_micro_batches=num_micro_batches)
        quantiles = [float(metrics[name]) for name in ("ratio_q01", "ratio_q50", "ratio_q99")]
        np.testing.assert_allclose(quantiles, expected, rtol=2e-5)
        # micro-batches may round the model's own matrix products differently, nothing else
        whole = whole or quantiles
        np.testing.assert_allclose(quantiles, whole, rtol=1e-6)


def test_quantiles_interpolate_the_ratio_and_not_its_logarithm():
    log_ratios = jnp.log(jnp.array([[1.0, 2.0], [3.0, 5.0]]))
    quantiles = ratio_quantiles(log_ratios)
    np.testing.assert_allclose(quantiles["ratio_q50"], 2.5, rtol=1e-6)
    np.testing.assert_allclose(quantiles["ratio_q99"], 5.0 - 0.03 * 2.0, rtol=1e-6)


def test_cached_ratios_are_exactly_one_in_every_quantile(transitions):
    metrics = metrics_of(PARAMS, transitions, use_cached=True, num_micro_batches=3)
    assert all(float(metrics[name]) == 1.0 for name in ("ratio_q01", "ratio_q50", "ratio_q99"))


@pytest.mark.parametrize(
    ("use_cached", "batch_anchors", "num_micro_batches"),
    [(True, None, 1), (False, None, 3), (True, 1, 3), (False, 1, 1), (True, 3, 1)],
)
def test_log_prob_change_is_that_of_the_updates_own_forward(transitions, use_cached, batch_anchors, num_micro_batches):
    """Cached velocities hide a change of the parameters from the ratio, not from this."""
    options = {"use_cached": use_cached, "batch_anchors": batch_anchors, "num_micro_batches": num_micro_batches}
    changes = np.abs(log_probs_by_hand(moved(0.05), transitions) - transitions.log_probs).max(axis=1)
    for plan in (PLAN, subset_plan(jax.random.key(3), NUM_STEPS, PLAN.num_anchors)):
        metrics = metrics_of(moved(0.05), transitions, plan, **options)
        assert metrics["log_prob_change"].shape == (plan.num_anchors,)
        assert metrics["log_prob_change"].dtype == jnp.float32
        np.testing.assert_allclose(metrics["log_prob_change"], changes[plan.anchors], rtol=1e-3, atol=2e-6)
        assert (metrics["ratio_max_deviation"] == 0.0) == use_cached


def test_log_prob_change_of_unchanged_parameters_is_the_precisions(transitions):
    """Float32 noise in float32. In bfloat16, what another rounding of the same velocities makes of the same step."""
    exact = metrics_of(PARAMS, transitions, use_cached=True)["log_prob_change"]
    assert float(exact.max()) < 1e-5
    coarse = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    stored = roll_out(coarse)
    # the rollout was in bfloat16, the update computes in float32 from the same parameters
    fine = jax.tree.map(lambda p: p.astype(jnp.float32), coarse)
    change = metrics_of(fine, stored, use_cached=True)
    expected = np.abs(log_probs_by_hand(fine, stored) - stored.log_probs)[PLAN.anchors].max(axis=1)
    np.testing.assert_allclose(change["log_prob_change"], expected, rtol=1e-2, atol=2e-6)
    assert float(change["log_prob_change"].max()) > 1e-4
    assert change["ratio_max_deviation"] == 0.0


def test_log_prob_change_leaves_masked_samples_out(transitions):
    spoilt = jax.tree.map(lambda x: x.at[:, 2].set(jnp.nan) if x.ndim > 1 else x, transitions)
    changes = np.abs(log_probs_by_hand(moved(0.05), transitions) - transitions.log_probs)
    expected = np.delete(changes, 2, axis=1).max(axis=1)[PLAN.anchors]
    metrics = metrics_of(moved(0.05), spoilt, use_cached=True)
    np.testing.assert_allclose(metrics["log_prob_change"], expected, rtol=1e-3, atol=2e-6)
