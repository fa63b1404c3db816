"""Three handwritten digits, 16 x 48 pixels, rewarded by a text reader: minutes on a laptop.

The recipe was found by trial on two CPU cores: 8 prompts x 8 samples, 10 steps of which the first 8 are trained in
groups of 4, one optimiser update a rollout. FlowSDE 0.7 because DanceSDE 0.3 learned much more slowly here and diverged
at this learning rate; a constant rate with averaged weights because a cosine to 0 ended lower (0.76 against 0.88).
Two of the evaluation rewards are readers that training never asks: PP-OCRv5, of the same family, and a small CNN of
another lineage that sees one digit at a time.
"""

from jagg_jax.training.config import TrainConfig

CONFIG = TrainConfig(
    task="digits",
    weights="digits",
    updates=100,
    batch_size=64,
    num_generations=8,
    num_steps=10,
    train_steps=8,
    sampler="flow_sde",
    noise_level=0.7,
    plan="jagg",
    steps_per_group=4,
    learning_rate=3e-4,
    ema_decay=0.9,
    eval_rewards=("ocr_edit", "ocr_v5_edit", "digit_reader_edit"),
)
