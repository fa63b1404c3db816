"""A run that is killed at random moments, saves included, ends with the same bits as one that nobody disturbs."""

import os
import random
import signal
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from commands import command_line, final_state

from jagg_jax.training.checkpoint import CHECKPOINTS_DIR, Checkpoints
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.metrics import read_metrics

KILLS = 20
# what depends on the machine, and on how often a process had to start
MEASURED = ("seconds", "images_per_second", "model_flops_per_second", "utilisation", "compilations")


@pytest.fixture(scope="module")
def environment(tmp_path_factory) -> dict[str, str]:
    """One device, and a compilation cache that all processes share: starting Python is most of a restart then."""
    return os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=1",
        "JAX_COMPILATION_CACHE_DIR": str(tmp_path_factory.mktemp("cache")),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
    }


def run_to_end(settings: dict, run_dir: Path, environment: dict[str, str], updates: int) -> None:
    command = command_line(settings | {"updates": updates}, run_dir, "--resume")
    finished = subprocess.run(command, stderr=subprocess.PIPE, text=True, env=environment)
    assert finished.returncode == 0, finished.stderr
    assert "warning" not in finished.stderr.lower()


def interrupt(command: list[str], run_dir: Path, environment: dict[str, str], number: int, wait) -> None:
    """Starts a run, ends it by a signal when `wait(process, metrics lines before)` returns, and checks how it ended."""
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    wait(process, len(read_metrics(run_dir)))
    process.send_signal(number)
    errors = process.communicate()[1]
    assert process.returncode == (-number if number == signal.SIGKILL else 128 + number), errors
    if number != signal.SIGKILL:
        assert f"go on with --run-dir {run_dir} --resume" in errors


def computed(run_dir: Path) -> list[dict]:
    return [{k: v for k, v in line.items() if not k.startswith(MEASURED)} for line in read_metrics(run_dir)]


def test_a_run_killed_at_twenty_random_moments_ends_with_the_same_bits(tiny, tmp_path, environment):
    settings = tiny | {"eval_every": 0, "sample_every": 0, "checkpoint_every": 1, "ema_decay": 0.5}
    run_dir, whole = tmp_path / "killed", tmp_path / "whole"
    # a start and a resumption fill the cache, so that no kill meets JAX writing to it
    run_to_end(settings, tmp_path / "first", environment, updates=1)
    began = time.monotonic()
    run_to_end(settings, tmp_path / "first", environment, updates=2)
    start_up = time.monotonic() - began
    chance = random.Random(0)

    def any_moment(process: subprocess.Popen, lines: int) -> None:
        time.sleep(chance.uniform(0.0, start_up))

    def while_it_trains(process: subprocess.Popen, lines: int) -> None:
        while len(read_metrics(run_dir)) <= lines and process.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0.0, 0.4))

    moments = [(signal.SIGKILL, any_moment), (signal.SIGKILL, while_it_trains)] * (KILLS // 2)
    moments += [(signal.SIGTERM, while_it_trains), (signal.SIGINT, while_it_trains)]
    chance.shuffle(moments)
    command = command_line(settings | {"updates": 100_000}, run_dir, "--resume")
    reached, torn = 0, 0
    for number, wait in moments:
        interrupt(command, run_dir, environment, number, wait)
        torn += any("tmp" in path.name for path in run_dir.glob(f"{CHECKPOINTS_DIR}/*"))
        before, reached = reached, Checkpoints(run_dir).latest() or 0
        assert reached >= before
    assert torn > 0, "no kill met a save: the test proved nothing about them"

    last = reached + 2
    run_to_end(settings, run_dir, environment, last)
    run_to_end(settings, whole, environment, last)
    assert [line["update"] for line in read_metrics(run_dir)] == list(range(last + 1))
    assert computed(run_dir) == computed(whole)
    config = TrainConfig(**settings | {"updates": last})
    for ours, theirs in zip(final_state(config, run_dir), final_state(config, whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
