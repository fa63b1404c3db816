"""The training loop: roll out, score, update; log, evaluate, checkpoint; and end with a picture of it all."""

import contextlib
import dataclasses
import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import numpy as np

from jagg_jax.models import count_parameters
from jagg_jax.plans import BackwardPlan
from jagg_jax.rewards import RewardSet
from jagg_jax.training.checkpoint import Checkpoints
from jagg_jax.training.config import TrainConfig, validate
from jagg_jax.training.draws import describe
from jagg_jax.training.errors import ConfigError, TrainingError
from jagg_jax.training.evaluate import Evaluator, captions, load_rewards, make_evaluator, summarise
from jagg_jax.training.experiment import Experiment, build_experiment, to_images
from jagg_jax.training.metrics import MetricsWriter
from jagg_jax.training.progress import Progress
from jagg_jax.training.report import sample_grid, write_report
from jagg_jax.training.run_dir import check_run_dir, claim_run_dir
from jagg_jax.training.sharding import any_process, gather_rows, join_processes, local_rows, wait_for_all
from jagg_jax.training.summary import (
    Compilations,
    PrecisionWarning,
    Throughput,
    check_advantage_sum,
    count_compilations,
    log_prob_changes,
    merge_updates,
)
from jagg_jax.update import TrainState

GRID = 24  # held-out prompts in a sample grid


class Interrupt:
    """Turns the first Ctrl-C or SIGTERM into a request to save and stop; a second one ends the process at once."""

    def __init__(self):
        """Nothing is caught before the context is entered."""
        self.signal: int | None = None
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> "Interrupt":
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._request)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None:
            sys.exit(128 + number)
        self.signal = number
        print("stopping after this update; once more to end at once", file=sys.stderr)


def train(config: TrainConfig, preset: str) -> Path:
    """Trains by the settings, from the start or from the latest checkpoint, and returns the folder of the run.

    Args:
      config: the settings.
      preset: the name they go by.

    Raises:
      ConfigError: settings that can't be used; nothing has been compiled or written.
      CheckpointError: the checkpoint to resume from is damaged or of another model.
      TrainingError: too many updates in a row had no finite gradient, or advantages don't sum to zero.
      SystemExit: with status 128 + signal, after Ctrl-C or SIGTERM and once everything is saved.
    """
    validate(config)
    compilations = count_compilations()
    join_processes(config.distributed, config.coordinator, config.num_processes, config.process_id)
    check_run_dir(config)
    if jax.process_count() > 1 and not config.run_dir:
        raise ConfigError("--run-dir: several processes share one folder; name it, the same for all of them")
    experiment = build_experiment(config)
    held_out = experiment.pipeline.eval_prompts.first(config.eval_prompts)
    evaluator = make_evaluator(experiment, held_out, config.eval_rewards)
    rewards = load_rewards(experiment, tuple(config.rewards), "rewards")
    state, start = experiment.initial_state(), None
    if config.resume:
        # read before anything is written, so that a damaged checkpoint leaves the folder as it is
        checkpoints = Checkpoints(config.run_dir)
        start = checkpoints.latest()
        state = state if start is None else checkpoints.restore(start, state)
    wait_for_all("every process has checked the folder")
    first = jax.process_index() == 0
    run_dir = claim_run_dir(config, preset) if first else Path(config.run_dir)
    wait_for_all("the folder is claimed")
    with (
        Checkpoints(run_dir, keep=config.keep_checkpoints) as checkpoints,
        MetricsWriter(run_dir, resume_from=start) if first else contextlib.nullcontext() as writer,
        Interrupt() as interrupt,
    ):
        _Run(
            experiment=experiment,
            rewards=rewards,
            evaluator=evaluator,
            run_dir=run_dir,
            writer=writer,
            checkpoints=checkpoints,
            interrupt=interrupt,
            compilations=compilations,
            throughput=Throughput.of(experiment),
            warn_of_precision=PrecisionWarning(config),
        ).train(state, start or 0)
    return run_dir


