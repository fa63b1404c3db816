"""Two processes over loopback train as one does, stop together, and leave a checkpoint that one goes on with."""

import os
import signal
import socket
import subprocess
import time
from pathlib import Path

import numpy as np
import pytest
from commands import command_line

from jagg_jax.training.checkpoint import Checkpoints
from jagg_jax.training.metrics import read_metrics

TOLERANT = ("reward_mean", "loss", "grad_norm", "eval/jpeg_compressibility")


def environment(devices: int) -> dict[str, str]:
    return os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", "JAX_PLATFORMS": "cpu"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start_pair(settings: dict, run_dir: Path, *flags: str) -> list[subprocess.Popen]:
    """Two processes of two devices each."""
    meeting = ["--distributed", "manual", "--coordinator", f"127.0.0.1:{free_port()}", "--num-processes", "2"]
    return [
        subprocess.Popen(
            [*command_line(settings, run_dir), *meeting, "--process-id", str(index), *flags],
            env=environment(2),
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]


def finish(pair: list[subprocess.Popen]) -> list[tuple[int, str]]:
    errors = [process.communicate(timeout=240)[1] for process in pair]
    return [(process.returncode, error) for process, error in zip(pair, errors, strict=True)]


def compare(run_dir: Path, other: Path) -> None:
    ours, theirs = read_metrics(run_dir), read_metrics(other)
    assert [line["update"] for line in ours] == [line["update"] for line in theirs]
    for line, twin in zip(ours, theirs, strict=True):
        assert line.get("ratio_max_deviation", 0.0) == 0.0
        for name in line.keys() & set(TOLERANT):
            np.testing.assert_allclose(line[name], twin[name], rtol=1e-3, atol=1e-5, err_msg=name)


def test_two_processes_train_as_one_does_and_stop_together(tiny, tmp_path):
    settings = tiny | {"data": 2, "fsdp": 2, "fsdp_min_size": 1, "updates": 6}
    whole = tmp_path / "whole"
    subprocess.run(command_line(settings, whole), check=True, capture_output=True, env=environment(4))

    pair_dir = tmp_path / "pair"
    for status, errors in finish(start_pair(settings, pair_dir)):
        assert status == 0, errors
    compare(pair_dir, whole)
    assert (pair_dir / "report.png").exists()

    stopped = tmp_path / "stopped"
    pair = start_pair(settings | {"updates": 200}, stopped)
    while len(read_metrics(stopped)) < 3 and all(process.poll() is None for process in pair):
        time.sleep(0.02)
    pair[1].send_signal(signal.SIGTERM)  # one of them only, as when a single host is preempted
    for status, errors in finish(pair):
        assert status == 128 + signal.SIGTERM, errors
    reached = Checkpoints(stopped).latest()
    assert reached == read_metrics(stopped)[-1]["update"]

    # on one process, two devices and another mesh
    onward = settings | {"updates": max(reached + 1, 6), "data": 1, "fsdp": 2}
    subprocess.run([*command_line(onward, stopped), "--resume"], check=True, capture_output=True, env=environment(2))
    assert Checkpoints(stopped).latest() == onward["updates"]
    shared = min(len(read_metrics(stopped)), 7)
    np.testing.assert_allclose(
        [line["reward_mean"] for line in read_metrics(stopped)[1:shared]],
        [line["reward_mean"] for line in read_metrics(whole)[1:shared]],
        rtol=1e-3,
    )


@pytest.mark.parametrize("plan", ["exact", "hat", "subset"])
def test_tasks_of_a_slurm_step_find_each_other_and_train_by_every_plan(tiny, tmp_path, plan):
    """Two processes with the variables that SLURM sets; the plans that the other test of two processes leaves out."""
    settings = tiny | {"data": 2, "updates": 2, "plan": plan, "steps_per_group": 3, "subset_steps": 2}
    settings |= {"eval_every": 0, "sample_every": 0}
    whole, pair_dir = tmp_path / "whole", tmp_path / "pair"
    subprocess.run(command_line(settings, whole), check=True, capture_output=True, env=environment(2))
    port = str(free_port())
    step = {"SLURM_JOB_ID": "17", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2", "SLURM_STEP_NUM_NODES": "1"}
    step |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}", "JAX_COORDINATOR_PORT": port}
    pair = [
        subprocess.Popen(
            [*command_line(settings, pair_dir), "--distributed", "auto"],
            env=environment(1) | step | {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for index in range(2)
    ]
    for status, errors in finish(pair):
        assert status == 0, errors
    compare(pair_dir, whole)


def test_auto_without_other_processes_is_an_error_before_anything_is_written(tiny, tmp_path):
    alone = {name: value for name, value in environment(1).items() if not name.startswith(("SLURM", "OMPI", "TPU"))}
    command = [*command_line(tiny, tmp_path / "run"), "--distributed", "auto"]
    failed = subprocess.run(command, capture_output=True, text=True, env=alone)
    assert failed.returncode == 2
    assert "--distributed auto: finds no other processes" in failed.stderr
    assert not (tmp_path / "run").exists()


def test_several_processes_need_the_folders_name(tiny):
    command = command_line(tiny, Path("unused"))
    at = command.index("--run-dir")
    command = [*command[:at], *command[at + 2 :]]
    port = free_port()
    pair = [
        subprocess.Popen(
            [*command, "--distributed", "manual", "--coordinator", f"127.0.0.1:{port}",
             "--num-processes", "2", "--process-id", str(index)],
            env=environment(1), stderr=subprocess.PIPE, text=True,
        )
        for index in range(2)
    ]  # fmt: skip
    for status, errors in finish(pair):
        assert status == 2
        assert "--run-dir" in errors
