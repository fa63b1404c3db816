"""How wrong a backward plan is: its gradient against the exact one, by group of steps and by part of the network.

All functions take the cotangents u [N, B, ...], the gradients of some loss with respect to the N steps' velocities, and
compare the sum over steps of J_j^T u_j with what a `BackwardPlan` makes of it. They work one step at a time and keep a
few gradients in memory, never one a step. They are pure; call them under `jax.jit` with the plan closed over, because
the plan's values decide which steps are visited.
"""

import dataclasses
import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jagg_jax.comparison import (
    Agreement,
    check_probe,
    dense_matrix,
    group_pullbacks,
    mix,
    run_pullbacks,
    step_gradients,
)
from jagg_jax.flow import Sampler
from jagg_jax.plans import BackwardPlan, interior_runs
from jagg_jax.rollout import Transitions, step_log_probs

PyTree = Any
Parts = Mapping[str, str] | Callable[[str], str] | None

# regular expressions over dotted parameter names -> part of a transformer; the first that is found decides
TRANSFORMER_PARTS = {
    r"modulation|adaln|norm": "modulation",
    r"attention|attn": "attention",
    r"mlp|feed_forward|\bff": "mlp",
    r"time": "time",
}


@partial(jax.tree_util.register_dataclass, data_fields=("per_group", "whole"), meta_fields=("groups", "parts"))
@dataclasses.dataclass(frozen=True)
class PlanFidelity:
    """What `plan_fidelity` measured.

    Attributes:
      groups: (start, stop) of each group of steps, in order; group i is the gradient of these steps' cotangents alone.
      parts: names of the parts of the network.
      per_group: `Agreement` of arrays [groups, parts].
      whole: `Agreement` of arrays [parts], of all steps together.
    """

    groups: tuple[tuple[int, int], ...]
    parts: tuple[str, ...]
    per_group: Agreement
    whole: Agreement

    @property
    def by_group(self) -> Agreement:
        """Arrays [groups]: where along the denoising the error sits."""
        return self.per_group.sum(1)

    @property
    def by_part(self) -> Agreement:
        """Arrays [parts]: where in the network it sits."""
        return self.whole

    @property
    def total(self) -> Agreement:
        """Scalars: the whole gradient."""
        return self.whole.sum(0)


def plan_fidelity(
    velocity_fn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    cotangents: jax.Array,
    plan: BackwardPlan,
    groups: Sequence[tuple[int, int]] | None = None,
    parts: Parts = None,
) -> PlanFidelity:
    """A plan's gradient against the exact one for the same cotangents: cosine, norm ratio and relative error.

    Costs the exact gradient, step by step, with one more backward a step (each group's exact and planned cotangents
    are pulled back through the same linearisation): about 5/3 of it.

    Args:
      velocity_fn: `velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`.
      params: pytree of floating-point arrays.
      latents: [N, B, ...].
      sigmas: [N].
      *cond: pytrees handed to every evaluation as they are.
      cotangents: [N, B, ...].
      plan: for N steps, with known values and weights [N, K].
      groups: (start, stop) of each group, which follow each other from 0 to N; by default those of `plan_groups`.
        Groups of one step say by noise level what interpolation misses.
      parts: how the parameters are divided: a mapping from regular expressions to labels (the first found in the dotted
        name decides, "other" where none is), or a function of the dotted name; by default the name without its numbers,
        so that equal blocks are one part.

    Raises:
      ValueError: shapes that don't agree, a traced plan, or groups that don't follow each other.
    """
    matrix = dense_matrix(plan)
    check_probe(latents, sigmas, cotangents, plan.num_steps)
    groups = plan_groups(plan) if groups is None else tuple((int(start), int(stop)) for start, stop in groups)
    edges = [0, *(stop for _, stop in groups)]
    if [start for start, _ in groups] != edges[:-1] or edges[-1] != plan.num_steps or any(a >= b for a, b in groups):
        raise ValueError(f"groups is {groups}; they must follow each other from 0 to {plan.num_steps}, none empty")
    pullbacks = group_pullbacks([(start, stop, matrix) for start, stop in groups])
    labels = part_labels(params, parts)
    per_group, whole = run_pullbacks(velocity_fn, params, latents, sigmas, cond, cotangents, pullbacks, labels)
    return PlanFidelity(groups, tuple(dict.fromkeys(labels)), per_group, whole)


