"""Progress of a run on stderr: a bar in a terminal, a line an update where there is none."""

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as Bar


class Progress:
    """Shows how many updates are done, the latest numbers, the rate and the time left; a context manager."""

    def __init__(
        self,
        total: int,
        start: int = 0,
        stream: TextIO | None = None,
        lines: int | None = None,
        unit: str = "update",
    ):
        """Show progress from now on.

        Args:
            total: Updates of the whole run.
            start: Updates done before, by the run that this one resumes.
            stream: Where to write; stderr by default.
            lines: How many lines a whole run prints where there is no terminal; one an update by default.
            unit: What is counted, in the singular.
        """
        self._total, self._start, self._began, self._unit = total, start, time.monotonic(), unit
        self._last = start
        self._every = 1 if lines is None else max(total // lines, 1)
        self._console = Console(file=stream or sys.stderr)
        columns = (
            TextColumn(unit),
            MofNCompleteColumn(),
            BarColumn(),
            TextColumn("{task.fields[numbers]}"),
            TextColumn("[dim]{task.fields[pace]}"),
        )
        self._bar = Bar(*columns, console=self._console) if self._console.is_terminal else None
        if self._bar is not None:
            self._task = self._bar.add_task("", total=total, completed=start, numbers="", pace="starting")

    def update(self, update: int, **fields: float) -> None:
        """Show that update number `update` is done, and its numbers, such as reward=0.42."""
        numbers = "  ".join(f"{name} {value:.3f}" for name, value in fields.items())
        pace = self._pace(update)
        if self._bar is not None:
            self._bar.update(self._task, completed=update, numbers=numbers, pace=pace)
        elif update // self._every > self._last // self._every or update == self._total:
            # Plain print: rich would wrap and colour a line that's meant for a log file.
            print(f"{self._unit} {update}/{self._total}  {numbers}  {pace}", file=self._console.file, flush=True)
        self._last = update

    def __enter__(self) -> "Progress":
        """Draw the bar."""
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Leave the bar as it stands, also after an exception."""
        if self._bar is not None:
            self._bar.stop()

    def _pace(self, update: int) -> str:
        per_second = (update - self._start) / max(time.monotonic() - self._began, 1e-9)
        left = round((self._total - update) / per_second) if per_second else 0
        hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
        clock = f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"
        return f"{60 * per_second:.1f} {self._unit}s/min  {clock} left"
