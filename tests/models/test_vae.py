"""The autoencoder against diffusers' own, in both directions and in gradient; and decoding in tiles."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL as Reference
from flax import nnx

from jagg_jax.models import AutoencoderKL, VAEConfig, as_function, tiled_decode
from jagg_jax.models.vae_names import source_tensors
from jagg_jax.models.weights import flatten

# As in Stable Diffusion 3: no 1 x 1 convolutions, a shift
TINY = VAEConfig(
    block_out_channels=(8, 16, 16), layers_per_block=1, latent_channels=4, norm_num_groups=4,
    scaling_factor=1.5, shift_factor=0.1, use_quant_conv=False, use_post_quant_conv=False,
)  # fmt: skip
# As in the first Stable Diffusion: with them, without a shift, and two blocks a level
QUANT = dataclasses.replace(
    TINY,
    block_out_channels=(8, 12),
    layers_per_block=2,
    shift_factor=None,
    use_quant_conv=True,
    use_post_quant_conv=True,
)
CONFIGS = {"shifted": TINY, "quant": QUANT}
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


def reference_config(config: VAEConfig) -> dict:
    levels = len(config.block_out_channels)
    kinds = {"down_block_types": ["DownEncoderBlock2D"] * levels, "up_block_types": ["UpDecoderBlock2D"] * levels}
    return dataclasses.asdict(config) | kinds


@functools.cache
def random_reference(config: VAEConfig) -> Reference:
    """All parameters random, so that no scale of one and no bias of zero hides an error."""
    model = Reference.from_config(reference_config(config))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model


@functools.cache
def abstract(config: VAEConfig, method: str):
    return as_function(nnx.eval_shape(lambda: AutoencoderKL(config, rngs=nnx.Rngs(0))), method)


def to_params(config: VAEConfig, tensors: dict[str, np.ndarray]):
    like = abstract(config, "decode")[1]
    params = []
    for path, leaf in flatten(like).items():
        source = source_tensors(config, path)
        params.append(jnp.asarray(source.move.load(tensors[source.names[0]])))
        assert params[-1].shape == leaf.shape, path
    return jax.tree.unflatten(jax.tree.structure(like), params)


def params_of(config: VAEConfig):
    return to_params(config, {name: tensor.numpy() for name, tensor in random_reference(config).state_dict().items()})


def relative(ours, theirs) -> float:
    ours, theirs = np.asarray(ours), np.asarray(theirs)
    return np.linalg.norm(ours - theirs) / np.linalg.norm(theirs)


@pytest.mark.parametrize("name", CONFIGS)
def test_decoding_and_its_gradient_are_those_of_diffusers(name):
    config = CONFIGS[name]
    rng = np.random.default_rng(0)
    latents = rng.normal(size=(2, 3, 5, config.latent_channels)).astype(np.float32)
    size = config.downsampling
    cotangent = rng.normal(size=(2, 3 * size, 5 * size, 3)).astype(np.float32)
    decode = abstract(config, "decode")[0]

    def pull_back(params, latents):
        images, vjp_fn = jax.vjp(decode, params, latents)
        return images, vjp_fn(jnp.asarray(cotangent))

    images, (params_gradient, latents_gradient) = jax.jit(pull_back, compiler_options=QUICK)(params_of(config), latents)

    model = random_reference(config)
    model.zero_grad()
    theirs = torch.tensor(latents, requires_grad=True)
    unscaled = theirs / config.scaling_factor + (config.shift_factor or 0.0)
    expected = model.decode(unscaled.permute(0, 3, 1, 2)).sample.permute(0, 2, 3, 1)
    expected.backward(torch.tensor(cotangent))
    assert relative(images, expected.detach()) < 1e-5
    assert relative(latents_gradient, theirs.grad) < 1e-4
    gradient = {n: (p.grad if p.grad is not None else torch.zeros_like(p)).numpy() for n, p in model.named_parameters()}
    for path, theirs in flatten(to_params(config, gradient)).items():
        if not path.startswith(("encoder", "quant_conv")):
            ours = flatten(params_gradient)[path]
            assert np.linalg.norm(ours - theirs) <= 1e-4 * np.linalg.norm(theirs) + 1e-5, path


@pytest.mark.parametrize("name", CONFIGS)
def test_encoding_is_that_of_diffusers(name):
    config = CONFIGS[name]
    size = config.downsampling
    images = np.random.default_rng(0).uniform(-1, 1, size=(2, 3 * size, 4 * size, 3)).astype(np.float32)
    encode = jax.jit(abstract(config, "encode")[0], compiler_options=QUICK)
    with torch.no_grad():
        mean = random_reference(config).encode(torch.tensor(images).permute(0, 3, 1, 2)).latent_dist.mean
    expected = (mean.permute(0, 2, 3, 1) - (config.shift_factor or 0.0)) * config.scaling_factor
    assert relative(encode(params_of(config), images), expected) < 1e-5


def test_every_tensor_of_the_published_size_is_a_parameter():
    config = VAEConfig(
        block_out_channels=(128, 256, 512, 512), layers_per_block=2, latent_channels=16, sample_size=1024,
        scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False, use_post_quant_conv=False,
    )  # fmt: skip
    with torch.device("meta"):
        reference = Reference.from_config(reference_config(config))
    theirs = {name: tuple(tensor.shape) for name, tensor in reference.state_dict().items()}
    ours = {}
    for path, leaf in flatten(abstract(config, "decode")[1]).items():
        source = source_tensors(config, path)
        array = torch.empty(1).expand(leaf.shape).numpy()
        ours[source.names[0]] = source.move.export(array).shape
        assert source.move.load(source.move.export(array)).shape == leaf.shape
    assert ours == theirs
    assert config.downsampling == 8


def test_a_configuration_comes_from_diffusers_file():
    content = dict(random_reference(TINY).config)
    assert VAEConfig.from_diffusers(content) == TINY
    for key, value, message in (
        ("act_fn", "relu", "act_fn=relu: only silu"),
        ("_class_name", "VQModel", "_class_name=VQModel"),
        ("up_block_types", ["X"], "up_block_types"),
        ("surprise", 1, "surprise: not in"),
        ("norm_num_groups", 5, "must divide 8"),
        ("latent_channels", 0, "latent_channels=0"),
    ):
        with pytest.raises(ValueError, match=message):
            VAEConfig.from_diffusers(content | {key: value})


def test_shapes_that_do_not_fit_are_refused():
    model = AutoencoderKL(TINY, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"latents has shape \(1, 2, 2, 3\)"):
        model.decode(jnp.zeros((1, 2, 2, 3)))
    with pytest.raises(ValueError, match=r"images has shape \(1, 6, 8, 3\)"):
        model.encode(jnp.zeros((1, 6, 8, 3)))


def enlarge(latents):
    """A decoder whose pixels depend on their own latent alone: blending its tiles must change nothing."""
    return jnp.repeat(jnp.repeat(latents[..., :3], 4, axis=1), 4, axis=2)


@pytest.mark.parametrize("shape", [(7, 7), (7, 23), (16, 9), (40, 33)])
def test_tiles_of_a_local_decoder_are_seamless(shape):
    latents = jnp.asarray(np.random.default_rng(0).normal(size=(2, *shape, 4)), jnp.float32)
    tiled = jax.jit(lambda x: tiled_decode(enlarge, x, tile=8, overlap=3))(latents)
    np.testing.assert_allclose(tiled, enlarge(latents), atol=1e-5)


def test_tiles_hold_the_decoders_activations_of_one_part():
    sides = []

    def record(latents):
        sides.append(latents.shape[1:3])
        return enlarge(latents)

    tiled_decode(record, jnp.zeros((1, 30, 6, 4)), tile=8, overlap=2)
    assert set(sides) == {(8, 6)}
    sides.clear()
    tiled_decode(record, jnp.zeros((1, 8, 8, 4)), tile=8, overlap=2)
    assert sides == [(8, 8)]
    with pytest.raises(ValueError, match="overlap is 8"):
        tiled_decode(record, jnp.zeros((1, 30, 30, 4)), tile=8, overlap=8)


def test_tiles_of_a_real_decoder_are_close_to_the_whole():
    decode = functools.partial(abstract(TINY, "decode")[0], params_of(TINY))
    latents = jnp.asarray(np.random.default_rng(0).normal(size=(1, 12, 12, 4)), jnp.float32)
    tiled = jax.jit(lambda x: tiled_decode(decode, x, tile=8, overlap=4), compiler_options=QUICK)(latents)
    whole = jax.jit(decode, compiler_options=QUICK)(latents)
    assert 0 < relative(tiled, whole) < 0.3
