"""The diffusion transformer: its formulas, its invariants and its refusals."""

import dataclasses
import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

from jagg_jax.models import DiT, DiTConfig, as_function, count_parameters
from jagg_jax.models.dit import MAX_PERIOD, NORM_EPSILON, TIME_SCALE, grid_positions, patchify, sinusoids, unpatchify

TINY = DiTConfig(
    image_shape=(8, 24, 2), patch_shape=(4, 4), width=16, depth=2, num_heads=2, vocab_size=11, prompt_length=3
)


def random_model(config, seed=0, scale=0.2):
    """A model away from its zero-initialised start: every parameter is random."""
    velocity_fn, params = as_function(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    leaves, tree = jax.tree.flatten(params)
    rng = np.random.default_rng(seed)
    leaves = [jnp.asarray(rng.normal(0, scale, leaf.shape), jnp.float32) for leaf in leaves]
    return jax.jit(velocity_fn), jax.tree.unflatten(tree, leaves)


def inputs(config, batch=4, seed=1):
    rng = np.random.default_rng(seed)
    latents = jnp.asarray(rng.normal(size=(batch, *config.image_shape)), jnp.float32)
    sigma = jnp.asarray(np.linspace(1.0, 0.1, batch), jnp.float32)
    tokens = jnp.asarray(rng.integers(0, config.vocab_size, (batch, config.prompt_length)), jnp.int32)
    return latents, sigma, tokens


# The model once more, from its formulas, in NumPy and float64: the parity reference.


def reference_sinusoids(values, width):
    out = np.zeros((len(values), width))
    for k in range(width // 2):
        out[:, k] = np.sin(values * MAX_PERIOD ** (-2 * k / width))
        out[:, width // 2 + k] = np.cos(values * MAX_PERIOD ** (-2 * k / width))
    return out


def reference_norm(x, shift, scale):
    mean, var = x.mean(-1, keepdims=True), x.var(-1, keepdims=True)
    return (x - mean) / np.sqrt(var + NORM_EPSILON) * (1 + scale) + shift


def linear(p, x):
    return x @ p["kernel"] + p["bias"]


def silu(x):
    return x / (1 + np.exp(-x))


def gelu(x):
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


def reference_attention(p, x, heads):
    width = x.shape[-1]
    size = width // heads
    out = np.zeros_like(x)
    for head, columns in enumerate(np.split(linear(p["qkv"], x), heads, axis=-1)):
        query, key, value = np.split(columns, 3, axis=-1)
        logits = query @ key.transpose(0, 2, 1) / math.sqrt(size)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        out[..., head * size : (head + 1) * size] = weights / weights.sum(-1, keepdims=True) @ value
    return linear(p["out"], out)


def reference_embedding(p, config, latents, tokens):
    (rows, columns), (h, w) = config.grid_shape, config.patch_shape
    positions = [reference_sinusoids(np.arange(n), config.width // 2) for n in (rows, columns)]
    characters = p["characters"]["embedding"][tokens]
    sequence = []
    for row in range(rows):
        for column in range(columns):
            pixels = latents[:, row * h : (row + 1) * h, column * w : (column + 1) * w].reshape(len(latents), -1)
            token = linear(p["patch_in"], pixels) + np.concatenate([positions[0][row], positions[1][column]])
            if config.aligned:
                token = token + characters[:, column * config.prompt_length // columns]
            sequence.append(token)
    places = reference_sinusoids(np.arange(config.prompt_length), config.width)
    sequence += [characters[:, k] + places[k] for k in range(config.prompt_length)]
    return np.stack(sequence, axis=1)


def reference_velocity(params, config, latents, sigma, tokens):
    p = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    latents, sigma, tokens = np.asarray(latents, np.float64), np.asarray(sigma, np.float64), np.asarray(tokens)
    x = reference_embedding(p, config, latents, tokens)
    time = linear(p["time_in"], reference_sinusoids(TIME_SCALE * sigma, config.width))
    time = silu(linear(p["time_out"], silu(time)))[:, None]
    for index in range(config.depth):
        block = jax.tree.map(lambda leaf, index=index: leaf[index], p["blocks"])
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = np.split(
            linear(block["modulation"]["linear"], time), 6, -1
        )
        x = x + gate_a * reference_attention(block["attention"], reference_norm(x, shift_a, scale_a), config.num_heads)
        hidden = gelu(linear(block["mlp_in"], reference_norm(x, shift_m, scale_m)))
        x = x + gate_m * linear(block["mlp_out"], hidden)
    shift, scale = np.split(linear(p["modulation"]["linear"], time), 2, -1)
    patches = linear(p["patch_out"], reference_norm(x, shift, scale))
    (rows, columns), (h, w) = config.grid_shape, config.patch_shape
    velocity = np.zeros_like(latents)
    for row in range(rows):
        for column in range(columns):
            block = patches[:, row * columns + column].reshape(-1, h, w, config.image_shape[2])
            velocity[:, row * h : (row + 1) * h, column * w : (column + 1) * w] = block
    return velocity


@pytest.mark.parametrize("changes", [{}, {"aligned": False}, {"aligned": False, "prompt_length": 1, "depth": 1}])
def test_agrees_with_an_independent_float64_implementation(changes):
    config = dataclasses.replace(TINY, **changes)
    velocity_fn, params = random_model(config)
    arguments = inputs(config)
    found = velocity_fn(params, *arguments)
    expected = reference_velocity(params, config, *arguments)
    assert np.abs(expected).max() > 0.5
    np.testing.assert_allclose(np.asarray(found), expected, atol=1e-5, rtol=1e-5)


def test_a_new_model_predicts_exactly_zero_and_its_gradient_does_not_vanish():
    velocity_fn, params = as_function(DiT(TINY, rngs=nnx.Rngs(0)))
    arguments = inputs(TINY)
    velocity = jax.jit(velocity_fn)(params, *arguments)
    chex.assert_shape(velocity, arguments[0].shape)
    assert velocity.dtype == jnp.float32
    assert not np.any(np.asarray(velocity))
    grads = jax.jit(jax.grad(lambda p: jnp.square(velocity_fn(p, *arguments) - arguments[0]).mean()))(params)
    assert np.any(np.asarray(grads["patch_out"]["kernel"]))


@settings(max_examples=25, deadline=None)
@given(
    batch=st.integers(1, 3),
    rows=st.integers(1, 3),
    columns=st.integers(1, 3),
    patch=st.tuples(*[st.integers(1, 4)] * 2),
)
def test_unpatchify_inverts_patchify(batch, rows, columns, patch):
    shape = (rows * patch[0], columns * patch[1], 2)
    images = np.arange(batch * math.prod(shape)).reshape(batch, *shape)
    patches = patchify(images, patch)
    chex.assert_shape(patches, (batch, rows * columns, patch[0] * patch[1] * 2))
    np.testing.assert_array_equal(np.asarray(unpatchify(patches, shape, patch)), np.asarray(images))


def test_patches_run_row_by_row_and_keep_their_pixels_together():
    images = np.arange(16).reshape(1, 4, 4, 1)
    expected = [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    np.testing.assert_array_equal(np.asarray(patchify(images, (2, 2)))[0], expected)


def test_positions_tell_every_patch_from_every_other():
    positions = np.asarray(grid_positions(3, 12, 128))
    distances = np.linalg.norm(positions[:, None] - positions[None], axis=-1) + np.eye(36) * 9
    assert distances.min() > 0.5
    np.testing.assert_allclose(np.asarray(sinusoids(jnp.zeros(1), 4)), [[0, 0, 1, 1]])


@pytest.mark.parametrize("aligned", [True, False])
def test_every_input_matters(aligned):
    config = dataclasses.replace(TINY, aligned=aligned)
    velocity_fn, params = random_model(config)
    latents, sigma, tokens = inputs(config)
    tokens = tokens.at[:, 1].set(5)
    base = velocity_fn(params, latents, sigma, tokens)
    for changed in (
        (latents.at[0, 0, 0, 0].add(1.0), sigma, tokens),
        (latents, sigma.at[0].add(-0.1), tokens),
        (latents, sigma, tokens.at[0, 1].set(0)),  # the null condition
    ):
        velocity = velocity_fn(params, *changed)
        assert np.abs(np.asarray(velocity - base))[0].max() > 1e-3
        np.testing.assert_array_equal(np.asarray(velocity)[1:], np.asarray(base)[1:])


def test_swapped_characters_give_another_image_even_without_alignment():
    velocity_fn, params = random_model(dataclasses.replace(TINY, aligned=False))
    latents, sigma, _ = inputs(TINY, batch=1)
    one, other = (velocity_fn(params, latents, sigma, np.array([tokens])) for tokens in ([1, 2, 3], [3, 2, 1]))
    assert np.abs(np.asarray(one) - np.asarray(other)).max() > 1e-3


def test_bfloat16_stays_near_float32_and_keeps_float32_parameters():
    arguments = inputs(TINY)
    velocity_fn, params = random_model(TINY)
    half_fn, half_params = random_model(dataclasses.replace(TINY, dtype="bfloat16"))
    assert {leaf.dtype for leaf in jax.tree.leaves(half_params)} == {jnp.dtype("float32")}
    exact, half = velocity_fn(params, *arguments), half_fn(half_params, *arguments)
    assert half.dtype == jnp.float32
    error = np.linalg.norm(np.asarray(half - exact)) / np.linalg.norm(np.asarray(exact))
    assert 1e-5 < error < 0.03  # above 1e-5: it really computed in bfloat16


def test_latents_stored_in_bfloat16_are_accepted():
    velocity_fn, params = random_model(TINY)
    latents, sigma, tokens = inputs(TINY)
    stored = latents.astype(jnp.bfloat16)
    expected = velocity_fn(params, stored.astype(jnp.float32), sigma, tokens)
    np.testing.assert_array_equal(np.asarray(velocity_fn(params, stored, sigma, tokens)), np.asarray(expected))


def test_jit_and_vmap_agree_with_the_plain_call():
    config = dataclasses.replace(TINY, depth=1)
    velocity_fn, params = as_function(DiT(config, rngs=nnx.Rngs(0)))
    params = random_model(config)[1]
    arguments = inputs(config)
    plain = velocity_fn(params, *arguments)
    one_by_one = jax.vmap(lambda *one: velocity_fn(params, *(part[None] for part in one))[0])
    np.testing.assert_allclose(np.asarray(jax.jit(velocity_fn)(params, *arguments)), np.asarray(plain), atol=2e-6)
    np.testing.assert_allclose(np.asarray(jax.jit(one_by_one)(*arguments)), np.asarray(plain), atol=2e-6)


def test_gradient_agrees_with_finite_differences():
    velocity_fn, params = random_model(TINY)
    arguments = inputs(TINY)

    def loss(p):
        return jnp.square(velocity_fn(p, *arguments)).mean()

    direction = jax.tree.map(lambda leaf: np.cos(np.arange(leaf.size)).reshape(leaf.shape), params)
    slopes = jax.tree.map(
        lambda grad, moved: np.vdot(np.asarray(grad), moved), jax.jit(jax.grad(loss))(params), direction
    )

    def reference_loss(step):
        moved = jax.tree.map(lambda a, b: np.asarray(a, np.float64) + step * b, params, direction)
        return np.square(reference_velocity(moved, TINY, *arguments)).mean()

    expected = (reference_loss(1e-5) - reference_loss(-1e-5)) / 2e-5
    np.testing.assert_allclose(sum(jax.tree.leaves(slopes)), expected, rtol=1e-3)


def test_default_model_has_about_a_million_parameters():
    config = DiTConfig(image_shape=(16, 48, 1), vocab_size=11, prompt_length=3)
    _, params = as_function(nnx.eval_shape(lambda: DiT(config, rngs=nnx.Rngs(0))))
    assert count_parameters(params) == 1_263_136


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"patch_shape": (3, 4)}, "patch_shape.*8x24"),
        ({"patch_shape": (4,)}, "patch_shape.*2 numbers"),
        ({"image_shape": (8, 24)}, "image_shape.*3 numbers"),
        ({"num_heads": 3}, "num_heads=3.*width=16"),
        ({"width": 6, "num_heads": 1}, "width=6.*multiple of 4"),
        ({"prompt_length": 4}, "prompt_length=4.*6 patch columns"),
        ({"depth": 0}, "depth=0"),
        ({"depth": 1.5}, "depth=1.5"),
        ({"vocab_size": True}, "vocab_size=True"),
        ({"image_shape": (8, -24, 2)}, "image_shape"),
        ({"dtype": "float16"}, "dtype='float16'"),
        ({"remat": "some"}, "remat='some'"),
    ],
)
def test_configuration_errors_name_the_field_and_value(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(TINY, **changes)
    assert "\n" not in str(caught.value)


def test_a_prompt_length_that_fits_no_slot_is_fine_without_alignment():
    assert dataclasses.replace(TINY, prompt_length=4, aligned=False).prompt_length == 4


@pytest.mark.parametrize(
    ("position", "bad", "message"),
    [
        (0, jnp.zeros((4, 8, 20, 2)), "latents has shape"),
        (1, jnp.zeros((4, 1)), "sigma has shape"),
        (1, jnp.zeros(()), "sigma has shape"),
        (2, jnp.zeros((4, 2), jnp.int32), "tokens has shape"),
        (2, jnp.zeros((3, 3), jnp.int32), "tokens has shape"),
        (2, jnp.zeros((4, 3)), "tokens has dtype"),
    ],
)
def test_arguments_of_a_wrong_shape_are_refused(position, bad, message):
    velocity_fn, params = random_model(TINY)
    arguments = list(inputs(TINY))
    arguments[position] = bad
    with pytest.raises(ValueError, match=message):
        velocity_fn(params, *arguments)