def plan_groups(plan: BackwardPlan) -> tuple[tuple[int, int], ...]:
    """The groups of steps that borrow from the same anchors, (start, stop) each; together all N steps.

    A run of interior steps comes with the anchor before it, and with the one after it unless that anchor stands before
    the next run (as in `hat_plan`, where neighbours share it). Every other anchor is a group of its own.

    Raises:
      ValueError: traced anchors.
    """
    runs = interior_runs(plan)
    starts = [max(run.start - 1, 0) for run in runs]
    groups, step = [], 0
    for run, start in zip(runs, starts, strict=True):
        groups += [(single, single + 1) for single in range(step, start)]
        step = run.stop if run.stop in starts else min(run.stop + 1, plan.num_steps)
        groups.append((start, step))
    return (*groups, *((single, single + 1) for single in range(step, plan.num_steps)))


def score_cotangents(sampler: Sampler, transitions: Transitions) -> jax.Array:
    """Gradients of each sample's log-probabilities with respect to the velocities, float32 [N, B, ...].

    With the advantages A of a first update, whose ratios are 1, the loss -mean(A ratio) has the cotangents
    -A u / (N B). A step's u is its noise times a number: u_j = (x' - mean) / std^2 d mean / dv, over the sample's size.

    Raises:
      ValueError: transitions without velocities.
    """
    t = transitions
    if t.velocities is None:
        raise ValueError("transitions.velocities is None; roll out with keep_velocities=True")

    def total(velocities):
        return jnp.sum(step_log_probs(sampler, velocities, t.latents, t.next_latents, t.sigmas, t.next_sigmas))

    return jax.grad(total)(t.velocities.astype(jnp.float32))


