"""Gradients compared: one vector-Jacobian product after the other, added up, and the inner products that remain.

The machinery of `fidelity` and `calibration`. However many gradients are compared, four of them are in memory.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jagg_jax.plans import BackwardPlan

PyTree = Any


@partial(jax.tree_util.register_dataclass, data_fields=("exact", "planned", "inner", "error"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class Agreement:
    """Inner products of an exact gradient g and a planned one h; float32 arrays of one shape, one entry a comparison.

    They add up over disjoint sets of parameters (`sum`). Two gradients that are both 0 agree: cosine 1, error 0.

    Attributes:
      exact: |g|^2.
      planned: |h|^2.
      inner: g . h.
      error: |h - g|^2, from the difference itself.
    """

    exact: jax.Array
    planned: jax.Array
    inner: jax.Array
    error: jax.Array

    @property
    def cosine(self) -> jax.Array:
        """g . h / (|g| |h|)."""
        product = jnp.sqrt(self.exact) * jnp.sqrt(self.planned)
        agree = (self.error == 0).astype(jnp.float32)
        return jnp.where(product > 0, self.inner / jnp.where(product > 0, product, 1.0), agree)

    @property
    def norm_ratio(self) -> jax.Array:
        """|h| / |g|; infinite where only g is 0."""
        return _ratio(self.planned, self.exact, both_zero=1.0)

    @property
    def relative_error(self) -> jax.Array:
        """|h - g| / |g|; infinite where only g is 0."""
        return _ratio(self.error, self.exact, both_zero=0.0)

    def sum(self, axis: int) -> "Agreement":
        """The comparison of all parameters along `axis` together."""
        return jax.tree.map(lambda x: jnp.sum(x, axis), self)


@dataclasses.dataclass(frozen=True)
class Pullbacks:
    """A list of vector-Jacobian products and how they are added up into comparisons; NumPy arrays.

    Entry i adds J_{steps[i]}^T (sum over j of weights[i, c, j] u_j) to two running gradients, c = 0 the exact one and
    c = 1 the planned one, each of which starts anew where `resets[i, c]`.

    Attributes:
      steps: int [I].
      weights: float32 [I, 2, N].
      resets: bool [I, 2].
      ends: int [C], after which entries a comparison is complete.
    """

    steps: np.ndarray
    weights: np.ndarray
    resets: np.ndarray
    ends: np.ndarray


def dense_matrix(plan: BackwardPlan) -> np.ndarray:
    """A plan as a matrix float32 [N, N]: entry [j, s] says how much step j borrows from the Jacobian of step s.

    Raises:
      ValueError: a traced plan, or weights that differ between samples.
    """
    if isinstance(plan.anchors, jax.core.Tracer) or isinstance(plan.weights, jax.core.Tracer):
        raise ValueError("plan is traced; build it outside of jit and close over it")
    if plan.weights.ndim != 2:
        raise ValueError(f"plan.weights has shape {plan.weights.shape}; fidelity is measured for weights [N, K]")
    matrix = np.zeros((plan.num_steps, plan.num_steps), np.float32)
    matrix[:, np.asarray(plan.anchors)] = np.asarray(plan.weights)
    return matrix


def group_pullbacks(comparisons: Sequence[tuple[int, int, np.ndarray]]) -> Pullbacks:
    """One comparison for each (start, stop, matrix [N, N]): the steps from start to stop, exact and by the matrix."""
    steps, weights, resets, ends = [], [], [], []
    for start, stop, matrix in comparisons:
        own, borrowed = np.zeros_like(matrix), np.zeros_like(matrix)
        own[range(start, stop), range(start, stop)] = 1.0
        borrowed[start:stop] = matrix[start:stop]
        # transposed: one row for each Jacobian, which says what it is multiplied with
        both = np.stack([own.T, borrowed.T], axis=1)
        visited = np.flatnonzero(both.any(axis=(1, 2)))
        steps.append(visited)
        weights.append(both[visited])
        resets.append(np.repeat((visited == visited[0])[:, None], 2, axis=1))
        ends.append(len(visited))
    return Pullbacks(np.concatenate(steps), np.concatenate(weights), np.concatenate(resets), np.cumsum(ends) - 1)


def run_pullbacks(
    velocity_fn, params, latents, sigmas, cond, cotangents, pullbacks: Pullbacks, labels: Sequence[str]
) -> tuple[Agreement, Agreement]:
    """Runs a list of pullbacks in one `lax.scan`.

    Returns:
      `Agreement` of the comparisons, arrays [C, parts], and that of all pullbacks added up, arrays [parts].
    """
    parts = list(dict.fromkeys(labels))
    compare = partial(_compare, owners=[parts.index(label) for label in labels], num_parts=len(parts))

    def add(carry, entry):
        running, total = carry
        step, weights, resets = entry
        added = step_gradients(velocity_fn, params, latents, sigmas, cond, step, mix(weights, cotangents))
        running = jax.tree.map(lambda r, a: jnp.where(_column(resets, r), 0.0, r) + a, running, added)
        total = jax.tree.map(jnp.add, total, added)
        return (running, total), compare(running)

    zeros = jax.tree.map(lambda p: jnp.zeros((2, *jnp.shape(p)), jnp.float32), params)
    entries = jax.tree.map(jnp.asarray, (pullbacks.steps.astype(np.int32), pullbacks.weights, pullbacks.resets))
    (_, total), agreements = jax.lax.scan(add, (zeros, zeros), entries)
    return jax.tree.map(lambda x: x[pullbacks.ends], agreements), compare(total)


def step_gradients(velocity_fn, params, latents, sigmas, cond, step, cotangents: jax.Array) -> PyTree:
    """J_step^T of several cotangents [C, B, ...] through one linearisation: like `params`, float32 [C, ...]."""
    level = jnp.full(latents.shape[1], sigmas[step], jnp.float32)
    _, pull_back = jax.vjp(lambda p: velocity_fn(p, latents[step], level, *cond).astype(jnp.float32), params)
    return jax.tree.map(lambda g: g.astype(jnp.float32), jax.vmap(pull_back)(cotangents)[0])


def mix(weights: jax.Array, cotangents: jax.Array) -> jax.Array:
    """Weighted sums over steps: weights [C, N] and cotangents [N, ...] -> float32 [C, ...]."""
    return jnp.tensordot(weights, cotangents.astype(jnp.float32), axes=1, precision=jax.lax.Precision.HIGHEST)


def _compare(gradients: PyTree, owners: Sequence[int], num_parts: int) -> Agreement:
    """The agreement of gradients stacked as (exact, planned), arrays [parts]; `owners` is each leaf's part."""
    sums = [[jnp.zeros((), jnp.float32)] * 4 for _ in range(num_parts)]
    for leaf, part in zip(jax.tree.leaves(gradients), owners, strict=True):
        exact, planned = leaf
        products = ((exact, exact), (planned, planned), (exact, planned), (planned - exact, planned - exact))
        sums[part] = [total + jnp.sum(a * b) for total, (a, b) in zip(sums[part], products, strict=True)]
    return Agreement(*(jnp.stack(column) for column in zip(*sums, strict=True)))


