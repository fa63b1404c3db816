import dataclasses

import matplotlib
import numpy as np
import pytest
from PIL import Image

import configs
from jagg_jax.training.metrics import MetricsWriter
from jagg_jax.training.report import montage, sample_grid, write_report
from jagg_jax.training.run_dir import save_config


def draw(run_dir, updates, evaluations=("ocr_edit",), plan="jagg", rewards=None, value=0.5):
    """A report of a run whose numbers are made up; returns its pixels."""
    config = dataclasses.replace(configs.load("quickstart"), plan=plan, rewards=rewards or {"ocr_edit": 1.0})
    run_dir.mkdir(exist_ok=True)
    save_config(run_dir, config, "quickstart")
    with MetricsWriter(run_dir) as writer:
        writer.write(0, {f"eval/{name}": value for name in evaluations})
        for update in range(1, updates + 1):
            line = {"reward_mean": value, "ratio_max_deviation": 0.0, "grad_norm": 0.1 * update, "skipped": 0}
            line |= {"seconds_rollout": 1.0, "seconds_reward": 2.0, "seconds_update": 3.0}
            writer.write(update, line | {f"eval/{name}": value for name in evaluations if update == updates})
    images = np.random.default_rng(0).random((24, 16, 48, 1), np.float32)
    path = write_report(run_dir, images, images, [str(index) for index in range(24)])
    assert path == run_dir / "report.png"
    return np.asarray(Image.open(path))


@pytest.mark.parametrize("updates", [1, 2, 60])
def test_a_report_of_any_length(tmp_path, updates):
    pixels = draw(tmp_path, updates)
    assert pixels.ndim == 3
    assert pixels.shape[1] == 1650
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["report.png"]
    assert list(tmp_path.glob(".*")) == []


def test_the_numbers_reach_the_picture(tmp_path):
    low, high = draw(tmp_path / "low", 30, value=0.2), draw(tmp_path / "high", 30, value=0.7)
    assert low.shape == high.shape
    assert np.any(low != high)
    assert np.array_equal(low, draw(tmp_path / "again", 30, value=0.2))


def test_rewards_of_another_scale_get_panels_of_their_own(tmp_path):
    plain = draw(tmp_path / "plain", 3)
    with_panels = draw(tmp_path / "panels", 3, evaluations=("ocr_edit", "ocr_logprob"), value=-0.5)
    assert with_panels.shape[0] > plain.shape[0]


@pytest.mark.parametrize("value", [float("nan"), 0.0, -3.0])
def test_odd_values_are_drawn(tmp_path, value):
    for plan in ("exact", "subset"):
        draw(tmp_path, 3, value=value, plan=plan, rewards={"ocr_edit": 0.5, "jpeg_compressibility": 1.0})


def test_a_run_without_evaluations_or_timings(tmp_path):
    save_config(tmp_path, configs.load("quickstart"), "quickstart")
    with MetricsWriter(tmp_path) as writer:
        writer.write(7, {"reward_mean": 0.1, "skipped": 1})
    images = np.zeros((1, 8, 8, 3), np.float32)
    assert write_report(tmp_path, images, images, ["a"]).is_file()


def test_nothing_to_report_and_samples_that_do_not_match(tmp_path):
    save_config(tmp_path, configs.load("quickstart"), "quickstart")
    images = np.zeros((2, 8, 8, 1), np.float32)
    with pytest.raises(ValueError, match="nothing to report"):
        write_report(tmp_path, images, images, ["a", "b"])
    with MetricsWriter(tmp_path) as writer:
        writer.write(1, {"reward_mean": 0.1})
    with pytest.raises(ValueError, match="2 samples before and 1 after"):
        write_report(tmp_path, images, images[:1], ["a", "b"])
    with pytest.raises(ValueError, match="1 captions for 2 images"):
        write_report(tmp_path, images, images, ["a"])
    assert not (tmp_path / "report.png").exists()


def test_a_grid_shows_each_pixel_as_a_block_and_rows_of_captions(tmp_path):
    images = np.random.default_rng(1).random((5, 16, 48, 1), np.float32)
    sample_grid(images, [""] * 5, tmp_path / "grid.png", columns=2)
    pixels = np.asarray(Image.open(tmp_path / "grid.png"))
    assert pixels.shape == (12 + 3 * (64 + 30 + 12), 12 + 2 * (192 + 12), 3)
    # the fourth image: second row, second column
    top, left = 12 + (64 + 30 + 12), 12 + (192 + 12)
    block = pixels[top : top + 64, left : left + 192]
    expected = np.rint(images[3] * 255).astype(np.uint8).repeat(4, axis=0).repeat(4, axis=1)
    np.testing.assert_array_equal(block, np.broadcast_to(expected, block.shape))
    assert np.all(pixels[top : top + 64, left + 192 :] == 255)


def test_captions_are_drawn_below_their_image():
    images = np.zeros((2, 8, 8, 3), np.float32)
    blank, named = montage(images, ["", ""]), montage(images, ["", "427"])
    rows, columns = np.nonzero(np.any(blank != named, axis=-1))
    assert rows.min() >= 12 + 192
    assert columns.min() > 12 + 192


def test_grids_clip_values_and_take_what_is_not_finite():
    images = np.array([-1.0, 2.0, np.nan, np.inf], np.float32).reshape(4, 1, 1, 1)
    pixels = montage(images, [""] * 4, columns=4)
    centers = [pixels[12 + 96, 12 + 96 + index * (192 + 12), 0] for index in range(4)]
    assert centers == [0, 255, 0, 255]


@pytest.mark.parametrize("shape", [(0, 8, 8, 3), (8, 8, 3), (1, 8, 8, 4)])
def test_grids_refuse_other_shapes(tmp_path, shape):
    with pytest.raises(ValueError, match="must be"):
        sample_grid(np.zeros(shape, np.float32), ["a"] * shape[0], tmp_path / "grid.png")
    assert list(tmp_path.iterdir()) == []


def test_no_global_state_of_matplotlib_is_touched(tmp_path):
    before = dict(matplotlib.rcParams)
    draw(tmp_path, 2)
    assert dict(matplotlib.rcParams) == before
