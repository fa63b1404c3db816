"""Tests of the compressibility reward."""

import io

import numpy as np
import pytest
from PIL import Image

from jagg_jax.rewards import make_rewards


def test_is_minus_the_file_size_in_kilobytes(tmp_path):
    image = np.random.default_rng(0).uniform(size=(1, 24, 64, 3)).astype(np.float32)
    score = make_rewards(["jpeg_compressibility"], "ab")(image, ["a"])["jpeg_compressibility"]
    path = tmp_path / "image.jpg"
    Image.fromarray(np.rint(image[0] * 255).astype(np.uint8)).save(path, quality=95)
    assert score[0] == pytest.approx(-path.stat().st_size / 1000)
    assert Image.open(io.BytesIO(path.read_bytes())).size == (64, 24)


def test_flat_images_score_better_than_noise():
    noise = np.random.default_rng(0).uniform(size=(24, 64, 3)).astype(np.float32)
    images = np.stack([np.full_like(noise, 0.5), noise * np.float32(0.2), noise])
    scores = make_rewards(["jpeg_compressibility"], "ab")(images, ["a", "b", "ab"])["jpeg_compressibility"]
    assert (np.diff(scores) < 0).all()
