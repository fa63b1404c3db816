"""Stable Diffusion 3.5 Medium with JAGG, on the folder of its pipeline: --weights FOLDER --prompt-cache CACHE.

As it stands it can be dry-run only: `--weights sd35_medium` has the model's sizes and no weights. The numbers are those
of Flow-GRPO's published code (github.com/yifan123/flow_grpo, commit 54809b5), `base` for config/base.py and `ocr` for
`general_ocr_sd3` in config/grpo.py; those of JAGG and of how the work is split are ours.
"""

from jagg_jax.training.config import TrainConfig

CONFIG = TrainConfig(
    task="prompt_cache",
    weights="sd35_medium",
    image_size=512,  # ocr: resolution
    updates=1000,  # ocr stops by hand
    batch_size=1152,  # ocr: 48 prompts of 24 images an epoch, which it cuts into two updates
    num_generations=24,  # ocr: num_image_per_prompt
    micro_batch_size=64,  # ours: divides over 8 and 64 devices
    num_steps=10,  # ocr: num_steps
    eval_steps=40,  # ocr: eval_num_steps
    shift=3.0,  # the scheduler's shift in the pipeline's own folder
    train_steps="100%",  # ocr: timestep_fraction 0.99 of 10 leaves out the last step
    sampler="flow_sde",
    noise_level=0.7,  # base
    guidance=4.5,  # ocr: guidance_scale, in sampling and in training (base: cfg)
    plan="jagg",
    steps_per_group=4,
    batch_anchors=1,
    lora_rank=32,  # Flow-GRPO's train_sd3.py: r
    lora_alpha=64.0,  # train_sd3.py: lora_alpha
    lora_targets=(  # train_sd3.py: target_modules; their to_out.0 is to_out here
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    ),
    rewards={"jpeg_compressibility": 1.0},  # config/grpo.py: compressibility
    eval_rewards=("jpeg_compressibility",),
    advantage_std="global",  # ocr: global_std
    advantage_clip=5.0,  # base: adv_clip_max
    clip_low=1e-4,  # base: clip_range
    clip_high=1e-4,
    kl="flow_grpo",
    kl_weight=0.04,  # ocr: beta
    learning_rate=3e-4,  # base
    beta1=0.9,  # base: adam_beta1
    beta2=0.999,  # base: adam_beta2
    weight_decay=1e-4,  # base: adam_weight_decay
    max_grad_norm=1.0,  # base
    ema_decay=0.9,  # train_sd3.py: EMA with decay 0.9, which it updates every 8 optimiser steps
    fsdp=8,
    compute_dtype="bfloat16",  # ours: base says fp16, which TPUs have not
    remat="full",
    scan_layers=True,
    eval_every=60,  # ocr: eval_freq
    eval_batch_size=128,  # ocr: test_batch_size 16 on each of 8 devices of a node
    checkpoint_every=60,  # ocr: save_freq
    keep_checkpoints=5,  # base: num_checkpoint_limit
)  # fmt: skip
