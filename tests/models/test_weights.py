"""Weights on disk: exact, atomic, and refused with one clear line where they do not fit."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from jagg_jax.models import (
    DiT,
    DiTConfig,
    as_function,
    load_model,
    load_weights,
    model_metadata,
    read_metadata,
    save_weights,
)
from jagg_jax.models import weights as weights_module

CONFIG = DiTConfig(
    image_shape=(8, 8, 1), patch_shape=(4, 4), width=8, depth=1, num_heads=2, vocab_size=3, prompt_length=2
)


@pytest.fixture(scope="module")
def model():
    velocity_fn, params = as_function(DiT(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    return velocity_fn, jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)


@pytest.fixture
def saved(tmp_path, model):
    path = tmp_path / "model.safetensors"
    save_weights(path, model[1], model_metadata(CONFIG, "digits") | {"seed": "7"})
    return path


def test_round_trip_is_bit_for_bit_and_keeps_the_metadata(saved, model):
    like = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), model[1])
    restored = load_weights(saved, like)
    assert jax.tree.structure(restored) == jax.tree.structure(model[1])
    for before, after in zip(jax.tree.leaves(model[1]), jax.tree.leaves(restored), strict=True):
        assert isinstance(after, jax.Array)
        assert np.asarray(before).tobytes() == np.asarray(after).tobytes()
    assert read_metadata(saved)["seed"] == "7"
    assert "blocks.attention.qkv.kernel" in load_file(saved)


def test_bfloat16_and_integers_survive(tmp_path):
    tree = {"half": jnp.array([1.5, -0.0, 1e-30], jnp.bfloat16), "count": jnp.array(3, jnp.int32)}
    save_weights(tmp_path / "w.safetensors", tree, {})
    restored = load_weights(tmp_path / "w.safetensors", tree)
    for name, array in tree.items():
        assert restored[name].dtype == array.dtype
        assert np.asarray(restored[name]).tobytes() == np.asarray(array).tobytes()


def test_a_model_is_rebuilt_from_the_file_alone(saved, model):
    config, task, velocity_fn, params, num_adapted = load_model(saved)
    assert (config, task, num_adapted) == (CONFIG, "digits", 0)
    arguments = jnp.ones((2, 8, 8, 1)), jnp.array([0.3, 0.9]), jnp.array([[1, 2], [0, 1]])
    expected = model[0](model[1], *arguments)
    assert np.asarray(expected).any()
    np.testing.assert_array_equal(np.asarray(velocity_fn(params, *arguments)), np.asarray(expected))


def test_how_it_computes_can_be_chosen_at_loading(saved):
    loaded = load_model(saved, dtype="bfloat16", remat="full", scan_layers=True)
    assert loaded.config == dataclasses.replace(CONFIG, dtype="bfloat16", remat="full", scan_layers=True)
    assert {leaf.dtype for leaf in jax.tree.leaves(loaded.params)} == {jnp.dtype("float32")}


def test_all_misfits_are_listed_in_one_line(saved, tmp_path, model):
    tensors = load_file(saved)
    del tensors["patch_in.kernel"]
    tensors["stranger"] = np.zeros(2, np.float32)
    tensors["patch_in.bias"] = np.zeros(9, np.float32)
    tensors["time_in.bias"] = tensors["time_in.bias"].astype(np.float16)
    tensors["time_out.bias"] = np.full_like(tensors["time_out.bias"], np.nan)
    path = tmp_path / "bad.safetensors"
    save_file(tensors, path)
    with pytest.raises(ValueError, match="do not fit") as caught:
        load_weights(path, model[1])
    message = str(caught.value)
    for part in (
        "missing: patch_in.kernel;",
        "unexpected: stranger;",
        "misshapen: patch_in.bias (9,) instead of (8,);",
        "of the wrong dtype: time_in.bias float16 instead of float32;",
        "not finite: time_out.bias",
    ):
        assert part in message
    assert "\n" not in message


def test_a_long_list_of_names_is_cut(saved):
    with pytest.raises(ValueError, match=r"unexpected: .* and \d+ more"):
        load_weights(saved, {})


@pytest.mark.parametrize("content", [b"", b"not a model", b"\xff" * 64, b"PK\x03\x04" + b"\x00" * 64])
def test_foreign_files_are_refused(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"x\.safetensors: not a readable safetensors file") as caught:
        load_model(path)
    assert "\n" not in str(caught.value)


def test_a_truncated_file_is_refused_at_every_length(saved, tmp_path):
    whole = saved.read_bytes()
    path = tmp_path / "cut.safetensors"
    for length in np.linspace(1, len(whole) - 1, 40).astype(int):
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match="not a readable safetensors file"):
            load_model(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nowhere\.safetensors: no such weights file"):
        load_model(tmp_path / "nowhere.safetensors")


@pytest.mark.parametrize(
    ("model_json", "message"),
    [
        (None, "no task and model"),
        ("{", "not valid"),
        ("[1]", "not valid"),
        ('{"width": 8}', "not valid"),
        (json.dumps({**dataclasses.asdict(CONFIG), "num_heads": 3}), "num_heads=3"),
        (json.dumps({**dataclasses.asdict(CONFIG), "patch_shape": 4}), "not valid"),
        (json.dumps({**dataclasses.asdict(CONFIG), "width": 16}), "misshapen"),
        (json.dumps({**dataclasses.asdict(CONFIG), "depth": 2}), "misshapen"),
    ],
)
def test_a_model_description_that_does_not_fit_is_refused(tmp_path, model, model_json, message):
    metadata = {"task": "digits"} | ({} if model_json is None else {"model": model_json})
    save_weights(tmp_path / "w.safetensors", model[1], metadata)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "w.safetensors")


def test_saving_refuses_what_loading_would(tmp_path):
    path = tmp_path / "w.safetensors"
    with pytest.raises(ValueError, match=r"not finite: layer\.bias"):
        save_weights(path, {"layer": {"bias": jnp.array([1.0, jnp.inf])}}, {})
    with pytest.raises(ValueError, match="metadata seed"):
        save_weights(path, {"bias": jnp.ones(1)}, {"seed": 3})
    assert not list(tmp_path.iterdir())


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing_behind(saved, monkeypatch):
    before = saved.read_bytes()

    def fail(*_):
        raise OSError("disk full")

    monkeypatch.setattr(weights_module.os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        save_weights(saved, {"bias": jnp.ones(1)}, {})
    assert saved.read_bytes() == before
    assert list(saved.parent.iterdir()) == [saved]
