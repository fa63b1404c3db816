"""From a diffusers folder and back: prompts encoded, three JAGG updates, resume, evaluation, export, the same image."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest
import torch
from commands import final_state
from diffusers import StableDiffusion3Pipeline
from sd3_pipeline import SAMPLE_SIZE, VAE_FACTOR, write_tiny_pipeline

from jagg_jax.prompts.cache import PromptCache
from jagg_jax.rollout import initial_noise
from jagg_jax.training.cli import main
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.draws import EVAL_KEYS, keys_for
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.evaluate import make_evaluator
from jagg_jax.training.experiment import build_experiment
from jagg_jax.training.loop import train
from jagg_jax.training.metrics import read_metrics
from jagg_jax.training.saved_run import RunChoice, load_run

PROMPTS = ["a cat", "cat on a mat", "two cats", "a fat cat", "the cat sat", "no cat at all", "cat"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_tiny_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def cache(folder, tmp_path_factory):
    place = tmp_path_factory.mktemp("prompts")
    (place / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    arguments = [
        "--prompts",
        place / "prompts.txt",
        "--model",
        folder,
        "--output",
        place / "cache",
        "--dtype",
        "float32",
    ]
    assert main(["encode_prompts", *map(str, arguments), "--max-length", "16"]) == 0
    return place / "cache"


@pytest.fixture(scope="module")
def settings(folder, cache) -> dict:
    return {
        "task": "prompt_cache", "weights": str(folder), "prompt_cache": str(cache), "image_size": 32, "shift": 3.0,
        "guidance": 2.0, "rewards": {"jpeg_compressibility": 1.0}, "eval_rewards": ("jpeg_compressibility",),
        "updates": 3, "batch_size": 16, "num_generations": 4, "micro_batch_size": 8, "num_steps": 5, "train_steps": 4,
        "eval_steps": 4, "eval_prompts": 2, "eval_every": 2, "sample_every": 0, "checkpoint_every": 1, "ema_decay": 0.5,
        "keep_checkpoints": 3, "kl": "flow_grpo", "kl_weight": 0.01, "learning_rate": 1e-2,
        "clip_low": 0.1, "clip_high": 0.1,
        "compute_dtype": "bfloat16", "remat": "full", "scan_layers": True, "fsdp": 4, "fsdp_min_size": 256, "tensor": 2,
        "lora_rank": 2, "lora_alpha": 4.0,
        "lora_targets": ("attn.to_q", "attn.to_out", "attn2.to_v", "image_mlp.mlp_in"),
    }  # fmt: skip


FULL = {"lora_rank": 0, "learning_rate": 1e-3}


@pytest.fixture(scope="module", params=["adapters", "full"])
def run(request, settings, tmp_path_factory):
    """A run of three updates, stopped and resumed after the second."""
    config = TrainConfig(**settings | (FULL if request.param == "full" else {}))
    run_dir = tmp_path_factory.mktemp(request.param) / "run"
    train(dataclasses.replace(config, updates=2, run_dir=str(run_dir)), "test")
    train(dataclasses.replace(config, run_dir=str(run_dir), resume=True), "test")
    return config, run_dir


def test_a_resumed_run_is_the_uninterrupted_one(run, tmp_path):
    config, run_dir = run
    train(dataclasses.replace(config, run_dir=str(tmp_path / "whole")), "test")
    for ours, theirs in zip(final_state(config, run_dir), final_state(config, tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    rows = [row for row in read_metrics(run_dir) if row["update"]]
    assert [row["update"] for row in rows] == [1, 2, 3]
    assert all(np.isfinite(row["reward_mean"]) and row["grad_norm"] > 0 for row in rows)
    assert all(row["ratio_max_deviation"] == 0 for row in rows)


def test_held_out_prompts_are_not_trained_on(settings):
    experiment = build_experiment(TrainConfig(**settings))
    drawn = {text for update in range(1, 6) for text in experiment.prompts(update)}
    assert drawn == set(PROMPTS[:-2])
    assert experiment.pipeline.eval_prompts.texts == tuple(PROMPTS[-2:])
    condition, null = experiment.conditions(1)
    rows = [PROMPTS.index(text) for text in experiment.prompts(1)]
    cache = PromptCache.open(settings["prompt_cache"])
    np.testing.assert_array_equal(condition.tokens, cache.rows(rows).tokens)
    np.testing.assert_array_equal(null.pooled, cache.negative.pooled)


def test_evaluate_and_sample(run, tmp_path):
    _, run_dir = run
    common = ["--run-dir", str(run_dir), "--steps", "2"]
    assert main(["evaluate", *common, "--output", str(tmp_path / "e.json")]) == 0
    assert json.loads((tmp_path / "e.json").read_text())["rewards"]["jpeg_compressibility"]["samples"] == 2
    assert main(["sample", *common, "--prompt", PROMPTS[0], PROMPTS[-1], "--output", str(tmp_path / "s.png")]) == 0
    assert main(["sample", *common, "--prompt", "a dog", "--output", str(tmp_path / "t.png")]) == 2


@pytest.mark.parametrize("guidance", [1.0, 2.5])
def test_diffusers_draws_the_same_image_from_what_is_exported(run, folder, tmp_path, guidance):
    config, run_dir = run
    assert main(["export", "--run-dir", str(run_dir), "--output", str(tmp_path / "out")]) == 0
    reference = StableDiffusion3Pipeline.from_pretrained(folder)
    if config.lora_rank:
        reference.load_lora_weights(tmp_path / "out")
    else:
        reference.transformer = type(reference.transformer).from_pretrained(tmp_path / "out")
    reference.set_progress_bar_config(disable=True)
    saved = load_run(RunChoice(run_dir=str(run_dir)), compute_dtype="float32", frozen_dtype="float32")
    experiment = saved.experiment
    source = experiment.pipeline.find_prompts(PROMPTS[:1])
    evaluator = make_evaluator(experiment, source, ("jpeg_compressibility",), steps=6, guidance=guidance)
    ours = evaluator.images(saved.params)[0]
    base = evaluator.images(experiment.initial_params)[0]

    keys = jax.vmap(jax.random.fold_in, (None, 0))(keys_for(0, EVAL_KEYS), np.arange(1))
    noise = np.asarray(initial_noise(keys, experiment.pipeline.latent_shape)).transpose(0, 3, 1, 2)
    drawn = reference(
        PROMPTS[0], num_inference_steps=6, guidance_scale=guidance, height=SAMPLE_SIZE * VAE_FACTOR,
        width=SAMPLE_SIZE * VAE_FACTOR, latents=torch.tensor(noise), output_type="np", max_sequence_length=16,
        sigmas=list(np.linspace(1, 1 / 6, 6)),
    ).images[0]  # fmt: skip
    np.testing.assert_allclose(ours, drawn, rtol=0, atol=1e-3)
    assert np.abs(ours - base).max() > 5e-3  # training has changed the picture


def test_what_does_not_fit_is_refused(settings, tmp_path):
    changes = {
        "image_size": (30, "--image-size 30: must be a multiple of 8, at most 96"),
        "tensor": (3, "--data -1: mesh"),
        "eval_prompts": (7, "--eval-prompts 7: must be at most 6"),
        "task": ("digits", "set --task prompt_cache"),
        "prompt_cache": (str(tmp_path), "is no prompt cache"),
        "rewards": ({"ocr_edit": 1.0}, "--rewards ocr_edit: the text readers need prompts over a known alphabet"),
        "lora_targets": (("attn.to_x",), "--lora-targets attn.to_x: the model has no such linear map"),
    }
    for field, (value, message) in changes.items():
        with pytest.raises(ConfigError) as caught:
            train(TrainConfig(**settings | {field: value, "run_dir": str(tmp_path / "run")}), "test")
        assert message in str(caught.value), field
        assert not (tmp_path / "run").exists()


def test_another_folder_is_not_the_same_run(run, tmp_path, capsys):
    _, run_dir = run
    moved = shutil.copytree(run_dir, tmp_path / "run")
    content = json.loads((moved / "config.json").read_text())
    content["weights_sha256"] = "0" * 64
    (moved / "config.json").write_text(json.dumps(content))
    assert main(["evaluate", "--run-dir", str(moved)]) == 2
    assert "is not what the run was started with" in capsys.readouterr().err
