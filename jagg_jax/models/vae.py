"""The autoencoder of Stable Diffusion 3 and 3.5: images to latents and back, channels last.

It computes what `AutoencoderKL` of diffusers 0.42.1 does, from the same weights (see `vae_names`), but for the order of
axes and for scaling and shifting the latents, which is part of both directions here. Modules have diffusers' names.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jagg_jax.models.vae_config import VAEConfig

NORM_EPSILON = 1e-6


class AutoencoderKL(nnx.Module):
    """`encoder` and `decoder`, each a function of its own; everything is float32."""

    def __init__(self, config: VAEConfig, *, rngs: nnx.Rngs):
        """Creates random float32 parameters from `rngs`."""
        self.encoder = Encoder(config, rngs)
        self.decoder = Decoder(config, rngs)
        double, channels = 2 * config.latent_channels, config.latent_channels
        if config.use_quant_conv:
            self.quant_conv = nnx.Conv(double, double, (1, 1), rngs=rngs)
        if config.use_post_quant_conv:
            self.post_quant_conv = nnx.Conv(channels, channels, (1, 1), rngs=rngs)
        self.config = config

    def encode(self, images: jax.Array) -> jax.Array:
        """The mean of the latents' distribution.

        Args:
          images: [B, H, W, 3] in [-1, 1]; H and W multiples of `config.downsampling`.
        Returns: float32 [B, H / d, W / d, latent_channels], scaled to about unit variance.
        Raises:
          ValueError: images of another shape.
        """
        config = self.config
        if images.ndim != 4 or images.shape[-1] != 3 or any(size % config.downsampling for size in images.shape[1:3]):
            raise ValueError(f"images has shape {images.shape}; give [B, H, W, 3], multiples of {config.downsampling}")
        moments = self.encoder(images.astype(jnp.float32))
        if config.use_quant_conv:
            moments = self.quant_conv(moments)
        mean = moments[..., : config.latent_channels]
        return (mean - (config.shift_factor or 0.0)) * config.scaling_factor

    def decode(self, latents: jax.Array) -> jax.Array:
        """The image of latents.

        Args:
          latents: [B, h, w, latent_channels], as `encode` scales them.
        Returns: float32 [B, h * d, w * d, 3], nominally in [-1, 1].
        Raises:
          ValueError: latents of another shape.
        """
        config = self.config
        if latents.ndim != 4 or latents.shape[-1] != config.latent_channels:
            raise ValueError(f"latents has shape {latents.shape}; give [B, h, w, {config.latent_channels}]")
        latents = latents.astype(jnp.float32) / config.scaling_factor + (config.shift_factor or 0.0)
        if config.use_post_quant_conv:
            latents = self.post_quant_conv(latents)
        return self.decoder(latents)


class Encoder(nnx.Module):
    """Images [B, H, W, 3] -> mean and log-variance side by side, [B, h, w, 2 * latent_channels]."""

    def __init__(self, config: VAEConfig, rngs: nnx.Rngs):
        """Creates one level of residual blocks for every entry of `block_out_channels`."""
        channels, last = config.block_out_channels, config.block_out_channels[-1]
        self.conv_in = _conv(3, channels[0], rngs)
        sides = list(zip((channels[0], *channels), channels, strict=False))
        self.down_blocks = nnx.List(
            [Level(config, *side, config.layers_per_block, "down" if i < len(sides) - 1 else None, rngs)
             for i, side in enumerate(sides)]
        )  # fmt: skip
        self.mid_block = Middle(config, last, rngs)
        self.conv_norm_out = GroupNorm(config, last, rngs)
        self.conv_out = _conv(last, 2 * config.latent_channels, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, 3] -> [B, h, w, 2 * latent_channels]."""
        x = self.conv_in(x)
        for block in self.down_blocks:
            x = block(x)
        return self.conv_out(nnx.silu(self.conv_norm_out(self.mid_block(x))))


