"""Text embeddings of many prompts on disk: made once by `encode_prompts`, read row by row while training.

A cache is a folder. P prompts of L tokens each make these files:

* tokens.npy [P + 1, L, D] and pooled.npy [P + 1, Q], little-endian float32, or uint16 with the bits of bfloat16; the
  last row is the negative prompt's;
* mask.npy bool [P + 1, L], False for padding;
* prompts.jsonl, an object a prompt, in order: "prompt" and its metadata;
* manifest.json, written last: a `CacheInfo`, and size and SHA-256 of every other file.
"""

import dataclasses
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np

from jagg_jax.models import TextEmbeddings
from jagg_jax.prompts.prompt_file import Prompt, read_prompts
from jagg_jax.prompts.sd3_folder import WHOLE_LIMIT, encoders_digest, file_sha256, read_json

FORMAT, VERSION = "jagg_jax prompt cache", 1
MANIFEST, PROMPTS = "manifest.json", "prompts.jsonl"
ARRAYS = ("tokens", "pooled", "mask")
FILES = (PROMPTS, *(f"{name}.npy" for name in ARRAYS))
AGAIN = "make the cache anew with encode_prompts --overwrite"


@dataclasses.dataclass(frozen=True, kw_only=True)
class CacheInfo:
    """What the manifest says of a cache."""

    num_prompts: int
    """P, without the negative prompt."""
    length: int
    """L, tokens of a prompt: CLIP's, then T5's."""
    joint_attention_dim: int
    """D, elements of a token."""
    pooled_projection_dim: int
    """Q, elements of a pooled embedding."""
    dtype: Literal["float32", "bfloat16"]
    """Type of the embeddings."""
    negative_prompt: str
    """The prompt of the last row, from which classifier-free guidance leads away."""
    truncated: dict[str, int]
    """How many prompts, the negative one included, were cut because a tokenizer takes no more: by "clip" and "t5"."""
    prompt_file_sha256: str
    """SHA-256 of the prompt file."""
    encoders_digest: str
    """`encoders_digest` of the pipeline's folder."""

    def array_type(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Dtype, as NumPy's format spells it, and shape of one of ARRAYS on disk."""
        rows = self.num_prompts + 1
        number = "<f4" if self.dtype == "float32" else "<u2"
        if name == "tokens":
            return number, (rows, self.length, self.joint_attention_dim)
        return (number, (rows, self.pooled_projection_dim)) if name == "pooled" else ("|b1", (rows, self.length))


class PromptCache:
    """The text embeddings of a prompt file, mapped from disk: only the rows that are asked for are read.

    Attributes:
        folder: Where it is.
        info: Sizes and origin.
        prompts: The P prompts, in the file's order.
        metadata: What the file says of each besides.
    """

    def __init__(self, folder: Path, info: CacheInfo, prompts: Sequence[Prompt], arrays: dict[str, np.ndarray]):
        """Keep what `open` has checked; `arrays` are those of ARRAYS, with the dtypes on disk."""
        self.folder, self.info = folder, info
        self.prompts = [prompt.text for prompt in prompts]
        self.metadata = [prompt.metadata for prompt in prompts]
        self._arrays = arrays

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike,
        *,
        joint_attention_dim: int | None = None,
        pooled_projection_dim: int | None = None,
        prompt_file: str | os.PathLike | None = None,
        model: str | os.PathLike | None = None,
        verify: bool = False,
    ) -> "PromptCache":
        """Open a cache after checking it: sizes of all files, SHA-256 of those up to 64 MiB.

        Args:
            folder: What `encode_prompts` wrote.
            joint_attention_dim: Elements of a token that the transformer takes, where it's known.
            pooled_projection_dim: Elements of the pooled embedding that it takes.
            prompt_file: The file that the cache must have been made of, to notice that it has changed.
            model: The pipeline folder whose text encoders the cache must have been made with.
            verify: Check the SHA-256 of large files too, which reads all of them.

        Raises:
            ValueError: No cache, one of another version, a truncated or damaged one, embeddings of another size, or
                another prompt file or other encoders than those named.
        """
        folder = Path(folder)
        info, files = read_manifest(folder)
        for name in FILES:
            _check_file(folder / name, files[name], verify)
        prompts = read_prompts(folder / PROMPTS)
        arrays = {name: _map_array(folder, name, info) for name in ARRAYS}
        if len(prompts) != info.num_prompts:
            raise ValueError(f"{folder}: {PROMPTS} has {len(prompts)} prompts instead of {info.num_prompts}; {AGAIN}")
        wanted = {"joint_attention_dim": joint_attention_dim, "pooled_projection_dim": pooled_projection_dim}
        for field, size in wanted.items():
            if size is not None and getattr(info, field) != size:
                fix = "encode the prompts with the text encoders of the model to train"
                raise ValueError(f"{folder}: {field} is {getattr(info, field)}, the model takes {size}; {fix}")
        if prompt_file is not None and not Path(prompt_file).is_file():
            raise ValueError(f"{prompt_file}: there is no such file; name the one that {folder} was made of")
        if prompt_file is not None and file_sha256(prompt_file) != info.prompt_file_sha256:
            raise ValueError(f"{folder}: {prompt_file} is not the prompt file it was made of; {AGAIN}")
        if model is not None and encoders_digest(model) != info.encoders_digest:
            raise ValueError(f"{folder}: was made with other text encoders than those in {model}; {AGAIN}")
        return cls(folder, info, prompts, arrays)

    def __len__(self) -> int:
        """P, the number of prompts."""
        return self.info.num_prompts

    def rows(self, indices: Sequence[int] | np.ndarray) -> TextEmbeddings:
        """The embeddings of some prompts: tokens [B, L, D] and pooled [B, Q], float32 or bfloat16 as stored.

        Args:
            indices: [B], each in 0 to P - 1.

        Raises:
            ValueError: An index outside of that.
        """
        places = self._places(indices)
        return TextEmbeddings(self._numbers("tokens", places), self._numbers("pooled", places))

    def mask(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        """Which tokens of some prompts are no padding, bool [B, L]. Stable Diffusion 3 attends to padding as well.

        Raises:
            ValueError: As `rows`.
        """
        return np.asarray(self._arrays["mask"][self._places(indices)])

    @property
    def negative(self) -> TextEmbeddings:
        """The embeddings of the negative prompt: tokens [1, L, D] and pooled [1, Q]."""
        last = np.array([self.info.num_prompts])
        return TextEmbeddings(self._numbers("tokens", last), self._numbers("pooled", last))

    def _places(self, indices: Sequence[int] | np.ndarray) -> np.ndarray:
        places = np.asarray(indices, np.int64)
        wrong = places[(places < 0) | (places >= len(self))]
        if wrong.size:
            raise ValueError(f"indices has {wrong[0]}: the cache has prompts 0 to {len(self) - 1}")
        return places

    def _numbers(self, name: str, places: np.ndarray) -> np.ndarray:
        rows = np.asarray(self._arrays[name][places])  # indexing has copied these rows out of the file
        return rows.view(ml_dtypes.bfloat16) if self.info.dtype == "bfloat16" else rows


def read_manifest(folder: Path) -> tuple[CacheInfo, dict[str, dict[str, Any]]]:
    """What a cache's manifest says: its `CacheInfo`, and "bytes" and "sha256" of each of FILES.

    Raises:
        ValueError: No cache, one of another version, or a damaged manifest.
    """
    fix = "name a folder that encode_prompts wrote"
    content = read_json(folder / MANIFEST, f"{fix}; this is no prompt cache")
    if content.pop("format", None) != FORMAT:
        raise ValueError(f"{folder}: is no prompt cache; {fix}")
    version = content.pop("version", None)
    if version != VERSION:
        raise ValueError(f"{folder}: is of version {version}, this program reads version {VERSION}; {AGAIN}")
    files = content.pop("files", None)
    types = {field.name: field.type for field in dataclasses.fields(CacheInfo)}
    right = content.keys() == types.keys() and isinstance(files, dict) and files.keys() == set(FILES)
    right = right and all(isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"} for entry in files.values())
    if not right or content["dtype"] not in ("float32", "bfloat16"):
        raise ValueError(f"{folder}: {MANIFEST} is damaged; {AGAIN}")
    for name, kind in types.items():
        value = content[name]
        wrong = type(value) is not kind if kind in (int, str) else False
        if wrong or (kind is int and value < 1):
            raise ValueError(f"{folder}: {MANIFEST} is damaged, {name} is {value!r}; {AGAIN}")
    return CacheInfo(**content), files


def _check_file(path: Path, entry: dict[str, Any], verify: bool) -> None:
    """The file is there, has its size and, where that's asked for or cheap, its content."""
    if not path.is_file():
        raise ValueError(f"{path.parent}: {path.name} is missing; {AGAIN}")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ValueError(f"{path.parent}: {path.name} has {size} bytes instead of {entry['bytes']}; {AGAIN}")
    if (verify or size <= WHOLE_LIMIT) and file_sha256(path) != entry["sha256"]:
        raise ValueError(f"{path.parent}: {path.name} is damaged, its SHA-256 is another one; {AGAIN}")


def _map_array(folder: Path, name: str, info: CacheInfo) -> np.ndarray:
    """An array, read where it's indexed."""
    dtype, shape = info.array_type(name)
    try:
        array = np.load(folder / f"{name}.npy", mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ValueError(f"{folder}: {name}.npy is damaged ({error}); {AGAIN}") from error
    if array.dtype != np.dtype(dtype) or array.shape != shape:
        raise ValueError(f"{folder}: {name}.npy is {array.dtype} {array.shape} instead of {dtype} {shape}; {AGAIN}")
    return array
