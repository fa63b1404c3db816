"""What defines an `AutoencoderKL` but its weights, read from diffusers' configuration file."""

import dataclasses
from collections.abc import Mapping
from typing import Any

DIFFUSERS_CLASS = "AutoencoderKL"
# Fields of diffusers' configuration that only one value is supported of
FIXED = {
    "act_fn": "silu",
    "mid_block_add_attention": True,
    "in_channels": 3,
    "out_channels": 3,
}
# Fields that change nothing here: blocks are named after their only kind, which is checked, and everything is float32
BLOCK_TYPES = {"down_block_types": "DownEncoderBlock2D", "up_block_types": "UpDecoderBlock2D"}
UNUSED = ("force_upcast", "latents_mean", "latents_std")


@dataclasses.dataclass(frozen=True, kw_only=True)
class VAEConfig:
    """Everything that defines an `AutoencoderKL` but its weights; names and defaults are those of diffusers 0.42.1.

    Raises:
      ValueError: a size that is not positive, or sizes that do not fit each other.
    """

    block_out_channels: tuple[int, ...] = (64,)
    """Channels of each level; each but the last halves height and width."""
    layers_per_block: int = 1
    """Residual blocks of an encoder level; a decoder level has one more."""
    latent_channels: int = 4
    """Channels of the latents."""
    norm_num_groups: int = 32
    """Groups of every group normalisation; must divide all channels."""
    sample_size: int = 32
    """Height and width of the images that it was trained on, in pixels."""
    scaling_factor: float = 0.18215
    """What the encoder's output is multiplied by, so that latents have about unit variance."""
    shift_factor: float | None = None
    """What is subtracted from it before; None is 0."""
    use_quant_conv: bool = True
    """A 1 x 1 convolution after the encoder."""
    use_post_quant_conv: bool = True
    """A 1 x 1 convolution before the decoder."""

    def __post_init__(self):
        """Checks the sizes (lists, as JSON gives them, become tuples)."""
        object.__setattr__(self, "block_out_channels", tuple(self.block_out_channels))
        counts = ("layers_per_block", "latent_channels", "norm_num_groups", "sample_size")
        sizes = [(name, getattr(self, name)) for name in counts]
        sizes += [("block_out_channels", size) for size in self.block_out_channels]
        for name, size in sizes:
            if type(size) is not int or size < 1:
                raise ValueError(f"{name}={getattr(self, name)}: give positive whole numbers")
        if not self.block_out_channels:
            raise ValueError("block_out_channels=[]: give at least one level")
        for channels in self.block_out_channels:
            if channels % self.norm_num_groups:
                raise ValueError(f"norm_num_groups={self.norm_num_groups}: must divide {channels}, a level's channels")
        if not self.scaling_factor > 0:
            raise ValueError(f"scaling_factor={self.scaling_factor}: must be above 0")

    @property
    def downsampling(self) -> int:
        """Pixels a latent is high and wide."""
        return 2 ** (len(self.block_out_channels) - 1)

    @classmethod
    def from_diffusers(cls, config: Mapping[str, Any]) -> "VAEConfig":
        """The configuration that diffusers wrote as vae/config.json; keys with an underscore say who wrote it.

        Raises:
          ValueError: another class, keys that this model has not, or values that it does not support.
        """
        name = config.get("_class_name", DIFFUSERS_CLASS)
        if name != DIFFUSERS_CLASS:
            raise ValueError(f"_class_name={name}: not {DIFFUSERS_CLASS}")
        fields = {key: value for key, value in config.items() if not key.startswith("_") and key not in UNUSED}
        for key, value in FIXED.items():
            if fields.pop(key, value) != value:
                raise ValueError(f"{key}={config[key]}: only {value} is supported")
        for key, kind in BLOCK_TYPES.items():
            if set(fields.pop(key, [kind])) != {kind}:
                raise ValueError(f"{key}={config[key]}: only {kind} is supported")
        unknown = fields.keys() - {field.name for field in dataclasses.fields(cls)}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: not in {DIFFUSERS_CLASS}'s configuration; not supported")
        return cls(**fields)
