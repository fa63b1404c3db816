"""From what a rollout and its updates measured to the line that is logged; and what must not be overlooked in it."""

import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jagg_jax.plans import BackwardPlan
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.errors import TrainingError
from jagg_jax.training.experiment import Experiment
from jagg_jax.training.flops import ModelFlops, model_flops, peak_flops

QUANTILES = ("ratio_q01", "ratio_q50", "ratio_q99")
COMPILATION_EVENT = "/jax/core/compile/backend_compile_duration"

# Largest |sum of a prompt's advantages|, relative to the largest of them, for which one sample may account. Each is
# rounded a few times, by 6e-8 at most, and so is the mean that was taken off: 6.4e-8 a sample is the most we have seen,
# over prompts of 2 to 4,096 samples with tied, far-from-zero, heavy-tailed and missing rewards.
ADVANTAGE_SUM_LIMIT = 1e-6


class Compilations:
    """Counts the XLA programs that this process compiles, the small ones of single operations included."""

    def __init__(self):
        """Count from now on, until the process ends; `count_compilations` is the process's only one."""
        self.count = 0
        jax.monitoring.register_event_duration_secs_listener(self._record)

    def _record(self, event: str, duration: float, **details: Any) -> None:
        if event == COMPILATION_EVENT:
            self.count += 1


@functools.cache
def count_compilations() -> Compilations:
    """The counter of this process, which starts when it is asked for first."""
    return Compilations()


@dataclasses.dataclass(frozen=True)
class Throughput:
    """Turns the seconds of an update into rates.

    Attributes:
      batch_size: samples of a rollout.
      flops: what the model takes.
      peak: operations a second of all devices of the run together, or None where one of them is unknown.
    """

    batch_size: int
    flops: ModelFlops
    peak: float | None

    @classmethod
    def of(cls, experiment: Experiment) -> "Throughput":
        """That of an experiment on its devices; traces the model."""
        peaks = [peak_flops(device.device_kind) for device in experiment.mesh.devices.flat]
        return cls(experiment.config.batch_size, model_flops(experiment), None if None in peaks else sum(peaks))

    def __call__(self, plans: Sequence[BackwardPlan], seconds: dict[str, float]) -> dict[str, float]:
        """The metrics of a rollout and the updates after it, one plan each.

        `images_per_second` is over all `seconds`, `model_flops_per_second` over those of "rollout" and "update" alone,
        `utilisation` its share of the devices' dense bfloat16 peak. What rematerialisation repeats is not counted.
        """
        updates = sum(self.flops.update(plan, first=inner == 0) for inner, plan in enumerate(plans))
        rate = (self.flops.rollout + updates) / (seconds["rollout"] + seconds["update"])
        rates = {"images_per_second": self.batch_size / sum(seconds.values()), "model_flops_per_second": rate}
        return rates if self.peak is None else rates | {"utilisation": rate / self.peak}


class PrecisionWarning:
    """Says, once, that rounding alone moves the log-probabilities as far as the clip range allows learning to."""

    def __init__(self, config: TrainConfig):
        """Nothing is said before a change exceeds half of the clip range's narrower side."""
        self._clip_low, self._clip_high = config.clip_low, config.clip_high
        self._said = False

    def __call__(self, largest: float) -> None:
        """Tell stderr about the largest change of a log-probability in a first update, when it is too large."""
        if self._said or not largest > 0.5 * min(self._clip_low, self._clip_high):
            return
        self._said = True
        print(
            f"warning: rounding alone changes a log-probability by {largest:.2g} from rollout to update, and the ratio "
            f"is clipped {self._clip_low:g} below and {self._clip_high:g} above 1, so that noise would be clipped; use "
            f"--compute-dtype float32, or widen --clip-low and --clip-high",
            file=sys.stderr,
        )


def check_advantage_sum(largest: float, num_generations: int, update: int) -> None:
    """Stops a run whose advantages don't sum to zero within each prompt: JAGG would be biased.

    Args:
      largest: `grpo.advantage_sum` of the update.
      num_generations: samples of a prompt.
      update: the number of the update.

    Raises:
      TrainingError: `largest` beyond float noise, which is `num_generations` times ADVANTAGE_SUM_LIMIT.
    """
    limit = num_generations * ADVANTAGE_SUM_LIMIT
    if not largest <= limit:
        raise TrainingError(
            f"update {update}: the advantages of a prompt sum to {largest:.3g} of the largest one, float noise is at "
            f"most {limit:.3g}; they were changed after they were centred"
        )


def merge_updates(history: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Metrics of the optimiser updates on one rollout as one set.

    Means; of the ratio the largest deviation, and the quantiles of the last update, which has moved furthest; how many
    were skipped. With more than one, update i's own deviation and quantiles are `ratio_q01/i` and so on.
    """
    first, last = history[0], history[-1]
    scalars = [name for name in first if np.ndim(first[name]) == 0]
    merged = {name: np.mean([metrics[name] for metrics in history]) for name in scalars}
    merged |= {name: last[name] for name in QUANTILES}
    merged["ratio_max_deviation"] = max(metrics["ratio_max_deviation"] for metrics in history)
    merged["masked_samples"] = int(first["masked_samples"])
    merged["skipped"] = sum(int(metrics["skipped"]) for metrics in history)
    if len(history) > 1:
        for inner, metrics in enumerate(history):
            merged |= {f"{name}/{inner}": metrics[name] for name in ("ratio_max_deviation", *QUANTILES)}
    return merged


def log_prob_changes(changes: np.ndarray, plan: BackwardPlan, window_start: int) -> dict[str, float]:
    """`log_prob_change` [K] of a rollout's first update, by the rollout's step, and the largest."""
    steps = window_start + np.asarray(plan.anchors)
    by_step = {f"log_prob_change/{step}": changes[i] for i, step in sorted(enumerate(steps), key=lambda pair: pair[1])}
    return by_step | {"log_prob_change_max": np.max(changes)}
