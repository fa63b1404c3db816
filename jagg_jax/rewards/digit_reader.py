"""A digit reader of our own as a held-out reward: one small network a slot of 16 x 16 pixels.

It shares neither architecture, training data, nor language model with the PP-OCR readers, and knows where each digit
must be. It always answers: on an image without digits its edit similarity is that of guessing, about 0.1.
"""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import safetensors
import safetensors.numpy

from jagg_jax.prompts.digits import SLOT
from jagg_jax.rewards.ocr import edit_similarity

WEIGHTS_PATH = Path(__file__).parent / "weights" / "digit_reader.safetensors"
SHAPES: dict[str, tuple[int, ...]] = {
    "conv1.kernel": (3, 3, 1, 24),
    "conv1.bias": (24,),
    "conv2.kernel": (3, 3, 24, 48),
    "conv2.bias": (48,),
    "dense1.kernel": (4 * 4 * 48, 96),
    "dense1.bias": (96,),
    "dense2.kernel": (96, 10),
    "dense2.bias": (10,),
}
_CHUNK = 64  # slots; a fixed number, so that one compilation serves every batch size

Params = dict[str, jax.Array | np.ndarray]


def digit_logits(params: Params, slots: jax.Array) -> jax.Array:
    """Return the ten logits of each slot: two convolutions with 2 x 2 max-pooling, two dense layers, ReLU between.

    Args:
        params: float32 arrays of `SHAPES`.
        slots: float32 [N, 16, 16] in [0, 1], white on black.

    Returns:
        float32 [N, 10].
    """
    hidden = slots[..., None]
    for layer in ("conv1", "conv2"):
        hidden = jax.lax.conv_general_dilated(
            hidden, params[f"{layer}.kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        hidden = jax.nn.relu(hidden + params[f"{layer}.bias"][None, None, None])
        count, height, width, channels = hidden.shape
        hidden = hidden.reshape(count, height // 2, 2, width // 2, 2, channels).max(axis=(2, 4))
    hidden = hidden.reshape(len(slots), -1) @ params["dense1.kernel"] + params["dense1.bias"][None]
    return jax.nn.relu(hidden) @ params["dense2.kernel"] + params["dense2.bias"][None]


class DigitReader:
    """Reads one digit in each slot of an image."""

    def __init__(self, path: str | Path = WEIGHTS_PATH):
        """Load weights; raise a ValueError as `load_digit_reader`."""
        self._logits: Callable[[jax.Array], jax.Array] = jax.jit(
            functools.partial(digit_logits, load_digit_reader(path))
        )

    def read(self, images: np.ndarray) -> list[str]:
        """Return the B strings of W / 16 digits read in images float32 [B, 16, W, 3] in [0, 1].

        Raises:
            ValueError: the images don't consist of slots of 16 x 16 pixels.
        """
        count, height, width, _ = images.shape
        if height != SLOT or width % SLOT:
            raise ValueError(f"images are {height} x {width} pixels: the digit reader reads slots of {SLOT} x {SLOT}")
        slots = images.mean(axis=-1).reshape(count, SLOT, -1, SLOT).swapaxes(1, 2).reshape(-1, SLOT, SLOT)
        padded = np.pad(slots, ((0, -len(slots) % _CHUNK), (0, 0), (0, 0))).reshape(-1, _CHUNK, SLOT, SLOT)
        logits = np.concatenate([self._logits(jnp.asarray(chunk)) for chunk in padded])
        digits = logits[: len(slots)].argmax(axis=-1).reshape(count, -1)
        return ["".join(map(str, row)) for row in digits]


class DigitReaderScorer:
    """Reward of the digit reader, to watch while training on PP-OCRv6."""

    descriptions: ClassVar[dict[str, str]] = {
        "digit_reader_edit": "as ocr_edit, read slot by slot by a small network of our own; to be held out; digits only"
    }

    def __init__(self, alphabet: str | None, num_threads: int | None = None):
        """Load the reader; JAX runs it, so num_threads has no effect.

        Raises:
            ValueError: the alphabet has other characters than digits, or the weights are missing or damaged.
        """
        if alphabet is None or not set(alphabet) <= set("0123456789"):
            other = "any text" if alphabet is None else f"the alphabet {alphabet!r}"
            raise ValueError(f"digit_reader_edit reads digits only, not {other}: drop this reward")
        self._reader = DigitReader()

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Score images float32 [B, 16, W, 3] in [0, 1]: `edit_similarity`, float32 [B]."""
        return {"digit_reader_edit": edit_similarity(self._reader.read(images), prompts)}


def load_digit_reader(path: str | Path) -> Params:
    """Read and check weights.

    Raises:
        ValueError: no such file, not a safetensors file, tensors other than `SHAPES` in float32, or not finite.
    """
    try:
        params = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise ValueError(f"digit reader weights {path} cannot be read: {error}") from error
    found = {name: (array.shape, array.dtype) for name, array in params.items()}
    if found != {name: (shape, np.dtype(np.float32)) for name, shape in SHAPES.items()}:
        raise ValueError(f"digit reader weights {path} hold {found}: expected float32 tensors of {SHAPES}")
    if not all(np.isfinite(array).all() for array in params.values()):
        raise ValueError(f"digit reader weights {path} are not finite: train them again with train_digit_reader")
    return params
