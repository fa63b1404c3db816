"""Stacks of blocks: every way to compile them gives the same numbers, and rematerialisation really saves memory."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jagg_jax.models import DiT, DiTConfig, as_function
from jagg_jax.models.layers import apply_stack, check_remat, stack_blocks

CONFIG = DiTConfig(
    image_shape=(8, 8, 1), patch_shape=(2, 2), width=16, depth=2, num_heads=2, vocab_size=5, prompt_length=2
)
VARIANTS = [("none", True), ("dots", True), ("full", False)]


def gradient(batch: int, **changes):
    """The compiled gradient of a random model, and that gradient."""
    config = dataclasses.replace(CONFIG, **changes)
    velocity_fn, params = as_function(DiT(config, rngs=nnx.Rngs(0)))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape, scale=0.2), jnp.float32), params)
    latents = jnp.asarray(rng.normal(size=(batch, 8, 8, 1)), jnp.float32)
    sigma, tokens = jnp.linspace(0.1, 0.9, batch), jnp.ones((batch, 2), jnp.int32)
    loss = lambda p: jnp.mean(velocity_fn(p, latents, sigma, tokens) ** 2)  # noqa: E731
    compiled = jax.jit(jax.grad(loss)).lower(params).compile()
    return compiled, compiled(params)


def test_loop_and_rematerialisation_change_no_gradient():
    _, expected = gradient(2)
    for remat, scan in VARIANTS:
        chex.assert_trees_all_close(gradient(2, remat=remat, scan_layers=scan)[1], expected, rtol=1e-4, atol=1e-6)


def test_rematerialisation_saves_memory():
    sizes = {
        remat: gradient(64, depth=4, remat=remat, scan_layers=True)[0].memory_analysis().temp_size_in_bytes
        for remat in ("none", "dots", "full")
    }
    assert sizes["full"] < sizes["dots"] < sizes["none"]
    assert sizes["full"] < 0.5 * sizes["none"]


def test_a_stack_is_its_blocks_one_after_the_other():
    class Affine(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jax.random.normal(rngs.params(), (3,)))

        def __call__(self, x, shift):
            return x * self.scale[...] + shift

    blocks = stack_blocks(Affine, 4, nnx.Rngs(0))
    assert blocks.scale.shape == (4, 3)
    assert len(np.unique(blocks.scale[...])) == 12, "blocks must not start alike"
    expected = x = jnp.arange(3.0)
    for scale in blocks.scale[...]:
        expected = expected * scale + 1.0
    for scan in (False, True):
        np.testing.assert_allclose(apply_stack(blocks, x, jnp.ones(3), scan=scan), expected, rtol=1e-6)


def test_an_unknown_policy_is_refused():
    with pytest.raises(ValueError, match="remat='some': choose one of none, dots, full"):
        check_remat("some")
