"""A number that is not finite in one sample reaches no other sample, whatever the plan and however it is computed."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import mlp, mlp_params, normal

from jagg_jax import FlowSDE, exact_plan, flow_sigmas, initial_noise, jagg_plan, rollout
from jagg_jax.rollout import finite_samples
from jagg_jax.update import Objective, policy_gradient

NUM_STEPS, BATCH, BAD = 4, 6, 2
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)
PARAMS = mlp_params()
COND = normal(2, (BATCH, 3))
ADVANTAGES = jnp.array([1.0, -2.0, 1.5, 0.5, -1.0, 0.5])
OBJECTIVE = Objective(FlowSDE(0.7), (0.01, 0.02), kl="exact", kl_weight=0.3)
OTHERS = jnp.array([i for i in range(BATCH) if i != BAD])
PLANS = {"exact": exact_plan(NUM_STEPS), "jagg": jagg_plan(SIGMAS[:NUM_STEPS], NUM_STEPS)}
BY_STEP = ("latents", "next_latents", "log_probs", "velocities")


@pytest.fixture(scope="module")
def transitions():
    keys = jax.random.split(jax.random.key(1), BATCH)
    noise = initial_noise(keys, (5,))
    run = jax.jit(lambda: rollout(mlp, PARAMS, noise, SIGMAS, keys, COND, sampler=FlowSDE(0.7), keep_velocities=True))
    return run().transitions(NUM_STEPS)


@partial(jax.jit, static_argnames=("use_cached", "num_micro_batches"))
def gradient_of(params, transitions, advantages, cond, reference, plan, use_cached, num_micro_batches):
    return policy_gradient(
        mlp,
        params,
        transitions,
        advantages,
        cond,
        objective=OBJECTIVE,
        plan=plan,
        reference_velocities=reference,
        use_cached=use_cached,
        num_micro_batches=num_micro_batches,
    )


def change(transitions, **arrays):
    return dataclasses.replace(transitions, **arrays)


def spoil(array, value, sample=BAD):
    """One number of one step of one sample replaced."""
    flat = array.reshape(*array.shape[:2], -1)
    return flat.at[1, sample, 0].set(jnp.asarray(value, array.dtype)).reshape(array.shape)


@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("use_cached", [True, False])
@pytest.mark.parametrize("plan", PLANS)
def test_the_gradient_is_that_of_the_others(transitions, plan, use_cached, num_micro_batches):
    """Two closed comparisons: the same batch with that sample finite and without a say, and the batch without it."""
    params = PARAMS if use_cached else jax.tree.map(lambda p: 1.02 * p, PARAMS)
    reference, plan = 0.9 * transitions.velocities, PLANS[plan]
    run = partial(gradient_of, plan=plan, use_cached=use_cached, num_micro_batches=num_micro_batches)
    # the last two steps of the sample, as when its latents overflow on the way
    overflowed = {name: getattr(transitions, name).at[2:, BAD].set(jnp.nan) for name in BY_STEP}
    gradient, metrics = run(params, change(transitions, **overflowed), ADVANTAGES, COND, reference)
    assert int(metrics["masked_samples"]) == 1
    assert all(bool(jnp.all(jnp.isfinite(x))) for x in jax.tree.leaves((gradient, metrics)))
    assert metrics["kl"] > 0

    levels = jnp.broadcast_to(transitions.sigmas[:, None], (NUM_STEPS, BATCH))
    own = jax.vmap(lambda x, s: mlp(params, x, s, COND))(transitions.latents, levels)
    own = transitions.velocities if use_cached else own
    without_a_say = ADVANTAGES.at[BAD].set(0.0), COND, reference.at[:, BAD].set(own[:, BAD])
    expected, _ = run(params, transitions, *without_a_say)
    chex.assert_trees_all_close(gradient, expected, rtol=1e-5, atol=1e-7)

    fewer = jax.tree.map(lambda x: x[:, OTHERS] if x.ndim > 1 else x, transitions)
    left_out = gradient_of(
        params, fewer, ADVANTAGES[OTHERS], COND[OTHERS], reference[:, OTHERS], plan, use_cached, num_micro_batches=1
    )
    # means over six samples, of which five count
    for ours, theirs in ((gradient, left_out[0]), (metrics["loss"], left_out[1]["loss"])):
        chex.assert_trees_all_close(ours, jax.tree.map(lambda g: g * (5 / 6), theirs), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("name", [*BY_STEP, "reference"])
def test_one_number_is_enough(transitions, name, value):
    reference = 0.9 * transitions.velocities
    run = partial(gradient_of, plan=PLANS["jagg"], use_cached=True, num_micro_batches=1)
    if name == "reference":
        spoilt = transitions, spoil(reference, value)
    else:
        spoilt = change(transitions, **{name: spoil(getattr(transitions, name), value)}), reference
    assert finite_samples(*spoilt).tolist() == [i != BAD for i in range(BATCH)]
    gradient, metrics = run(PARAMS, spoilt[0], ADVANTAGES, COND, spoilt[1])
    whole = {name: getattr(transitions, name).at[:, BAD].set(jnp.nan) for name in BY_STEP}
    expected, expected_metrics = run(PARAMS, change(transitions, **whole), ADVANTAGES, COND, reference)
    # which number it was makes no difference to a single bit
    chex.assert_trees_all_equal(gradient, expected)
    chex.assert_trees_all_equal(metrics, expected_metrics)
    assert metrics["ratio_max_deviation"] == 0.0


def test_a_batch_without_a_finite_sample_has_no_gradient(transitions):
    """Zero, and finite: nothing to learn from is no reason to stop."""
    spoilt = change(transitions, next_latents=jnp.full_like(transitions.next_latents, jnp.nan))
    reference = 0.9 * transitions.velocities
    gradient, metrics = gradient_of(PARAMS, spoilt, ADVANTAGES, COND, reference, PLANS["jagg"], False, 1)
    assert int(metrics["masked_samples"]) == BATCH
    assert float(metrics["loss"]) == 0.0
    chex.assert_trees_all_equal(gradient, jax.tree.map(jnp.zeros_like, PARAMS))


def test_finite_samples_without_velocities(transitions):
    without = change(transitions, velocities=None)
    assert finite_samples(without).tolist() == [True] * BATCH
    assert finite_samples(change(without, log_probs=spoil(without.log_probs, np.nan, 5))).tolist() == [True] * 5 + [
        False
    ]
