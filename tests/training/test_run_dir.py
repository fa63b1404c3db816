import dataclasses
import json

import pytest

import configs
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.run_dir import (
    CONFIG_FILE,
    check_run_dir,
    claim_run_dir,
    load_config,
    resolve_run_dir,
    save_config,
    write_text,
)

QUICKSTART = configs.load("quickstart")


def settings(path, **changes):
    return dataclasses.replace(QUICKSTART, run_dir=str(path), **changes)


def refused(config):
    with pytest.raises(ConfigError) as caught:
        check_run_dir(config)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_come_back_as_they_were(tmp_path):
    config = settings(tmp_path, rewards={"ocr_edit": 0.5, "jpeg_compressibility": 0.1}, batch_anchors=2)
    save_config(tmp_path, config, "quickstart")
    assert load_config(tmp_path) == (config, "quickstart")


def test_the_folder_is_named_after_the_preset_and_the_time_unless_given(tmp_path):
    assert resolve_run_dir(settings(tmp_path / "a"), "quickstart") == tmp_path / "a"
    path = resolve_run_dir(dataclasses.replace(QUICKSTART, run_dir=""), "quickstart")
    assert path.parent.name == "runs"
    assert path.name.startswith("quickstart-2")


def test_a_new_or_empty_folder_is_taken(tmp_path):
    for path in (tmp_path / "a" / "b", tmp_path / "c"):
        (tmp_path / "c").mkdir(exist_ok=True)
        assert claim_run_dir(settings(path), "quickstart") == path
        assert [file.name for file in path.iterdir()] == [CONFIG_FILE]


def test_a_folder_in_use_needs_a_word(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    message = refused(settings(tmp_path))
    assert message == f"--run-dir {tmp_path}: is not empty; add --resume or --overwrite, or name another folder"
    assert "is a file" in refused(settings(tmp_path / "notes.txt"))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_overwriting_deletes_a_run_but_no_other_folder(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "there is no run" in refused(settings(tmp_path, overwrite=True))
    (tmp_path / CONFIG_FILE).write_text('{"architectures": ["BertModel"]}')
    assert "holds no run's settings" in refused(settings(tmp_path, overwrite=True))
    with pytest.raises(ConfigError):
        claim_run_dir(settings(tmp_path, overwrite=True), "quickstart")
    assert (tmp_path / "notes.txt").exists()
    save_config(tmp_path, QUICKSTART, "quickstart")
    claim_run_dir(settings(tmp_path, overwrite=True, seed=3), "quickstart")
    assert [path.name for path in tmp_path.iterdir()] == [CONFIG_FILE]
    assert load_config(tmp_path)[0].seed == 3


def test_resuming_needs_a_run_of_the_same_settings(tmp_path):
    assert "--run-dir DIR" in refused(dataclasses.replace(QUICKSTART, resume=True, run_dir=""))
    assert "drop one" in refused(settings(tmp_path, resume=True, overwrite=True))
    claim_run_dir(settings(tmp_path), "quickstart")
    (tmp_path / "metrics.jsonl").write_text("{}\n")
    assert "--learning-rate 0.1: the run to resume has 0.0003" in refused(
        settings(tmp_path, resume=True, learning_rate=0.1)
    )
    claim_run_dir(settings(tmp_path, resume=True, updates=200, eval_every=5), "quickstart")
    assert load_config(tmp_path)[0].updates == 200
    assert (tmp_path / "metrics.jsonl").exists()


def test_one_command_starts_a_run_and_resumes_it(tmp_path, capsys):
    config = settings(tmp_path / "run", resume=True)
    for leftover in (None, f".{CONFIG_FILE}.17.tmp"):  # of a process killed while it claimed the folder
        if leftover:
            (tmp_path / "run" / CONFIG_FILE).unlink()
            (tmp_path / "run" / leftover).touch()
        claim_run_dir(config, "quickstart")
        assert "run: holds no run yet; starting one" in capsys.readouterr().err
        claim_run_dir(config, "quickstart")
        assert capsys.readouterr().err == ""
        assert load_config(tmp_path / "run") == (config, "quickstart")


def test_resuming_a_folder_of_something_else_is_refused(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    assert "there is no run" in refused(settings(tmp_path, resume=True))
    assert "is a file" in refused(settings(tmp_path / "notes.txt", resume=True))


def test_an_address_is_no_folder(tmp_path):
    message = refused(settings("gs://bucket/run"))
    assert message == "--run-dir gs://bucket/run: is no path; mount the file system and name a folder in it"


def test_a_cosine_schedule_keeps_its_length(tmp_path):
    claim_run_dir(settings(tmp_path, schedule="cosine"), "quickstart")
    assert "--updates 200" in refused(settings(tmp_path, schedule="cosine", resume=True, updates=200))
    check_run_dir(settings(tmp_path, schedule="cosine", resume=True))


@pytest.mark.parametrize("damage", ["missing", "unknown", "no json", "list"])
def test_damaged_settings_are_refused(tmp_path, damage):
    save_config(tmp_path, QUICKSTART, "quickstart")
    content = json.loads((tmp_path / CONFIG_FILE).read_text())
    if damage == "missing":
        del content["train"]["seed"]
    elif damage == "unknown":
        content["train"]["speed"] = 1
    text = {"no json": "{", "list": "[]"}.get(damage, json.dumps(content))
    (tmp_path / CONFIG_FILE).write_text(text)
    with pytest.raises(ConfigError, match=CONFIG_FILE) as caught:
        load_config(tmp_path)
    assert "\n" not in str(caught.value)


def test_a_write_that_fails_leaves_the_old_file(tmp_path):
    write_text(tmp_path / "a", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "a", "\ud800")
    assert (tmp_path / "a").read_text() == "old"
    assert len(list(tmp_path.iterdir())) == 1
