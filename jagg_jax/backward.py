"""The method: one vector-Jacobian product at a plan's anchor steps stands in for one at every step.

A diffusion policy gradient needs the sum over N trained steps of J_j^T u_j, where J_j is the parameter Jacobian of the
velocity at step j and u_j the gradient of the loss with respect to that velocity. A `BackwardPlan` names K anchor steps
and a weight matrix M [N, K], and replaces J_j by the weighted sum over anchors of M[j, a] J_a. The gradient is then one
vector-Jacobian product at the anchors with the composite cotangents c = M^T u. JAGG (arXiv 2607.17572) is the plan that
groups W consecutive steps and interpolates linearly between the two endpoints of each group.

This module needs nothing but JAX. It neither knows a model (a velocity function is any function
`velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`) nor a loss.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jagg_jax.plans import BackwardPlan, one_group_plan

PyTree = Any
VelocityFn = Callable[..., jax.Array]


def planned_vjp(
    velocity_fn: VelocityFn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    plan: BackwardPlan,
    cached: jax.Array | None = None,
    previous: jax.Array | None = None,
    batch_anchors: int | None = None,
) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """Velocities of N steps, and the function that pulls their cotangents back through the plan's K anchors only.

    `vjp_fn(u)` returns the sum over anchors of J_a^T c_a with c = M^T u: exact for `exact_plan`, the JAGG gradient for
    `jagg_plan`. The other steps are evaluated without linearisation, one after the other, and keep no residuals.

    Args:
      velocity_fn: `velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`. It is vmapped over
        the anchors, so that a batch axis sharded over devices stays where it is.
      params: pytree of floating-point arrays. Parameters that don't learn belong in `cond` or in a closure.
      latents: [N, B, ...], the states of the trained steps; no gradient flows into them.
      sigmas: [N] or [N, B], their noise levels.
      *cond: pytrees handed to every evaluation as they are (prompt embeddings, masks, frozen parameters).
      plan: for N steps.
      cached: [N, B, ...], velocities already known for `params`, as they are in the first update after a rollout. They
        are returned as they came, and the steps that are no anchors are not evaluated.
      previous: [N, B, ...], velocities at other parameters nearby, in place of `cached`: those of the rollout, in the
        updates after the first. Only the anchors are evaluated, the steps between get `first_order_velocities`.
      batch_anchors: how many anchors one VJP stacks; all K by default. A smaller number keeps the activations of that
        many anchors at a time: `vjp_fn` then runs forward and backward chunk by chunk, and, unless `cached` is given,
        the velocities come from a forward of their own.

    Returns:
      velocities: float32 [N, B, ...], whatever dtype the model computes in.
      vjp_fn: cotangents [N, B, ...] -> pytree like `params`; sums over chunks are float32, cast to each
        parameter's dtype at the end.

    Raises:
      ValueError: shapes that don't agree, both `cached` and `previous`, `batch_anchors` below 1, or parameters that are
        not floating point.
    """
    options = {"plan": plan, "cached": cached, "previous": previous, "batch_anchors": batch_anchors}
    velocities, pull_back = anchored_vjp(velocity_fn, params, latents, sigmas, *cond, **options)
    return velocities, lambda cotangents: pull_back(cotangents)[0]


def anchored_vjp(
    velocity_fn: VelocityFn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    plan: BackwardPlan,
    cached: jax.Array | None = None,
    previous: jax.Array | None = None,
    batch_anchors: int | None = None,
) -> tuple[jax.Array, Callable[[jax.Array], tuple[PyTree, jax.Array]]]:
    """`planned_vjp` whose second function also returns what the linearised forward computed at the anchors.

    Arguments, shapes and errors are those of `planned_vjp`; `pull_back(cotangents)` returns the gradient and the
    anchors' velocities, float32 [K, B, ...], which differ from cached ones as far as the program that made those did.
    """
    sigmas = _check(params, latents, sigmas, plan, cached, previous)
    num_anchors = plan.num_anchors
    if batch_anchors is not None and batch_anchors < 1:
        raise ValueError(f"batch_anchors is {batch_anchors}; it must be at least 1, or None for all {num_anchors}")
    anchor_fn = partial(_velocities_at, velocity_fn, latents=latents, sigmas=sigmas, cond=cond)

    if batch_anchors is None or batch_anchors >= num_anchors:
        anchor_velocities, anchor_vjp = jax.vjp(lambda p: anchor_fn(p, plan.anchors), params)
        velocities = _complete(velocity_fn, params, anchor_velocities, latents, sigmas, cond, plan, cached, previous)

        def pull_back(cotangents: jax.Array) -> tuple[PyTree, jax.Array]:
            return anchor_vjp(_composite_cotangents(plan, cotangents, latents))[0], anchor_velocities

        return velocities, pull_back

    if previous is not None:
        at_anchors = _map_steps(velocity_fn, params, latents[plan.anchors], sigmas[plan.anchors], cond)
        velocities = first_order_velocities(plan, at_anchors, previous)
    elif cached is None:
        velocities = _map_steps(velocity_fn, params, latents, sigmas, cond)
    else:
        velocities = cached.astype(jnp.float32)

    def pull_back_in_chunks(cotangents: jax.Array) -> tuple[PyTree, jax.Array]:
        composite = _composite_cotangents(plan, cotangents, latents)
        return _vjp_in_chunks(anchor_fn, params, plan.anchors, composite, batch_anchors)

    return velocities, pull_back_in_chunks


def planned_velocities(
    velocity_fn: VelocityFn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    plan: BackwardPlan,
    cached: jax.Array | None = None,
) -> jax.Array:
    """The same velocities as `planned_vjp`, as one differentiable value whose gradient is the planned one.

    It is the surrogate v_j + sum over anchors of M[j, a] (v_a - stop_gradient(v_a)) with v_j held constant: its value
    is v_j, its Jacobian the interpolated one. Gradients reach `params` and, interpolated in the same way, `cond`; none
    reach `latents` or `sigmas`. Arguments, shapes and errors are those of `planned_vjp`; returns float32 [N, B, ...].
    """
    sigmas = _check(params, latents, sigmas, plan, cached)
    latents, sigmas = jax.lax.stop_gradient((latents, sigmas))
    anchor_velocities = _velocities_at(velocity_fn, params, plan.anchors, latents=latents, sigmas=sigmas, cond=cond)
    detached = jax.lax.stop_gradient(anchor_velocities)
    values = _complete(velocity_fn, params, detached, latents, sigmas, cond, plan, cached)
    # the difference is zero in value and carries the anchors' Jacobians
    return jax.lax.stop_gradient(values) + _interpolate(plan, anchor_velocities - detached)


def first_order_velocities(plan: BackwardPlan, anchor_velocities: jax.Array, previous: jax.Array) -> jax.Array:
    """Velocities of all N steps after a small change of the parameters, from those of the K anchors alone.

        v_j = previous_j + sum over anchors of M[j, a] (v_a - previous_a),

    and v_a itself at an anchor. The error is what interpolation misses of the change v_j - previous_j: of first order
    in the change of the parameters, times a small factor of the plan's (a quarter for half the spacing), and 0 where
    the change is linear in the noise level. A loss of these values has, as a function of the parameters, exactly the
    plan's gradient where anchors' rows of M are those anchors alone; other plans (`subset`) are better off recomputing.

    Args:
      plan: for N steps and K anchors.
      anchor_velocities: [K, B, ...], at the new parameters, in the order of `plan.anchors`.
      previous: [N, B, ...], at the old ones.

    Returns:
      float32 [N, B, ...].
    """
    anchor_velocities, previous = anchor_velocities.astype(jnp.float32), previous.astype(jnp.float32)
    velocities = previous + _interpolate(plan, anchor_velocities - previous[plan.anchors])
    column = jnp.full(plan.num_steps, -1, jnp.int32).at[plan.anchors].set(jnp.arange(plan.num_anchors, dtype=jnp.int32))
    is_anchor = (column >= 0).reshape(-1, *(1 for _ in previous.shape[1:]))
    # a gather, as in _complete; an anchor's own velocity is known to the last bit
    return jnp.where(is_anchor, anchor_velocities[column], velocities)


def jagg_vjp(
    velocity_fn: VelocityFn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    alphas: jax.Array | None = None,
    cached: jax.Array | None = None,
) -> tuple[jax.Array, Callable[[jax.Array], PyTree]]:
    """`jax.vjp` of one group's W velocities with respect to the parameters, at the price of the two endpoints.

    With u_j the cotangent of step j, the endpoints receive u_first = sum (1 - alpha_j) u_j and u_last = sum alpha_j u_j
    in one joint VJP (arXiv 2607.17572). W = 1 and W = 2 are exact; so is every W when the velocity is affine in
    (latents, sigma) and the latents lie on the chord between the endpoints.

    Args:
      velocity_fn: `velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`.
      params: pytree of floating-point arrays.
      latents: [W, B, ...], the group's states in the order they were sampled.
      sigmas: [W] or [W, B], their noise levels, decreasing.
      *cond: pytrees shared by the group's steps.
      alphas: [W] or [W, B], interpolation weights from 0 to 1; `sigma_alphas(sigmas)` by default.
      cached: [W, B, ...], velocities already known for `params`; the interior forwards are then skipped.

    Returns:
      velocities float32 [W, B, ...], and `vjp_fn(cotangents [W, B, ...]) -> cotangent pytree like params`.

    Raises:
      ValueError: shapes that don't agree.
    """
    plan = one_group_plan(sigmas, alphas)
    return planned_vjp(velocity_fn, params, latents, sigmas, *cond, plan=plan, cached=cached)


def jagg_velocities(
    velocity_fn: VelocityFn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    alphas: jax.Array | None = None,
    cached: jax.Array | None = None,
) -> jax.Array:
    """One group's velocities, float32 [W, B, ...]; `jax.grad` through them is the JAGG gradient.

    A drop-in for a loop or vmap over the steps of a group: same values, two linearised evaluations instead of W.
    Arguments and errors are those of `jagg_vjp`.
    """
    plan = one_group_plan(sigmas, alphas)
    return planned_velocities(velocity_fn, params, latents, sigmas, *cond, plan=plan, cached=cached)


def _check(params: PyTree, latents, sigmas, plan: BackwardPlan, cached, previous=None) -> jax.Array:
    """Checks what is static (and the anchors where they are known); returns sigmas as float32 [N, B]."""
    shapes = f"plan.anchors has shape {plan.anchors.shape}, plan.weights {plan.weights.shape}"
    if plan.weights.ndim not in (2, 3) or plan.anchors.shape != plan.weights.shape[1:2] or plan.num_anchors == 0:
        raise ValueError(f"{shapes}; expected [K] and [N, K] with K at least 1")
    num_steps, num_anchors = plan.num_steps, plan.num_anchors
    if latents.ndim < 2 or latents.shape[0] != num_steps:
        raise ValueError(f"latents has shape {latents.shape}; the plan needs [{num_steps} steps, batch, ...]")
    batch = latents.shape[1]
    sigmas = jnp.asarray(sigmas, jnp.float32)
    if sigmas.shape not in ((num_steps,), (num_steps, batch)):
        raise ValueError(f"sigmas has shape {sigmas.shape}; expected ({num_steps},) or ({num_steps}, {batch})")
    if plan.weights.shape[2:] not in ((), (batch,)):
        raise ValueError(f"plan.weights has shape {plan.weights.shape}; a third axis must be the batch of {batch}")
    if cached is not None and previous is not None:
        raise ValueError("cached and previous are both given; velocities are known either for params or for others")
    for name, known in (("cached", cached), ("previous", previous)):
        if known is not None and known.shape != latents.shape:
            raise ValueError(f"{name} has shape {known.shape}, latents {latents.shape}; they must be the same")
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.floating):
            name = jax.tree_util.keystr(path)
            raise ValueError(f"params{name} is {jnp.result_type(leaf)}; pass arrays that don't learn through cond")
    if not isinstance(plan.anchors, jax.core.Tracer):
        anchors = np.asarray(plan.anchors)
        if len(set(anchors.tolist())) != num_anchors or anchors.min() < 0 or anchors.max() >= num_steps:
            raise ValueError(f"plan.anchors is {anchors.tolist()}; they must be distinct and in [0, {num_steps})")
    return sigmas if sigmas.ndim == 2 else jnp.broadcast_to(sigmas[:, None], (num_steps, batch))


def _velocities_at(velocity_fn, params, steps, *, latents, sigmas, cond) -> jax.Array:
    """Velocities at the given steps, float32 [len(steps), B, ...], all in one vmapped evaluation."""
    in_axes = (None, 0, 0, *(None for _ in cond))
    velocities = jax.vmap(velocity_fn, in_axes)(params, latents[steps], sigmas[steps], *cond).astype(jnp.float32)
    if velocities.shape[1:] != latents.shape[1:]:
        returned, expected = velocities.shape[1:], latents.shape[1:]
        raise ValueError(f"velocity_fn returned shape {returned}; it must be that of the latents, {expected}")
    return velocities


def _map_steps(velocity_fn, params, latents, sigmas, cond) -> jax.Array:
    """Velocities step after step, float32, without residuals and without gradient."""
    params, cond = jax.lax.stop_gradient((params, cond))
    return jax.lax.map(lambda step: velocity_fn(params, *step, *cond).astype(jnp.float32), (latents, sigmas))


def _complete(velocity_fn, params, anchor_velocities, latents, sigmas, cond, plan, cached, previous=None) -> jax.Array:
    """The velocities of all N steps: the cached ones, or the anchors' joined by those of the steps between."""
    if cached is not None:
        return cached.astype(jnp.float32)
    if previous is not None:
        return first_order_velocities(plan, anchor_velocities, previous)
    order, velocities = plan.anchors.astype(jnp.int32), anchor_velocities
    num_interior = plan.num_steps - plan.num_anchors
    if num_interior > 0:
        is_anchor = jnp.zeros(plan.num_steps, jnp.int32).at[plan.anchors].set(1)
        interior = jnp.argsort(is_anchor, stable=True)[:num_interior]
        interior_velocities = _map_steps(velocity_fn, params, latents[interior], sigmas[interior], cond)
        order = jnp.concatenate([order, interior])
        velocities = jnp.concatenate([anchor_velocities, interior_velocities])
    # a gather, not a scatter into zeros: zeros would not be sharded as the velocities are
    return velocities[jnp.argsort(order)]


