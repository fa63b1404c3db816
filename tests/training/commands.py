"""The command line of a test run."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def command_line(settings: dict, run_dir: Path, *flags: str) -> list[str]:
    options = []
    for name, value in settings.items():
        if isinstance(value, dict):
            value = " ".join(f"{key}={weight}" for key, weight in value.items())
        elif isinstance(value, tuple):
            value = " ".join(value)
        options += [f"--{name.replace('_', '-')}", *str(value).split()]
    return [sys.executable, str(ROOT / "train.py"), *options, "--run-dir", str(run_dir), *flags]
