"""How the digit reader's weights came about: run `python -m jagg_jax.rewards.digit_reader_training` to make them."""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import safetensors.numpy

from jagg_jax.prompts.digits import SLOT, digit_images
from jagg_jax.rewards.digit_reader import SHAPES, WEIGHTS_PATH, Params, digit_logits

_EPOCHS, _BATCH, _LEARNING_RATE = 40, 100, 2e-3
_MAX_SHIFT = 2  # pixels, in each direction
_MAX_NOISE = 0.2  # standard deviation of pixel noise, on a scale of 1


def train_digit_reader(seed: int, path: str | Path, epochs: int = _EPOCHS) -> float:
    """Train the digit reader on the 4,000 training digits and write its weights.

    AdamW with a cosine schedule; each image is shifted at random and gets noise of a random strength.

    Args:
        seed: of the initial weights, the order and the augmentation.
        path: safetensors file to write; replaced in one step.
        epochs: passes over the training digits.

    Returns:
        The share of the 1,000 test digits read right; also in the file's metadata.
    """
    images, labels = _labelled("train")
    rng = np.random.default_rng(seed)
    params = _initial_params(rng)
    num_updates = epochs * (len(images) // _BATCH)
    optimizer = optax.adamw(optax.cosine_decay_schedule(_LEARNING_RATE, num_updates), weight_decay=1e-3)
    state = optimizer.init(params)

    @jax.jit
    def update(params: Params, state: optax.OptState, images: jax.Array, labels: jax.Array):
        def loss(params: Params) -> jax.Array:
            return optax.softmax_cross_entropy_with_integer_labels(digit_logits(params, images), labels).mean()

        gradients = jax.grad(loss)(params)
        with jax.numpy_dtype_promotion("standard"):  # Adam's bias correction raises a float to an integer power
            updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state

    for _ in range(epochs):
        for batch in rng.permutation(len(images)).reshape(-1, _BATCH):
            params, state = update(params, state, _augment(rng, images[batch]), labels[batch])
    accuracy = digit_accuracy(params)
    _write(Path(path), params, {"seed": str(seed), "epochs": str(epochs), "test_accuracy": f"{accuracy:.4f}"})
    return accuracy


def digit_accuracy(params: Params) -> float:
    """Return the share of the 1,000 test digits that weights read right."""
    images, labels = _labelled("eval")
    return float((digit_logits(params, jnp.asarray(images)).argmax(axis=-1) == labels).mean())


def _labelled(split: str) -> tuple[np.ndarray, np.ndarray]:
    images = digit_images(split)
    labels = np.repeat(np.arange(10, dtype=np.int32), images.shape[1])
    return images.reshape(-1, SLOT, SLOT).astype(np.float32) / np.float32(255), labels


def _initial_params(rng: np.random.Generator) -> Params:
    """Draw kernels by He's rule for ReLU networks (arXiv:1502.01852); biases are 0."""
    params = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for name, shape in SHAPES.items():
        if name.endswith("kernel"):
            scale = np.sqrt(2 / np.prod(shape[:-1]))
            params[name] = rng.normal(0, scale, shape).astype(np.float32)
    return params


def _augment(rng: np.random.Generator, images: np.ndarray) -> np.ndarray:
    padded = np.pad(images, ((0, 0), (_MAX_SHIFT, _MAX_SHIFT), (_MAX_SHIFT, _MAX_SHIFT)))
    offsets = rng.integers(2 * _MAX_SHIFT + 1, size=(len(images), 2))
    shifted = [image[y : y + SLOT, x : x + SLOT] for image, (y, x) in zip(padded, offsets, strict=True)]
    strength = rng.uniform(0, _MAX_NOISE, (len(images), 1, 1))
    return np.clip(shifted + strength * rng.normal(size=images.shape), 0, 1).astype(np.float32)


def _write(path: Path, params: Params, metadata: dict[str, str]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f"{path.name}.unfinished")
    arrays = {name: np.asarray(array) for name, array in params.items()}
    unfinished.write_bytes(safetensors.numpy.save(arrays, metadata))
    os.replace(unfinished, path)


if __name__ == "__main__":
    target = sys.argv[1] if len(sys.argv) > 1 else WEIGHTS_PATH
    print(f"test accuracy {train_digit_reader(0, target):.4f}, written to {target}")
