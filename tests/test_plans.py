"""The plans as matrices: which steps are anchors, what the rows sum to, and what each plan promises."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagg_jax import exact_plan, flow_sigmas, hat_plan, index_alphas, jagg_plan, sigma_alphas, subset_plan
from jagg_jax.plans import one_group_plan

few = settings(deadline=None, max_examples=25, derandomize=True)
num_steps_and_group = {"num_steps": st.integers(1, 9), "steps_per_group": st.integers(1, 10)}
fractions = st.sampled_from([0.0, 1.0, 0.5, 0.3, 0.87])


def levels(num_steps, shift=3.0):
    """Noise levels of `num_steps` trained steps out of one more."""
    return flow_sigmas(num_steps + 1, shift)[:num_steps]


def dense(plan):
    """The plan as a matrix [N, N] over all steps: which Jacobian each step's cotangent is multiplied with."""
    matrix = np.zeros((plan.num_steps, plan.num_steps))
    matrix[:, np.asarray(plan.anchors)] = plan.weights
    return matrix


def assert_interpolates(plan, sigmas, *, in_sigma=True):
    """Rows sum to 1, weights are in [0, 1], anchors are themselves, and sigma is reproduced (linear interpolation)."""
    matrix, anchors = dense(plan), np.asarray(plan.anchors)
    assert plan.weights.dtype == jnp.float32
    assert plan.anchors.dtype == jnp.int32
    assert len(set(anchors.tolist())) == len(anchors) == plan.num_anchors
    np.testing.assert_allclose(matrix.sum(axis=1), 1.0, atol=1e-6)
    assert np.all((matrix >= 0.0) & (matrix <= 1.0))
    np.testing.assert_allclose(matrix[anchors], np.eye(len(matrix))[anchors], atol=2e-7)
    linear = np.asarray(sigmas, np.float64) if in_sigma else np.arange(len(matrix))
    np.testing.assert_allclose(matrix @ linear, linear, atol=1e-5)


