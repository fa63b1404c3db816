"""The presets: a file each, with a value CONFIG. `python train.py NAME` runs one; its name is that of the file."""

import importlib
from typing import Any

PRESETS = {
    "quickstart": "GRPO with JAGG: a small pre-trained model learns to write three digits that a text reader can read",
    "sd35_medium_jagg": "Stable Diffusion 3.5 Medium with JAGG and LoRA: --weights FOLDER --prompt-cache CACHE",
    "sd35_medium_exact": "the same, back-propagated through every trained step",
    "sd35_medium_no_guidance": "the same as sd35_medium_jagg without guidance: windows of three steps, CPS",
    "pretrain_digits": "rectified-flow pre-training of the model that quickstart starts from",
}


def load(name: str) -> Any:
    """The settings of a preset: a TrainConfig or a PretrainConfig.

    Args:
        name: A key of PRESETS.
    """
    return importlib.import_module(f"configs.{name}").CONFIG
