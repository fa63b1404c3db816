"""Runs that are really trained, stopped in every way there is, and resumed."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
from flax import nnx
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jagg_jax.models import DiT, DiTConfig, as_function, model_metadata, save_weights
from jagg_jax.prompts import get_task
from jagg_jax.training.checkpoint import Checkpoints
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.errors import ConfigError, TrainingError
from jagg_jax.training.experiment import build_experiment, evaluation_keys
from jagg_jax.training.loop import train
from jagg_jax.training.metrics import read_metrics

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def tiny_weights(tmp_path_factory) -> str:
    """A small random model whose output layer is not zero, so that rewards differ between samples."""
    task = get_task("digits")
    config = DiTConfig(
        image_shape=task.image_shape, vocab_size=task.vocab_size, prompt_length=task.prompt_length,
        patch_shape=(8, 8), width=32, depth=1, num_heads=2,
    )  # fmt: skip
    _, params = as_function(DiT(config, rngs=nnx.Rngs(0)))
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(params))))
    params = jax.tree.map(lambda p: p + 0.05 * jax.random.normal(next(keys), p.shape), params)
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    save_weights(path, params, model_metadata(config, "digits"))
    return str(path)


@pytest.fixture
def tiny(tiny_weights) -> dict:
    return {
        "weights": tiny_weights, "rewards": {"jpeg_compressibility": 1.0}, "eval_rewards": ("jpeg_compressibility",),
        "updates": 4, "batch_size": 8, "num_generations": 4, "micro_batch_size": 4, "num_steps": 5, "train_steps": 4,
        "eval_steps": 3, "eval_prompts": 6, "eval_every": 2, "sample_every": 2, "checkpoint_every": 1,
        "ema_decay": 0.5, "keep_checkpoints": 3,
    }  # fmt: skip


def command_line(settings: dict, run_dir: Path, *flags: str) -> list[str]:
    options = []
    for name, value in settings.items():
        if isinstance(value, dict):
            value = " ".join(f"{key}={weight}" for key, weight in value.items())
        elif isinstance(value, tuple):
            value = " ".join(value)
        options += [f"--{name.replace('_', '-')}", *str(value).split()]
    return [sys.executable, str(ROOT / "train.py"), *options, "--run-dir", str(run_dir), *flags]


def without_times(run_dir: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith("seconds")} for line in read_metrics(run_dir)]


def final_state(config: TrainConfig, run_dir: Path) -> list[np.ndarray]:
    like = build_experiment(config).initial_state()
    state = Checkpoints(run_dir).restore(config.updates, like)
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def test_a_run_leaves_everything_a_user_expects(tiny, tmp_path):
    run_dir = train(TrainConfig(**tiny, run_dir=str(tmp_path / "run")), "quickstart")
    lines = read_metrics(run_dir)
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(np.isfinite(line["eval/jpeg_compressibility"]) for line in (lines[0], lines[2], lines[4]))
    wanted = {
        "reward_mean", "reward_std", "reward/jpeg_compressibility", "zero_std_fraction", "ratio_max_deviation",
        "clip_fraction", "kl", "grad_norm", "loss", "learning_rate", "seconds_rollout", "seconds_reward",
        "seconds_update", "backward_passes", "plan", "skipped", "nonfinite_rewards",
    }  # fmt: skip
    for line in lines[1:]:
        assert wanted <= line.keys()
        assert line["ratio_max_deviation"] == 0.0
        assert line["backward_passes"] == 2
        assert line["grad_norm"] > 0
        assert line["skipped"] == 0
    assert json.loads((run_dir / "config.json").read_text())["train"]["batch_size"] == 8
    assert sorted(path.name for path in (run_dir / "samples").iterdir()) == ["000000.png", "000002.png", "000004.png"]
    assert Image.open(run_dir / "report.png").size[0] > 500
    assert Checkpoints(run_dir).steps() == [2, 3, 4]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward_mean")] == [1, 2, 3, 4]


def test_programs_compile_once(tiny):
    experiment = build_experiment(TrainConfig(**tiny, plan="subset", subset_steps=2))
    state = experiment.initial_state()
    for update in (1, 2, 3):
        tokens = experiment.task.encode(experiment.prompts(update))
        _, transitions, reference = experiment.roll_out(state.params, update, tokens)
        advantages = np.linspace(-1, 1, 8, dtype=np.float32)
        plan = experiment.plan(update)
        state, _ = experiment.update(state, transitions, advantages, tokens, plan, reference, use_cached=True)
    assert experiment.roll_out._cache_size() == 1
    assert experiment.update._cache_size() == 1


def test_later_updates_on_a_rollout_recompute(tiny, tmp_path):
    settings = tiny | {"updates": 1, "updates_per_rollout": 2, "learning_rate": 1e-2, "kl": "exact", "kl_weight": 0.1}
    (_, line) = read_metrics(train(TrainConfig(**settings, run_dir=str(tmp_path / "run")), "quickstart"))
    assert line["ratio_max_deviation/0"] == 0.0
    assert line["ratio_max_deviation/1"] > 0.0
    assert line["kl"] > 0.0
    assert line["backward_passes"] == 4


def test_prompts_cover_an_epoch_before_they_repeat(tiny):
    experiment = build_experiment(TrainConfig(**tiny))
    pool = experiment.task.prompts("train")
    per_update = 2
    epoch = [prompt for update in range(1, len(pool) // per_update + 1) for prompt in experiment.prompts(update)[::4]]
    assert sorted(epoch) == sorted(pool)
    assert experiment.prompts(1)[:4] == [experiment.prompts(1)[0]] * 4
    assert not set(pool) & set(experiment.task.prompts("eval"))


def test_evaluation_noise_is_fixed_and_not_that_of_training():
    assert (
        jax.random.key_data(evaluation_keys(0, 3)).tolist() == jax.random.key_data(evaluation_keys(0, 5))[:3].tolist()
    )


@pytest.mark.parametrize("kill", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_stopped_run_resumes_bit_for_bit(tiny, tmp_path, kill):
    tiny |= {"updates": 12, "rewards": {"jpeg_compressibility": 1.0, "digit_reader_edit": 0.5}}
    whole = TrainConfig(**tiny, run_dir=str(tmp_path / "whole"))
    # a process of its own, like the stopped one: eight devices or one decide how XLA splits its loops
    subprocess.run(command_line(tiny, tmp_path / "whole"), check=True, capture_output=True)
    run_dir, chance = tmp_path / "stopped", random.Random(kill)
    interruptions = 0
    while True:
        flags = ["--resume"] if (run_dir / "config.json").exists() else []
        process = subprocess.Popen(command_line(tiny, run_dir, *flags), stderr=subprocess.PIPE, text=True)
        if interruptions < 3:
            done = len(read_metrics(run_dir))
            while len(read_metrics(run_dir)) <= done + 1 and process.poll() is None:
                time.sleep(0.01)
            time.sleep(chance.uniform(0.0, 0.2))  # somewhere in an update or in a save
            process.send_signal(kill)
        errors = process.communicate()[1]
        if process.returncode == 0:
            break
        interruptions += 1
        assert process.returncode == (-kill if kill == signal.SIGKILL else 128 + kill), errors
        if kill != signal.SIGKILL:
            assert "--resume" in errors
    assert interruptions >= 2
    assert without_times(run_dir) == without_times(tmp_path / "whole")
    for ours, theirs in zip(final_state(whole, run_dir), final_state(whole, tmp_path / "whole"), strict=True):
        np.testing.assert_array_equal(ours, theirs)


def test_resume_with_other_settings_is_refused(tiny, tmp_path):
    run_dir = train(TrainConfig(**tiny | {"updates": 1}, run_dir=str(tmp_path / "run")), "quickstart")
    before = {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")}
    with pytest.raises(ConfigError, match=r"--learning-rate 0\.5"):
        train(TrainConfig(**tiny | {"learning_rate": 0.5}, run_dir=str(run_dir), resume=True), "quickstart")
    with pytest.raises(ConfigError, match="not empty"):
        train(TrainConfig(**tiny, run_dir=str(run_dir)), "quickstart")
    assert {path: path.stat().st_mtime_ns for path in run_dir.rglob("*")} == before


def test_a_diverged_run_stops_with_its_last_good_checkpoint(tiny, tmp_path):
    settings = tiny | {"updates": 20, "learning_rate": 1e30, "max_skipped_updates": 3}
    with pytest.raises(TrainingError, match=r"3 updates in a row.*is kept"):
        train(TrainConfig(**settings, run_dir=str(tmp_path / "run")), "quickstart")
    lines = read_metrics(tmp_path / "run")
    assert [line["skipped"] for line in lines[-3:]] == [1, 1, 1]
    config = TrainConfig(**settings | {"updates": Checkpoints(tmp_path / "run").latest()})
    assert all(np.isfinite(leaf).all() for leaf in final_state(config, tmp_path / "run"))


def test_evaluate_and_sample_commands(tiny, tmp_path):
    run_dir = train(TrainConfig(**tiny | {"updates": 1}, run_dir=str(tmp_path / "run")), "quickstart")
    environment = os.environ | {"COLUMNS": "120"}
    arguments = [sys.executable, str(ROOT / "train.py")]
    evaluation = [
        *arguments,
        "evaluate",
        "--run-dir",
        str(run_dir),
        "--rewards",
        "digit_reader_edit",
        "--num-prompts",
        "5",
    ]
    shown = subprocess.run(evaluation, check=True, capture_output=True, text=True, env=environment).stdout
    assert "digit_reader_edit" in shown
    result = json.loads((run_dir / "evaluation.json").read_text())
    assert result["rewards"]["digit_reader_edit"]["samples"] == 5
    picture = tmp_path / "x.png"
    drawing = [*arguments, "sample", "--run-dir", str(run_dir), "--prompt", "427", "031", "--output", str(picture)]
    subprocess.run(drawing, check=True, capture_output=True)
    assert Image.open(picture).size[0] >= 2 * 48
    wrong = [*arguments, "sample", "--run-dir", str(run_dir), "--prompt", "42x", "--output", str(tmp_path / "y.png")]
    failed = subprocess.run(wrong, capture_output=True, text=True)
    assert failed.returncode == 2
    assert len(failed.stderr.splitlines()) == 1
    assert "42x" in failed.stderr
    assert not (tmp_path / "y.png").exists()


def test_weights_of_another_task_are_refused(tiny):
    with pytest.raises(ConfigError, match=r"--weights .*task digits"):
        build_experiment(TrainConfig(**tiny | {"task": "words"}))


def test_the_quickstart_learns(tmp_path):
    """The real model, the real reader: held-out strings get more legible within a few updates."""
    config = TrainConfig(
        weights="digits", eval_rewards=("ocr_edit",), updates=12, eval_every=0, sample_every=0, checkpoint_every=0,
        run_dir=str(tmp_path / "run"),
    )  # fmt: skip
    lines = read_metrics(train(config, "quickstart"))
    assert 0.2 <= lines[0]["eval/ocr_edit"] <= 0.5
    assert lines[-1]["eval/ocr_edit"] >= lines[0]["eval/ocr_edit"] + 0.1
