"""The settings of a training run: a flat frozen dataclass; `checks.validate` says whether its values fit together."""

import dataclasses
from typing import Annotated, Literal

import tyro

from jagg_jax.training.checks import closest, option, require, resolve_train_steps, resolve_weights, validate

__all__ = ["TrainConfig", "closest", "option", "require", "resolve_weights", "validate"]


def _parse_weights(tokens: list[str]) -> dict[str, float]:
    """Read `ocr_edit jpeg_compressibility=0.1`; a name without a number weighs 1."""
    weights = {}
    for token in tokens:
        name, equals, number = token.partition("=")
        if name in weights:
            raise ValueError(f"{name} is given twice")
        try:
            weights[name] = float(number) if equals else 1.0
        except ValueError:
            raise ValueError(f"{token}: write NAME or NAME=WEIGHT, e.g. ocr_edit=0.5") from None
    return weights


def _parse_train_steps(tokens: list[str]) -> int | str:
    """Read `8`, `-2` or `50%`."""
    (token,) = tokens
    if token.endswith("%"):
        return token
    try:
        return int(token)
    except ValueError:
        raise ValueError("must be a count such as 8 or -2, or a share such as 50%") from None


TrainSteps = Annotated[
    int | str,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="COUNT|SHARE%",
        instance_from_str=_parse_train_steps,
        is_instance=lambda value: isinstance(value, int | str),
        str_from_instance=lambda value: [str(value)],
    ),
]
RewardWeights = Annotated[
    dict[str, float],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="NAME[=WEIGHT] ...",
        instance_from_str=_parse_weights,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda weights: [f"{name}={weight:g}" for name, weight in weights.items()],
    ),
]


