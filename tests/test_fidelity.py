"""The meters of a plan's error, against gradients computed one by one and against cases known in closed form."""

import pathlib
from functools import partial

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from small_models import group, mlp, mlp_params, normal, planned_gradient

from jagg_jax import (
    BackwardPlan,
    DanceSDE,
    FlowSDE,
    debiased_plan,
    exact_plan,
    flow_sigmas,
    group_advantages,
    hat_plan,
    initial_noise,
    jagg_plan,
    rollout,
    subset_plan,
)
from jagg_jax.comparison import Agreement
from jagg_jax.fidelity import (
    TRANSFORMER_PARTS,
    bias_ratio,
    part_labels,
    plan_fidelity,
    plan_groups,
    score_cotangents,
)

NUM_STEPS = 9
PARAMS = mlp_params()
LATENTS, _, COND, COTANGENTS = group(NUM_STEPS)
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)[:NUM_STEPS]
PLANS = {
    "jagg": jagg_plan(SIGMAS, 4, 0.78),
    "hat": hat_plan(SIGMAS, 4, phase=1),
    "debiased": debiased_plan(hat_plan(SIGMAS, 5), jax.random.key(1)),
    "subset": subset_plan(jax.random.key(2), NUM_STEPS, 3),
}


def measure(plan, latents=LATENTS, sigmas=SIGMAS, cotangents=COTANGENTS, params=PARAMS, velocity_fn=mlp, **options):
    def run(*arguments):
        return plan_fidelity(velocity_fn, *arguments, COND, cotangents=cotangents, plan=plan, **options)

    return jax.jit(run)(params, latents, sigmas)


def vector(gradient, names=None):
    return np.concatenate([np.ravel(gradient[name]) for name in sorted(gradient) if names is None or name in names])


@jax.jit
def one_by_one(plan, cotangents):
    return planned_gradient(mlp, PARAMS, LATENTS, SIGMAS, COND, cotangents, plan)


