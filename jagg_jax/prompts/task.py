"""What a task is: a set of short text prompts, their encoding, and real images of them to pre-train on."""

import abc
import dataclasses
import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal, get_args

import numpy as np

Split = Literal["train", "eval"]


@dataclasses.dataclass(frozen=True)
class Task(abc.ABC):
    """A text-to-image task whose prompts are short strings over a small alphabet.

    Attributes:
        name: the name in the registry.
        alphabet: the characters a prompt may contain, each once; character k has token k + 1.
        image_shape: (height, width, channels); one channel, white on black.
        prompt_length: characters of the longest prompt, L.
        shortest_prompt: characters of the shortest prompt.
    """

    name: str
    alphabet: str
    image_shape: tuple[int, int, int]
    prompt_length: int
    shortest_prompt: int

    @property
    def vocab_size(self) -> int:
        """Number of tokens: the alphabet and token 0, which is padding and the null condition."""
        return len(self.alphabet) + 1

    @abc.abstractmethod
    def prompts(self, split: Split) -> tuple[str, ...]:
        """Return all prompts of a split, in a fixed shuffled order; the two splits are disjoint."""

    @abc.abstractmethod
    def render(self, rng: np.random.Generator, prompts: Sequence[str], split: Split = "train") -> np.ndarray:
        """Draw one real image a prompt.

        Args:
            rng: where the choice of handwriting or font comes from.
            prompts: N strings.
            split: "eval" draws from material kept out of "train", where the task has some.

        Returns:
            float32 [N, H, W, 1] in [0, 1], white text on black.

        Raises:
            ValueError: as `encode`, or an unknown split.
        """

    def encode(self, prompts: Sequence[str]) -> np.ndarray:
        """Turn prompts into tokens.

        Returns:
            int32 [N, L]; character k of the alphabet is k + 1; shorter prompts are padded with 0 on the right.

        Raises:
            ValueError: a prompt of the wrong length or with a character outside the alphabet.
        """
        tokens = np.zeros((len(prompts), self.prompt_length), np.int32)
        for row, prompt in zip(tokens, prompts, strict=True):
            self._check_prompt(prompt)
            row[: len(prompt)] = [self.alphabet.index(character) + 1 for character in prompt]
        return tokens

    def _check_prompt(self, prompt: str) -> None:
        shortest, longest = self.shortest_prompt, self.prompt_length
        if not shortest <= len(prompt) <= longest:
            wanted = f"{longest}" if shortest == longest else f"{shortest} to {longest}"
            raise ValueError(f"prompt {prompt!r} has {len(prompt)} characters: task {self.name} takes {wanted}")
        for character in prompt:
            if character not in self.alphabet:
                raise ValueError(f"prompt {prompt!r} has the character {character!r}: use only {self.alphabet}")


def split_prompts(prompts: Iterable[str], num_eval: int) -> dict[Split, tuple[str, ...]]:
    """Shuffle prompts by their SHA-256 and keep the first `num_eval` for evaluation.

    The order depends on the strings alone, on no random generator's version; any leading part of it is a fair sample.
    """
    shuffled = sorted(prompts, key=lambda prompt: hashlib.sha256(prompt.encode()).digest())
    return {"eval": tuple(shuffled[:num_eval]), "train": tuple(shuffled[num_eval:])}


def check_split(split: str) -> None:
    """Raise a ValueError unless `split` is "train" or "eval"."""
    if split not in get_args(Split):
        raise ValueError(f"split is {split!r}: use one of {', '.join(get_args(Split))}")
