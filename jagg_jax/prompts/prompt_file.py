"""Prompt files: one prompt a line, as text or as JSON with whatever else is known of it."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple


class Prompt(NamedTuple):
    """A prompt, and what its line in the file says besides: any JSON, such as the words that an image must show."""

    text: str
    metadata: dict[str, Any]


def read_prompts(path: str | os.PathLike) -> list[Prompt]:
    """Read a prompt file, UTF-8 with or without a byte order mark; blank lines are skipped, duplicates are kept.

    Args:
        path: a .txt file of one prompt a line, without the spaces around it, or a .jsonl file of one JSON object a
            line with the prompt under "prompt", taken as it is; its other keys become the metadata.

    Raises:
        ValueError: no such file, one of another kind or without a prompt, or a line that can't be read; names the file,
            the line and the fix.
    """
    path = Path(path)
    if path.suffix not in (".txt", ".jsonl"):
        raise ValueError(f"{path}: is no prompt file; name a .txt (one prompt a line) or a .jsonl (an object a line)")
    if not path.is_file():
        raise ValueError(f"{path}: there is no such file; name one with a prompt a line")
    parse = _parse_object if path.suffix == ".jsonl" else lambda line: Prompt(line, {})
    prompts = []
    for place, line in _lines(path):
        try:
            prompts.append(parse(line))
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
    if not prompts:
        raise ValueError(f"{path}: holds no prompt; write one a line")
    return prompts


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    """The lines that are not blank, each with its place in words."""
    # as bytes: a string would also be split at characters that may stand inside a prompt, such as U+2028
    for number, raw in enumerate(path.read_bytes().splitlines(), start=1):
        place = f"{path}, line {number}"
        try:
            line = raw.decode("utf-8-sig" if number == 1 else "utf-8").strip()
        except UnicodeDecodeError as error:
            raise ValueError(f"{place}: is not UTF-8 ({error.reason}); save the file as UTF-8") from error
        if line:
            yield place, line


def _parse_object(line: str) -> Prompt:
    """The prompt of one JSON object."""
    example = 'write an object such as {"prompt": "a cat"}'
    try:
        fields = json.loads(line, parse_constant=_refuse_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not valid JSON ({error.msg}, column {error.colno}); {example}") from error
    if not isinstance(fields, dict):
        raise ValueError(f"is no JSON object; {example}")
    if "prompt" not in fields:
        raise ValueError(f'has no "prompt"; {example}')
    text = fields.pop("prompt")
    if not isinstance(text, str) or not text.strip():
        raise ValueError(f'"prompt" is {json.dumps(text)}; write a text that is not empty, or delete the line')
    if not text.isascii() and any("\ud800" <= character <= "\udfff" for character in text):
        raise ValueError('"prompt" holds half of a surrogate pair; write the character itself')
    return Prompt(text, fields)


def _refuse_constant(name: str) -> None:
    raise ValueError(f"holds {name}, which is no JSON; write a number, or null")