def part_labels(params: PyTree, parts: Parts = None) -> list[str]:
    """The label of each leaf of `params`, in order; see `plan_fidelity`."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    names = [jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in leaves]
    if parts is None:
        return [".".join(word for word in name.split(".") if not word.isdigit()) for name in names]
    if callable(parts):
        return [parts(name) for name in names]
    return [next((label for pattern, label in parts.items() if re.search(pattern, name)), "other") for name in names]


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("bias", "bias_noise", "gradient", "gradient_noise"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class MeanError:
    """Norms of a plan's mean error and of the mean gradient over P prompts; float32 scalars.

    Attributes:
      bias: |mean(h - g)|, with h the planned and g the exact gradient.
      bias_noise: what `bias` would be expected to be, from the spread between prompts, if the true mean were 0.
      gradient: |mean g|.
      gradient_noise: likewise, for `gradient`.
    """

    bias: jax.Array
    bias_noise: jax.Array
    gradient: jax.Array
    gradient_noise: jax.Array

    @property
    def ratio(self) -> jax.Array:
        """|mean(h - g)| / |mean g|; means something where it is well above `noise_ratio`."""
        return self.bias / self.gradient

    @property
    def noise_ratio(self) -> jax.Array:
        """The ratio that an unbiased plan would show on as many prompts."""
        return self.bias_noise / self.gradient


@partial(jax.tree_util.register_dataclass, data_fields=("advantages", "control"), meta_fields=())
@dataclasses.dataclass(frozen=True)
class BiasRatio:
    """What `bias_ratio` measured.

    Attributes:
      advantages: with the advantages that were given.
      control: with A = 1 for every sample.
    """

    advantages: MeanError
    control: MeanError


def bias_ratio(
    velocity_fn,
    params: PyTree,
    latents: jax.Array,
    sigmas: jax.Array,
    *cond: PyTree,
    cotangents: jax.Array,
    advantages: jax.Array,
    num_generations: int,
    plan: BackwardPlan,
) -> BiasRatio:
    """How much of a plan's error stays when it is averaged over samples, and the same without advantages as a control.

    The mean runs over everything that is drawn: prompts, initial noises and the noise of every step. A step's u_j is
    proportional to that step's noise, which the exact Jacobian at step j has not seen (so that E[J_j^T u_j] = 0) but
    every later anchor has; interpolation therefore leaves a bias proportional to E[A]. Advantages centred within each
    prompt cancel it to leading order. With A = 1 it stays in full while the exact mean vanishes as more samples come:
    a control whose ratio is not far above that of the advantages means that the meter sees nothing.

    Samples of a prompt depend on each other through their centred advantages, so prompts are the independent units from
    which the noise of the means is estimated. Costs three times the exact gradient, a prompt at a time.

    Args:
      velocity_fn: `velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`.
      params: pytree of floating-point arrays.
      latents: [N, B, ...]; the `num_generations` samples of a prompt follow each other.
      sigmas: [N].
      *cond: pytrees of arrays [B, ...].
      cotangents: [N, B, ...], without the advantages: `score_cotangents`.
      advantages: float32 [B].
      num_generations: G; B / G must be whole and at least 2.
      plan: for N steps, with known values and weights [N, K].

    Raises:
      ValueError: shapes that don't agree, a traced plan, or fewer than two prompts.
    """
    check_probe(latents, sigmas, cotangents, plan.num_steps)
    batch = latents.shape[1]
    if num_generations < 1 or batch % num_generations or batch < 2 * num_generations:
        raise ValueError(f"num_generations is {num_generations}; it must divide the batch of {batch} at least twice")
    if advantages.shape != (batch,):
        raise ValueError(f"advantages has shape {advantages.shape}; expected ({batch},)")
    prompts = batch // num_generations
    pullbacks = group_pullbacks([(0, plan.num_steps, dense_matrix(plan))])
    # the prompts' errors and exact gradients, each with the advantages and with 1
    gradients_of = partial(_errors_and_gradients, velocity_fn, params, sigmas, pullbacks)

    def add_prompt(carry, prompt):
        total, squares = carry
        gradients = gradients_of(*prompt)
        return (jax.tree.map(jnp.add, total, gradients), squares + _squared_norms(gradients)), None

    by_prompt = jax.tree.map(lambda x: x.reshape(prompts, num_generations, *x.shape[1:]), (advantages, cond))
    steps = [jnp.moveaxis(x.reshape(-1, prompts, num_generations, *x.shape[2:]), 1, 0) for x in (latents, cotangents)]
    zeros = jax.tree.map(lambda p: jnp.zeros((4, *jnp.shape(p)), jnp.float32), params)
    (total, squares), _ = jax.lax.scan(add_prompt, (zeros, jnp.zeros(4, jnp.float32)), (*steps, *by_prompt))
    means = _squared_norms(total) / prompts**2
    noises = jnp.maximum(squares / prompts - means, 0.0) / (prompts - 1)
    norms, noises = jnp.sqrt(means), jnp.sqrt(noises)
    with_advantages, control = (MeanError(norms[i], noises[i], norms[i + 2], noises[i + 2]) for i in range(2))
    return BiasRatio(with_advantages, control)


def _errors_and_gradients(velocity_fn, params, sigmas, pullbacks, latents, cotangents, advantages, cond) -> PyTree:
    """Mean over a prompt's samples of h - g and of g, each with the advantages and with 1: like `params`, [4, ...]."""
    generations = advantages.shape[0]
    scales = jnp.stack([advantages.astype(jnp.float32), jnp.ones(generations, jnp.float32)]) / generations
    scales = scales.reshape(2, generations, *(1 for _ in latents.shape[2:]))

    def add(total, entry):
        step, weights = entry
        exact, planned = mix(weights, cotangents)
        both = jnp.concatenate([(planned - exact)[None] * scales, exact[None] * scales])
        return jax.tree.map(
            jnp.add, total, step_gradients(velocity_fn, params, latents, sigmas, cond, step, both)
        ), None

    zeros = jax.tree.map(lambda p: jnp.zeros((4, *jnp.shape(p)), jnp.float32), params)
    entries = (jnp.asarray(pullbacks.steps, jnp.int32), jnp.asarray(pullbacks.weights))
    return jax.lax.scan(add, zeros, entries)[0]


def _squared_norms(gradients: PyTree) -> jax.Array:
    """Squared norms of gradients stacked on a leading axis, float32 [C]."""
    return sum(jnp.sum(leaf**2, axis=tuple(range(1, leaf.ndim))) for leaf in jax.tree.leaves(gradients))
