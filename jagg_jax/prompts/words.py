"""Printed words and codes of 3 or 4 characters in several fonts, one slot of 24 x 16 pixels a character.

The fonts lie inside packages: DejaVu, STIX and Computer Modern in matplotlib, Aileron in Pillow. 0 and 1 are left out
of the alphabet, which reads like o and l.
"""

import dataclasses
import functools
import hashlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from jagg_jax.prompts.task import Split, Task, check_split, split_prompts

ALPHABET = "abcdefghijklmnopqrstuvwxyz23456789"
HEIGHT, SLOT = 24, 16  # pixels, of one character
_BASELINE = 18  # pixels from the top
_SIZES = (17, 18, 19, 20)  # pixels an em
_FONTS = (
    "DejaVuSans",
    "DejaVuSans-Bold",
    "DejaVuSansMono",
    "DejaVuSansMono-Bold",
    "DejaVuSerif",
    "DejaVuSerif-Bold",
    "STIXGeneral",
    "cmss10",
)
_HELD_OUT_FONT = "Aileron"
_NUM_CODES = 600

_WORD_LIST = """
    able acid arm army art aunt away axe baby back bag bake ball band bank bark bat bath bay beam bean bear bed bee beef
    bell belt bike bill bird bite blue boat body bolt bone book boot bowl box boy bus bush busy cafe cage cake calf call
    calm camp can cap car card cart cat cave chin city clay club coal coat code coin cold cook cool cord cork corn cow
    crab crew crow cube cup dark dawn day deep deer desk dice dish dog doll door dove down draw drum dry duck dust ear
    east easy egg elm eye face fact fall farm fast fig film fire fish five flag flat flow fly fog fold food foot fork
    four fox free frog fuel full game gate gift girl glad glow glue goal goat gold golf good gray grid hair half hall
    hand harp hat hawk head heat herb hero high hill home hook hope horn hour huge ice idea inch ink iron item ivy jade
    jam jar jaw jazz jeep joke jump jury kelp key kid kind king kite knee knot lake lamb lamp land lane lava leaf left
    lens lime line lion list loaf lock loft log long loud luck lung mail map mask maze meal milk mill mind mint mist
    moon moss moth much nail name navy neck nest net news nine noon nose note nut oak oat oil one open oven owl pack
    page palm park path pea pear pen pet pie pig pine pink pipe plum poem pond pony pool port pot quay quiz rail rain
    rare red rice ride ring road rock roof rose ruby rug sad safe sail salt sand seal seed ship shoe silk sing six skin
    sky slow snow soap sock soft song soup star stem sun swan tail tall tank tax tea team ten tent tide tile time toad
    toe tool tour town toy tree tuba tube two vase vein very vest vine void wall warm wasp wave wax way week well west
    whey wig wind wine wing wolf wood wool year yoga yolk zero zinc zip zone zoo
"""
WORDS = tuple(_WORD_LIST.split())


@dataclasses.dataclass(frozen=True)
class PrintedWords(Task):
    """Common English words, and codes that use the whole alphabet; `num_eval` of both together kept for evaluation."""

    num_eval: int

    def prompts(self, split: Split) -> tuple[str, ...]:
        """Return the words and codes of a split."""
        check_split(split)
        return split_prompts({*WORDS, *_codes()}, self.num_eval)[split]

    def render(self, rng: np.random.Generator, prompts: Sequence[str], split: Split = "train") -> np.ndarray:
        """Print each prompt in a random font and size; "eval" prints in a font that "train" does not have."""
        tokens = self.encode(prompts)
        glyphs = glyph_images(split)
        variants = rng.integers(len(glyphs), size=(len(prompts), 1))
        slots = glyphs[variants, tokens].astype(np.float32) / np.float32(255)
        return slots.transpose(0, 2, 1, 3).reshape(len(prompts), *self.image_shape)


def make_word_task(name: str, num_eval: int) -> PrintedWords:
    """Return the task of words and codes of up to 4 characters: 24 pixels high, 64 wide."""
    return PrintedWords(
        name=name,
        alphabet=ALPHABET,
        image_shape=(HEIGHT, 4 * SLOT, 1),
        prompt_length=4,
        shortest_prompt=3,
        num_eval=num_eval,
    )


@functools.lru_cache(maxsize=2)
def glyph_images(split: Split) -> np.ndarray:
    """Return every character in every font and size, uint8 [variants, 35, 24, 16]; the first character is empty.

    Raises:
        ValueError: matplotlib is not installed, or the split is unknown.
    """
    check_split(split)
    fonts = _FONTS if split == "train" else (_HELD_OUT_FONT,)
    variants = [_load_font(name, size) for name in fonts for size in _SIZES]
    images = np.stack([[_draw(font, character) for character in " " + ALPHABET] for font in variants])
    images.setflags(write=False)  # the cache hands the same array to every caller
    return images


def _codes() -> list[str]:
    """Return strings of 4 characters that look random, the same everywhere: they come from SHA-256."""
    digests = [hashlib.sha256(f"code {number}".encode()).digest() for number in range(_NUM_CODES)]
    return ["".join(ALPHABET[byte % len(ALPHABET)] for byte in digest[:4]) for digest in digests]


def _load_font(name: str, size: int) -> ImageFont.FreeTypeFont:
    if name == _HELD_OUT_FONT:
        return ImageFont.load_default(size)
    spec = importlib.util.find_spec("matplotlib")
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("package matplotlib is not installed, it carries the fonts: pip install 'matplotlib>=3.9'")
    return ImageFont.truetype(Path(spec.submodule_search_locations[0]) / f"mpl-data/fonts/ttf/{name}.ttf", size)


def _draw(font: ImageFont.FreeTypeFont, character: str) -> np.ndarray:
    """Draw a character in the middle of its slot, squeezed where it is wider: uint8 [24, 16]."""
    left, _, right, _ = font.getbbox(character, anchor="ls")
    width = max(int(right - left), 1)
    glyph = Image.new("L", (width, HEIGHT))
    ImageDraw.Draw(glyph).text((-left, _BASELINE), character, fill=255, font=font, anchor="ls")
    fitted = glyph.resize((min(width, SLOT), HEIGHT), Image.Resampling.BILINEAR)
    slot = Image.new("L", (SLOT, HEIGHT))
    slot.paste(fitted, ((SLOT - fitted.width) // 2, 0))
    return np.asarray(slot)
