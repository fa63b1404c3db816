"""Backward plans: which trained steps are linearised (anchors), and how the others borrow their Jacobians (weights).

Every plan is the same linear map, a matrix M [N, K] over the N trained steps and K anchors; see `backward.planned_vjp`.

| plan     | M                                                     | backward passes for N steps |
|----------|-------------------------------------------------------|-----------------------------|
| `exact`  | the identity                                          | N                           |
| `jagg`   | block-diagonal, two anchors a group of W steps        | about 2N / W                |
| `hat`    | bidiagonal, neighbouring groups share their anchor    | about (N - 1) / (W - 1) + 1 |
| `subset` | N / K on a random subset of K steps, zero elsewhere   | K                           |
"""

import dataclasses
import itertools
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
    if num_grouped == 0:
        return exact_plan(num_steps)
    if steps_per_group == 1:
        anchors = list(range(num_grouped))
    else:
        anchors = sorted({0, num_grouped - 1, *range(phase, num_grouped, spacing)})
    sigmas = jnp.asarray(sigmas, jnp.float32)
    weights = jnp.zeros((num_steps, len(anchors)), jnp.float32).at[0, 0].set(1.0)
    for column, (left, right) in enumerate(itertools.pairwise(anchors)):
        alphas = sigma_alphas(sigmas[left : right + 1])
        weights = weights.at[left : right + 1, column].set(1.0 - alphas)
        weights = weights.at[left : right + 1, column + 1].set(alphas)
    return _with_exact_tail(anchors, weights, num_grouped)


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


def _grouped_steps(sigmas: jax.Array, steps_per_group: int, jagg_frac: float) -> tuple[int, int]:
    """Checks what the grouping plans share; returns N and the number of grouped steps."""
    if jnp.ndim(sigmas) != 1 or jnp.shape(sigmas)[0] == 0:
        raise ValueError(f"sigmas has shape {jnp.shape(sigmas)}; give the trained steps' noise levels as [N]")
    _check_at_least(steps_per_group=steps_per_group)
    if not 0.0 <= jagg_frac <= 1.0:
        raise ValueError(f"jagg_frac is {jagg_frac}; it must be in [0, 1]")
    if not isinstance(sigmas, jax.core.Tracer) and not np.all(np.diff(np.asarray(sigmas, np.float64)) < 0):
        raise ValueError(f"sigmas is {np.asarray(sigmas).tolist()}; noise levels must decrease from step to step")
    num_steps = jnp.shape(sigmas)[0]
    return num_steps, round(jagg_frac * num_steps)


def _check_at_least(**counts: int) -> None:
    for name, count in counts.items():
        if count < 1:
            raise ValueError(f"{name} is {count}; it must be at least 1")
