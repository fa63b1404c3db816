"""Tests of the text readers on real handwriting and print: ceilings, masking, edge cases."""

import dataclasses

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from jagg_jax.prompts import get_task
from jagg_jax.rewards import ctc, make_rewards
from jagg_jax.rewards.ocr import PP_OCR_V5, PP_OCR_V6, TextReader, edit_similarity, target_log_probability


def real_images(task, prompts, seed=0):
    """Images of material that no training uses, as colour images."""
    return np.repeat(task.render(np.random.default_rng(seed), prompts, "eval"), 3, axis=-1)


@pytest.mark.parametrize(
    ("name", "lowest"),
    [
        ("digits", {"ocr_edit": 0.94, "ocr_logprob": -0.25, "ocr_v5_edit": 0.92}),
        ("digits4", {"ocr_edit": 0.94, "ocr_logprob": -0.25, "ocr_v5_edit": 0.92}),
        ("words", {"ocr_edit": 0.99, "ocr_logprob": -0.02, "ocr_v5_edit": 0.98}),
    ],
)
def test_real_images_are_read(name, lowest):
    task = get_task(name)
    prompts = task.prompts("eval")[:64]
    images = real_images(task, prompts)
    right = make_rewards(tuple(lowest), task.alphabet)(images, prompts)
    for reward, values in right.items():
        assert values.mean() > lowest[reward]
    wrong = make_rewards(("ocr_edit", "ocr_logprob"), task.alphabet)(images[:16], prompts[16:32])
    assert wrong["ocr_edit"].mean() < 0.3
    assert wrong["ocr_logprob"].mean() < -8


def test_log_probability_ranks_images_that_cannot_be_read():
    """Fading an image into noise lowers the log-probability steadily, also where the edit similarity is flat."""
    task = get_task("words")
    prompts = task.prompts("train")[:24]
    images = real_images(task, prompts)
    noise = np.random.default_rng(0).normal(0.5, 0.25, images.shape[:-1])[..., None].repeat(3, -1)
    rewards = make_rewards(("ocr_edit", "ocr_logprob"), task.alphabet)
    means = {}
    for share in (0.0, 0.15, 0.3, 0.5, 1.0):
        blend = np.clip(share * images + (1 - share) * noise, 0, 1).astype(np.float32)
        means[share] = {name: values.mean() for name, values in rewards(blend, prompts).items()}
    log_probabilities = [mean["ocr_logprob"] for mean in means.values()]
    assert log_probabilities == sorted(log_probabilities)
    assert log_probabilities[1] > log_probabilities[0] + 0.2
    assert means[0.15]["ocr_edit"] < 0.1


def test_columns_are_distributions():
    reader = TextReader(PP_OCR_V6, "0123456789")
    images = np.random.default_rng(0).uniform(size=(3, 16, 48, 3)).astype(np.float32)
    probabilities = reader.probabilities(images)
    assert probabilities.shape == (3, 18, 11)
    np.testing.assert_allclose(probabilities.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("model", [PP_OCR_V6, PP_OCR_V5], ids=["v6", "v5"])
def test_the_mask_keeps_the_alphabet_only(model):
    """A printed word is read with its own letters, and as something else, of digits, where only digits may be read."""
    image = Image.new("RGB", (64, 24), "white")
    ImageDraw.Draw(image).text((32, 12), "sole", fill="black", font=ImageFont.load_default(20), anchor="mm")
    pixels = np.asarray(image, np.float32)[None] / np.float32(255)
    assert TextReader(model, "abcdefghijklmnopqrstuvwxyz").read(pixels) == ["sole"]
    digits = TextReader(model, "0123456789").read(pixels)[0]
    assert set(digits) <= set("0123456789")


def test_every_character_of_the_tasks_has_its_own_class():
    """Reading each printed character alone tells apart all of them: the classes are those of the alphabet, in order."""
    task = get_task("words")
    prompts = [character * 3 for character in task.alphabet]
    read = TextReader(PP_OCR_V6, task.alphabet).read(real_images(task, prompts))
    assert sum(a == b for a, b in zip(read, prompts, strict=True)) >= 32


def test_unknown_character_and_wrong_file_are_refused():
    with pytest.raises(ValueError, match="does not know the characters 'ỻ'"):
        TextReader(PP_OCR_V6, "0ỻ1")
    with pytest.raises(ValueError, match="expected 0000"):
        TextReader(dataclasses.replace(PP_OCR_V6, weights_sha256="0" * 64), "01")


def test_edit_similarity():
    read = ["427", "42", "4275", "", "999", "1234567"]
    found = edit_similarity(read, ["427"] * 6)
    np.testing.assert_allclose(found, [1, 2 / 3, 2 / 3, 0, 0, 0], atol=1e-6)
    assert found.dtype == np.float32


def test_target_log_probability_is_clipped_and_divided_by_the_length():
    certain = np.eye(3, dtype=np.float32)[[[1, 0, 2, 0]]]  # reads "ab" for sure
    assert target_log_probability(certain, ["ab"], "ab").tolist() == [0]
    assert target_log_probability(certain, ["ba"], "ab").tolist() == [-10]
    even = np.full((1, 4, 3), 1 / 3, np.float32)
    exact = ctc.log_probability(np.log(even), [np.array([1, 2])])
    np.testing.assert_allclose(target_log_probability(even, ["ab"], "ab"), exact / 2, rtol=1e-6)