def _column(flags: jax.Array, like: jax.Array) -> jax.Array:
    """[C] shaped to broadcast against `like` [C, ...]."""
    return flags.reshape(flags.shape + (1,) * (like.ndim - 1))


def _ratio(squared: jax.Array, reference: jax.Array, both_zero: float) -> jax.Array:
    """sqrt(squared / reference), safe at 0."""
    ratio = jnp.sqrt(squared / jnp.where(reference > 0, reference, 1.0))
    return jnp.where(reference > 0, ratio, jnp.where(squared > 0, jnp.inf, both_zero))


def check_probe(latents: jax.Array, sigmas: jax.Array, cotangents: jax.Array, num_steps: int) -> None:
    """Refuses latents [N, B, ...], sigmas [N] or cotangents [N, B, ...] of other shapes."""
    if latents.ndim < 2 or latents.shape[0] != num_steps or jnp.shape(sigmas) != (num_steps,):
        shapes = f"latents has shape {latents.shape}, sigmas {jnp.shape(sigmas)}"
        raise ValueError(f"{shapes}; the plan needs [{num_steps} steps, batch, ...] and [{num_steps}]")
    if cotangents.shape != latents.shape:
        raise ValueError(f"cotangents has shape {cotangents.shape}; expected that of latents, {latents.shape}")
