"""Tests of what all tasks share: the registry, the splits and the encoding."""

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagg_jax.prompts import TASKS, get_task
from jagg_jax.prompts.task import split_prompts

EVERY_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS.keys())


@EVERY_TASK
def test_splits_are_disjoint_and_without_repeats(task):
    train, held_out = task.prompts("train"), task.prompts("eval")
    assert len({*train, *held_out}) == len(train) + len(held_out)
    assert len(train) > len(held_out) >= 100


@EVERY_TASK
def test_every_prompt_encodes_and_decodes(task):
    prompts = task.prompts("train") + task.prompts("eval")
    tokens = task.encode(prompts)
    assert tokens.shape == (len(prompts), task.prompt_length)
    assert tokens.dtype == np.int32
    assert tokens.max() < task.vocab_size
    assert tuple("".join(task.alphabet[t - 1] for t in row if t) for row in tokens) == prompts


@EVERY_TASK
def test_training_prompts_use_the_whole_alphabet_in_every_place(task):
    tokens = task.encode(task.prompts("train"))
    for place in range(task.prompt_length):
        assert set(range(1, task.vocab_size)) <= set(tokens[:, place])


@EVERY_TASK
@pytest.mark.parametrize("split", ["train", "eval"])
def test_render_gives_images_in_range_that_depend_on_the_generator_alone(task, split):
    prompts = task.prompts("eval")[:16]
    images = task.render(np.random.default_rng(3), prompts, split)
    assert images.shape == (16, *task.image_shape)
    assert images.dtype == np.float32
    assert images.min() == 0
    assert 0.9 < images.max() <= 1
    np.testing.assert_array_equal(images, task.render(np.random.default_rng(3), prompts, split))
    assert not np.array_equal(images, task.render(np.random.default_rng(4), prompts, split))


@EVERY_TASK
def test_slots_hold_their_own_character_only(task):
    """Changing one character changes its slot of the width and no other pixel."""
    first, second = (task.alphabet[k] * task.prompt_length for k in (1, 2))
    mixed = first[:1] + second[1:]
    pure, changed = (task.render(np.random.default_rng(0), [prompt])[0] for prompt in (second, mixed))
    slot = task.image_shape[1] // task.prompt_length
    assert not np.array_equal(pure[:, :slot], changed[:, :slot])
    np.testing.assert_array_equal(pure[:, slot:], changed[:, slot:])


@EVERY_TASK
def test_encode_names_the_fault(task):
    good = task.prompts("train")[0]
    with pytest.raises(ValueError, match="has the character '!'"):
        task.encode([good, "!" * task.prompt_length])
    too_long = task.alphabet[0] * (task.prompt_length + 1)
    with pytest.raises(ValueError, match=f"'{too_long}' has {len(too_long)} characters: task {task.name} takes"):
        task.encode([too_long])
    with pytest.raises(ValueError, match="has 0 characters"):
        task.encode([""])


@EVERY_TASK
def test_unknown_split_is_refused(task):
    with pytest.raises(ValueError, match="split is 'test'"):
        task.prompts("test")
    with pytest.raises(ValueError, match="split is 'test'"):
        task.render(np.random.default_rng(0), task.prompts("eval")[:1], "test")


def test_splits_never_change():
    """Weights and published numbers rely on these exact prompts in this order."""
    digests = {
        name: hashlib.sha256(" ".join(task.prompts("train") + task.prompts("eval")).encode()).hexdigest()[:16]
        for name, task in TASKS.items()
    }
    assert digests == {"digits": "80f138d5125129fa", "digits4": "c9918ab339ba2dc9", "words": "da61d25f226b71f2"}


@settings(max_examples=50)
@given(prompts=st.lists(st.text(min_size=1, max_size=5), min_size=2, max_size=20, unique=True), data=st.data())
def test_split_prompts_does_not_depend_on_the_order(prompts, data):
    shuffled = data.draw(st.permutations(prompts))
    split = split_prompts(prompts, 1)
    assert split == split_prompts(shuffled, 1)
    assert sorted(split["train"] + split["eval"]) == sorted(prompts)


def test_get_task():
    assert get_task("digits") is TASKS["digits"]
    with pytest.raises(ValueError, match=r"task is 'digit': did you mean digits\?"):
        get_task("digit")
    with pytest.raises(ValueError, match=re.escape("task is 'xyz': use one of digits, digits4, words")):
        get_task("xyz")
