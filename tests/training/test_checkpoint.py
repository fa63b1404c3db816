import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jagg_jax.training.checkpoint import CHECKPOINTS_DIR, SEAL_FILE, Checkpoints
from jagg_jax.training.errors import CheckpointError

REPOSITORY = Path(__file__).resolve().parents[2]


def make_state(update):
    """A small state whose values follow from the update; every kind of node that a train state has."""
    keys = jax.random.split(jax.random.key(update), 2)
    params = {"blocks": [jax.random.normal(keys[0], (64, 32)), jnp.full((3,), update, jnp.bfloat16)]}
    return {"params": params, "moments": (jax.random.normal(keys[1], (64, 32)), None), "count": jnp.int32(update)}


def like():
    return jax.eval_shape(lambda: make_state(0))


def save_all(run_dir, updates, keep):
    with Checkpoints(run_dir, keep) as checkpoints:
        for update in updates:
            checkpoints.save(update, make_state(update), {"update": update})


def test_restores_what_was_saved_bit_for_bit_and_keeps_the_latest(tmp_path):
    save_all(tmp_path, [1, 2, 3, 10], keep=2)
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.steps() == [3, 10]
    assert checkpoints.latest() == 10
    assert checkpoints.metadata() == {"update": 10}
    assert checkpoints.metadata(3) == {"update": 3}
    for update in (3, 10):
        restored = checkpoints.restore(update, like())
        chex.assert_trees_all_equal(restored, make_state(update))
        chex.assert_trees_all_equal_shapes_and_dtypes(restored, make_state(update))


def test_save_copies_a_state_that_is_donated_afterwards(tmp_path):
    state = make_state(1)
    with Checkpoints(tmp_path, 1) as checkpoints:
        checkpoints.save(1, state, {})
        jax.tree.map(lambda leaf: leaf.delete(), state)
        chex.assert_trees_all_equal(checkpoints.restore(1, like()), make_state(1))


def test_restores_to_the_sharding_asked_for(tmp_path):
    save_all(tmp_path, [1], keep=1)
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    wanted = like()
    wanted["moments"] = (jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=split), None)
    restored = Checkpoints(tmp_path).restore(1, wanted)
    assert restored["moments"][0].sharding == split
    chex.assert_trees_all_equal(jax.device_get(restored), jax.device_get(make_state(1)))


def test_reading_changes_nothing_on_disk(tmp_path):
    assert Checkpoints(tmp_path).steps() == []
    assert Checkpoints(tmp_path).latest() is None
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(ValueError, match="open for reading"):
        Checkpoints(tmp_path).save(1, make_state(1), {})


@pytest.mark.parametrize("update", [None, 7])
def test_a_missing_checkpoint_is_named(tmp_path, update):
    with pytest.raises(CheckpointError, match="holds no checkpoint"):
        Checkpoints(tmp_path).restore(update, like())
    save_all(tmp_path, [1, 2], keep=2)
    with pytest.raises(CheckpointError, match=r"checkpoints/7: is no checkpoint; there are those of 1, 2"):
        Checkpoints(tmp_path).metadata(7)


def other_model(change):
    state = like()
    if change == "missing":
        del state["params"]
    elif change == "unexpected":
        state["ema"] = state["params"]["blocks"][0]
    elif change == "shape":
        state["count"] = jax.ShapeDtypeStruct((2,), jnp.int32)
    else:
        state["count"] = jax.ShapeDtypeStruct((), jnp.float32)
    return state


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ("missing", r"\['params'\]\['blocks'\]\[0\] is unexpected"),
        ("unexpected", r"\['ema'\] is missing"),
        ("shape", r"\['count'\] is int32\[\], not int32\[2\]"),
        ("dtype", r"\['count'\] is int32\[\], not float32\[\]"),
    ],
)
def test_the_state_of_another_model_is_refused(tmp_path, change, reason):
    save_all(tmp_path, [5], keep=1)
    with pytest.raises(CheckpointError, match=f"checkpoints/5: is of another model: .*{reason}") as caught:
        Checkpoints(tmp_path).restore(5, other_model(change))
    assert "\n" not in str(caught.value)


