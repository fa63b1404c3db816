"""What defines a Stable Diffusion 3 or 3.5 transformer but its weights, read from diffusers' configuration file."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from jagg_jax.models.layers import Remat, check_remat

DIFFUSERS_CLASS = "SD3Transformer2DModel"
OURS = ("dtype", "remat", "scan_layers")  # how to compute: no field of diffusers' configuration


@dataclasses.dataclass(frozen=True, kw_only=True)
class SD3Config:
    """Everything that defines an `SD3` but its weights; names and defaults are those of diffusers 0.42.1.

    Raises:
      ValueError: a size that is not positive, sizes that do not fit each other, or a variant that is not supported.
    """

    sample_size: int = 128
    """Height and width of the latents whose patches the position embeddings number 0, 1, 2, ...."""
    patch_size: int = 2
    """Height and width of the patch that becomes one token."""
    in_channels: int = 16
    """Channels of the latents."""
    out_channels: int | None = None
    """Channels of the velocity: as many as the latents have, also when given as None."""
    num_layers: int = 18
    """Transformer blocks."""
    attention_head_dim: int = 64
    """Elements of an attention head."""
    num_attention_heads: int = 18
    """Attention heads; their elements together are a token's width."""
    joint_attention_dim: int = 4096
    """Elements of a text embedding."""
    caption_projection_dim: int = 1152
    """What text embeddings are projected to: the token's width."""
    pooled_projection_dim: int = 2048
    """Elements of the pooled text embedding."""
    pos_embed_max_size: int = 96
    """Rows and columns of the table of position embeddings, in patches; an image takes the middle of it."""
    dual_attention_layers: tuple[int, ...] = ()
    """Blocks with a second attention, over image tokens alone: the first ones, 0 to k - 1 (0 to 12 in SD3.5 Medium)."""
    qk_norm: Literal["rms_norm"] | None = None
    """How queries and keys are normalised, head by head."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of the matrix products and of the tokens; norms, softmax, phases and output stay float32."""
    remat: Remat = "none"
    """What the backward pass recomputes in each block; see `layers.apply_stack`."""
    scan_layers: bool = True
    """Compile one block of a kind and loop over it instead of repeating it in the program."""

    def __post_init__(self):
        """Checks the sizes against each other (lists, as JSON gives them, become tuples)."""
        object.__setattr__(self, "dual_attention_layers", tuple(self.dual_attention_layers))
        if self.out_channels is None:
            object.__setattr__(self, "out_channels", self.in_channels)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.type in (int, int | None) and (type(value) is not int or value < 1):
                raise ValueError(f"{field.name}={value}: give a positive whole number")
        self._check_shapes()
        if self.qk_norm not in (None, "rms_norm"):
            raise ValueError(f"qk_norm={self.qk_norm!r}: only 'rms_norm' and None are supported")
        if self.dtype not in ("float32", "bfloat16"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'float32' or 'bfloat16'")
        check_remat(self.remat)

    def _check_shapes(self) -> None:
        """What the sizes must be to one another."""
        if self.width % 4:
            raise ValueError(
                f"attention_head_dim={self.attention_head_dim}: times num_attention_heads={self.num_attention_heads} "
                "must be a multiple of 4 for 2-D sin-cos positions"
            )
        if self.caption_projection_dim != self.width:
            raise ValueError(
                f"caption_projection_dim={self.caption_projection_dim}: must be the token's width, "
                f"num_attention_heads x attention_head_dim = {self.width}"
            )
        if self.out_channels != self.in_channels:
            raise ValueError(f"out_channels={self.out_channels}: a velocity has in_channels={self.in_channels}")
        if self.sample_size < self.patch_size:
            raise ValueError(f"sample_size={self.sample_size}: must be at least patch_size={self.patch_size}")
        dual = self.dual_attention_layers
        if len(dual) > self.num_layers or dual != tuple(range(len(dual))):
            raise ValueError(
                f"dual_attention_layers={list(dual)}: only the first blocks, 0 to k - 1 of {self.num_layers}, "
                "are supported"
            )

    @property
    def width(self) -> int:
        """Elements of a token."""
        return self.num_attention_heads * self.attention_head_dim

    @property
    def stacks(self) -> dict[str, range]:
        """The layers in each stack of equal blocks, by the attribute of `SD3` that holds it; none is empty.

        The last block stands apart: no block follows that would read the text, so it computes none.
        """
        last = self.num_layers - 1
        dual = min(len(self.dual_attention_layers), last)
        stacks = {"dual_blocks": range(dual), "blocks": range(dual, last), "last_blocks": range(last, last + 1)}
        return {name: layers for name, layers in stacks.items() if layers}

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "SD3Config":
        """The configuration that diffusers wrote as transformer/config.json.

        Args:
          config: the file's contents. Keys that are left out have diffusers' defaults; those that begin with an
            underscore say who wrote the file and are not used, but `_class_name` must be the right one.
        Raises:
          ValueError: another class, keys that this model has not, or values that it does not support.
        """
        name = config.get("_class_name", DIFFUSERS_CLASS)
        if name != DIFFUSERS_CLASS:
            raise ValueError(f"_class_name={name}: not the transformer of Stable Diffusion 3, {DIFFUSERS_CLASS}")
        fields = {key: value for key, value in config.items() if not key.startswith("_")}
        unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)} | fields.keys() & set(OURS)
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: not in {DIFFUSERS_CLASS}'s configuration; not supported")
        return cls(**fields)

    def to_diffusers(self) -> dict[str, Any]:
        """The inverse of `from_diffusers`, ready for JSON; how to compute is left out."""
        fields = {name: value for name, value in dataclasses.asdict(self).items() if name not in OURS}
        return {"_class_name": DIFFUSERS_CLASS, **fields, "dual_attention_layers": list(self.dual_attention_layers)}
