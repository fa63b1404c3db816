"""The debiased plan: its mean over draws is the exact gradient, whatever it stands on. And plans of given anchors."""

import itertools
import math
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import group, mlp, mlp_params, planned_gradient

from jagg_jax import anchor_plan, debiased_plan, exact_plan, flow_sigmas, hat_plan, jagg_plan, planned_vjp, subset_plan
from jagg_jax.plans import interior_runs, one_group_plan, with_interior_steps

NUM_STEPS = 11
PARAMS = mlp_params()
LATENTS, _, COND, COTANGENTS = group(NUM_STEPS)
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)[:NUM_STEPS]
BASES = {
    # groups of 5, 4 (shorter) and two exact steps
    "jagg": jagg_plan(SIGMAS, 5, 0.82),
    "jagg by index": jagg_plan(SIGMAS, 4, alpha="index"),
    "hat": hat_plan(SIGMAS, 5, 0.82, phase=1),
    "anchors": anchor_plan(SIGMAS, [0, 1, 5, 7, 8, 10]),
}


@partial(jax.jit, static_argnames="velocity_fn")
def gradient(velocity_fn, plan):
    return planned_vjp(velocity_fn, PARAMS, LATENTS, SIGMAS, COND, plan=plan)[1](COTANGENTS)


def draws(plan, probabilities):
    """All plans that `debiased_plan` can draw, each with its probability (by the definition, in float64)."""
    runs = interior_runs(plan)
    weights = np.asarray(probabilities, np.float64)
    for steps in itertools.product(*runs):
        chance = math.prod(weights[step] / weights[list(run)].sum() for step, run in zip(steps, runs, strict=True))
        yield chance, with_interior_steps(plan, jnp.array(steps, jnp.int32), probabilities)


def dense(plan):
    matrix = np.zeros((plan.num_steps, plan.num_steps))
    matrix[:, np.asarray(plan.anchors)] = plan.weights
    return matrix


def uneven(num_steps, seed=0):
    return jnp.asarray(np.random.default_rng(seed).uniform(0.2, 3.0, num_steps), jnp.float32)


@pytest.mark.parametrize("probabilities", [jnp.ones(NUM_STEPS), uneven(NUM_STEPS)], ids=["equal", "uneven"])
@pytest.mark.parametrize("base", BASES)
def test_the_mean_over_all_draws_is_the_exact_gradient(base, probabilities):
    plan = BASES[base]
    exact = gradient(mlp, exact_plan(NUM_STEPS))
    mean = jax.tree.map(jnp.zeros_like, exact)
    errors = []
    for chance, drawn in draws(plan, probabilities):
        drawn_gradient = gradient(mlp, drawn)
        mean = jax.tree.map(lambda m, g, chance=chance: m + chance * g, mean, drawn_gradient)
        errors.append(np.linalg.norm(drawn_gradient["in"] - exact["in"]) / np.linalg.norm(exact["in"]))
    assert len(errors) == math.prod(map(len, interior_runs(plan)))
    # no draw is exact by itself, their mean is, to rounding
    assert min(errors) > 0.01
    for name, value in exact.items():
        assert np.linalg.norm(mean[name] - value) < 2e-5 * np.linalg.norm(value), name


def test_against_one_vjp_an_anchor():
    _, drawn = next(draws(BASES["jagg"], uneven(NUM_STEPS)))
    expected = jax.jit(partial(planned_gradient, mlp))(PARAMS, LATENTS, SIGMAS, COND, COTANGENTS, drawn)
    chex.assert_trees_all_close(gradient(mlp, drawn), expected, rtol=1e-4, atol=1e-4)


@settings(deadline=None, max_examples=15, derandomize=True)
@given(
    num_steps=st.integers(1, 9),
    steps_per_group=st.integers(2, 6),
    jagg_frac=st.sampled_from([1.0, 0.8, 0.5]),
    kind=st.sampled_from(["jagg", "hat"]),
    seed=st.integers(0, 99),
)
def test_the_mean_matrix_is_the_identity(num_steps, steps_per_group, jagg_frac, kind, seed):
    sigmas = flow_sigmas(num_steps + 1, 3.0)[:num_steps]
    plan = {"jagg": jagg_plan, "hat": hat_plan}[kind](sigmas, steps_per_group, jagg_frac)
    probabilities = uneven(num_steps, seed)
    mean, total = np.zeros((num_steps, num_steps)), 0.0
    for chance, drawn in draws(plan, probabilities):
        matrix = dense(drawn)
        np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=2e-5)
        assert drawn.num_anchors == plan.num_anchors + len(interior_runs(plan))
        mean, total = mean + chance * matrix, total + chance
    np.testing.assert_allclose(total, 1.0, atol=1e-12)
    np.testing.assert_allclose(mean, np.eye(num_steps), atol=2e-5)


