"""Floating-point operations of a model, counted in its program, and the peak of the devices that run it.

Counted are matrix products and convolutions, two operations a multiply-add; everything else is small beside them and no
peak is about it. `cost_analysis()` of a compiled program is no help: it counts the body of a loop once.
"""

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr

from jagg_jax.flow import with_guidance
from jagg_jax.models import merge_params
from jagg_jax.plans import BackwardPlan
from jagg_jax.training.experiment import Experiment

# Dense bfloat16 peaks, operations a second, of one device as JAX counts them. Sources: Google Cloud's TPU system
# architecture pages (v4, v5e, v5p, v6e); NVIDIA's data sheets of the A100, the H100 (SXM) and the H200 (SXM), without
# sparsity. Other forms of these GPUs, such as PCIe and NVL cards, have other peaks and are not listed.
PEAKS = {
    r"TPU v4": 275e12,
    r"TPU (v5 lite|v5e)": 197e12,
    r"TPU (v5|v5p)": 459e12,
    r"TPU (v6 lite|v6e)": 918e12,
    r"(NVIDIA )?A100(-| )(SXM4|PCIE|80GB|40GB)(-| )?(80GB|40GB|PCIe)?": 312e12,
    r"(NVIDIA )?H100( SXM5?)?( \d+GB)?( HBM\d\w?)": 989e12,
    r"(NVIDIA )?H200( SXM5?)?( \d+GB)?( HBM\d\w?)?": 989e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 operations a second of a device, by its `device_kind`; None where the table doesn't know it."""
    peaks = [peak for pattern, peak in PEAKS.items() if re.fullmatch(pattern, device_kind.strip(), re.IGNORECASE)]
    return peaks[0] if peaks else None


def count_flops(function: Callable, *arguments: Any) -> int:
    """Operations of one call, by the shapes of its arguments (arrays or `jax.ShapeDtypeStruct`); runs nothing."""
    return program_flops(jax.make_jaxpr(function)(*arguments))


def program_flops(program: ClosedJaxpr | Jaxpr) -> int:
    """Operations of a traced program: the matrix products and convolutions in it and in all that it calls.

    The body of a `scan` counts once a step, that of a `shard_map` once a device, and of a `cond` the most expensive
    branch. The number of rounds of a `while` is not in the program: its body counts once. A kernel written in Pallas or
    called from a library is not looked into.
    """
    total = 0
    for equation in program.eqns:
        name, parameters = equation.primitive.name, equation.params
        if name == "dot_general":
            total += _product_flops(equation)
        elif name == "conv_general_dilated":
            total += _convolution_flops(equation)
        elif name == "cond":
            total += max(program_flops(branch) for branch in parameters["branches"])
        elif name != "pallas_call":
            calls = sum(program_flops(inner) for inner in _programs_in(tuple(parameters.values())))
            total += calls * _repetitions(name, parameters)
    return total


@dataclasses.dataclass(frozen=True)
class ModelFlops:
    """What training needs of the model, for the whole batch on all devices; nothing is recomputed in this count.

    Attributes:
      forward: one evaluation; with guidance the conditional one and the other, what they share once.
      linearised: one evaluation and its backward pass to the trained parameters.
      num_steps: evaluations in a rollout, those of the reference included.
    """

    forward: int
    linearised: int
    num_steps: int

    @property
    def rollout(self) -> int:
        """Operations of one rollout."""
        return self.num_steps * self.forward

    def update(self, plan: BackwardPlan, first: bool) -> int:
        """Operations of one optimiser update; the first one on a rollout knows its interior velocities."""
        interior = 0 if first else plan.num_steps - plan.num_anchors
        return plan.num_anchors * self.linearised + interior * self.forward


def model_flops(experiment: Experiment) -> ModelFlops:
    """Counts the experiment's model, traced on the shapes of a training batch."""
    config, pipeline = experiment.config, experiment.pipeline
    velocity_fn = with_guidance(pipeline.velocity_fn, config.guidance)
    batch = config.batch_size
    latents = jax.ShapeDtypeStruct((batch, *pipeline.latent_shape), jnp.float32)
    sigma = jax.ShapeDtypeStruct((batch,), jnp.float32)
    condition, _ = condition_shapes(experiment)
    trained = experiment.initial_trained

    def evaluate(trained, frozen, *inputs):
        return velocity_fn(merge_params(frozen, trained), *inputs)

    def linearise(trained, tangents, *inputs):
        # a transposed map has the products of the linear one: a forward-mode derivative costs what a backward pass
        # does, and repeats nothing where the backward pass would recompute activations
        return jax.jvp(lambda p: evaluate(p, *inputs), (trained,), (tangents,))

    inputs = (experiment.frozen, latents, sigma, condition, condition)
    return ModelFlops(
        forward=count_flops(evaluate, trained, *inputs),
        linearised=count_flops(linearise, trained, trained, *inputs),
        num_steps=config.num_steps + (0 if config.kl == "none" else config.num_train_steps),
    )


def condition_shapes(experiment: Experiment) -> tuple[Any, Any]:
    """What `Experiment.conditions` returns, as `jax.ShapeDtypeStruct`s; reads no prompt."""
    batch, null = experiment.config.batch_size, experiment.null_condition
    condition = jax.tree.map(lambda array: jax.ShapeDtypeStruct((batch, *array.shape[1:]), array.dtype), null)
    return condition, null


def _product_flops(equation: Any) -> int:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left, output = equation.invars[0].aval, equation.outvars[0].aval
    return 2 * math.prod(output.shape) * math.prod(left.shape[axis] for axis in contracted)


def _convolution_flops(equation: Any) -> int:
    """Positions that a padded border leaves without a value count like the others."""
    kernel, output = equation.invars[1].aval, equation.outvars[0].aval
    output_features = kernel.shape[equation.params["dimension_numbers"].rhs_spec[0]]
    return 2 * math.prod(output.shape) * math.prod(kernel.shape) // output_features


def _repetitions(name: str, parameters: dict[str, Any]) -> int:
    if name == "scan":
        return parameters["length"]
    return parameters["mesh"].size if name == "shard_map" else 1


def _programs_in(value: Any) -> Iterator[Jaxpr | ClosedJaxpr]:
    if isinstance(value, Jaxpr | ClosedJaxpr):
        yield value
    elif isinstance(value, tuple | list):
        for item in value:
            yield from _programs_in(item)
