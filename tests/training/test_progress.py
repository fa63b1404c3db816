import io
import re

import pytest

from jagg_jax.training.progress import Progress


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_line_an_update_where_there_is_no_terminal():
    stream = io.StringIO()
    with Progress(12, start=10, stream=stream) as progress:
        progress.update(11, reward=0.25)
        progress.update(12, reward=0.5, kl=0.001)
    lines = stream.getvalue().splitlines()
    assert re.fullmatch(r"update 11/12  reward 0\.250  \d+\.\d updates/min  \d+:\d\d left", lines[0])
    assert re.fullmatch(r"update 12/12  reward 0\.500  kl 0\.001  \d+\.\d updates/min  0:00 left", lines[1])
    assert len(lines) == 2


def test_a_bar_in_a_terminal(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with Progress(10, start=2, stream=stream) as progress:
        progress.update(7, reward=0.25)
    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", stream.getvalue())
    assert "2/10" in shown
    assert "7/10" in shown
    assert "reward 0.250" in shown


def test_lines_are_limited_where_batches_are_counted_by_their_parts():
    stream = io.StringIO()
    progress = Progress(20, stream=stream, lines=4, unit="prompt")
    for done in (3, 6, 9, 12, 15, 18, 20):
        progress.update(done)
    shown = [re.match(r"prompt (\d+)/20 .* prompts/min", line)[1] for line in stream.getvalue().splitlines()]
    assert shown == ["6", "12", "15", "20"]


def test_rate_and_time_left_count_this_run_only(monkeypatch):
    now = iter([100.0, 130.0])
    monkeypatch.setattr("jagg_jax.training.progress.time.monotonic", lambda: next(now))
    stream = io.StringIO()
    progress = Progress(4010, start=10, stream=stream)
    progress.update(40)
    assert stream.getvalue() == "update 40/4010    60.0 updates/min  1:06:10 left\n"


def test_the_bar_ends_after_an_exception(monkeypatch):
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    with pytest.raises(KeyError), Progress(10, stream=stream):
        raise KeyError
    assert stream.getvalue().endswith("\x1b[?25h")
