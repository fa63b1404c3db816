"""One writer of what a run measures: a JSON line an update in metrics.jsonl, and the same numbers for TensorBoard."""

import json
import math
import numbers
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tensorboardX import SummaryWriter

from jagg_jax.training.run_dir import write_text

METRICS_FILE = "metrics.jsonl"


class MetricsWriter:
    """Writes the metrics of a run; every line is on disk when `write` returns, so the file can be followed."""

    def __init__(self, run_dir: str | Path, resume_from: int | None = None):
        """Open the files of a run.

        Args:
            run_dir: Folder of the run; it must exist.
            resume_from: Update of the checkpoint that the run goes on from: later lines are cut off, and TensorBoard
                hides later events. None starts a new file.

        Raises:
            ValueError: If the file to go on with is damaged, see `read_metrics`.
        """
        self._path = Path(run_dir) / METRICS_FILE
        kept = []
        if resume_from is not None:
            kept = [line for line in read_metrics(run_dir) if line["update"] <= resume_from]
        write_text(self._path, "".join(json.dumps(line) + "\n" for line in kept))
        self._last_update = kept[-1]["update"] if kept else None
        self._file = self._path.open("a", encoding="utf-8")
        purge_step = None if resume_from is None else resume_from + 1
        self._events = SummaryWriter(str(Path(run_dir) / "tensorboard"), purge_step=purge_step, flush_secs=10)

    def write(self, update: int, values: Mapping[str, Any]) -> None:
        """Append the line of one update.

        Args:
            update: Its number; 0 stands for before training. It must rise from line to line.
            values: Metric name -> number (a NumPy or JAX scalar counts as one), string or list of numbers. A
                non-finite number is written as null; TensorBoard gets the finite numbers only.

        Raises:
            ValueError: If `update` doesn't rise, or a value is something else.
        """
        if self._last_update is not None and update <= self._last_update:
            raise ValueError(f"update {update}: the line of update {self._last_update} is already written")
        line = {"update": int(update)} | {name: _plain(name, value) for name, value in values.items()}
        self._file.write(json.dumps(line, allow_nan=False) + "\n")
        self._file.flush()
        self._last_update = update
        for name, value in line.items():
            if name != "update" and isinstance(value, int | float):
                self._events.add_scalar(name, value, update)

    def close(self) -> None:
        """Flush and close both files."""
        self._file.close()
        self._events.close()

    def __enter__(self) -> "MetricsWriter":
        """The writer itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the files, also after an exception."""
        self.close()


def read_metrics(run_dir: str | Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl in order; a last line torn by a crash is left out, a missing file is empty.

    Raises:
        ValueError: If any other line is no JSON object with an integer `update`.
    """
    path = Path(run_dir) / METRICS_FILE
    if not path.is_file():
        return []
    whole_lines = path.read_bytes().split(b"\n")[:-1]
    metrics = []
    for number, text in enumerate(whole_lines, start=1):
        try:
            line = json.loads(text)
            if not isinstance(line["update"], int):
                raise TypeError("update is no integer")
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(f"{path}: line {number} is no line of metrics ({error!r}); repair or delete it") from error
        metrics.append(line)
    return metrics


def _plain(name: str, value: Any) -> str | int | float | list[int | float | None] | None:
    """The JSON value of a metric."""
    if isinstance(value, str):
        return value
    if isinstance(value, list):
        return [_plain_number(name, item) for item in value]
    return _plain_number(name, value)


def _plain_number(name: str, value: Any) -> int | float | None:
    """Scalars of any library as Python numbers, non-finite ones as None."""
    if value is None:
        return None
    if getattr(value, "ndim", None) == 0:
        value = value.item()
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value) if math.isfinite(value) else None
    raise ValueError(f"metric {name}: {type(value).__name__} is no number, string or list of numbers")
