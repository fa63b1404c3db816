"""Models in the folders of diffusers: read tensor by tensor into placed arrays, without PyTorch, and written back."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
from flax import nnx
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from jagg_jax.models.functional import Params, VelocityFn, as_function
from jagg_jax.models.layers import Remat
from jagg_jax.models.lora import ADAPTER_NAMES, AdapterError, Adapters
from jagg_jax.models.sd3 import SD3, grid_positions
from jagg_jax.models.sd3_config import SD3Config
from jagg_jax.models.sd3_names import POSITIONS, position_embeddings
from jagg_jax.models.sd3_names import source_tensors as sd3_tensors
from jagg_jax.models.tensor_names import SourceTensors
from jagg_jax.models.vae import AutoencoderKL
from jagg_jax.models.vae_config import VAEConfig
from jagg_jax.models.vae_names import source_tensors as vae_tensors
from jagg_jax.models.weights import Place, assemble, flatten, listed_names, non_finite, refuse

CONFIG_FILE = "config.json"
WEIGHTS_STEM = "diffusion_pytorch_model"
WEIGHTS_FILE, INDEX_FILE = f"{WEIGHTS_STEM}.safetensors", f"{WEIGHTS_STEM}.safetensors.index.json"
LORA_FILE = "pytorch_lora_weights.safetensors"
LORA_METADATA = "lora_adapter_metadata"  # where diffusers looks for rank and alpha
LARGEST_FILE = 10 * 10**9  # bytes: diffusers cuts weights into files no larger than this
FLOATS = {"F32": np.dtype(np.float32), "F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16)}
# half-precision files hold the table of positions rounded
POSITION_TOLERANCE = 5e-3


class SD3Model(NamedTuple):
    """A transformer read from a folder; `params` include the adapters, and `num_adapted` counts their matrices."""

    config: SD3Config
    velocity_fn: VelocityFn
    params: Params
    num_adapted: int


class VAEDecoder(NamedTuple):
    """The decoding half of an autoencoder: `decode(params, latents)` is `AutoencoderKL.decode`."""

    config: VAEConfig
    decode: Callable
    params: Params


def load_sd3(
    folder: str | os.PathLike,
    *,
    dtype: str = "float32",
    remat: Remat = "none",
    scan_layers: bool = True,
    adapters: Adapters | None = None,
    adapter_key: jax.Array | None = None,
    frozen_dtype: jnp.dtype = jnp.bfloat16,
    place: Place | None = None,
    abstract: bool = False,
) -> SD3Model:
    """Reads the transformer of Stable Diffusion 3 or 3.5 from a diffusers folder, one parameter at a time.

    Args:
      folder: holds config.json and the weights: `WEIGHTS_FILE`, or `INDEX_FILE` and the files it names; float32,
        bfloat16 or float16.
      dtype, remat, scan_layers: how to compute, as in `SD3Config`.
      adapters: adds these; the folder's weights are then frozen and kept in `frozen_dtype`, otherwise float32.
      adapter_key: PRNG key that draws the adapters.
      frozen_dtype: of the folder's weights under adapters.
      place: puts a tensor, given its dotted name, on devices; on the default device when left out.
      abstract: makes `jax.ShapeDtypeStruct`s in place of arrays; weights are checked by name and shape where the folder
        has any, and not read.
    Raises:
      ValueError: no such folder, a configuration that is not supported, or weights that are damaged, pickled, missing,
        unexpected, misshapen, not floating-point or not finite: all such tensors in one line.
      AdapterError: adapters that do not fit the model.
    """
    config = read_config(folder, SD3Config)
    config = dataclasses.replace(config, dtype=dtype, remat=remat, scan_layers=scan_layers)

    def create(rngs: nnx.Rngs) -> SD3:
        return SD3(config, rngs=rngs)

    if adapters is not None and "patch_in" in adapters.targets:
        raise AdapterError("targets patch_in: is a convolution in diffusers, which can't load an adapter of ours there")
    positions = partial(_check_positions, config)
    read = partial(
        _read_component, folder, partial(sd3_tensors, config), abstract=abstract, computed={POSITIONS: positions}
    )
    built = assemble(
        create,
        read,
        adapters=adapters,
        adapter_key=adapter_key,
        frozen_dtype=frozen_dtype,
        place=place,
        abstract=abstract,
    )
    return SD3Model(config, *built)


def load_vae_decoder(folder: str | os.PathLike, *, place: Place | None = None, abstract: bool = False) -> VAEDecoder:
    """Reads the decoder of an `AutoencoderKL` from a diffusers folder; the encoder's tensors are not looked at.

    Args: as `load_sd3`. Everything is float32.
    Raises:
      ValueError: as `load_sd3`.
    """
    config = read_config(folder, VAEConfig)

    def create(rngs: nnx.Rngs) -> AutoencoderKL:
        module = AutoencoderKL(config, rngs=rngs)
        del module.encoder
        if config.use_quant_conv:
            del module.quant_conv
        return module

    decode, like = as_function(nnx.eval_shape(lambda: create(nnx.Rngs(0))), "decode")
    place = place or (lambda _, tensor: tensor if abstract else jnp.asarray(tensor))
    ignored = ("encoder.", "quant_conv.")
    params = _read_component(
        folder, partial(vae_tensors, config), like, place, abstract=abstract, ignored_prefixes=ignored
    )
    return VAEDecoder(config, decode, params)


def read_config(folder: str | os.PathLike, kind: type) -> Any:
    """The configuration in a folder, as `kind`: `SD3Config` or `VAEConfig`.

    Raises:
      ValueError: no such file, or a configuration that `kind` doesn't support.
    """
    path = Path(folder) / CONFIG_FILE
    if not path.is_file():
        raise ValueError(f"{folder}: has no {CONFIG_FILE}; name a folder as diffusers writes it")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise ValueError("holds no JSON object")
        return kind.from_diffusers(content)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: {error}") from error


def weight_files(folder: str | os.PathLike) -> list[Path]:
    """The safetensors files with a folder's weights; none where it has no weights at all.

    Raises:
      ValueError: pickled weights only, a damaged index, or a file that the index names and that is missing.
    """
    folder = Path(folder)
    if (folder / WEIGHTS_FILE).is_file():
        return [folder / WEIGHTS_FILE]
    index = folder / INDEX_FILE
    if not index.is_file():
        if pickled := sorted(folder.glob("*.bin")):
            raise ValueError(
                f"{pickled[0]}: is a pickle, which can run code; save it anew with safe_serialization=True"
            )
        return []
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{index}: is damaged ({error!r})") from error
    for name in names:
        if Path(name).name != name or not (folder / name).is_file():
            raise ValueError(f"{index}: names {name}, which is not in {folder}")
    return [folder / name for name in names]


def save_sd3(folder: str | os.PathLike, config: SD3Config, params: Params, largest_file: int = LARGEST_FILE) -> None:
    """Writes a folder that `SD3Transformer2DModel.from_pretrained` loads: the inverse of `load_sd3`, bit for bit.

    Args:
      folder: made where it's missing; files of the same names are replaced.
      config: of the model.
      params: all of its parameters, without adapters; their dtype is that of the file.
      largest_file: bytes; larger weights become several files and an index. One tensor is never cut.
    Raises:
      ValueError: a parameter that is not finite; nothing has been written.
    """
    tensors: dict[str, np.ndarray] = {}
    for path, array in flatten(params).items():
        source, host = sd3_tensors(config, path), np.asarray(array)
        layers = host if source.stacked else host[None]
        tensors |= {name: source.move.export(layer) for name, layer in zip(source.names, layers, strict=True)}
    refuse(folder, {"not finite": non_finite(tensors)})
    tensors[POSITIONS] = position_embeddings(config)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    files = _cut(tensors, largest_file)
    for number, names in enumerate(files, 1):
        name = WEIGHTS_FILE if len(files) == 1 else f"{WEIGHTS_STEM}-{number:05d}-of-{len(files):05d}.safetensors"
        part = {tensor: np.ascontiguousarray(tensors[tensor]) for tensor in names}
        save_file(part, folder / name, {"format": "pt"})
        files[number - 1] = (name, names)
    if len(files) > 1:
        weight_map = {tensor: name for name, names in files for tensor in names}
        index = {"metadata": {"total_size": sum(array.nbytes for array in tensors.values())}, "weight_map": weight_map}
        (folder / INDEX_FILE).write_text(json.dumps(index, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    (folder / CONFIG_FILE).write_text(json.dumps(config.to_diffusers(), indent=2) + "\n", encoding="utf-8")


def save_lora(folder: str | os.PathLike, config: SD3Config, adapters: Params, alpha: float) -> None:
    """Writes `LORA_FILE`, which `StableDiffusion3Pipeline.load_lora_weights` accepts.

    Rank and alpha are in the file's metadata, as diffusers 0.42.1 and peft write them; the factors are ours, transposed
    and not scaled, so that a round trip keeps every bit.

    Args:
      folder: made where it's missing.
      config: of the model.
      adapters: the trained parameters of `split_adapters`.
      alpha: of the adapters.
    Raises:
      ValueError: a factor that is not finite; nothing has been written.
    """
    tensors, modules, rank = {}, set(), 0
    for path, array in flatten(adapters).items():
        linear, _, factor = path.rpartition(".")
        source, host = sd3_tensors(config, f"{linear}.kernel"), np.asarray(array)
        rank = host.shape[-1] if factor == ADAPTER_NAMES[0] else rank
        for name, layer in zip(source.names, host if source.stacked else host[None], strict=True):
            module = name.removesuffix(".weight")
            modules.add(module)
            side = "lora_A" if factor == ADAPTER_NAMES[0] else "lora_B"
            tensors[f"transformer.{module}.{side}.weight"] = np.ascontiguousarray(layer.T)
    refuse(folder, {"not finite": non_finite(tensors)})
    settings = {"r": rank, "lora_alpha": alpha, "target_modules": sorted(modules), "bias": "none"}
    settings = {f"transformer.{name}": value for name, value in settings.items()}
    Path(folder).mkdir(parents=True, exist_ok=True)
    metadata = {"format": "pt", LORA_METADATA: json.dumps(settings, sort_keys=True)}
    save_file(tensors, Path(folder) / LORA_FILE, metadata)


def _read_component(
    folder: str | os.PathLike,
    source_of: Callable[[str], SourceTensors],
    like: Params,
    place: Place,
    *,
    abstract: bool,
    computed: Mapping[str, Callable[[Any], str]] = {},
    ignored_prefixes: tuple[str, ...] = (),
) -> Params:
    """The tree of `like` out of a folder's files, every tensor's name and shape checked before any is read.

    Args:
      folder, place, abstract: as `load_sd3`.
      source_of: a parameter's dotted name -> where it comes from.
      like: tree of `jax.ShapeDtypeStruct`s.
      computed: tensors that no parameter is made of, each with a check: slice -> what is wrong with it, "" for nothing.
      ignored_prefixes: of the names of tensors that are not needed.
    """
    files = weight_files(folder)
    if not files and not abstract:
        raise ValueError(f"{folder}: has no weights, {WEIGHTS_FILE} or {INDEX_FILE}; name a whole pipeline's folder")
    sources = {path: source_of(path) for path in flatten(like)}
    with contextlib.ExitStack() as stack:
        tensors = _open(stack, files)
        if files:
            _check_tensors(folder, tensors, sources, flatten(like), computed, ignored_prefixes)
        if abstract:
            return jax.tree.unflatten(jax.tree.structure(like), [place(*item) for item in flatten(like).items()])
        placed, damaged = [], []
        for path, leaf in flatten(like).items():
            array = _read_parameter(tensors, sources[path], leaf)
            damaged += non_finite({path: array})
            placed.append(place(path, array))
    refuse(folder, {"not finite": damaged})
    return jax.tree.unflatten(jax.tree.structure(like), placed)


def _open(stack: contextlib.ExitStack, files: list[Path]) -> dict[str, Any]:
    """Every tensor's name -> its open file."""
    tensors: dict[str, Any] = {}
    for path in files:
        try:
            file = stack.enter_context(safe_open(path, framework="numpy"))
            names = file.keys()
        except (SafetensorError, OSError) as error:
            raise ValueError(
                f"{path}: not a readable safetensors file ({error}); it is damaged or cut short"
            ) from error
        if twice := [name for name in names if name in tensors]:
            raise ValueError(f"{path}: {listed_names(twice)}: in another file too")
        tensors |= dict.fromkeys(names, file)
    return tensors


