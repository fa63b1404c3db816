"""The checks that settings pass before anything is compiled or written, each a line that names value and fix."""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jagg_jax.training.errors import ConfigError

if TYPE_CHECKING:  # config offers these checks under its own name, so it can't be imported here
    from jagg_jax.training.config import TrainConfig

CACHE_TASK = "prompt_cache"
PACKAGED_WEIGHTS = Path(__file__).resolve().parent.parent / "models" / "weights"


def option(field: str) -> str:
    """The command-line spelling of a field: `steps_per_group` -> `--steps-per-group`."""
    return "--" + field.replace("_", "-")


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word nearest to a mistyped one, else the empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def resolve_weights(weights: str) -> Path:
    """The file, or the folder of a pipeline, that a `weights` setting names.

    Args:
        weights: The path of one, or the bare name of one in `jagg_jax/models/weights`. A folder there has the sizes of
            a published model and no weights, which is enough for a dry run.

    Raises:
        ConfigError: If it's empty, no such file exists, or a folder is no pipeline's.
    """
    packaged = sorted(path.stem for path in PACKAGED_WEIGHTS.glob("*.safetensors"))
    offer = (
        f"a .safetensors file, a pipeline's folder, or a packaged one ({', '.join(packaged) or 'none is installed'})"
    )
    if not weights:
        raise ConfigError(f"--weights '': name the pre-trained model, {offer}")
    for folder in (Path(weights), PACKAGED_WEIGHTS / weights):
        if (folder / "model_index.json").is_file():
            return folder
    if Path(weights).is_dir():
        raise ConfigError(f"--weights {weights}: has no model_index.json; name {offer}")
    bare = Path(weights).name == weights and not Path(weights).suffix
    path = PACKAGED_WEIGHTS / f"{weights}.safetensors" if bare else Path(weights)
    if not path.is_file():
        raise ConfigError(f"--weights {weights}: there is no such file; name {offer}{closest(weights, packaged)}")
    return path


def resolve_train_steps(train_steps: int | str, num_steps: int) -> int:
    """How many steps of a rollout are trained.

    Args:
        train_steps: A count (8), all that can be trained but so many (-2), or a share of them ("50%", rounded to the
            nearest count).
        num_steps: Steps of the rollout; all but the last can be trained.

    Raises:
        ConfigError: If it's none of these, or asks for no step or for more than can be trained.
    """
    trainable = num_steps - 1
    of = f"--num-steps {num_steps} has {trainable} that can be trained, the last step has no noise to learn from"
    if isinstance(train_steps, str):
        try:
            share = float(train_steps.removesuffix("%")) / 100.0
        except ValueError:
            share = math.nan
        # a number without the sign would be read as a share a hundred times too small
        if not train_steps.endswith("%") or not 0 < share <= 1:
            raise ConfigError(f"--train-steps {train_steps}: must be a count such as 8 or -2, or a share up to 100%")
        count, fix = round(share * trainable), f"is less than one step: {of}"
    elif isinstance(train_steps, int) and not isinstance(train_steps, bool):
        count = train_steps if train_steps >= 0 else trainable + train_steps
        fix = f"must lie in 1 to {trainable}, or in {1 - trainable} to -1 to leave so many out: {of}"
    else:
        raise ConfigError(f"--train-steps {train_steps}: must be a whole number or a share such as '50%'")
    if not 1 <= count <= trainable:
        raise ConfigError(f"--train-steps {train_steps}: {fix}")
    return count


def validate(config: "TrainConfig") -> None:
    """Check every field, alone and against the others; reads registries and the disk, writes nothing.

    Raises:
        ConfigError: At the first field that can't be used; one line with the option, its value and the fix.
    """
    _check_types(config)
    _check_batch(config)
    _check_steps(config)
    _check_objective(config)
    _check_optimiser(config)
    _check_schedule_of_outputs(config)
    path = resolve_weights(config.weights)
    if path.is_dir():
        _check_pipeline(config, path)
    else:
        _check_task(config)
    _check_rewards(config)


def require(condition: bool, config: Any, field: str, fix: str) -> None:
    """Raise a ConfigError about `field` unless the condition holds."""
    if not condition:
        raise ConfigError(f"{option(field)} {getattr(config, field)}: {fix}")


def _check_types(config: "TrainConfig") -> None:
    """Values built in Python skip the command line's type check: integers, finite numbers and choices."""
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.type in (int, int | None) and not (value is None and field.type == int | None):
            whole = isinstance(value, int) and not isinstance(value, bool)
            require(whole, config, field.name, "must be a whole number")
        elif field.type is float:
            real = isinstance(value, int | float) and not isinstance(value, bool)
            require(real and math.isfinite(value), config, field.name, "must be a finite number")
        elif field.type in (bool, str):
            require(isinstance(value, field.type), config, field.name, f"must be a {field.type.__name__}")
        elif getattr(field.type, "__origin__", None) is Literal:
            choices = field.type.__args__
            require(value in choices, config, field.name, f"must be one of {', '.join(choices)}")


