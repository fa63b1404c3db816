"""The planned VJP against the reference numbers, against plain autodiff, and where theory says that it is exact."""

from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import group, load_reference, mlp, mlp_params, normal, planned_gradient

from jagg_jax import (
    BackwardPlan,
    DanceSDE,
    exact_plan,
    flow_sigmas,
    grpo_loss,
    hat_plan,
    index_alphas,
    jagg_plan,
    jagg_velocities,
    jagg_vjp,
    planned_velocities,
    planned_vjp,
    subset_plan,
)

PARAMS = mlp_params()
LATENTS, SIGMAS, COND, COTANGENTS = group()


@partial(jax.jit, static_argnames="batch_anchors")
def planned(plan, params, latents, sigmas, cond, cotangents, cached=None, batch_anchors=None):
    """Velocities and gradient; the plan is an argument, so that its values are traced."""
    options = {"plan": plan, "cached": cached, "batch_anchors": batch_anchors}
    velocities, vjp_fn = planned_vjp(mlp, params, latents, sigmas, cond, **options)
    return velocities, vjp_fn(cotangents)


@jax.jit
def plain(params, latents, sigmas, cond, cotangents):
    """Every step differentiated by itself, in one ordinary `jax.vjp`."""

    def all_steps(p):
        return jnp.stack([mlp(p, x, jnp.full(x.shape[0], s), cond) for x, s in zip(latents, sigmas, strict=True)])

    velocities, vjp_fn = jax.vjp(all_steps, params)
    return velocities, vjp_fn(cotangents)[0]


def reference_velocity(params, latents, sigma, cond):
    t = jnp.floor(1000.0 * sigma) / 1000.0
    hidden = latents @ params["w_in"] + (t[:, None] * params["w_time"][None, :] + cond @ params["w_cond"])[:, None, :]
    return jnp.tanh(hidden) @ params["w_out"]


def reference_group(name):
    data = load_reference(name)
    index = data["index"]
    params = {key.removeprefix("param_"): jnp.asarray(data[key]) for key in data if key.startswith("param_")}
    gradient = {key.removeprefix("grad_"): data[key] for key in data if key.startswith("grad_")}
    sigmas, next_sigmas = jnp.asarray(data["sigmas"][index]), jnp.asarray(data["sigmas"][index + 1])
    np.testing.assert_array_equal(jnp.floor(1000.0 * sigmas), data["timesteps"][0])
    latents, next_latents = (jnp.moveaxis(jnp.asarray(data[key]), 1, 0) for key in ("latents", "next_latents"))
    old_log_prob, advantage = jnp.asarray(data["old_log_prob"].T), jnp.full(1, float(data["advantage"]))
    sampler, clip_range = DanceSDE(float(data["eta"])), float(data["clip_range"])

    def loss_sum(velocities):
        mean, std = jax.vmap(sampler.transition)(velocities, latents, sigmas, next_sigmas)
        log_prob = jax.vmap(sampler.log_prob)(next_latents, mean, std)
        loss, metrics = grpo_loss(log_prob, old_log_prob, advantage, clip_range)
        return len(index) * loss, metrics

    return data, params, latents, sigmas, jnp.asarray(data["cond"]), loss_sum, gradient


@pytest.mark.parametrize("through", ["jagg_vjp", "jagg_velocities", "planned_vjp"])
@pytest.mark.parametrize("name", ["group_grad_W4_onpolicy", "group_grad_W4_clipped"])
def test_the_authors_group_gradient(name, through):
    data, params, latents, sigmas, cond, loss_sum, expected = reference_group(name)
    arguments = (latents, sigmas, cond)
    if through == "jagg_velocities":

        def loss_fn(p):
            return loss_sum(jagg_velocities(reference_velocity, p, *arguments, alphas=index_alphas(4)))

        (loss, metrics), gradient = jax.jit(jax.value_and_grad(loss_fn, has_aux=True))(params)
    else:

        @jax.jit
        def run(p):
            if through == "jagg_vjp":
                velocities, vjp_fn = jagg_vjp(reference_velocity, p, *arguments, alphas=index_alphas(4))
            else:
                plan = jagg_plan(sigmas, 4, alpha="index")
                velocities, vjp_fn = planned_vjp(reference_velocity, p, *arguments, plan=plan)
            value, cotangents = jax.value_and_grad(loss_sum, has_aux=True)(velocities)
            return value, vjp_fn(cotangents)

        (loss, metrics), gradient = run(params)
    np.testing.assert_allclose(loss, data["loss_sum"], rtol=1e-5)
    np.testing.assert_allclose(metrics["ratio_mean"], data["ratio_mean"], rtol=1e-5)
    for key, value in expected.items():
        error = np.linalg.norm(gradient[key] - value) / np.linalg.norm(value)
        assert error < 1e-5, (key, error)


