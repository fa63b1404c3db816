"""The text encoders in the folder of a Stable Diffusion 3 or 3.5 pipeline, as diffusers lays it out."""

import hashlib
import json
import os
from pathlib import Path

WHOLE_LIMIT = 64 * 2**20  # bytes: digests cover larger files by samples
_SAMPLES, _SAMPLE_BYTES = 64, 2**20
# what each part is loaded as, by the beginning of its class's name in model_index.json
_PARTS = {
    "tokenizer": "CLIPTokenizer",
    "text_encoder": "CLIPTextModelWithProjection",
    "tokenizer_2": "CLIPTokenizer",
    "text_encoder_2": "CLIPTextModelWithProjection",
    "tokenizer_3": "T5Tokenizer",
    "text_encoder_3": "T5EncoderModel",
}
_T5_PARTS = ("tokenizer_3", "text_encoder_3")
_READ = ("*.json", "*.txt", "*.model", "model.safetensors", "model-*.safetensors")  # other variants are not read


def encoder_folders(model: str | os.PathLike) -> dict[str, Path]:
    """The folders of the tokenizers and text encoders that a pipeline uses, by their name in model_index.json.

    Returns:
        "tokenizer", "text_encoder", "tokenizer_2" and "text_encoder_2" (CLIP) and, unless the pipeline goes without
        T5, "tokenizer_3" and "text_encoder_3".

    Raises:
        ValueError: not the folder of such a pipeline, or a part of it is missing; names the folder and the fix.
    """
    model = Path(model)
    index = read_json(model / "model_index.json", "name the folder of a Stable Diffusion 3 pipeline")
    name = str(index.get("_class_name"))
    if not name.startswith("StableDiffusion3"):
        raise ValueError(f"{model}: is a {name}; name the folder of a StableDiffusion3Pipeline")
    folders = {}
    without_t5 = all(_class_name(index, part) is None for part in _T5_PARTS)
    for part, wanted in _PARTS.items():
        if without_t5 and part in _T5_PARTS:
            continue
        found = _class_name(index, part)
        if found is None or not found.startswith(wanted):
            raise ValueError(f"{model}: model_index.json has {found} as its {part}; only {wanted} is supported")
        if not (model / part).is_dir():
            none = "; to go without T5, make it and its pair [null, null] in model_index.json"
            fix = f"download the whole pipeline{none if part in _T5_PARTS else ''}"
            raise ValueError(f"{model}: has no folder {part}; {fix}")
        folders[part] = model / part
    return folders


def encoders_digest(model: str | os.PathLike) -> str:
    """A SHA-256 that changes with the text encoders of a pipeline, their tokenizers or their configurations.

    It covers names, sizes and contents of the files that encoding reads; of those above 64 MiB, 64 samples of 1 MiB,
    evenly spaced, so that no opening of a cache reads the 19 GB of T5-XXL: retraining changes every sample.

    Returns:
        64 hexadecimal digits.

    Raises:
        ValueError: as `encoder_folders`.
    """
    entries = []
    for part, folder in encoder_folders(model).items():
        names = {path.name for pattern in _READ for path in folder.glob(pattern) if ".fp16" not in path.name}
        entries += [[part, name, (folder / name).stat().st_size, sampled_sha256(folder / name)] for name in names]
    return hashlib.sha256(json.dumps(sorted(entries)).encode()).hexdigest()


def read_json(path: Path, fix: str) -> dict:
    """The object in a JSON file.

    Raises:
        ValueError: no such file or another content; the message ends with `fix`.
    """
    if not path.is_file():
        raise ValueError(f"{path.parent}: {path.name} is missing; {fix}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path.parent}: {path.name} is not valid JSON ({error}); {fix}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path.parent}: {path.name} holds no JSON object; {fix}")
    return content


def file_sha256(path: str | os.PathLike) -> str:
    """SHA-256 of a whole file, 64 hexadecimal digits."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _class_name(index: dict, part: str) -> str | None:
    """The class of a part, as ["transformers", "T5EncoderModel"] gives it; None where it's [null, null] or left out."""
    entry = index.get(part)
    return entry[1] if isinstance(entry, list) and len(entry) == 2 else None


def sampled_sha256(path: Path) -> str:
    """SHA-256 of a file; of one above 64 MiB, that of 64 samples of 1 MiB, evenly spaced."""
    size = path.stat().st_size
    if size <= WHOLE_LIMIT:
        return file_sha256(path)
    digest = hashlib.sha256()
    with path.open("rb") as file:
        for sample in range(_SAMPLES):
            file.seek(sample * (size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()
