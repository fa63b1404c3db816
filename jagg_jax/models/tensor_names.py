"""How a parameter of ours is made of tensors that another library stores, as data: names and invertible moves."""

import dataclasses
from collections.abc import Callable

import numpy as np


@dataclasses.dataclass(frozen=True)
class Move:
    """Rearranges one tensor's elements; it computes nothing, so `load` and `export` are exact inverses.

    Attributes:
      load: their array -> ours.
      export: ours -> theirs.
    """

    load: Callable[[np.ndarray], np.ndarray]
    export: Callable[[np.ndarray], np.ndarray]


AS_IT_IS = Move(lambda theirs: theirs, lambda ours: ours)
TRANSPOSE = Move(lambda theirs: theirs.T, lambda ours: ours.T)  # PyTorch keeps [out, in], Flax [in, out]

# PyTorch keeps [out, in, height, width], Flax [height, width, in, out]
CONVOLUTION = Move(lambda theirs: theirs.transpose(2, 3, 1, 0), lambda ours: ours.transpose(3, 2, 0, 1))


def patch_convolution(patch_size: int) -> Move:
    """A convolution whose stride is its size, [out, C, p, p] <-> a linear map of patches, [p * p * C, out]."""

    def load(kernel: np.ndarray) -> np.ndarray:
        return kernel.transpose(2, 3, 1, 0).reshape(-1, kernel.shape[0])

    def export(kernel: np.ndarray) -> np.ndarray:
        return kernel.reshape(patch_size, patch_size, -1, kernel.shape[-1]).transpose(3, 2, 0, 1)

    return Move(load, export)


@dataclasses.dataclass(frozen=True)
class SourceTensors:
    """Where one parameter comes from.

    Attributes:
      names: of their tensors: one for each layer of a stack, in order; otherwise a single one.
      move: between each of them and ours (a layer of the stack, if there is one).
      stacked: whether ours has a leading axis of layers.
    """

    names: tuple[str, ...]
    move: Move
    stacked: bool
