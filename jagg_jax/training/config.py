"""The settings of a training run: a flat frozen dataclass, and the check that every field passes before it starts."""

import dataclasses
import difflib
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro

from jagg_jax.training.errors import ConfigError

PACKAGED_WEIGHTS = Path(__file__).resolve().parent.parent / "models" / "weights"


def option(field: str) -> str:
    """The command-line spelling of a field: `steps_per_group` -> `--steps-per-group`."""
    return "--" + field.replace("_", "-")


def _parse_weights(tokens: list[str]) -> dict[str, float]:
    """Read `ocr_edit jpeg_compressibility=0.1`; a name without a number weighs 1."""
    weights = {}
    for token in tokens:
        name, equals, number = token.partition("=")
        if name in weights:
            raise ValueError(f"{name} is given twice")
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError:
            raise ValueError(f"{token}: write NAME or NAME=WEIGHT, e.g. ocr_edit=0.5") from None
    return weights


RewardWeights = Annotated[
    dict[str, float],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[=WEIGHT] ...",
        instance_from_str=_parse_weights,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda weights: [f"{name}={weight:g}" for name, weight in weights.items()],
    ),
]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """GRPO training of a velocity model. `validate` says whether the values fit together."""

    seed: int = 0
    """All randomness follows from this number and the update's index; 0 to 2**32 - 1."""
    task: str = "digits"
    """Prompt set: what is drawn and which prompts are held out."""
    weights: str = ""
    """Pre-trained model: the bare name of a packaged file, such as digits, or the path of a .safetensors file."""
    run_dir: str = ""
    """Folder of the run; empty means runs/<preset>-<UTC time>."""
    resume: bool = False
    """Go on from the latest checkpoint in --run-dir."""
    overwrite: bool = False
    """Delete the run that --run-dir already holds."""

    dry_run: bool = False
    """Compile and print what the run would do and need on each device; train and write nothing."""

    updates: int = 100
    """Rollouts to train on."""
    batch_size: int = 64
    """Samples a rollout."""
    num_generations: int = 8
    """Samples a prompt, the group whose mean is the baseline; must divide --batch-size."""
    micro_batch_size: int = 64
    """Samples whose gradients are computed at once (memory); must divide --batch-size."""
    updates_per_rollout: int = 1
    """Optimiser updates on each rollout; every one sees the whole batch."""

    num_steps: int = 10
    """Denoising steps of a training rollout."""
    shift: float = 1.0
    """Time shift of the noise schedule; 1 spaces the noise levels evenly, more stays longer at high noise."""
    train_steps: int = 8
    """Steps trained, the first ones of the rollout; at most --num-steps - 1, the last step has no noise."""
    eval_steps: int = 10
    """Denoising steps of an evaluation sample (ODE)."""
    sampler: Literal["flow_sde", "dance_sde", "cps"] = "flow_sde"
    """Transition of the training rollout: Flow-GRPO's SDE, DanceGRPO's SDE or coefficient-preserving sampling."""
    noise_level: float = 0.7
    """Noise knob eta of the sampler; DanceSDE wants about 0.3."""
    guidance: float = 1.0
    """Classifier-free guidance scale; 1 is no guidance and one model call a step."""

    plan: Literal["exact", "jagg", "hat", "subset"] = "jagg"
    """Which steps are backpropagated: all of them, two a group (JAGG), shared anchors, or a random subset."""
    steps_per_group: int = 4
    """Denoising steps in a group of plan jagg or hat."""
    jagg_frac: float = 1.0
    """Fraction of the trained steps that is grouped, from the high-noise end; the rest is backpropagated exactly."""
    alpha: Literal["sigma", "index"] = "sigma"
    """Interpolate inside a group by noise level or by step index (plan jagg)."""
    subset_steps: int = 4
    """Steps that plan subset keeps."""
    batch_anchors: int | None = None
    """Anchor steps stacked on the batch axis of one backward pass; all of them by default, 1 takes the least memory."""

    rewards: RewardWeights = dataclasses.field(default_factory=lambda: {"ocr_edit": 1.0})
    """Rewards trained on, with their weights in the sum, e.g. ocr_edit jpeg_compressibility=0.1."""
    eval_rewards: tuple[str, ...] = ("ocr_edit",)
    """Rewards measured on the held-out prompts."""
    reward_threads: int | None = None
    """CPU threads of the reward models; the library's choice by default."""

    advantage_std: Literal["group", "global", "none"] = "group"
    """Divide the advantages by the std of the prompt's samples, of all samples, or not at all."""
    advantage_clip: float = 5.0
    """Largest absolute advantage."""
    clip_low: float = 1e-3
    """The ratio is clipped below 1 - this."""
    clip_high: float = 1e-3
    """The ratio is clipped above 1 + this."""
    kl: Literal["none", "exact", "flow_grpo", "v", "x"] = "none"
    """Penalty that keeps the model near the pre-trained one; needs a --kl-weight above 0."""
    kl_weight: float = 0.0
    """Weight of the penalty in the loss."""

    learning_rate: float = 3e-4
    """Peak step size of AdamW."""
    warmup_updates: int = 0
    """Rollouts over which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a cosine down to 0 at the last update."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.99
    """AdamW's decay of the second moment."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to at most this global norm."""
    ema_decay: float = 0.0
    """Decay an update of the averaged weights that evaluation uses; 0 evaluates the trained weights themselves."""

    distributed: Literal["none", "auto", "manual"] = "none"
    """Several processes: auto finds the others on a TPU pod or under SLURM, manual asks for the next three settings."""
    coordinator: str = ""
    """HOST:PORT of process 0, where all processes meet (--distributed manual)."""
    num_processes: int = 1
    """Processes in all (--distributed manual)."""
    process_id: int = 0
    """This process, from 0 (--distributed manual)."""
    data: int = -1
    """Devices over which the batch is split and parameters are repeated; -1 takes all that the other two leave."""
    fsdp: int = 1
    """Devices over which the batch and the parameters are split."""
    tensor: int = 1
    """Devices over which attention heads and MLP columns are split."""
    fsdp_min_size: int = 65536
    """Parameters with fewer elements are repeated instead of split over --fsdp."""

    storage_dtype: Literal["float32", "bfloat16"] = "float32"
    """How rollout latents are stored; log-probabilities are those of the stored values."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; parameters and all SDE arithmetic stay float32."""
    remat: bool = False
    """Recompute each block's activations in the backward pass (less memory, more time)."""

    eval_every: int = 25
    """Updates between evaluations; 0 evaluates only before the first and after the last update."""
    eval_prompts: int = 100
    """Held-out prompts of an evaluation, at most the size of the task's eval split."""
    sample_every: int = 25
    """Updates between sample grids; 0 draws them only after the last update."""
    checkpoint_every: int = 25
    """Updates between checkpoints; 0 saves only after the last update."""
    keep_checkpoints: int = 2
    """Latest checkpoints kept."""
    max_skipped_updates: int = 5
    """Updates in a row that may be skipped for a non-finite gradient before the run stops with an error."""


