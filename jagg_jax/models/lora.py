"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685): which linear maps get one, and which parameters train."""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import nnx

from jagg_jax.models.functional import Params
from jagg_jax.models.layers import Linear

ADAPTER_NAMES = ("lora_a", "lora_b")


class AdapterError(ValueError):
    """Adapters that don't fit the model: "field value: fix"."""


@dataclasses.dataclass(frozen=True)
class Adapters:
    """Which adapters a model gets.

    Attributes:
      rank: inner size of the product A B; at least 1, at most the smaller side of every target.
      alpha: the product is scaled by alpha / rank.
      targets: names of linear maps, by any number of last components of their path: "qkv", "attention.qkv".
    """

    rank: int
    alpha: float
    targets: tuple[str, ...]


def linear_maps(module: nnx.Module) -> dict[str, Linear]:
    """Every linear map that can carry an adapter, by dotted path such as "blocks.attention.qkv"."""
    found = nnx.iter_modules(module)
    return {".".join(map(str, path)): node for path, node in found if isinstance(node, Linear)}


def add_adapters(module: nnx.Module, adapters: Adapters, rngs: nnx.Rngs) -> None:
    """Gives linear maps of `module` adapters that change nothing yet: A is normal with std 1 / rank, B is zero.

    That is the "gaussian" initialisation of the peft library, which Flow-GRPO's code uses.

    Args:
      module: a model built of `layers.Linear`; changed in place.
      adapters: which ones.
      rngs: its `params` stream draws A.

    Raises:
      AdapterError: a rank or alpha out of range, no targets, or a target that names no linear map.
    """
    maps, rank = linear_maps(module), adapters.rank
    if rank < 1:
        raise AdapterError(f"rank {rank}: must be at least 1")
    if not adapters.alpha > 0:
        raise AdapterError(f"alpha {adapters.alpha}: must be above 0")
    if not adapters.targets:
        raise AdapterError(f"targets: name at least one of {_choices(maps)}")
    chosen = {}
    for target in adapters.targets:
        matches = [path for path in maps if f".{path}".endswith(f".{target}")]
        if not matches:
            raise AdapterError(f"targets {target}: the model has no such linear map; choose from {_choices(maps)}")
        chosen |= dict.fromkeys(matches)
    for path in chosen:
        linear = maps[path]
        *stack, inputs, outputs = linear.kernel.shape
        if rank > min(inputs, outputs):
            raise AdapterError(f"rank {rank}: exceeds the smaller side of {path}, {inputs} x {outputs}; lower it")
        linear.lora_a = nnx.Param(jax.random.normal(rngs.params(), (*stack, inputs, rank), jnp.float32) / rank)
        linear.lora_b = nnx.Param(jnp.zeros((*stack, rank, outputs), jnp.float32))
        linear.lora_scale = adapters.alpha / rank


def count_adapted(params: Params) -> int:
    """How many matrices have an adapter; a stack of blocks counts each of its layers."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    return sum(math.prod(leaf.shape[:-2]) for path, leaf in leaves if path[-1].key == ADAPTER_NAMES[0])


def split_adapters(params: Params) -> tuple[Params, Params]:
    """Parameters as (frozen base, trained adapters), both nested dicts; `merge_params` puts them together again."""
    frozen: Params = {}
    trained: Params = {}
    for name, value in params.items():
        if isinstance(value, dict):
            for part, whole in zip(split_adapters(value), (frozen, trained), strict=True):
                if part:
                    whole[name] = part
        else:
            (trained if name in ADAPTER_NAMES else frozen)[name] = value
    return frozen, trained


def merge_params(frozen: Params, trained: Params) -> Params:
    """The whole model's parameters; where nothing is frozen, `trained` itself."""
    merged = dict(frozen)
    for name, value in trained.items():
        merged[name] = merge_params(frozen[name], value) if isinstance(frozen.get(name), dict) else value
    return merged


def _choices(maps: dict[str, Linear]) -> str:
    """Each name as short as a target may be: the last components that tell it from the others, or all."""
    return ", ".join(sorted({path.removeprefix("blocks.") for path in maps}))
