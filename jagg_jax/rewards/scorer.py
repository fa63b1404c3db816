"""What a reward is: a scorer that turns images and prompts into numbers."""

from collections.abc import Sequence
from typing import ClassVar, Protocol

import numpy as np


class Scorer(Protocol):
    """Scores images for one reward or for several that share their work.

    A score depends on its own image and prompt only: not on the others of the batch, and not on their order.
    """

    descriptions: ClassVar[dict[str, str]]  # reward name -> one line for the command line's help

    def __init__(self, alphabet: str | None, num_threads: int | None = None):
        """Load what is needed; raise a ValueError if it is missing or does not suit the alphabet (None: any text)."""

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Score finite images float32 [B, H, W, 3] in [0, 1] of B prompts: every reward's float32 [B]."""
