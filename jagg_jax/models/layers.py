"""What every model here is built of: linear maps that can carry a low-rank adapter, and stacks of equal blocks."""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx

Remat = Literal["none", "dots", "full"]
REMATS = get_args(Remat)


class Linear(nnx.Linear):
    """`nnx.Linear` that can carry a low-rank adapter (LoRA, arXiv 2106.09685): y = x W + b + scale (x A) B.

    Attributes:
      lora_a: [..., in, rank], or None without an adapter (see `lora.add_adapters`).
      lora_b: [..., rank, out], or None.
      lora_scale: alpha / rank.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        """Creates the map without an adapter; arguments are those of `nnx.Linear`."""
        super().__init__(*args, **kwargs)
        self.lora_a = nnx.data(None)
        self.lora_b = nnx.data(None)
        self.lora_scale = 0.0

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """[..., in] -> [..., out]. The product x A B stays apart from W: added to bfloat16 weights it would vanish."""
        outputs = super().__call__(inputs)
        if self.lora_a is None:
            return outputs
        inputs, lora_a, lora_b = self.promote_dtype((inputs, self.lora_a[...], self.lora_b[...]), dtype=self.dtype)
        change = (inputs @ lora_a) @ lora_b
        return outputs + jnp.asarray(self.lora_scale, change.dtype) * change


def stack_blocks(make_block: Callable[[nnx.Rngs], nnx.Module], depth: int, rngs: nnx.Rngs) -> nnx.Module:
    """`depth` blocks of one kind as one module whose parameters have a leading axis [depth, ...].

    The attribute that holds it is called `blocks` or ends with `_blocks`: that axis is never split over devices.
    """

    @nnx.split_rngs(splits=depth)
    @nnx.vmap(in_axes=0, out_axes=0)
    def create(rngs: nnx.Rngs) -> nnx.Module:
        return make_block(rngs)

    return create(rngs)


def apply_stack(blocks: nnx.Module, carry: Any, *shared: Any, remat: Remat = "none", scan: bool = True) -> Any:
    """carry = block(carry, *shared), block after block.

    Args:
      blocks: from `stack_blocks`.
      carry: pytree of arrays, whose shapes and dtypes a block keeps.
      *shared: pytrees that every block gets.
      remat: what the backward pass finds stored: "none" recomputes nothing; "dots" stores the results of linear maps
        (not attention's products of two activations) and recomputes the rest; "full" stores the carry alone.
      scan: compile one block and loop over it; False repeats it `depth` times in the program, which compiles longer and
        may run faster. Same values up to rounding, same parameters.
    """
    graph, parameters = nnx.split(blocks)

    def apply(carry, layer):
        return nnx.merge(graph, layer)(carry, *shared)

    policies = {"dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable, "full": None}
    if remat != "none":
        apply = jax.checkpoint(apply, policy=policies[remat], prevent_cse=not scan)
    if scan:
        return jax.lax.scan(lambda carry, layer: (apply(carry, layer), None), carry, parameters)[0]
    leaves, structure = jax.tree.flatten(parameters)
    # split, because its gradient is one concatenation
    for layer in zip(*(jax.lax.split(leaf, [1] * leaf.shape[0]) for leaf in leaves), strict=True):
        carry = apply(carry, jax.tree.unflatten(structure, [leaf[0] for leaf in layer]))
    return carry


def check_remat(remat: str) -> None:
    """Raises ValueError unless `remat` is one of `REMATS`."""
    if remat not in REMATS:
        raise ValueError(f"remat={remat!r}: choose one of {', '.join(REMATS)}")