def damage(path, kind):
    raw = path.read_bytes()
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(raw[: len(raw) // 2])
    else:
        middle = len(raw) // 2
        path.write_bytes(raw[:middle] + bytes([raw[middle] ^ 1]) + raw[middle + 1 :])


@pytest.mark.parametrize("kind", ["missing", "truncated", "flipped"])
def test_every_damaged_file_is_noticed_and_the_intact_checkpoint_named(tmp_path, kind, capfd):
    save_all(tmp_path, [1, 2], keep=2)
    checkpoints = Checkpoints(tmp_path)
    folder = tmp_path / CHECKPOINTS_DIR / "2"
    files = [path for path in (folder / "state").rglob("*") if path.is_file() and path.name != "commit_success.txt"]
    assert any(path.stat().st_size > 10_000 for path in files)
    for path in files:
        raw = path.read_bytes()
        damage(path, kind)
        with pytest.raises(CheckpointError, match=r"checkpoints/2: .* the checkpoint of update 1 is intact") as caught:
            checkpoints.restore(None, like())
        assert path.name in str(caught.value)
        assert "\n" not in str(caught.value)
        path.write_bytes(raw)
    chex.assert_trees_all_equal(checkpoints.restore(2, like()), make_state(2))
    assert capfd.readouterr().err == ""


def test_a_damaged_seal_and_no_way_out(tmp_path):
    save_all(tmp_path, [1], keep=1)
    damage(tmp_path / CHECKPOINTS_DIR / "1" / SEAL_FILE, "truncated")
    with pytest.raises(CheckpointError, match=r"seal.json is unreadable; no older checkpoint is intact"):
        Checkpoints(tmp_path).restore(None, like())
    with pytest.raises(CheckpointError, match=r"seal.json is unreadable"):
        Checkpoints(tmp_path).metadata()


def test_a_folder_that_is_no_checkpoint_is_neither_listed_nor_deleted(tmp_path):
    foreign = tmp_path / CHECKPOINTS_DIR / "99"
    foreign.mkdir(parents=True)
    (foreign / "notes.txt").write_text("mine")
    (tmp_path / CHECKPOINTS_DIR / "notes").mkdir()
    save_all(tmp_path, [1, 2, 3], keep=2)
    assert Checkpoints(tmp_path).steps() == [2, 3]
    assert (foreign / "notes.txt").read_text() == "mine"
    with pytest.raises(CheckpointError, match="checkpoints/99: is no checkpoint"):
        Checkpoints(tmp_path).restore(99, like())
    with Checkpoints(tmp_path, 2) as checkpoints, pytest.raises(ValueError, match="checkpoints/99: exists already"):
        checkpoints.save(99, make_state(99), {})


def test_the_rest_of_a_cut_off_deletion_goes_with_the_next_save(tmp_path):
    save_all(tmp_path, [1, 2], keep=2)
    (tmp_path / CHECKPOINTS_DIR / "1" / SEAL_FILE).unlink()
    assert Checkpoints(tmp_path).steps() == [2]
    save_all(tmp_path, [3], keep=2)
    assert Checkpoints(tmp_path).steps() == [2, 3]
    assert not (tmp_path / CHECKPOINTS_DIR / "1").exists()


SAVE_FOREVER = """
    import itertools
    import sys

    from jagg_jax.training.checkpoint import Checkpoints
    from tests.training.test_checkpoint import like, make_state

    with Checkpoints(sys.argv[1], keep=1) as checkpoints:
        last = checkpoints.latest()
        if last is not None:
            checkpoints.restore(last, like())
        first = 1 if last is None else last + 1
        for update in itertools.count(first):
            checkpoints.save(update, make_state(update), {"update": update})
            if update == first:
                assert checkpoints.latest() == first
                print("ready", flush=True)
"""


def save_until_killed(run_dir, seconds):
    command = [sys.executable, "-c", textwrap.dedent(SAVE_FOREVER), str(run_dir)]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, cwd=REPOSITORY, text=True) as process:
        assert process.stdout.readline() == "ready\n"
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


def test_sigkill_at_random_moments_of_saving_never_costs_the_latest_checkpoint(tmp_path):
    moments = random.Random(0)
    folder = tmp_path / CHECKPOINTS_DIR
    latest, torn = 0, 0
    for _ in range(5):
        save_until_killed(tmp_path, moments.uniform(0.02, 0.3))
        torn += any("tmp" in path.name for path in folder.iterdir())
        checkpoints = Checkpoints(tmp_path)
        found = checkpoints.latest()
        assert found is not None
        assert found > latest
        latest = found
        chex.assert_trees_all_equal(checkpoints.restore(None, like()), make_state(found))
        assert checkpoints.metadata() == {"update": found}
    assert torn > 0, "no kill met a save: the test proved nothing"
    save_all(tmp_path, [latest + 1], keep=1)
    assert sorted(path.name for path in folder.iterdir()) == [str(latest + 1)]
    np.testing.assert_array_equal(Checkpoints(tmp_path).restore(None, like())["count"], latest + 1)
