"""Model weights on disk: one safetensors file, flat dotted names, checked before a single number is used."""

import dataclasses
import json
import os
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from jagg_jax.models.dit import DiT, DiTConfig
from jagg_jax.models.functional import Params, VelocityFn, as_function
from jagg_jax.models.layers import Remat
from jagg_jax.models.lora import Adapters, add_adapters, count_adapted, merge_params, split_adapters

# Puts a tensor, given its dotted name, on devices; of a `jax.ShapeDtypeStruct` it makes one with a sharding.
Place = Callable[[str, np.ndarray], jax.Array]
MAX_NAMES = 5  # names listed for each kind of fault in an error


class LoadedModel(NamedTuple):
    """A model rebuilt from one file; `params` include the adapters, if any, and `num_adapted` counts their matrices."""

    config: DiTConfig
    task: str
    velocity_fn: VelocityFn
    params: Params
    num_adapted: int = 0


def flatten(tree: Any) -> dict[str, Any]:
    """A pytree's leaves by dotted path, e.g. "blocks.0.attention.qkv.kernel"."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def save_weights(path: str | os.PathLike, params: Any, metadata: Mapping[str, str]) -> None:
    """Writes a pytree of arrays and string metadata; readers see the old file or the new one, never a part.

    Raises:
      ValueError: a non-finite array, or metadata that is not all strings.
    """
    wrong = [key for key, value in metadata.items() if not isinstance(value, str)]
    if wrong:
        raise ValueError(f"metadata {listed_names(wrong)}: values must be strings")
    tensors = {name: np.asarray(array, order="C") for name, array in flatten(params).items()}
    refuse(path, {"not finite": non_finite(tensors)})
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(save(tensors, dict(metadata)))
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes private files; weights are as readable as any other file the user writes.
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def load_weights(path: str | os.PathLike, like: Any, place: Place | None = None) -> Any:
    """Reads the tensors of `path` into the tree of `like`.

    Args:
      path: a safetensors file written by `save_weights`.
      like: pytree of arrays or `jax.ShapeDtypeStruct`; gives names, shapes and dtypes.
      place: puts a tensor, given its dotted name, on devices; on the default device when left out.
    Returns: the tree of `like` with the file's arrays (`jax.Array`), bit for bit.
    Raises:
      ValueError: no safetensors file, a damaged one, or tensors that are missing, unexpected, misshapen, of the wrong
        dtype or not finite: all of them in one line.
    """
    expected = flatten(like)
    tensors = _read(path)[0]
    shared = [name for name in expected if name in tensors]
    faults = {
        "missing": [name for name in expected if name not in tensors],
        "unexpected": [name for name in tensors if name not in expected],
        "misshapen": [
            f"{name} {tensors[name].shape} instead of {tuple(expected[name].shape)}"
            for name in shared
            if tensors[name].shape != tuple(expected[name].shape)
        ],
        "of the wrong dtype": [
            f"{name} {tensors[name].dtype} instead of {expected[name].dtype}"
            for name in shared
            if tensors[name].dtype != expected[name].dtype
        ],
        "not finite": non_finite(tensors),
    }
    refuse(path, faults)
    place = place or (lambda _, tensor: jnp.asarray(tensor))
    return jax.tree.unflatten(jax.tree.structure(like), [place(name, tensors[name]) for name in expected])


def read_metadata(path: str | os.PathLike) -> dict[str, str]:
    """The metadata of a weights file. Raises ValueError where the file is none."""
    return _read(path, with_tensors=False)[1]


def model_metadata(config: DiTConfig, task: str) -> dict[str, str]:
    """The metadata `load_model` needs: the task's name and the model's configuration as JSON."""
    return {"task": task, "model": json.dumps(dataclasses.asdict(config))}


def load_model(
    path: str | os.PathLike,
    *,
    dtype: str | None = None,
    remat: Remat | None = None,
    scan_layers: bool | None = None,
    adapters: Adapters | None = None,
    adapter_key: jax.Array | None = None,
    frozen_dtype: jnp.dtype = jnp.bfloat16,
    place: Place | None = None,
) -> LoadedModel:
    """Rebuilds a `DiT` from a weights file alone.

    Args:
      path: a file written by `save_weights` with `model_metadata`.
      dtype, remat, scan_layers: replace what the file says of how to compute (they change no weight).
      adapters: adds these; the file's weights are then frozen and kept in `frozen_dtype`.
      adapter_key: PRNG key that draws the adapters.
      frozen_dtype: of the file's weights under adapters.
      place: as `load_weights`; adapters go through it too.
    Raises:
      ValueError: no such file, a damaged one, one without a model's metadata, tensors that do not fit it, or adapters
        that do not fit the model.
    """
    metadata = read_metadata(path)
    if not {"task", "model"} <= metadata.keys():
        raise ValueError(f"{path}: holds no task and model in its metadata; it was not written by the pre-training")
    overrides = {"dtype": dtype, "remat": remat, "scan_layers": scan_layers}
    overrides = {name: value for name, value in overrides.items() if value is not None}
    try:
        config = DiTConfig(**{**json.loads(metadata["model"]), **overrides})
    except (TypeError, ValueError) as error:
        raise ValueError(f"{path}: its model configuration is not valid: {error}") from error
    velocity_fn, params, num_adapted = assemble(
        lambda rngs: DiT(config, rngs=rngs),
        partial(load_weights, path),
        adapters=adapters,
        adapter_key=adapter_key,
        frozen_dtype=frozen_dtype,
        place=place,
    )
    return LoadedModel(config, metadata["task"], velocity_fn, params, num_adapted)


def assemble(
    create: Callable[[nnx.Rngs], nnx.Module],
    read: Callable[[Any, Place], Any],
    *,
    adapters: Adapters | None = None,
    adapter_key: jax.Array | None = None,
    frozen_dtype: jnp.dtype = jnp.bfloat16,
    place: Place | None = None,
    abstract: bool = False,
) -> tuple[VelocityFn, Params, int]:
    """A model as a function, with weights that are read and adapters, if any, that are drawn.

    Args:
      create: makes the module; only its shapes are used.
      read: (tree of `jax.ShapeDtypeStruct`s, place) -> the same tree, every leaf what `place` returned.
      adapters, adapter_key, frozen_dtype, place: as `load_model`.
      abstract: places the adapters' `jax.ShapeDtypeStruct`s and draws nothing.
    Returns: velocity_fn, its parameters, and how many matrices have an adapter.
    Raises:
      AdapterError: adapters that do not fit the model; nothing has been read.
    """
    key = jax.random.key(0) if adapter_key is None else adapter_key
    place = place or (lambda _, tensor: tensor if isinstance(tensor, jax.ShapeDtypeStruct) else jnp.asarray(tensor))

    def build(key: jax.Array) -> nnx.Module:
        module = create(nnx.Rngs(key))
        if adapters is not None:
            add_adapters(module, adapters, nnx.Rngs(jax.random.fold_in(key, 1)))
        return module

    # Abstract: the random initial weights would be thrown away.
    velocity_fn, like = as_function(nnx.eval_shape(build, key))
    like, drawn = split_adapters(like)
    if adapters is None:
        return velocity_fn, read(like, place), 0
    frozen = read(like, lambda name, tensor: place(name, _cast(tensor, frozen_dtype)))
    structure = jax.tree.structure(drawn)
    if not abstract:
        # compiled, so that only the adapters are drawn
        drawn = jax.device_get(jax.jit(lambda key: split_adapters(as_function(build(key))[1])[1])(key))
    trained = jax.tree.unflatten(structure, [place(name, array) for name, array in flatten(drawn).items()])
    return velocity_fn, merge_params(frozen, trained), count_adapted(trained)


def _cast(tensor: np.ndarray | jax.ShapeDtypeStruct, dtype: jnp.dtype) -> np.ndarray | jax.ShapeDtypeStruct:
    return tensor.update(dtype=dtype) if isinstance(tensor, jax.ShapeDtypeStruct) else tensor.astype(dtype)


def _read(path: str | os.PathLike, with_tensors: bool = True) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Tensors and metadata of a file; every way in which it is no safetensors file becomes a ValueError."""
    if not Path(path).is_file():
        raise ValueError(f"{path}: no such weights file")
    try:
        with safe_open(path, framework="numpy") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()} if with_tensors else {}  # noqa: SIM118
            return tensors, dict(file.metadata() or {})
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise ValueError(
            f"{path}: not a readable safetensors file ({error}); it is damaged or of another kind"
        ) from error


def non_finite(tensors: Mapping[str, np.ndarray]) -> list[str]:
    """Names of the tensors that hold NaN or infinity."""
    return [name for name, array in tensors.items() if not np.isfinite(array).all()]


def refuse(path: str | os.PathLike, faults: Mapping[str, list[str]]) -> None:
    """Raises one ValueError that lists every fault, if there is any."""
    listed = [f"{kind}: {listed_names(names)}" for kind, names in faults.items() if names]
    if listed:
        raise ValueError(f"{path}: these tensors do not fit: " + "; ".join(listed))


def listed_names(names: list[str]) -> str:
    """The first few names and the number of the others."""
    more = f" and {len(names) - MAX_NAMES} more" if len(names) > MAX_NAMES else ""
    return ", ".join(names[:MAX_NAMES]) + more
