"""Where arrays live: the device mesh, the parameters' places on it, and what moves between hosts.

The mesh has three axes. A batch is split over `data` and `fsdp`; parameters, optimiser state and averages are split
over `fsdp` by size and over `tensor` by the model's own rules. One device is the mesh 1 x 1 x 1, not another path.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils, multihost_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jagg_jax.training.errors import ConfigError

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


def make_mesh(data: int = -1, fsdp: int = 1, tensor: int = 1, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """The mesh (data, fsdp, tensor), by default over all devices of all processes; one size -1 takes what is left.

    Raises:
      ValueError: sizes below 1 (other than one -1), or whose product is not the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes, count = [data, fsdp, tensor], len(devices)
    described = " x ".join(f"{name} {size}" for name, size in zip(AXES, sizes, strict=True))
    if sizes.count(-1) > 1 or any(size < 1 and size != -1 for size in sizes):
        raise ValueError(f"mesh {described}: give positive sizes, at most one of them -1")
    if -1 in sizes:
        others = int(np.prod([size for size in sizes if size != -1]))
        sizes[sizes.index(-1)] = max(count // others, 1)
    if np.prod(sizes) != count:
        raise ValueError(f"mesh {described}: does not fit {count} devices; the product of the sizes must be that")
    # Auto: the compiler places what lies between the inputs and outputs whose places are given
    return Mesh(arrange_devices(sizes, devices), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def arrange_devices(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """The devices as an array [data, fsdp, tensor] whose later axes run over the faster links.

    Where there are several TPU slices, or several GPU nodes, which JAX counts as slices, `data` spans them first and
    `tensor` last: it moves the most.

    Args:
      sizes: (data, fsdp, tensor), whose product is the number of devices.
      devices: as many in each slice.
    """
    left, across = len({getattr(device, "slice_index", 0) for device in devices}), []
    if left == 1:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    for size in sizes:
        across.append(math.gcd(size, left))
        left //= across[-1]
    within = [size // number for size, number in zip(sizes, across, strict=True)]
    return mesh_utils.create_hybrid_device_mesh(within, across, devices, allow_split_physical_axes=True)


def join_processes(how: str, coordinator: str = "", num_processes: int = 1, process_id: int = 0) -> None:
    """Meets the other processes of the run; must come before anything asks for a device. Joining again does nothing.

    Args:
      how: "none" (this process alone), "auto" (TPU pod, SLURM, Open MPI: JAX knows the others) or "manual".
      coordinator, num_processes, process_id: of "manual"; HOST:PORT of process 0, how many, and which one this is.

    Raises:
      ConfigError: "auto" where JAX knows no others.
    """
    if how == "none" or jax.distributed.is_initialized():
        return
    if how == "auto":
        try:
            jax.distributed.initialize()
        except ValueError as error:
            fix = "start it on a TPU slice, as a SLURM step or by Open MPI, or take --distributed manual"
            raise ConfigError(f"--distributed auto: finds no other processes; {fix}") from error
    else:
        jax.distributed.initialize(coordinator, num_processes, process_id)


def batch_shards(mesh: Mesh) -> int:
    """Into how many parts a batch is split."""
    return mesh.shape["data"] * mesh.shape["fsdp"]


def replicated(mesh: Mesh) -> NamedSharding:
    """The same on every device."""
    return NamedSharding(mesh, PartitionSpec())


def by_sample(mesh: Mesh) -> NamedSharding:
    """Arrays [batch, ...]."""
    return NamedSharding(mesh, PartitionSpec(BATCH_AXES))


def by_step_and_sample(mesh: Mesh) -> NamedSharding:
    """Arrays [steps, batch, ...]: the steps stay together."""
    return NamedSharding(mesh, PartitionSpec(None, BATCH_AXES))


def parameter_spec(
    name: str, shape: tuple[int, ...], mesh: Mesh, tensor_rules: Mapping[str, int], min_size: int
) -> PartitionSpec:
    """How one parameter, or a moment or average of it, is split.

    Over `tensor` along the axis that the first matching rule names; over `fsdp` along the largest other axis that it
    divides, where the array has at least `min_size` elements (small ones cost more to gather than to hold). The first
    axis of a stack of blocks is never split: a loop over the blocks takes one after the other.

    Args:
      name: dotted path, e.g. "blocks.attention.qkv.kernel".
      shape: of the array.
      mesh: from `make_mesh`.
      tensor_rules: regular expression -> axis, negative when counted from the end.
      min_size: elements.

    Raises:
      ValueError: a tensor rule whose axis the mesh doesn't divide.
    """
    axes: list[str | None] = [None] * len(shape)
    tensor, fsdp = mesh.shape["tensor"], mesh.shape["fsdp"]
    for pattern, axis in tensor_rules.items():
        if tensor > 1 and re.search(pattern, name):
            if shape[axis] % tensor:
                raise ValueError(f"{name}: axis {axis} of {shape} can't be split over tensor {tensor}; it must divide")
            axes[axis] = "tensor"
            break
    if fsdp > 1 and np.prod(shape) >= min_size:
        stacked = re.search(r"(^|[._])blocks\.", name) is not None
        free = [axis for axis in range(stacked, len(shape)) if axes[axis] is None and shape[axis] % fsdp == 0]
        if free:
            axes[max(free, key=lambda axis: shape[axis])] = "fsdp"
    return PartitionSpec(*axes)


def state_shardings(state: Any, mesh: Mesh, tensor_rules: Mapping[str, int], min_size: int) -> Any:
    """Shardings for a pytree of parameters, optimiser state and averages, by path and shape.

    Args:
      state: pytree of arrays or `jax.ShapeDtypeStruct`s.
      mesh, tensor_rules, min_size: as `parameter_spec`.
    """

    def place(path, leaf) -> NamedSharding:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return NamedSharding(mesh, parameter_spec(name, leaf.shape, mesh, tensor_rules, min_size))

    return jax.tree_util.tree_map_with_path(place, state)


def put(array: np.ndarray, sharding: NamedSharding) -> jax.Array:
    """A host array that every process holds, placed on the mesh; each device receives its own part only."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def put_rows(read: Callable[[np.ndarray], Any], total: int, mesh: Mesh) -> Any:
    """A batch of `total` rows, split by sample, of which every process reads its own rows only.

    Args:
      read: rows, int [R], increasing -> pytree of arrays [R, ...].
      total: rows in all.
      mesh: from `make_mesh`.
    """
    sharding, places = by_sample(mesh), np.arange(total)
    parts = sharding.addressable_devices_indices_map((total,)).values()
    rows = np.unique(np.concatenate([places[part] for part in parts]))

    def place(leaf: np.ndarray) -> jax.Array:
        shape = (total, *leaf.shape[1:])
        return jax.make_array_from_callback(shape, sharding, lambda i: leaf[np.searchsorted(rows, places[i[0]])])

    return jax.tree.map(place, read(rows))


def local_rows(array: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The rows of a batch-sharded array that this process holds.

    Returns:
      Their indices, increasing, and the rows as one host array.
    """
    shards = {}
    for shard in array.addressable_shards:
        shards.setdefault(shard.index[0].start or 0, shard.data)
    parts = [(start, np.asarray(shards[start])) for start in sorted(shards)]
    indices = np.concatenate([np.arange(start, start + len(part)) for start, part in parts])
    return indices, np.concatenate([part for _, part in parts])


def gather_rows(indices: np.ndarray, values: np.ndarray, total: int) -> np.ndarray:
    """What every process found for its own rows, as one array [total, ...] that all of them get.

    Args:
      indices: int [rows], the same number on every process.
      values: [rows, ...].
      total: rows in all.
    """
    if jax.process_count() == 1:
        gathered_indices, gathered = indices[None], values[None]
    else:
        gathered_indices, gathered = multihost_utils.process_allgather((indices, values))
    result = np.empty((total, *values.shape[1:]), values.dtype)
    for part_indices, part in zip(gathered_indices, gathered, strict=True):
        result[part_indices] = part
    return result


def any_process(flag: bool) -> bool:
    """Whether the flag is set on any process; all must ask."""
    return flag if jax.process_count() == 1 else bool(np.any(multihost_utils.process_allgather(np.array(flag))))


def wait_for_all(name: str) -> None:
    """Returns when every process has come here."""
    if jax.process_count() > 1:
        multihost_utils.sync_global_devices(name)
