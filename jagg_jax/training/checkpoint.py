"""Checkpoints of a run: Orbax saves them atomically in the background, a seal tells the damaged and the foreign ones.

A save that is cut off leaves a folder with a temporary name, which is never listed and is removed by the next writer.
The seal, a file in each checkpoint, holds the SHA-256 of its arrays' files: Orbax itself misses a flipped bit.
The arrays are stored under the paths of the state's tree, so that a state of another model is told apart by name.
Randomness needs no place here: every key follows from the run's seed and the update's index.
"""

import dataclasses
import hashlib
import json
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
from orbax.checkpoint import v1 as ocp

from jagg_jax.training.errors import CheckpointError
from jagg_jax.training.run_dir import write_text

__all__ = ["CHECKPOINTS_DIR", "SEAL_FILE", "CheckpointError", "Checkpoints"]

CHECKPOINTS_DIR = "checkpoints"
SEAL_FILE = "seal.json"
_STATE = "state"


class Checkpoints:
    """The checkpoints in `run_dir`/checkpoints, one folder an update."""

    def __init__(self, run_dir: str | Path, keep: int | None = None):
        """Open them for reading or writing.

        Args:
            run_dir: Folder of the run.
            keep: How many of the latest checkpoints stay; None opens for reading, which changes nothing on disk.
        """
        self._directory = Path(run_dir).resolve() / CHECKPOINTS_DIR
        self._saving: tuple[int, dict[str, Any]] | None = None
        self._writer = None if keep is None else self._open_writer(keep)

    def save(self, update: int, state: Any, metadata: dict[str, Any]) -> None:
        """Start saving and return; an older checkpoint goes only after this one is complete.

        Args:
            update: The number of updates that `state` has behind it.
            state: Pytree of arrays. They are copied before this returns and may be donated afterwards.
            metadata: JSON values kept with the checkpoint.

        Raises:
            ValueError: If there's a folder of that update already, or the checkpoints are open for reading.
            OSError: If the save before this one failed.
        """
        if self._writer is None:
            raise ValueError(f"{self._directory}: is open for reading; pass keep to write")
        self._writer.wait()
        folder = self._directory / str(update)
        if folder.exists():
            raise ValueError(f"{folder}: exists already; delete it to save update {update} again")
        self._saving = update, metadata
        self._writer.save_async(update, _by_path(state), force=True)

    def steps(self) -> list[int]:
        """The updates of the complete checkpoints, in order; waits for a save in progress."""
        if self._writer is not None:
            self._writer.wait()
        if not self._directory.is_dir():
            return []
        numbered = [folder for folder in self._directory.iterdir() if folder.name.isdecimal()]
        return sorted(int(folder.name) for folder in numbered if (folder / SEAL_FILE).is_file())

    def latest(self) -> int | None:
        """The update of the latest complete checkpoint, or None."""
        return max(self.steps(), default=None)

    def metadata(self, update: int | None = None) -> dict[str, Any]:
        """What `save` was given as metadata, for one update or the latest.

        Raises:
            CheckpointError: If there's no such checkpoint or it's damaged.
        """
        folder = self._folder(update)
        try:
            return _read_seal(folder)["metadata"]
        except _DamagedError as error:
            raise CheckpointError(f"{folder}: {error}") from error

    def restore(self, update: int | None, like: Any) -> Any:
        """Read the state of an update, or the latest.

        Args:
            update: Which one; None is the latest.
            like: Pytree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes, dtypes and, where given,
                shardings of the state; leaves without a sharding go to the first device.

        Returns:
            A pytree like `like`, with the saved arrays, bit for bit.

        Raises:
            CheckpointError: If there's no such checkpoint, it's of another model, or it's damaged: the message names
                the folder, what is wrong and, for a damaged one, the latest older checkpoint that is intact.
        """
        folder = self._folder(update)
        try:
            return self._load(folder, like)
        except _DamagedError as error:
            raise CheckpointError(f"{folder}: {error}; {self._way_out(int(folder.name), like)}") from error

    def close(self) -> None:
        """Wait for a save in progress and release the writer."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __enter__(self) -> "Checkpoints":
        """The checkpoints themselves."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close them, also after an exception."""
        self.close()

    def _open_writer(self, keep: int) -> ocp.training.Checkpointer:
        context = ocp.Context()
        # Orbax copies the context deeply: a bound method would seal with a copy of this object.
        context.asynchronous.post_finalization_callback = lambda: self._seal()
        return ocp.training.Checkpointer(
            self._directory,
            context=context,
            preservation_policy=_LatestSealed(self._directory, keep),
            cleanup_tmp_directories=True,
        )

    def _seal(self) -> None:
        """Write the seal. Orbax calls this when all arrays are on disk and the folder still has its temporary name."""
        update, metadata = self._saving
        folder = next(path for path in self._directory.iterdir() if path.name.partition(".")[0] == str(update))
        seal = {"metadata": metadata, "sha256": _hashes(folder / _STATE)}
        write_text(folder / SEAL_FILE, json.dumps(seal, indent=1) + "\n")

    def _folder(self, update: int | None) -> Path:
        steps = self.steps()
        if not steps:
            raise CheckpointError(f"{self._directory}: holds no checkpoint")
        if update is None:
            update = steps[-1]
        if update not in steps:
            listed = ", ".join(map(str, steps))
            raise CheckpointError(f"{self._directory / str(update)}: is no checkpoint; there are those of {listed}")
        return self._directory / str(update)

    def _load(self, folder: Path, like: Any) -> Any:
        _check_hashes(folder)
        wanted = jax.tree.map(_abstract, _by_path(like))
        try:
            stored = ocp.metadata(folder, checkpointable_name=_STATE).metadata
        except Exception as error:  # Orbax raises a different type for every missing or unreadable file.
            raise _DamagedError("its description is missing or unreadable") from error
        if problem := _mismatch(stored, wanted):
            raise CheckpointError(f"{folder}: is of another model: {problem}")
        try:
            loaded = ocp.load(folder, wanted, checkpointable_name=_STATE)
        except Exception as error:  # The same, and tensorstore adds its own.
            raise _DamagedError("its arrays are missing or unreadable") from error
        return jax.tree.unflatten(jax.tree.structure(like), [loaded[name] for name in _by_path(like)])

    def _way_out(self, damaged: int, like: Any) -> str:
        """Where the user can go on from, found by loading the older checkpoints."""
        for update in reversed([step for step in self.steps() if step < damaged]):
            try:
                self._load(self._directory / str(update), like)
            except (_DamagedError, CheckpointError):
                logging.getLogger(__name__).debug("the checkpoint of update %d doesn't load either", update)
            else:
                return f"the checkpoint of update {update} is intact: delete this folder to go on from there"
        return "no older checkpoint is intact: start a new run"


