"""Tests of the handwritten digit strings."""

import numpy as np
import pytest

from jagg_jax.prompts import get_task
from jagg_jax.prompts.digits import digit_images


def test_prompts_are_all_strings_of_that_many_digits():
    task = get_task("digits")
    assert len(task.prompts("train")) == 900
    assert sorted(task.prompts("train") + task.prompts("eval")) == [f"{n:03d}" for n in range(1000)]
    assert len(get_task("digits4").prompts("eval")) == 1000


def test_shorter_strings_are_refused():
    with pytest.raises(ValueError, match="prompt '42' has 2 characters: task digits takes 3"):
        get_task("digits").encode(["427", "42"])


def test_digit_images_are_labelled_right_and_the_splits_share_none():
    train, held_out = digit_images("train"), digit_images("eval")
    assert train.shape == (10, 400, 16, 16)
    assert held_out.shape == (10, 100, 16, 16)
    assert train.dtype == np.uint8
    train_rows, held_out_rows = train.reshape(4000, -1), held_out.reshape(1000, -1)
    assert not {row.tobytes() for row in train_rows} & {row.tobytes() for row in held_out_rows}
    known, asked = (rows / np.linalg.norm(rows, axis=1, keepdims=True) for rows in (train_rows, held_out_rows))
    nearest = (asked @ known.T).argmax(axis=1) // 400
    assert (nearest == np.repeat(np.arange(10), 100)).mean() > 0.9


def test_cached_images_cannot_be_changed():
    with pytest.raises(ValueError, match="read-only"):
        digit_images("train")[0, 0, 0, 0] = 1


@pytest.mark.parametrize("split", ["train", "eval"])
def test_render_takes_each_digit_from_its_class_and_split(split):
    prompts = ("059", "884", "123")
    images = get_task("digits").render(np.random.default_rng(0), prompts, split)
    known = digit_images(split)
    for image, prompt in zip(images, prompts, strict=True):
        for place, digit in enumerate(prompt):
            slot = np.rint(image[:, 16 * place : 16 * place + 16, 0] * 255).astype(np.uint8)
            assert (known[int(digit)] == slot).all(axis=(1, 2)).any()
