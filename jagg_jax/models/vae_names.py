"""Which tensor of diffusers' `AutoencoderKL` (0.42.1) each parameter of `AutoencoderKL` is, both ways."""

from jagg_jax.models.tensor_names import AS_IT_IS, CONVOLUTION, TRANSPOSE, SourceTensors
from jagg_jax.models.vae_config import VAEConfig


def source_tensors(config: VAEConfig, path: str) -> SourceTensors:
    """Where one parameter comes from.

    Args:
      config: of the model; the names don't depend on it.
      path: dotted, of one of the model's parameters: "decoder.up_blocks.0.resnets.1.conv1.kernel".
    Raises:
      ValueError: a leaf that no layer has.
    """
    module, _, leaf = path.rpartition(".")
    attention = ".attentions." in module
    if leaf == "kernel":
        move = TRANSPOSE if attention else CONVOLUTION
    elif leaf in ("scale", "bias"):
        move = AS_IT_IS
    else:
        raise ValueError(f"{path}: no parameter of the autoencoder")
    if attention and module.endswith(".to_out"):
        module += ".0"
    return SourceTensors((f"{module}.{'bias' if leaf == 'bias' else 'weight'}",), move, False)
