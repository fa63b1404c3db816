"""A run that is read again: its settings, its model and one of its checkpoints, on any devices."""

import dataclasses
from pathlib import Path
from typing import Any, Literal, NamedTuple

from jagg_jax.training.checkpoint import Checkpoints
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.experiment import Experiment, build_experiment
from jagg_jax.training.run_dir import check_inputs, load_config


@dataclasses.dataclass(frozen=True)
class RunChoice:
    """Which model of which run, and on what devices: the settings that all commands on a saved run share."""

    run_dir: str = ""
    """Folder of the run."""
    checkpoint: int | None = None
    """Update of the checkpoint; the latest by default. 0 is the pre-trained model."""
    weights: Literal["auto", "trained", "average"] = "auto"
    """Trained weights or their moving average; auto takes the average where the run keeps one."""
    fsdp: int = 1
    """Devices over which parameters are split, whatever the run had; all devices share the samples."""
    tensor: int = 1
    """Devices over which attention heads and MLP columns are split."""


class SavedRun(NamedTuple):
    """What `load_run` found: the folder, the experiment, the chosen trained parameters, and their update."""

    run_dir: Path
    experiment: Experiment
    trained: Any
    update: int

    @property
    def params(self) -> Any:
        """All parameters of the model."""
        return self.experiment.whole(self.trained)


def load_run(choice: RunChoice, **changes: Any) -> SavedRun:
    """Reads a run.

    Args:
      choice: which one.
      **changes: settings of the run to replace, of those that change no parameter's shape: compute_dtype="float32".

    Raises:
      ConfigError: a setting that can't be used, a folder that holds no run, weights that are another's.
      CheckpointError: a checkpoint that is missing or damaged.
    """
    if not choice.run_dir:
        raise ConfigError("--run-dir: name the folder of a run")
    run_dir = Path(choice.run_dir)
    config, _ = load_config(run_dir)
    if choice.weights == "average" and not config.ema_decay:
        raise ConfigError("--weights average: the run keeps none (its ema_decay is 0); use trained or auto")
    check_inputs(run_dir, config)
    devices = {"data": -1, "fsdp": choice.fsdp, "tensor": choice.tensor, "distributed": "none"}
    experiment = build_experiment(dataclasses.replace(config, **devices, **changes), trains=False)
    state = experiment.initial_state()
    checkpoints = Checkpoints(run_dir)
    update = checkpoints.latest() if choice.checkpoint is None else choice.checkpoint
    if update != 0:
        state = checkpoints.restore(update, state)
    averaged = choice.weights != "trained" and state.ema_params is not None
    return SavedRun(run_dir, experiment, state.ema_params if averaged else state.params, update)
