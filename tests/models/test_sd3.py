"""The transformer of Stable Diffusion 3 against diffusers' own, in velocity and gradient; and what training needs."""

import copy
import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import SD3Transformer2DModel
from flax import nnx
from sd3_reference import (
    abstract,
    from_params,
    random_inputs,
    random_reference,
    reference_gradient,
    reference_tensors,
    reference_velocity,
    to_params,
)

from jagg_jax import jagg_plan, planned_vjp
from jagg_jax.models import (
    SD3,
    SD3_TENSOR_RULES,
    Adapters,
    SD3Config,
    TextEmbeddings,
    as_function,
    merge_params,
    split_adapters,
)
from jagg_jax.models.lora import add_adapters
from jagg_jax.models.sd3_names import POSITIONS, position_embeddings, source_tensors
from jagg_jax.models.weights import flatten
from jagg_jax.training.sharding import by_sample, make_mesh, parameter_spec, state_shardings

# Three layers as in Stable Diffusion 3 Medium
PLAIN = SD3Config(
    sample_size=8,
    in_channels=4,
    num_layers=3,
    attention_head_dim=8,
    num_attention_heads=2,
    joint_attention_dim=24,
    caption_projection_dim=16,
    pooled_projection_dim=20,
    pos_embed_max_size=6,
)
# As in Stable Diffusion 3.5 Medium: two dual blocks, a plain one and the last
DUAL = dataclasses.replace(PLAIN, num_layers=4, dual_attention_layers=(0, 1), qk_norm="rms_norm")
# Both norms and second attentions up to the last block; the positions of a smaller image
ALL_DUAL = dataclasses.replace(
    DUAL, num_layers=2, attention_head_dim=12, caption_projection_dim=24, sample_size=5, pos_embed_max_size=9
)
# One block alone, patches of three, a single channel and a second attention without norms
SINGLE = dataclasses.replace(
    PLAIN, num_layers=1, dual_attention_layers=(0,), patch_size=3, in_channels=1, out_channels=1, sample_size=9
)
# a quick compilation matters here more than a quick program; later versions know no such option as the last
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
QUICK |= {"xla_cpu_use_fusion_emitters": False} if jax.__version_info__ < (0, 11) else {}


def pull_back(velocity_fn, params, arguments, cotangent):
    velocity, vjp_fn = jax.vjp(lambda p: velocity_fn(p, *arguments), params)
    return velocity, vjp_fn(cotangent)[0]


@functools.cache
def compiled(config):
    """(params, (latents, sigma, text), cotangent) -> velocity and gradient, compiled once a configuration."""
    return jax.jit(functools.partial(pull_back, abstract(config)[0]), compiler_options=QUICK)


@functools.cache
def params_of(config):
    return to_params(config, reference_tensors(config))


def relative_error(found, expected):
    return np.linalg.norm(np.asarray(found) - expected) / np.linalg.norm(expected)


def without_effect(config):
    """Queries of the text in the last block, which returns none; and, without norms, what is added to all keys."""
    paths = ["attn.add_q_proj.kernel", "attn.add_q_proj.bias"]
    paths += ["attn.norm_added_q.scale"] if config.qk_norm else []
    paths += ["attn2.to_k.bias"] if config is SINGLE else []
    return {f"last_blocks.{path}" for path in paths}


@pytest.mark.parametrize(
    ("config", "height", "width"),
    [(PLAIN, 8, 8), (DUAL, 6, 10), (ALL_DUAL, 4, 14), (SINGLE, 9, 6)],
    ids=["plain", "dual", "all dual", "single"],
)
def test_velocity_and_every_gradient_are_those_of_diffusers(config, height, width):
    arguments, cotangent = random_inputs(config, height, width)
    velocity, gradient = compiled(config)(params_of(config), arguments, cotangent)
    expected, expected_gradient = reference_gradient(config, arguments, cotangent)
    assert velocity.dtype == jnp.float32
    assert np.abs(expected).max() > 0.5
    assert relative_error(velocity, expected) < 1e-4
    gradient, expected_gradient = flatten(gradient), flatten(expected_gradient)
    rounding = 1e-6 * np.linalg.norm([np.linalg.norm(leaf) for leaf in expected_gradient.values()])
    idle = {path for path, leaf in expected_gradient.items() if np.linalg.norm(leaf) < rounding}
    assert idle == without_effect(config)
    assert all(np.linalg.norm(gradient[path]) < rounding for path in idle)
    errors = {path: relative_error(gradient[path], expected_gradient[path]) for path in gradient.keys() - idle}
    assert max(errors.values()) < 1e-4, sorted(errors.items(), key=lambda item: -item[1])[:5]