def assert_agrees(agreement, exact, planned):
    """The properties against NumPy's, to what float32 leaves of them."""
    size = np.linalg.norm(exact)
    np.testing.assert_allclose(agreement.cosine, exact @ planned / size / np.linalg.norm(planned), atol=1e-5)
    np.testing.assert_allclose(agreement.norm_ratio, np.linalg.norm(planned) / size, rtol=1e-5)
    np.testing.assert_allclose(agreement.relative_error, np.linalg.norm(planned - exact) / size, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", PLANS)
def test_against_gradients_computed_one_by_one(name):
    """Each group with the others' cotangents zero, each part of the network, and the whole."""
    plan = PLANS[name]
    parts = {"^(in|time)$": "first", "out": "last"}
    measured = measure(plan, parts=parts)
    members = {"other": ("cond",), "first": ("in", "time"), "last": ("out",)}
    assert set(measured.parts) == set(members)
    assert measured.groups == plan_groups(plan)
    for index, (start, stop) in enumerate(measured.groups):
        masked = jnp.zeros_like(COTANGENTS).at[start:stop].set(COTANGENTS[start:stop])
        exact, planned = one_by_one(exact_plan(NUM_STEPS), masked), one_by_one(plan, masked)
        if name == "subset" and start not in plan.anchors:
            assert not np.any(vector(planned))
            assert measured.by_group.cosine[index] == 0.0
            continue
        assert_agrees(jax.tree.map(lambda x, i=index: x[i], measured.by_group), vector(exact), vector(planned))
    exact, planned = one_by_one(exact_plan(NUM_STEPS), COTANGENTS), one_by_one(plan, COTANGENTS)
    assert_agrees(measured.total, vector(exact), vector(planned))
    for index, part in enumerate(measured.parts):
        agreement = jax.tree.map(lambda x, i=index: x[i], measured.by_part)
        assert_agrees(agreement, vector(exact, members[part]), vector(planned, members[part]))


def test_groups_of_one_step_say_what_interpolation_misses():
    plan = PLANS["hat"]
    measured = measure(plan, groups=[(step, step + 1) for step in range(NUM_STEPS)])
    anchors = set(plan.anchors.tolist())
    for step in range(NUM_STEPS):
        if step in anchors:
            assert measured.by_group.error[step] == 0.0
            assert measured.by_group.cosine[step] == pytest.approx(1.0, abs=1e-6)
        else:
            assert measured.by_group.relative_error[step] > 0.01
    np.testing.assert_allclose(measured.total.relative_error, measure(plan).total.relative_error, rtol=1e-4)


@pytest.mark.parametrize("plan", [exact_plan(NUM_STEPS), jagg_plan(SIGMAS, 2), hat_plan(SIGMAS, 2)])
def test_exact_plans_have_no_error(plan):
    measured = measure(plan)
    assert np.all(measured.by_group.relative_error < 1e-6)
    np.testing.assert_allclose(measured.by_group.cosine, 1.0, atol=1e-6)
    np.testing.assert_allclose(measured.total.norm_ratio, 1.0, atol=1e-6)


def on_a_line(weights):
    """Latents between two fixed endpoints, at `weights` from the first to the last."""
    first, last = normal(7, (2, 4, 5))
    return first[None] + weights[:, None, None] * (last - first)[None]


def affine(params, latents, sigma, cond):
    return latents @ params["in"] + sigma[:, None] * params["time"] + cond @ params["cond"]


@pytest.mark.parametrize("make", [jagg_plan, hat_plan])
def test_affine_field_on_the_chord(make):
    params = {name: normal(n, (n, 5)) for name, n in (("in", 5), ("time", 1), ("cond", 3))}
    options = {"latents": on_a_line(1.0 - SIGMAS), "params": params, "velocity_fn": affine}
    measured = measure(make(SIGMAS, 4), **options)
    assert np.all(measured.by_group.relative_error < 1e-5)
    np.testing.assert_allclose(measured.by_group.cosine, 1.0, atol=1e-6)
    # the meter does see the error of weights linear in the step's index
    assert measure(jagg_plan(SIGMAS, 4, alpha="index"), **options).total.relative_error > 1e-3


def test_half_the_spacing_is_a_quarter_of_the_error():
    """Second order in a group's span: a smooth field, no noise, latents on a smooth curve, one group of 9 steps."""
    steady = jnp.broadcast_to(COTANGENTS[0], COTANGENTS.shape)
    errors = []
    for span in (0.2, 0.1, 0.05):
        sigmas = 0.5 + span * jnp.linspace(0.5, -0.5, NUM_STEPS)
        measured = measure(jagg_plan(sigmas, NUM_STEPS), on_a_line(jnp.sin(2.0 * sigmas)), sigmas, steady)
        errors.append(float(measured.by_group.relative_error[0]))
    slopes = np.log2(np.array(errors[:-1]) / np.array(errors[1:]))
    np.testing.assert_allclose(slopes, 2.0, atol=0.1)


def test_groups_of_the_usual_plans():
    sigmas = flow_sigmas(9, 3.0)[:8]
    assert plan_groups(jagg_plan(sigmas, 4)) == ((0, 4), (4, 8))
    assert plan_groups(jagg_plan(sigmas, 3)) == ((0, 3), (3, 6), (6, 7), (7, 8))
    assert plan_groups(jagg_plan(sigmas, 4, 0.5)) == ((0, 4), (4, 5), (5, 6), (6, 7), (7, 8))
    # the shared anchor belongs to the run after it
    assert plan_groups(hat_plan(sigmas, 4)) == ((0, 3), (3, 7), (7, 8))
    assert plan_groups(hat_plan(sigmas, 4, phase=1)) == ((0, 1), (1, 4), (4, 8))
    assert plan_groups(exact_plan(3)) == ((0, 1), (1, 2), (2, 3))
    assert plan_groups(BackwardPlan(jnp.array([3]), jnp.ones((8, 1)))) == ((0, 3), (3, 8))
    for plan in (PLANS["debiased"], PLANS["subset"]):
        assert [step for start, stop in plan_groups(plan) for step in range(start, stop)] == list(range(NUM_STEPS))


def test_gradients_that_are_zero():
    """Both 0: they agree. One of them 0: they don't, and no number is NaN."""
    zero, one = jnp.zeros(()), jnp.ones(())
    both = Agreement(exact=zero, planned=zero, inner=zero, error=zero)
    assert (both.cosine, both.norm_ratio, both.relative_error) == (1.0, 1.0, 0.0)
    lost = Agreement(exact=one, planned=zero, inner=zero, error=one)
    assert (lost.cosine, lost.norm_ratio, lost.relative_error) == (0.0, 0.0, 1.0)
    made_up = Agreement(exact=zero, planned=one, inner=zero, error=one)
    assert (made_up.cosine, made_up.norm_ratio, made_up.relative_error) == (0.0, np.inf, np.inf)


def test_labels_of_parts():
    params = {
        "blocks": {"0": {"attention": {"qkv": 1.0}, "mlp_in": 1.0}, "1": {"attention": {"qkv": 1.0}}},
        "modulation": {"linear": 1.0},
        "time_in": 1.0,
        "patch_out": 1.0,
    }
    assert part_labels(params) == [
        "blocks.attention.qkv",
        "blocks.mlp_in",
        "blocks.attention.qkv",
        "modulation.linear",
        "patch_out",
        "time_in",
    ]
    expected = ["attention", "mlp", "attention", "modulation", "other", "time"]
    assert part_labels(params, TRANSFORMER_PARTS) == expected
    assert part_labels(params, lambda name: name[0]) == ["b", "b", "b", "m", "p", "t"]


@pytest.mark.parametrize("sampler", [FlowSDE(0.7), DanceSDE(0.3)])
def test_score_cotangents(sampler):
    """Against the gradient of the log-density written out: (x' - mean) / std^2 d mean / dv, over the sample's size."""
    transitions = draw(sampler, num_prompts=2)[0]
    cotangents = jax.jit(partial(score_cotangents, sampler))(transitions)
    assert cotangents.shape == transitions.latents.shape
    for step in range(transitions.sigmas.shape[0]):
        levels = transitions.sigmas[step], transitions.next_sigmas[step]
        velocity, state = transitions.velocities[step], transitions.latents[step]
        mean, std = sampler.transition(velocity, state, *levels)
        slope = sampler.transition(velocity + 1.0, state, *levels)[0] - mean
        expected = (transitions.next_latents[step] - mean) / std**2 * slope / 5
        np.testing.assert_allclose(cotangents[step], expected, rtol=2e-3, atol=1e-3)


GENERATIONS = 4


def draw(sampler, num_prompts, seed=0, num_steps=7):
    """A rollout of the small model, its prompts [B, 3], and advantages of a reward of the finished samples."""
    batch = num_prompts * GENERATIONS
    sigmas = flow_sigmas(num_steps, 3.0)
    prompts = jnp.repeat(normal(20 + seed, (num_prompts, 3)), GENERATIONS, axis=0)
    noise_keys, keys = jax.random.split(jax.random.key(seed), (2, batch))

    @jax.jit
    def run(prompts):
        noise = initial_noise(noise_keys, (5,))
        return rollout(mlp, PARAMS, noise, sigmas, keys, prompts, sampler=sampler, keep_velocities=True)

    trajectory = run(prompts)
    rewards = jnp.tanh(trajectory.samples[:, 0])
    return trajectory.transitions(num_steps - 1), prompts, group_advantages(rewards, GENERATIONS)


def measure_bias(plan, transitions, prompts, advantages, sampler):
    @jax.jit
    def run(t, prompts, advantages):
        options = {"cotangents": score_cotangents(sampler, t), "advantages": advantages}
        options |= {"num_generations": GENERATIONS, "plan": plan}
        return bias_ratio(mlp, PARAMS, t.latents, jnp.asarray(t.sigmas), prompts, **options)

    return run(transitions, prompts, advantages)


def test_bias_ratio_against_gradients_computed_one_by_one():
    sampler, num_prompts = FlowSDE(0.7), 3
    transitions, prompts, advantages = draw(sampler, num_prompts)
    plan = jagg_plan(transitions.sigmas, 4)
    measured = measure_bias(plan, transitions, prompts, advantages, sampler)
    cotangents = score_cotangents(sampler, transitions)

    @jax.jit
    def mean_gradient(plan, scale, latents, prompts, cotangents):
        scaled = cotangents * scale[None, :, None] / GENERATIONS
        return planned_gradient(mlp, PARAMS, latents, transitions.sigmas, prompts, scaled, plan)

    for name, scales in (("advantages", advantages), ("control", jnp.ones_like(advantages))):
        exact, planned = [], []
        for prompt in range(num_prompts):
            its = slice(prompt * GENERATIONS, (prompt + 1) * GENERATIONS)
            arguments = (scales[its], transitions.latents[:, its], prompts[its], cotangents[:, its])
            exact.append(vector(mean_gradient(exact_plan(6), *arguments)))
            planned.append(vector(mean_gradient(plan, *arguments)))
        result = getattr(measured, name)
        for found, noise, vectors in (
            (result.bias, result.bias_noise, np.subtract(planned, exact)),
            (result.gradient, result.gradient_noise, np.array(exact)),
        ):
            np.testing.assert_allclose(found, np.linalg.norm(vectors.mean(axis=0)), rtol=1e-3)
            variance = vectors.var(axis=0, ddof=1).sum() / num_prompts
            np.testing.assert_allclose(noise, np.sqrt(variance), rtol=1e-3)
        np.testing.assert_allclose(result.ratio, result.bias / result.gradient)


def test_centred_advantages_have_less_bias_than_the_control():
    """Many samples: the control's exact gradient vanishes and its bias stays; centred advantages cancel most of it."""
    sampler = FlowSDE(0.7)
    transitions, prompts, advantages = draw(sampler, num_prompts=400)
    plan = jagg_plan(transitions.sigmas, 6)
    measured = measure_bias(plan, transitions, prompts, advantages, sampler)
    control, centred = measured.control, measured.advantages
    # the exact score has mean 0, the planned one has not
    assert control.gradient < 2.0 * control.gradient_noise
    assert control.bias > 4.0 * control.bias_noise
    assert centred.bias < 0.35 * control.bias
    assert centred.ratio < 0.3 * control.ratio
    exact = measure_bias(exact_plan(6), transitions, prompts, advantages, sampler)
    assert (exact.advantages.bias, exact.control.bias) == (0.0, 0.0)


def test_parameters_in_half_precision():
    half = jax.tree.map(lambda p: p.astype(jnp.bfloat16), PARAMS)
    measured, full = measure(PLANS["jagg"], params=half).total, measure(PLANS["jagg"]).total
    chex.assert_type(jax.tree.leaves(measured), jnp.float32)
    np.testing.assert_allclose(measured.cosine, full.cosine, atol=0.02)


def test_the_packaged_model():
    """A real network, FlowSDE: close to exact for centred advantages, and much less so for advantages of one sign."""
    models = pytest.importorskip("jagg_jax.models")
    weights = pathlib.Path(models.__file__).parent / "weights" / "digits.safetensors"
    model = models.load_model(weights)
    sampler, sigmas, batch = FlowSDE(0.7), flow_sigmas(20, 3.0), 2
    tokens, plan = jnp.array([[5, 3, 8]] * batch, jnp.int32), jagg_plan(sigmas[:8], 4)
    keys = jax.random.split(jax.random.key(0), batch)

    @jax.jit
    def run(params, advantages):
        noise = initial_noise(keys, model.config.image_shape)
        options = {"sampler": sampler, "keep_velocities": True}
        t = rollout(model.velocity_fn, params, noise, sigmas, keys, tokens, **options).transitions(8)
        options = {"cotangents": score_cotangents(sampler, t) * advantages[None, :, None, None, None]}
        options |= {"plan": plan, "parts": TRANSFORMER_PARTS}
        return plan_fidelity(model.velocity_fn, params, t.latents, t.sigmas, tokens, **options)

    centred, control = run(model.params, jnp.array([1.0, -1.0])), run(model.params, jnp.array([1.0, 1.0]))
    assert set(centred.parts) == {"attention", "mlp", "modulation", "time", "other"}
    assert centred.groups == ((0, 4), (4, 8))
    assert np.all((centred.by_group.cosine > 0.9) & (centred.by_group.cosine < 0.9995))
    assert 0.02 < centred.total.relative_error < 0.4
    assert control.total.relative_error > 1.5 * centred.total.relative_error


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: measure(exact_plan(4)), "latents has shape"),
        (lambda: measure(PLANS["hat"], cotangents=COTANGENTS[:, :2]), "cotangents has shape"),
        (lambda: measure(PLANS["hat"], sigmas=SIGMAS[:4]), "sigmas"),
        (lambda: measure(PLANS["hat"], groups=[(0, 3), (4, 9)]), "must follow each other"),
        (lambda: measure(PLANS["hat"], groups=[(0, 3)]), "must follow each other"),
        (lambda: measure(PLANS["hat"], groups=[(0, 9), (9, 9)]), "none empty"),
        (lambda: jax.jit(measure)(PLANS["hat"]), "plan is traced"),
        (lambda: measure(BackwardPlan(jnp.array([0, 8]), jnp.ones((9, 2, 4)))), "weights"),
    ],
)
def test_bad_arguments(run, message):
    with pytest.raises(ValueError, match=message):
        run()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_generations": 3}, "num_generations is 3"),
        ({"num_generations": 4}, "at least twice"),
        ({"advantages": jnp.ones(3)}, "advantages has shape"),
    ],
)
def test_bad_probes_for_the_bias(change, message):
    options = {
        "cotangents": COTANGENTS,
        "advantages": jnp.ones(4),
        "num_generations": 2,
        "plan": PLANS["hat"],
        **change,
    }
    with pytest.raises(ValueError, match=message):
        bias_ratio(mlp, PARAMS, LATENTS, SIGMAS, COND, **options)
