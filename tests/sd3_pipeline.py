"""A tiny Stable Diffusion 3 pipeline with random weights, written by diffusers in the layout of the real ones."""

from pathlib import Path

import torch
from diffusers import (
    AutoencoderKL,
    FlowMatchEulerDiscreteScheduler,
    SD3Transformer2DModel,
    StableDiffusion3Pipeline,
)
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

CLIP_LENGTH = 16  # tokens of a CLIP prompt; 77 in the real models
CLIP_PROJECTIONS = (8, 16)  # elements of the two pooled embeddings, and of the tokens
T5_WIDTH = 32
LATENT_CHANNELS = 4
VAE_FACTOR = 4  # pixels a latent, along each side
SAMPLE_SIZE = 8  # latents along a side of the default image


def write_tiny_pipeline(folder: Path, *, with_t5: bool = True) -> Path:
    """Writes a `StableDiffusion3Pipeline` whose every part is random and small.

    Args:
      folder: made where it's missing.
      with_t5: without, text_encoder_3 and tokenizer_3 are absent, as users leave them out to save memory.
    Returns: the folder.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)
        pipeline = StableDiffusion3Pipeline(
            transformer=_transformer(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
            vae=_vae(),
            text_encoder=_clip(CLIP_PROJECTIONS[0]),
            tokenizer=_clip_tokenizer("<|endoftext|>"),
            text_encoder_2=_clip(CLIP_PROJECTIONS[1]),
            tokenizer_2=_clip_tokenizer("!"),
            text_encoder_3=_t5() if with_t5 else None,
            tokenizer_3=_t5_tokenizer() if with_t5 else None,
        )
    pipeline.save_pretrained(folder)
    return Path(folder)


def _transformer() -> SD3Transformer2DModel:
    """Two blocks, the first with the second attention of SD3.5 Medium."""
    return SD3Transformer2DModel(
        sample_size=SAMPLE_SIZE, patch_size=2, in_channels=LATENT_CHANNELS, out_channels=LATENT_CHANNELS, num_layers=2,
        attention_head_dim=8, num_attention_heads=4, joint_attention_dim=T5_WIDTH, caption_projection_dim=32,
        pooled_projection_dim=sum(CLIP_PROJECTIONS), pos_embed_max_size=12, dual_attention_layers=(0,),
        qk_norm="rms_norm",
    )  # fmt: skip


def _vae() -> AutoencoderKL:
    """Three levels, two of which halve the image; scaled and shifted latents, no quantisation layers, as in SD3."""
    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3, up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(8, 8, 16), layers_per_block=1, latent_channels=LATENT_CHANNELS, norm_num_groups=4,
        sample_size=SAMPLE_SIZE * VAE_FACTOR, scaling_factor=1.5305, shift_factor=0.0609, use_quant_conv=False,
        use_post_quant_conv=False,
    )  # fmt: skip


def _clip(projection: int) -> CLIPTextModelWithProjection:
    vocabulary = _clip_vocabulary()
    config = CLIPTextConfig(
        vocab_size=len(vocabulary), hidden_size=projection, intermediate_size=16, projection_dim=projection,
        num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=CLIP_LENGTH, hidden_act="quick_gelu",
        bos_token_id=vocabulary["<|startoftext|>"], eos_token_id=vocabulary["<|endoftext|>"],
    )  # fmt: skip
    return _randomised(CLIPTextModelWithProjection(config))


def _clip_tokenizer(pad_token: str) -> CLIPTokenizer:
    """Byte-pair encoding of letters with one merge; the real second tokenizer pads with an exclamation mark."""
    return CLIPTokenizer(
        vocab=_clip_vocabulary(),
        merges=[("c", "a"), ("ca", "t</w>")],
        pad_token=pad_token,
        model_max_length=CLIP_LENGTH,
    )


def _clip_vocabulary() -> dict[str, int]:
    """`!` has token 0, as in the real vocabulary; the special tokens are the last two."""
    symbols = ["!", *"abcdefghijklmnopqrstuvwxyz"]
    tokens = [*symbols, *(f"{symbol}</w>" for symbol in symbols), "ca", "cat</w>", "<|startoftext|>", "<|endoftext|>"]
    return {token: index for index, token in enumerate(tokens)}


def _t5() -> T5EncoderModel:
    config = T5Config(
        vocab_size=len(_t5_pieces()), d_model=T5_WIDTH, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        feed_forward_proj="gated-gelu", pad_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return _randomised(T5EncoderModel(config))


def _t5_tokenizer() -> T5TokenizerFast:
    return T5TokenizerFast(vocab=_t5_pieces(), extra_ids=0, model_max_length=512)


def _t5_pieces() -> list[tuple[str, float]]:
    """Pieces and their log-probabilities; the first three are T5's special tokens."""
    letters = [(letter, -4.0) for letter in "abcdefghijklmnopqrstuvwxyz"]
    return [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁cat", -3.0), ("▁a", -3.0), *letters]


def _randomised(model: torch.nn.Module) -> torch.nn.Module:
    """The model with all parameters random and of a size that matters: initial ones hide what a prompt changes."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = parameter.shape[-1] ** -0.5 if parameter.ndim > 1 else 0.3
            parameter.copy_(scale * torch.randn(parameter.shape))
            if "norm" in name and name.endswith("weight"):
                parameter.add_(1.0)
    return model
