"""What tests of whole runs share: the command line that starts one, and the state that it leaves."""

import sys
from pathlib import Path

import jax
import numpy as np

from jagg_jax.training.checkpoint import Checkpoints
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.experiment import build_experiment

ROOT = Path(__file__).resolve().parents[2]


def command_line(settings: dict, run_dir: Path, *flags: str) -> list[str]:
    options = []
    for name, value in settings.items():
        if isinstance(value, dict):
            value = " ".join(f"{key}={weight}" for key, weight in value.items())
        elif isinstance(value, tuple):
            value = " ".join(value)
        options += [f"--{name.replace('_', '-')}", *str(value).split()]
    return [sys.executable, str(ROOT / "train.py"), *options, "--run-dir", str(run_dir), *flags]


def final_state(config: TrainConfig, run_dir: Path) -> list[np.ndarray]:
    """Every array of the checkpoint of the run's last update."""
    state = Checkpoints(run_dir).restore(config.updates, build_experiment(config).initial_state())
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]
