"""Tests of the digit reader: its committed weights, its training, its refusals."""

import numpy as np
import pytest
import safetensors
import safetensors.numpy

from jagg_jax.prompts import get_task
from jagg_jax.rewards.digit_reader import SHAPES, WEIGHTS_PATH, DigitReader, load_digit_reader
from jagg_jax.rewards.digit_reader_training import digit_accuracy, train_digit_reader
from jagg_jax.rewards.ocr import edit_similarity


def test_committed_weights_read_unseen_digits():
    accuracy = digit_accuracy(load_digit_reader(WEIGHTS_PATH))
    assert accuracy > 0.96
    with safetensors.safe_open(WEIGHTS_PATH, "np") as file:
        assert float(file.metadata()["test_accuracy"]) == pytest.approx(accuracy, abs=0.002)
    assert WEIGHTS_PATH.stat().st_size < 500_000


@pytest.mark.parametrize("name", ["digits", "digits4"])
def test_reads_strings_slot_by_slot(name):
    task = get_task(name)
    prompts = task.prompts("eval")[:70]
    images = np.repeat(task.render(np.random.default_rng(0), prompts, "eval"), 3, axis=-1)
    read = DigitReader().read(images)
    assert edit_similarity(read, prompts).mean() > 0.95
    assert {len(text) for text in read} == {task.prompt_length}
    changed = images.copy()
    changed[:, :, :16] = images[::-1, :, :16]
    for before, after in zip(read, DigitReader().read(changed), strict=True):
        assert before[1:] == after[1:]


def test_guesses_on_noise():
    prompts = get_task("digits").prompts("train")[:300]
    noise = np.random.default_rng(0).uniform(size=(300, 16, 48, 3)).astype(np.float32)
    assert edit_similarity(DigitReader().read(noise), prompts).mean() < 0.25


def test_images_without_whole_slots_are_refused():
    for shape in ((1, 24, 64, 3), (1, 16, 40, 3)):
        with pytest.raises(ValueError, match=f"images are {shape[1]} x {shape[2]} pixels"):
            DigitReader().read(np.zeros(shape, np.float32))


def test_training_learns_and_repeats_itself(tmp_path):
    paths = [tmp_path / "new" / f"{k}.safetensors" for k in range(2)]
    accuracies = [train_digit_reader(5, path, epochs=1) for path in paths]
    assert accuracies[0] > 0.5  # guessing gives 0.1
    first, second = map(load_digit_reader, paths)
    for name in SHAPES:
        np.testing.assert_allclose(first[name], second[name], atol=1e-4)
    assert digit_accuracy(load_digit_reader(paths[0])) == accuracies[0]
    assert sorted(path.name for path in paths[0].parent.iterdir()) == ["0.safetensors", "1.safetensors"]


def test_bad_weight_files_are_refused(tmp_path):
    path = tmp_path / "weights.safetensors"
    with pytest.raises(ValueError, match="cannot be read"):
        load_digit_reader(path)
    path.write_bytes(WEIGHTS_PATH.read_bytes()[:1000])
    with pytest.raises(ValueError, match="cannot be read"):
        load_digit_reader(path)
    good = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
    for name, bad in (
        ("dense2.bias", np.zeros(11, np.float32)),
        ("dense2.bias", np.zeros(10, np.float16)),
        ("extra", np.zeros(10, np.float32)),
    ):
        safetensors.numpy.save_file({**good, name: bad}, path)
        with pytest.raises(ValueError, match="expected float32 tensors of"):
            load_digit_reader(path)
    safetensors.numpy.save_file({**good, "dense2.bias": np.full(10, np.nan, np.float32)}, path)
    with pytest.raises(ValueError, match="are not finite"):
        load_digit_reader(path)
