"""The planned VJP under JAX's transformations, partial parameters, low precision and sharded batches."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_models import group, mlp, mlp_params, normal

from jagg_jax import jagg_plan, jagg_velocities, jagg_vjp, planned_velocities, planned_vjp, sigma_alphas, subset_plan

PARAMS = mlp_params()
LATENTS, SIGMAS, COND, COTANGENTS = group()


def jagg(velocity_fn, params, latents, sigmas, cond, cotangents):
    velocities, vjp_fn = jagg_vjp(velocity_fn, params, latents, sigmas, *cond)
    return velocities, vjp_fn(cotangents)


@pytest.fixture(scope="module")
def expected():
    return jax.jit(lambda *args: jagg(mlp, *args))(PARAMS, LATENTS, SIGMAS, (COND,), COTANGENTS)


def assert_close(actual, desired):
    chex.assert_trees_all_close(actual, desired, rtol=1e-4, atol=1e-5)


def test_without_jit(expected):
    assert_close(jagg(mlp, PARAMS, LATENTS, SIGMAS, (COND,), COTANGENTS), expected)


def test_checkpointed_velocity_function(expected):
    run = jax.jit(lambda *args: jagg(jax.checkpoint(mlp), *args))
    assert_close(run(PARAMS, LATENTS, SIGMAS, (COND,), COTANGENTS), expected)


def test_vmap_over_an_outer_axis():
    problems = [group(seed=seed) for seed in range(3)]
    latents, _, cond, cotangents = (jnp.stack(parts) for parts in zip(*problems, strict=True))
    sigmas = jnp.stack([SIGMAS, SIGMAS**2, SIGMAS**3])

    def one(x, s, c, u):
        return jagg(mlp, PARAMS, x, s, (c,), u)

    together = jax.jit(jax.vmap(one))(latents, sigmas, cond, cotangents)
    one = jax.jit(one)
    apart = [one(*arguments) for arguments in zip(latents, sigmas, cond, cotangents, strict=True)]
    assert_close(together, jax.tree.map(lambda *leaves: jnp.stack(leaves), *apart))


def test_scan_over_groups(expected):
    """Two groups in one scan, with the sum of their gradients in the carry."""

    def add(total, inputs):
        gradient = jagg(mlp, PARAMS, *inputs[:2], (COND,), inputs[2])[1]
        return jax.tree.map(jnp.add, total, gradient), None

    twice = jax.tree.map(lambda x: jnp.stack([x, x]), (LATENTS, SIGMAS, COTANGENTS))
    total = jax.jit(lambda: jax.lax.scan(add, jax.tree.map(jnp.zeros_like, PARAMS), twice)[0])()
    assert_close(total, jax.tree.map(lambda g: 2.0 * g, expected[1]))


@pytest.mark.parametrize("frozen_in", ["closure", "cond"])
def test_partial_parameters(frozen_in):
    """LoRA: only two thin factors learn. Their gradient follows from that of the full matrix by the chain rule."""
    lora = {"a": normal(4, (5, 2)), "b": 0.1 * normal(5, (2, 16))}

    def merged(lora, base):
        return {**base, "in": base["in"] + lora["a"] @ lora["b"]}

    if frozen_in == "closure":
        cond = (COND,)

        def adapted(lora, latents, sigma, cond):
            return mlp(merged(lora, PARAMS), latents, sigma, cond)
    else:
        cond = (COND, PARAMS)

        def adapted(lora, latents, sigma, cond, base):
            return mlp(merged(lora, base), latents, sigma, cond)

    velocities, gradient = jax.jit(lambda *args: jagg(adapted, *args))(lora, LATENTS, SIGMAS, cond, COTANGENTS)
    full = jax.jit(lambda *args: jagg(mlp, *args))(merged(lora, PARAMS), LATENTS, SIGMAS, (COND,), COTANGENTS)
    by_chain_rule = {"a": full[1]["in"] @ lora["b"].T, "b": lora["a"].T @ full[1]["in"]}
    assert_close((velocities, gradient), (full[0], by_chain_rule))


def test_cond_may_be_any_pytree():
    """Integers, nested containers, None and a PRNG key: whatever a velocity function takes."""

    def velocity_fn(params, latents, sigma, cond, key):
        mask = cond["mask"].astype(jnp.float32)[:, None]
        return mlp(params, latents, sigma, cond["text"]) * mask + jax.random.normal(key, ())

    cond = ({"text": COND, "mask": jnp.array([1, 0, 1, 1]), "unused": None}, jax.random.key(0))
    _, gradient = jax.jit(lambda p: jagg(velocity_fn, p, LATENTS, SIGMAS, cond, COTANGENTS))(PARAMS)

    def loss(p):
        return jnp.sum(COTANGENTS * jagg_velocities(velocity_fn, p, LATENTS, SIGMAS, *cond))

    assert_close(gradient, jax.jit(jax.grad(loss))(PARAMS))
    masked = COTANGENTS * cond[0]["mask"].astype(jnp.float32)[None, :, None]
    assert_close(gradient, jax.jit(lambda p: jagg(mlp, p, LATENTS, SIGMAS, (COND,), masked))(PARAMS)[1])


def test_sigmas_that_differ_between_samples():
    """[W, B]: each sample is interpolated by its own sigmas, as if it had been a batch of its own."""
    sigmas = SIGMAS[:, None] ** jnp.array([1.0, 0.5, 2.0, 3.0])[None, :]
    together = jax.jit(lambda p: jagg(mlp, p, LATENTS, sigmas, (COND,), COTANGENTS))(PARAMS)
    alone = jax.jit(lambda x, s, c, u: jagg(mlp, PARAMS, x, s, (c,), u))
    parts = []
    for b in range(4):
        mine = slice(b, b + 1)
        parts.append(alone(LATENTS[:, mine], sigmas[:, b], COND[mine], COTANGENTS[:, mine]))
    velocities = jnp.concatenate([part[0] for part in parts], axis=1)
    gradient = jax.tree.map(lambda *leaves: sum(leaves), *(part[1] for part in parts))
    assert_close(together, (velocities, gradient))


def test_alphas_per_sample_and_surrogate(expected):
    alphas = jnp.broadcast_to(sigma_alphas(SIGMAS)[:, None], (5, 4))
    velocities, vjp_fn = jagg_vjp(mlp, PARAMS, LATENTS, SIGMAS, COND, alphas=alphas)
    assert_close((velocities, vjp_fn(COTANGENTS)), expected)

    def loss(p):
        return jnp.sum(COTANGENTS * jagg_velocities(mlp, p, LATENTS, SIGMAS, COND, alphas=alphas))

    assert_close(jax.jit(jax.grad(loss))(PARAMS), expected[1])


@pytest.mark.parametrize("batch_anchors", [None, 1])
def test_bfloat16_parameters(batch_anchors, expected):
    """Velocities are float32 and gradients bfloat16, as accurate as bfloat16 is."""
    params = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    plan = jagg_plan(SIGMAS, 5)

    @jax.jit
    def run(p):
        velocities, vjp_fn = planned_vjp(mlp, p, LATENTS, SIGMAS, COND, plan=plan, batch_anchors=batch_anchors)
        return velocities, vjp_fn(COTANGENTS)

    velocities, gradient = run(params)
    chex.assert_type(velocities, jnp.float32)
    chex.assert_trees_all_equal_shapes_and_dtypes(gradient, params)
    for key, value in expected[1].items():
        assert np.linalg.norm(gradient[key].astype(jnp.float32) - value) < 0.03 * np.linalg.norm(value)


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_batch_sharded_over_eight_devices(axis_type):
    latents, sigmas, cond, cotangents = group(batch=16)
    plan = jagg_plan(sigmas, 4)

    @jax.jit
    def run(params, latents, cond, cotangents, key):
        results = []
        for options in ({}, {"batch_anchors": 2}, {"cached": cotangents}, {"plan": subset_plan(key, 5, 2)}):
            options = {"plan": plan, **options}
            velocities, vjp_fn = planned_vjp(mlp, params, latents, sigmas, cond, **options)
            results.append((velocities, vjp_fn(cotangents)))

        def loss(p):
            return jnp.sum(cotangents * planned_velocities(mlp, p, latents, sigmas, cond, plan=plan))

        return results, jax.grad(loss)(params)

    key = jax.random.key(0)
    unsharded = run(PARAMS, latents, cond, cotangents, key)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    with jax.set_mesh(mesh):
        steps_first, batch_first = (NamedSharding(mesh, PartitionSpec(*spec)) for spec in ((None, "data"), ("data",)))
        latents, cotangents = jax.device_put((latents, cotangents), steps_first)
        params = jax.device_put(PARAMS, NamedSharding(mesh, PartitionSpec()))
        results, gradient = run(params, latents, jax.device_put(cond, batch_first), cotangents, key)
    assert_close(jax.device_get((results, gradient)), jax.device_get(unsharded))
    for velocities, one_gradient in results:
        assert velocities.sharding.is_equivalent_to(steps_first, 3)
        chex.assert_trees_all_equal(jax.tree.map(jax.typeof, one_gradient), jax.tree.map(jax.typeof, params))