def closest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` for the known word nearest to a mistyped one, else the empty string."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return f"; did you mean {matches[0]!r}?" if matches else ""


def resolve_weights(weights: str) -> Path:
    """The file that a `weights` setting names.

    Args:
        weights: The path of a file, or the bare name of one in `jagg_jax/models/weights`.

    Raises:
        ConfigError: If it's empty or no such file exists.
    """
    packaged = sorted(path.stem for path in PACKAGED_WEIGHTS.glob("*.safetensors"))
    offer = f"a .safetensors file or a packaged one ({', '.join(packaged) or 'none is installed'})"
    if not weights:
        raise ConfigError(f"--weights '': name the pre-trained model, {offer}")
    bare = Path(weights).name == weights and not Path(weights).suffix
    path = PACKAGED_WEIGHTS / f"{weights}.safetensors" if bare else Path(weights)
    if not path.is_file():
        raise ConfigError(f"--weights {weights}: there is no such file; name {offer}{closest(weights, packaged)}")
    return path


def validate(config: TrainConfig) -> None:
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
    _check_task_and_rewards(config)
    resolve_weights(config.weights)


def require(condition: bool, config: Any, field: str, fix: str) -> None:
    """Raise a ConfigError about `field` unless the condition holds."""
    if not condition:
        raise ConfigError(f"{option(field)} {getattr(config, field)}: {fix}")


def _check_types(config: TrainConfig) -> None:
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


def _check_batch(config: TrainConfig) -> None:
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


def _check_steps(config: TrainConfig) -> None:
    require(config.num_steps >= 2, config, "num_steps", "must be at least 2")
    last = config.num_steps - 1
    fix = f"must lie in 1 to {last}: the last of --num-steps {config.num_steps} steps has no noise to learn from"
    require(1 <= config.train_steps <= last, config, "train_steps", fix)
    require(config.eval_steps >= 1, config, "eval_steps", "must be at least 1")
    for field in ("shift", "noise_level"):
        require(getattr(config, field) > 0, config, field, "must be above 0")
    if config.sampler == "cps":
        require(config.noise_level <= 1, config, "noise_level", "must be at most 1 for --sampler cps")
    require(config.guidance >= 0, config, "guidance", "must not be negative; 1 is no guidance")
    require(config.steps_per_group >= 1, config, "steps_per_group", "must be at least 1; 1 backpropagates every step")
    if config.plan in ("jagg", "hat"):
        fix = f"must be at most --train-steps {config.train_steps}"
        require(config.steps_per_group <= config.train_steps, config, "steps_per_group", fix)
    if config.plan == "hat":
        require(config.steps_per_group >= 2, config, "steps_per_group", "must be at least 2 for --plan hat")
    require(0 <= config.jagg_frac <= 1, config, "jagg_frac", "must lie in 0 to 1; 1 groups all trained steps")
    require(config.subset_steps >= 1, config, "subset_steps", "must be at least 1")
    if config.plan == "subset":
        fix = f"must be at most --train-steps {config.train_steps}"
        require(config.subset_steps <= config.train_steps, config, "subset_steps", fix)
    if config.batch_anchors is not None:
        require(config.batch_anchors >= 1, config, "batch_anchors", "must be at least 1; leave it out for all")


def _check_objective(config: TrainConfig) -> None:
    require(config.advantage_clip > 0, config, "advantage_clip", "must be above 0")
    require(0 < config.clip_low < 1, config, "clip_low", "must lie between 0 and 1")
    require(config.clip_high > 0, config, "clip_high", "must be above 0")
    if config.kl == "none":
        require(config.kl_weight == 0, config, "kl_weight", "has no effect with --kl none; choose a --kl")
    else:
        require(config.kl_weight > 0, config, "kl_weight", f"must be above 0 with --kl {config.kl}")


def _check_optimiser(config: TrainConfig) -> None:
    for field in ("learning_rate", "max_grad_norm"):
        require(getattr(config, field) > 0, config, field, "must be above 0")
    for field in ("beta1", "beta2", "ema_decay"):
        require(0 <= getattr(config, field) < 1, config, field, "must be at least 0 and below 1")
    for field in ("weight_decay", "warmup_updates"):
        require(getattr(config, field) >= 0, config, field, "must not be negative")
    if config.schedule == "cosine":
        fix = f"must be below --updates {config.updates} with --schedule cosine"
        require(config.warmup_updates < config.updates, config, "warmup_updates", fix)


def _check_schedule_of_outputs(config: TrainConfig) -> None:
    for field in ("eval_every", "sample_every", "checkpoint_every"):
        require(getattr(config, field) >= 0, config, field, "must not be negative; 0 is only after the last update")
    for field in ("eval_prompts", "keep_checkpoints", "max_skipped_updates"):
        require(getattr(config, field) >= 1, config, field, "must be at least 1")
    if config.reward_threads is not None:
        require(config.reward_threads >= 1, config, "reward_threads", "must be at least 1")


def _check_task_and_rewards(config: TrainConfig) -> None:
    from jagg_jax.prompts import TASKS
    from jagg_jax.rewards import REWARDS

    known = f"choose from {', '.join(TASKS)}{closest(config.task, TASKS)}"
    require(config.task in TASKS, config, "task", known)
    task = TASKS[config.task]
    held_out, trained = len(task.prompts("eval")), len(task.prompts("train"))
    fix = f"task {config.task} has {held_out} held-out prompts; ask for at most that many"
    require(config.eval_prompts <= held_out, config, "eval_prompts", fix)
    prompts = config.batch_size // config.num_generations
    fix = f"makes {prompts} prompts a rollout, task {config.task} has {trained}; lower it or raise --num-generations"
    require(prompts <= trained, config, "batch_size", fix)
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
