"""Prompts by index, and what the model hears of them."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jagg_jax.prompts.cache import PromptCache
from jagg_jax.prompts.task import Task


@dataclasses.dataclass(frozen=True)
class PromptSource:
    """A fixed sequence of P prompts.

    Attributes:
      texts: the prompts.
      read: rows, int [B] in 0 to P - 1 -> the model's condition, a pytree of arrays [B, ...].
      null: the condition of no prompt, or of the negative one: the same pytree, arrays [1, ...].
    """

    texts: tuple[str, ...]
    read: Callable[[np.ndarray], Any]
    null: Any

    def first(self, count: int) -> "PromptSource":
        """The first `count` of these prompts."""
        return dataclasses.replace(self, texts=self.texts[:count])

    @classmethod
    def of_task(cls, task: Task, texts: Sequence[str]) -> "PromptSource":
        """Any prompts of a task, as tokens int32 [B, L].

        Raises:
          ValueError: a prompt that the task can't encode.
        """
        tokens = task.encode(texts)
        return cls(tuple(texts), lambda rows: tokens[rows], np.zeros((1, task.prompt_length), np.int32))

    @classmethod
    def of_cache(cls, cache: PromptCache, start: int = 0, stop: int | None = None) -> "PromptSource":
        """The prompts `start` to `stop` of a cache, as text embeddings, which are read from disk when asked for."""
        return cls(tuple(cache.prompts[start:stop]), lambda rows: cache.rows(start + np.asarray(rows)), cache.negative)
