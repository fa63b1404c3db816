"""What a planned VJP costs: which evaluations are linearised, and how much memory the others keep."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import group, mlp, mlp_params

from jagg_jax import exact_plan, hat_plan, jagg_plan, jagg_velocities, jagg_vjp, planned_vjp

PARAMS = mlp_params()
LATENTS, SIGMAS, COND, COTANGENTS = group()


def counting(calls):
    """`mlp` that appends ("linearised" or "plain", sigma) to `calls` whenever it is evaluated."""

    def record(kind, sigma):
        jax.debug.callback(lambda level: calls.append((kind, round(float(level), 5))), sigma[0])

    @jax.custom_vjp
    def velocity_fn(params, latents, sigma, cond):
        record("plain", sigma)
        return mlp(params, latents, sigma, cond)

    def forward(*arguments):
        record("linearised", arguments[2])
        return mlp(*arguments), arguments

    def backward(arguments, cotangent):
        return jax.vjp(mlp, *arguments)[1](cotangent)

    velocity_fn.defvjp(forward, backward)
    return velocity_fn


def count(run):
    """How often each kind of evaluation ran, and the sigmas of the linearised ones."""
    calls = []
    jax.block_until_ready(jax.jit(lambda params: run(counting(calls), params))(PARAMS))
    jax.effects_barrier()
    kinds = collections.Counter(kind for kind, _ in calls)
    return kinds["linearised"], kinds["plain"], sorted((s for kind, s in calls if kind == "linearised"), reverse=True)


def rounded(sigmas):
    return [round(float(sigma), 5) for sigma in sigmas]


@pytest.mark.parametrize(("cached", "interior"), [(False, 3), (True, 0)])
@pytest.mark.parametrize("through", ["jagg_vjp", "jagg_velocities"])
def test_a_group_of_five(through, cached, interior):
    known = COTANGENTS if cached else None

    def run(velocity_fn, params):
        if through == "jagg_velocities":

            def loss(p):
                return jnp.sum(COTANGENTS * jagg_velocities(velocity_fn, p, LATENTS, SIGMAS, COND, cached=known))

            return jax.value_and_grad(loss)(params)
        velocities, vjp_fn = jagg_vjp(velocity_fn, params, LATENTS, SIGMAS, COND, cached=known)
        return velocities, vjp_fn(COTANGENTS)

    assert count(run) == (2, interior, rounded(SIGMAS[jnp.array([0, 4])]))


@pytest.mark.parametrize(
    ("make", "options", "expected"),
    [
        (lambda: exact_plan(5), {}, (5, 0, [0, 1, 2, 3, 4])),
        (lambda: hat_plan(SIGMAS, 3), {}, (3, 2, [0, 2, 4])),
        (lambda: jagg_plan(SIGMAS, 3, jagg_frac=0.6), {}, (4, 1, [0, 2, 3, 4])),
        # in chunks, the velocities come from a forward of their own
        (lambda: jagg_plan(SIGMAS, 5), {"batch_anchors": 1}, (2, 5, [0, 4])),
        (lambda: jagg_plan(SIGMAS, 5), {"batch_anchors": 1, "cached": COTANGENTS}, (2, 0, [0, 4])),
        # to first order, no step between anchors is evaluated
        (lambda: jagg_plan(SIGMAS, 5), {"previous": COTANGENTS}, (2, 0, [0, 4])),
        (lambda: jagg_plan(SIGMAS, 5), {"batch_anchors": 1, "previous": COTANGENTS}, (2, 2, [0, 4])),
    ],
)
def test_plans(make, options, expected):
    def run(velocity_fn, params):
        velocities, vjp_fn = planned_vjp(velocity_fn, params, LATENTS, SIGMAS, COND, plan=make(), **options)
        return velocities, vjp_fn(COTANGENTS)

    linearised, plain, steps = expected
    assert count(run) == (linearised, plain, rounded(SIGMAS[jnp.array(steps)]))


HIDDEN, BATCH, FEATURES = 1024, 64, 4


def temporary_bytes(num_steps, plan_fn, **options):
    """Temporary memory of one compiled gradient whose cotangents depend on all velocities."""
    params = mlp_params(0, FEATURES, HIDDEN)
    latents = jax.ShapeDtypeStruct((num_steps, BATCH, FEATURES), jnp.float32)
    cond = jax.ShapeDtypeStruct((BATCH, 3), jnp.float32)
    sigmas = jnp.linspace(0.9, 0.1, num_steps)

    def gradient(params, latents, cond):
        velocities, vjp_fn = planned_vjp(mlp, params, latents, sigmas, cond, plan=plan_fn(sigmas), **options)
        return vjp_fn(jnp.cos(velocities))

    return jax.jit(gradient).lower(params, latents, cond).compile().memory_analysis().temp_size_in_bytes


def test_interior_steps_keep_no_residuals():
    activations = BATCH * HIDDEN * 4
    velocities = BATCH * FEATURES * 4
    one_group = {n: temporary_bytes(n, lambda sigmas, n=n: jagg_plan(sigmas, n)) for n in (2, 3, 8)}
    # five more interior steps add copies of their velocities and nothing else
    assert one_group[8] - one_group[3] <= 5 * 6 * velocities < activations
    # and the six interior steps of W = 8 share the workspace of one evaluation
    assert one_group[8] - one_group[2] <= 3 * activations
    # the meter does see activations: each exact step keeps its own
    exact = {n: temporary_bytes(n, lambda sigmas, n=n: exact_plan(n)) for n in (2, 8)}
    assert exact[8] - exact[2] >= 6 * activations


def test_batch_anchors_trades_memory():
    whole = temporary_bytes(8, lambda sigmas: exact_plan(8))
    one = temporary_bytes(8, lambda sigmas: exact_plan(8), batch_anchors=1)
    two = temporary_bytes(8, lambda sigmas: exact_plan(8), batch_anchors=2)
    assert one < two < whole
    assert one < 0.4 * whole


def test_counts_see_a_change():
    """The counter itself: plain autodiff of two steps is two linearised evaluations, a forward two plain ones."""

    def forward(velocity_fn, params):
        return [velocity_fn(params, LATENTS[j], jnp.full(4, SIGMAS[j]), COND) for j in (0, 1)]

    def backward(velocity_fn, params):
        return jax.grad(lambda p: jnp.sum(jnp.stack(forward(velocity_fn, p))))(params)

    np.testing.assert_equal(count(forward), (0, 2, []))
    np.testing.assert_equal(count(backward), (2, 0, rounded(SIGMAS[:2])))
