"""How small an image gets as a JPEG file: a reward without a model, from DDPO."""

import io
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from PIL import Image

_QUALITY = 95


class JpegScorer:
    """Reward of compressibility; the prompts don't matter.

    Reference: K. Black et al., "Training Diffusion Models with Reinforcement Learning", arXiv:2305.13301, section 5.1.
    """

    descriptions: ClassVar[dict[str, str]] = {
        "jpeg_compressibility": "minus the kilobytes of the image as a JPEG file of quality 95"
    }

    def __init__(self, alphabet: str | None, num_threads: int | None = None):
        """Do nothing: there is nothing to load, and any alphabet will do."""

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Score images float32 [B, H, W, 3] in [0, 1]: minus the file size in units of 1,000 bytes, float32 [B]."""
        pixels = np.rint(images * 255).astype(np.uint8)
        return {"jpeg_compressibility": np.array([-_kilobytes(image) for image in pixels], np.float32)}


def _kilobytes(image: np.ndarray) -> float:
    file = io.BytesIO()
    Image.fromarray(image).save(file, format="JPEG", quality=_QUALITY)
    return file.tell() / 1000