def _check_tensors(folder, tensors, sources, like, computed, ignored_prefixes) -> None:
    """Raises one ValueError that lists all tensors that are missing, unexpected, misshapen or no floats."""
    expected = {}
    for path, source in sources.items():
        shape = like[path].shape[1:] if source.stacked else like[path].shape
        theirs = source.move.export(np.broadcast_to(np.float32(0), shape)).shape
        expected |= dict.fromkeys(source.names, theirs)
    slices = {name: file.get_slice(name) for name, file in tensors.items() if not name.startswith(ignored_prefixes)}
    shared = {name: tuple(slices[name].get_shape()) for name in expected if name in slices}
    refuse(
        folder,
        {
            "missing": [name for name in expected if name not in slices],
            "unexpected": [name for name in slices if name not in expected and name not in computed],
            "misshapen": [
                f"{name} {shape} instead of {expected[name]}"
                for name, shape in shared.items()
                if shape != expected[name]
            ],
            "not float32, float16 or bfloat16": [
                f"{name} {slices[name].get_dtype()}" for name in shared if slices[name].get_dtype() not in FLOATS
            ],
            "not what this model computes": [
                f"{name} {fault}"
                for name, check in computed.items()
                if name in slices and (fault := check(slices[name]))
            ],
        },
    )


