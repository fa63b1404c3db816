"""Backward plans: which trained steps are linearised (anchors), and how the others borrow their Jacobians (weights).

Every plan is the same linear map, a matrix M [N, K] over the N trained steps and K anchors; see `backward.planned_vjp`.

| plan       | M                                                     | backward passes for N steps |
|------------|-------------------------------------------------------|-----------------------------|
| `exact`    | the identity                                          | N                           |
| `jagg`     | block-diagonal, two anchors a group of W steps        | about 2N / W                |
| `hat`      | bidiagonal, neighbouring groups share their anchor    | about (N - 1) / (W - 1) + 1 |
| `anchor`   | the same between anchors that stand anywhere          | K                           |
| `debiased` | one of these plus one random interior step a group    | one more a group            |
| `subset`   | N / K on a random subset of K steps, zero elsewhere   | K                           |
"""

import dataclasses
import itertools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np


@partial(jax.tree_util.register_dataclass, data_fields=("anchors", "weights"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class BackwardPlan:
    """Anchor steps and interpolation weights; a pytree whose shapes are static and whose values need not be.

    Attributes:
      anchors: int32 [K], distinct indices of the trained steps that are linearised.
      weights: float32 [N, K]; row j says how the Jacobian of step j is put together from those of the anchors. With an
        added last axis [N, K, B] the weights differ between samples (sigmas that differ between samples need this).
    """

    anchors: jax.Array
    weights: jax.Array

    @property
    def num_steps(self) -> int:
        """N, the number of trained steps."""
        return self.weights.shape[0]

    @property
    def num_anchors(self) -> int:
        """K, the number of backward passes."""
        return self.anchors.shape[0]


def sigma_alphas(sigmas: jax.Array) -> jax.Array:
    """Interpolation weights linear in the noise level, alpha_j = (sigma_0 - sigma_j) / (sigma_0 - sigma_{W-1}).

    Args:
      sigmas: [W] or [W, B], the noise levels of one group's steps, decreasing.

    Returns:
      float32, shaped like `sigmas`: 0 at the first step, 1 at the last (all 0 when W is 1).
    """
    sigmas = jnp.asarray(sigmas, jnp.float32)
    span = sigmas[:1] - sigmas[-1:]
    return (sigmas[:1] - sigmas) / jnp.where(span == 0, 1.0, span)


def index_alphas(num_steps: int) -> jax.Array:
    """Interpolation weights linear in the step's index, as in the JAGG authors' code: j / (W - 1), float32 [W]."""
    return jnp.arange(num_steps, dtype=jnp.float32) / max(num_steps - 1, 1)


def exact_plan(num_steps: int) -> BackwardPlan:
    """Every step is its own anchor: plain back-propagation through all `num_steps` steps.

    Raises:
      ValueError: `num_steps` below 1.
    """
    _check_at_least(num_steps=num_steps)
    return BackwardPlan(jnp.arange(num_steps, dtype=jnp.int32), jnp.eye(num_steps, dtype=jnp.float32))


def jagg_plan(sigmas: jax.Array, steps_per_group: int, jagg_frac: float = 1.0, alpha: str = "sigma") -> BackwardPlan:
    """The plan of the JAGG paper (arXiv 2607.17572): groups of W steps, two anchors each, exact steps after them.

    The first `round(jagg_frac * N)` steps (the high-noise part) are cut into groups of W; W need not divide them, the
    last group is then shorter. The remaining steps are exact. A group of one or two steps is exact too.

    Args:
      sigmas: [N], the trained steps' noise levels, in order.
      steps_per_group: W, at least 1.
      jagg_frac: share of the trained steps that is grouped, in [0, 1]; 0 is `exact_plan`.
      alpha: interpolation weights within a group, linear in "sigma" or in the step's "index" (the authors' code).

    Raises:
      ValueError: an argument outside its range.
    """
    num_steps, num_grouped = _grouped_steps(sigmas, steps_per_group, jagg_frac)
    if alpha not in ("sigma", "index"):
        raise ValueError(f"alpha is {alpha!r}; it must be 'sigma' or 'index'")
    starts = range(0, num_grouped, steps_per_group)
    groups = [(start, min(start + steps_per_group, num_grouped)) for start in starts]
    ends = [step for start, stop in groups for step in dict.fromkeys((start, stop - 1))]
    weights = jnp.zeros((num_steps, len(ends)), jnp.float32)
    column = 0
    for start, stop in groups:
        alphas = index_alphas(stop - start) if alpha == "index" else None
        block = one_group_plan(sigmas[start:stop], alphas).weights
        weights = weights.at[start:stop, column : column + block.shape[1]].set(block)
        column += block.shape[1]
    return _with_exact_tail(ends, weights, num_grouped)


def hat_plan(sigmas: jax.Array, steps_per_group: int, jagg_frac: float = 1.0, phase: int = 0) -> BackwardPlan:
    """Linear interpolation over a grid of anchors that neighbouring groups share: hat functions, as in finite elements.

    Anchors stand W - 1 steps apart, so that a group still spans W steps, and on the two ends of the grouped part. The
    grid's phase moves it by 0 to W - 2 steps; drawing the phase anew each update spreads the interpolation error.

    Args:
      sigmas: [N], the trained steps' noise levels, in order.
      steps_per_group: W, at least 1.
      jagg_frac: share of the trained steps that is grouped, in [0, 1]; 0 is `exact_plan`.
      phase: Python int; the first inner anchor stands at `phase` (at W - 1 when 0). It decides the number of anchors,
        which takes at most two values, so a phase drawn each update compiles at most twice.

    Raises:
      ValueError: an argument outside its range.
    """
    num_steps, num_grouped = _grouped_steps(sigmas, steps_per_group, jagg_frac)
    spacing = max(steps_per_group - 1, 1)
    if not 0 <= phase < spacing:
        raise ValueError(f"phase is {phase}; for steps_per_group {steps_per_group} it must be in [0, {spacing})")
    grid = {0, num_grouped - 1, *range(phase, num_grouped, spacing)} if num_grouped else set()
    return anchor_plan(sigmas, sorted({*grid, *range(num_grouped, num_steps)}))


def anchor_plan(sigmas: jax.Array, anchors: Sequence[int]) -> BackwardPlan:
    """Linear interpolation in the noise level between neighbouring anchors, which may stand anywhere.

    `hat_plan` is the one whose anchors are equally far apart; `calibration.choose_anchors` finds others by measurement.

    Args:
      sigmas: [N], the trained steps' noise levels, in order.
      anchors: Python ints, increasing, from 0 to N - 1.

    Raises:
      ValueError: an argument outside its range.
    """
    num_steps = _check_sigmas(sigmas)
    anchors = np.asarray(anchors)
    if anchors.ndim != 1 or not anchors.size or anchors[0] != 0 or anchors[-1] != num_steps - 1:
        raise ValueError(f"anchors is {anchors.tolist()}; the first must be 0 and the last {num_steps - 1}")
    if not np.issubdtype(anchors.dtype, np.integer) or np.any(np.diff(anchors) < 1):
        raise ValueError(f"anchors is {anchors.tolist()}; give whole numbers that increase")
    sigmas, steps = jnp.asarray(sigmas, jnp.float32), np.arange(num_steps)
    left = np.clip(np.searchsorted(anchors, steps, side="right") - 1, 0, max(len(anchors) - 2, 0))
    right = np.minimum(left + 1, len(anchors) - 1)
    first, last = sigmas[anchors[left]], sigmas[anchors[right]]
    alphas = (first - sigmas) / jnp.where(first == last, 1.0, first - last)
    weights = jnp.zeros((num_steps, len(anchors)), jnp.float32)
    weights = weights.at[steps, left].set(1.0 - alphas).at[steps, right].add(alphas)
    return BackwardPlan(jnp.asarray(anchors, jnp.int32), weights)


def debiased_plan(plan: BackwardPlan, key: jax.Array, probabilities: jax.Array | None = None) -> BackwardPlan:
    """An interpolating plan plus one random interior step a group, so that the mean over draws is the exact gradient.

    A group's interior is a maximal run of steps that are no anchors. In each, step j is drawn with probability p_j; see
    `with_interior_steps` for what becomes of M. The variance is least where p_j is proportional to the norm of what
    interpolation misses at step j, (J_j - sum over a of M[j, a] J_a)^T u_j; `fidelity.plan_fidelity` measures it.

    Args:
      plan: an interpolating plan (`jagg_plan`, `hat_plan`, `anchor_plan`); its anchors must be known, not traced.
      key: PRNG key of the draw; may be traced. The number of anchors, one more a run, does not depend on it.
      probabilities: [N], positive, of the interior steps; need not sum to 1, they are normalised in each run. Equal by
        default. Entries at anchors are ignored.

    Raises:
      ValueError: traced anchors, a plan that does not interpolate, or probabilities that are not positive.
    """
    _check_interpolates(plan)
    runs = interior_runs(plan)
    if not runs:
        return plan
    probabilities = _run_probabilities(plan, probabilities)
    # the largest of log p + Gumbel noise is a draw with probabilities p
    scores = jnp.log(probabilities) + jax.random.gumbel(key, (plan.num_steps,), jnp.float32)
    steps = [run.start + jnp.argmax(scores[run.start : run.stop]) for run in runs]
    return with_interior_steps(plan, jnp.stack(steps), probabilities)


def with_interior_steps(plan: BackwardPlan, steps: jax.Array, probabilities: jax.Array | None = None) -> BackwardPlan:
    """`debiased_plan` with the drawn steps given: one in each of `interior_runs(plan)`, in their order.

    A drawn step j becomes an anchor that receives u_j / p_j, and the others lose their share of it:

        M'[j, j] = 1 / p_j,    M'[j, a] = M[j, a] (1 - 1 / p_j),    all other rows as they were.

    The gradient thus gains (1 / p_j) (J_j - sum over a of M[j, a] J_a)^T u_j, whose mean over draws is what the plan
    misses in that run: E[M'] is the identity. Every row of M' sums to 1 when those of M do, whatever is drawn.

    Args:
      plan: an interpolating plan whose anchors are known.
      steps: int [number of runs]; may be traced.
      probabilities: as for `debiased_plan`.

    Raises:
      ValueError: as `debiased_plan`, or `steps` of another length or outside their runs.
    """
    _check_interpolates(plan)
    runs, probabilities = interior_runs(plan), _run_probabilities(plan, probabilities)
    steps = jnp.asarray(steps, jnp.int32)
    if steps.shape != (len(runs),):
        raise ValueError(f"steps has shape {steps.shape}; give one for each of the {len(runs)} runs of interior steps")
    if not isinstance(steps, jax.core.Tracer):
        chosen = np.asarray(steps).tolist()
        if not all(step in run for step, run in zip(chosen, runs, strict=True)):
            raise ValueError(f"steps is {chosen}; give one of each run, {', '.join(str(list(run)) for run in runs)}")
    boost = 1.0 / probabilities[steps]
    # a third axis of the weights, if there is one, is the batch
    boost = boost.reshape(len(runs), *(1 for _ in plan.weights.shape[2:]))
    weights = plan.weights.at[steps].multiply(1.0 - boost[:, None])
    columns = jnp.zeros((plan.num_steps, len(runs), *plan.weights.shape[2:]), jnp.float32)
    columns = columns.at[steps, jnp.arange(len(runs))].set(jnp.broadcast_to(boost, columns.shape[1:]))
    return BackwardPlan(jnp.concatenate([plan.anchors, steps]), jnp.concatenate([weights, columns], axis=1))


def interior_runs(plan: BackwardPlan) -> tuple[range, ...]:
    """The maximal runs of neighbouring steps that are no anchors, in order.

    Raises:
      ValueError: traced anchors, whose runs can't be known.
    """
    if isinstance(plan.anchors, jax.core.Tracer):
        raise ValueError("plan.anchors is traced; build the plan outside of jit and close over it")
    anchors = np.asarray(plan.anchors)
    edges = [-1, *sorted(anchors.tolist()), plan.num_steps]
    return tuple(range(left + 1, right) for left, right in itertools.pairwise(edges) if right - left > 1)


def subset_plan(key: jax.Array, num_steps: int, num_anchors: int) -> BackwardPlan:
    """Back-propagation through a random subset of the steps, rescaled: the baseline everyone else uses.

    Its rows don't sum to 1; its mean over draws is the identity, so the gradient is unbiased and noisy.

    Args:
      key: PRNG key that draws the subset; may be traced.
      num_steps: N.
      num_anchors: K, in [1, N].

    Raises:
      ValueError: a count outside its range.
    """
    _check_at_least(num_steps=num_steps, num_anchors=num_anchors)
    if num_anchors > num_steps:
        raise ValueError(f"num_anchors is {num_anchors}; it cannot exceed num_steps, {num_steps}")
    anchors = jnp.sort(jax.random.permutation(key, num_steps)[:num_anchors]).astype(jnp.int32)
    weights = jnp.zeros((num_steps, num_anchors), jnp.float32)
    return BackwardPlan(anchors, weights.at[anchors, jnp.arange(num_anchors)].set(num_steps / num_anchors))


def one_group_plan(sigmas: jax.Array, alphas: jax.Array | None = None) -> BackwardPlan:
    """The plan of a single group of W steps: its two endpoints are the anchors (the only step, when W is 1).

    Args:
      sigmas: [W] or [W, B], the group's noise levels, decreasing.
      alphas: [W] or [W, B], interpolation weights from 0 to 1; `sigma_alphas(sigmas)` by default.

    Raises:
      ValueError: no steps, or `alphas` of another length.
    """
    if jnp.ndim(sigmas) not in (1, 2) or jnp.shape(sigmas)[0] == 0:
        raise ValueError(f"sigmas has shape {jnp.shape(sigmas)}; give one group's noise levels as [W] or [W, B]")
    num_steps = jnp.shape(sigmas)[0]
    alphas = sigma_alphas(sigmas) if alphas is None else jnp.asarray(alphas, jnp.float32)
    if alphas.shape[:1] != (num_steps,):
        raise ValueError(f"alphas has shape {alphas.shape} for {num_steps} sigmas; give one weight a step")
    if num_steps == 1:
        return BackwardPlan(jnp.zeros(1, jnp.int32), jnp.ones_like(alphas[:, None]))
    return BackwardPlan(jnp.array([0, num_steps - 1], jnp.int32), jnp.stack([1.0 - alphas, alphas], axis=1))


def _with_exact_tail(anchors: list[int], weights: jax.Array, num_grouped: int) -> BackwardPlan:
    """Adds one anchor of weight 1 for every step from `num_grouped` on."""
    num_steps = weights.shape[0]
    tail = jnp.eye(num_steps, dtype=jnp.float32)[:, num_grouped:]
    indices = [*anchors, *range(num_grouped, num_steps)]
    return BackwardPlan(jnp.array(indices, jnp.int32), jnp.concatenate([weights, tail], axis=1))


def _check_interpolates(plan: BackwardPlan) -> None:
    """Refuses, where its values are known, a plan that does not leave its anchors alone."""
    if isinstance(plan.weights, jax.core.Tracer) or isinstance(plan.anchors, jax.core.Tracer):
        return
    rows = np.asarray(plan.weights)[np.asarray(plan.anchors)]
    identity = np.eye(plan.num_anchors).reshape(plan.num_anchors, plan.num_anchors, *(1 for _ in rows.shape[2:]))
    if not np.allclose(rows, identity, atol=1e-5):
        raise ValueError("plan does not interpolate: an anchor's row of plan.weights must be that anchor alone")


def _run_probabilities(plan: BackwardPlan, probabilities: jax.Array | None) -> jax.Array:
    """Probabilities float32 [N] that sum to 1 in each run of interior steps, and are 1 at the anchors."""
    if probabilities is None:
        probabilities = jnp.ones(plan.num_steps, jnp.float32)
    probabilities = jnp.asarray(probabilities, jnp.float32)
    if probabilities.shape != (plan.num_steps,):
        raise ValueError(f"probabilities has shape {probabilities.shape}; give one a step, ({plan.num_steps},)")
    runs = interior_runs(plan)
    if not isinstance(probabilities, jax.core.Tracer):
        given = np.asarray(probabilities)
        inside = [float(given[step]) for run in runs for step in run]
        if not all(0.0 < value < np.inf for value in inside):
            raise ValueError(f"probabilities of the interior steps are {inside}; all must be positive and finite")
    run_of = np.full(plan.num_steps, -1)
    for index, run in enumerate(runs):
        run_of[run.start : run.stop] = index
    same_run = (run_of[:, None] == run_of[None, :]) & (run_of >= 0)[:, None]
    totals = jnp.sum(jnp.where(same_run, probabilities[None, :], 0.0), axis=1)
    return jnp.where(run_of >= 0, probabilities / jnp.where(run_of >= 0, totals, 1.0), 1.0)


def _check_sigmas(sigmas: jax.Array) -> int:
    """Checks the trained steps' noise levels; returns how many there are."""
    if jnp.ndim(sigmas) != 1 or jnp.shape(sigmas)[0] == 0:
        raise ValueError(f"sigmas has shape {jnp.shape(sigmas)}; give the trained steps' noise levels as [N]")
    if not isinstance(sigmas, jax.core.Tracer) and not np.all(np.diff(np.asarray(sigmas, np.float64)) < 0):
        raise ValueError(f"sigmas is {np.asarray(sigmas).tolist()}; noise levels must decrease from step to step")
    return jnp.shape(sigmas)[0]


def _grouped_steps(sigmas: jax.Array, steps_per_group: int, jagg_frac: float) -> tuple[int, int]:
    """Checks what the grouping plans share; returns N and the number of grouped steps."""
    num_steps = _check_sigmas(sigmas)
    _check_at_least(steps_per_group=steps_per_group)
    if not 0.0 <= jagg_frac <= 1.0:
        raise ValueError(f"jagg_frac is {jagg_frac}; it must be in [0, 1]")
    return num_steps, round(jagg_frac * num_steps)


def _check_at_least(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
