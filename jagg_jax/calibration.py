"""Plans chosen by measurement on a probe batch: the calibrated `jagg_frac`, and anchors where the error wants them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jagg_jax.comparison import Pullbacks, check_probe, dense_matrix, group_pullbacks, run_pullbacks
from jagg_jax.fidelity import plan_groups
from jagg_jax.plans import BackwardPlan, anchor_plan

PyTree = Any


def calibrated_frac(
    velocity_fn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    cotangents: jax.Array,
    make_plan: Callable[[float], BackwardPlan],
    threshold: float,
) -> float:
    """The largest `jagg_frac` whose groups all keep cosine(planned, exact) >= `threshold` on the probe batch.

    Every group that occurs at some fraction is measured once, all in one compiled program: at most (W + 1) / 2 times
    the cost of one `plan_fidelity` for `jagg_plan`.

    Args:
      velocity_fn, params, latents, sigmas, *cond, cotangents: as for `fidelity.plan_fidelity`.
      make_plan: `jagg_frac` -> plan for the N steps, such as `lambda frac: jagg_plan(sigmas, 4, frac)`.
      threshold: least cosine, in [-1, 1].

    Returns:
      A multiple of 1 / N in [0, 1]; 0 when no group is good enough.

    Raises:
      ValueError: `threshold` outside [-1, 1], shapes that don't agree, or a traced plan.
    """
    if not -1.0 <= threshold <= 1.0:
        raise ValueError(f"threshold is {threshold}; a cosine is in [-1, 1]")
    num_steps = latents.shape[0]
    check_probe(latents, sigmas, cotangents, num_steps)
    comparisons, needed, identity = {}, [], np.eye(num_steps)
    for grouped in range(num_steps + 1):
        plan = make_plan(grouped / num_steps)
        matrix = dense_matrix(plan)
        borrowing = [g for g in plan_groups(plan) if not np.allclose(matrix[slice(*g)], identity[slice(*g)], atol=1e-6)]
        needed.append([(*group, matrix[slice(*group)].tobytes()) for group in borrowing])
        comparisons |= {key: (*key[:2], matrix) for key in needed[-1]}
    if not comparisons:
        return 1.0
    pullbacks = group_pullbacks(list(comparisons.values()))
    labels = ["all"] * len(jax.tree.leaves(params))

    @jax.jit
    def cosines(params, latents, sigmas, cond, cotangents):
        return run_pullbacks(velocity_fn, params, latents, sigmas, cond, cotangents, pullbacks, labels)[0].cosine[:, 0]

    measured = np.asarray(cosines(params, latents, jnp.asarray(sigmas, jnp.float32), cond, cotangents))
    good = dict(zip(comparisons, measured >= threshold, strict=True))
    return max(grouped for grouped, keys in enumerate(needed) if all(good[key] for key in keys)) / num_steps


def span_errors(
    velocity_fn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    cotangents: jax.Array,
    longest: int | None = None,
) -> jax.Array:
    """What it would cost to put two neighbouring anchors at steps i and k, for every pair: float32 [N, N].

    Entry [i, k], i < k, is |sum over i < j < k of (J_j - (1 - a_j) J_i - a_j J_k)^T u_j|, with a_j linear in the noise
    level, over |sum over all j of J_j^T u_j|. The errors of all spans add up as vectors, so the sum of their norms
    bounds the relative error of the whole gradient: `choose_anchors` keeps that sum small. Entries of neighbouring
    steps are 0, all others (i >= k, or longer than `longest`) infinite.

    Three vector-Jacobian products a pair, at most 3 N^2 / 2, one after the other: meant for a probe of a few samples.
    The error is that of the probe's own gradient; its random part shrinks as the probe grows.

    Args:
      velocity_fn, params, latents, sigmas, *cond, cotangents: as for `fidelity.plan_fidelity`; `sigmas` not traced.
      longest: most steps between i and k, k - i; all pairs by default.

    Raises:
      ValueError: shapes that don't agree, traced sigmas, or `longest` below 2.
    """
    num_steps = latents.shape[0]
    check_probe(latents, sigmas, cotangents, num_steps)
    if isinstance(sigmas, jax.core.Tracer):
        raise ValueError("sigmas is traced; the weights of all pairs need their values, so close over them")
    if longest is not None and longest < 2:
        raise ValueError(f"longest is {longest}; a span with a step inside is at least 2 long")
    reach = num_steps if longest is None else longest
    pairs = [(i, k) for i in range(num_steps) for k in range(i + 2, min(i + reach, num_steps - 1) + 1)]
    pullbacks = _span_pullbacks(np.asarray(sigmas, np.float64), pairs)
    labels = ["all"] * len(jax.tree.leaves(params))
    levels = jnp.asarray(sigmas, jnp.float32)
    spans, _ = run_pullbacks(velocity_fn, params, latents, levels, cond, cotangents, pullbacks, labels)
    errors = jnp.sqrt(spans.error[:, 0] / spans.exact[-1, 0])
    result = jnp.full((num_steps, num_steps), jnp.inf, jnp.float32)
    neighbours = np.arange(num_steps - 1)
    result = result.at[neighbours, neighbours + 1].set(0.0)
    starts, stops = np.array(pairs, np.int32).reshape(-1, 2).T
    return result.at[starts, stops].set(errors[:-1])


def choose_anchors(errors: np.ndarray, bound: float | None = None, num_anchors: int | None = None) -> tuple[int, ...]:
    """The fewest anchors whose spans' summed error stays under a bound, or the least error of a number of anchors.

    Dynamic programming over the last anchor: the least error of reaching step k with m anchors is the least, over the
    anchor i before it, of that of reaching i with m - 1 anchors plus errors[i, k].

    Args:
      errors: float [N, N], `span_errors`; only entries above the diagonal are read.
      bound: largest sum of errors; among as few anchors, the least sum is taken. Every step an anchor has error 0.
      num_anchors: K, instead of a bound, for a plan whose shape must not change.

    Returns:
      The anchors, increasing, from 0 to N - 1, for `plans.anchor_plan`.

    Raises:
      ValueError: both or neither of bound and num_anchors, values outside their range, NaN or negative errors, or a
        number of anchors between which no measured spans lead.
    """
    errors = np.asarray(errors, np.float64)
    if errors.ndim != 2 or errors.shape[0] != errors.shape[1] or not errors.size:
        raise ValueError(f"errors has shape {errors.shape}; expected [N, N]")
    num_steps = len(errors)
    spans = np.where(np.triu(np.ones_like(errors, bool), 1), errors, np.inf)
    if np.isnan(spans).any() or (spans < 0).any():
        raise ValueError("errors holds NaN or negative numbers above the diagonal; measure it on finite latents")
    if (bound is None) == (num_anchors is None):
        raise ValueError(f"bound is {bound} and num_anchors {num_anchors}; give one of them")
    if bound is not None and not bound >= 0:
        raise ValueError(f"bound is {bound}; it must be at least 0")
    if num_anchors is not None and not min(2, num_steps) <= num_anchors <= num_steps:
        raise ValueError(f"num_anchors is {num_anchors}; it must be in [{min(2, num_steps)}, {num_steps}]")
    spans[np.arange(num_steps - 1), np.arange(1, num_steps)] = 0.0
    least = np.where(np.arange(num_steps) == 0, 0.0, np.inf)
    before = []
    while not (least[-1] <= bound if num_anchors is None else len(before) + 1 == num_anchors):
        totals = least[:, None] + spans
        before.append(np.argmin(totals, axis=0))
        least = np.min(totals, axis=0)
    if not np.isfinite(least[-1]):
        raise ValueError(f"num_anchors is {num_anchors}; the measured spans are too short for so few, raise it")
    anchors = [num_steps - 1]
    for step_before in reversed(before):
        anchors.append(int(step_before[anchors[-1]]))
    return tuple(reversed(anchors))


def auto_plan(sigmas: jax.Array, errors: np.ndarray, bound: float) -> BackwardPlan:
    """Linear interpolation between the fewest anchors whose summed `span_errors` stay under `bound`.

    Arguments and errors are those of `choose_anchors` and `plans.anchor_plan`. On the probe batch the relative error of
    the plan's gradient is then at most `bound`.
    """
    return anchor_plan(sigmas, choose_anchors(errors, bound))


def _span_pullbacks(sigmas: np.ndarray, pairs: list[tuple[int, int]]) -> Pullbacks:
    """One comparison a pair (ordered by i, then k), and one more whose exact part is the whole gradient.

    The exact part sums the interior steps: from one k to the next only step k - 1 joins it. The planned part is the two
    anchors'.
    """
    num_steps, entries = len(sigmas), []
    unit = np.eye(num_steps)
    nothing = np.zeros(num_steps)
    for i, k in pairs:
        inside = np.arange(i + 1, k)
        alphas = (sigmas[i] - sigmas) / (sigmas[i] - sigmas[k])
        left, right = nothing.copy(), nothing.copy()
        left[inside], right[inside] = 1.0 - alphas[inside], alphas[inside]
        first = k == i + 2
        entries.append((k - 1, unit[k - 1], nothing, first, True))
        entries.append((i, nothing, left, False, False))
        entries.append((k, nothing, right, False, False))
    ends = [3 * n + 2 for n in range(len(pairs))] + [3 * len(pairs) + num_steps - 1]
    entries += [(step, unit[step], nothing, step == 0, step == 0) for step in range(num_steps)]
    steps, exact, planned, reset_exact, reset_planned = (np.array(column) for column in zip(*entries, strict=True))
    weights = np.stack([exact, planned], axis=1).astype(np.float32)
    return Pullbacks(steps, weights, np.stack([reset_exact, reset_planned], axis=1), np.array(ends))
