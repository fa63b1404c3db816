"""The settings of a pre-training run; imports JAX only where a model is described, so that --help is fast."""

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from jagg_jax.training.config import closest, option, require
from jagg_jax.training.errors import ConfigError

if TYPE_CHECKING:
    from jagg_jax.models import DiTConfig


@dataclasses.dataclass(frozen=True)
class PretrainConfig:
    """Rectified-flow pre-training of a small DiT on a task's real images. `validate` says whether the values fit."""

    task: str = "digits"
    """Prompt set: its training prompts and real images."""
    output: str = ""
    """The .safetensors file to write; it gets the averaged weights and a record of the run."""
    overwrite: bool = False
    """Replace --output where it exists."""
    seed: int = 0
    """All randomness follows from this number and the update's index; 0 to 2**32 - 1."""

    patch_shape: tuple[int, int] = (8, 4)
    """Height and width, in pixels, of the patch that becomes one token."""
    width: int = 128
    """Elements of a token."""
    depth: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads; must divide --width."""
    aligned: bool = True
    """Also add each character's embedding to the image tokens of its slot of the width."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the matrix products; the parameters stay float32."""

    updates: int = 330
    """Optimiser updates."""
    batch_size: int = 64
    """Images an update."""
    learning_rate: float = 4e-3
    """Peak learning rate of AdamW."""
    final_learning_rate: float = 2e-4
    """Learning rate at the end of the cosine decay."""
    warmup_updates: int = 30
    """Updates of linear warm-up; must be below --updates."""
    weight_decay: float = 0.0
    """AdamW's decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""
    ema_decay: float = 0.98
    """Decay an update of the averaged weights, which are the ones written."""
    condition_dropout: float = 0.1
    """Share of the images whose prompt is replaced by the null condition, for classifier-free guidance."""

    eval_prompts: int = 100
    """Held-out prompts that are drawn and read when training is over; 0 is none."""
    eval_steps: int = 10
    """Euler steps of their sampling."""


def validate(config: PretrainConfig) -> None:
    """Check every field, alone and against the others; reads registries and the disk, writes nothing.

    Raises:
      ConfigError: at the first field that can't be used; one line with the option, its value and the fix.
    """
    for field in ("updates", "batch_size", "eval_steps", "width", "depth", "num_heads"):
        require(_whole(config, field) and getattr(config, field) >= 1, config, field, "must be a whole number above 0")
    for field in ("warmup_updates", "eval_prompts"):
        require(_whole(config, field) and getattr(config, field) >= 0, config, field, "must be a whole number from 0")
    require(_whole(config, "seed") and 0 <= config.seed < 2**32, config, "seed", "must lie in 0 to 2**32 - 1")
    for field in ("learning_rate", "max_grad_norm"):
        require(0 < getattr(config, field) < math.inf, config, field, "must be above 0 and finite")
    for field in ("final_learning_rate", "weight_decay"):
        require(0 <= getattr(config, field) < math.inf, config, field, "must be finite and not negative")
    for field in ("ema_decay", "condition_dropout"):
        require(0 <= getattr(config, field) < 1, config, field, "must be at least 0 and below 1")
    fix = f"must be at most --learning-rate {config.learning_rate}"
    require(config.final_learning_rate <= config.learning_rate, config, "final_learning_rate", fix)
    require(
        config.warmup_updates < config.updates, config, "warmup_updates", f"must be below --updates {config.updates}"
    )
    _check_task(config)
    model_config(config)
    _check_output(config)


def model_config(config: PretrainConfig) -> "DiTConfig":
    """The model that a configuration describes, with the sizes of its task.

    Raises:
      ConfigError: sizes that do not fit each other.
    """
    from jagg_jax.models import DiTConfig
    from jagg_jax.prompts import get_task

    task = get_task(config.task)
    shared = ("patch_shape", "width", "depth", "num_heads", "aligned", "dtype")
    try:
        return DiTConfig(
            image_shape=task.image_shape,
            vocab_size=task.vocab_size,
            prompt_length=task.prompt_length,
            **{field: getattr(config, field) for field in shared},
        )
    except ValueError as error:
        field, _, rest = str(error).partition("=")
        raise ConfigError(f"{option(field)} {rest}") from error


def _check_task(config: PretrainConfig) -> None:
    """The task exists and has enough held-out prompts."""
    from jagg_jax.prompts import TASKS

    require(config.task in TASKS, config, "task", f"choose from {', '.join(TASKS)}{closest(config.task, TASKS)}")
    held_out = len(TASKS[config.task].prompts("eval"))
    fix = f"task {config.task} has {held_out} held-out prompts; ask for at most that many"
    require(config.eval_prompts <= held_out, config, "eval_prompts", fix)


def _check_output(config: PretrainConfig) -> None:
    """The file can be written, and nothing is lost by it."""
    path = Path(config.output)
    require(path.suffix == ".safetensors", config, "output", "name a .safetensors file to write")
    require(not path.is_dir(), config, "output", "is a folder; name a file")
    require(config.overwrite or not path.exists(), config, "output", "exists; add --overwrite or name another file")


def _whole(config: PretrainConfig, field: str) -> bool:
    """Whether a field holds an integer that is no truth value."""
    return isinstance(getattr(config, field), int) and not isinstance(getattr(config, field), bool)