def test_identity_is_plain_autodiff():
    arguments = (PARAMS, LATENTS, SIGMAS, COND, COTANGENTS)
    chex.assert_trees_all_close(planned(exact_plan(5), *arguments), plain(*arguments), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("steps_per_group", [1, 2])
def test_groups_of_one_and_two_are_exact(steps_per_group):
    arguments = (PARAMS, LATENTS, SIGMAS, COND, COTANGENTS)
    expected = plain(*arguments)
    plan = jagg_plan(SIGMAS, steps_per_group)
    chex.assert_trees_all_close(planned(plan, *arguments), expected, rtol=1e-5, atol=1e-5)
    part = (LATENTS[:steps_per_group], SIGMAS[:steps_per_group], COND)
    gradient = jax.jit(lambda p: jagg_vjp(mlp, p, *part)[1](COTANGENTS[:steps_per_group]))(PARAMS)
    short = plain(PARAMS, *part, COTANGENTS[:steps_per_group])[1]
    chex.assert_trees_all_close(gradient, short, rtol=1e-5, atol=1e-5)


def test_three_steps_are_not_exact():
    arguments = (PARAMS, LATENTS, SIGMAS, COND, COTANGENTS)
    gradient, expected = planned(jagg_plan(SIGMAS, 3), *arguments)[1], plain(*arguments)[1]
    assert np.linalg.norm(gradient["in"] - expected["in"]) > 0.05 * np.linalg.norm(expected["in"])


@pytest.mark.parametrize("make", ["jagg", "hat", "subset", "arbitrary"])
def test_any_plan_against_one_vjp_an_anchor(make):
    plan = {
        "jagg": lambda: jagg_plan(SIGMAS, 3, alpha="index"),
        "hat": lambda: hat_plan(SIGMAS, 3, phase=1),
        "subset": lambda: subset_plan(jax.random.key(3), 5, 3),
        "arbitrary": lambda: BackwardPlan(jnp.array([4, 1, 3]), normal(5, (5, 3))),
    }[make]()
    arguments = (PARAMS, LATENTS, SIGMAS, COND, COTANGENTS)
    velocities, gradient = planned(plan, *arguments)
    expected = jax.jit(partial(planned_gradient, mlp))(*arguments, plan)
    chex.assert_trees_all_close(velocities, plain(*arguments)[0], rtol=1e-5, atol=1e-6)
    chex.assert_trees_all_close(gradient, expected, rtol=1e-4, atol=1e-5)


def affine(params, latents, sigma, cond):
    return latents @ params["in"] + sigma[:, None] * params["time"] + cond @ params["cond"]


def on_a_line(weights):
    """Latents between two fixed endpoints, at `weights` from the first to the last."""
    first, last = normal(7, (2, 4, 5))
    return first[None] + weights[:, None, None] * (last - first)[None]


@pytest.mark.parametrize("num_steps", [3, 4, 7])
def test_affine_field_on_the_chord(num_steps):
    """Exact with weights linear in sigma, and measurably not with weights linear in the index, at shift 3."""
    sigmas = flow_sigmas(num_steps + 2, 3.0)[:num_steps]
    latents = on_a_line((sigmas[0] - sigmas) / (sigmas[0] - sigmas[-1]))
    params = {name: normal(n, (n, 5)) for name, n in (("in", 5), ("time", 1), ("cond", 3))}
    cotangents = normal(2, latents.shape)

    @jax.jit
    def gradients(p):
        exact = planned_vjp(affine, p, latents, sigmas, COND, plan=exact_plan(num_steps))[1](cotangents)
        by_sigma = jagg_vjp(affine, p, latents, sigmas, COND)[1](cotangents)
        by_index = jagg_vjp(affine, p, latents, sigmas, COND, alphas=index_alphas(num_steps))[1](cotangents)
        return exact, by_sigma, by_index

    exact, by_sigma, by_index = gradients(params)
    chex.assert_trees_all_close(by_sigma, exact, rtol=1e-4, atol=1e-4)
    for key in ("in", "time"):
        assert np.linalg.norm(by_index[key] - exact[key]) > 5e-3 * np.linalg.norm(exact[key])


def test_second_order_in_the_span():
    """Without noise the latents lie on a smooth curve: half the span, a quarter of the error."""

    cotangents = jnp.broadcast_to(COTANGENTS[0], COTANGENTS.shape)

    @jax.jit
    def error(span):
        sigmas = 0.5 + span * jnp.linspace(0.5, -0.5, 5)
        latents = on_a_line(jnp.sin(2.0 * sigmas))
        exact = planned_vjp(mlp, PARAMS, latents, sigmas, COND, plan=exact_plan(5))[1](cotangents)
        interpolated = jagg_vjp(mlp, PARAMS, latents, sigmas, COND)[1](cotangents)
        return jnp.sqrt(
            sum(jnp.sum((a - b) ** 2) for a, b in zip(*map(jax.tree.leaves, (exact, interpolated)), strict=True))
        )

    errors = np.array([error(span) for span in (0.2, 0.1, 0.05)])
    np.testing.assert_allclose(errors[:-1] / errors[1:], 4.0, atol=0.25)


@pytest.mark.parametrize("cached", [False, True])
def test_gradient_does_not_depend_on_batch_anchors(cached):
    arguments = (PARAMS, LATENTS, SIGMAS, COND, COTANGENTS)
    known = plain(*arguments)[0] if cached else None
    plan = hat_plan(SIGMAS, 3, phase=1)
    assert plan.num_anchors == 4
    expected = planned(plan, *arguments, cached=known)
    for batch_anchors in (1, 2, 3):
        result = planned(plan, *arguments, cached=known, batch_anchors=batch_anchors)
        chex.assert_trees_all_close(result, expected, rtol=1e-4, atol=1e-5)


def test_cached_velocities_come_back_as_they_are():
    known = normal(8, LATENTS.shape)
    arguments, plan = (PARAMS, LATENTS, SIGMAS, COND, COTANGENTS), jagg_plan(SIGMAS, 5)
    _, expected = planned(plan, *arguments)
    for batch_anchors in (None, 1):
        velocities, gradient = planned(plan, *arguments, cached=known, batch_anchors=batch_anchors)
        np.testing.assert_array_equal(velocities, known)
        # and the gradient is still the one at the parameters
        chex.assert_trees_all_close(gradient, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("cached", [False, True])
def test_jagg_velocities_is_a_drop_in(cached):
    known = plain(PARAMS, LATENTS, SIGMAS, COND, COTANGENTS)[0] if cached else None

    @jax.jit
    def both(params):
        velocities, vjp_fn = jagg_vjp(mlp, params, LATENTS, SIGMAS, COND, cached=known)
        surrogate, surrogate_vjp = jax.vjp(
            lambda p: jagg_velocities(mlp, p, LATENTS, SIGMAS, COND, cached=known), params
        )
        return (velocities, vjp_fn(COTANGENTS)), (surrogate, surrogate_vjp(COTANGENTS)[0])

    (velocities, gradient), (surrogate, surrogate_gradient) = both(PARAMS)
    np.testing.assert_array_equal(velocities, surrogate)
    chex.assert_trees_all_close(gradient, surrogate_gradient, rtol=1e-5, atol=1e-6)


def test_planned_velocities_differentiates_params_and_cond_only():
    plan = jagg_plan(SIGMAS, 3)

    @jax.jit
    def gradients(params, latents, sigmas, cond):
        def loss(*arguments):
            return jnp.sum(COTANGENTS * planned_velocities(mlp, *arguments, plan=plan))

        return jax.grad(loss, argnums=(0, 1, 2, 3))(params, latents, sigmas, cond)

    by_params, by_latents, by_sigmas, by_cond = gradients(PARAMS, LATENTS, SIGMAS, COND)
    expected = planned(plan, PARAMS, LATENTS, SIGMAS, COND, COTANGENTS)[1]
    chex.assert_trees_all_close(by_params, expected, rtol=1e-4, atol=1e-5)
    assert not np.any(by_latents)
    assert not np.any(by_sigmas)
    assert np.all(np.linalg.norm(by_cond, axis=1) > 0)


VALID = {"params": PARAMS, "latents": LATENTS, "sigmas": SIGMAS, "plan": jagg_plan(SIGMAS, 5)}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"latents": LATENTS[:4]}, "latents has shape"),
        ({"latents": LATENTS[:, 0, 0]}, "latents has shape"),
        ({"sigmas": SIGMAS[:4]}, "sigmas has shape"),
        ({"sigmas": jnp.ones((5, 3))}, "sigmas has shape"),
        ({"cached": LATENTS[:, :2]}, "cached has shape"),
        ({"batch_anchors": 0}, "batch_anchors is 0"),
        ({"params": {**PARAMS, "step": jnp.int32(1)}}, r"params\['step'\] is int32"),
        ({"plan": BackwardPlan(jnp.array([0, 5]), jnp.ones((5, 2)))}, "distinct"),
        ({"plan": BackwardPlan(jnp.array([-1, 2]), jnp.ones((5, 2)))}, "distinct"),
        ({"plan": BackwardPlan(jnp.array([2, 2]), jnp.ones((5, 2)))}, "distinct"),
        ({"plan": BackwardPlan(jnp.array([0, 2, 4]), jnp.ones((5, 2)))}, r"expected \[K\] and \[N, K\]"),
        ({"plan": BackwardPlan(jnp.zeros(0, jnp.int32), jnp.ones((5, 0)))}, "K at least 1"),
        ({"plan": BackwardPlan(jnp.array([0]), jnp.ones(5))}, r"expected \[K\] and \[N, K\]"),
        ({"plan": BackwardPlan(jnp.array([0, 4]), jnp.ones((5, 2, 3)))}, "third axis"),
    ],
)
def test_bad_arguments(change, message):
    arguments = {**VALID, **change}
    with pytest.raises(ValueError, match=message):
        planned_vjp(mlp, arguments.pop("params"), arguments.pop("latents"), arguments.pop("sigmas"), COND, **arguments)


def test_bad_cotangents_and_velocities():
    vjp_fn = planned_vjp(mlp, *(VALID[key] for key in ("params", "latents", "sigmas")), COND, plan=VALID["plan"])[1]
    with pytest.raises(ValueError, match="cotangents has shape"):
        vjp_fn(COTANGENTS[:4])
    with pytest.raises(ValueError, match="velocity_fn returned shape"):
        jagg_vjp(lambda *args: mlp(*args)[:, :1], PARAMS, LATENTS, SIGMAS, COND)


@pytest.mark.parametrize(
    ("sigmas", "alphas", "message"),
    [
        (SIGMAS, jnp.ones(4), "alphas has shape"),
        (SIGMAS, jnp.float32(1), "alphas has shape"),
        (jnp.float32(1), None, "sigmas has shape"),
        (jnp.zeros(0), None, "sigmas has shape"),
    ],
)
def test_bad_groups(sigmas, alphas, message):
    with pytest.raises(ValueError, match=message):
        jagg_vjp(mlp, PARAMS, LATENTS, sigmas, COND, alphas=alphas)
