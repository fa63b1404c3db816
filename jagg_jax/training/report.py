"""Pictures of a run: a grid of samples, and report.png with the curves and the samples before and after.

Both are written to a temporary name first. The figures use matplotlib's objects only, so no global state is touched.
"""

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import LogFormatterSciNotation, LogLocator, MaxNLocator, NullLocator
from PIL import Image, ImageDraw, ImageFont

from jagg_jax.training.config import TrainConfig
from jagg_jax.training.metrics import read_metrics
from jagg_jax.training.run_dir import load_config

INK, FAINT, GRID = "#22272e", "#8b95a1", "#e6e9ed"
TRAIN_COLOUR = "#9aa7b5"
EVAL_COLOURS = ("#1668b8", "#d1495b", "#2f9e6e", "#8a5cc2", "#c98a1b")
TIME_COLOURS = {"rollout": "#7fb0de", "reward": "#f0c36d", "update": "#1668b8"}
RUNNING_MEAN = 10
MAX_SAMPLES = 24


def sample_grid(images: np.ndarray, captions: Sequence[str], path: str | Path, columns: int = 6) -> None:
    """Write a picture of samples in rows, each with its caption below it.

    Args:
        images: Float [N, H, W, 3 or 1] in [0, 1], N at least 1; values outside are clipped, non-finite ones are black.
        captions: N lines of text, such as the prompt and its reward.
        path: The PNG file to write.
        columns: Samples in a row.

    Raises:
        ValueError: If `images` has another shape, or the number of captions differs from theirs.
    """
    _write(Image.fromarray(montage(images, captions, columns)), Path(path))


def write_report(run_dir: str | Path, before: np.ndarray, after: np.ndarray, captions: Sequence[str]) -> Path:
    """Write `run_dir`/report.png from the run's metrics and settings, and samples of the same prompts and seeds.

    Args:
        run_dir: Folder of a run, with its config.json and metrics.jsonl.
        before: Float [N, H, W, 3 or 1] in [0, 1]: samples of the pre-trained model; the first 24 are shown.
        after: The same of the trained model.
        captions: N prompts.

    Returns:
        The path of the picture.

    Raises:
        ValueError: If the metrics hold no update, or `before`, `after` and `captions` don't match.
    """
    run_dir = Path(run_dir)
    metrics = read_metrics(run_dir)
    lines = [line for line in metrics if line["update"] > 0]
    if not lines:
        raise ValueError(f"{run_dir}: the metrics hold no update; there is nothing to report")
    config, preset = load_config(run_dir)
    main, others = _reward_panels(metrics, lines, config)
    figure = Figure(figsize=(15, 10.2 + 2.2 * math.ceil(len(others) / 3)), dpi=110, layout="constrained")
    FigureCanvasAgg(figure)
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    figure.suptitle(_title(config, preset, metrics, lines), fontsize=14, color=INK, x=0.012, ha="left")
    rows = figure.subfigures(2, 1, height_ratios=[6.6 + 2.2 * math.ceil(len(others) / 3), 3.6])
    _draw_curves(rows[0], main, others, lines)
    _draw_samples(rows[1], before, after, captions, lines[-1]["update"])
    figure.canvas.draw()
    path = run_dir / "report.png"
    _write(Image.fromarray(np.asarray(figure.canvas.buffer_rgba())).convert("RGB"), path)
    return path


def montage(images: np.ndarray, captions: Sequence[str], columns: int = 6, text_size: int = 17) -> np.ndarray:
    """The samples as one picture: enlarged by a whole factor without smoothing, captions below.

    Args and errors as `sample_grid`; `text_size` is that of the captions in pixels.

    Returns:
        uint8 [height, width, 3].
    """
    images = np.asarray(images, np.float32)
    if images.ndim != 4 or images.shape[-1] not in (1, 3) or not len(images):
        raise ValueError(f"images have shape {images.shape}: they must be [N, H, W, 3 or 1] with N of at least 1")
    if len(captions) != len(images):
        raise ValueError(f"{len(captions)} captions for {len(images)} images: there must be one each")
    columns = min(columns, len(images))
    rows = math.ceil(len(images) / columns)
    height, width = images.shape[1:3]
    scale = max(1, round(192 / width))
    font = ImageFont.truetype(str(Path(matplotlib.get_data_path()) / "fonts/ttf/DejaVuSans.ttf"), text_size)
    gap, text_height = 12, round(1.75 * text_size)
    cell_width, cell_height = width * scale + gap, height * scale + text_height + gap
    canvas = Image.new("RGB", (columns * cell_width + gap, rows * cell_height + gap), "white")
    draw = ImageDraw.Draw(canvas)
    pixels = np.rint(np.clip(np.nan_to_num(images), 0, 1) * 255).astype(np.uint8)
    pixels = np.broadcast_to(pixels, (*pixels.shape[:3], 3)).repeat(scale, axis=1).repeat(scale, axis=2)
    for index, (sample, caption) in enumerate(zip(pixels, captions, strict=True)):
        left, top = gap + index % columns * cell_width, gap + index // columns * cell_height
        canvas.paste(Image.fromarray(sample), (left, top))
        center = (left + width * scale / 2, top + height * scale + text_height / 2)
        draw.text(center, caption, fill=INK, font=font, anchor="mm")
    return np.asarray(canvas)


