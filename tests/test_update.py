"""The gradient of one update, and what becomes of the training state."""

import dataclasses
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from small_models import mlp, mlp_params, normal

from jagg_jax import DanceSDE, FlowSDE, exact_plan, flow_sigmas, initial_noise, jagg_plan, kl_to_reference, rollout
from jagg_jax.update import Objective, TrainState, apply_gradient, policy_gradient

NUM_STEPS, BATCH = 4, 6
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)
PARAMS = mlp_params()
KEYS = jax.random.split(jax.random.key(1), BATCH)
COND = normal(2, (BATCH, 3))
ADVANTAGES = jnp.array([1.0, -2.0, 1.0, 0.5, -1.0, 0.5])
SAMPLER = FlowSDE(0.7)
OBJECTIVE = Objective(SAMPLER, (0.01, 0.02))
PLAN = jagg_plan(SIGMAS[:NUM_STEPS], NUM_STEPS)


@pytest.fixture(scope="module")
def transitions():
    run = jax.jit(
        lambda p: rollout(mlp, p, initial_noise(KEYS, (5,)), SIGMAS, KEYS, COND, sampler=SAMPLER, keep_velocities=True)
    )
    return run(PARAMS).transitions(NUM_STEPS)


def moved(params, scale=0.05):
    """Parameters a small step away, so that ratios differ from 1 and some are clipped."""
    return {name: p + scale * normal(seed, p.shape) for seed, (name, p) in enumerate(params.items())}


@partial(jax.jit, static_argnames=("objective", "use_cached", "batch_anchors", "num_micro_batches"))
def compiled(params, transitions, **options):
    return policy_gradient(mlp, params, transitions, ADVANTAGES, COND, **options)


def gradient_of(params, transitions, **options):
    return compiled(params, transitions, **{"objective": OBJECTIVE, "plan": PLAN, **options})


def test_gradient_against_an_ordinary_loss(transitions):
    """With the exact plan, `jax.grad` of the loss written out step by step, KL to the reference included."""
    objective = Objective(SAMPLER, (0.01, 0.02), kl="exact", kl_weight=0.3)
    params = moved(PARAMS)
    reference = 0.9 * transitions.velocities
    plan = exact_plan(NUM_STEPS)
    gradient, metrics = gradient_of(params, transitions, objective=objective, plan=plan, reference_velocities=reference)

    def loss_fn(p):
        losses, divergences = [], []
        for i in range(NUM_STEPS):
            state, levels = transitions.latents[i], (transitions.sigmas[i], transitions.next_sigmas[i])
            velocity = mlp(p, state, jnp.full(BATCH, levels[0]), COND)
            mean, std = SAMPLER.transition(velocity, state, *levels)
            ratio = jnp.exp(SAMPLER.log_prob(transitions.next_latents[i], mean, std) - transitions.log_probs[i])
            losses.append(jnp.maximum(-ADVANTAGES * ratio, -ADVANTAGES * jnp.clip(ratio, 0.99, 1.02)))
            divergences.append(kl_to_reference("exact", SAMPLER, velocity, reference[i], state, *levels))
        return jnp.mean(jnp.stack(losses)) + 0.3 * jnp.mean(jnp.stack(divergences))

    loss, expected = jax.jit(jax.value_and_grad(loss_fn))(params)
    assert 0 < metrics["clip_fraction"] < 1
    assert metrics["kl"] > 0
    np.testing.assert_allclose(metrics["loss"], loss, rtol=1e-4)
    chex.assert_trees_all_close(gradient, expected, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("use_cached", [False, True])
def test_gradient_does_not_depend_on_micro_batches(transitions, use_cached):
    params = PARAMS if use_cached else moved(PARAMS)
    objective = Objective(SAMPLER, (0.01, 0.02), kl="v", kl_weight=0.1)
    options = {"use_cached": use_cached, "objective": objective, "reference_velocities": 0.9 * transitions.velocities}
    gradient, metrics = gradient_of(params, transitions, **options)
    for num_micro_batches in (2, 6) if use_cached else (3,):
        other, other_metrics = gradient_of(params, transitions, num_micro_batches=num_micro_batches, **options)
        chex.assert_trees_all_close(other, gradient, rtol=1e-4, atol=1e-6)
        chex.assert_trees_all_close(other_metrics, metrics, rtol=1e-4, atol=1e-6)


def test_batch_anchors_and_cache_leave_the_first_gradient_alone(transitions):
    gradient, _ = gradient_of(PARAMS, transitions)
    cached, _ = gradient_of(PARAMS, transitions, use_cached=True)
    chunked, _ = gradient_of(PARAMS, transitions, use_cached=True, batch_anchors=1)
    chex.assert_trees_all_close(cached, gradient, rtol=1e-3, atol=1e-5)
    chex.assert_trees_all_close(chunked, cached, rtol=1e-4, atol=1e-6)


def test_masked_samples_do_not_pull(transitions):
    """A sample of advantage 0 contributes nothing to the policy gradient, whatever its transitions."""
    advantages = ADVANTAGES.at[2].set(0.0)
    options = {"objective": OBJECTIVE, "plan": PLAN, "use_cached": True}
    run = jax.jit(lambda t: policy_gradient(mlp, PARAMS, t, advantages, COND, **options)[0])

    # the latents of sample 2 are replaced by others
    changed = jax.tree.map(lambda x: x.at[:, 2].set(x[:, 3]) if x.ndim > 1 else x, transitions)
    chex.assert_trees_all_close(run(changed), run(transitions), rtol=1e-4, atol=1e-6)


def test_objectives_are_hashable_values():
    assert Objective(FlowSDE(0.7), (0.1, 0.1)) == Objective(FlowSDE(0.7), (0.1, 0.1))
    assert hash(Objective(FlowSDE(0.7), (0.1, 0.1))) == hash(Objective(FlowSDE(0.7), (0.1, 0.1)))
    assert Objective(FlowSDE(0.7), (0.1, 0.1)) != Objective(DanceSDE(0.7), (0.1, 0.1))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_micro_batches": 4}, "num_micro_batches is 4"),
        ({"num_micro_batches": 0}, "num_micro_batches is 0"),
        ({"objective": Objective(SAMPLER, (0.1, 0.1), "v", 0.1)}, "kl 'v' needs reference_velocities"),
        ({"objective": Objective(SAMPLER, (-0.1, 0.1))}, "clip_range is"),
        ({"plan": exact_plan(3)}, "latents has shape"),
    ],
)
def test_bad_arguments(transitions, options, message):
    with pytest.raises(ValueError, match=message):
        gradient_of(PARAMS, transitions, **options)


