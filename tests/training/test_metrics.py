import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from jagg_jax.training.metrics import METRICS_FILE, MetricsWriter, read_metrics

REPOSITORY = Path(__file__).resolve().parents[2]


def write(run_dir, updates, resume_from=None, value=1.0):
    with MetricsWriter(run_dir, resume_from) as writer:
        for update in updates:
            writer.write(update, {"loss": value})


def test_lines_can_be_read_while_the_writer_is_open(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(0, {"eval/ocr_edit": np.float32(0.25)})
        assert read_metrics(tmp_path) == [{"update": 0, "eval/ocr_edit": 0.25}]
        writer.write(
            1, {"loss": jnp.float32(0.5), "passes": np.int64(4), "plan": "jagg", "skipped": np.True_, "kl": None}
        )
        expected = {"update": 1, "loss": 0.5, "passes": 4, "plan": "jagg", "skipped": 1, "kl": None}
        assert read_metrics(tmp_path)[1] == expected


def test_lists_of_numbers_are_kept_and_are_not_for_tensorboard(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(
            1, {"steps": [0, np.int64(3)], "key": [4294967295, 7], "bad": [np.float32(0.5), math.nan], "none": []}
        )
    line = {"update": 1, "steps": [0, 3], "key": [4294967295, 7], "bad": [0.5, None], "none": []}
    assert read_metrics(tmp_path) == [line]
    assert EventAccumulator(str(tmp_path / "tensorboard")).Reload().Tags()["scalars"] == []


@given(value=st.floats(width=32))
def test_floats_survive_and_non_finite_ones_become_null(tmp_path_factory, value):
    run_dir = tmp_path_factory.mktemp("run")
    write(run_dir, [1], value=value)
    read = read_metrics(run_dir)[0]["loss"]
    assert read == value if math.isfinite(value) else read is None
    json.loads((run_dir / METRICS_FILE).read_text(), parse_constant=pytest.fail)


def test_resuming_cuts_the_later_lines_and_a_torn_one(tmp_path):
    write(tmp_path, range(6))
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write('{"update": 6, "lo')
    assert [line["update"] for line in read_metrics(tmp_path)] == [0, 1, 2, 3, 4, 5]
    write(tmp_path, [4, 5, 6], resume_from=3, value=2.0)
    lines = read_metrics(tmp_path)
    assert [(line["update"], line["loss"]) for line in lines] == [
        (0, 1),
        (1, 1),
        (2, 1),
        (3, 1),
        (4, 2),
        (5, 2),
        (6, 2),
    ]


def test_a_new_run_starts_a_new_file(tmp_path):
    write(tmp_path, range(3))
    write(tmp_path, [0])
    assert [line["update"] for line in read_metrics(tmp_path)] == [0]


def test_updates_must_rise_also_after_resuming(tmp_path):
    with MetricsWriter(tmp_path) as writer:
        writer.write(3, {})
        with pytest.raises(ValueError, match="update 3"):
            writer.write(3, {})
    with MetricsWriter(tmp_path, resume_from=3) as writer, pytest.raises(ValueError, match="update 2"):
        writer.write(2, {})


@pytest.mark.parametrize("value", [[[1.0]], ["a"], np.zeros(2), (1.0,), object()])
def test_what_is_no_number_is_refused_and_leaves_no_line(tmp_path, value):
    with MetricsWriter(tmp_path) as writer:
        with pytest.raises(ValueError, match="metric loss"):
            writer.write(1, {"loss": value})
        assert read_metrics(tmp_path) == []
        writer.write(1, {"loss": 1.0})


@pytest.mark.parametrize("text", ["nonsense", "[1]", '{"loss": 1}', '{"update": "x"}'])
def test_a_damaged_line_is_named(tmp_path, text):
    write(tmp_path, [0])
    with (tmp_path / METRICS_FILE).open("a") as file:
        file.write(text + "\n")
    with pytest.raises(ValueError, match=r"metrics.jsonl: line 2"):
        read_metrics(tmp_path)
    before = (tmp_path / METRICS_FILE).read_bytes()
    with pytest.raises(ValueError, match="line 2"):
        MetricsWriter(tmp_path, resume_from=0)
    assert (tmp_path / METRICS_FILE).read_bytes() == before


def test_a_missing_file_is_empty(tmp_path):
    assert read_metrics(tmp_path) == []


def test_tensorboard_shows_the_numbers_and_after_resuming_the_new_ones(tmp_path):
    write(tmp_path, range(1, 6), value=1.0)
    time.sleep(1.1)  # event files are ordered by the second in their name
    write(tmp_path, range(4, 7), resume_from=3, value=2.0)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (1, 1.0),
        (2, 1.0),
        (3, 1.0),
        (4, 2.0),
        (5, 2.0),
        (6, 2.0),
    ]


def test_every_line_outlives_sigkill(tmp_path):
    program = (
        "import itertools, sys\n"
        "from jagg_jax.training.metrics import MetricsWriter\n"
        "writer = MetricsWriter(sys.argv[1])\n"
        "for update in itertools.count():\n"
        "    writer.write(update, {'loss': 0.5})\n"
        "    print(update, flush=True)\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as process:
        reported = [int(process.stdout.readline()) for _ in range(200)]
        process.send_signal(signal.SIGKILL)
        reported += [int(line) for line in process.stdout.read().split("\n")[:-1]]
    updates = [line["update"] for line in read_metrics(tmp_path)]
    assert updates == list(range(len(updates)))
    assert len(updates) >= len(reported) >= 200
    write(tmp_path, [101], resume_from=100)
    assert [line["update"] for line in read_metrics(tmp_path)] == list(range(102))
