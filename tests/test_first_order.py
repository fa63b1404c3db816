"""First-order velocities: steps between anchors after the parameters moved, without a forward of their own."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import group, mlp, mlp_params, normal

from jagg_jax import (
    DanceSDE,
    exact_plan,
    first_order_velocities,
    flow_sigmas,
    hat_plan,
    initial_noise,
    jagg_plan,
    planned_vjp,
    rollout,
)
from jagg_jax.plans import with_interior_steps
from jagg_jax.rollout import step_log_probs

NUM_STEPS = 7
PARAMS = mlp_params()
LATENTS, _, COND, COTANGENTS = group(NUM_STEPS)
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)[:NUM_STEPS]
DIRECTION = {name: normal(seed, p.shape) / p.size**0.5 for seed, (name, p) in enumerate(PARAMS.items())}
PLANS = {
    "jagg": jagg_plan(SIGMAS, 4, 0.9),
    "hat": hat_plan(SIGMAS, 4, phase=1),
    "debiased": with_interior_steps(jagg_plan(SIGMAS, 4), jnp.array([2, 5])),
}


def moved(scale):
    return jax.tree.map(lambda p, d: p + scale * d, PARAMS, DIRECTION)


@partial(jax.jit, static_argnames="velocity_fn")
def all_velocities(params, latents, sigmas, cond, velocity_fn=mlp):
    plan = exact_plan(latents.shape[0])
    return planned_vjp(velocity_fn, params, latents, sigmas, cond, plan=plan)[0]


@partial(jax.jit, static_argnames=("velocity_fn", "batch_anchors"))
def first_order(plan, params, previous, latents, sigmas, cond, cotangents, velocity_fn=mlp, batch_anchors=None):
    options = {"plan": plan, "previous": previous, "batch_anchors": batch_anchors}
    velocities, vjp_fn = planned_vjp(velocity_fn, params, latents, sigmas, cond, **options)
    return velocities, vjp_fn(cotangents)


@pytest.mark.parametrize("name", PLANS)
def test_values_against_the_formula(name):
    plan, params = PLANS[name], moved(0.1)
    old, new = (all_velocities(p, LATENTS, SIGMAS, COND) for p in (PARAMS, params))
    anchors = np.asarray(plan.anchors)
    expected = np.array(old)
    for step in range(NUM_STEPS):
        for column, anchor in enumerate(anchors):
            expected[step] += plan.weights[step, column] * (new[anchor] - old[anchor])
    expected[anchors] = new[anchors]
    velocities = first_order_velocities(plan, new[plan.anchors], old)
    np.testing.assert_allclose(velocities, expected, rtol=1e-5, atol=1e-6)
    # an anchor has its own velocity to the last bit, and nothing changes where the parameters did not
    np.testing.assert_array_equal(velocities[plan.anchors], new[plan.anchors])
    np.testing.assert_array_equal(first_order_velocities(plan, old[plan.anchors], old), old)


@pytest.mark.parametrize("batch_anchors", [None, 1, 3])
def test_the_planned_gradient_is_that_of_the_first_order_values(batch_anchors):
    """What `jax.grad` makes of a loss of these values; also anchors a chunk at a time."""
    plan, params = PLANS["jagg"], moved(0.1)
    old = all_velocities(PARAMS, LATENTS, SIGMAS, COND)

    def loss(p):
        at_anchors = all_velocities(p, LATENTS[plan.anchors], SIGMAS[plan.anchors], COND)
        velocities = first_order_velocities(plan, at_anchors, old)
        return jnp.sum(COTANGENTS * velocities), velocities

    (_, expected), expected_gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)
    arguments = (plan, params, old, LATENTS, SIGMAS, COND, COTANGENTS)
    velocities, gradient = first_order(*arguments, batch_anchors=batch_anchors)
    np.testing.assert_allclose(velocities, expected, rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(gradient, expected_gradient, rtol=1e-4, atol=1e-5)


def on_a_line(weights):
    """Latents between two fixed endpoints, at `weights` from the first to the last."""
    first, last = normal(7, (2, 4, 5))
    return first[None] + weights[:, None, None] * (last - first)[None]


def affine(params, latents, sigma, cond):
    return latents @ params["in"] + sigma[:, None] * params["time"] + cond @ params["cond"]


def test_affine_field_on_the_chord():
    """The change of the velocity is then linear in the noise level, however large: no error."""
    old, new = (
        {n: normal(seed + size, (size, 5)) for n, size in (("in", 5), ("time", 1), ("cond", 3))} for seed in (0, 9)
    )
    latents = on_a_line(1.0 - SIGMAS)
    before, expected = (all_velocities(p, latents, SIGMAS, COND, velocity_fn=affine) for p in (old, new))
    arguments = (latents, SIGMAS, COND, COTANGENTS)
    velocities, _ = first_order(jagg_plan(SIGMAS, 7), new, before, *arguments, velocity_fn=affine)
    assert np.abs(expected - before).max() > 1.0
    np.testing.assert_allclose(velocities, expected, atol=2e-5)


def relative_errors(scale, span):
    """|first order - recomputed| and |previous - recomputed| of one group of 7 steps on a smooth path."""
    sigmas = 0.5 + span * jnp.linspace(0.5, -0.5, NUM_STEPS)
    latents, params = on_a_line(jnp.sin(2.0 * sigmas)), moved(scale)
    old, new = (all_velocities(p, latents, sigmas, COND) for p in (PARAMS, params))
    velocities, _ = first_order(jagg_plan(sigmas, 7), params, old, latents, sigmas, COND, COTANGENTS)
    return np.linalg.norm(velocities - new), np.linalg.norm(old - new)


def test_the_error_is_of_first_order_in_the_change_and_of_second_in_the_spacing():
    """Half the change, half the error, at a constant small share of the change; half the spacing, a quarter."""
    errors, changes = np.array([relative_errors(scale, 0.4) for scale in (0.4, 0.2, 0.1, 0.05)]).T
    np.testing.assert_allclose(np.log2(errors[:-1] / errors[1:])[1:], 1.0, atol=0.15)
    np.testing.assert_allclose(errors / changes, 0.058, atol=0.002)
    errors, _ = np.array([relative_errors(0.1, span) for span in (0.4, 0.2, 0.1)]).T
    np.testing.assert_allclose(np.log2(errors[:-1] / errors[1:]), 2.0, atol=0.2)


def test_ratios_and_clip_masks():
    """On sampled latents: much nearer to the recomputed ratios than ratio 1, and the same steps are clipped."""
    sampler, sigmas, batch = DanceSDE(0.3), flow_sigmas(20, 3.0), 64
    keys, cond = jax.random.split(jax.random.key(3), batch), normal(4, (batch, 3))
    plan = jagg_plan(sigmas[:NUM_STEPS], 4)

    @jax.jit
    def draw(params):
        noise = initial_noise(keys, (5,))
        options = {"sampler": sampler, "keep_velocities": True}
        return rollout(mlp, params, noise, sigmas, keys, cond, **options).transitions(NUM_STEPS)

    t = draw(PARAMS)

    @jax.jit
    def log_ratios(params):
        """By recomputed and by first-order velocities, at the steps that are no anchors."""
        recomputed = planned_vjp(mlp, params, t.latents, t.sigmas, cond, plan=plan)[0]
        interpolated = planned_vjp(mlp, params, t.latents, t.sigmas, cond, plan=plan, previous=t.velocities)[0]
        interior = jnp.array([1, 2, 5])
        steps = (t.latents, t.next_latents, t.sigmas, t.next_sigmas)
        return [
            (step_log_probs(sampler, velocities, *steps) - t.log_probs)[interior]
            for velocities in (recomputed, interpolated)
        ]

    shares = []
    for scale in (0.1, 0.05, 0.025):
        recomputed, interpolated = map(np.asarray, log_ratios(moved(scale)))
        shares.append(np.linalg.norm(interpolated - recomputed) / np.linalg.norm(recomputed))
        bound = np.quantile(np.abs(recomputed), 0.5)
        disagree = np.mean((np.abs(recomputed) > bound) != (np.abs(interpolated) > bound))
        assert disagree < 0.05
        assert np.corrcoef(recomputed.ravel(), interpolated.ravel())[0, 1] > 0.99
    # a share of the log-ratio that does not depend on how small the change is: the error is of first order
    assert max(shares) < 0.06
    np.testing.assert_allclose(shares, shares[-1], rtol=0.1)


def test_bad_arguments():
    options = {"plan": PLANS["jagg"], "previous": LATENTS}
    with pytest.raises(ValueError, match="cached and previous are both given"):
        planned_vjp(mlp, PARAMS, LATENTS, SIGMAS, COND, cached=LATENTS, **options)
    with pytest.raises(ValueError, match="previous has shape"):
        planned_vjp(mlp, PARAMS, LATENTS, SIGMAS, COND, **{**options, "previous": LATENTS[:2]})
