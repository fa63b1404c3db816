"""Runs that are really trained, stopped in every way there is, and resumed."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from commands import ROOT, final_state
from PIL import Image
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jagg_jax.training.checkpoint import Checkpoints
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.errors import ConfigError, TrainingError
from jagg_jax.training.evaluate import make_evaluator
from jagg_jax.training.experiment import build_experiment
from jagg_jax.training.loop import train
from jagg_jax.training.metrics import read_metrics


def width(path: Path) -> int:
    with Image.open(path) as picture:
        return picture.size[0]


def test_a_run_leaves_everything_a_user_expects(tiny, tmp_path):
    run_dir = train(TrainConfig(**tiny, run_dir=str(tmp_path / "run")), "quickstart")
    lines = read_metrics(run_dir)
    assert [line["update"] for line in lines] == [0, 1, 2, 3, 4]
    assert all(np.isfinite(line["eval/jpeg_compressibility"]) for line in (lines[0], lines[2], lines[4]))
    wanted = {
        "reward_mean", "reward_std", "reward/jpeg_compressibility", "zero_std_fraction", "ratio_max_deviation",
        "clip_fraction", "kl", "grad_norm", "loss", "learning_rate", "seconds_rollout", "seconds_reward",
        "seconds_update", "backward_passes", "plan", "skipped", "nonfinite_rewards", "advantage_sum", "masked_samples",
        "ratio_q01", "ratio_q50", "ratio_q99", "log_prob_change/0", "log_prob_change/3", "log_prob_change_max",
        "images_per_second", "model_flops_per_second", "compilations", "trained_steps", "window_start",
    }  # fmt: skip
    for line in lines[1:]:
        assert wanted <= line.keys()
        assert line["ratio_max_deviation"] == 0.0
        assert line["ratio_q01"] == line["ratio_q50"] == line["ratio_q99"] == 1.0
        assert line["log_prob_change_max"] < 1e-5
        assert line["advantage_sum"] <= 4e-6
        assert line["masked_samples"] == 0
        assert line["backward_passes"] == 2
        assert (line["window_start"], line["trained_steps"]) == (0, [0, 3])
        assert not {"window_key", "plan_key", "hat_phase"} & line.keys()
        assert line["model_flops_per_second"] > line["images_per_second"] > 0
        assert "utilisation" not in line  # no peak of a CPU is known
        assert line["grad_norm"] > 0
        assert line["skipped"] == 0
    assert json.loads((run_dir / "config.json").read_text())["train"]["batch_size"] == 16
    assert sorted(path.name for path in (run_dir / "samples").iterdir()) == ["000000.png", "000002.png", "000004.png"]
    assert width(run_dir / "report.png") > 500
    assert Checkpoints(run_dir).steps() == [2, 3, 4]
    events = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("reward_mean")] == [1, 2, 3, 4]
    assert "trained_steps" not in events.Tags()["scalars"]
    # the first update compiles its programs, the first save and the next one what Orbax needs, then nothing is left
    assert 0 < lines[1]["compilations"] <= lines[2]["compilations"] == lines[4]["compilations"]


def test_programs_compile_once(tiny):
    experiment = build_experiment(TrainConfig(**tiny, plan="subset", subset_steps=2))
    state = experiment.initial_state()
    for update in (1, 2, 3):
        conditions = experiment.conditions(update)
        params = experiment.whole(state.params)
        _, transitions, reference = experiment.roll_out(params, None, np.int32(update), conditions)
        advantages, *_ = experiment.advantages(np.linspace(-1, 1, 16, dtype=np.float32), transitions, reference)
        plan = experiment.plan(update)
        arguments = (experiment.frozen, transitions, advantages, conditions, plan, reference, True)
        state, _ = experiment.update(state, *arguments)
    assert experiment.roll_out._cache_size() == 1
    assert experiment.update._cache_size() == 1


def test_nothing_is_compiled_after_the_second_update(tiny, tmp_path):
    """With a moving window, a random subset and a second update on each rollout: one program each for all draws."""
    settings = tiny | {
        "updates": 6, "num_steps": 7, "train_steps": 3, "train_window": "random", "plan": "subset", "subset_steps": 2,
        "updates_per_rollout": 2, "eval_every": 3, "sample_every": 2,
    }  # fmt: skip
    lines = read_metrics(train(TrainConfig(**settings, run_dir=str(tmp_path / "run")), "quickstart"))
    assert lines[2]["compilations"] == lines[-1]["compilations"]
    drawn = [(line["window_start"], *line["trained_steps"]) for line in lines[1:]]
    assert len(set(drawn)) > 2
    for start, *steps in drawn:
        assert 0 <= start <= 3
        assert len(steps) == 2
        assert set(steps) <= {start, start + 1, start + 2}
    for line in lines[1:]:
        assert {f"log_prob_change/{step}" for step in line["trained_steps"]} <= line.keys()
        assert len(line["window_key"]) == len(line["plan_key"]) == 2
        assert line["ratio_q01/0"] == line["ratio_q99/0"] == 1.0
        assert line["ratio_q01/1"] < 1.0 < line["ratio_q99/1"] == line["ratio_q99"]
    assert len({tuple(line["plan_key"]) for line in lines[1:]}) == 6


def test_later_updates_on_a_rollout_recompute(tiny, tmp_path):
    settings = tiny | {"updates": 1, "updates_per_rollout": 2, "learning_rate": 1e-2, "kl": "exact", "kl_weight": 0.1}
    (_, line) = read_metrics(train(TrainConfig(**settings, run_dir=str(tmp_path / "run")), "quickstart"))
    assert line["ratio_max_deviation/0"] == 0.0
    assert line["ratio_max_deviation/1"] > 0.0
    assert line["kl"] > 0.0
    assert line["backward_passes"] == 4


def test_prompts_cover_an_epoch_before_they_repeat(tiny):
    experiment = build_experiment(TrainConfig(**tiny))
    pool = experiment.pipeline.train_prompts.texts
    per_update = 4
    epoch = [prompt for update in range(1, len(pool) // per_update + 1) for prompt in experiment.prompts(update)[::4]]
    assert sorted(epoch) == sorted(pool)
    assert experiment.prompts(1)[:4] == [experiment.prompts(1)[0]] * 4
    assert not set(pool) & set(experiment.pipeline.eval_prompts.texts)


def test_evaluation_noise_is_fixed_by_the_prompts_place(tiny):
    experiment = build_experiment(TrainConfig(**tiny))
    held_out = experiment.pipeline.eval_prompts
    few, more = (make_evaluator(experiment, held_out.first(n), ("jpeg_compressibility",)) for n in (3, 11))
    np.testing.assert_allclose(
        few.images(experiment.initial_params), more.images(experiment.initial_params, 3), atol=1e-5
    )


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


def test_evaluate_and_sample_commands_on_other_devices_than_the_run_had(tiny, tmp_path):
    settings = tiny | {"updates": 1, "data": 4, "fsdp": 2, "fsdp_min_size": 1}
    run_dir = train(TrainConfig(**settings, run_dir=str(tmp_path / "run")), "quickstart")
    environment = os.environ | {"COLUMNS": "120", "XLA_FLAGS": "--xla_force_host_platform_device_count=3"}
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
    assert width(picture) >= 2 * 48
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
