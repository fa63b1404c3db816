"""sd35_medium_jagg without classifier-free guidance, which halves the model's work.

Numbers that differ are those of `geneval_sd3_fast_nocfg` in config/grpo.py of Flow-GRPO's code (commit 31c71b9): CPS, a
window of three steps and no KL penalty. Its windows start in the first half of the rollout, ours anywhere.
"""

import dataclasses

from configs.sd35_medium_jagg import CONFIG as JAGG

CONFIG = dataclasses.replace(
    JAGG,
    guidance=1.0,  # guidance_scale, eval_guidance_scale; train.cfg = False
    sampler="cps",  # sde_type
    noise_level=0.8,
    train_steps=3,  # sde_window_size
    train_window="random",
    steps_per_group=3,
    clip_low=1e-5,  # clip_range
    clip_high=1e-5,
    kl="none",  # beta = 0
    kl_weight=0.0,
)