def _check_batch(config: "TrainConfig") -> None:
    require(0 <= config.seed < 2**32, config, "seed", "must lie in 0 to 2**32 - 1")
    manual = config.distributed == "manual"
    require(bool(config.coordinator) == manual, config, "coordinator", "goes with --distributed manual, as HOST:PORT")
    fix = "must be at least 2 with --distributed manual, and 1 without"
    require((config.num_processes > 1) == manual and config.num_processes > 0, config, "num_processes", fix)
    fix = f"must lie in 0 to {config.num_processes - 1}, below --num-processes"
    require(0 <= config.process_id < config.num_processes, config, "process_id", fix)
    for field in ("data", "fsdp", "tensor"):
        size = getattr(config, field)
        require(size == -1 or size >= 1, config, field, "must be at least 1, or -1 for all remaining devices")
    require(config.fsdp_min_size >= 0, config, "fsdp_min_size", "must not be negative")
    for field in ("updates", "batch_size", "micro_batch_size", "updates_per_rollout"):
        require(getattr(config, field) >= 1, config, field, "must be at least 1")
    require(config.num_generations >= 2, config, "num_generations", "must be at least 2, one sample has no baseline")
    for field in ("num_generations", "micro_batch_size"):
        value = getattr(config, field)
        divisors = [number for number in range(2, config.batch_size + 1) if config.batch_size % number == 0]
        nearest = min(divisors, key=lambda number: abs(number - value), default=1)
        fix = f"must divide --batch-size {config.batch_size}, e.g. {nearest}"
        require(config.batch_size % value == 0, config, field, fix)


def _check_steps(config: "TrainConfig") -> None:
    require(config.num_steps >= 2, config, "num_steps", "must be at least 2")
    trained = resolve_train_steps(config.train_steps, config.num_steps)
    if config.train_window == "random":
        fix = f"has no room to move: --train-steps {config.train_steps} trains all that can be trained; lower it"
        require(trained < config.num_steps - 1, config, "train_window", fix)
    require(config.eval_steps >= 1, config, "eval_steps", "must be at least 1")
    for field in ("shift", "noise_level"):
        require(getattr(config, field) > 0, config, field, "must be above 0")
    if config.sampler == "cps":
        require(config.noise_level <= 1, config, "noise_level", "must be at most 1 for --sampler cps")
    require(config.guidance >= 0, config, "guidance", "must not be negative; 1 is no guidance")
    require(config.steps_per_group >= 1, config, "steps_per_group", "must be at least 1; 1 backpropagates every step")
    if config.plan in ("jagg", "hat"):
        fix = f"must be at most {trained}, the number of trained steps"
        require(config.steps_per_group <= trained, config, "steps_per_group", fix)
    if config.plan == "hat":
        require(config.steps_per_group >= 2, config, "steps_per_group", "must be at least 2 for --plan hat")
    else:
        require(config.hat_phase == "fixed", config, "hat_phase", f"has no effect with --plan {config.plan}")
    require(0 <= config.jagg_frac <= 1, config, "jagg_frac", "must lie in 0 to 1; 1 groups all trained steps")
    require(config.subset_steps >= 1, config, "subset_steps", "must be at least 1")
    if config.plan == "subset":
        fix = f"must be at most {trained}, the number of trained steps"
        require(config.subset_steps <= trained, config, "subset_steps", fix)
    if config.batch_anchors is not None:
        require(config.batch_anchors >= 1, config, "batch_anchors", "must be at least 1; leave it out for all")


def _check_objective(config: "TrainConfig") -> None:
    require(config.advantage_clip > 0, config, "advantage_clip", "must be above 0")
    require(0 < config.clip_low < 1, config, "clip_low", "must lie between 0 and 1")
    require(config.clip_high > 0, config, "clip_high", "must be above 0")
    if config.kl == "none":
        require(config.kl_weight == 0, config, "kl_weight", "has no effect with --kl none; choose a --kl")
    else:
        require(config.kl_weight > 0, config, "kl_weight", f"must be above 0 with --kl {config.kl}")


