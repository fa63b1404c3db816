"""The transformer block of Stable Diffusion 3 and 3.5: image and text tokens with weights of their own, one attention.

Sources: Esser et al. 2024 (arXiv 2403.03206) and, for what the paper leaves open and for the second attention of SD3.5,
`JointTransformerBlock` of diffusers 0.42.1. The attention's maps keep the names that they have there, because published
LoRA recipes name them so ("attn.to_q", "attn.add_k_proj", ...).
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jagg_jax.models.dit import Modulation, modulated_norm
from jagg_jax.models.layers import Linear
from jagg_jax.models.sd3_config import SD3Config

NORM_EPSILON = 1e-6
MLP_RATIO = 4


class HeadNorm(nnx.Module):
    """RMSNorm of each attention head with a learned scale (Zhang & Sennrich 2019); float32, returned in x's dtype."""

    def __init__(self, head_dim: int):
        """Creates the scale, float32 ones."""
        self.scale = nnx.Param(jnp.ones(head_dim, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        """[B, N, heads, head_dim] -> the same."""
        x32 = x.astype(jnp.float32)
        normal = x32 * jax.lax.rsqrt(jnp.square(x32).mean(axis=-1, keepdims=True) + NORM_EPSILON)
        return (normal * self.scale[...].astype(jnp.float32)[None, None, None, :]).astype(x.dtype)


class ImageAttention(nnx.Module):
    """Multi-head self-attention over the image tokens."""

    def __init__(self, config: SD3Config, rngs: nnx.Rngs):
        """Creates the projections, and the norms of queries and keys where the configuration has them."""
        width, dtype = config.width, jnp.dtype(config.dtype)
        self.num_heads, self.normalised = config.num_attention_heads, config.qk_norm is not None
        self.to_q = Linear(width, width, dtype=dtype, rngs=rngs)
        self.to_k = Linear(width, width, dtype=dtype, rngs=rngs)
        self.to_v = Linear(width, width, dtype=dtype, rngs=rngs)
        self.to_out = Linear(width, width, dtype=dtype, rngs=rngs)
        if self.normalised:
            self.norm_q = HeadNorm(config.attention_head_dim)
            self.norm_k = HeadNorm(config.attention_head_dim)

    def __call__(self, image: jax.Array) -> jax.Array:
        """[B, N, D] -> [B, N, D]."""
        return self.to_out(attend(*self.image_heads(image)))

    def image_heads(self, image: jax.Array) -> list[jax.Array]:
        """Queries, keys and values of the image tokens, each [B, N, heads, head_dim]."""
        query, key, value = (_heads(linear(image), self.num_heads) for linear in (self.to_q, self.to_k, self.to_v))
        return [self.norm_q(query), self.norm_k(key), value] if self.normalised else [query, key, value]


class JointAttention(ImageAttention):
    """Multi-head attention over image and text tokens together; each has its own projections."""

    def __init__(self, config: SD3Config, *, returns_text: bool, rngs: nnx.Rngs):
        """Creates the projections of both; where the text is not returned its output projection is left out.

        Its query projection is then used by nothing, in diffusers' model too, but published weights hold it.
        """
        super().__init__(config, rngs)
        width, dtype = config.width, jnp.dtype(config.dtype)
        self.returns_text = returns_text
        self.add_q_proj = Linear(width, width, dtype=dtype, rngs=rngs)
        self.add_k_proj = Linear(width, width, dtype=dtype, rngs=rngs)
        self.add_v_proj = Linear(width, width, dtype=dtype, rngs=rngs)
        if returns_text:
            self.to_add_out = Linear(width, width, dtype=dtype, rngs=rngs)
        if self.normalised:
            self.norm_added_q = HeadNorm(config.attention_head_dim)
            self.norm_added_k = HeadNorm(config.attention_head_dim)

    def __call__(self, image: jax.Array, text: jax.Array) -> tuple[jax.Array, jax.Array | None]:
        """[B, N, D], [B, L, D] -> [B, N, D] and, where text is returned, [B, L, D]."""
        image_query, *image_rest = self.image_heads(image)
        text_query, *text_rest = self.text_heads(text)
        key, value = (jnp.concatenate(pair, axis=1) for pair in zip(image_rest, text_rest, strict=True))
        if not self.returns_text:
            return self.to_out(attend(image_query, key, value)), None
        attended = attend(jnp.concatenate([image_query, text_query], axis=1), key, value)
        return self.to_out(attended[:, : image.shape[1]]), self.to_add_out(attended[:, image.shape[1] :])

    def text_heads(self, text: jax.Array) -> list[jax.Array]:
        """Queries, keys and values of the text tokens, each [B, L, heads, head_dim]."""
        projections = (self.add_q_proj, self.add_k_proj, self.add_v_proj)
        query, key, value = (_heads(linear(text), self.num_heads) for linear in projections)
        return [self.norm_added_q(query), self.norm_added_k(key), value] if self.normalised else [query, key, value]


def attend(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    """Softmax attention without a mask, float32 logits and softmax: each [B, N, heads, head_dim] -> [B, N, D]."""
    logits = jnp.einsum("bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32)
    weights = jax.nn.softmax(logits / query.shape[-1] ** 0.5, axis=-1).astype(value.dtype)
    attended = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
    return attended.reshape(*attended.shape[:2], -1)


def _heads(x: jax.Array, num_heads: int) -> jax.Array:
    """[B, N, D] -> [B, N, heads, head_dim]; columns sharded over devices are whole heads."""
    return x.reshape(*x.shape[:2], num_heads, -1)


class FeedForward(nnx.Module):
    """x + gate * MLP(modulated norm of x), with the tanh approximation of GELU."""

    def __init__(self, config: SD3Config, rngs: nnx.Rngs):
        """Creates the two maps."""
        width, dtype = config.width, jnp.dtype(config.dtype)
        self.mlp_in = Linear(width, MLP_RATIO * width, dtype=dtype, rngs=rngs)
        self.mlp_out = Linear(MLP_RATIO * width, width, dtype=dtype, rngs=rngs)

    def __call__(self, x: jax.Array, shift: jax.Array, scale: jax.Array, gate: jax.Array) -> jax.Array:
        """[B, N, D] and three [B, 1, D] -> [B, N, D]."""
        hidden = nnx.gelu(self.mlp_in(modulated_norm(x, shift, scale)), approximate=True)
        return x + gate * self.mlp_out(hidden)


class MMDiTBlock(nnx.Module):
    """Joint attention, then an MLP for the image and one for the text, each behind an adaLN gate.

    Two variants: a dual block adds a second attention, over the image tokens alone; the last block changes the image
    only, and hands the text on as it came.
    """

    def __init__(self, config: SD3Config, *, dual: bool, last: bool, rngs: nnx.Rngs):
        """Creates a block; its gates are zero, so it changes nothing yet."""
        width, dtype = config.width, jnp.dtype(config.dtype)
        self.dual, self.last = dual, last
        self.image_modulation = Modulation(width, 9 if dual else 6, dtype, rngs)
        self.text_modulation = Modulation(width, 2 if last else 6, dtype, rngs)
        self.attn = JointAttention(config, returns_text=not last, rngs=rngs)
        if dual:
            self.attn2 = ImageAttention(config, rngs)
        self.image_mlp = FeedForward(config, rngs)
        if not last:
            self.text_mlp = FeedForward(config, rngs)

    def __call__(self, carry: tuple[jax.Array, jax.Array], time: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(image tokens [B, N, D], text tokens [B, L, D]), time [B, D] -> both, in the same dtype."""
        image, text = carry
        parts = self.image_modulation(time)
        (shift, scale, gate), mlp, second = parts[:3], parts[3:6], parts[6:]
        if self.last:
            text_scale, text_shift = self.text_modulation(time)  # this one begins with the scale
        else:
            text_shift, text_scale, text_gate, *text_mlp = self.text_modulation(time)
        change, text_change = self.attn(
            modulated_norm(image, shift, scale), modulated_norm(text, text_shift, text_scale)
        )
        attended = image + gate * change
        if self.dual:
            # the second attention sees the image as it was before the first
            shift, scale, gate = second
            attended = attended + gate * self.attn2(modulated_norm(image, shift, scale))
        image = self.image_mlp(attended, *mlp)
        if not self.last:
            text = self.text_mlp(text + text_gate * text_change, *text_mlp)
        return image, text
