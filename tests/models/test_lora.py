"""Low-rank adapters: where they go, what they compute, what stays frozen, and every way to ask for the wrong ones."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jagg_jax.models import (
    AdapterError,
    Adapters,
    DiT,
    DiTConfig,
    as_function,
    count_parameters,
    load_model,
    merge_params,
    model_metadata,
    save_weights,
    split_adapters,
)
from jagg_jax.models.layers import Linear
from jagg_jax.models.lora import add_adapters, count_adapted

CONFIG = DiTConfig(
    image_shape=(8, 8, 1), patch_shape=(4, 4), width=16, depth=2, num_heads=2, vocab_size=3, prompt_length=2
)
ADAPTERS = Adapters(rank=4, alpha=8.0, targets=("attention.qkv", "mlp_in"))
INPUTS = (jnp.ones((2, 8, 8, 1)), jnp.array([0.3, 0.9]), jnp.array([[1, 2], [0, 1]]))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("weights") / "model.safetensors"
    _, params = as_function(DiT(CONFIG, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape, scale=0.3), jnp.float32), params)
    save_weights(path, params, model_metadata(CONFIG, "digits"))
    return path


def adapted(saved, **changes):
    settings = {"adapters": ADAPTERS, "adapter_key": jax.random.key(5), "frozen_dtype": jnp.float32}
    return load_model(saved, **settings | changes)


def randomised(trained):
    rng = np.random.default_rng(1)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape, scale=0.1), jnp.float32), trained)


def test_an_adapted_map_is_its_formula():
    linear = Linear(6, 5, rngs=nnx.Rngs(0))
    x = jax.random.normal(jax.random.key(0), (3, 6))
    plain = linear(x)
    add_adapters(holder := nnx.Dict(map=linear), Adapters(2, 6.0, ("map",)), nnx.Rngs(1))
    np.testing.assert_array_equal(holder.map(x), plain)
    linear.lora_b[...] = jax.random.normal(jax.random.key(1), (2, 5))
    expected = plain + 3.0 * np.asarray(x) @ np.asarray(linear.lora_a[...]) @ np.asarray(linear.lora_b[...])
    np.testing.assert_allclose(linear(x), expected, rtol=1e-5, atol=1e-6)


def test_fresh_adapters_change_nothing_and_are_all_that_trains(saved):
    model, base = adapted(saved), load_model(saved)
    np.testing.assert_array_equal(model.velocity_fn(model.params, *INPUTS), base.velocity_fn(base.params, *INPUTS))
    frozen, trained = split_adapters(model.params)
    chex.assert_trees_all_equal(frozen, base.params)
    assert model.num_adapted == count_adapted(trained) == 4  # two maps in each of two blocks
    assert count_parameters(trained) == 2 * 4 * ((16 + 48) + (16 + 64))
    chex.assert_trees_all_equal(merge_params(frozen, trained), model.params)
    lora_a = trained["blocks"]["mlp_in"]["lora_a"]
    assert not np.array_equal(lora_a[0], lora_a[1])
    assert 0.15 < np.std(lora_a) < 0.35  # 1 / rank
    same, other = adapted(saved), adapted(saved, adapter_key=jax.random.key(6))
    chex.assert_trees_all_equal(same.params, model.params)
    assert not np.array_equal(split_adapters(other.params)[1]["blocks"]["mlp_in"]["lora_a"], lora_a)


def test_adapters_equal_the_merged_weights(saved):
    """x W + s x A B = x (W + s A B), in every block of a stack, looped or not."""
    model = adapted(saved)
    frozen, trained = split_adapters(model.params)
    trained = randomised(trained)
    merged = jax.tree.map(lambda leaf: leaf, frozen)  # a copy of the dicts
    for path in (("attention", "qkv"), ("mlp_in",)):
        node, change = merged["blocks"], trained["blocks"]
        for name in path:
            node, change = node[name], change[name]
        node["kernel"] = node["kernel"] + 2.0 * change["lora_a"] @ change["lora_b"]
    base = load_model(saved)
    expected = base.velocity_fn(merged, *INPUTS)
    for scan in (False, True):
        fn = adapted(saved, scan_layers=scan).velocity_fn
        np.testing.assert_allclose(fn(merge_params(frozen, trained), *INPUTS), expected, rtol=1e-4, atol=1e-5)


def test_a_bfloat16_base_keeps_changes_too_small_for_its_own_weights(saved):
    model = adapted(saved, frozen_dtype=jnp.bfloat16, dtype="float32")
    frozen, trained = split_adapters(model.params)
    assert {leaf.dtype for leaf in jax.tree.leaves(frozen)} == {jnp.dtype("bfloat16")}
    assert {leaf.dtype for leaf in jax.tree.leaves(trained)} == {jnp.dtype("float32")}
    small = jax.tree.map(lambda leaf: 0.01 * leaf, randomised(trained))
    before = model.velocity_fn(model.params, *INPUTS)
    after = model.velocity_fn(merge_params(frozen, small), *INPUTS)
    assert before.dtype == jnp.float32
    assert np.abs(after - before).max() > 1e-7


def test_adapters_follow_the_compute_type(saved):
    model = adapted(saved, frozen_dtype=jnp.bfloat16, dtype="bfloat16")
    gradient = jax.grad(lambda t: jnp.mean(model.velocity_fn(merge_params(frozen, t), *INPUTS) ** 2))
    frozen, trained = split_adapters(model.params)
    gradients = gradient(randomised(trained))
    assert {leaf.dtype for leaf in jax.tree.leaves(gradients)} == {jnp.dtype("float32")}
    assert all(np.isfinite(leaf).all() and np.asarray(leaf).any() for leaf in jax.tree.leaves(gradients))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"targets": ("qvk",)}, "targets qvk: the model has no such linear map; choose from .*attention.qkv"),
        ({"targets": ("kv",)}, "targets kv"),
        ({"targets": ()}, "targets: name at least one of .*mlp_in"),
        ({"rank": 0}, "rank 0: must be at least 1"),
        ({"rank": 17}, "rank 17: exceeds the smaller side of blocks.attention.qkv, 16 x 48"),
        ({"alpha": 0.0}, "alpha 0.0: must be above 0"),
    ],
)
def test_adapters_that_fit_no_model_are_refused(saved, changes, message):
    with pytest.raises(AdapterError, match=message) as caught:
        adapted(saved, adapters=dataclasses.replace(ADAPTERS, **changes))
    assert "\n" not in str(caught.value)
