"""The transformer of Stable Diffusion 3 and 3.5 (MMDiT): the velocity of latents, given two kinds of text embeddings.

Source: Esser et al. 2024 (arXiv 2403.03206). It computes what `SD3Transformer2DModel` of diffusers 0.42.1 does, from
the same weights (see `sd3_names`), with latents channels-last and the noise level sigma in place of a timestep.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jagg_jax.models.dit import MAX_PERIOD, Modulation, modulated_norm, patchify, sinusoids, unpatchify
from jagg_jax.models.layers import Linear, apply_stack, stack_blocks
from jagg_jax.models.mmdit_block import MMDiTBlock
from jagg_jax.models.sd3_config import SD3Config

TRAINED_TIMESTEPS = 1000.0  # the schedulers of diffusers number the noise levels 0 to 1 as timesteps 0 to 1000
TIME_FEATURES = 256

# As `dit.TENSOR_RULES`: heads and MLP columns over the tensor axis, which must divide the number of heads.
SD3_TENSOR_RULES = {
    r"(attn2?\.(to_q|to_k|to_v|add_q_proj|add_k_proj|add_v_proj)|mlp_in)\.(kernel|bias|lora_b)$": -1,
    r"(attn2?\.(to_out|to_add_out)|mlp_out)\.(kernel|lora_a)$": -2,
}


class TextEmbeddings(NamedTuple):
    """What the model hears of the prompts; a pytree whose arrays all begin with the batch.

    Attributes:
      tokens: [B, L, joint_attention_dim], any float dtype: CLIP's tokens, then T5's. SD3 masks none of them.
      pooled: [B, pooled_projection_dim], any float dtype: the two pooled CLIP embeddings, side by side.
    """

    tokens: jax.Array
    pooled: jax.Array


class SD3(nnx.Module):
    """velocity = SD3(latents, sigma, text)."""

    def __init__(self, config: SD3Config, *, rngs: nnx.Rngs):
        """Creates random float32 parameters from `rngs`; the output is exactly zero until they are trained."""
        self.config = config
        dtype, width = jnp.dtype(config.dtype), config.width
        patch_elements = config.patch_size**2 * config.in_channels
        self.patch_in = Linear(patch_elements, width, dtype=dtype, rngs=rngs)
        self.time_in = Linear(TIME_FEATURES, width, dtype=dtype, rngs=rngs)
        self.time_out = Linear(width, width, dtype=dtype, rngs=rngs)
        self.pooled_in = Linear(config.pooled_projection_dim, width, dtype=dtype, rngs=rngs)
        self.pooled_out = Linear(width, width, dtype=dtype, rngs=rngs)
        self.text_in = Linear(config.joint_attention_dim, width, dtype=dtype, rngs=rngs)
        for name, layers in config.stacks.items():
            setattr(self, name, _make_stack(config, layers, rngs))
        self.modulation = Modulation(width, 2, dtype, rngs)
        self.patch_out = Linear(width, patch_elements, dtype=dtype, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, latents: jax.Array, sigma: jax.Array, text: TextEmbeddings) -> jax.Array:
        """Predicts the velocity noise - x0.

        Args:
          latents: [B, H, W, in_channels], any float dtype; H and W multiples of the patch's size, of any proportion.
          sigma: [B], noise level in [0, 1].
          text: embeddings of the prompts.
        Returns: float32 [B, H, W, in_channels].
        Raises:
          ValueError: shapes that do not fit the configuration or each other.
        """
        self._check(latents, sigma, text)
        config = self.config
        carry = self._embed_image(latents), self.text_in(text.tokens)
        time = self._embed_time(sigma, text.pooled)
        for name, layers in config.stacks.items():
            # XLA would unroll a loop of one, and undo the recomputation in it
            scan = config.scan_layers and len(layers) > 1
            carry = apply_stack(getattr(self, name), carry, time, remat=config.remat, scan=scan)
        scale, shift = self.modulation(time)
        patches = self.patch_out(modulated_norm(carry[0], shift, scale)).astype(jnp.float32)
        return unpatchify(patches, latents.shape[1:], (config.patch_size, config.patch_size))

    def _embed_image(self, latents: jax.Array) -> jax.Array:
        """Patches with their positions added: [B, H, W, C] -> [B, N, D]."""
        dtype, size = jnp.dtype(self.config.dtype), self.config.patch_size
        tokens = self.patch_in(patchify(latents.astype(dtype), (size, size)))
        positions = grid_positions(self.config, latents.shape[1] // size, latents.shape[2] // size)
        return (tokens.astype(jnp.float32) + positions[None]).astype(dtype)

    def _embed_time(self, sigma: jax.Array, pooled: jax.Array) -> jax.Array:
        """The noise level's embedding plus the pooled text's: [B], [B, P] -> [B, D]."""
        # The phase is taken in float32: bfloat16 cannot tell neighbouring sigmas apart.
        phase = sinusoids(TRAINED_TIMESTEPS * sigma.astype(jnp.float32), TIME_FEATURES)
        cosines_first = jnp.roll(phase, TIME_FEATURES // 2, axis=-1)
        time = self.time_out(nnx.silu(self.time_in(cosines_first)))
        return time + self.pooled_out(nnx.silu(self.pooled_in(pooled)))

    def _check(self, latents: jax.Array, sigma: jax.Array, text: TextEmbeddings) -> None:
        """Static shape checks, before anything is compiled."""
        config, batch = self.config, latents.shape[:1]
        if latents.ndim != 4 or latents.shape[-1] != config.in_channels:
            raise ValueError(f"latents has shape {latents.shape}; this model needs [B, H, W, {config.in_channels}]")
        for name, size in zip(("height", "width"), latents.shape[1:3], strict=True):
            largest = config.pos_embed_max_size * config.patch_size
            if size % config.patch_size or not 0 < size <= largest:
                raise ValueError(
                    f"latents has {name} {size}; it must be a multiple of patch_size={config.patch_size} "
                    f"and at most {largest}, which pos_embed_max_size={config.pos_embed_max_size} allows"
                )
        length = text.tokens.shape[1:2]
        for name, array, shape in (
            ("sigma", sigma, batch),
            ("text.tokens", text.tokens, (*batch, *length, config.joint_attention_dim)),
            ("text.pooled", text.pooled, (*batch, config.pooled_projection_dim)),
        ):
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}; this model needs {shape}")


def _make_stack(config: SD3Config, layers: range, rngs: nnx.Rngs) -> nnx.Module:
    """Blocks of one kind, as `SD3Config.stacks` groups them."""
    dual, last = layers[0] in config.dual_attention_layers, layers[0] == config.num_layers - 1
    return stack_blocks(lambda rngs: MMDiTBlock(config, dual=dual, last=last, rngs=rngs), len(layers), rngs)


def position_table(config: SD3Config) -> np.ndarray:
    """Sines, then cosines, of each row's (or column's) place, float32 [pos_embed_max_size, D / 2].

    Places are measured in patches of a `sample_size` image: the whole table spans as far as that image does.
    """
    half, base = config.width // 2, config.sample_size // config.patch_size
    places = np.arange(config.pos_embed_max_size, dtype=np.float32) / np.float32(config.pos_embed_max_size / base)
    frequencies = 1.0 / MAX_PERIOD ** (np.arange(half // 2) / (half / 2))
    angles = places.astype(np.float64)[:, None] * frequencies[None, :]
    return np.concatenate([np.sin(angles), np.cos(angles)], axis=-1).astype(np.float32)


def grid_positions(config: SD3Config, rows: int, columns: int) -> jax.Array:
    """Position embeddings of the middle `rows` x `columns` of the table's square, float32 [rows * columns, D].

    The first half of the width encodes the column, the second the row.
    """
    table = position_table(config)
    top, left = (config.pos_embed_max_size - rows) // 2, (config.pos_embed_max_size - columns) // 2
    row, column = jnp.asarray(table[top : top + rows]), jnp.asarray(table[left : left + columns])
    return jnp.concatenate([jnp.tile(column, (rows, 1)), jnp.repeat(row, columns, axis=0)], axis=-1)
