"""Modules as pure functions."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jagg_jax.models import as_function, count_parameters


class Stack(nnx.Module):
    """Eleven layers, so that list entries "10" and "2" sort differently as strings; and a constant."""

    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, use_bias=False, rngs=rngs) for _ in range(11)])
        self.offset = nnx.Variable(jnp.full((2,), 3.0))

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.sin(layer(x))
        return x + self.offset[...][None]


def test_the_function_equals_the_module_and_leaves_it_alone():
    module = Stack(nnx.Rngs(0))
    function, params = as_function(module)
    x = jnp.ones((1, 2))
    np.testing.assert_array_equal(np.asarray(function(params, x)), np.asarray(module(x)))
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    assert not np.allclose(np.asarray(function(doubled, x)), np.asarray(module(x)))
    np.testing.assert_array_equal(np.asarray(function(params, x)), np.asarray(module(x)))


def test_parameters_are_plain_nested_dicts_of_arrays_without_constants():
    _, params = as_function(Stack(nnx.Rngs(0)))
    assert set(params) == {"layers"}
    assert set(params["layers"]) == {str(k) for k in range(11)}
    assert all(type(entry) is dict and isinstance(entry["kernel"], jax.Array) for entry in params["layers"].values())
    assert count_parameters(params) == 44


def test_layers_keep_their_order():
    module = Stack(nnx.Rngs(0))
    _, params = as_function(module)
    for index, layer in enumerate(module.layers):
        np.testing.assert_array_equal(np.asarray(params["layers"][str(index)]["kernel"]), np.asarray(layer.kernel[...]))


def test_works_under_jit_grad_vmap_and_scan():
    function, params = as_function(Stack(nnx.Rngs(0)))
    x = jnp.ones((3, 2))
    grads = jax.jit(jax.grad(lambda p: function(p, x).sum()))(params)
    assert jax.tree.structure(grads) == jax.tree.structure(params)
    assert all(np.isfinite(np.asarray(leaf)).all() for leaf in jax.tree.leaves(grads))
    batched = jax.vmap(lambda p, row: function(p, row[None])[0], in_axes=(None, 0))(params, x)
    scanned = jax.lax.scan(lambda carry, row: (carry, function(carry, row[None])[0]), params, x)[1]
    np.testing.assert_allclose(np.asarray(batched), np.asarray(function(params, x)), rtol=1e-6)
    np.testing.assert_allclose(np.asarray(scanned), np.asarray(batched), rtol=1e-6)
