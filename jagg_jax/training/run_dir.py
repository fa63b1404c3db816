"""The folder of a run: its name, whether it may be used, and the settings kept in it."""

import dataclasses
import datetime
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path

from jagg_jax.prompts.sd3_folder import file_sha256, sampled_sha256
from jagg_jax.training.config import TrainConfig, option, resolve_weights
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
    "eval_batch_size",
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
    """Keep the settings of a run, the preset they came from and SHA-256s of what it reads in `run_dir`/config.json."""
    content = {"preset": preset, **_digests(config), "train": dataclasses.asdict(config)}
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
    for name in ("eval_rewards", "lora_targets"):
        values[name] = tuple(values[name])
    return TrainConfig(**values), preset


def check_inputs(run_dir: Path, config: TrainConfig) -> None:
    """Refuse pre-trained weights or prompt caches other than those that the run in `run_dir` was started with.

    A checkpoint can't tell: adapters fit any base of the same shapes.

    Raises:
        ConfigError: If they differ.
    """
    before = json.loads((Path(run_dir) / CONFIG_FILE).read_text(encoding="utf-8"))
    for name, digest in _digests(config).items():
        if digest != before.get(name):
            field = name.removesuffix("_sha256")
            fix = "is not what the run was started with; bring that back, or start anew"
            raise ConfigError(f"{option(field)} {getattr(config, field)}: {fix}")


def _digests(config: TrainConfig) -> dict[str, str]:
    """SHA-256 of the weights and of the prompt caches; of a large file, samples (see `sampled_sha256`)."""
    from jagg_jax.prompts.cache import MANIFEST  # brings JAX, which a mistyped option needn't wait for

    path = resolve_weights(config.weights)
    parts = [file for part in ("transformer", "vae") for file in (path / part).glob("*") if file.is_file()]
    lines = [f"{file.relative_to(path)} {file.stat().st_size} {sampled_sha256(file)}" for file in sorted(parts)]
    weights = hashlib.sha256("\n".join(lines).encode()).hexdigest() if path.is_dir() else file_sha256(path)
    caches = {name: getattr(config, name) for name in ("prompt_cache", "eval_prompt_cache")}
    # a cache's manifest has the SHA-256 of every other file in it
    digests = {f"{name}_sha256": file_sha256(Path(folder) / MANIFEST) for name, folder in caches.items() if folder}
    return {"weights_sha256": weights, **digests}


def check_run_dir(config: TrainConfig) -> None:
    """Refuse a folder that's in use and a run to resume that has other settings; writes nothing.

    A new folder may be resumed: whatever restarts a job that was preempted starts it with the same command.

    Raises:
        ConfigError: With the option, its value and the fix in one line.
    """
    if config.resume and config.overwrite:
        raise ConfigError("--resume True: goes on with the run that --overwrite would delete; drop one of them")
    if config.resume and not config.run_dir:
        raise ConfigError("--resume True: name the run to go on with, --run-dir DIR")
    if "://" in config.run_dir:
        raise ConfigError(f"--run-dir {config.run_dir}: is no path; mount the file system and name a folder in it")
    path = Path(config.run_dir)
    if not config.run_dir or _is_new(path):
        return
    if not path.is_dir():
        raise ConfigError(f"--run-dir {path}: is a file; name a folder")
    if config.resume:
        _check_same_run(config)
    elif not config.overwrite:
        raise ConfigError(f"--run-dir {path}: is not empty; add --resume or --overwrite, or name another folder")
    else:
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
    if config.resume and _is_new(path):
        print(f"{path}: holds no run yet; starting one", file=sys.stderr)
    if config.overwrite and path.exists():
        shutil.rmtree(path)
    path.mkdir(parents=True, exist_ok=True)
    save_config(path, config, preset)
    return path


def _is_new(path: Path) -> bool:
    """Whether a folder is missing, or empty but for what a process that was killed while it claimed it left behind."""
    if not path.exists():
        return True
    return path.is_dir() and all(entry.name.startswith(f".{CONFIG_FILE}.") for entry in path.iterdir())


def _check_same_run(config: TrainConfig) -> None:
    """A resumed run keeps every setting that shapes its numbers."""
    before, _ = load_config(Path(config.run_dir))
    check_inputs(Path(config.run_dir), config)
    for field in dataclasses.fields(config):
        old, new = getattr(before, field.name), getattr(config, field.name)
        if field.name not in RESUMABLE and old != new:
            raise ConfigError(f"{option(field.name)} {new}: the run to resume has {old}; keep it, or start a new run")
    if config.prompt_cache and not config.eval_prompt_cache and config.eval_prompts != before.eval_prompts:
        fix = f"the run to resume keeps {before.eval_prompts} out of training; keep that"
        raise ConfigError(f"--eval-prompts {config.eval_prompts}: {fix}")
    if config.schedule == "cosine" and config.updates != before.updates:
        raise ConfigError(f"--updates {config.updates}: the cosine schedule was laid over {before.updates}; keep that")
