"""Folders that diffusers writes are read exactly, refused clearly, and written so that diffusers reads the same."""

import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL as TheirAutoencoder
from diffusers import SD3Transformer2DModel, StableDiffusion3Pipeline
from safetensors.numpy import load_file, save_file
from sd3_pipeline import write_tiny_pipeline
from sd3_reference import from_params, random_inputs, reference_velocity

from jagg_jax.models import (
    AdapterError,
    Adapters,
    load_sd3,
    load_vae_decoder,
    merge_params,
    save_lora,
    save_sd3,
    split_adapters,
)
from jagg_jax.models.diffusers_io import INDEX_FILE, LORA_FILE, WEIGHTS_FILE
from jagg_jax.models.sd3_names import POSITIONS

TARGETS = (
    "attn.to_q",
    "attn.to_out",
    "attn.add_k_proj",
    "attn2.to_v",
    "image_mlp.mlp_in",
    "modulation.linear",
    "time_in",
)


@pytest.fixture(scope="module")
def pipeline(tmp_path_factory):
    return write_tiny_pipeline(tmp_path_factory.mktemp("pipeline"))


@pytest.fixture(scope="module")
def transformer(pipeline):
    return pipeline / "transformer"


@pytest.fixture
def copy(transformer, tmp_path):
    return shutil.copytree(transformer, tmp_path / "copy")


def close(actual, expected, tolerance):
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=tolerance * np.abs(expected).max())


def their_velocity(model, arguments):
    with torch.no_grad():
        return reference_velocity(model, *arguments).numpy()


def same_tensors(ours, theirs):
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert tensor.dtype == theirs[name].dtype, name
        assert tensor.tobytes() == theirs[name].tobytes(), name


def test_a_file_and_a_sharded_index_give_the_same_bits(transformer, tmp_path):
    tensors = load_file(transformer / WEIGHTS_FILE)
    model = load_sd3(transformer)
    tensors.pop(POSITIONS, None)
    same_tensors(from_params(model.config, model.params), tensors)
    reference = SD3Transformer2DModel.from_pretrained(transformer)
    reference.save_pretrained(tmp_path, max_shard_size="40KB")
    assert (tmp_path / INDEX_FILE).is_file()
    sharded = load_sd3(tmp_path)
    assert jax.tree.structure(sharded.params) == jax.tree.structure(model.params)
    jax.tree.map(np.testing.assert_array_equal, sharded.params, model.params)
    inputs, _ = random_inputs(model.config, 8, 6)
    close(model.velocity_fn(model.params, *inputs), their_velocity(reference, inputs), 1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_files_become_float32(transformer, tmp_path, dtype):
    SD3Transformer2DModel.from_pretrained(transformer).to(dtype).save_pretrained(tmp_path)
    reference = SD3Transformer2DModel.from_pretrained(tmp_path, torch_dtype=torch.float32)
    model = load_sd3(tmp_path)
    state = {name: parameter.detach().numpy() for name, parameter in reference.named_parameters()}
    same_tensors(from_params(model.config, model.params), state)


def test_every_tensor_is_placed_by_its_name(transformer):
    placed = {}

    def place(name, tensor):
        placed[name] = tensor.dtype
        return jnp.asarray(tensor)

    adapters = Adapters(2, 4.0, TARGETS)
    model = load_sd3(transformer, adapters=adapters, adapter_key=jax.random.key(3), place=place)
    kernels = {name: dtype for name, dtype in placed.items() if "lora" not in name}
    assert set(kernels.values()) == {jnp.dtype(jnp.bfloat16)}
    assert placed["last_blocks.attn.to_q.lora_a"] == jnp.float32
    assert len(placed) == len(jax.tree.leaves(model.params))
    assert model.num_adapted == 11  # four maps of both blocks, one of the first alone, two outside
    abstract = load_sd3(transformer, adapters=adapters, abstract=True)
    shapes = jax.tree.map(lambda x: (x.shape, x.dtype), model.params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract.params) == shapes
    assert all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(abstract.params))


def test_all_faults_are_listed_in_one_error(copy):
    tensors = load_file(copy / WEIGHTS_FILE)
    del tensors["proj_out.bias"]
    tensors["stranger"] = np.zeros(3, np.float32)
    tensors["proj_out.weight"] = tensors["proj_out.weight"].T.copy()
    tensors["context_embedder.bias"] = np.zeros(32, np.int32)
    tensors[POSITIONS] = np.zeros((1, 144, 32), np.float32)
    save_file(tensors, copy / WEIGHTS_FILE)
    for abstract in (False, True):
        with pytest.raises(ValueError, match="these tensors do not fit") as caught:
            load_sd3(copy, abstract=abstract)
        for part in (
            "missing: proj_out.bias",
            "unexpected: stranger",
            r"misshapen: proj_out.weight (32, 16) instead of (16, 32)",
            "context_embedder.bias I32",
            f"not what this model computes: {POSITIONS} differs",
        ):
            assert part in str(caught.value)


