"""JAGG for JAX: GRPO on flow-matching and diffusion transformers at two backward passes a group of steps.

These names are the public contract and need nothing but JAX. Models, rewards, prompts and the trainer are subpackages,
imported only where they are used.
"""

from jagg_jax.backward import first_order_velocities, jagg_velocities, jagg_vjp, planned_velocities, planned_vjp
from jagg_jax.flow import CPS, ODE, DanceSDE, FlowSDE, dynamic_shift, flow_sigmas, with_guidance
from jagg_jax.grpo import group_advantages, grpo_loss, kl_to_reference
from jagg_jax.plans import (
    BackwardPlan,
    anchor_plan,
    debiased_plan,
    exact_plan,
    hat_plan,
    index_alphas,
    jagg_plan,
    sigma_alphas,
    subset_plan,
)
from jagg_jax.rollout import Trajectory, Transitions, initial_noise, rollout

__all__ = [
    "CPS",
    "ODE",
    "BackwardPlan",
    "DanceSDE",
    "FlowSDE",
    "Trajectory",
    "Transitions",
    "anchor_plan",
    "debiased_plan",
    "dynamic_shift",
    "exact_plan",
    "first_order_velocities",
    "flow_sigmas",
    "group_advantages",
    "grpo_loss",
    "hat_plan",
    "index_alphas",
    "initial_noise",
    "jagg_plan",
    "jagg_velocities",
    "jagg_vjp",
    "kl_to_reference",
    "planned_velocities",
    "planned_vjp",
    "rollout",
    "sigma_alphas",
    "subset_plan",
    "with_guidance",
]
