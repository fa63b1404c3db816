"""The presets: a file each, with a value CONFIG. `python train.py NAME` runs one; its name is that of the file."""

import importlib
from typing import Any

PRESETS = {
    "quickstart": "GRPO with JAGG: a small pre-trained model learns to write three digits that a text reader can read",
    "pretrain_digits": "rectified-flow pre-training of the model that quickstart starts from",
}


def load(name: str) -> Any:
    """The settings of a preset: a TrainConfig or a PretrainConfig.

    Args:
        name: A key of PRESETS.
    """
    return importlib.import_module(f"configs.{name}").CONFIG