@dataclasses.dataclass(frozen=True)
class _Run:
    """What the loop needs at every update. Only the first process has a writer; the others write checkpoints only."""

    experiment: Experiment
    rewards: RewardSet
    evaluator: Evaluator
    run_dir: Path
    writer: MetricsWriter | None
    checkpoints: Checkpoints
    interrupt: Interrupt
    compilations: Compilations
    throughput: Throughput
    warn_of_precision: PrecisionWarning

    @property
    def config(self) -> TrainConfig:
        return self.experiment.config

    def train(self, state: TrainState, start: int) -> None:
        """Updates `start` + 1 to the last one, then the report."""
        config = self.config
        if self.writer and self.experiment.pipeline.num_adapted:
            trained, frozen = map(count_parameters, (self.experiment.initial_trained, self.experiment.frozen))
            matrices = f"{self.experiment.pipeline.num_adapted} matrices adapted"
            print(f"LoRA: {matrices}, {trained:,} parameters trained, {frozen:,} frozen", file=sys.stderr)
        if start == 0:
            self._log(0, self._evaluate(state, 0, draw_grid=True))
        with Progress(config.updates, start) if self.writer else contextlib.nullcontext() as progress:
            for update in range(start + 1, config.updates + 1):
                state, metrics = self._one_update(state, update)
                last = update == config.updates
                if last or _due(update, config.eval_every):
                    metrics |= self._evaluate(state, update, draw_grid=last or _due(update, config.sample_every))
                elif _due(update, config.sample_every):
                    self._draw_grid(state, update)
                self._log(update, metrics)
                if progress:
                    progress.update(update, reward=metrics["reward_mean"])
                self._stop_if_stuck(state, update)
                stopped = any_process(self.interrupt.signal is not None) and not last
                if last or stopped or _due(update, config.checkpoint_every):
                    self.checkpoints.save(update, state, {"update": update})
                if stopped:
                    self._leave(update)
        self._report(state)

    def _log(self, update: int, metrics: dict[str, Any]) -> None:
        if self.writer:
            self.writer.write(update, metrics)

    def _one_update(self, state: TrainState, update: int) -> tuple[TrainState, dict[str, Any]]:
        """Rollout, rewards, advantages and `updates_per_rollout` optimiser updates; returns the metrics to log."""
        config, experiment = self.config, self.experiment
        started = time.perf_counter()
        conditions = experiment.conditions(update)
        reference = experiment.initial_params if config.kl != "none" else None
        samples, transitions, reference_velocities = experiment.roll_out(
            experiment.whole(state.params), reference, np.int32(update), conditions
        )
        rows, local_images = local_rows(experiment.images(samples))
        images = to_images(local_images)
        rolled_out = time.perf_counter()

        rewards, reward_metrics = self._score(images, rows, experiment.prompts(update))
        advantages, zero_std, unbalanced = experiment.advantages(rewards, transitions, reference_velocities)
        check_advantage_sum(float(unbalanced), config.num_generations, update)
        scored = time.perf_counter()

        history, plans = [], []
        for inner in range(config.updates_per_rollout):
            plan = experiment.plan(update, inner)
            # the rollout's velocities hold for its own parameters only: the first update after it
            state, metrics = experiment.update(
                state, experiment.frozen, transitions, advantages, conditions, plan, reference_velocities, inner == 0
            )
            history.append(jax.device_get(metrics))
            plans.append(plan)
        finished = time.perf_counter()
        seconds = {"rollout": rolled_out - started, "reward": scored - rolled_out, "update": finished - scored}
        return state, {
            **reward_metrics,
            "zero_std_fraction": zero_std,
            "advantage_sum": unbalanced,
            **self._update_metrics(update, history, plans),
            "learning_rate": experiment.learning_rate(state.updates),
            **{f"seconds_{part}": value for part, value in seconds.items()},
            **self.throughput(plans, seconds),
            "compilations": self.compilations.count,
        }

    def _score(self, images: np.ndarray, rows: np.ndarray, prompts: list[str]) -> tuple[np.ndarray, dict[str, Any]]:
        """The reward of every sample, float32 [B], and the metrics of all rewards; each process scores its own rows."""
        config = self.config
        scores = self.rewards(images, [prompts[row] for row in rows])
        scores = {name: gather_rows(rows, values, config.batch_size) for name, values in scores.items()}
        rewards = sum(weight * scores[name] for name, weight in config.rewards.items())
        return rewards.astype(np.float32), {
            "reward_mean": _finite_mean(rewards),
            "reward_std": _finite_std(rewards),
            **{f"reward/{name}": _finite_mean(values) for name, values in scores.items()},
            "nonfinite_rewards": int(np.sum(~np.isfinite(rewards))),
        }

    def _update_metrics(self, update: int, history: list[dict], plans: list[BackwardPlan]) -> dict[str, Any]:
        """What the optimiser updates on one rollout measured, and what was drawn for them."""
        drawn = describe(self.config, update, plans[0])
        changes = log_prob_changes(history[0]["log_prob_change"], plans[0], drawn["window_start"])
        if self.writer:
            self.warn_of_precision(changes["log_prob_change_max"])
        return {
            **merge_updates(history),
            **changes,
            "backward_passes": sum(plan.num_anchors for plan in plans),
            "plan": self.config.plan,
            **drawn,
        }

    def _evaluate(self, state: TrainState, update: int, draw_grid: bool) -> dict[str, float]:
        """Means of the evaluation rewards on the fixed held-out prompts, and a grid of the first ones."""
        images, scores = self.evaluator(self.experiment.evaluated_params(state))
        if draw_grid:
            self._save_grid(images, scores, update)
        return {f"eval/{name}": values["mean"] for name, values in summarise(scores).items()}

    def _draw_grid(self, state: TrainState, update: int) -> None:
        images = self.evaluator.images(self.experiment.evaluated_params(state), GRID)
        self._save_grid(images, self.evaluator.score(images), update)

    def _save_grid(self, images: np.ndarray, scores: dict[str, np.ndarray], update: int) -> None:
        if not self.writer:
            return
        path = self.run_dir / "samples" / f"{update:06d}.png"
        path.parent.mkdir(exist_ok=True)
        prompts = self.evaluator.prompts.texts[:GRID]
        sample_grid(images[:GRID], captions(prompts, {k: v[:GRID] for k, v in scores.items()}), path)

    def _stop_if_stuck(self, state: TrainState, update: int) -> None:
        skipped = int(state.skipped_in_a_row)
        if skipped >= self.config.max_skipped_updates:
            latest = self.checkpoints.latest()
            kept = "there is no checkpoint yet" if latest is None else f"the checkpoint of update {latest} is kept"
            raise TrainingError(
                f"update {update}: {skipped} updates in a row had a loss or gradient that is not finite; {kept}; "
                f"lower --learning-rate or raise --max-skipped-updates"
            )

    def _leave(self, update: int) -> None:
        self.checkpoints.steps()  # waits until the save is on disk
        print(f"stopped after update {update}; go on with --run-dir {self.run_dir} --resume", file=sys.stderr)
        sys.exit(128 + (self.interrupt.signal or signal.SIGTERM))

    def _report(self, state: TrainState) -> None:
        """report.png, with the same prompts and noise before and after."""
        before = self.evaluator.images(self.experiment.initial_params, GRID)
        after = self.evaluator.images(self.experiment.evaluated_params(state), GRID)
        if self.writer:
            write_report(self.run_dir, before, after, self.evaluator.prompts.texts[:GRID])


def _due(update: int, every: int) -> bool:
    return every > 0 and update % every == 0


def _finite_mean(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else float("nan")


def _finite_std(values: np.ndarray) -> float:
    finite = values[np.isfinite(values)]
    return float(finite.std()) if finite.size else float("nan")