@dataclasses.dataclass(frozen=True)
class _LatestSealed:
    """Orbax's retention rule: it takes every folder named by a number for a checkpoint, this one asks for the seal.

    Without a seal and older than the newest checkpoint, it's what a cut-off deletion left, and goes; newer ones stay.
    """

    directory: Path
    keep: int

    def should_preserve(self, checkpoints: Sequence[Any], *, context: Any) -> list[bool]:
        """Orbax asks this while it saves; the one being saved has a temporary name still."""
        folders = {info.step: self.directory / str(info.step) for info in checkpoints}
        genuine = [step for step, path in folders.items() if not path.exists() or (path / SEAL_FILE).is_file()]
        kept = sorted(genuine)[-self.keep :]
        return [info.step in kept or info.step > kept[-1] for info in checkpoints]


class _DamagedError(Exception):
    """What is wrong with the files of a checkpoint."""


def _by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a pytree by their path, such as `['params']['blocks'][0]['kernel']`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    sharding = getattr(leaf, "sharding", None) or jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _mismatch(stored: dict[str, Any], wanted: dict[str, Any]) -> str:
    """How the stored arrays differ from the wanted ones, in one line; empty if they don't."""
    problems = [f"{name} is missing" for name in wanted if name not in stored]
    problems += [f"{name} is unexpected" for name in stored if name not in wanted]
    for name in wanted.keys() & stored.keys():
        old, new = stored[name], wanted[name]
        if (tuple(old.shape), old.dtype) != (tuple(new.shape), new.dtype):
            problems.append(f"{name} is {old.dtype}{list(old.shape)}, not {new.dtype}{list(new.shape)}")
    more = f" and {len(problems) - 3} more" if len(problems) > 3 else ""
    return ", ".join(sorted(problems)[:3]) + more


def _read_seal(folder: Path) -> dict[str, dict[str, Any]]:
    try:
        seal = json.loads((folder / SEAL_FILE).read_text(encoding="utf-8"))
        return {"metadata": dict(seal["metadata"]), "sha256": dict(seal["sha256"])}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise _DamagedError(f"the file {SEAL_FILE} is unreadable") from error


def _check_hashes(folder: Path) -> None:
    """Compare the files of the arrays with the seal, before Orbax meets them."""
    found = _hashes(folder / _STATE)
    for name, digest in _read_seal(folder)["sha256"].items():
        if name not in found:
            raise _DamagedError(f"the file {_STATE}/{name} is missing")
        if found[name] != digest:
            raise _DamagedError(f"the file {_STATE}/{name} is truncated or altered")


def _hashes(folder: Path) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its path."""
    digests = {}
    for path in sorted(path for path in folder.rglob("*") if path.is_file()):
        with path.open("rb") as file:
            digests[path.relative_to(folder).as_posix()] = hashlib.file_digest(file, "sha256").hexdigest()
    return digests