@dataclasses.dataclass(frozen=True)
class TrainConfig:
    """GRPO training of a velocity model. `validate` says whether the values fit together."""

    seed: int = 0
    """All randomness follows from this number and the update's index; 0 to 2**32 - 1."""
    task: str = "digits"
    """Prompt set: what is drawn and which prompts are held out; prompt_cache takes them from --prompt-cache."""
    weights: str = ""
    """Pre-trained model: the bare name of a packaged one, such as digits, the path of a .safetensors file, or that of
    the folder of a Stable Diffusion 3 or 3.5 pipeline as diffusers lays it out."""
    prompt_cache: str = ""
    """Folder that encode_prompts wrote: the prompts of a pipeline's folder and their text embeddings."""
    eval_prompt_cache: str = ""
    """The same of held-out prompts; without, the last --eval-prompts of --prompt-cache are kept out of training."""
    image_size: int = 0
    """Height and width of a pipeline's images in pixels; 0 for tasks, whose images have a size of their own."""
    run_dir: str = ""
    """Folder of the run; empty means runs/<preset>-<UTC time>."""
    resume: bool = False
    """Go on from the latest checkpoint in --run-dir."""
    overwrite: bool = False
    """Delete the run that --run-dir already holds."""

    dry_run: bool = False
    """Compile and print what the run would do and need on each device; train and write nothing."""

    updates: int = 100
    """Rollouts to train on."""
    batch_size: int = 64
    """Samples a rollout."""
    num_generations: int = 8
    """Samples a prompt, the group whose mean is the baseline; must divide --batch-size."""
    micro_batch_size: int = 64
    """Samples that the model sees at once, forward or backward (memory); must divide --batch-size."""
    updates_per_rollout: int = 1
    """Optimiser updates on each rollout; every one sees the whole batch."""

    num_steps: int = 10
    """Denoising steps of a training rollout."""
    shift: float = 1.0
    """Time shift of the noise schedule; 1 spaces the noise levels evenly, more stays longer at high noise."""
    train_steps: TrainSteps = 8
    """Steps trained: how many (8), all but so many (-2), or a share (50%) of those that can be trained, which are all
    but the last step of a rollout: it has no noise."""
    train_window: Literal["first", "random"] = "first"
    """Which steps: the first ones, or consecutive ones from a start that is drawn anew for every rollout."""
    eval_steps: int = 10
    """Denoising steps of an evaluation sample (ODE)."""
    sampler: Literal["flow_sde", "dance_sde", "cps"] = "flow_sde"
    """Transition of the training rollout: Flow-GRPO's SDE, DanceGRPO's SDE or coefficient-preserving sampling."""
    noise_level: float = 0.7
    """Noise knob eta of the sampler; DanceSDE wants about 0.3."""
    guidance: float = 1.0
    """Classifier-free guidance scale; 1 is no guidance and one model call a step."""

    plan: Literal["exact", "jagg", "hat", "subset"] = "jagg"
    """Which steps are backpropagated: all of them, two a group (JAGG), shared anchors, or a random subset."""
    steps_per_group: int = 4
    """Denoising steps in a group of plan jagg or hat."""
    jagg_frac: float = 1.0
    """Fraction of the trained steps that is grouped, from the high-noise end; the rest is backpropagated exactly."""
    alpha: Literal["sigma", "index"] = "sigma"
    """Interpolate inside a group by noise level or by step index (plan jagg)."""
    hat_phase: Literal["fixed", "random"] = "fixed"
    """Where the shared anchors of plan hat stand: the same steps always, or a grid moved anew for every update."""
    subset_steps: int = 4
    """Steps that plan subset keeps."""
    batch_anchors: int | None = None
    """Anchor steps stacked on the batch axis of one backward pass; all of them by default, 1 takes the least memory."""

    lora_rank: int = 0
    """Rank of the low-rank adapters that are trained in place of the weights; 0 trains the weights."""
    lora_alpha: float = 64.0
    """The adapters' product is scaled by this over --lora-rank."""
    lora_targets: tuple[str, ...] = ("qkv", "out", "mlp_in", "mlp_out")
    """Linear maps that get an adapter, by the last parts of their names."""
    frozen_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """How the weights are kept under adapters."""

    rewards: RewardWeights = dataclasses.field(default_factory=lambda: {"ocr_edit": 1.0})
    """Rewards trained on, with their weights in the sum, e.g. ocr_edit jpeg_compressibility=0.1."""
    eval_rewards: tuple[str, ...] = ("ocr_edit",)
    """Rewards measured on the held-out prompts."""
    reward_threads: int | None = None
    """CPU threads of the reward models; the library's choice by default."""

    advantage_std: Literal["group", "global", "none"] = "group"
    """Divide the advantages by the std of the prompt's samples, of all samples, or not at all."""
    advantage_clip: float = 5.0
    """Largest absolute advantage."""
    clip_low: float = 1e-3
    """The ratio is clipped below 1 - this."""
    clip_high: float = 1e-3
    """The ratio is clipped above 1 + this."""
    kl: Literal["none", "exact", "flow_grpo", "v", "x"] = "none"
    """Penalty that keeps the model near the pre-trained one; needs a --kl-weight above 0."""
    kl_weight: float = 0.0
    """Weight of the penalty in the loss."""

    learning_rate: float = 3e-4
    """Peak step size of AdamW."""
    warmup_updates: int = 0
    """Rollouts over which the learning rate rises from 0."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The learning rate after the warm-up: constant, or a cosine down to 0 at the last update."""
    weight_decay: float = 0.0
    """Decoupled weight decay of AdamW."""
    beta1: float = 0.9
    """AdamW's decay of the first moment."""
    beta2: float = 0.99
    """AdamW's decay of the second moment."""
    max_grad_norm: float = 1.0
    """The gradient is scaled down to at most this global norm."""
    ema_decay: float = 0.0
    """Decay an update of the averaged weights that evaluation uses; 0 evaluates the trained weights themselves."""

    distributed: Literal["none", "auto", "manual"] = "none"
    """Several processes: auto finds the others on a TPU pod or under SLURM, manual asks for the next three settings."""
    coordinator: str = ""
    """HOST:PORT of process 0, where all processes meet (--distributed manual)."""
    num_processes: int = 1
    """Processes in all (--distributed manual)."""
    process_id: int = 0
    """This process, from 0 (--distributed manual)."""
    data: int = -1
    """Devices over which the batch is split and parameters are repeated; -1 takes all that the other two leave."""
    fsdp: int = 1
    """Devices over which the batch and the parameters are split."""
    tensor: int = 1
    """Devices over which attention heads and MLP columns are split."""
    fsdp_min_size: int = 65536
    """Parameters with fewer elements are repeated instead of split over --fsdp."""

    storage_dtype: Literal["float32", "bfloat16"] = "float32"
    """How rollout latents are stored; log-probabilities are those of the stored values."""
    compute_dtype: Literal["float32", "bfloat16"] = "float32"
    """What the model computes in; parameters and all SDE arithmetic stay float32."""
    remat: Literal["none", "dots", "full"] = "none"
    """What the backward pass recomputes in each block to save memory: nothing, all but linear maps, or everything."""
    scan_layers: bool = False
    """Compile one block and loop over it instead of repeating it in the program: deep models compile sooner."""

    eval_every: int = 25
    """Updates between evaluations; 0 evaluates only before the first and after the last update."""
    eval_prompts: int = 100
    """Held-out prompts of an evaluation, at most as many as the task or the cache has."""
    eval_batch_size: int = 100
    """Evaluation samples drawn at once (memory), rounded up to a multiple of the devices that share a batch."""
    sample_every: int = 25
    """Updates between sample grids; 0 draws them only after the last update."""
    checkpoint_every: int = 25
    """Updates between checkpoints; 0 saves only after the last update."""
    keep_checkpoints: int = 2
    """Latest checkpoints kept."""
    max_skipped_updates: int = 5
    """Updates in a row that may be skipped for a non-finite gradient before the run stops with an error."""

    @property
    def num_train_steps(self) -> int:
        """The number of trained steps that `train_steps` asks for; raises ConfigError where it asks for none."""
        return resolve_train_steps(self.train_steps, self.num_steps)
