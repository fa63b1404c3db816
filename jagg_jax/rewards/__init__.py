"""Rewards: images and prompts to scores, by name."""

import dataclasses
import difflib
from collections.abc import Sequence

import numpy as np

from jagg_jax.rewards.digit_reader import DigitReaderScorer
from jagg_jax.rewards.jpeg import JpegScorer
from jagg_jax.rewards.ocr import HeldOutOcrScorer, OcrScorer
from jagg_jax.rewards.scorer import Scorer

SCORERS: tuple[type[Scorer], ...] = (OcrScorer, HeldOutOcrScorer, DigitReaderScorer, JpegScorer)
REWARDS: dict[str, str] = {name: line for scorer in SCORERS for name, line in scorer.descriptions.items()}

__all__ = ["REWARDS", "SCORERS", "RewardSet", "Scorer", "make_rewards"]


@dataclasses.dataclass(frozen=True)
class RewardSet:
    """Several rewards, each scorer behind them run once a call.

    Attributes:
        names: the rewards asked for, in that order.
        scorers: the scorers that give them.
        alphabet: the characters that prompts may have; None for any.
    """

    names: tuple[str, ...]
    scorers: tuple[Scorer, ...]
    alphabet: str | None

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Score images.

        Args:
            images: float32 [B, H, W, 3], nominally in [0, 1]; clipped to it, as an 8-bit image would be.
            prompts: B strings, non-empty and over the alphabet where there is one.

        Returns:
            name -> float32 [B]; NaN for an image that is not finite everywhere.

        Raises:
            ValueError: images of another shape or dtype, another number of prompts, or a prompt outside the alphabet.
        """
        _check_batch(images, prompts, self.alphabet)
        finite = np.isfinite(images).all(axis=(1, 2, 3))
        scores = {name: np.full(len(images), np.nan, np.float32) for name in self.names}
        if not finite.any():
            return scores
        clipped = np.clip(images[finite], 0, 1)
        finite_prompts = [prompt for prompt, keep in zip(prompts, finite, strict=True) if keep]
        for scorer in self.scorers:
            for name, values in scorer(clipped, finite_prompts).items():
                if name in scores:
                    scores[name][finite] = values
        return scores


def make_rewards(names: Sequence[str], alphabet: str | None, num_threads: int | None = None) -> RewardSet:
    """Load the scorers behind some rewards.

    Args:
        names: names out of `REWARDS`, each once.
        alphabet: the characters that prompts may have, each once; a text reader reads these only. None for prompts
            that may say anything, which text readers don't suit.
        num_threads: threads a scorer may use in one call; None leaves the choice to it.

    Raises:
        ValueError: an unknown or repeated name, no name, num_threads < 1, a reward whose package is missing or that
            does not suit the alphabet.
    """
    for name in names:
        if name not in REWARDS:
            close = difflib.get_close_matches(name, REWARDS, n=1)
            hint = f"did you mean {close[0]}?" if close else f"use some of {', '.join(REWARDS)}"
            raise ValueError(f"reward is {name!r}: {hint}")
    if not names or len(set(names)) < len(names):
        raise ValueError(f"rewards are {list(names)}: name at least one, each once")
    if num_threads is not None and num_threads < 1:
        raise ValueError(f"num_threads is {num_threads}: give at least 1, or None")
    needed = [scorer for scorer in SCORERS if not scorer.descriptions.keys().isdisjoint(names)]
    return RewardSet(tuple(names), tuple(scorer(alphabet, num_threads) for scorer in needed), alphabet)


def _check_batch(images: np.ndarray, prompts: Sequence[str], alphabet: str | None) -> None:
    if images.ndim != 4 or images.shape[-1] != 3 or images.dtype != np.float32:
        raise ValueError(f"images are {images.dtype} {images.shape}: give float32 [B, H, W, 3]")
    if len(prompts) != len(images):
        raise ValueError(f"{len(prompts)} prompts for {len(images)} images: give one a prompt")
    for prompt in prompts:
        if alphabet is not None and (not prompt or not set(prompt) <= set(alphabet)):
            raise ValueError(f"prompt {prompt!r}: give at least one character, all out of {alphabet}")