class _Series(NamedTuple):
    """One reward over the updates; `held_out` ones are no part of the training reward."""

    name: str
    updates: np.ndarray
    values: np.ndarray
    training: bool = False
    held_out: bool = False

    @property
    def in_unit_interval(self) -> bool:
        finite = self.values[np.isfinite(self.values)]
        return bool(np.all((finite >= 0) & (finite <= 1)))


def _reward_panels(metrics: list[dict], lines: list[dict], config: TrainConfig) -> tuple[list[_Series], list[_Series]]:
    """The curves of the large panel, which share the training reward's scale, and those that need one of their own."""
    main = [_Series("training rollouts", _column(lines, "update"), _column(lines, "reward_mean"), training=True)]
    others = []
    names = list(dict.fromkeys(key for line in metrics for key in line if key.startswith("eval/")))
    for key in names:
        measured = [line for line in metrics if key in line]
        name = key.removeprefix("eval/")
        held_out = name not in config.rewards
        series = _Series(name, _column(measured, "update"), _column(measured, key), held_out=held_out)
        alone = list(config.rewards) == [name]
        (main if alone or (series.in_unit_interval and main[0].in_unit_interval) else others).append(series)
    return main, others


def _draw_curves(figure: Any, main: list[_Series], others: list[_Series], lines: list[dict]) -> None:
    extra_rows = math.ceil(len(others) / 3)
    grid = figure.add_gridspec(3 + extra_rows, 3, height_ratios=[1.2, 0.8, 0.8] + [1] * extra_rows)
    rewards = figure.add_subplot(grid[:3, :2])
    _style(rewards, "reward: training rollouts, and fixed held-out prompts and noise")
    rewards.set_xlabel("update", fontsize=9.5, color=INK)
    for index, series in enumerate(main):
        _draw_series(rewards, series, EVAL_COLOURS[(index - 1) % len(EVAL_COLOURS)])
    if all(series.in_unit_interval for series in main):
        top = max(np.nan_to_num(series.values).max() for series in main)
        rewards.set_ylim(0, min(1.02, 1.1 * top) if top else 1.02)
    rewards.legend(loc="lower right", fontsize=10, labelcolor=INK, handlelength=3.2, framealpha=0.9, edgecolor=GRID)
    _draw_times(figure.add_subplot(grid[0, 2]), lines)
    _draw_log(figure.add_subplot(grid[1, 2]), lines, "ratio_max_deviation", "largest |ratio − 1|")
    _draw_log(figure.add_subplot(grid[2, 2]), lines, "grad_norm", "gradient norm before clipping")
    for index, series in enumerate(others):
        axes = figure.add_subplot(grid[3 + index // 3, index % 3])
        _draw_series(axes, series, EVAL_COLOURS[(len(main) - 1 + index) % len(EVAL_COLOURS)])
        _style(axes, axes.get_lines()[0].get_label())


def _draw_series(axes: Axes, series: _Series, colour: str) -> None:
    updates, values = series.updates, series.values
    if series.training:
        marker = "." if len(values) < 30 else None
        axes.plot(updates, values, color=TRAIN_COLOUR, alpha=0.55, linewidth=1, marker=marker, label=series.name)
        if len(values) > 1:
            label = f"their running mean over {RUNNING_MEAN} updates"
            axes.plot(updates, _running_mean(values), color=INK, linewidth=1.6, label=label)
        return
    finite = values[np.isfinite(values)]
    numbers = f"  {finite[0]:.3f} → {finite[-1]:.3f}" if len(finite) else ""
    label = f"{series.name}{' (not trained on)' if series.held_out else ''}{numbers}"
    style = (0, (4, 2)) if series.held_out else "-"
    axes.plot(updates, values, color=colour, linestyle=style, linewidth=2, marker="o", markersize=5, label=label)


def _draw_times(axes: Axes, lines: list[dict]) -> None:
    """Stacked seconds of each update; the axis ends soon after the median, the first one also compiles."""
    updates = _column(lines, "update")
    edges = np.append(updates, updates[-1] + 1) - 0.5
    base = np.zeros(len(lines))
    totals = sum(np.nan_to_num(_column(lines, f"seconds_{part}")) for part in TIME_COLOURS)
    for part, colour in TIME_COLOURS.items():
        seconds = np.nan_to_num(_column(lines, f"seconds_{part}"))
        label = f"{part} {np.median(seconds):.2f} s"
        axes.stairs(base + seconds, edges, baseline=base, fill=True, color=colour, label=label)
        base = base + seconds
    limit = 1.6 * float(np.median(totals))
    longest = f", longest {totals.max():.1f}" if totals.max() > limit else ""
    _style(axes, f"seconds an update: median {np.median(totals):.2f}{longest}")
    axes.set_xlim(edges[0], edges[-1])
    if limit > 0:
        axes.set_ylim(0, limit)
    handles, labels = axes.get_legend_handles_labels()
    place = {"loc": "upper right", "ncols": 3, "columnspacing": 1.2, "handlelength": 1.2}
    axes.legend(handles[::-1], labels[::-1], fontsize=9, labelcolor=INK, framealpha=0.9, edgecolor=GRID, **place)


def _draw_log(axes: Axes, lines: list[dict], key: str, title: str) -> None:
    """A curve on a logarithmic axis of whole decades; zeros have no place there and are counted in the title."""
    updates, values = _column(lines, "update"), _column(lines, key)
    zeros = int(np.sum(values == 0))
    skipped = updates[_column(lines, "skipped") > 0]
    title += f", exactly 0 in {zeros} of {len(values)}" if zeros else ""
    _style(axes, title + (f", × skipped {len(skipped)}" if len(skipped) else ""))
    positive = values[values > 0]
    style = {"linewidth": 1.1, "marker": ".", "markersize": 6 if len(values) < 30 else 2.5}
    axes.plot(updates, np.where(values > 0, values, np.nan), color=EVAL_COLOURS[0], **style)
    axes.set_xlim(updates[0] - 0.5, updates[-1] + 0.5)
    axes.plot(skipped, np.full(len(skipped), 0.08), "x", transform=axes.get_xaxis_transform(), color=EVAL_COLOURS[1])
    if not len(positive):
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    low, high = math.floor(math.log10(positive.min())), math.ceil(math.log10(positive.max()))
    axes.set_ylim(10.0**low, 10.0 ** max(high, low + 1))
    axes.yaxis.set_major_locator(LogLocator(numticks=5))
    axes.yaxis.set_major_formatter(LogFormatterSciNotation())
    axes.yaxis.set_minor_locator(NullLocator())


def _draw_samples(figure: Any, before: np.ndarray, after: np.ndarray, captions: Sequence[str], update: int) -> None:
    if len(before) != len(after):
        raise ValueError(f"{len(before)} samples before and {len(after)} after: they must be of the same prompts")
    panels = figure.subplots(1, 2)
    titles = ("before: the pre-trained model", f"after update {update}, same prompts and noise")
    captions = list(captions)[:MAX_SAMPLES]
    for axes, title, images in zip(panels, titles, (before, after), strict=True):
        axes.imshow(montage(images[:MAX_SAMPLES], captions, text_size=26), interpolation="antialiased")
        axes.set_title(title, loc="left", fontsize=11, color=INK)
        axes.set_anchor("W")
        axes.set_axis_off()


def _title(config: TrainConfig, preset: str, metrics: list[dict], lines: list[dict]) -> str:
    groups = f", {config.steps_per_group} steps a group" if config.plan in ("jagg", "hat") else ""
    kept = f", {config.subset_steps} of {config.num_train_steps} steps" if config.plan == "subset" else ""
    sampler = f"{config.sampler} at noise level {config.noise_level:g}"
    settings = f"{preset}: plan {config.plan}{groups}{kept}, {sampler}, seed {config.seed}"
    seconds = sum(np.nan_to_num(_column(lines, f"seconds_{part}")).sum() for part in TIME_COLOURS)
    count = lines[-1]["update"]
    spent = f"{count} update{'s' if count > 1 else ''} in {seconds / 60:.1f} minutes without the evaluations"
    name = next(iter(config.rewards))
    measured = _column([line for line in metrics if f"eval/{name}" in line], f"eval/{name}")
    if not len(measured):
        return f"{settings}\n{spent}"
    prompts = f"{name} on {config.eval_prompts} held-out prompts"
    return f"{settings}\n{prompts} {measured[0]:.3f} → {measured[-1]:.3f}, {spent}"


def _style(axes: Axes, title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11, color=INK)
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(FAINT)
    axes.tick_params(colors=FAINT, labelcolor=INK, labelsize=9)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))


def _column(lines: list[dict], key: str) -> np.ndarray:
    """One metric over the lines, float64; what is missing or null is NaN."""
    return np.array([math.nan if line.get(key) is None else line[key] for line in lines], np.float64)


def _running_mean(values: np.ndarray) -> np.ndarray:
    """The mean of each value and up to RUNNING_MEAN - 1 before it, those that are finite."""
    windows = [values[max(0, end - RUNNING_MEAN) : end] for end in range(1, len(values) + 1)]
    finite = [window[np.isfinite(window)] for window in windows]
    return np.array([window.mean() if len(window) else math.nan for window in finite])


def _write(image: Image.Image, path: Path) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        image.save(temporary, format="PNG", optimize=True)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
