"""The printed plan of a run agrees with the run."""

import os
import subprocess

import jax
from commands import command_line

from jagg_jax.training.config import TrainConfig
from jagg_jax.training.dry_run import dry_run
from jagg_jax.training.experiment import build_experiment
from jagg_jax.training.metrics import read_metrics


def test_geometry_bytes_and_flops(tiny):
    config = TrainConfig(**tiny | {"updates_per_rollout": 2, "data": 2, "fsdp": 4, "fsdp_min_size": 1})
    report = dry_run(config)
    geometry = report["geometry"]
    assert (geometry["mesh data"], geometry["mesh fsdp"], geometry["mesh tensor"]) == (2, 4, 1)
    assert geometry["prompts a rollout"] == 4
    assert geometry["micro-batches an update"] == 2
    assert geometry["anchors (backward passes an update)"] == 2
    assert geometry["forward passes in the first update"] == 2
    assert geometry["forward passes in a later update"] == 4

    state = build_experiment(config).initial_state()
    first = jax.devices()[0]
    held = [s.data.nbytes for x in jax.tree.leaves(state.params) for s in x.addressable_shards if s.device == first]
    whole = sum(x.nbytes for x in jax.tree.leaves(state.params))
    sizes = report["bytes a device"]
    assert sizes["parameters"] == sum(held) < 0.4 * whole
    assert sizes["optimiser state"] >= 2 * sizes["parameters"]
    assert sizes["update: temporary"] > 0
    flops = report["model FLOPs"]
    assert flops["rollout"] == 5 * flops["one forward pass of the batch"]
    # the MLP alone: 15 tokens of each of 16 samples through 32 x 128 and 128 x 32
    assert flops["one forward pass of the batch"] > 2 * 16 * 15 * 2 * 32 * 128


def test_the_command_prints_and_writes_nothing(tiny, tmp_path):
    run_dir = tmp_path / "run"
    command = [*command_line(tiny, run_dir), "--dry-run"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"})
    assert "anchors (backward passes an update)" in shown.stdout
    assert not run_dir.exists()
    assert read_metrics(run_dir) == []