def test_draws_follow_the_probabilities():
    """Traced keys and probabilities, one compilation; each step as often as asked, to five standard deviations."""
    plan, count = BASES["jagg"], 4000
    traces = []

    @jax.jit
    def steps(keys, probabilities):
        traces.append(1)
        drawn = jax.vmap(lambda key: debiased_plan(plan, key, probabilities))(keys)
        return drawn.anchors[:, plan.num_anchors :], drawn.weights

    for seed, probabilities in enumerate([jnp.ones(NUM_STEPS), uneven(NUM_STEPS)]):
        drawn, weights = steps(jax.random.split(jax.random.key(seed), count), probabilities)
        np.testing.assert_allclose(weights.sum(axis=2), 1.0, atol=2e-5)
        for column, run in enumerate(interior_runs(plan)):
            shares = probabilities[jnp.array(run)] / probabilities[jnp.array(run)].sum()
            for step, share in zip(run, shares, strict=True):
                found = np.mean(np.asarray(drawn[:, column]) == step)
                assert abs(found - share) < 5 * math.sqrt(share * (1 - share) / count), (step, found, share)
                # 1 / p at the drawn step
                boost = weights[drawn[:, column] == step, step, plan.num_anchors + column]
                np.testing.assert_allclose(boost, 1.0 / share, rtol=1e-5)
    assert len(traces) == 1


def test_weights_against_hand_computed_numbers():
    sigmas = jnp.array([1.0, 0.9, 0.6, 0.5])
    drawn = with_interior_steps(jagg_plan(sigmas, 4), jnp.array([2]), jnp.array([7.0, 3.0, 1.0, 7.0]))
    # p = 1/4 at step 2, whose row was 0.2 and 0.8
    assert drawn.anchors.tolist() == [0, 3, 2]
    expected = [[1, 0, 0], [0.8, 0.2, 0], [-0.6, -2.4, 4], [0, 1, 0]]
    np.testing.assert_allclose(drawn.weights, expected, atol=1e-5)


def test_weights_that_differ_between_samples():
    plan = one_group_plan(jnp.stack([SIGMAS[:4], SIGMAS[:4] ** 2], axis=1))
    drawn = with_interior_steps(plan, jnp.array([1]))
    for sample in range(2):
        alone = one_group_plan(SIGMAS[:4] ** (1 + sample))
        expected = with_interior_steps(alone, jnp.array([1])).weights
        np.testing.assert_allclose(drawn.weights[..., sample], expected, atol=1e-5)


def test_plans_without_an_interior_stay_as_they_are():
    for plan in (exact_plan(4), jagg_plan(SIGMAS, 2), hat_plan(SIGMAS, 2)):
        assert interior_runs(plan) == ()
        assert debiased_plan(plan, jax.random.key(0)) is plan


@settings(deadline=None, max_examples=15, derandomize=True)
@given(num_steps=st.integers(1, 9), data=st.data())
def test_anchor_plan(num_steps, data):
    sigmas = flow_sigmas(num_steps + 1, 3.0)[:num_steps]
    inner = data.draw(st.sets(st.integers(0, num_steps - 1)))
    anchors = sorted({0, num_steps - 1, *inner})
    plan = anchor_plan(sigmas, anchors)
    assert plan.anchors.tolist() == anchors
    assert [step for run in interior_runs(plan) for step in run] == sorted(set(range(num_steps)) - set(anchors))
    # column a is the hat function of anchor a: what np.interp makes of 1 there and 0 at the others
    for column in range(len(anchors)):
        values = np.eye(len(anchors))[column][::-1]
        hat = np.interp(np.asarray(sigmas), np.asarray(sigmas)[anchors][::-1], values)
        np.testing.assert_allclose(plan.weights[:, column], hat, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: anchor_plan(SIGMAS, [1, 10]), "the first must be 0 and the last 10"),
        (lambda: anchor_plan(SIGMAS, [0, 11]), "the first must be 0 and the last 10"),
        (lambda: anchor_plan(SIGMAS, []), "the first must be 0"),
        (lambda: anchor_plan(SIGMAS, [0, 4, 4, 10]), "increase"),
        (lambda: anchor_plan(SIGMAS, [0, 2.5, 10]), "whole numbers"),
        (lambda: anchor_plan(SIGMAS[::-1], [0, 10]), "must decrease"),
        (lambda: debiased_plan(subset_plan(jax.random.key(0), 6, 3), jax.random.key(1)), "does not interpolate"),
        (lambda: debiased_plan(BASES["hat"], jax.random.key(0), jnp.ones(3)), "probabilities has shape"),
        (lambda: debiased_plan(BASES["hat"], jax.random.key(0), jnp.zeros(NUM_STEPS)), "must be positive"),
        (lambda: with_interior_steps(BASES["jagg"], jnp.array([1])), "steps has shape"),
        (lambda: with_interior_steps(BASES["jagg"], jnp.array([1, 8])), "one of each run"),
        (lambda: jax.jit(debiased_plan)(BASES["jagg"], jax.random.key(0)), "plan.anchors is traced"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
