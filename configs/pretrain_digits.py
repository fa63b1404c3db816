"""Pre-train the digits model: the weights that the packaged GRPO presets start from.

The sizes are those of a DiT of 1.26 million parameters whose tokens are 8 x 4 pixels. The learning rate and the number
of updates were chosen by trial so that the model draws digits, but clumsily and sometimes the wrong ones: PP-OCRv6
reads 0.33 of a held-out prompt (`ocr_edit`), of 0.97 in real images, which leaves GRPO something to learn.
"""

from jagg_jax.training.pretrain_config import PretrainConfig

CONFIG = PretrainConfig(task="digits", output="jagg_jax/models/weights/digits.safetensors", updates=300)
