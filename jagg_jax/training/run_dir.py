"""The folder of a run: its name, whether it may be used, and the settings kept in it."""

import dataclasses
import datetime
import json
import os
import shutil
from pathlib import Path

from jagg_jax.training.config import TrainConfig, option
from jagg_jax.training.errors import ConfigError

CONFIG_FILE = "config.json"

# What a resumed run may change without turning into another run.
RESUMABLE = {
    "run_dir",
    "resume",
    "overwrite",
    "dry_run",
    "updates",
    "distributed",
    "coordinator",
    "num_processes",
    "process_id",
    "data",
    "fsdp",
    "tensor",
    "fsdp_min_size",
    "reward_threads",
    "eval_steps",
    "eval_rewards",
    "eval_every",
    "eval_prompts",
    "sample_every",
    "checkpoint_every",
    "keep_checkpoints",
    "max_skipped_updates",
}


def write_text(path: Path, text: str) -> None:
    """Write a file so that a reader, or a crash, meets the old text or the new one and nothing in between."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def resolve_run_dir(config: TrainConfig, preset: str) -> Path:
    """The folder of a run: `config.run_dir`, or `runs/<preset>-<UTC time>` where that's empty."""
    if config.run_dir:
        return Path(config.run_dir)
    now = datetime.datetime.now(datetime.UTC)
    return Path("runs") / f"{preset}-{now:%Y%m%d-%H%M%S}"


def save_config(run_dir: Path, config: TrainConfig, preset: str) -> None:
    """Keep the settings of a run, and the preset they came from, in `run_dir`/config.json."""
    content = {"preset": preset, "train": dataclasses.asdict(config)}
    write_text(run_dir / CONFIG_FILE, json.dumps(content, indent=2) + "\n")


def load_config(run_dir: Path) -> tuple[TrainConfig, str]:
    """The settings and the preset's name that `save_config` kept.

    Raises:
        ConfigError: If the folder holds no run, or its config.json doesn't hold exactly the fields of a TrainConfig.
    """
    path = Path(run_dir) / CONFIG_FILE
    if not path.is_file():
        raise ConfigError(f"--run-dir {run_dir}: there is no run, {CONFIG_FILE} is missing; name the folder of a run")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        preset, values = str(content["preset"]), dict(content["train"])
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--run-dir {run_dir}: {CONFIG_FILE} holds no run's settings ({error!r})") from error
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    if strange := sorted(known ^ values.keys()):
        raise ConfigError(f"--run-dir {run_dir}: {CONFIG_FILE} is of another version, see {', '.join(strange)}")
    values["eval_rewards"] = tuple(values["eval_rewards"])
    return TrainConfig(**values), preset


def check_run_dir(config: TrainConfig) -> None:
    """Refuse a folder that's in use, a run to resume that isn't there and one of other settings; writes nothing.

    Raises:
        ConfigError: With the option, its value and the fix in one line.
    """
    if config.resume and config.overwrite:
        raise ConfigError("--resume True: goes on with the run that --overwrite would delete; drop one of them")
    if config.resume:
        if not config.run_dir:
            raise ConfigError("--resume True: name the run to go on with, --run-dir DIR")
        _check_same_run(config)
        return
    path = Path(config.run_dir)
    if not config.run_dir or not path.exists():
        return
    if not path.is_dir():
        raise ConfigError(f"--run-dir {path}: is a file; name a folder")
    if not any(path.iterdir()):
        return
    if not config.overwrite:
        raise ConfigError(f"--run-dir {path}: is not empty; add --resume or --overwrite, or name another folder")
    load_config(path)


def claim_run_dir(config: TrainConfig, preset: str) -> Path:
    """Make the folder of a run and keep the settings there: the first thing a run writes.

    Returns:
        The folder, which holds a config.json and, unless the run is resumed, nothing else.

    Raises:
        ConfigError: As `check_run_dir`.
    """
    check_run_dir(config)
    path = resolve_run_dir(config, preset)
    if config.overwrite and path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    save_config(path, config, preset)
    return path


def _check_same_run(config: TrainConfig) -> None:
    """A resumed run keeps every setting that shapes its numbers."""
    before, _ = load_config(Path(config.run_dir))
    for field in dataclasses.fields(config):
        old, new = getattr(before, field.name), getattr(config, field.name)
        if field.name not in RESUMABLE and old != new:
            raise ConfigError(f"{option(field.name)} {new}: the run to resume has {old}; keep it, or start a new run")
    if config.schedule == "cosine" and config.updates != before.updates:
        raise ConfigError(f"--updates {config.updates}: the cosine schedule was laid over {before.updates}; keep that")
