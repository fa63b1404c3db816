"""Evaluation: fixed held-out prompts and noise, any rewards; and drawing the samples of given prompts."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from jagg_jax.prompts.source import PromptSource
from jagg_jax.rewards import REWARDS, RewardSet, make_rewards
from jagg_jax.training.config import closest, option, require
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.experiment import Experiment, make_drawer, to_images
from jagg_jax.training.report import sample_grid
from jagg_jax.training.run_dir import write_text
from jagg_jax.training.saved_run import RunChoice, SavedRun, load_run
from jagg_jax.training.sharding import batch_shards, gather_rows


@dataclasses.dataclass(frozen=True)
class _DrawChoice(RunChoice):
    """How the chosen model draws: the settings that both commands share."""

    steps: int = 0
    """Denoising steps; 0 takes the run's eval_steps."""
    guidance: float | None = None
    """Classifier-free guidance scale; the run's by default."""
    seed: int = 0
    """Seed of the initial noise."""


@dataclasses.dataclass(frozen=True)
class EvaluateConfig(_DrawChoice):
    """Score a run's model on held-out prompts that training never used, from fixed noise, by ODE steps."""

    rewards: tuple[str, ...] = ()
    """Rewards to measure; the run's eval rewards by default."""
    num_prompts: int = 0
    """Held-out prompts; 0 takes all of the task's."""
    output: str = ""
    """JSON file for the result; empty means evaluation.json in the run's folder."""


@dataclasses.dataclass(frozen=True)
class SampleConfig(_DrawChoice):
    """Draw samples of given prompts with a run's model, as a picture with the prompt under each."""

    prompt: tuple[str, ...] = ()
    """What to draw, e.g. 427; several are allowed."""
    output: str = "samples.png"
    """PNG file to write."""
    count: int = 1
    """Samples a prompt."""


