"""The text encoders of Stable Diffusion 3 and 3.5, in PyTorch: prompts to embeddings. Training reads a cache of them.

Same result as `StableDiffusion3Pipeline.encode_prompt` of diffusers 0.42.1 (Esser et al. 2024, arXiv 2403.03206): the
last hidden states but one of the two CLIP encoders side by side, filled up with zeros to T5's width, then T5's tokens;
pooled are the two projected CLIP embeddings side by side.
"""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError
from transformers import CLIPTextModelWithProjection, CLIPTokenizer, T5EncoderModel, T5TokenizerFast

from jagg_jax.prompts.cache_writer import EncodedPrompts
from jagg_jax.prompts.sd3_folder import encoder_folders, read_json


class TextEncoders:
    """The two CLIP encoders and, where the pipeline has it, T5, on one device, in float32 (T5-XXL alone takes 19 GB).

    Attributes:
        clip_length: Tokens that CLIP takes.
        t5_length: Tokens that T5 takes; so many zeros where there is no T5.
        joint_attention_dim: D, elements of a token.
        pooled_projection_dim: Q, elements of a pooled embedding.
    """

    def __init__(self, model: str | os.PathLike, t5_length: int, device: str):
        """Load the encoders of a pipeline's folder, without a network.

        Args:
            model: The folder, as diffusers writes it.
            t5_length: Tokens to fill up or cut T5's part of a prompt to.
            device: "cpu" or "cuda".

        Raises:
            ValueError: Not such a folder, a part that is missing or damaged, or parts that don't fit together.
        """
        folders = encoder_folders(model)
        self._device, self.t5_length = device, t5_length
        self._tokenizers = [_load(CLIPTokenizer, folders[part]) for part in ("tokenizer", "tokenizer_2")]
        self._clips = [self._encoder(CLIPTextModelWithProjection, folders[f"text_encoder{n}"]) for n in ("", "_2")]
        self._t5 = None
        if "text_encoder_3" in folders:
            self._t5 = self._encoder(T5EncoderModel, folders["text_encoder_3"])
            self._t5_tokenizer = _load(T5TokenizerFast, folders["tokenizer_3"])
        self.clip_length = self._tokenizers[0].model_max_length
        self.joint_attention_dim = (
            self._t5.config.d_model if self._t5 is not None else _joint_attention_dim(Path(model))
        )
        self.pooled_projection_dim = sum(clip.config.projection_dim for clip in self._clips)
        longest = min(clip.config.max_position_embeddings for clip in self._clips)
        if self.clip_length > longest:
            raise ValueError(
                f"{model}: its tokenizer makes {self.clip_length} tokens, its CLIP encoders take {longest}"
            )
        width = sum(clip.config.hidden_size for clip in self._clips)
        if width > self.joint_attention_dim:
            raise ValueError(f"{model}: CLIP's tokens are {width} wide, above the {self.joint_attention_dim} of T5's")

    @property
    def length(self) -> int:
        """L, tokens of a prompt."""
        return self.clip_length + self.t5_length

    @torch.inference_mode()
    def encode(self, prompts: Sequence[str]) -> EncodedPrompts:
        """Embed B prompts; longer ones are cut to what a tokenizer takes."""
        tokens = np.zeros((len(prompts), self.length, self.joint_attention_dim), np.float32)
        mask = np.zeros((len(prompts), self.length), np.bool_)
        pooled, column = [], 0
        for tokenizer, clip in zip(self._tokenizers, self._clips, strict=True):
            ids, real = self._tokenize(tokenizer, prompts, self.clip_length)
            output = clip(ids, output_hidden_states=True)
            hidden = output.hidden_states[-2].cpu().numpy()
            tokens[:, : self.clip_length, column : column + hidden.shape[-1]] = hidden
            mask[:, : self.clip_length] |= real
            pooled.append(output.text_embeds.cpu().numpy())
            column += hidden.shape[-1]
        if self._t5 is not None:
            ids, real = self._tokenize(self._t5_tokenizer, prompts, self.t5_length)
            # no mask: the pipeline lets T5 attend to padding, and so have the transformers been trained
            tokens[:, self.clip_length :] = self._t5(ids).last_hidden_state.cpu().numpy()
            mask[:, self.clip_length :] = real
        return EncodedPrompts(tokens, np.concatenate(pooled, axis=-1), mask)

    def count_truncated(self, prompts: Iterable[str]) -> dict[str, int]:
        """How many prompts `encode` cuts: {"clip": number, "t5": number}."""
        counts = {"clip": 0, "t5": 0}
        for prompt in prompts:
            counts["clip"] += any(_count(tokenizer, prompt) > self.clip_length for tokenizer in self._tokenizers)
            counts["t5"] += self._t5 is not None and _count(self._t5_tokenizer, prompt) > self.t5_length
        return counts

    def _encoder(self, kind: type, folder: Path) -> Any:
        encoder, report = _load(kind, folder, use_safetensors=True, dtype=torch.float32, output_loading_info=True)
        # transformers would go on with random weights in their place
        if missing := sorted(report["missing_keys"]):
            raise ValueError(
                f"{folder}: has no weights for {missing[0]} and {len(missing) - 1} others; download it again"
            )
        return encoder.to(self._device).eval()

    def _tokenize(self, tokenizer: Any, prompts: Sequence[str], length: int) -> tuple[torch.Tensor, np.ndarray]:
        """Tokens int64 [B, length], cut or filled up, and which of them are no padding."""
        output = tokenizer(list(prompts), padding="max_length", max_length=length, truncation=True, return_tensors="pt")
        return output.input_ids.to(self._device), output.attention_mask.bool().numpy()


def pick_device(name: str) -> str:
    """PyTorch's name of a device: "auto" is "cuda" where there is one, else "cpu".

    Raises:
        ValueError: "cuda" where there is none.
    """
    found = torch.cuda.is_available()
    if name == "cuda" and not found:
        raise ValueError("cuda: PyTorch finds no such device; use cpu or auto")
    return ("cuda" if found else "cpu") if name == "auto" else name


def _load(kind: type, folder: Path, **options: Any) -> Any:
    """A tokenizer or an encoder from its folder; neither network nor pickle."""
    try:
        return kind.from_pretrained(folder, local_files_only=True, **options)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ValueError(f"{folder}: can't be loaded ({str(error).splitlines()[0]}); download it again") from error


def _joint_attention_dim(model: Path) -> int:
    """Where no T5 gives the width of a token, the transformer's configuration does."""
    config = read_json(model / "transformer" / "config.json", "it says how wide a pipeline without T5 makes its tokens")
    width = config.get("joint_attention_dim")
    if type(width) is not int or width < 1:
        raise ValueError(f"{model}: transformer/config.json has joint_attention_dim {width}; download it again")
    return width


def _count(tokenizer: Any, prompt: str) -> int:
    return len(tokenizer(prompt, verbose=False).input_ids)
