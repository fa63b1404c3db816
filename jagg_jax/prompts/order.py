"""In which order training draws its prompts."""

import grain.python as grain
import numpy as np


class PromptOrder:
    """Epoch after epoch, all prompts in an order that follows from the seed and the epoch alone.

    Any place can be asked for at any time, so that a resumed run, or another process, needs to know no more than the
    place to go on from.
    """

    def __init__(self, num_prompts: int, seed: int):
        """Shuffles the rows 0 to `num_prompts` - 1 anew for every epoch."""
        self._rows = grain.MapDataset.range(num_prompts).seed(seed).shuffle().repeat()

    def rows(self, start: int, count: int) -> np.ndarray:
        """The rows at the places `start` to `start` + `count` of the endless order, int [count]."""
        return np.array([self._rows[place] for place in range(start, start + count)])
