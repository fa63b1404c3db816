"""diffusers' own transformer of Stable Diffusion 3 with random weights, and what passes between it and ours."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import torch
from diffusers import SD3Transformer2DModel
from flax import nnx

from jagg_jax.models import SD3, SD3Config, TextEmbeddings, as_function
from jagg_jax.models.sd3_names import POSITIONS, source_tensors
from jagg_jax.models.weights import flatten


@functools.cache
def abstract(config: SD3Config):
    """The velocity function and the shapes of its parameters; no memory is used."""
    return as_function(nnx.eval_shape(lambda: SD3(config, rngs=nnx.Rngs(0))))


def to_params(config: SD3Config, tensors: dict[str, np.ndarray]):
    """Our parameters, made of diffusers' tensors."""
    like = abstract(config)[1]
    params = []
    for path, leaf in flatten(like).items():
        source = source_tensors(config, path)
        layers = [source.move.load(tensors[name]) for name in source.names]
        params.append(jnp.asarray(np.stack(layers) if source.stacked else layers[0]))
        assert params[-1].shape == leaf.shape, path
    return jax.tree.unflatten(jax.tree.structure(like), params)


def from_params(config: SD3Config, params) -> dict[str, np.ndarray]:
    """Diffusers' tensors, made of our parameters."""
    tensors = {}
    for path, array in flatten(params).items():
        source = source_tensors(config, path)
        layers = np.asarray(array) if source.stacked else np.asarray(array)[None]
        tensors |= {name: source.move.export(layer) for name, layer in zip(source.names, layers, strict=True)}
    return tensors


@functools.cache
def random_reference(config: SD3Config) -> SD3Transformer2DModel:
    """A model all of whose parameters are random: zero gates would hide errors."""
    model = SD3Transformer2DModel.from_config(config.to_diffusers())
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter[0].numel() ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))
            if ".norm_" in name:
                parameter.add_(1.0)
    return model


def reference_tensors(config: SD3Config) -> dict[str, np.ndarray]:
    """The random model's state, without the table of positions."""
    state = random_reference(config).state_dict()
    return {name: tensor.numpy() for name, tensor in state.items() if name != POSITIONS}


def random_inputs(config: SD3Config, height: int, width: int, length: int = 5, batch: int = 2):
    """Latents, noise levels and text embeddings, and a cotangent of the velocity; all NumPy, float32."""
    rng = np.random.default_rng(1)
    draw = lambda *shape: rng.normal(size=(batch, *shape)).astype(np.float32)  # noqa: E731
    latents, cotangent = (draw(height, width, config.in_channels) for _ in range(2))
    text = TextEmbeddings(draw(length, config.joint_attention_dim), draw(config.pooled_projection_dim))
    return (latents, np.linspace(1.0, 0.03, batch, dtype=np.float32), text), cotangent


def reference_velocity(model: SD3Transformer2DModel, latents, sigma, text) -> torch.Tensor:
    """The reference's velocity for our arguments, [B, H, W, C]; the timestep is what diffusers' pipelines pass."""
    latents, sigma, tokens, pooled = (torch.tensor(array) for array in (latents, sigma, *text))
    to_own = lambda tensor: tensor.to(model.dtype)  # noqa: E731
    latents = to_own(latents).permute(0, 3, 1, 2)
    velocity = model(latents, to_own(tokens), to_own(pooled), 1000.0 * sigma, return_dict=False)[0]
    return velocity.permute(0, 2, 3, 1).float()


def reference_gradient(config: SD3Config, arguments, cotangent):
    """PyTorch's velocity, and its gradient with respect to every parameter, as our tree."""
    model = random_reference(config)
    model.zero_grad()
    velocity = reference_velocity(model, *arguments)
    velocity.backward(torch.tensor(cotangent))
    gradient = {name: parameter.grad.numpy() for name, parameter in model.named_parameters()}
    return velocity.detach().numpy(), to_params(config, gradient)
