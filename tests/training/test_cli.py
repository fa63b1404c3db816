import dataclasses
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import save_file

import configs
from jagg_jax.training.cli import COMMANDS, load_command, main, parse_options, split_command
from jagg_jax.training.config import TrainConfig, option
from jagg_jax.training.pretrain_config import PretrainConfig
from jagg_jax.training.run_dir import save_config

REPOSITORY = Path(__file__).resolve().parents[2]
QUICKSTART = configs.load("quickstart")


def run_program(arguments, folder):
    """`python train.py ...` as a user types it, with the folder as the place where it might write."""
    command = [sys.executable, str(REPOSITORY / "train.py"), *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def changed(arguments):
    """The fields that a command line changes, with their values."""
    config = parse_options("quickstart", QUICKSTART, arguments)
    before = dataclasses.asdict(QUICKSTART)
    return {name: value for name, value in dataclasses.asdict(config).items() if value != before[name]}


@pytest.mark.parametrize(
    ("arguments", "command"),
    [
        ([], ("quickstart", [])),
        (["--updates", "5"], ("quickstart", ["--updates", "5"])),
        (["quickstart", "--updates", "5"], ("quickstart", ["--updates", "5"])),
        (["pretrain-digits"], ("pretrain_digits", [])),
        (["evaluate", "--run-dir", "x"], ("evaluate", ["--run-dir", "x"])),
    ],
)
def test_the_first_argument_is_the_command_or_an_option_of_quickstart(arguments, command):
    assert split_command(arguments) == command


def test_every_command_loads_with_settings_of_its_own():
    types = {name: type(load_command(name).default) for name in COMMANDS}
    assert types["quickstart"] is TrainConfig
    assert types["pretrain_digits"] is PretrainConfig
    assert types["evaluate"].__name__ == "EvaluateConfig"
    assert types["sample"].__name__ == "SampleConfig"


@pytest.mark.parametrize(
    ("arguments", "fields"),
    [
        ([], {}),
        (
            ["--updates", "5", "--steps-per-group", "5", "--plan", "exact"],
            {"updates": 5, "steps_per_group": 5, "plan": "exact"},
        ),
        (["--updates=5"], {"updates": 5}),
        (["--steps_per_group", "2"], {"steps_per_group": 2}),
        (["--learning-rate", "1e-4"], {"learning_rate": 1e-4}),
        (["--resume", "--run-dir", "a"], {"resume": True, "run_dir": "a"}),
        (["--batch-anchors", "1"], {"batch_anchors": 1}),
        (["--eval-rewards", "ocr_edit", "ocr_logprob"], {"eval_rewards": ("ocr_edit", "ocr_logprob")}),
        (
            ["--rewards", "jpeg_compressibility=-0.5", "ocr_edit"],
            {"rewards": {"jpeg_compressibility": -0.5, "ocr_edit": 1.0}},
        ),
    ],
    ids=str,
)
def test_options_override_the_fields_of_the_preset(arguments, fields):
    assert changed(arguments) == fields


WRONG = [
    (["quikstart"], "quikstart: is no command; ", "did you mean 'quickstart'?"),
    (["--updatess", "5"], "--updatess: there is no such option", "did you mean '--updates'?"),
    (["--steps-per-grp=5"], "--steps-per-grp=5: there is no such option", "did you mean '--steps-per-group'?"),
    (["quickstart", "5"], "5: no option takes this value", "--help"),
    (["--updates", "5", "6"], "6: no option takes this value", "--help"),
    (["--resume", "yes"], "yes: no option takes this value", "--help"),
    (["--updates", "many"], "--updates many: ", "must be a whole number"),
    (["--updates", "2.5"], "--updates 2.5: ", "must be a whole number"),
    (["--updates=many"], "--updates many: ", "must be a whole number"),
    (["--updates"], "--updates: a value is missing", "whole number"),
    (["--updates", "--plan", "exact"], "--updates: a value is missing", "whole number"),
    (["--noise_level", "loud"], "--noise-level loud: ", "must be a number"),
    (["--plan", "jag"], "--plan jag: ", "must be one of exact, jagg, hat, subset"),
    (["--batch-anchors", "x"], "--batch-anchors x: ", "must be a whole number"),
    (["--rewards", "ocr_edit=x"], "--rewards ocr_edit=x: ", "write NAME or NAME=WEIGHT"),
    (["--rewards", "ocr_edit", "ocr_edit"], "--rewards ocr_edit ocr_edit: ", "twice"),
    (["--rewards", "ocr_edti"], "--rewards ocr_edti: there is no such reward", "did you mean 'ocr_edit'?"),
    (["--rewards"], "--rewards: ", "name at least one"),
    (["--steps-per-group", "0"], "--steps-per-group 0: ", "must be at least 1"),
    (["--jagg-frac", "1.5"], "--jagg-frac 1.5: ", "must lie in 0 to 1"),
    (["--num-generations", "7"], "--num-generations 7: ", "must divide --batch-size 64, e.g. 8"),
    (["--guidance", "nan"], "--guidance nan: ", "must be a finite number"),
    (["--weights", "nowhere"], "--weights nowhere: there is no such file", "digits"),
    (["--run-dir", "used"], "--run-dir used: is not empty", "--overwrite"),
    (["--run-dir", "used", "--overwrite"], "--run-dir used: there is no run", "name the folder of a run"),
    (["--resume"], "--resume True: ", "--run-dir DIR"),
    (["--weights", "broken.safetensors"], "--weights broken.safetensors: ", "safetensors"),
    (["--weights", "other.safetensors"], "--weights other.safetensors: ", "metadata"),
    (["pretrain-digits", "--updates", "0"], "--updates 0: ", "above 0"),
    (["pretrain-digits", "--aligned"], "--aligned: there is no such option", "did you mean '--no-aligned'?"),
    (["pretrain-digits", "--patch-shape", "8"], "--patch-shape 8: ", "must be 2 values"),
    (["pretrain-digits", "--output", "x"], "--output x: ", ".safetensors"),
    (["evaluate"], "--run-dir: ", "name the folder"),
    (["evaluate", "--run-dir", "used"], "--run-dir used: there is no run", "name the folder"),
    (["evaluate", "--checkpoint", "last"], "--checkpoint last: ", "must be a whole number"),
    (["evaluate", "--run-dir", "started"], "started/checkpoints: ", "holds no checkpoint"),
    (["encode_prompts"], "--prompts : ", "name a prompt file"),
    (["encode_prompts", "--device", "tpu"], "--device tpu: ", "must be one of auto, cpu, cuda"),
    (["encode-prompts", "--prompt", "x"], "--prompt: there is no such option", "did you mean '--prompts'?"),
    (["sample", "--run-dir", "started"], "--prompt: ", "at least one"),
    (["sample", "--promt", "427"], "--promt: there is no such option", "did you mean '--prompt'?"),
]


def prepare(folder):
    """A folder that's in use, a run without a checkpoint, and files that are no weights."""
    (folder / "used").mkdir()
    (folder / "used" / "notes.txt").write_text("mine")
    (folder / "started").mkdir()
    save_config(folder / "started", QUICKSTART, "quickstart")
    (folder / "broken.safetensors").write_bytes(b"\x00" * 20)
    save_file({}, folder / "other.safetensors")


def snapshot(folder):
    return {path: path.read_bytes() if path.is_file() else None for path in folder.rglob("*")}


@pytest.mark.parametrize(("arguments", "start", "fix"), WRONG, ids=[" ".join(arguments) for arguments, _, _ in WRONG])
def test_a_mistake_is_one_line_and_writes_nothing(tmp_path, monkeypatch, capsys, arguments, start, fix):
    monkeypatch.chdir(tmp_path)
    prepare(tmp_path)
    before = snapshot(tmp_path)
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    assert start in captured.err
    assert fix in captured.err
    assert snapshot(tmp_path) == before


PROGRAM = [WRONG[index] for index in range(len(WRONG)) if WRONG[index][0][:1] != ["pretrain-digits"]][::5]


@pytest.mark.parametrize(
    ("arguments", "start", "fix"), PROGRAM, ids=[" ".join(arguments) for arguments, _, _ in PROGRAM]
)
def test_the_program_itself_exits_with_2_and_one_line(tmp_path, arguments, start, fix):
    prepare(tmp_path)
    before = snapshot(tmp_path)
    finished = run_program(arguments, tmp_path)
    assert finished.returncode == 2
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1
    assert finished.stderr.startswith("error: ")
    assert start in finished.stderr
    assert fix in finished.stderr
    assert snapshot(tmp_path) == before


def test_help_explains_every_field_and_lists_the_commands(tmp_path):
    finished = run_program(["--help"], tmp_path)
    assert finished.returncode == 0
    assert finished.stderr == ""
    for field in dataclasses.fields(TrainConfig):
        assert option(field.name) in finished.stdout
    for name in [*COMMANDS, "ocr_edit", "jpeg_compressibility", "digits4"]:
        assert name in finished.stdout
    assert "Denoising steps in a group of plan jagg or hat." in finished.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command, capsys):
    assert main([command, "-h"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    for field in dataclasses.fields(load_command(command).default):
        assert option(field.name).removeprefix("--") in captured.out  # a flag that's on is --no-...


def test_a_bug_keeps_its_traceback(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    for error in (ValueError, RuntimeError):

        def broken(config, error=error):
            raise error("not for the user")

        monkeypatch.setattr("jagg_jax.training.cli.validate", broken)
        with pytest.raises(error, match="not for the user"):
            main([])


def test_a_run_that_had_to_stop_exits_with_1(monkeypatch, tmp_path, capsys):
    from jagg_jax.training.errors import TrainingError

    def stuck(config, preset):
        raise TrainingError("update 7: stuck")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("jagg_jax.training.loop.train", stuck)
    assert main([]) == 1
    assert capsys.readouterr().err == "error: update 7: stuck\n"