@few
@given(**num_steps_and_group, jagg_frac=fractions, alpha=st.sampled_from(["sigma", "index"]))
def test_jagg_plan(num_steps, steps_per_group, jagg_frac, alpha):
    sigmas = levels(num_steps)
    plan = jagg_plan(sigmas, steps_per_group, jagg_frac, alpha)
    assert_interpolates(plan, sigmas, in_sigma=alpha == "sigma")
    grouped = round(jagg_frac * num_steps)
    whole, rest = divmod(grouped, steps_per_group)
    assert plan.num_anchors == min(steps_per_group, 2) * whole + min(rest, 2) + num_steps - grouped
    matrix = dense(plan)
    np.testing.assert_array_equal(matrix[grouped:], np.eye(num_steps)[grouped:])
    # block-diagonal: no step borrows from another group
    blocks = np.minimum(np.arange(num_steps) // steps_per_group, grouped)
    assert not np.any(matrix[:grouped, :grouped][blocks[:grouped, None] != blocks[None, :grouped]])


@few
@given(**num_steps_and_group, jagg_frac=fractions, phase=st.integers(0, 8))
def test_hat_plan(num_steps, steps_per_group, jagg_frac, phase):
    sigmas, spacing = levels(num_steps), max(steps_per_group - 1, 1)
    plan = hat_plan(sigmas, steps_per_group, jagg_frac, phase % spacing)
    assert_interpolates(plan, sigmas)
    grouped = round(jagg_frac * num_steps)
    np.testing.assert_array_equal(dense(plan)[grouped:], np.eye(num_steps)[grouped:])
    anchors = np.sort(plan.anchors)
    assert anchors[0] == 0
    assert anchors[-1] == num_steps - 1
    # no gap is wider than a group, and every row has at most two neighbouring anchors
    assert np.all(np.diff(anchors) <= spacing)
    assert np.all(np.count_nonzero(dense(plan), axis=1) <= 2)


@pytest.mark.parametrize(("num_steps", "steps_per_group"), [(8, 4), (9, 4), (7, 4), (10, 6), (3, 6)])
def test_hat_phase_takes_at_most_two_anchor_counts(num_steps, steps_per_group):
    plans = [hat_plan(levels(num_steps), steps_per_group, phase=phase) for phase in range(steps_per_group - 1)]
    assert len({plan.num_anchors for plan in plans}) <= 2
    for phase, plan in enumerate(plans):
        inner = [step for step in range(1, num_steps - 1) if (step - phase) % (steps_per_group - 1) == 0]
        assert sorted(plan.anchors.tolist()) == [0, *inner, num_steps - 1]


def test_anchors_of_the_usual_settings():
    sigmas = levels(8)
    assert jagg_plan(sigmas, 4).anchors.tolist() == [0, 3, 4, 7]
    assert jagg_plan(sigmas, 4, jagg_frac=0.5).anchors.tolist() == [0, 3, 4, 5, 6, 7]
    assert jagg_plan(sigmas, 3).anchors.tolist() == [0, 2, 3, 5, 6, 7]
    assert hat_plan(sigmas, 4).anchors.tolist() == [0, 3, 6, 7]
    assert hat_plan(sigmas, 4, phase=1).anchors.tolist() == [0, 1, 4, 7]
    assert hat_plan(sigmas, 4, phase=2).anchors.tolist() == [0, 2, 5, 7]
    assert jagg_plan(levels(20), 4).num_anchors == 10
    assert hat_plan(levels(19), 4).num_anchors == 7


@pytest.mark.parametrize("num_steps", [1, 5])
def test_plans_that_are_the_identity(num_steps):
    sigmas = levels(num_steps)
    identity = np.eye(num_steps)
    for plan in (
        exact_plan(num_steps),
        jagg_plan(sigmas, 1),
        jagg_plan(sigmas, 2),
        jagg_plan(sigmas, 4, jagg_frac=0.0),
        hat_plan(sigmas, 1),
        hat_plan(sigmas, 2),
        hat_plan(sigmas, 4, jagg_frac=0.0),
        subset_plan(jax.random.key(0), num_steps, num_steps),
    ):
        np.testing.assert_allclose(dense(plan), identity, atol=2e-7)


def test_weights_against_hand_computed_numbers():
    sigmas = jnp.array([1.0, 0.9, 0.6, 0.5, 0.2])
    expected = np.array([[1, 0, 0, 0, 0], [0.75, 0, 0, 0.25, 0], [0, 0, 0, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]])
    expected[1] = [0.8, 0, 0, 0.2, 0]
    expected[2] = [0.2, 0, 0, 0.8, 0]
    np.testing.assert_allclose(dense(jagg_plan(sigmas, 4)), expected, atol=1e-6)
    by_index = dense(jagg_plan(sigmas, 4, alpha="index"))
    np.testing.assert_allclose(by_index[1:3, [0, 3]], [[2 / 3, 1 / 3], [1 / 3, 2 / 3]], atol=1e-6)
    hat = dense(hat_plan(sigmas, 3, phase=1))
    np.testing.assert_allclose(hat[2, [1, 3]], [0.25, 0.75], atol=1e-6)


def test_alphas():
    sigmas = levels(6)
    np.testing.assert_allclose(sigma_alphas(sigmas), (sigmas[0] - sigmas) / (sigmas[0] - sigmas[-1]), rtol=1e-6)
    np.testing.assert_allclose(index_alphas(5), [0, 0.25, 0.5, 0.75, 1])
    np.testing.assert_array_equal(sigma_alphas(sigmas[:1]), [0.0])
    np.testing.assert_array_equal(index_alphas(1), [0.0])
    both = jnp.stack([sigmas, sigmas**2], axis=1)
    np.testing.assert_allclose(sigma_alphas(both)[:, 1], sigma_alphas(sigmas**2), rtol=1e-6)
    plan = one_group_plan(both)
    assert plan.weights.shape == (6, 2, 2)
    np.testing.assert_allclose(plan.weights.sum(axis=1), 1.0, atol=1e-6)


@pytest.mark.parametrize(("num_steps", "num_anchors"), [(4, 2), (5, 3), (4, 1)])
def test_subset_averages_to_the_identity(num_steps, num_anchors):
    draws = 600
    plans = jax.jit(jax.vmap(lambda key: subset_plan(key, num_steps, num_anchors)))(
        jax.random.split(jax.random.key(1), draws)
    )
    matrices = {}
    counts = dict.fromkeys(itertools.combinations(range(num_steps), num_anchors), 0)
    for anchors, weights in zip(np.asarray(plans.anchors), np.asarray(plans.weights), strict=True):
        matrix = np.zeros((num_steps, num_steps))
        matrix[:, anchors] = weights
        matrices[tuple(anchors.tolist())] = matrix
        counts[tuple(anchors.tolist())] += 1
    # all subsets are drawn, equally often (five standard deviations), and their mean is the identity
    total = math.comb(num_steps, num_anchors)
    assert len(matrices) == total
    spread = math.sqrt(draws / total * (1 - 1 / total))
    assert max(abs(count - draws / total) for count in counts.values()) < 5 * spread
    np.testing.assert_allclose(np.mean(list(matrices.values()), axis=0), np.eye(num_steps), atol=1e-6)


def test_plans_may_be_built_from_traced_sigmas():
    sigmas = levels(7)
    traced = jax.jit(lambda s: (jagg_plan(s, 3, 0.8), hat_plan(s, 3, 0.8, 1)))(sigmas)
    for plan, expected in zip(traced, (jagg_plan(sigmas, 3, 0.8), hat_plan(sigmas, 3, 0.8, 1)), strict=True):
        np.testing.assert_allclose(dense(plan), dense(expected), atol=1e-6)


SIGMAS = levels(4)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: exact_plan(0), "num_steps is 0"),
        (lambda: jagg_plan(SIGMAS, 0), "steps_per_group is 0"),
        (lambda: jagg_plan(SIGMAS, 2, 1.5), "jagg_frac is 1.5"),
        (lambda: jagg_plan(SIGMAS, 2, -0.1), "jagg_frac is -0.1"),
        (lambda: jagg_plan(SIGMAS, 2, float("nan")), "jagg_frac is nan"),
        (lambda: jagg_plan(SIGMAS, 2, alpha="time"), "alpha is 'time'"),
        (lambda: jagg_plan(SIGMAS[::-1], 2), "must decrease"),
        (lambda: jagg_plan(jnp.array([0.9, 0.5, 0.5]), 2), "must decrease"),
        (lambda: jagg_plan(jnp.array([0.9, jnp.nan, 0.5]), 2), "must decrease"),
        (lambda: jagg_plan(SIGMAS[:0], 2), "sigmas has shape"),
        (lambda: jagg_plan(SIGMAS[:, None], 2), "sigmas has shape"),
        (lambda: hat_plan(SIGMAS, 0), "steps_per_group is 0"),
        (lambda: hat_plan(SIGMAS, 3, 2.0), "jagg_frac is 2.0"),
        (lambda: hat_plan(SIGMAS, 3, phase=2), "phase is 2"),
        (lambda: hat_plan(SIGMAS, 3, phase=-1), "phase is -1"),
        (lambda: hat_plan(SIGMAS, 1, phase=1), "phase is 1"),
        (lambda: hat_plan(SIGMAS[::-1], 3), "must decrease"),
        (lambda: subset_plan(jax.random.key(0), 0, 1), "num_steps is 0"),
        (lambda: subset_plan(jax.random.key(0), 4, 0), "num_anchors is 0"),
        (lambda: subset_plan(jax.random.key(0), 4, 5), "num_anchors is 5"),
        (lambda: one_group_plan(SIGMAS, index_alphas(3)), "alphas has shape"),
        (lambda: one_group_plan(SIGMAS[:0]), "sigmas has shape"),
    ],
)
def test_bad_arguments(make, message):
    with pytest.raises(ValueError, match=message):
        make()