def test_damaged_files_are_refused(copy):
    tensors = load_file(copy / WEIGHTS_FILE)
    tensors["proj_out.bias"][0] = np.nan
    save_file(tensors, copy / WEIGHTS_FILE)
    with pytest.raises(ValueError, match=r"not finite: patch_out\.bias"):
        load_sd3(copy)
    whole = (copy / WEIGHTS_FILE).read_bytes()
    (copy / WEIGHTS_FILE).write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="not a readable safetensors file"):
        load_sd3(copy)
    (copy / WEIGHTS_FILE).unlink()
    with pytest.raises(ValueError, match="has no weights"):
        load_sd3(copy)
    (copy / "diffusion_pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match="is a pickle"):
        load_sd3(copy)
    index = {"weight_map": {"a": "../outside.safetensors"}}
    (copy / INDEX_FILE).write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"names \.\./outside\.safetensors, which is not in"):
        load_sd3(copy)
    (copy / INDEX_FILE).write_text("[]")
    with pytest.raises(ValueError, match="is damaged"):
        load_sd3(copy)
    (copy / "config.json").write_text('{"_class_name": "FluxTransformer2DModel"}')
    with pytest.raises(ValueError, match="not the transformer of Stable Diffusion 3"):
        load_sd3(copy)
    with pytest.raises(ValueError, match=r"has no config\.json"):
        load_sd3(copy / "nowhere")


def test_the_decoder_alone_is_read(pipeline):
    decoder = load_vae_decoder(pipeline / "vae")
    assert not any("encoder" in name for name in decoder.params)
    reference = TheirAutoencoder.from_pretrained(pipeline / "vae")
    latents = np.random.default_rng(0).normal(size=(2, 6, 8, 4)).astype(np.float32)
    with torch.no_grad():
        raw = torch.tensor(latents).permute(0, 3, 1, 2) / decoder.config.scaling_factor + decoder.config.shift_factor
        expected = reference.decode(raw).sample.permute(0, 2, 3, 1).numpy()
    close(decoder.decode(decoder.params, latents), expected, 1e-4)


@pytest.mark.parametrize("largest_file", [10**9, 60_000])
def test_full_weights_go_to_diffusers_and_back_bit_for_bit(transformer, tmp_path, largest_file):
    model = load_sd3(transformer)
    keys = iter(jax.random.split(jax.random.key(1), len(jax.tree.leaves(model.params))))
    params = jax.tree.map(lambda p: p + 0.1 * jax.random.normal(next(keys), p.shape), model.params)
    save_sd3(tmp_path, model.config, params, largest_file)
    assert (tmp_path / INDEX_FILE).is_file() == (largest_file < 10**9)
    back = load_sd3(tmp_path)
    jax.tree.map(np.testing.assert_array_equal, back.params, params)
    reference = SD3Transformer2DModel.from_pretrained(tmp_path)
    state = {name: parameter.detach().numpy() for name, parameter in reference.named_parameters()}
    same_tensors(from_params(model.config, params), state)
    inputs, _ = random_inputs(model.config, 6, 10)
    close(model.velocity_fn(params, *inputs), their_velocity(reference, inputs), 1e-4)


def test_adapters_change_diffusers_output_as_ours(pipeline, tmp_path):
    model = load_sd3(pipeline / "transformer", adapters=Adapters(3, 6.0, TARGETS), frozen_dtype=jnp.float32)
    frozen, trained = split_adapters(model.params)
    keys = iter(jax.random.split(jax.random.key(2), len(jax.tree.leaves(trained))))
    trained = jax.tree.map(lambda p: p + 0.3 * jax.random.normal(next(keys), p.shape), trained)
    save_lora(tmp_path, model.config, trained, alpha=6.0)
    reference = StableDiffusion3Pipeline.from_pretrained(pipeline)
    inputs, _ = random_inputs(model.config, 8, 8)
    before = their_velocity(reference.transformer, inputs)
    reference.load_lora_weights(tmp_path, adapter_name="ours")
    after = their_velocity(reference.transformer, inputs)
    ours_before = model.velocity_fn(model.params, *inputs)
    ours_after = model.velocity_fn(merge_params(frozen, trained), *inputs)
    assert np.abs(after - before).max() > 0.1 * np.abs(before).max()
    close(ours_after - ours_before, after - before, 1e-4)
    # what diffusers writes again is what we wrote
    reference.transformer.save_lora_adapter(tmp_path / "again", adapter_name="ours")
    theirs = load_file(tmp_path / "again" / LORA_FILE)
    ours = load_file(tmp_path / LORA_FILE)
    same_tensors({name.removeprefix("transformer."): tensor for name, tensor in ours.items()}, theirs)


def test_an_adapter_that_diffusers_can_not_load_is_refused(transformer):
    with pytest.raises(AdapterError, match="targets patch_in: is a convolution in diffusers"):
        load_sd3(transformer, adapters=Adapters(2, 2.0, ("patch_in",)))
