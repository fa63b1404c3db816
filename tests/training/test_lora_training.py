"""Training adapters alone: what is stored, what stays put, and the base as the reference with adapters off."""

import json
import shutil
from pathlib import Path

import chex
import jax
import numpy as np
import pytest

from jagg_jax.models import count_parameters, load_model, split_adapters
from jagg_jax.training.checkpoint import CHECKPOINTS_DIR, Checkpoints
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.evaluate import EvaluateConfig, evaluate
from jagg_jax.training.experiment import build_experiment
from jagg_jax.training.loop import train
from jagg_jax.training.metrics import read_metrics

LORA = {"lora_rank": 2, "lora_alpha": 8.0, "lora_targets": ("qkv", "mlp_out"), "kl": "exact", "kl_weight": 0.1}


@pytest.fixture(scope="module")
def settings(tiny):
    return tiny | LORA | {"scan_layers": True, "remat": "full", "updates": 3, "learning_rate": 1e-2}


@pytest.fixture(scope="module")
def run(settings, tmp_path_factory):
    run_dir = tmp_path_factory.mktemp("lora") / "run"
    return train(TrainConfig(**settings, run_dir=str(run_dir)), "quickstart")


def restored(settings, run_dir, update=None):
    experiment = build_experiment(TrainConfig(**settings))
    return experiment, Checkpoints(run_dir).restore(update, experiment.initial_state())


def test_adapters_alone_are_trained_and_stored(settings, run):
    experiment, state = restored(settings, run)
    expected = 2 * ((32 + 96) + (128 + 32))  # rank times the sides of two maps in one block
    for tree in (state.params, state.ema_params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        assert count_parameters(tree) == expected
    lora_b = state.params["blocks"]["attention"]["qkv"]["lora_b"]
    assert np.asarray(lora_b).any()
    assert {leaf.dtype for leaf in jax.tree.leaves(experiment.frozen)} == {jax.numpy.dtype("bfloat16")}


def test_a_checkpoint_grows_with_the_adapters(settings, tmp_path):
    sizes = {}
    rng = np.random.default_rng(0)
    for rank in (4, 32):
        state = build_experiment(TrainConfig(**settings | {"lora_rank": rank})).initial_state()
        state = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(leaf.dtype), state)  # incompressible
        with Checkpoints(tmp_path, keep=2) as checkpoints:
            checkpoints.save(rank, jax.device_put(state), {})
        files = (tmp_path / CHECKPOINTS_DIR / str(rank)).rglob("*")
        sizes[rank] = sum(path.stat().st_size for path in files if path.is_file()), 4 * count_parameters(state)
    stored, numbers = np.subtract(sizes[32], sizes[4])
    assert 0.8 * numbers < stored < 1.2 * numbers


def test_the_reference_is_the_base_with_adapters_off(settings, run):
    experiment, state = restored(settings, run)
    base = load_model(settings["weights"])
    inputs = (np.ones((2, 16, 48, 1), np.float32), np.array([0.3, 0.9], np.float32), np.ones((2, 3), np.int32))
    frozen = jax.tree.map(lambda leaf: leaf.astype("bfloat16"), base.params)
    off = experiment.pipeline.velocity_fn(experiment.initial_params, *inputs)
    np.testing.assert_allclose(off, base.velocity_fn(frozen, *inputs), rtol=1e-4, atol=1e-6)
    on = experiment.pipeline.velocity_fn(experiment.whole(state.params), *inputs)
    assert np.abs(np.asarray(on - off)).max() > 1e-4
    lines = read_metrics(run)
    assert lines[1]["kl"] == 0.0, "before the first update the model is its own reference"
    assert lines[3]["kl"] > 0.0
    assert all(line["ratio_max_deviation"] == 0.0 for line in lines[1:])


def test_resuming_adapters_is_bit_for_bit(settings, run, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    shutil.rmtree(copy / CHECKPOINTS_DIR / "3")
    train(TrainConfig(**settings, run_dir=str(copy), resume=True), "quickstart")
    chex.assert_trees_all_equal(restored(settings, copy, 3)[1], restored(settings, run, 3)[1])


def test_the_count_is_printed_and_evaluation_uses_the_adapters(settings, run, capsys):
    train(TrainConfig(**settings, run_dir=str(run), resume=True), "quickstart")
    assert "LoRA: 2 matrices adapted, 576 parameters trained" in capsys.readouterr().err
    evaluate(EvaluateConfig(run_dir=str(run), num_prompts=6, steps=3))
    measured = json.loads((run / "evaluation.json").read_text())["rewards"]["jpeg_compressibility"]["mean"]
    np.testing.assert_allclose(measured, read_metrics(run)[-1]["eval/jpeg_compressibility"], rtol=1e-5)


def test_a_run_is_refused_other_weights_than_its_own(settings, run, tiny_weights, tmp_path):
    """Adapters mean nothing on another base, which the checkpoint can't tell."""
    other = tmp_path / "other.safetensors"
    raw = bytearray(Path(tiny_weights).read_bytes())
    raw[-1] ^= 1
    other.write_bytes(raw)
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    content = json.loads((copy / "config.json").read_text())
    content["train"]["weights"] = str(other)
    (copy / "config.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=r"other.safetensors: is not what the run was started with"):
        evaluate(EvaluateConfig(run_dir=str(copy)))
    with pytest.raises(ConfigError, match=r"other.safetensors: is not what the run was started with"):
        train(TrainConfig(**settings | {"weights": str(other)}, run_dir=str(copy), resume=True), "quickstart")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lora_targets": ("qvk",)}, "--lora-targets qvk: the model has no such linear map"),
        ({"lora_rank": 99}, "--lora-rank 99: exceeds the smaller side"),
    ],
)
def test_adapters_that_dont_fit_the_model_are_named_as_typed(settings, changes, message):
    with pytest.raises(ConfigError, match=message):
        build_experiment(TrainConfig(**settings | changes))


def test_adapters_train_alike_on_every_mesh(settings):
    gradients = []
    for data, fsdp, tensor in ((1, 1, 1), (2, 2, 2)):
        changes = {"data": data, "fsdp": fsdp, "tensor": tensor, "fsdp_min_size": 1, "learning_rate": 1e-2}
        experiment = build_experiment(TrainConfig(**settings | changes), jax.devices()[: data * fsdp * tensor])
        state = experiment.initial_state()
        conditions = experiment.conditions(1)
        params = experiment.whole(state.params)
        _, transitions, reference = experiment.roll_out(params, experiment.initial_params, np.int32(1), conditions)
        rewards = np.sin(np.arange(16)).astype(np.float32)
        advantages, *_ = experiment.advantages(rewards, transitions, reference)
        arguments = (experiment.frozen, transitions, advantages, conditions, experiment.plan(1), reference, True)
        state, _ = experiment.update(state, *arguments)
        gradients.append(jax.device_get(state.opt_state[1][0].mu))
    flat = [np.concatenate([leaf.ravel() for leaf in jax.tree.leaves(gradient)]) for gradient in gradients]
    assert np.linalg.norm(flat[0] - flat[1]) <= 1e-5 * np.linalg.norm(flat[0])
    assert split_adapters(gradients[0])[0] == {}
