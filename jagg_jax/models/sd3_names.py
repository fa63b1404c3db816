"""Which tensors of diffusers' `SD3Transformer2DModel` (0.42.1) each parameter of `SD3` is made of, both ways."""

import numpy as np

from jagg_jax.models.sd3 import position_table
from jagg_jax.models.sd3_config import SD3Config
from jagg_jax.models.tensor_names import AS_IT_IS, TRANSPOSE, SourceTensors, patch_convolution

# Our module -> theirs; the leaves are kernel or scale -> weight, bias -> bias.
MODULES = {
    "patch_in": "pos_embed.proj",
    "time_in": "time_text_embed.timestep_embedder.linear_1",
    "time_out": "time_text_embed.timestep_embedder.linear_2",
    "pooled_in": "time_text_embed.text_embedder.linear_1",
    "pooled_out": "time_text_embed.text_embedder.linear_2",
    "text_in": "context_embedder",
    "modulation.linear": "norm_out.linear",
    "patch_out": "proj_out",
}
# The same inside a block: ours "blocks.attn.to_q", with an axis of layers, is theirs "transformer_blocks.0.attn.to_q".
BLOCK_MODULES = {
    "image_modulation.linear": "norm1.linear",
    "text_modulation.linear": "norm1_context.linear",
    "attn.to_out": "attn.to_out.0",
    "attn2.to_out": "attn2.to_out.0",
    "image_mlp.mlp_in": "ff.net.0.proj",
    "image_mlp.mlp_out": "ff.net.2",
    "text_mlp.mlp_in": "ff_context.net.0.proj",
    "text_mlp.mlp_out": "ff_context.net.2",
} | {
    name: name
    for attention, maps in (
        ("attn", ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")),
        ("attn", ("norm_q", "norm_k", "norm_added_q", "norm_added_k")),
        ("attn2", ("to_q", "to_k", "to_v", "norm_q", "norm_k")),
    )
    for name in (f"{attention}.{part}" for part in maps)
}
LEAVES = {"kernel": ("weight", TRANSPOSE), "scale": ("weight", AS_IT_IS), "bias": ("bias", AS_IT_IS)}

# Stored by diffusers but computed here: no parameter.
POSITIONS = "pos_embed.pos_embed"


def source_tensors(config: SD3Config, path: str) -> SourceTensors:
    """Where one parameter comes from.

    Args:
      config: of the model.
      path: dotted, of one of the model's parameters: "blocks.attn.to_q.kernel".
    Raises:
      ValueError: parts that no such path has; an adapter's, too, which diffusers keeps in other files.
    """
    stack, _, inner = path.partition(".")
    layers = config.stacks.get(stack)
    module, _, leaf = (path if layers is None else inner).rpartition(".")
    theirs = (MODULES if layers is None else BLOCK_MODULES).get(module)
    if theirs is None or leaf not in LEAVES:
        raise ValueError(f"{path}: no parameter of the transformer of Stable Diffusion 3")
    name, move = LEAVES[leaf]
    if layers is not None:
        return SourceTensors(tuple(f"transformer_blocks.{layer}.{theirs}.{name}" for layer in layers), move, True)
    if path == "patch_in.kernel":
        move = patch_convolution(config.patch_size)
    return SourceTensors((f"{theirs}.{name}",), move, False)


def position_embeddings(config: SD3Config) -> np.ndarray:
    """The tensor `POSITIONS` as diffusers computes it: float32 [1, pos_embed_max_size squared, D]; 0.9 GB in SD3.5."""
    table, size = position_table(config), config.pos_embed_max_size
    square = np.empty((size, size, config.width), np.float32)
    square[:, :, : config.width // 2] = table[None]
    square[:, :, config.width // 2 :] = table[:, None]
    return square.reshape(1, size * size, config.width)