class Decoder(nnx.Module):
    """Latents [B, h, w, latent_channels] -> images [B, H, W, 3]."""

    def __init__(self, config: VAEConfig, rngs: nnx.Rngs):
        """Creates the levels in the encoder's order reversed."""
        channels = config.block_out_channels[::-1]
        self.conv_in = _conv(config.latent_channels, channels[0], rngs)
        self.mid_block = Middle(config, channels[0], rngs)
        sides = list(zip((channels[0], *channels), channels, strict=False))
        self.up_blocks = nnx.List(
            [Level(config, *side, config.layers_per_block + 1, "up" if i < len(sides) - 1 else None, rngs)
             for i, side in enumerate(sides)]
        )  # fmt: skip
        self.conv_norm_out = GroupNorm(config, channels[-1], rngs)
        self.conv_out = _conv(channels[-1], 3, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, h, w, latent_channels] -> [B, H, W, 3]."""
        x = self.mid_block(self.conv_in(x))
        for block in self.up_blocks:
            x = block(x)
        return self.conv_out(nnx.silu(self.conv_norm_out(x)))


class Level(nnx.Module):
    """Residual blocks at one size, then half or twice that size."""

    def __init__(self, config: VAEConfig, inputs: int, outputs: int, layers: int, resize: str | None, rngs: nnx.Rngs):
        """`resize` is "down", "up" or None."""
        self.resnets = nnx.List([Residual(config, inputs if i == 0 else outputs, outputs, rngs) for i in range(layers)])
        if resize == "down":
            self.downsamplers = nnx.List([Downsample(outputs, rngs)])
        elif resize == "up":
            self.upsamplers = nnx.List([Upsample(outputs, rngs)])
        self.resize = resize

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H', W', outputs]."""
        for block in self.resnets:
            x = block(x)
        if self.resize == "down":
            return self.downsamplers[0](x)
        return self.upsamplers[0](x) if self.resize == "up" else x


class Middle(nnx.Module):
    """Two residual blocks with an attention over all positions between."""

    def __init__(self, config: VAEConfig, channels: int, rngs: nnx.Rngs):
        """Creates the three."""
        self.resnets = nnx.List([Residual(config, channels, channels, rngs) for _ in range(2)])
        self.attentions = nnx.List([PositionAttention(config, channels, rngs)])

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> the same."""
        return self.resnets[1](self.attentions[0](self.resnets[0](x)))


class Residual(nnx.Module):
    """x + two normalised convolutions of x."""

    def __init__(self, config: VAEConfig, inputs: int, outputs: int, rngs: nnx.Rngs):
        """A 1 x 1 convolution on the way round where the channels change."""
        self.norm1 = GroupNorm(config, inputs, rngs)
        self.conv1 = _conv(inputs, outputs, rngs)
        self.norm2 = GroupNorm(config, outputs, rngs)
        self.conv2 = _conv(outputs, outputs, rngs)
        self.changes = inputs != outputs
        if self.changes:
            self.conv_shortcut = nnx.Conv(inputs, outputs, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, inputs] -> [B, H, W, outputs]."""
        change = self.conv1(nnx.silu(self.norm1(x)))
        change = self.conv2(nnx.silu(self.norm2(change)))
        return (self.conv_shortcut(x) if self.changes else x) + change


class PositionAttention(nnx.Module):
    """x + attention with a single head as wide as the channels."""

    def __init__(self, config: VAEConfig, channels: int, rngs: nnx.Rngs):
        """Creates the four maps and the norm before them."""
        self.group_norm = GroupNorm(config, channels, rngs)
        self.to_q, self.to_k, self.to_v, self.to_out = (nnx.Linear(channels, channels, rngs=rngs) for _ in range(4))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> the same."""
        tokens = self.group_norm(x).reshape(x.shape[0], -1, x.shape[-1])
        query, key, value = self.to_q(tokens), self.to_k(tokens), self.to_v(tokens)
        weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", query, key) / x.shape[-1] ** 0.5, axis=-1)
        return x + self.to_out(jnp.einsum("bqk,bkd->bqd", weights, value)).reshape(x.shape)


class Downsample(nnx.Module):
    """Half the height and width; only the lower and right edges are padded."""

    def __init__(self, channels: int, rngs: nnx.Rngs):
        """Creates the convolution."""
        self.conv = nnx.Conv(channels, channels, (3, 3), strides=2, padding=((0, 1), (0, 1)), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, H / 2, W / 2, C]."""
        return self.conv(x)


