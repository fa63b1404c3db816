"""The command that writes a run's weights for other programs: diffusers' format, or a weights file of ours."""

import dataclasses
from pathlib import Path

import jax

from jagg_jax.models import read_metadata, save_lora, save_sd3, save_weights
from jagg_jax.training.checks import require, resolve_weights
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.saved_run import RunChoice, load_run


@dataclasses.dataclass(frozen=True)
class ExportConfig(RunChoice):
    """Write a run's trained weights for diffusers: LoRA as load_lora_weights takes it, else a transformer's folder."""

    output: str = ""
    """Folder to write; for a task's model, a .safetensors file that --weights takes."""
    overwrite: bool = False
    """Replace what --output holds."""


def export(config: ExportConfig) -> Path:
    """The `export` command; returns what it wrote.

    Raises:
      ConfigError: a setting that can't be used, a folder that holds no run, or weights that are not finite.
      CheckpointError: a checkpoint that is missing or damaged.
    """
    require(bool(config.output), config, "output", "name what to write")
    output = Path(config.output)
    taken = output.is_file() or (output.is_dir() and any(output.iterdir()))
    require(config.overwrite or not taken, config, "output", "exists; add --overwrite, or name another")
    saved = load_run(config)
    settings, pipeline = saved.experiment.config, saved.experiment.pipeline
    of_folder = pipeline.sd3_config is not None
    suits = output.is_dir() or not output.exists() if of_folder else output.suffix == ".safetensors"
    require(suits, config, "output", "name a folder" if of_folder else "name a .safetensors file")
    # the values leave the devices once, whatever they are split over
    trained = jax.device_get(saved.trained)
    try:
        if of_folder and settings.lora_rank:
            save_lora(output, pipeline.sd3_config, trained, settings.lora_alpha)
            use = f"pipeline.load_lora_weights({str(output)!r})"
        elif of_folder:
            save_sd3(output, pipeline.sd3_config, trained)
            use = f"SD3Transformer2DModel.from_pretrained({str(output)!r})"
        else:
            if settings.lora_rank:
                raise ConfigError(f"--run-dir {config.run_dir}: adapters of a task's model have no format")
            metadata = read_metadata(resolve_weights(settings.weights))
            save_weights(output, trained, {name: metadata[name] for name in ("task", "model")})
            use = f"--weights {output}"
    except ValueError as error:
        raise ConfigError(f"--output {error}") from error
    print(f"{output}: the weights of {saved.run_dir} after update {saved.update}; use them by {use}")
    return output
