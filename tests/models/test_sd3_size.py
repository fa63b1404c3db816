"""The published sizes of Stable Diffusion 3: as many parameters as diffusers counts, each with its names; no memory."""

import pytest
import torch
from diffusers import SD3Transformer2DModel
from sd3_reference import abstract

from jagg_jax.models import SD3Config, count_parameters
from jagg_jax.models.sd3_names import POSITIONS, source_tensors
from jagg_jax.models.weights import flatten

PUBLISHED = {
    "3 Medium": SD3Config(num_layers=24, num_attention_heads=24, caption_projection_dim=1536, pos_embed_max_size=192),
    "3.5 Medium": SD3Config(
        num_layers=24,
        num_attention_heads=24,
        caption_projection_dim=1536,
        pos_embed_max_size=384,
        dual_attention_layers=tuple(range(13)),
        qk_norm="rms_norm",
    ),
    "3.5 Large": SD3Config(
        num_layers=38, num_attention_heads=38, caption_projection_dim=2432, pos_embed_max_size=192, qk_norm="rms_norm"
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_every_tensor_of_diffusers_is_a_layer_of_a_parameter_of_ours(name):
    config = PUBLISHED[name]
    with torch.device("meta"):
        reference = SD3Transformer2DModel.from_config(config.to_diffusers())
    theirs = {key: tuple(tensor.shape) for key, tensor in reference.state_dict().items()}
    assert theirs.pop(POSITIONS) == (1, config.pos_embed_max_size**2, config.width)
    _, params = abstract(config)
    assert count_parameters(params) == sum(parameter.numel() for parameter in reference.parameters())
    ours = {}
    for path, leaf in flatten(params).items():
        source = source_tensors(config, path)
        assert not source.stacked or leaf.shape[0] == len(source.names)
        # a view of one number stands for a layer's values
        layer = torch.empty(1).expand(leaf.shape[1:] if source.stacked else leaf.shape).numpy()
        for layer_name in source.names:
            assert layer_name not in ours
            ours[layer_name] = source.move.export(layer).shape
            assert source.move.load(source.move.export(layer)).shape == layer.shape
    assert ours == theirs
