"""Pre-training really trains: the loss falls, the same seed gives the same weights, bad settings write nothing."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jagg_jax.models import load_model, read_metadata
from jagg_jax.prompts import get_task
from jagg_jax.training.config import resolve_weights
from jagg_jax.training.errors import ConfigError, TrainingError
from jagg_jax.training.pretrain import (
    PretrainConfig,
    draw_batch,
    flow_matching_loss,
    held_out_scores,
    pretrain,
    train_weights,
)

TINY = PretrainConfig(
    output="w.safetensors",
    width=16,
    depth=1,
    num_heads=2,
    updates=30,
    warmup_updates=3,
    batch_size=16,
    learning_rate=1e-2,
    final_learning_rate=1e-3,
    ema_decay=0.8,
    eval_prompts=4,
    eval_steps=2,
)


def held_out_loss(velocity_fn, params):
    images, tokens = draw_batch(get_task("digits"), dataclasses.replace(TINY, batch_size=256, seed=99), 0)
    loss = jax.jit(lambda p: flow_matching_loss(velocity_fn, p, images, tokens, jax.random.key(5), 0.0))
    return float(loss(params))


def test_the_loss_falls_and_the_file_holds_the_averaged_weights(tmp_path, capsys):
    path = tmp_path / "w.safetensors"
    metadata = pretrain(dataclasses.replace(TINY, output=str(path)))
    model = load_model(path)
    config, velocity_fn, params = model.config, model.velocity_fn, model.params
    untrained = jax.tree.map(jnp.zeros_like, params)
    # A model of zeros predicts zero, as a new one does; 1.8 is about the variance of noise - x0.
    before, after = held_out_loss(velocity_fn, untrained), held_out_loss(velocity_fn, params)
    assert before > 1.5
    assert after < 0.75 * before
    assert (config.width, config.depth, model.task) == (16, 1, "digits")
    assert metadata == read_metadata(path)
    assert float(metadata["loss"]) < 0.75 * before
    assert 0.0 <= float(metadata["eval/ocr_edit"]) <= 1.0
    assert -10.0 <= float(metadata["eval/ocr_logprob"]) <= 0.0
    assert json.loads(metadata["settings"])["batch_size"] == 16
    assert float(metadata["seconds"]) > 0
    captured = capsys.readouterr()
    assert "30 updates" in captured.out
    assert captured.err.count("update ") == 10  # no terminal: ten plain lines
    assert [file.name for file in tmp_path.iterdir()] == ["w.safetensors"]


def test_the_same_seed_gives_the_same_weights():
    short = dataclasses.replace(TINY, updates=4)
    first, again = (train_weights(short)[1] for _ in range(2))
    for a, b in zip(*map(jax.tree.leaves, (first, again)), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def test_batches_follow_from_seed_and_update_and_use_training_prompts_only():
    task = get_task("digits")
    images, tokens = draw_batch(task, TINY, 3)
    assert images.shape == (16, 16, 48, 1)
    assert images.dtype == np.float32
    again = draw_batch(task, TINY, 3)
    np.testing.assert_array_equal(images, again[0])
    np.testing.assert_array_equal(tokens, again[1])
    assert not np.array_equal(tokens, draw_batch(task, TINY, 4)[1])
    assert not np.array_equal(tokens, draw_batch(task, dataclasses.replace(TINY, seed=1), 3)[1])
    held_out = {tuple(row) for row in task.encode(task.prompts("eval"))}
    assert not held_out & {tuple(row) for update in range(50) for row in draw_batch(task, TINY, update)[1]}


def test_the_loss_is_that_of_rectified_flow():
    """With the exact velocity of known images it is 0; with velocity 0, the variance of the target."""
    images = jnp.asarray(np.random.default_rng(0).uniform(size=(64, 4, 4, 1)), jnp.float32)
    tokens, key = jnp.ones((64, 1), jnp.int32), jax.random.key(0)
    x0 = 2 * images - 1

    def exact(_, latents, sigma, tokens):
        return (latents - x0) / sigma.reshape(-1, 1, 1, 1)

    assert float(flow_matching_loss(exact, None, images, tokens, key, 0.0)) < 1e-6
    zero = flow_matching_loss(lambda _, latents, *rest: 0 * latents, None, images, tokens, key, 0.0)
    assert abs(float(zero) - (1 + float(jnp.square(x0).mean()))) < 0.15


@pytest.mark.parametrize("dropout", [0.0, 0.25])
def test_the_share_of_null_prompts_is_the_one_asked_for(dropout):
    seen = []

    def record(_, latents, sigma, tokens):
        seen.append((np.asarray(sigma), np.asarray(tokens)))
        return latents

    images, tokens = jnp.zeros((4000, 1, 1, 1)), jnp.ones((4000, 3), jnp.int32)
    flow_matching_loss(record, None, images, tokens, jax.random.key(1), dropout)
    sigma, shown = seen[0]
    null = (shown == 0).all(axis=1)
    assert ((shown == 0).any(axis=1) == null).all()  # a prompt is dropped whole
    assert abs(null.mean() - dropout) < 0.03
    logits = np.log(sigma / (1 - sigma))
    assert abs(logits.mean()) < 0.06
    assert abs(logits.std() - 1) < 0.05


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"task": "digit"}, "--task digit: .*did you mean 'digits'"),
        ({"updates": 0}, "--updates 0:"),
        ({"batch_size": 2.5}, "--batch-size 2.5:"),
        ({"warmup_updates": 30}, "--warmup-updates 30: must be below --updates 30"),
        ({"learning_rate": float("nan")}, "--learning-rate nan:"),
        ({"final_learning_rate": 1.0}, "--final-learning-rate 1.0: must be at most --learning-rate"),
        ({"ema_decay": 1.0}, "--ema-decay 1.0:"),
        ({"condition_dropout": -0.1}, "--condition-dropout -0.1:"),
        ({"eval_prompts": 101}, "--eval-prompts 101: task digits has 100"),
        ({"seed": -1}, "--seed -1:"),
        ({"num_heads": 3}, "--num-heads 3: does not divide width=16"),
        ({"patch_shape": (5, 4)}, r"--patch-shape \(5, 4\):"),
        ({"output": ""}, "--output : name a .safetensors file"),
        ({"output": "model.npz"}, "--output model.npz: name a .safetensors file"),
    ],
)
def test_bad_settings_are_refused_in_one_line(changes, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        pretrain(dataclasses.replace(TINY, **changes))
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_an_existing_file_is_kept_unless_overwriting_is_asked_for(tmp_path):
    path = tmp_path / "w.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(ConfigError, match="exists; add --overwrite"):
        pretrain(dataclasses.replace(TINY, output=str(path)))
    assert path.read_bytes() == b"precious"
    short = dataclasses.replace(TINY, updates=4, eval_prompts=0, output=str(path), overwrite=True)
    assert "eval/ocr_edit" not in pretrain(short)
    assert load_model(path).task == "digits"


def test_a_diverging_run_stops_and_writes_nothing(tmp_path):
    path = tmp_path / "w.safetensors"
    wild = dataclasses.replace(TINY, learning_rate=1e30, final_learning_rate=1e30, warmup_updates=0, output=str(path))
    with pytest.raises(TrainingError, match="lower --learning-rate"):
        pretrain(wild)
    assert not list(tmp_path.iterdir())


def test_the_packaged_weights_are_the_imperfect_start_that_their_metadata_claims():
    path = resolve_weights("digits")
    metadata = read_metadata(path)
    model = load_model(path)
    config, task = model.config, get_task(model.task)
    assert (config.image_shape, config.vocab_size, config.prompt_length) == (task.image_shape, task.vocab_size, 3)
    assert path.stat().st_size < 8e6
    scores = held_out_scores(model.velocity_fn, model.params, task, PretrainConfig())
    assert 0.3 < scores["ocr_edit"] < 0.45
    assert abs(scores["ocr_edit"] - float(metadata["eval/ocr_edit"])) < 0.05
    assert abs(scores["ocr_logprob"] - float(metadata["eval/ocr_logprob"])) < 0.2
