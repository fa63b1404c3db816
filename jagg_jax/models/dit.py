"""A small diffusion transformer: image and character tokens attend jointly, adaLN-zero carries the noise level.

Sources: Peebles & Xie 2023 (DiT: patches, fixed sin-cos positions, adaLN-zero); Esser et al. 2024 (SD3: text and image
tokens in one attention sequence). The model predicts the rectified-flow velocity noise - x0.
"""

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jagg_jax.models.layers import Linear, Remat, apply_stack, check_remat, stack_blocks

TIME_SCALE = 100.0  # sigma in [0, 1] times this is the phase of the fastest sinusoid; lower is smoother in sigma
MAX_PERIOD = 10_000.0
NORM_EPSILON = 1e-6


@dataclasses.dataclass(frozen=True, kw_only=True)
class DiTConfig:
    """Everything that defines a `DiT` but its weights. Sizes in pixels or elements.

    Raises:
      ValueError: a size that is not positive, or sizes that do not divide each other.
    """

    image_shape: tuple[int, int, int]
    """Height, width and channels of a latent image."""
    vocab_size: int
    """Character tokens, including token 0, the null condition."""
    prompt_length: int
    """Characters in a prompt; 1 with `aligned=False` is class-conditional generation."""
    patch_shape: tuple[int, int] = (8, 4)
    """Height and width of the patch that becomes one token."""
    width: int = 128
    """Elements of a token."""
    depth: int = 4
    """Transformer blocks."""
    num_heads: int = 4
    """Attention heads."""
    mlp_ratio: int = 4
    """Hidden width of a block's MLP, in token widths."""
    aligned: bool = True
    """Also add character k's embedding to the image tokens of the k-th slot of the image's width."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the matrix products; parameters, norms, softmax and output stay float32."""
    remat: Remat = "none"
    """What the backward pass recomputes in each block; see `layers.apply_stack`."""
    scan_layers: bool = False
    """Compile one block and loop over it instead of repeating it in the program: for deep models."""

    def __post_init__(self):
        """Checks the sizes against each other (lists, as JSON gives them, become tuples)."""
        for name, length in (("image_shape", 3), ("patch_shape", 2)):
            value = tuple(getattr(self, name))
            if len(value) != length:
                raise ValueError(f"{name}={value}: give {length} numbers")
            object.__setattr__(self, name, value)
        sizes = ("vocab_size", "prompt_length", "width", "depth", "num_heads", "mlp_ratio")
        sizes = {name: (getattr(self, name),) for name in sizes}
        sizes |= {"image_shape": self.image_shape, "patch_shape": self.patch_shape}
        for name, value in sizes.items():
            if not all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in value):
                raise ValueError(f"{name}={getattr(self, name)}: give positive whole numbers")
        (height, width, _), (patch_height, patch_width) = self.image_shape, self.patch_shape
        if height % patch_height or width % patch_width:
            raise ValueError(f"patch_shape={self.patch_shape}: does not divide the image's {height}x{width}; change it")
        if self.width % self.num_heads:
            raise ValueError(f"num_heads={self.num_heads}: does not divide width={self.width}; change either")
        if self.width % 4:
            raise ValueError(f"width={self.width}: 2-D sin-cos positions need a multiple of 4")
        if self.aligned and self.grid_shape[1] % self.prompt_length:
            raise ValueError(
                f"prompt_length={self.prompt_length}: aligned=True needs it to divide the {self.grid_shape[1]} "
                "patch columns; change patch_shape or set aligned=False"
            )
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'float32' or 'bfloat16'")
        check_remat(self.remat)

    @property
    def grid_shape(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        return self.image_shape[0] // self.patch_shape[0], self.image_shape[1] // self.patch_shape[1]


def patchify(images: jax.Array, patch_shape: tuple[int, int]) -> jax.Array:
    """Cuts [B, H, W, C] into [B, (H/h)*(W/w), h*w*C]: one row a patch, patches row by row, channels last."""
    (batch, height, width, channels), (h, w) = images.shape, patch_shape
    patches = images.reshape(batch, height // h, h, width // w, w, channels).transpose(0, 1, 3, 2, 4, 5)
    return patches.reshape(batch, -1, h * w * channels)


def unpatchify(patches: jax.Array, image_shape: tuple[int, int, int], patch_shape: tuple[int, int]) -> jax.Array:
    """The inverse of `patchify`: [B, (H/h)*(W/w), h*w*C] -> [B, H, W, C]."""
    (height, width, channels), (h, w) = image_shape, patch_shape
    images = patches.reshape(-1, height // h, width // w, h, w, channels).transpose(0, 1, 3, 2, 4, 5)
    return images.reshape(-1, height, width, channels)


def sinusoids(values: jax.Array, width: int) -> jax.Array:
    """Sines, then cosines, of `values` times width/2 frequencies 10000^(-2k/width) (Vaswani et al. 2017).

    Args:
      values: float32 [N]. width: even.
    Returns: float32 [N, width].
    """
    frequencies = MAX_PERIOD ** (-2.0 * np.arange(width // 2) / width)
    angles = values[:, None] * jnp.asarray(frequencies, jnp.float32)[None, :]
    return jnp.concatenate([jnp.sin(angles), jnp.cos(angles)], axis=-1)


def grid_positions(rows: int, columns: int, width: int) -> jax.Array:
    """Fixed 2-D positions, float32 [rows*columns, width]: half of the width encodes the row, half the column."""
    row = sinusoids(jnp.arange(rows, dtype=jnp.float32), width // 2)
    column = sinusoids(jnp.arange(columns, dtype=jnp.float32), width // 2)
    return jnp.concatenate([jnp.repeat(row, columns, axis=0), jnp.tile(column, (rows, 1))], axis=-1)


def modulated_norm(x: jax.Array, shift: jax.Array, scale: jax.Array) -> jax.Array:
    """LayerNorm without learned scale, then adaLN's x*(1 + scale) + shift; in float32, returned in x's dtype.

    Args:
      x: [B, N, D]. shift, scale: [B, 1, D].
    """
    x32 = x.astype(jnp.float32)
    centred = x32 - x32.mean(axis=-1, keepdims=True)
    normal = centred * jax.lax.rsqrt(jnp.square(centred).mean(axis=-1, keepdims=True) + NORM_EPSILON)
    return (normal * (1.0 + scale.astype(jnp.float32)) + shift.astype(jnp.float32)).astype(x.dtype)


class Modulation(nnx.Module):
    """adaLN-zero: `parts` vectors [B, 1, D] from the time embedding [B, D], all zero at the start of training."""

    def __init__(self, width: int, parts: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        """Creates the zero-initialised projection."""
        self.parts = parts
        self.linear = Linear(width, parts * width, dtype=dtype, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, time: jax.Array) -> list[jax.Array]:
        """[B, D] -> `parts` arrays [B, 1, D]."""
        return jnp.split(self.linear(nnx.silu(time))[:, None, :], self.parts, axis=-1)


class Attention(nnx.Module):
    """Multi-head self-attention over the whole sequence; float32 logits and softmax."""

    def __init__(self, width: int, num_heads: int, dtype: jnp.dtype, rngs: nnx.Rngs):
        """Creates the query/key/value and output projections."""
        self.num_heads = num_heads
        self.qkv = Linear(width, 3 * width, dtype=dtype, rngs=rngs)
        self.out = Linear(width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, N, D] -> [B, N, D]."""
        batch, length, width = x.shape
        # heads outermost: columns sharded over devices are then whole heads
        qkv = self.qkv(x).reshape(batch, length, self.num_heads, 3, width // self.num_heads)
        query, key, value = qkv[..., 0, :], qkv[..., 1, :], qkv[..., 2, :]
        logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
        weights = jax.nn.softmax(logits / query.shape[-1] ** 0.5, axis=-1).astype(x.dtype)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(batch, length, width))


# Which axis of which parameter is split over the tensor axis of a mesh: attention heads and the MLP's hidden columns.
# Counted from the end, so that a stack of blocks is split as one block is; adapters are split as the maps they adapt.
TENSOR_RULES = {
    r"(attention\.qkv|mlp_in)\.(kernel|bias|lora_b)$": -1,
    r"(attention\.out|mlp_out)\.(kernel|lora_a)$": -2,
}


class Block(nnx.Module):
    """x += gate*attention(norm(x)); x += gate*mlp(norm(x)); gates start at zero, so a new block is the identity."""

    def __init__(self, config: DiTConfig, dtype: jnp.dtype, rngs: nnx.Rngs):
        """Creates the block's four parts."""
        width, hidden = config.width, config.mlp_ratio * config.width
        self.modulation = Modulation(width, 6, dtype, rngs)
        self.attention = Attention(width, config.num_heads, dtype, rngs)
        self.mlp_in = Linear(width, hidden, dtype=dtype, rngs=rngs)
        self.mlp_out = Linear(hidden, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, time: jax.Array) -> jax.Array:
        """[B, N, D], time [B, D] -> [B, N, D]."""
        shift_a, scale_a, gate_a, shift_m, scale_m, gate_m = self.modulation(time)
        x = x + gate_a * self.attention(modulated_norm(x, shift_a, scale_a))
        hidden = nnx.gelu(self.mlp_in(modulated_norm(x, shift_m, scale_m)))
        return x + gate_m * self.mlp_out(hidden)


class DiT(nnx.Module):
    """velocity = DiT(latents, sigma, tokens); its output is exactly zero before training (adaLN-zero)."""

    def __init__(self, config: DiTConfig, *, rngs: nnx.Rngs):
        """Creates random float32 parameters from `rngs`."""
        self.config = config
        dtype, width = jnp.dtype(config.dtype), config.width
        patch_size = config.patch_shape[0] * config.patch_shape[1] * config.image_shape[2]
        self.patch_in = Linear(patch_size, width, dtype=dtype, rngs=rngs)
        # Comparable to the positions beside it, so that the prompt is heard early; Flax's default is 0.09 at width 128.
        embedding_init = nnx.initializers.normal(0.35)
        self.characters = nnx.Embed(config.vocab_size, width, dtype=dtype, embedding_init=embedding_init, rngs=rngs)
        self.time_in = Linear(width, width, dtype=dtype, rngs=rngs)
        self.time_out = Linear(width, width, dtype=dtype, rngs=rngs)
        self.blocks = stack_blocks(lambda rngs: Block(config, dtype, rngs), config.depth, rngs)
        self.modulation = Modulation(width, 2, dtype, rngs)
        self.patch_out = Linear(width, patch_size, dtype=dtype, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, latents: jax.Array, sigma: jax.Array, tokens: jax.Array) -> jax.Array:
        """Predicts the velocity noise - x0.

        Args:
          latents: [B, H, W, C], any float dtype. sigma: [B], noise level in [0, 1].
          tokens: int32 [B, L], 0 <= token < vocab_size; 0 is the null condition.
        Returns: float32 [B, H, W, C].
        Raises:
          ValueError: shapes that do not fit the configuration or each other.
        """
        self._check(latents, sigma, tokens)
        config = self.config
        x = self._embed(latents, tokens)
        # The phase is taken in float32: bfloat16 cannot tell neighbouring sigmas apart.
        phase = sinusoids(TIME_SCALE * sigma.astype(jnp.float32), config.width).astype(x.dtype)
        time = self.time_out(nnx.silu(self.time_in(phase)))
        x = apply_stack(self.blocks, x, time, remat=config.remat, scan=config.scan_layers)
        shift, scale = self.modulation(time)
        image_tokens = x[:, : config.grid_shape[0] * config.grid_shape[1]]
        patches = self.patch_out(modulated_norm(image_tokens, shift, scale))
        return unpatchify(patches.astype(jnp.float32), config.image_shape, config.patch_shape)

    def _embed(self, latents: jax.Array, tokens: jax.Array) -> jax.Array:
        """Image tokens, then character tokens, positions added: [B, N + L, D]."""
        config, dtype = self.config, jnp.dtype(self.config.dtype)
        (rows, columns), length = config.grid_shape, config.prompt_length
        image = self.patch_in(patchify(latents.astype(dtype), config.patch_shape))
        characters = self.characters(tokens)
        if config.aligned:
            slots = jnp.repeat(characters, columns // length, axis=1)
            image = image + jnp.tile(slots, (1, rows, 1))
        place = sinusoids(jnp.arange(length, dtype=jnp.float32), config.width).astype(dtype)
        image = image + grid_positions(rows, columns, config.width).astype(dtype)[None]
        return jnp.concatenate([image, characters + place[None]], axis=1)

    def _check(self, latents: jax.Array, sigma: jax.Array, tokens: jax.Array) -> None:
        """Static shape checks, before anything is compiled."""
        batch = latents.shape[:1]
        for name, array, shape in (
            ("latents", latents, (*batch, *self.config.image_shape)),
            ("sigma", sigma, batch),
            ("tokens", tokens, (*batch, self.config.prompt_length)),
        ):
            if array.shape != shape:
                raise ValueError(f"{name} has shape {array.shape}; this model needs {shape}")
        if not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens has dtype {tokens.dtype}; give whole numbers")