@pytest.mark.parametrize("parameters", ["float32", "bfloat16"])
def test_bfloat16_is_as_near_to_float32_as_in_diffusers(parameters):
    arguments, _ = random_inputs(DUAL, 6, 10)
    exact = reference_velocity(random_reference(DUAL), *arguments).detach().numpy()
    theirs = reference_velocity(copy.deepcopy(random_reference(DUAL)).to(torch.bfloat16), *arguments)
    params = jax.tree.map(lambda leaf: leaf.astype(parameters), params_of(DUAL))
    velocity_fn = abstract(dataclasses.replace(DUAL, dtype="bfloat16"))[0]
    velocity = jax.jit(velocity_fn, compiler_options=QUICK)(params, *arguments)
    assert velocity.dtype == jnp.float32
    error = relative_error(velocity, exact)
    assert 1e-4 < error < 1.2 * relative_error(theirs.detach().numpy(), exact) < 0.05


def test_gradient_in_bfloat16_is_near_that_in_float32():
    inputs = random_inputs(PLAIN, 8, 8)
    _, expected = compiled(PLAIN)(params_of(PLAIN), *inputs)
    _, gradient = compiled(dataclasses.replace(PLAIN, dtype="bfloat16", remat="full"))(params_of(PLAIN), *inputs)
    expected, gradient = (np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(g)]) for g in (expected, gradient))
    assert 1e-4 < relative_error(gradient, expected) < 0.03


@pytest.mark.parametrize("changes", [{"scan_layers": False}, {"remat": "dots"}, {"remat": "full"}], ids=str)
def test_every_way_to_compile_gives_the_same_gradient(changes):
    config = dataclasses.replace(PLAIN, **changes)
    arguments = (params_of(PLAIN), *random_inputs(PLAIN, 8, 8))
    chex.assert_trees_all_close(compiled(config)(*arguments), compiled(PLAIN)(*arguments), rtol=1e-4, atol=1e-5)


def test_a_new_model_predicts_exactly_zero():
    params = jax.jit(lambda: as_function(SD3(PLAIN, rngs=nnx.Rngs(0)))[1], compiler_options=QUICK)()
    velocity, gradient = compiled(PLAIN)(params, *random_inputs(PLAIN, 8, 8))
    assert not np.any(np.asarray(velocity))
    assert np.any(np.asarray(gradient["patch_out"]["kernel"]))


def test_anchors_are_linearised_together():
    sigmas = jnp.array([0.9, 0.6, 0.2])
    plan = jagg_plan(sigmas, steps_per_group=3)
    (_, _, text), _ = random_inputs(PLAIN, 8, 8)
    latents, cotangents = jnp.asarray(np.random.default_rng(2).normal(size=(2, 3, 2, 8, 8, 4)), jnp.float32)

    @functools.partial(jax.jit, compiler_options=QUICK)
    def planned(params):
        velocities, vjp_fn = planned_vjp(abstract(PLAIN)[0], params, latents, sigmas, text, plan=plan)
        return velocities, vjp_fn(cotangents)

    velocities, gradient = planned(params_of(PLAIN))
    composite = np.einsum("nk,n...->k...", plan.weights, cotangents)
    steps = [(latents[n], jnp.full(2, sigmas[n]), text) for n in range(3)]
    first, _, last = one_by_one = [
        compiled(PLAIN)(params_of(PLAIN), step, cotangent)
        for step, cotangent in zip(steps, (composite[0], cotangents[1], composite[1]), strict=True)
    ]
    np.testing.assert_allclose(velocities, np.stack([velocity for velocity, _ in one_by_one]), rtol=1e-4, atol=1e-5)
    chex.assert_trees_all_close(gradient, jax.tree.map(jnp.add, first[1], last[1]), rtol=1e-4, atol=1e-4)