@dataclasses.dataclass(frozen=True)
class Evaluator:
    """Draws and scores the same prompts from the same noise at every call.

    Attributes:
      prompts: what is drawn, N prompts.
      draw: `make_drawer`'s sampler; prompt i starts from noise i.
      batch_size: samples drawn at once, rounded up to a multiple of `shards`.
      shards: the sampler takes batches of a multiple of this.
      rewards: scores images.
    """

    prompts: PromptSource
    draw: Callable
    batch_size: int
    shards: int
    rewards: RewardSet

    def images(self, params: Any, count: int | None = None) -> np.ndarray:
        """Images of the first `count` prompts (all by default, or where there are fewer), float32 [count, H, W, 3]."""
        available = len(self.prompts.texts)
        total = available if count is None else min(count, available)
        size = -(-min(available, self.batch_size) // self.shards) * self.shards
        parts = []
        for start in range(0, total, size):
            # every call has the same shape, so that it is compiled once: the last part is filled up with repeats
            rows = np.minimum(np.arange(start, start + size), available - 1)
            parts.append(to_images(self.draw(params, self.prompts, rows, rows)))
        return np.concatenate(parts)[:total]

    def __call__(self, params: Any) -> tuple[np.ndarray, dict[str, np.ndarray]]:
        """Images float32 [N, H, W, 3] and the scores of each reward, float32 [N]."""
        images = self.images(params)
        return images, self.score(images)

    def score(self, images: np.ndarray) -> dict[str, np.ndarray]:
        """Scores, float32 [N], of images of the first N prompts; every process reads its share of them."""
        total, count = len(images), jax.process_count()
        rows = np.minimum(np.arange(jax.process_index(), -(-total // count) * count, count), total - 1)
        scores = self.rewards(images[rows], [self.prompts.texts[row] for row in rows])
        return {name: gather_rows(rows, values, total) for name, values in scores.items()}


def make_evaluator(
    experiment: Experiment,
    prompts: PromptSource,
    rewards: Sequence[str],
    steps: int | None = None,
    guidance: float | None = None,
    seed: int = 0,
) -> Evaluator:
    """An evaluator of the experiment's model; steps and guidance are the run's by default."""
    config, pipeline = experiment.config, experiment.pipeline
    steps = config.eval_steps if steps is None else steps
    guidance = config.guidance if guidance is None else guidance
    return Evaluator(
        prompts=prompts,
        draw=make_drawer(
            pipeline.velocity_fn,
            pipeline.decoder,
            pipeline.latent_shape,
            steps,
            config.shift,
            guidance,
            seed,
            experiment.mesh,
        ),
        batch_size=config.eval_batch_size,
        shards=batch_shards(experiment.mesh),
        rewards=load_rewards(experiment, rewards, "eval_rewards"),
    )


def load_rewards(experiment: Experiment, names: Sequence[str], field: str) -> RewardSet:
    """The rewards of a setting, with their models loaded.

    Raises:
      ConfigError: a reward that can't score the task, or whose model is missing; names the setting.
    """
    try:
        return make_rewards(tuple(names), experiment.pipeline.alphabet, experiment.config.reward_threads)
    except ValueError as error:
        raise ConfigError(f"{option(field)} {' '.join(names)}: {error}") from error


def summarise(scores: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Mean and standard error of each reward over its finite scores, and how many those are."""
    summary = {}
    for name, values in scores.items():
        finite = values[np.isfinite(values)].astype(np.float64)
        mean = finite.mean() if finite.size else float("nan")
        error = finite.std(ddof=1) / np.sqrt(finite.size) if finite.size > 1 else float("nan")
        summary[name] = {"mean": float(mean), "standard_error": float(error), "samples": int(finite.size)}
    return summary


def evaluate(config: EvaluateConfig) -> dict[str, dict[str, float]]:
    """The `evaluate` command: prints a table, writes JSON, and returns the summary.

    Raises:
      ConfigError: a setting that can't be used, a folder that holds no run.
      CheckpointError: a checkpoint that is missing or damaged.
    """
    saved = _load_run(config)
    run_dir, experiment, update = saved.run_dir, saved.experiment, saved.update
    held_out = experiment.pipeline.eval_prompts
    total = len(held_out.texts)
    require(0 <= config.num_prompts <= total, config, "num_prompts", f"must be 0 to {total}")
    names = config.rewards or experiment.config.eval_rewards
    for name in names:
        choice = f"choose from {', '.join(REWARDS)}{closest(name, REWARDS)}"
        require(name in REWARDS, config, "rewards", choice)
    prompts = held_out.first(config.num_prompts or total)
    evaluator = make_evaluator(experiment, prompts, names, config.steps or None, config.guidance, config.seed)
    _, scores = evaluator(saved.params)
    summary = summarise(scores)
    output = Path(config.output) if config.output else run_dir / "evaluation.json"
    output.parent.mkdir(parents=True, exist_ok=True)
    settings = {"run_dir": str(run_dir), "update": update, "prompts": len(prompts.texts), "seed": config.seed}
    settings |= {"steps": config.steps or experiment.config.eval_steps, "weights": config.weights}
    content = settings | {"rewards": {name: _finite(values) for name, values in summary.items()}}
    write_text(output, json.dumps(content, indent=2, allow_nan=False) + "\n")
    table = Table(title=f"{run_dir}, update {update}, {len(prompts.texts)} held-out prompts")
    for column in ("reward", "mean", "standard error"):
        table.add_column(column)
    for name, values in summary.items():
        table.add_row(name, f"{values['mean']:.3f}", f"{values['standard_error']:.3f}")
    Console().print(table)
    return summary


def sample(config: SampleConfig) -> Path:
    """The `sample` command: writes a picture of the prompts and returns its path.

    Raises:
      ConfigError: a setting that can't be used, a folder that holds no run.
      CheckpointError: a checkpoint that is missing or damaged.
    """
    if not config.prompt:
        raise ConfigError("--prompt: name at least one prompt to draw")
    require(config.count >= 1, config, "count", "must be at least 1")
    output = Path(config.output)
    require(output.suffix == ".png", config, "output", "name a .png file to write")
    saved = _load_run(config)
    experiment = saved.experiment
    prompts = [prompt for prompt in config.prompt for _ in range(config.count)]
    try:
        source = experiment.pipeline.find_prompts(prompts)
    except ValueError as error:
        raise ConfigError(f"--prompt: {error}") from error
    names = experiment.config.eval_rewards[:1]
    evaluator = make_evaluator(experiment, source, names, config.steps or None, config.guidance, config.seed)
    images, scores = evaluator(saved.params)
    output.parent.mkdir(parents=True, exist_ok=True)
    sample_grid(images, captions(prompts, scores), output)
    return output


def captions(prompts: Sequence[str], scores: dict[str, np.ndarray]) -> list[str]:
    """The prompt and its first reward, a line each sample."""
    first = next(iter(scores.values()))
    return [f"{prompt}  {score:.2f}" for prompt, score in zip(prompts, first, strict=True)]


def _load_run(config: _DrawChoice) -> SavedRun:
    """The run, after the checks that the two commands share."""
    require(config.steps >= 0, config, "steps", "must not be negative; 0 takes the run's eval_steps")
    require(config.guidance is None or config.guidance >= 0, config, "guidance", "must not be negative")
    require(0 <= config.seed < 2**32, config, "seed", "must lie in 0 to 2**32 - 1")
    return load_run(config)


def _finite(values: dict[str, float]) -> dict[str, float | None]:
    """The same with None for what JSON has no number for."""
    return {name: value if np.isfinite(value) else None for name, value in values.items()}
