"""The command that makes a prompt cache; PyTorch and transformers are imported when it runs, never by training."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from jagg_jax.training.checks import require
from jagg_jax.training.errors import ConfigError, TrainingError
from jagg_jax.training.progress import Progress

if TYPE_CHECKING:
    from jagg_jax.prompts.cache_writer import EncodedPrompts
    from jagg_jax.prompts.encode import TextEncoders

LONGEST = 512  # tokens; the pipeline takes no more


@dataclasses.dataclass(frozen=True)
class EncodeConfig:
    """Embed the prompts of a file with the text encoders of Stable Diffusion 3 or 3.5, for training to read."""

    prompts: str = ""
    """Prompt file: .txt, a prompt a line, or .jsonl, an object with "prompt" a line."""
    model: str = ""
    """Folder of a pipeline as diffusers lays it out; its tokenizers and text encoders are used."""
    output: str = ""
    """Folder to write, the cache."""
    negative_prompt: str = ""
    """What classifier-free guidance leads away from; embedded too."""
    max_length: int = 256
    """Tokens of T5; longer prompts are cut. CLIP's 77 come on top."""
    batch_size: int = 8
    """Prompts embedded at once."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the encoders run, in float32; auto is cuda where PyTorch finds it."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the embeddings on disk."""
    overwrite: bool = False
    """Replace the cache in --output."""


def validate(config: EncodeConfig) -> None:
    """Check every field but --prompts and --model, whose files are checked as they are read; writes nothing.

    Raises:
        ConfigError: At the first field that can't be used; one line with the option, its value and the fix.
    """
    from jagg_jax.prompts.cache_writer import check_output

    for field, what in (
        ("prompts", "a prompt file"),
        ("model", "a pipeline's folder"),
        ("output", "a folder to write"),
    ):
        require(bool(getattr(config, field)), config, field, f"name {what}")
    require(1 <= config.max_length <= LONGEST, config, "max_length", f"must lie in 1 to {LONGEST}")
    require(config.batch_size >= 1, config, "batch_size", "must be at least 1")
    try:
        check_output(config.output, config.overwrite)
    except ValueError as error:
        raise ConfigError(f"--output {error}") from error


def encode_prompts(config: EncodeConfig) -> Path:
    """The `encode_prompts` command: writes the cache, with a progress bar on stderr, and returns its folder.

    Raises:
        ConfigError: A setting or a file that can't be used; nothing is left behind.
        TrainingError: The encoders' output is not finite; nothing is left behind.
    """
    from jagg_jax.prompts.cache import CacheInfo
    from jagg_jax.prompts.cache_writer import write_cache
    from jagg_jax.prompts.prompt_file import read_prompts
    from jagg_jax.prompts.sd3_folder import encoders_digest, file_sha256

    validate(config)
    try:
        prompts = read_prompts(config.prompts)
    except ValueError as error:
        raise ConfigError(f"--prompts {error}") from error
    encoders = _load_encoders(config)
    texts = [*(prompt.text for prompt in prompts), config.negative_prompt]
    info = CacheInfo(
        num_prompts=len(prompts),
        length=encoders.length,
        joint_attention_dim=encoders.joint_attention_dim,
        pooled_projection_dim=encoders.pooled_projection_dim,
        dtype=config.dtype,
        negative_prompt=config.negative_prompt,
        truncated=encoders.count_truncated(texts),
        prompt_file_sha256=file_sha256(config.prompts),
        encoders_digest=encoders_digest(config.model),
    )
    batches = _encode(encoders, texts, config.batch_size)
    try:
        write_cache(config.output, prompts, info, batches, overwrite=config.overwrite)
    except ValueError as error:
        raise ConfigError(f"--output {error}") from error
    except OSError as error:
        raise ConfigError(f"--output {config.output}: can't be written ({error})") from error
    size = sum(path.stat().st_size for path in Path(config.output).iterdir())
    shape = f"{info.length} tokens of {info.joint_attention_dim} elements"
    print(f"{config.output}: {len(prompts)} prompts, {shape} in {info.dtype}, {size / 1e6:,.1f} MB")
    for encoder, length in (("clip", encoders.clip_length), ("t5", encoders.t5_length)):
        if count := info.truncated[encoder]:
            print(f"prompts cut to the {length} tokens that the {encoder} part takes: {count}")
    return Path(config.output)


def _load_encoders(config: EncodeConfig) -> "TextEncoders":
    try:
        from jagg_jax.prompts.encode import TextEncoders, pick_device
    except ImportError as error:
        raise ConfigError(f"encode_prompts: {error}; install what it needs, pip install '.[encode]'") from error
    try:
        device = pick_device(config.device)
    except ValueError as error:
        raise ConfigError(f"--device {error}") from error
    try:
        return TextEncoders(config.model, config.max_length, device)
    except ValueError as error:
        raise ConfigError(f"--model {error}") from error


def _encode(encoders: "TextEncoders", texts: Sequence[str], batch_size: int) -> "Iterator[EncodedPrompts]":
    """The embeddings of all texts, batch by batch."""
    with Progress(len(texts), unit="prompt", lines=20) as progress:
        for start in range(0, len(texts), batch_size):
            batch, end = encoders.encode(texts[start : start + batch_size]), min(start + batch_size, len(texts))
            if not (np.isfinite(batch.tokens).all() and np.isfinite(batch.pooled).all()):
                raise TrainingError(f"prompts {start + 1} to {end}: embeddings are not finite; check --model's weights")
            yield batch
            progress.update(end)
