"""What a run would do and need, without running it: geometry, bytes a device, compiled memory, model FLOPs."""

import dataclasses
import math
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jagg_jax.models import count_parameters
from jagg_jax.training.config import TrainConfig, validate
from jagg_jax.training.experiment import Experiment, build_experiment
from jagg_jax.training.flops import condition_shapes, model_flops, program_flops
from jagg_jax.training.sharding import join_processes


def dry_run(config: TrainConfig) -> dict[str, dict[str, float]]:
    """Compiles the rollout and the update, prints what they are and need, and returns it; trains and writes nothing.

    Returns:
      "geometry", "bytes a device", "seconds to compile" and "model FLOPs", each name -> number.

    Raises:
      ConfigError: settings that can't be used; nothing has been compiled.
    """
    config = dataclasses.replace(config, dry_run=True)
    validate(config)
    join_processes(config.distributed, config.coordinator, config.num_processes, config.process_id)
    experiment = build_experiment(config)
    programs = trace(experiment)
    compiled, seconds = _compile({name: programs[name] for name in ("rollout", "first update")})
    report = {
        "geometry": geometry(experiment),
        "bytes a device": memory(experiment, compiled),
        "seconds to compile": seconds,
        "model FLOPs": flops(experiment, programs),
    }
    if jax.process_index() == 0:
        for title, values in report.items():
            table = Table("", "", title=title, show_header=False, title_justify="left")
            for name, value in values.items():
                table.add_row(name, f"{value:,.{1 if title.startswith('seconds') else 0}f}")
            Console().print(table)
    return report


def geometry(experiment: Experiment) -> dict[str, int]:
    """How often what happens, for one rollout and the updates after it."""
    config, plan = experiment.config, experiment.plan(1)
    later = config.updates_per_rollout - 1
    interior = plan.num_steps - plan.num_anchors
    windows = config.num_steps - plan.num_steps if config.train_window == "random" else 1
    return {
        **{f"mesh {name}": size for name, size in experiment.mesh.shape.items()},
        "processes": jax.process_count(),
        "trained parameters": count_parameters(experiment.initial_trained),
        "frozen parameters": count_parameters(experiment.frozen),
        "adapted matrices": experiment.pipeline.num_adapted,
        "prompts a rollout": config.batch_size // config.num_generations,
        "generations a prompt": config.num_generations,
        "samples a rollout (global batch)": config.batch_size,
        "micro-batches an update": config.batch_size // config.micro_batch_size,
        "optimiser updates a rollout": config.updates_per_rollout,
        "denoising steps a rollout": config.num_steps,
        "trained steps": plan.num_steps,
        "windows of trained steps to draw from": windows,
        "anchors (backward passes an update)": plan.num_anchors,
        "forward passes in the first update": plan.num_anchors,
        "forward passes in a later update": _later_forwards(config, plan.num_anchors, interior) if later else 0,
    }


def trace(experiment: Experiment) -> dict[str, jax.stages.Traced]:
    """The programs "rollout", "first update" and, where there is one, "later update", traced on abstract arguments."""
    config = experiment.config
    state = jax.eval_shape(experiment.create_state, experiment.initial_trained)
    conditions = condition_shapes(experiment)
    reference = experiment.initial_params if config.kl != "none" else None
    rolling = (experiment.whole(state.params), reference, np.int32(1), conditions)
    _, transitions, reference_velocities = jax.eval_shape(experiment.roll_out, *rolling)
    advantages = jax.ShapeDtypeStruct((config.batch_size,), jnp.float32)
    plan = experiment.plan(1)
    updating = (state, experiment.frozen, transitions, advantages, conditions, plan, reference_velocities)
    updates = {"first update": True} | ({"later update": False} if config.updates_per_rollout > 1 else {})
    traced = {name: experiment.update.trace(*updating, first) for name, first in updates.items()}
    return {"rollout": experiment.roll_out.trace(*rolling)} | traced


def memory(experiment: Experiment, programs: dict[str, jax.stages.Compiled]) -> dict[str, int]:
    """Bytes of the state and of the compiled programs on each device."""
    state = jax.eval_shape(experiment.create_state, experiment.initial_trained)
    placed = experiment.create_state.lower(experiment.initial_trained).compile().output_shardings
    sizes = {
        "trained parameters": _bytes_a_device(state.params, placed.params),
        "frozen parameters": _bytes_a_device(experiment.frozen, jax.tree.map(lambda a: a.sharding, experiment.frozen)),
        "optimiser state": _bytes_a_device(state.opt_state, placed.opt_state),
        "averaged parameters": _bytes_a_device(state.ema_params, placed.ema_params),
    }
    for name, program in programs.items():
        needs = program.memory_analysis()
        sizes[f"{name}: arguments"] = needs.argument_size_in_bytes
        sizes[f"{name}: temporary"] = needs.temp_size_in_bytes
    return sizes


def flops(experiment: Experiment, programs: dict[str, jax.stages.Traced]) -> dict[str, float]:
    """Operations of the model on all devices, and of the updates' programs with all that they recompute."""
    config, plan, needed = experiment.config, experiment.plan(1), model_flops(experiment)
    first, later = needed.update(plan, first=True), needed.update(plan, first=False)
    rows = {
        "one forward pass of the batch": needed.forward,
        "one forward and backward pass of the batch": needed.linearised,
        "rollout": needed.rollout,
        "first update": first,
        "first update with what it recomputes": program_flops(programs["first update"].jaxpr),
    }
    if "later update" in programs:
        rows["later update"] = later
        rows["later update with what it recomputes"] = program_flops(programs["later update"].jaxpr)
    everything = needed.rollout + first + (config.updates_per_rollout - 1) * later
    return rows | {"one image, drawn and learned from": everything / config.batch_size}


def _compile(programs: dict[str, jax.stages.Traced]) -> tuple[dict[str, jax.stages.Compiled], dict[str, float]]:
    """The programs for the devices, and how long each took."""
    compiled, seconds = {}, {}
    for name, program in programs.items():
        started = time.perf_counter()
        compiled[name] = program.lower().compile()
        seconds[name] = time.perf_counter() - started
    return compiled, seconds


def _later_forwards(config: TrainConfig, anchors: int, interior: int) -> int:
    """With fewer anchors stacked than there are, all velocities come from a forward of their own."""
    chunked = config.batch_anchors is not None and config.batch_anchors < anchors
    return 2 * anchors + interior if chunked else anchors + interior


def _bytes_a_device(tree: Any, shardings: Any) -> int:
    """Bytes of the parts that one device holds."""
    parts = jax.tree.map(lambda array, sharding: sharding.shard_shape(array.shape), tree, shardings)
    sizes = jax.tree.map(lambda array, shape: math.prod(shape) * array.dtype.itemsize, tree, parts)
    return sum(jax.tree.leaves(sizes))