def test_adapters_start_at_the_model_and_learn_by_its_gradient():
    def adapted():
        module = SD3(PLAIN, rngs=nnx.Rngs(0))
        targets = ("attn.to_q", "attn.add_v_proj", "image_mlp.mlp_in")
        add_adapters(module, Adapters(rank=2, alpha=6.0, targets=targets), nnx.Rngs(1))
        return module

    velocity_fn, like = as_function(nnx.eval_shape(adapted))
    rng = np.random.default_rng(3)
    trained = jax.tree.map(lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), split_adapters(like)[1])
    trained = jax.tree.map_with_path(lambda path, leaf: leaf * (path[-1].key == "lora_a"), trained)
    merged = lambda trained, *arguments: velocity_fn(merge_params(params_of(PLAIN), trained), *arguments)  # noqa: E731
    inputs = random_inputs(PLAIN, 8, 8)
    velocity, gradient = jax.jit(functools.partial(pull_back, merged), compiler_options=QUICK)(trained, *inputs)
    expected, base = compiled(PLAIN)(params_of(PLAIN), *inputs)
    np.testing.assert_allclose(velocity, expected, rtol=1e-5, atol=1e-5)
    trained, gradient, base = flatten(trained), flatten(gradient), flatten(base)
    assert len(trained) == 2 * 3 * 2  # two stacks, three maps in each
    for path in (path for path in trained if path.endswith("lora_a")):
        ours = path.replace("lora_a", "lora_b")
        change = 3.0 * np.einsum("lir,lio->lro", trained[path], base[path.replace("lora_a", "kernel")])
        np.testing.assert_allclose(gradient[ours], change, rtol=1e-3, atol=1e-4, err_msg=ours)
        assert not np.any(np.asarray(gradient[path]))


