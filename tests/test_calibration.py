"""Plans chosen by measurement: against plans measured one by one, and against every choice of anchors."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import group, mlp, mlp_params

from jagg_jax import BackwardPlan, anchor_plan, flow_sigmas, hat_plan, jagg_plan, planned_vjp
from jagg_jax.calibration import auto_plan, calibrated_frac, choose_anchors, span_errors
from jagg_jax.comparison import dense_matrix
from jagg_jax.fidelity import plan_fidelity, plan_groups

NUM_STEPS = 9
PARAMS = mlp_params()
LATENTS, _, COND, COTANGENTS = group(NUM_STEPS)
SIGMAS = flow_sigmas(NUM_STEPS + 1, 3.0)[:NUM_STEPS]
# a path that bends more and more, so that late groups are worse than early ones
BENDING = LATENTS[:1] + jnp.linspace(0.0, 1.5, NUM_STEPS).reshape(-1, 1, 1) ** 2 * (LATENTS[1:2] - LATENTS[:1])
STEADY = jnp.broadcast_to(COTANGENTS[:1], LATENTS.shape)


def fidelity(plan):
    def run(params):
        return plan_fidelity(mlp, params, BENDING, SIGMAS, COND, cotangents=STEADY, plan=plan)

    return jax.jit(run)(PARAMS)


@jax.jit
def gradient(matrix):
    """The gradient of a plan given as a matrix [N, N], flattened."""
    plan = BackwardPlan(jnp.arange(NUM_STEPS), matrix)
    total = planned_vjp(mlp, PARAMS, BENDING, SIGMAS, COND, plan=plan)[1](STEADY)
    return jnp.concatenate([leaf.ravel() for leaf in jax.tree.leaves(total)])


def cosine(plan, start, stop):
    """cosine(planned, exact) of the cotangents of the steps from start to stop."""
    rows = np.zeros((NUM_STEPS, 1), np.float32)
    rows[start:stop] = 1.0
    planned, exact = gradient(rows * dense_matrix(plan)), gradient(rows * np.eye(NUM_STEPS, dtype=np.float32))
    return float(planned @ exact / jnp.linalg.norm(planned) / jnp.linalg.norm(exact))


@pytest.mark.parametrize("make", [jagg_plan, hat_plan], ids=["jagg", "hat"])
def test_calibrated_frac_against_every_fraction(make):
    """The cosines of the groups at every fraction, computed one by one, decide the same fraction."""
    fractions = [grouped / NUM_STEPS for grouped in range(NUM_STEPS + 1)]
    plans = [make(SIGMAS, 4, frac) for frac in fractions]
    lowest = np.array([min(cosine(plan, *group) for group in plan_groups(plan)) for plan in plans])
    # thresholds in the middle between two fractions' cosines, so that rounding decides nothing
    levels = sorted(set(np.round(lowest, 5)))
    thresholds = [(a + b) / 2 for a, b in itertools.pairwise(levels)]
    calibrate = partial(calibrated_frac, mlp, PARAMS, BENDING, SIGMAS, COND, cotangents=STEADY)
    found = set()
    for threshold in (thresholds[0], thresholds[-1]):
        frac = calibrate(make_plan=lambda frac: make(SIGMAS, 4, frac), threshold=threshold)
        assert frac == max(frac for frac, least in zip(fractions, lowest, strict=True) if least >= threshold)
        found.add(frac)
    assert len(found) == 2
    assert 1.0 not in found


def test_groups_of_two_need_no_calibration():
    options = {"cotangents": STEADY, "make_plan": partial(jagg_plan, SIGMAS, 2), "threshold": 1.0}
    assert calibrated_frac(mlp, PARAMS, BENDING, SIGMAS, COND, **options) == 1.0


@pytest.fixture(scope="module")
def errors():
    def run(params, latents, cotangents):
        return span_errors(mlp, params, latents, SIGMAS, COND, cotangents=cotangents)

    return np.asarray(jax.jit(run)(PARAMS, BENDING, STEADY))


def test_span_errors_against_one_plan_a_pair(errors):
    """What a plan misses that interpolates between i and k and is exact elsewhere."""
    exact = gradient(jnp.eye(NUM_STEPS))
    for i, k in itertools.combinations(range(NUM_STEPS), 2):
        plan = anchor_plan(SIGMAS, [*range(i + 1), *range(k, NUM_STEPS)])
        missed = jnp.linalg.norm(gradient(dense_matrix(plan)) - exact) / jnp.linalg.norm(exact)
        np.testing.assert_allclose(errors[i, k], missed, rtol=2e-3, atol=2e-6)
    assert np.all(np.isinf(errors[np.tril_indices(NUM_STEPS)]))
    np.testing.assert_array_equal(np.diag(errors, 1), 0.0)


def test_spans_may_be_limited(errors):
    arguments = (mlp, PARAMS, BENDING, SIGMAS, COND)
    limited = np.asarray(jax.jit(lambda u: span_errors(*arguments, cotangents=u, longest=3))(STEADY))
    lengths = np.arange(NUM_STEPS)[None, :] - np.arange(NUM_STEPS)[:, None]
    measured = (lengths >= 1) & (lengths <= 3)
    np.testing.assert_allclose(limited[measured], errors[measured], rtol=1e-4)
    assert np.all(np.isinf(limited[~measured]))


@pytest.mark.parametrize("share", [0.02, 0.2, 0.7])
def test_the_bound_holds_on_the_probe(errors, share):
    bound = share * errors[0, -1]
    plan = auto_plan(SIGMAS, errors, bound)
    anchors = plan.anchors.tolist()
    total = sum(errors[i, k] for i, k in itertools.pairwise(anchors))
    assert total <= bound
    assert 2 < len(anchors) < NUM_STEPS
    assert 0 < fidelity(plan).total.relative_error <= total * 1.001
    # anchors where the path bends beat as many that are equally far apart
    spacing = {spacing: hat_plan(SIGMAS, spacing + 1) for spacing in range(1, NUM_STEPS)}
    for even in spacing.values():
        if even.num_anchors <= len(anchors):
            even_total = sum(errors[i, k] for i, k in itertools.pairwise(even.anchors.tolist()))
            assert even_total >= total or even_total > bound


def paths(num_steps):
    """All increasing sequences from 0 to num_steps - 1."""
    inner = range(1, num_steps - 1)
    for size in range(len(inner) + 1):
        for chosen in itertools.combinations(inner, size):
            yield (0, *chosen, num_steps - 1) if num_steps > 1 else (0,)


def summed(errors, path):
    # steps next to each other have no error, whatever the matrix says
    return sum(errors[i, k] if k > i + 1 else 0.0 for i, k in itertools.pairwise(path))


@settings(deadline=None, max_examples=60, derandomize=True)
@given(
    num_steps=st.integers(1, 8),
    seed=st.integers(0, 10**6),
    unmeasured=st.sampled_from([0.0, 0.4]),
    bound=st.floats(0.0, 3.0),
)
def test_anchors_are_optimal(num_steps, seed, unmeasured, bound):
    """Against all paths: none with fewer anchors meets the bound, none with as many has a smaller error."""
    rng = np.random.default_rng(seed)
    errors = rng.uniform(0.0, 2.0, (num_steps, num_steps))
    errors[rng.uniform(size=errors.shape) < unmeasured] = np.inf
    best = {}
    for path in paths(num_steps):
        best[len(path)] = min(best.get(len(path), np.inf), summed(errors, path))
    fewest = min(size for size, error in best.items() if error <= bound)
    anchors = choose_anchors(errors, bound)
    assert anchors in set(paths(num_steps))
    assert len(anchors) == fewest
    assert summed(errors, anchors) == pytest.approx(best[fewest])
    for size, error in best.items():
        if np.isfinite(error):
            anchors = choose_anchors(errors, num_anchors=size)
            assert len(anchors) == size
            assert summed(errors, anchors) == pytest.approx(error)
        else:
            with pytest.raises(ValueError, match="too short for so few"):
                choose_anchors(errors, num_anchors=size)


SPANS = np.ones((4, 4))


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda: choose_anchors(np.ones((3, 4)), 0.1), "errors has shape"),
        (lambda: choose_anchors(np.ones((0, 0)), 0.1), "errors has shape"),
        (lambda: choose_anchors(np.full((4, 4), np.nan), 0.1), "NaN or negative"),
        (lambda: choose_anchors(-SPANS, 0.1), "NaN or negative"),
        (lambda: choose_anchors(SPANS), "give one of them"),
        (lambda: choose_anchors(SPANS, 0.1, 3), "give one of them"),
        (lambda: choose_anchors(SPANS, -0.1), "bound is -0.1"),
        (lambda: choose_anchors(SPANS, float("nan")), "bound is nan"),
        (lambda: choose_anchors(SPANS, num_anchors=1), r"num_anchors is 1; it must be in \[2, 4\]"),
        (lambda: choose_anchors(SPANS, num_anchors=5), "num_anchors is 5"),
        (lambda: auto_plan(SIGMAS, SPANS, 0.1), "the last 8"),
        (lambda: span_errors(mlp, PARAMS, LATENTS, SIGMAS, COND, cotangents=COTANGENTS, longest=1), "longest is 1"),
        (lambda: span_errors(mlp, PARAMS, LATENTS, SIGMAS[:4], COND, cotangents=COTANGENTS), "sigmas"),
        (
            lambda: jax.jit(lambda s: span_errors(mlp, PARAMS, LATENTS, s, COND, cotangents=COTANGENTS))(SIGMAS),
            "sigmas is traced",
        ),
        (
            lambda: calibrated_frac(
                mlp, PARAMS, LATENTS, SIGMAS, COND, cotangents=COTANGENTS, make_plan=jagg_plan, threshold=1.1
            ),
            "threshold is 1.1",
        ),
    ],
)
def test_bad_arguments(run, message):
    with pytest.raises(ValueError, match=message):
        run()
