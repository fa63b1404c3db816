"""The printed plan of a run agrees with the run."""

import dataclasses
import math
import os
import subprocess

import jax
import pytest
from commands import command_line

import configs
from jagg_jax.prompts import get_task
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.dry_run import dry_run, flops, geometry, trace
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
    assert sizes["trained parameters"] == sum(held) < 0.4 * whole
    assert sizes["optimiser state"] >= 2 * sizes["trained parameters"]
    assert sizes["first update: temporary"] > 0
    assert report["seconds to compile"].keys() == {"rollout", "first update"}
    assert all(seconds > 0 for seconds in report["seconds to compile"].values())
    counted = report["model FLOPs"]
    forward, both = counted["one forward pass of the batch"], counted["one forward and backward pass of the batch"]
    # the MLP alone: 15 tokens of each of 16 samples through 32 x 128 and 128 x 32
    assert forward > 2 * 16 * 15 * 2 * 32 * 128
    assert counted["rollout"] == 5 * forward
    assert counted["first update"] == 2 * both
    assert counted["later update"] == 2 * both + 2 * forward
    image = counted["one image, drawn and learned from"]
    assert 16 * image == counted["rollout"] + counted["first update"] + counted["later update"]
    # nothing is recomputed; the programs hold the plan's weighting of four steps' cotangents by two columns besides
    weighting = 2 * 4 * 2 * 16 * math.prod(get_task("digits").image_shape)
    for update in ("first update", "later update"):
        assert counted[f"{update} with what it recomputes"] == counted[update] + weighting


@pytest.mark.parametrize(
    ("changes", "first", "later"),
    [
        # block by block, the forward pass is made again; in chunks, a later update's anchors have one of their own
        ({"remat": "full"}, (0.7, 1.0), (0.7, 1.0)),
        ({"batch_anchors": 1}, (0.0, 0.0), (1.0, 1.0)),
        ({"batch_anchors": 1, "remat": "full"}, (0.7, 1.0), (1.7, 2.0)),
    ],
)
def test_what_is_recomputed(tiny, changes, first, later):
    """In forward passes an anchor, least and most; how often that is printed as forward passes agrees."""
    config = TrainConfig(**tiny | {"updates_per_rollout": 3, **changes})
    experiment = build_experiment(config)
    numbers, counted = geometry(experiment), flops(experiment, trace(experiment))
    weighting = 2 * 4 * 2 * 16 * math.prod(experiment.pipeline.latent_shape)
    for update, (least, most) in (("first update", first), ("later update", later)):
        again = counted[f"{update} with what it recomputes"] - counted[update] - weighting
        assert least <= again / (2 * counted["one forward pass of the batch"]) <= most
    assert numbers["forward passes in the first update"] == 2
    assert numbers["forward passes in a later update"] == (6 if "batch_anchors" in changes else 4)


def test_the_whole_of_stable_diffusion_35_is_compiled_without_its_weights():
    """The published sizes with all 24 blocks; only the batch is small, so that the test is short."""
    changes = {"batch_size": 32, "num_generations": 4, "micro_batch_size": 8, "image_size": 256}
    report = dry_run(dataclasses.replace(configs.load("sd35_medium_jagg"), **changes))
    numbers, sizes = report["geometry"], report["bytes a device"]
    assert numbers["frozen parameters"] == 2_243_171_520  # those of diffusers' model, see test_sd3_size
    assert numbers["adapted matrices"] == 24 * 8 - 1  # the last block's text has no output
    assert numbers["anchors (backward passes an update)"] == 5
    assert sizes["frozen parameters"] < 1.01 * 2 * 2_243_171_520 / 8


def test_shares_and_windows(tiny):
    config = TrainConfig(**tiny | {"num_steps": 9, "train_steps": "50%", "train_window": "random", "plan": "exact"})
    numbers = geometry(build_experiment(config))
    assert numbers["trained steps"] == numbers["anchors (backward passes an update)"] == 4
    assert numbers["windows of trained steps to draw from"] == 5


def test_the_command_prints_and_writes_nothing(tiny, tmp_path):
    run_dir = tmp_path / "run"
    command = [*command_line(tiny, run_dir), "--dry-run"]
    shown = subprocess.run(command, check=True, capture_output=True, text=True, env=os.environ | {"COLUMNS": "120"})
    assert "anchors (backward passes an update)" in shown.stdout
    assert not run_dir.exists()
    assert read_metrics(run_dir) == []
