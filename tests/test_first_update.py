"""In the first update after a rollout the ratio is exactly 1.0, for every sample and step: == and not nearly."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from small_models import mlp, mlp_params, normal

from jagg_jax import (
    CPS,
    DanceSDE,
    FlowSDE,
    flow_sigmas,
    group_advantages,
    jagg_plan,
    rollout,
    with_guidance,
)
from jagg_jax.update import Objective, policy_gradient

NUM_STEPS = 4
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)
PLAN = jagg_plan(SIGMAS[:NUM_STEPS], NUM_STEPS)


def problem(batch, shape, dtype, guidance):
    """A velocity function with and without guidance, its parameters, keys and conditions."""
    features = int(np.prod(shape))
    params = mlp_params(0, features, dtype=dtype)
    keys = jax.random.split(jax.random.key(1), batch)
    cond = normal(2, (batch, 3))
    if guidance is None:
        return mlp, params, keys, (cond,)
    return with_guidance(mlp, guidance), params, keys, (cond, jnp.zeros_like(cond))


def first_update(velocity_fn, sampler, params, noise, keys, cond, num_micro_batches, kl=None):
    """Rollout and update, compiled apart as they are in training; returns trajectory, gradient and metrics."""
    objective = Objective(sampler, (1e-3, 1e-3), kl, 0.1 if kl else 0.0)
    draw = jax.jit(lambda p, n, k, c: rollout(velocity_fn, p, n, SIGMAS, k, *c, sampler=sampler, keep_velocities=True))
    transitions = draw(params, noise, keys, cond).transitions(NUM_STEPS)
    advantages = group_advantages(transitions.log_probs[0], 2)

    @jax.jit
    def update(params, transitions, advantages, cond):
        return policy_gradient(
            velocity_fn,
            params,
            transitions,
            advantages,
            *cond,
            objective=objective,
            plan=PLAN,
            use_cached=True,
            num_micro_batches=num_micro_batches,
            reference_velocities=0.9 * transitions.velocities.astype(jnp.float32) if kl else None,
        )

    return (transitions, *update(params, transitions, advantages, cond))


def assert_ratio_is_one(metrics):
    assert float(metrics["ratio_max_deviation"]) == 0.0
    assert float(metrics["ratio_mean"]) == 1.0
    assert float(metrics["clip_fraction"]) == 0.0
    assert float(metrics["approx_kl"]) == 0.0


DTYPES = [jnp.float32, jnp.bfloat16]
# every sampler with every pair of dtypes; guidance, micro-batches and shapes rotate
CASES = [
    (sampler, model, storage, (None, 2.5, 1.0)[i % 3], (1, 3, 6, 2, 1)[i % 5], ((5,), (3, 7), (4, 4, 2), (1,))[i % 4])
    for i, (sampler, model, storage) in enumerate(
        itertools.product([FlowSDE(0.7), DanceSDE(0.3), CPS(0.5)], DTYPES, DTYPES)
    )
]


@pytest.mark.parametrize(("sampler", "model", "storage", "guidance", "num_micro_batches", "shape"), CASES)
def test_ratio_is_exactly_one(sampler, model, storage, guidance, num_micro_batches, shape):
    velocity_fn, params, keys, cond = problem(6, shape, model, guidance)
    noise = normal(3, (6, *shape), storage)
    kl = "exact" if num_micro_batches == 3 else None
    transitions, gradient, metrics = first_update(
        velocity_fn, sampler, params, noise, keys, cond, num_micro_batches, kl
    )
    assert transitions.latents.dtype == storage
    assert_ratio_is_one(metrics)
    assert all(np.any(leaf != 0) and np.all(np.isfinite(leaf)) for leaf in jax.tree.leaves(gradient))


@pytest.mark.parametrize(
    ("axis_type", "shape"), [(AxisType.Auto, (5,)), (AxisType.Explicit, (5,)), (AxisType.Explicit, (3, 7))]
)
def test_one_sample_a_device(axis_type, shape):
    """Micro-batches of one sample a device, whose number of elements is no power of two, once broke it."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))
    velocity_fn, params, keys, cond = problem(16, shape, jnp.float32, None)
    noise = normal(3, (16, *shape))
    with jax.set_mesh(mesh):
        keys, cond, noise = jax.device_put((keys, cond, noise), NamedSharding(mesh, PartitionSpec("data")))
        params = jax.device_put(params, NamedSharding(mesh, PartitionSpec()))
        *_, gradient, metrics = first_update(velocity_fn, FlowSDE(0.7), params, noise, keys, cond, 2)
    assert_ratio_is_one(metrics)
    assert jax.tree.map(jax.typeof, gradient) == jax.tree.map(jax.typeof, params)
