"""The command line: pick a preset, override its fields, run. Every mistake is one line on stderr and exit status 2."""

import contextlib
import dataclasses
import io
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple, get_args, get_origin

import tyro

import configs
from jagg_jax.training.config import TrainConfig, closest, option, validate
from jagg_jax.training.errors import CheckpointError, ConfigError, TrainingError
from jagg_jax.training.run_dir import check_run_dir

DEFAULT_COMMAND = "quickstart"
_STYLE = {"config": (tyro.conf.FlagCreatePairsOff,)}
COMMANDS = configs.PRESETS | {
    "evaluate": "score a run's checkpoint on held-out prompts: --run-dir DIR",
    "export": "write a run's weights for diffusers: --run-dir DIR --output FOLDER",
    "encode_prompts": "embed a prompt file for Stable Diffusion 3: --prompts FILE --model FOLDER --output CACHE",
    "sample": "draw prompts with a run's checkpoint: --run-dir DIR --prompt 427 --output x.png",
}


class Command(NamedTuple):
    """What a command does: `run` takes a config, `default` is the one whose fields the options override."""

    default: Any
    run: Callable[[Any], Any]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        arguments: Those after the program's name; of this process by default.

    Returns:
        The exit status: 0 after success and after --help, 2 for a setting or a checkpoint that can't be used (nothing
        has been written then), 1 for a run that had to stop.
    """
    try:
        name, options = split_command(sys.argv[1:] if arguments is None else list(arguments))
        command = load_command(name)
        if config := parse_options(name, command.default, options):
            command.run(config)
    except (ConfigError, CheckpointError) as error:
        return _fail(error, 2)
    except TrainingError as error:
        return _fail(error, 1)
    return 0


def split_command(arguments: list[str]) -> tuple[str, list[str]]:
    """The command's name, quickstart where the first argument is an option, and the rest.

    Raises:
        ConfigError: If there's no such command.
    """
    if not arguments or arguments[0].startswith("-"):
        return DEFAULT_COMMAND, arguments
    name = arguments[0].replace("-", "_")
    if name not in COMMANDS:
        choice = f"choose from {', '.join(COMMANDS)}{closest(name, COMMANDS)}"
        raise ConfigError(f"{arguments[0]}: is no command; {choice}")
    return name, arguments[1:]


def load_command(name: str) -> Command:
    """The command of a name out of COMMANDS."""
    if name in ("evaluate", "sample"):
        from jagg_jax.training import evaluate

        if name == "evaluate":
            return Command(evaluate.EvaluateConfig(), evaluate.evaluate)
        return Command(evaluate.SampleConfig(), evaluate.sample)
    if name == "export":
        from jagg_jax.training.export import ExportConfig, export

        return Command(ExportConfig(), export)
    if name == "encode_prompts":
        from jagg_jax.training.encode_prompts import EncodeConfig, encode_prompts

        return Command(EncodeConfig(), encode_prompts)
    default = configs.load(name)
    return Command(default, _run_training(name) if isinstance(default, TrainConfig) else _run_pretraining)


def parse_options(name: str, default: Any, options: Sequence[str]) -> Any:
    """Override the fields of a config by options.

    Returns:
        The config, or None after --help, which has been printed then.

    Raises:
        ConfigError: At an unknown option, a missing value, or one of the wrong type.
    """
    if "-h" in options or "--help" in options:
        _print_help(name, default)
        return None
    silenced = io.StringIO()
    try:
        with contextlib.redirect_stderr(silenced), contextlib.redirect_stdout(silenced):
            config, unknown = tyro.cli(type(default), default=default, args=options, return_unknown_args=True, **_STYLE)
    except SystemExit:
        raise ConfigError(_explain(silenced.getvalue(), default, options)) from None
    if unknown:
        raise ConfigError(_explain_unknown(unknown[0], default))
    return config


def _run_training(name: str) -> Callable[[TrainConfig], None]:
    def run(config: TrainConfig) -> None:
        # `train` checks the same; here a mistake is told before the training code is even imported.
        validate(config)
        if config.dry_run:
            from jagg_jax.training.dry_run import dry_run

            dry_run(config)
            return
        check_run_dir(config)
        from jagg_jax.training.loop import train

        train(config, preset=name)

    return run


def _run_pretraining(config: Any) -> None:
    from jagg_jax.training.pretrain import pretrain

    pretrain(config)


def _fail(error: Exception, status: int) -> int:
    print("error: " + " ".join(str(error).split()), file=sys.stderr)
    return status


def _print_help(name: str, default: Any) -> None:
    from jagg_jax.prompts import TASKS
    from jagg_jax.rewards import REWARDS

    def listing(entries: dict[str, str]) -> str:
        return "\n".join(f"  {entry:<22}{line}" for entry, line in entries.items())

    parts = [
        type(default).__doc__ or "",
        f"Commands (python train.py COMMAND --help; without one, {DEFAULT_COMMAND}):\n{listing(COMMANDS)}",
        f"Rewards:\n{listing(REWARDS)}",
        f"Tasks: {', '.join(TASKS)}",
    ]
    with contextlib.suppress(SystemExit):
        description = "\n\n".join(parts)
        tyro.cli(
            type(default), default=default, args=["--help"], prog=f"train.py {name}", description=description, **_STYLE
        )


def _explain_unknown(token: str, default: Any) -> str:
    if not token.startswith("-"):
        return f"{token}: no option takes this value; see --help"
    word = token.partition("=")[0].replace("_", "-")
    # A flag that's on by default has only its --no- form.
    names = [
        ("no_" if getattr(default, field.name) is True else "") + field.name for field in dataclasses.fields(default)
    ]
    hint = closest(word, map(option, names)) or "; see --help"
    return f"{token}: there is no such option{hint}"


def _explain(message: str, default: Any, options: Sequence[str]) -> str:
    """tyro's boxed message as one line: the option, the value typed, and what it takes."""
    plain = " ".join(re.sub(r"\x1b\[[0-9;]*m|[─│╭╮╰╯]|-{3,}", " ", message).split())
    for field in dataclasses.fields(default):
        name = option(field.name)
        if re.search(rf"(?:argument '|parsing ){re.escape(name)}(?![\w-])", plain):
            typed = _typed_values(name, options)
            if not typed:
                return f"{name}: a value is missing, it {_expectation(field.type, 'needs one')}"
            reason = re.search(rf"parsing {name}: (.*?) Argument helptext", plain)
            return f"{name} {typed}: {_expectation(field.type, reason.group(1) if reason else '')}"
    return plain


def _typed_values(name: str, options: Sequence[str]) -> str:
    """What follows an option, up to the next one; its last occurrence counts."""
    values: list[str] = []
    inside = False
    for token in options:
        word, equals, value = token.partition("=")
        if token.startswith("--"):
            inside = word.replace("_", "-") == name
            values = ([value] if equals else []) if inside else values
        elif inside:
            values.append(token)
    return shlex.join(values)


def _expectation(annotation: Any, otherwise: str = "needs another value") -> str:
    """What a field of this type takes, in words; `otherwise` for types that have none here."""
    arguments = get_args(annotation)
    if get_origin(annotation) is Literal:
        return f"must be one of {', '.join(map(str, arguments))}"
    if get_origin(annotation) is tuple and Ellipsis not in arguments:
        return f"must be {len(arguments)} values"
    if annotation is int or annotation == int | None:
        return "must be a whole number"
    if annotation is float or annotation == float | None:
        return "must be a number"
    return otherwise