class Upsample(nnx.Module):
    """Twice the height and width, by repetition and a convolution."""

    def __init__(self, channels: int, rngs: nnx.Rngs):
        """Creates the convolution."""
        self.conv = _conv(channels, channels, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, H, W, C] -> [B, 2 H, 2 W, C]."""
        return self.conv(jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2))


class GroupNorm(nnx.GroupNorm):
    """Group normalisation with this model's epsilon; the variance is that of centred values, as in PyTorch."""

    def __init__(self, config: VAEConfig, channels: int, rngs: nnx.Rngs):
        """Creates scale and bias."""
        groups = config.norm_num_groups
        super().__init__(channels, groups, epsilon=NORM_EPSILON, use_fast_variance=False, rngs=rngs)


def _conv(inputs: int, outputs: int, rngs: nnx.Rngs) -> nnx.Conv:
    """3 x 3, keeping height and width."""
    return nnx.Conv(inputs, outputs, (3, 3), padding=1, rngs=rngs)


def tiled_decode(decode: Callable, latents: jax.Array, tile: int = 64, overlap: int = 16) -> jax.Array:
    """An image decoded in overlapping square parts, whose overlaps are blended linearly.

    A decoder's activations grow with the image; here they are those of one tile. Within a tile the decoder's attention
    and norms see that tile alone, so the result is close to the whole image's, not equal.

    Args:
      decode: latents [B, h, w, C] -> images [B, d h, d w, channels], for any h and w.
      latents: [B, h, w, C].
      tile: side of a part, in latents. Sides no longer than this are not cut.
      overlap: what neighbouring parts share, in latents; below `tile`.
    Returns: [B, d h, d w, channels].
    Raises:
      ValueError: an overlap that leaves no step from part to part.
    """
    if not 0 <= overlap < tile:
        raise ValueError(f"overlap is {overlap}; it must be at least 0 and below the tile of {tile}")
    height, width = latents.shape[1:3]
    rows, columns = _starts(height, tile, overlap), _starts(width, tile, overlap)
    if len(rows) == len(columns) == 1:
        return decode(latents)
    sides = min(tile, height), min(tile, width)
    places = jnp.array([(row, column) for row in rows for column in columns], jnp.int32)
    batch, channels = latents.shape[0], latents.shape[-1]

    def decode_at(place):
        part = jax.lax.dynamic_slice(latents, (0, place[0], place[1], 0), (batch, *sides, channels))
        return decode(part)

    shape = jax.eval_shape(decode_at, places[0])
    scale = shape.shape[1] // sides[0]
    weights = jnp.asarray(_ramp(sides[0], overlap, scale)[:, None] * _ramp(sides[1], overlap, scale)[None, :])
    zeros = jnp.zeros((batch, height * scale, width * scale, shape.shape[-1] + 1), jnp.float32)

    def add(total, place):
        image = decode_at(place).astype(jnp.float32)
        corner = (0, place[0] * scale, place[1] * scale, 0)
        weight = jnp.broadcast_to(weights[None, :, :, None], (*image.shape[:3], 1))
        weighted = jnp.concatenate([image * weight, weight], axis=-1)
        before = jax.lax.dynamic_slice(total, corner, weighted.shape)
        return jax.lax.dynamic_update_slice(total, before + weighted, corner), None

    total, _ = jax.lax.scan(add, zeros, places)
    return total[..., :-1] / total[..., -1:]


def _starts(size: int, tile: int, overlap: int) -> list[int]:
    """Where the parts of one side begin: evenly apart, at least `overlap` shared, from edge to edge."""
    if size <= tile:
        return [0]
    count = -(-(size - overlap) // (tile - overlap))
    return [round(i * (size - tile) / (count - 1)) for i in range(count)]


@functools.cache
def _ramp(side: int, overlap: int, scale: int) -> np.ndarray:
    """Weights of a part's pixels along one side, float32 [side * scale]: rising and falling over the overlap."""
    distance = np.arange(side * scale) + 0.5
    distance = np.minimum(distance, distance[::-1])
    return np.minimum(distance / max(overlap * scale, 1), 1.0).astype(np.float32)
