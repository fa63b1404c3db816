"""Velocity functions small enough for a test, the reference numbers, and an oracle for the planned gradient."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np

REFERENCE = pathlib.Path(__file__).parent / "reference"


def load_reference(name: str) -> dict[str, np.ndarray]:
    with np.load(REFERENCE / f"{name}.npz", allow_pickle=False) as file:
        return dict(file)


def normal(seed: int, shape: tuple[int, ...], dtype=jnp.float32) -> jax.Array:
    """Standard normal numbers, drawn by NumPy because JAX would compile a generator for every shape."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), dtype)


def mlp_params(seed: int = 0, features: int = 5, hidden: int = 16, cond: int = 3, dtype=jnp.float32):
    return {
        "in": 0.5 * normal(10 * seed + 0, (features, hidden), dtype),
        "time": normal(10 * seed + 1, (1, hidden), dtype),
        "cond": 0.5 * normal(10 * seed + 2, (cond, hidden), dtype),
        "out": 0.5 * normal(10 * seed + 3, (hidden, features), dtype),
    }


def mlp(params, latents, sigma, cond):
    """A tanh layer over (latents, sigma, cond) that computes in the parameters' dtype."""
    dtype = params["in"].dtype
    x = latents.reshape(latents.shape[0], -1).astype(dtype)
    hidden = jnp.tanh(
        x @ params["in"] + sigma.astype(dtype)[:, None] * params["time"] + cond.astype(dtype) @ params["cond"]
    )
    return (hidden @ params["out"]).reshape(latents.shape)


def group(num_steps: int = 5, batch: int = 4, features: int = 5, seed: int = 0):
    """Latents, decreasing sigmas, cond and cotangents of `num_steps` steps."""
    shape = (num_steps, batch, features)
    sigmas = jnp.linspace(0.95, 0.3, num_steps) ** 2
    return (
        normal(100 + 10 * seed + 0, shape),
        sigmas,
        normal(100 + 10 * seed + 1, (batch, 3)),
        normal(100 + 10 * seed + 2, shape),
    )


def planned_gradient(velocity_fn, params, latents, sigmas, cond, cotangents, plan):
    """Sum over anchors of J_a^T (sum over steps of M[j, a] u_j), one separate `jax.vjp` an anchor."""
    total = jax.tree.map(jnp.zeros_like, params)
    for column in range(plan.num_anchors):
        step = plan.anchors[column]
        level = jnp.full(latents.shape[1], sigmas[step])
        _, vjp_fn = jax.vjp(lambda p, step=step, level=level: velocity_fn(p, latents[step], level, cond), params)
        composite = sum(plan.weights[j, column] * cotangents[j] for j in range(plan.num_steps))
        total = jax.tree.map(jnp.add, total, vjp_fn(composite)[0])
    return total