def _composite_cotangents(plan: BackwardPlan, cotangents: jax.Array, latents: jax.Array) -> jax.Array:
    """c = M^T u, float32 [K, B, ...]."""
    if cotangents.shape != latents.shape:
        raise ValueError(f"cotangents has shape {cotangents.shape}; expected that of latents, {latents.shape}")
    subscripts = "nab,nb...->ab..." if plan.weights.ndim == 3 else "na,n...->a..."
    return _einsum(subscripts, plan.weights, cotangents)


def _interpolate(plan: BackwardPlan, anchor_values: jax.Array) -> jax.Array:
    """M applied to values at the anchors, float32 [N, B, ...]."""
    subscripts = "nab,ab...->nb..." if plan.weights.ndim == 3 else "na,a...->n..."
    return _einsum(subscripts, plan.weights, anchor_values)


def _einsum(subscripts: str, weights: jax.Array, values: jax.Array) -> jax.Array:
    # the default precision of a TPU would round the weights to bfloat16
    weights, values = weights.astype(jnp.float32), values.astype(jnp.float32)
    return jnp.einsum(subscripts, weights, values, precision=jax.lax.Precision.HIGHEST)


def _vjp_in_chunks(anchor_fn, params, anchors, composite, chunk: int) -> tuple[PyTree, jax.Array]:
    """Sum over anchors of J_a^T c_a, and the anchors' velocities; `chunk` anchors are linearised at a time."""

    def add_chunk(total: PyTree, anchors_and_cotangents) -> tuple[PyTree, jax.Array]:
        steps, cotangents = anchors_and_cotangents
        velocities, vjp_fn = jax.vjp(lambda p: anchor_fn(p, steps), params)
        (gradient,) = vjp_fn(cotangents)
        return jax.tree.map(lambda t, g: t + g.astype(jnp.float32), total, gradient), velocities

    whole = anchors.shape[0] // chunk * chunk
    chunks = jax.tree.map(lambda a: a[:whole].reshape(-1, chunk, *a.shape[1:]), (anchors, composite))
    total = jax.tree.map(lambda p: jnp.zeros(jnp.shape(p), jnp.float32), params)
    total, velocities = jax.lax.scan(add_chunk, total, chunks)
    velocities = velocities.reshape(whole, *composite.shape[1:])
    if whole < anchors.shape[0]:
        total, rest = add_chunk(total, (anchors[whole:], composite[whole:]))
        velocities = jnp.concatenate([velocities, rest])
    return jax.tree.map(lambda t, p: t.astype(jnp.result_type(p)), total, params), velocities
