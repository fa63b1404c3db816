"""The edge between Flax modules and pure functions: below it nobody sees a module."""

from collections.abc import Callable
from typing import Any

import jax
from flax import nnx

VelocityFn = Callable[..., jax.Array]
Params = dict[str, Any]


def as_function(module: nnx.Module, method: str = "__call__") -> tuple[VelocityFn, Params]:
    """Splits a module into a pure function and its trainable parameters.

    Args:
      module: its call must be a pure function of its arguments, e.g. `DiT`.
      method: what is called; the module itself by default.
    Returns:
      velocity_fn(params, *args) -> module.method(*args), safe under jit, grad, vmap and scan; variables that are no
        `nnx.Param` are closed over as constants.
      params: nested dict with string keys (list entries "0", "1", ...) of the `nnx.Param` arrays.
    """
    graph, state, constants = nnx.split(module, nnx.Param, ...)
    flat = nnx.to_flat_state(state)
    params: Params = {}
    for path, variable in flat:
        *parents, leaf = map(str, path)
        node = params
        for key in parents:
            node = node.setdefault(key, {})
        node[leaf] = variable.get_value()

    def velocity_fn(params: Params, *args: Any) -> jax.Array:
        variables = [(path, variable.replace(_lookup(params, path))) for path, variable in flat]
        return getattr(nnx.merge(graph, nnx.from_flat_state(variables), constants), method)(*args)

    return velocity_fn, params


def _lookup(params: Params, path: tuple) -> jax.Array:
    """The array at a module path, whose list indices are strings in `params`."""
    for key in path:
        params = params[str(key)]
    return params


def count_parameters(params: Params) -> int:
    """Number of scalars in a pytree of arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(params))