def _read_parameter(tensors: Mapping[str, Any], source: SourceTensors, like: jax.ShapeDtypeStruct) -> np.ndarray:
    """One parameter; a stack is filled layer by layer, so that the host holds it once and one layer more."""
    if not source.stacked:
        return np.asarray(source.move.load(tensors[source.names[0]].get_tensor(source.names[0])), like.dtype)
    stack = np.empty(like.shape, like.dtype)
    for layer, name in zip(stack, source.names, strict=True):
        layer[...] = source.move.load(tensors[name].get_tensor(name))
    return stack


def _check_positions(config: SD3Config, positions: Any) -> str:
    """What is wrong with a file's table of positions, of which the middle row is compared."""
    size = config.pos_embed_max_size
    shape = (1, size * size, config.width)
    if tuple(positions.get_shape()) != shape:
        return f"{tuple(positions.get_shape())} instead of {shape}"
    first = (size - 1) // 2 * size
    row = np.asarray(positions[0, first : first + size], np.float32)
    ours = np.asarray(grid_positions(config, 1, size))
    return (
        "" if np.abs(row - ours).max() <= POSITION_TOLERANCE else "differs; pos_embed_max_size or sample_size is wrong"
    )


def _cut(tensors: Mapping[str, np.ndarray], largest_file: int) -> list[Any]:
    """The tensors' names, file by file."""
    files: list[list[str]] = [[]]
    size = 0
    for name, array in tensors.items():
        if files[-1] and size + array.nbytes > largest_file:
            files.append([])
            size = 0
        files[-1].append(name)
        size += array.nbytes
    return files
