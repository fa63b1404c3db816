"""Tests of the printed words."""

import numpy as np

from jagg_jax.prompts import get_task
from jagg_jax.prompts.words import ALPHABET, WORDS, glyph_images


def test_prompts_are_words_and_codes():
    task = get_task("words")
    prompts = {*task.prompts("train"), *task.prompts("eval")}
    assert prompts >= set(WORDS)
    assert len(prompts) == 950
    assert {len(prompt) for prompt in prompts} == {3, 4}
    assert sum(word in WORDS for word in task.prompts("eval")) >= 25


def test_words_are_listed_once_in_order():
    assert list(WORDS) == sorted(set(WORDS))


def test_shorter_words_are_padded_and_leave_the_last_slot_empty():
    task = get_task("words")
    assert task.encode(["cat"]).tolist() == [[3, 1, 20, 0]]
    image = task.render(np.random.default_rng(0), ["cat"])[0]
    assert image[:, :48].max() > 0.9
    assert image[:, 48:].max() == 0


def test_every_glyph_is_drawn_whole_and_differs_from_the_others():
    for split, variants in (("train", 32), ("eval", 4)):
        glyphs = glyph_images(split)
        assert glyphs.shape == (variants, len(ALPHABET) + 1, 24, 16)
        assert glyphs[:, 0].max() == 0
        assert glyphs[:, 1:].max(axis=(2, 3)).min() > 100
        assert glyphs[:, :, 0].max() == 0  # nothing touches the upper and lower edge, so nothing is cut off
        assert glyphs[:, :, -1].max() == 0
        for glyph in glyphs.reshape(variants, len(ALPHABET) + 1, -1):
            assert len(np.unique(glyph, axis=0)) == len(ALPHABET) + 1


def test_the_evaluation_font_is_not_trained_on():
    train = {glyph.tobytes() for glyph in glyph_images("train")[:, 1:].reshape(-1, 24, 16)}
    held_out = {glyph.tobytes() for glyph in glyph_images("eval")[:, 1:].reshape(-1, 24, 16)}
    assert len(train & held_out) == 0
