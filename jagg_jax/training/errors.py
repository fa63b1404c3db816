"""What a user is told in one line: settings, checkpoints and runs that can't be used. Light, so that --help is fast."""


class ConfigError(ValueError):
    """A setting that can't be used. The message is one line: the option as typed, its value, what to do instead."""


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another model. The message is one line: the path and the reason."""


class TrainingError(RuntimeError):
    """A run that can't go on. The message is one line: what happened and what is left on disk."""
