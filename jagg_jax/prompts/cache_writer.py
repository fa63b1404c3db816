"""Writing a prompt cache: row by row, and all or nothing."""

import contextlib
import dataclasses
import hashlib
import io
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from jagg_jax.prompts.cache import ARRAYS, FORMAT, MANIFEST, PROMPTS, VERSION, CacheInfo, read_manifest
from jagg_jax.prompts.prompt_file import Prompt
from jagg_jax.prompts.sd3_folder import file_sha256


class EncodedPrompts(NamedTuple):
    """A batch as it comes from the encoders.

    Attributes:
        tokens: float32 [B, L, D].
        pooled: float32 [B, Q].
        mask: bool [B, L], False for padding.
    """

    tokens: np.ndarray
    pooled: np.ndarray
    mask: np.ndarray


def write_cache(
    folder: str | os.PathLike,
    prompts: Sequence[Prompt],
    info: CacheInfo,
    batches: Iterable[EncodedPrompts],
    *,
    overwrite: bool = False,
) -> None:
    """Write a cache, batch by batch; readers see the whole of it or none.

    Args:
        folder: The cache; what it's written as until it's complete is a hidden folder beside it.
        prompts: The P prompts.
        info: Their sizes and origin.
        batches: P + 1 rows in all: the prompts in order, then the negative prompt. At most one batch is held in memory.
        overwrite: Replace a cache that's there.

    Raises:
        ValueError: As `check_output`; batches of other sizes than `info` says; too little space on the disk.
    """
    check_output(folder, overwrite)
    if len(prompts) != info.num_prompts:
        raise ValueError(f"prompts has {len(prompts)} instead of num_prompts={info.num_prompts}")
    folder = Path(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    _check_space(folder.parent, info)
    temporary = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".tmp", dir=folder.parent))
    try:
        files = _write_arrays(temporary, info, batches)
        lines = [json.dumps({"prompt": prompt.text, **prompt.metadata}, allow_nan=False) for prompt in prompts]
        (temporary / PROMPTS).write_text("\n".join(lines) + "\n", encoding="utf-8")
        files[PROMPTS] = {"bytes": (temporary / PROMPTS).stat().st_size, "sha256": file_sha256(temporary / PROMPTS)}
        manifest = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(info), "files": files}
        (temporary / MANIFEST).write_text(json.dumps(manifest, indent=2) + "\n", encoding="utf-8")
        os.chmod(temporary, 0o755)  # mkdtemp makes private folders
        _move(temporary, folder, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def check_output(folder: str | os.PathLike, overwrite: bool) -> None:
    """Refuse a folder that a cache can't be written to.

    Raises:
        ValueError: The folder exists, and is no cache or is not to be overwritten.
    """
    folder = Path(folder)
    if not folder.exists():
        return
    if not overwrite:
        raise ValueError(f"{folder}: exists; add --overwrite or name another folder")
    if not folder.is_dir() or any(folder.iterdir()):
        read_manifest(folder)


def _write_arrays(folder: Path, info: CacheInfo, batches: Iterable[EncodedPrompts]) -> dict[str, dict[str, Any]]:
    """Write the .npy files; returns the manifest's entry of each."""
    with contextlib.ExitStack() as stack:
        files = {name: stack.enter_context(_NpyFile(folder / f"{name}.npy", *info.array_type(name))) for name in ARRAYS}
        for batch in batches:
            for name, rows in batch._asdict().items():
                if name != "mask" and info.dtype == "bfloat16":
                    rows = rows.astype(ml_dtypes.bfloat16).view(np.uint16)
                files[name].write(rows)
        return {f"{name}.npy": file.finish() for name, file in files.items()}


class _NpyFile:
    """A .npy file whose rows are written, and hashed, as they come.

    Not a writable memory map: where the disk is full, that ends the process instead of raising an error.
    """

    def __init__(self, path: Path, dtype: str, shape: tuple[int, ...]):
        self._rows_written = 0
        self._dtype, self._shape = np.dtype(dtype), shape
        self._hash = hashlib.sha256()
        header = io.BytesIO()
        np.lib.format.write_array_header_1_0(header, {"descr": dtype, "fortran_order": False, "shape": shape})
        self._file = path.open("xb")
        self._put(header.getvalue())

    def __enter__(self) -> "_NpyFile":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def write(self, rows: np.ndarray) -> None:
        if rows.shape[1:] != self._shape[1:] or rows.dtype != self._dtype:
            raise ValueError(f"rows are {rows.dtype} {rows.shape[1:]} instead of {self._dtype} {self._shape[1:]}")
        self._rows_written += len(rows)
        self._put(np.ascontiguousarray(rows).data)

    def finish(self) -> dict[str, Any]:
        """Make sure that all rows are there, on the disk; returns the file's size and SHA-256."""
        if self._rows_written != self._shape[0]:
            raise ValueError(f"{self._rows_written} rows were encoded instead of {self._shape[0]}")
        self._file.flush()
        os.fsync(self._file.fileno())
        return {"bytes": self._file.tell(), "sha256": self._hash.hexdigest()}

    def _put(self, data: bytes | memoryview) -> None:
        self._file.write(data)
        self._hash.update(data)


def _check_space(parent: Path, info: CacheInfo) -> None:
    needed = sum(np.dtype(dtype).itemsize * math.prod(shape) for dtype, shape in map(info.array_type, ARRAYS))
    free = shutil.disk_usage(parent).free
    if needed > free:
        raise ValueError(f"{parent}: has {free / 1e9:.1f} GB free, the cache needs {needed / 1e9:.1f} GB")


def _move(temporary: Path, folder: Path, overwrite: bool) -> None:
    """Put the complete cache in its place. One that's there makes way first: a folder can't be replaced in one step."""
    if not (overwrite and folder.exists()):
        os.rename(temporary, folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".old", dir=folder.parent))
    os.rename(folder, old)
    os.rename(temporary, folder)
    shutil.rmtree(old)