def test_heads_and_mlp_columns_split_over_devices_change_nothing():
    mesh, params = make_mesh(data=2, fsdp=2, tensor=2), params_of(DUAL)
    columns = {"to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "mlp_in"}
    rows = {"to_out", "to_add_out", "mlp_out"}
    for path, leaf in flatten(params).items():
        *stack, module, kind = path.split(".")
        spec = parameter_spec(path, leaf.shape, mesh, SD3_TENSOR_RULES, 0)
        by_column, by_row = module in columns, module in rows and kind == "kernel"
        assert [axis == "tensor" for axis in spec] == [False] * (leaf.ndim - 2) + [by_row, by_column][-leaf.ndim :], (
            path
        )
        assert "blocks" not in path or spec[0] is None, path
        if by_row or by_column:
            adapter = ".".join((*stack, module, "lora_a" if by_row else "lora_b"))
            assert parameter_spec(adapter, (2, 16, 16), mesh, SD3_TENSOR_RULES, 0)[-2 if by_row else -1] == "tensor"
    (latents, sigma, text), _ = random_inputs(DUAL, 6, 10, batch=4)
    placed = jax.device_put(params, state_shardings(params, mesh, SD3_TENSOR_RULES, 0))
    arguments = jax.device_put((latents, sigma, text), by_sample(mesh))
    forward = jax.jit(abstract(DUAL)[0], compiler_options=QUICK)
    expected = forward(params, latents, sigma, text)
    np.testing.assert_allclose(forward(placed, *arguments), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("config", [PLAIN, DUAL, ALL_DUAL, SINGLE], ids=["plain", "dual", "all dual", "single"])
def test_weights_come_and_go_bit_for_bit(config):
    tensors = reference_tensors(config)
    returned = from_params(config, params_of(config))
    assert returned.keys() == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(returned[name], tensor, err_msg=name)
    positions = random_reference(config).state_dict()[POSITIONS].numpy()
    np.testing.assert_allclose(position_embeddings(config), positions, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    "path", ["dual_blocks.attn.to_q.kernel", "blocks.attn.to_q.lora_a", "blocks.ff.kernel", "attn.to_q.kernel", ""]
)
def test_what_is_no_parameter_has_no_name(path):
    with pytest.raises(ValueError, match="no parameter"):
        source_tensors(PLAIN, path)


MEDIUM_FILE = {
    "_class_name": "SD3Transformer2DModel",
    "_diffusers_version": "0.31.0",
    "attention_head_dim": 64,
    "caption_projection_dim": 1536,
    "dual_attention_layers": list(range(13)),
    "in_channels": 16,
    "joint_attention_dim": 4096,
    "num_attention_heads": 24,
    "num_layers": 24,
    "out_channels": 16,
    "patch_size": 2,
    "pooled_projection_dim": 2048,
    "pos_embed_max_size": 384,
    "qk_norm": "rms_norm",
    "sample_size": 128,
}


def test_the_configuration_file_is_read_and_written():
    config = SD3Config.from_diffusers(MEDIUM_FILE)
    assert config.width == 1536
    assert config.stacks == {"dual_blocks": range(13), "blocks": range(13, 23), "last_blocks": range(23, 24)}
    del (expected := dict(MEDIUM_FILE))["_diffusers_version"]
    assert config.to_diffusers() == expected
    with torch.device("meta"):
        defaults = SD3Transformer2DModel().config
    assert SD3Config.from_diffusers(defaults) == SD3Config()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"_class_name": "FluxTransformer2DModel"}, "_class_name=FluxTransformer2DModel"),
        ({"num_single_layers": 3}, "num_single_layers: not in"),
        ({"remat": "full"}, "remat: not in"),
        ({"num_layers": 0}, "num_layers=0"),
        ({"sample_size": True}, "sample_size=True"),
        ({"sample_size": 1}, "sample_size=1: must be at least patch_size=2"),
        ({"pos_embed_max_size": None}, "pos_embed_max_size=None"),
        ({"attention_head_dim": 3, "num_attention_heads": 2}, "attention_head_dim=3.*multiple of 4"),
        ({"caption_projection_dim": 1152}, "caption_projection_dim=1152.*1536"),
        ({"out_channels": 32}, "out_channels=32.*in_channels=16"),
        ({"dual_attention_layers": [0, 2]}, r"dual_attention_layers=\[0, 2\]: only the first blocks"),
        ({"dual_attention_layers": [1]}, r"dual_attention_layers=\[1\]: only the first blocks"),
        ({"dual_attention_layers": list(range(25))}, "0 to k - 1 of 24"),
        ({"qk_norm": "layer_norm"}, "qk_norm='layer_norm'"),
    ],
)
def test_configurations_that_are_not_supported_are_refused(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        SD3Config.from_diffusers(MEDIUM_FILE | changes)
    assert "\n" not in str(caught.value)


def test_our_own_settings_are_checked_too():
    with pytest.raises(ValueError, match="dtype='float16'"):
        dataclasses.replace(PLAIN, dtype="float16")
    with pytest.raises(ValueError, match="remat='some'"):
        dataclasses.replace(PLAIN, remat="some")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": (2, 8, 8)}, "latents has shape"),
        ({"latents": (2, 8, 8, 3)}, "latents has shape"),
        ({"latents": (2, 7, 8, 4)}, "height 7.*multiple of patch_size=2"),
        ({"latents": (2, 8, 14, 4)}, "width 14.*at most 12.*pos_embed_max_size=6"),
        ({"sigma": (2, 1)}, "sigma has shape"),
        ({"tokens": (3, 5, 24)}, "text.tokens has shape"),
        ({"tokens": (2, 24)}, "text.tokens has shape"),
        ({"pooled": (2, 24)}, "text.pooled has shape"),
    ],
)
def test_arguments_of_a_wrong_shape_are_refused(changes, message):
    velocity_fn, params = abstract(PLAIN)
    shapes = {"latents": (2, 8, 8, 4), "sigma": (2,), "tokens": (2, 5, 24), "pooled": (2, 20)} | changes
    latents, sigma, *text = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes.values())
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(velocity_fn, params, latents, sigma, TextEmbeddings(*text))
