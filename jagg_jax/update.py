"""One optimiser update: transitions, advantages and a backward plan become gradients and a new training state."""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jagg_jax.backward import anchored_vjp
from jagg_jax.flow import Sampler
from jagg_jax.grpo import grpo_loss, kl_to_reference, ratio_quantiles
from jagg_jax.plans import BackwardPlan
from jagg_jax.rollout import Transitions, finite_samples, split_batch, step_log_probs


@partial(
    jax.tree_util.register_dataclass,
    data_fields=("params", "opt_state", "ema_params", "updates", "skipped", "skipped_in_a_row"),
    meta_fields=(),
)
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that an update changes.

    Attributes:
      params: pytree of the trained parameters.
      opt_state: the Optax state.
      ema_params: their exponential moving average, or None.
      updates: int32, optimiser updates applied.
      skipped: int32, updates skipped because the loss or a gradient was not finite.
      skipped_in_a_row: int32, how many of those since the last applied one.
    """

    params: Any
    opt_state: Any
    ema_params: Any
    updates: jax.Array
    skipped: jax.Array
    skipped_in_a_row: jax.Array

    @classmethod
    def create(cls, params: Any, optimizer: optax.GradientTransformation, with_ema: bool = False) -> "TrainState":
        """The state before the first update; the average starts from a copy of `params`."""
        zero = jnp.zeros((), jnp.int32)
        ema_params = jax.tree.map(jnp.array, params) if with_ema else None
        return cls(params, optimizer.init(params), ema_params, zero, jnp.array(zero), jnp.array(zero))


@dataclasses.dataclass(frozen=True)
class Objective:
    """What the velocities are trained for; hashable, so that it can be a static argument of `jax.jit`.

    Attributes:
      sampler: the sampler of the rollout.
      clip_range: (low, high), how far the ratio may fall below and rise above 1 before its gradient is clipped.
      kl: divergence from the reference (see `grpo.kl_to_reference`), or None.
      kl_weight: its weight in the loss.
    """

    sampler: Sampler
    clip_range: tuple[float, float]
    kl: str | None = None
    kl_weight: float = 0.0

    def __call__(
        self,
        velocities: jax.Array,
        transitions: Transitions,
        advantages: jax.Array,
        reference_velocities: jax.Array | None = None,
        counts: jax.Array | None = None,
    ) -> tuple[jax.Array, tuple[dict[str, jax.Array], jax.Array]]:
        """Loss of velocities [N, B, ...], its metrics, and the log-ratios float32 [N, B].

        The loss is the mean over steps and samples, float32. A sample that `counts`, bool [B], leaves out has ratio 1
        and divergence 0, and no gradient; the others' share in the means stays what it was.

        Raises:
          ValueError: `kl` without `reference_velocities` [N, B, ...].
        """
        t = transitions
        log_probs = step_log_probs(self.sampler, velocities, t.latents, t.next_latents, t.sigmas, t.next_sigmas)
        if counts is not None:
            log_probs = jnp.where(counts, log_probs, t.log_probs)
            advantages = jnp.where(counts, advantages, 0.0)
        loss, metrics = grpo_loss(log_probs, t.log_probs, advantages, self.clip_range)
        kl = jnp.zeros((), jnp.float32)
        if self.kl is not None:
            if reference_velocities is None:
                raise ValueError(f"kl {self.kl!r} needs reference_velocities [N, B, ...]; none were given")
            divergence = jax.vmap(partial(kl_to_reference, self.kl, self.sampler))
            divergences = divergence(velocities, reference_velocities, t.latents, t.sigmas, t.next_sigmas)
            kl = jnp.mean(divergences if counts is None else jnp.where(counts, divergences, 0.0))
        loss = loss + self.kl_weight * kl
        return loss, ({**metrics, "loss": loss, "kl": kl}, log_probs - t.log_probs)


def policy_gradient(
    velocity_fn,
    params: Any,
    transitions: Transitions,
    advantages: jax.Array,
    *cond: Any,
    objective: Objective,
    plan: BackwardPlan,
    reference_velocities: jax.Array | None = None,
    use_cached: bool = False,
    batch_anchors: int | None = None,
    num_micro_batches: int = 1,
) -> tuple[Any, dict[str, jax.Array]]:
    """Gradient of the objective with respect to `params`, by the plan, summed over micro-batches.

    Args:
      velocity_fn: `velocity_fn(params, latents [B, ...], sigma [B], *cond) -> velocity [B, ...]`.
      params: pytree of floating-point arrays.
      transitions: N steps of B samples.
      advantages: float32 [B].
      *cond: pytrees of arrays [B, ...].
      objective: the loss.
      plan: a plan for N steps.
      reference_velocities: [N, B, ...], the reference model's, when the objective has a `kl`.
      use_cached: reuse `transitions.velocities`; right only while `params` are those of the rollout, that is in the
        first update after it. The ratio is then exactly 1.
      batch_anchors: how many anchors one VJP stacks; see `backward.planned_vjp`.
      num_micro_batches: how many parts the batch is cut into; must divide B. The gradient does not depend on it.

    A sample whose transitions or reference velocities are not all finite takes no part: as if its advantage and its
    divergence were 0. The means are still over all B.

    Returns:
      The gradient, like `params`, and metrics over the whole batch: those of `grpo_loss`; `loss` and `kl`;
      `ratio_q01`, `ratio_q50` and `ratio_q99`, quantiles over all steps and samples; `masked_samples`, how many took
      no part; `log_prob_change`, float32 [K]: for each anchor the largest |log-probability by this program's own
      forward - stored one| of a sample. In the first update after a rollout it is what another program, or a lower
      precision, makes of the same parameters, which the ratio of cached velocities can't show.

    Raises:
      ValueError: `use_cached` without stored velocities, or micro-batches that don't divide the batch.
    """
    batch = advantages.shape[0]
    if use_cached and transitions.velocities is None:
        raise ValueError("use_cached needs transitions.velocities; roll out with keep_velocities=True")
    if num_micro_batches < 1 or batch % num_micro_batches:
        raise ValueError(f"num_micro_batches is {num_micro_batches}; it must divide the batch of {batch}")

    counts = finite_samples(transitions, reference_velocities)
    transitions, reference_velocities = _zero_unless(counts, transitions, reference_velocities)

    def micro_gradient(part):
        part_transitions, part_reference, part_advantages, part_counts, part_cond = part
        velocities, pull_back = anchored_vjp(
            velocity_fn,
            params,
            part_transitions.latents.astype(jnp.float32),
            part_transitions.sigmas,
            *part_cond,
            plan=plan,
            cached=part_transitions.velocities if use_cached else None,
            batch_anchors=batch_anchors,
        )
        loss_fn = jax.value_and_grad(objective, has_aux=True)
        (_, (metrics, log_ratios)), cotangents = loss_fn(
            velocities, part_transitions, part_advantages, part_reference, part_counts
        )
        gradient, anchor_velocities = pull_back(cotangents)
        changes = _log_prob_changes(objective.sampler, anchor_velocities, part_transitions, plan.anchors)
        metrics["log_prob_change"] = jnp.max(jnp.where(part_counts, changes, 0.0), axis=1)
        return gradient, (metrics, log_ratios)

    parts = _split_batch(transitions, reference_velocities, advantages, counts, cond, num_micro_batches)
    if num_micro_batches == 1:
        gradient, (metrics, log_ratios) = micro_gradient(jax.tree.map(lambda x: x[0], parts))
    else:

        def accumulate(total, part):
            gradient, measured = micro_gradient(part)
            return jax.tree.map(lambda t, g: t + g.astype(jnp.float32) / num_micro_batches, total, gradient), measured

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, jnp.float32), params)
        gradient, (metrics, log_ratios) = jax.lax.scan(accumulate, zeros, parts)
        gradient = jax.tree.map(lambda g, p: g.astype(p.dtype), gradient, params)
        largest = ("ratio_max_deviation", "log_prob_change")
        metrics = {name: (jnp.max if name in largest else jnp.mean)(x, axis=0) for name, x in metrics.items()}
    return gradient, {**metrics, **ratio_quantiles(log_ratios), "masked_samples": jnp.sum(~counts)}


def apply_gradient(
    state: TrainState,
    gradient: Any,
    optimizer: optax.GradientTransformation,
    loss: jax.Array,
    ema_decay: float = 0.0,
) -> tuple[TrainState, dict[str, jax.Array]]:
    """The next state, or, when the loss or a gradient is not finite, the same one with the skip counted.

    Args:
      state: the current state.
      gradient: like `state.params`.
      optimizer: the Optax transformation whose state `state.opt_state` is.
      loss: scalar.
      ema_decay: of the average kept in `state.ema_params`, if there is one.

    Returns:
      The new state and the metrics `grad_norm` (before any clipping in the optimiser) and `skipped` (0 or 1).
    """
    grad_norm = optax.tree.norm(jax.tree.map(lambda g: g.astype(jnp.float32), gradient))
    finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss)
    # Optax's Adam raises a float to an integer power, which strict promotion refuses
    with jax.numpy_dtype_promotion("standard"):
        changes, opt_state = optimizer.update(gradient, state.opt_state, state.params)
    params = optax.apply_updates(state.params, changes)
    ema_params = state.ema_params
    if ema_params is not None:
        ema_params = optax.incremental_update(params, ema_params, step_size=1.0 - ema_decay)
    applied = TrainState(params, opt_state, ema_params, state.updates + 1, state.skipped, jnp.zeros((), jnp.int32))
    unchanged = dataclasses.replace(state, skipped=state.skipped + 1, skipped_in_a_row=state.skipped_in_a_row + 1)
    new_state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), applied, unchanged)
    return new_state, {"grad_norm": grad_norm, "skipped": 1 - finite.astype(jnp.int32)}


def _zero_unless(counts: jax.Array, transitions: Transitions, reference_velocities: jax.Array | None):
    """Both with zeros for all numbers of the samples that `counts` leaves out, so that the model stays finite there."""

    def clean(x: jax.Array | None) -> jax.Array | None:
        return None if x is None else jnp.where(counts.reshape(1, -1, *(1,) * (x.ndim - 2)), x, jnp.zeros((), x.dtype))

    t = transitions
    cleaned = dataclasses.replace(
        t,
        latents=clean(t.latents),
        next_latents=clean(t.next_latents),
        log_probs=clean(t.log_probs),
        velocities=clean(t.velocities),
    )
    return cleaned, clean(reference_velocities)


def _log_prob_changes(sampler: Sampler, velocities: jax.Array, transitions: Transitions, steps: jax.Array) -> jax.Array:
    """|log-probability by `velocities` [K, B, ...] - stored one| at K steps, float32 [K, B]."""
    t = transitions
    of_steps = (t.latents[steps], t.next_latents[steps], t.sigmas[steps], t.next_sigmas[steps])
    return jnp.abs(step_log_probs(sampler, velocities, *of_steps) - t.log_probs[steps])


def _split_batch(transitions, reference_velocities, advantages, counts, cond, num_parts: int):
    """All of them cut by `split_batch`."""
    split = partial(split_batch, num_parts=num_parts)

    def repeat(x):
        return jnp.broadcast_to(x, (num_parts, *x.shape))

    t = transitions
    parts = Transitions(
        latents=split(t.latents, 1),
        next_latents=split(t.next_latents, 1),
        sigmas=repeat(t.sigmas),
        next_sigmas=repeat(t.next_sigmas),
        log_probs=split(t.log_probs, 1),
        velocities=None if t.velocities is None else split(t.velocities, 1),
    )
    reference_velocities = None if reference_velocities is None else split(reference_velocities, 1)
    cond = jax.tree.map(lambda x: split(x, 0), cond)
    return parts, reference_velocities, split(advantages, 0), split(counts, 0), cond
