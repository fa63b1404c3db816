"""What a run would do and need, without running it: geometry, bytes a device, compiled memory, model FLOPs."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jagg_jax.training.config import TrainConfig, validate
from jagg_jax.training.experiment import Experiment, build_experiment
from jagg_jax.training.sharding import join_processes


def dry_run(config: TrainConfig) -> dict[str, dict[str, float]]:
    """Compiles the rollout and the update, prints what they are and need, and returns it; trains and writes nothing.

    Returns:
      "geometry", "bytes a device" and "model FLOPs", each name -> number.

    Raises:
      ConfigError: settings that can't be used; nothing has been compiled.
    """
    validate(config)
    join_processes(config.distributed, config.coordinator, config.num_processes, config.process_id)
    experiment = build_experiment(config)
    report = {"geometry": geometry(experiment)} | measure(experiment)
    if jax.process_index() == 0:
        for title, values in report.items():
            table = Table("", "", title=title, show_header=False, title_justify="left")
            for name, value in values.items():
                table.add_row(name, f"{value:,.0f}")
            Console().print(table)
    return report


def geometry(experiment: Experiment) -> dict[str, int]:
    """How often what happens, for one rollout and the updates after it."""
    config, plan = experiment.config, experiment.plan(1)
    later = config.updates_per_rollout - 1
    interior = config.train_steps - plan.num_anchors
    return {
        **{f"mesh {name}": size for name, size in experiment.mesh.shape.items()},
        "processes": jax.process_count(),
        "prompts a rollout": config.batch_size // config.num_generations,
        "generations a prompt": config.num_generations,
        "samples a rollout (global batch)": config.batch_size,
        "micro-batches an update": config.batch_size // config.micro_batch_size,
        "optimiser updates a rollout": config.updates_per_rollout,
        "denoising steps a rollout": config.num_steps,
        "trained steps": config.train_steps,
        "anchors (backward passes an update)": plan.num_anchors,
        "forward passes in the first update": plan.num_anchors,
        "forward passes in a later update": _later_forwards(config, plan.num_anchors, interior) if later else 0,
    }


def measure(experiment: Experiment) -> dict[str, dict[str, float]]:
    """Bytes of the state and of the compiled programs on each device, and the model's FLOPs on all of them."""
    config, task = experiment.config, experiment.task
    state = jax.eval_shape(experiment.create_state, experiment.initial_params)
    placed = experiment.create_state.lower(experiment.initial_params).compile().output_shardings
    tokens = jax.ShapeDtypeStruct((config.batch_size, task.prompt_length), jnp.int32)
    reference = experiment.initial_params if config.kl != "none" else None
    rolling = (state.params, reference, np.int32(1), tokens)
    _, transitions, reference_velocities = jax.eval_shape(experiment.roll_out, *rolling)
    advantages = jax.ShapeDtypeStruct((config.batch_size,), jnp.float32)
    plan = experiment.plan(1)
    updating = (state, transitions, advantages, tokens, plan, reference_velocities, True)
    programs = {"rollout": experiment.roll_out.lower(*rolling), "update": experiment.update.lower(*updating)}
    sizes = {
        "parameters": _bytes_a_device(state.params, placed.params),
        "optimiser state": _bytes_a_device(state.opt_state, placed.opt_state),
        "averaged parameters": _bytes_a_device(state.ema_params, placed.ema_params),
    }
    for name, program in programs.items():
        memory = program.compile().memory_analysis()
        sizes[f"{name}: arguments"] = memory.argument_size_in_bytes
        sizes[f"{name}: temporary"] = memory.temp_size_in_bytes
    evaluations = 1 if config.guidance == 1.0 else 2
    forward = evaluations * _forward_flops(experiment)
    flops = {
        "one forward pass of the batch": forward,
        "rollout": config.num_steps * forward,
        # a backward pass costs two forward passes, a rematerialised one a third
        "first update": plan.num_anchors * forward * (4 if config.remat else 3),
    }
    return {"bytes a device": sizes, "model FLOPs": flops}


def _later_forwards(config: TrainConfig, anchors: int, interior: int) -> int:
    """With fewer anchors stacked than there are, all velocities come from a forward of their own."""
    chunked = config.batch_anchors is not None and config.batch_anchors < anchors
    return 2 * anchors + interior if chunked else anchors + interior


def _bytes_a_device(tree: Any, shardings: Any) -> int:
    """Bytes of the parts that one device holds."""
    parts = jax.tree.map(lambda array, sharding: sharding.shard_shape(array.shape), tree, shardings)
    sizes = jax.tree.map(lambda array, shape: math.prod(shape) * array.dtype.itemsize, tree, parts)
    return sum(jax.tree.leaves(sizes))


def _forward_flops(experiment: Experiment) -> float:
    """FLOPs of one evaluation of the model on the whole batch, as XLA counts them before optimisation."""
    config, task = experiment.config, experiment.task
    shapes = [((config.batch_size, *task.image_shape), jnp.float32), ((config.batch_size,), jnp.float32)]
    shapes.append(((config.batch_size, task.prompt_length), jnp.int32))
    arguments = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in shapes]
    return jax.jit(experiment.velocity_fn).lower(experiment.initial_params, *arguments).cost_analysis()["flops"]
