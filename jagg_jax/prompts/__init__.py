"""Prompt sets: what to draw, how it is encoded, and real images of it."""

import difflib

from jagg_jax.prompts.digits import make_digit_task
from jagg_jax.prompts.task import Split, Task
from jagg_jax.prompts.words import make_word_task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        make_digit_task("digits", length=3, num_eval=100),
        make_digit_task("digits4", length=4, num_eval=1000),
        make_word_task("words", num_eval=100),
    )
}

__all__ = ["TASKS", "Split", "Task", "get_task"]


def get_task(name: str) -> Task:
    """Return the task of that name.

    Raises:
        ValueError: no such task; the message lists them and suggests the closest.
    """
    if name in TASKS:
        return TASKS[name]
    close = difflib.get_close_matches(name, TASKS, n=1)
    hint = f"did you mean {close[0]}?" if close else f"use one of {', '.join(TASKS)}"
    raise ValueError(f"task is {name!r}: {hint}")