def test_cache_must_have_been_kept(transitions):
    without = dataclasses.replace(transitions, velocities=None)
    with pytest.raises(ValueError, match="use_cached needs"):
        gradient_of(PARAMS, without, use_cached=True)


OPTIMIZER = optax.adamw(1e-2, weight_decay=0.1)
SMALL = {"a": jnp.array([1.0, -2.0]), "b": {"c": jnp.array([[3.0]], jnp.bfloat16)}}
GRADIENT = {"a": jnp.array([0.5, 4.0]), "b": {"c": jnp.array([[-1.0]], jnp.bfloat16)}}


@pytest.fixture(scope="module")
def step():
    return jax.jit(lambda state, gradient, loss: apply_gradient(state, gradient, OPTIMIZER, loss, ema_decay=0.9))


def test_an_applied_gradient_is_the_optimizers(step):
    state = TrainState.create(SMALL, OPTIMIZER, with_ema=True)
    new, metrics = step(state, GRADIENT, jnp.float32(1.0))
    with jax.numpy_dtype_promotion("standard"):
        changes, opt_state = OPTIMIZER.update(GRADIENT, OPTIMIZER.init(SMALL), SMALL)
    chex.assert_trees_all_close(new.params, optax.apply_updates(SMALL, changes), rtol=1e-5)
    chex.assert_trees_all_close(new.opt_state, opt_state, rtol=1e-2)
    chex.assert_trees_all_equal_shapes_and_dtypes(new, state)
    np.testing.assert_allclose(metrics["grad_norm"], np.sqrt(0.25 + 16.0 + 1.0), rtol=1e-3)
    assert (int(new.updates), int(new.skipped), int(metrics["skipped"])) == (1, 0, 0)


@pytest.mark.parametrize("bad", ["nan", "inf", "-inf", "loss"])
def test_a_bad_update_is_skipped_and_counted(step, bad):
    state, _ = step(TrainState.create(SMALL, OPTIMIZER, with_ema=True), GRADIENT, jnp.float32(1.0))
    loss = jnp.float32(np.nan if bad == "loss" else 0.0)
    broken = GRADIENT if bad == "loss" else {**GRADIENT, "a": GRADIENT["a"].at[1].set(float(bad))}
    once, metrics = step(state, broken, loss)
    assert int(metrics["skipped"]) == 1
    twice, _ = step(once, broken, loss)
    for name in ("params", "opt_state", "ema_params", "updates"):
        chex.assert_trees_all_equal(getattr(twice, name), getattr(state, name))
    assert (int(twice.skipped), int(twice.skipped_in_a_row)) == (2, 2)
    after, _ = step(twice, GRADIENT, jnp.float32(0.0))
    assert (int(after.updates), int(after.skipped), int(after.skipped_in_a_row)) == (2, 2, 0)
    # as if the bad updates had never been
    expected, _ = step(state, GRADIENT, jnp.float32(0.0))
    chex.assert_trees_all_equal((after.params, after.opt_state), (expected.params, expected.opt_state))


def test_average_in_closed_form():
    """SGD with a constant gradient: params_n = p - n lr g, and the average is the geometric sum of them."""
    learning_rate, decay, updates = 0.1, 0.8, 5
    optimizer = optax.sgd(learning_rate)
    params, gradient = {"w": jnp.array([2.0, -1.0])}, {"w": jnp.array([1.0, 3.0])}
    state = TrainState.create(params, optimizer, with_ema=True)
    run = jax.jit(lambda state: apply_gradient(state, gradient, optimizer, jnp.float32(0.0), ema_decay=decay)[0])
    for _ in range(updates):
        state = run(state)
    start, slope = np.array([2.0, -1.0]), -learning_rate * np.array([1.0, 3.0])
    average = decay**updates * start
    average = average + sum((1 - decay) * decay ** (updates - n) * (start + n * slope) for n in range(1, updates + 1))
    np.testing.assert_allclose(state.params["w"], start + updates * slope, rtol=1e-5)
    np.testing.assert_allclose(state.ema_params["w"], average, rtol=1e-5)


def test_states_without_an_average_and_on_their_own_buffers(step):
    state = TrainState.create(SMALL, OPTIMIZER)
    assert state.ema_params is None
    new, _ = step(state, GRADIENT, jnp.float32(0.0))
    assert new.ema_params is None
    # the average starts from a copy: a donated state must not hold a buffer twice
    state = TrainState.create(SMALL, OPTIMIZER, with_ema=True)
    leaves = [leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(state)]
    assert len(set(leaves)) == len(leaves)