def _check_optimiser(config: "TrainConfig") -> None:
    for field in ("learning_rate", "max_grad_norm"):
        require(getattr(config, field) > 0, config, field, "must be above 0")
    for field in ("beta1", "beta2", "ema_decay"):
        require(0 <= getattr(config, field) < 1, config, field, "must be at least 0 and below 1")
    require(config.lora_rank >= 0, config, "lora_rank", "must not be negative; 0 trains the weights themselves")
    require(config.lora_alpha > 0, config, "lora_alpha", "must be above 0")
    if config.lora_rank:
        require(bool(config.lora_targets), config, "lora_targets", "name at least one linear map")
    for field in ("weight_decay", "warmup_updates"):
        require(getattr(config, field) >= 0, config, field, "must not be negative")
    if config.schedule == "cosine":
        fix = f"must be below --updates {config.updates} with --schedule cosine"
        require(config.warmup_updates < config.updates, config, "warmup_updates", fix)


def _check_schedule_of_outputs(config: "TrainConfig") -> None:
    for field in ("eval_every", "sample_every", "checkpoint_every"):
        require(getattr(config, field) >= 0, config, field, "must not be negative; 0 is only after the last update")
    for field in ("eval_prompts", "eval_batch_size", "keep_checkpoints", "max_skipped_updates"):
        require(getattr(config, field) >= 1, config, field, "must be at least 1")
    if config.reward_threads is not None:
        require(config.reward_threads >= 1, config, "reward_threads", "must be at least 1")


def _check_task(config: "TrainConfig") -> None:
    from jagg_jax.prompts import TASKS

    if config.task == CACHE_TASK:
        raise ConfigError(f"--weights {config.weights}: --task {CACHE_TASK} needs the folder of a pipeline")
    for field in ("prompt_cache", "eval_prompt_cache", "image_size"):
        fix = f"goes with --task {CACHE_TASK} and the folder of a pipeline as --weights"
        require(not getattr(config, field), config, field, fix)
    known = f"choose from {', '.join(TASKS)}{closest(config.task, TASKS)}"
    require(config.task in TASKS, config, "task", known)
    task = TASKS[config.task]
    held_out, trained = len(task.prompts("eval")), len(task.prompts("train"))
    fix = f"task {config.task} has {held_out} held-out prompts; ask for at most that many"
    require(config.eval_prompts <= held_out, config, "eval_prompts", fix)
    prompts = config.batch_size // config.num_generations
    fix = f"makes {prompts} prompts a rollout, task {config.task} has {trained}; lower it or raise --num-generations"
    require(prompts <= trained, config, "batch_size", fix)


def _check_pipeline(config: "TrainConfig", folder: Path) -> None:
    """Settings that go with the folder of a pipeline; the sizes that depend on its model are checked as it's loaded."""
    from jagg_jax.prompts.cache import read_manifest

    fix = f"--weights {config.weights} is a pipeline's folder: set --task {CACHE_TASK}"
    require(config.task == CACHE_TASK, config, "task", fix)
    require(config.image_size > 0, config, "image_size", "must be positive, e.g. 512")
    if config.dry_run and not config.prompt_cache:
        return
    if folder.parent == PACKAGED_WEIGHTS:
        fix = "holds the sizes of a model only, enough for --dry-run; name the folder of the pipeline to train"
        raise ConfigError(f"--weights {config.weights}: {fix}")
    require(bool(config.prompt_cache), config, "prompt_cache", "name a folder that encode_prompts wrote")
    counts = {}
    for field in ("prompt_cache", "eval_prompt_cache"):
        if getattr(config, field):
            try:
                counts[field] = read_manifest(Path(getattr(config, field)))[0].num_prompts
            except ValueError as error:
                raise ConfigError(f"{option(field)} {error}") from error
    held_out = counts.get("eval_prompt_cache", counts["prompt_cache"] - 1)
    require(config.eval_prompts <= held_out, config, "eval_prompts", f"must be at most {held_out}, what the cache has")
    trained = counts["prompt_cache"] - (0 if config.eval_prompt_cache else config.eval_prompts)
    prompts = config.batch_size // config.num_generations
    fix = f"makes {prompts} prompts a rollout, the cache has {trained} to train on; lower it or raise --num-generations"
    require(prompts <= trained, config, "batch_size", fix)


def _check_rewards(config: "TrainConfig") -> None:
    from jagg_jax.rewards import REWARDS

    for field in ("rewards", "eval_rewards"):
        names = getattr(config, field)
        if not names:
            raise ConfigError(f"{option(field)}: name at least one of {', '.join(REWARDS)}")
        if len(set(names)) < len(names):
            raise ConfigError(f"{option(field)} {' '.join(names)}: name each reward once")
        for name in names:
            if name not in REWARDS:
                choice = f"choose from {', '.join(REWARDS)}{closest(name, REWARDS)}"
                raise ConfigError(f"{option(field)} {name}: there is no such reward; {choice}")
    for name, weight in config.rewards.items():
        if not math.isfinite(weight) or weight == 0:
            raise ConfigError(f"--rewards {name}={weight:g}: the weight must be finite and not 0")
