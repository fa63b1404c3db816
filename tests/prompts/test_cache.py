"""The cache on disk, without any encoder: what is written is read, in parts; what is damaged is refused."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tracemalloc

import ml_dtypes
import numpy as np
import pytest

from jagg_jax.prompts.cache import FILES, PromptCache
from jagg_jax.prompts.cache_writer import CacheInfo, EncodedPrompts, write_cache
from jagg_jax.prompts.prompt_file import Prompt
from jagg_jax.prompts.sd3_folder import file_sha256

INFO = CacheInfo(
    num_prompts=5, length=4, joint_attention_dim=3, pooled_projection_dim=2, dtype="float32", negative_prompt="ugly",
    truncated={"clip": 1, "t5": 0}, prompt_file_sha256="0" * 64, encoders_digest="1" * 64,
)  # fmt: skip
PROMPTS = [Prompt(f"prompt {number}", {"number": number}) for number in range(5)]


def embeddings(info=INFO, seed=0):
    """All rows, the negative prompt's last."""
    rng = np.random.default_rng(seed)
    tokens = rng.normal(size=(info.num_prompts + 1, info.length, info.joint_attention_dim)).astype(np.float32)
    pooled = rng.normal(size=(info.num_prompts + 1, info.pooled_projection_dim)).astype(np.float32)
    return EncodedPrompts(tokens, pooled, rng.random(tokens.shape[:2]) < 0.5)


def in_batches(encoded, size=4):
    for start in range(0, len(encoded.tokens), size):
        yield EncodedPrompts(*(array[start : start + size] for array in encoded))


def make(folder, info=INFO, **options):
    write_cache(folder, PROMPTS, info, in_batches(embeddings(info)), **options)
    return folder


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_written_is_read(tmp_path, dtype):
    info = dataclasses.replace(INFO, dtype=dtype)
    cache = PromptCache.open(make(tmp_path / "new" / "cache", info), verify=True)
    tokens, pooled, mask = embeddings(info)
    number = {"float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
    for chosen in ([0, 1, 2, 3, 4], [3], [4, 0, 0], np.array([2, 1]), []):
        rows, places = cache.rows(chosen), np.asarray(chosen, int)
        assert rows.tokens.dtype == rows.pooled.dtype == number
        np.testing.assert_array_equal(rows.tokens, tokens[places].astype(number))
        np.testing.assert_array_equal(rows.pooled, pooled[places].astype(number))
        np.testing.assert_array_equal(cache.mask(chosen), mask[places])
    np.testing.assert_array_equal(cache.negative.tokens, tokens[5:].astype(number))
    np.testing.assert_array_equal(cache.negative.pooled, pooled[5:].astype(number))
    assert len(cache) == 5
    assert cache.prompts == [f"prompt {number}" for number in range(5)]
    assert cache.metadata[3] == {"number": 3}
    assert cache.info == info
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["cache"]


@pytest.mark.parametrize("wrong", [-1, 5])
def test_rows_beyond_the_prompts_are_refused(tmp_path, wrong):
    cache = PromptCache.open(make(tmp_path / "cache"))
    for read in (cache.rows, cache.mask):
        with pytest.raises(ValueError, match=f"indices has {wrong}: the cache has prompts 0 to 4"):
            read([0, wrong])


def test_rows_read_no_more_than_themselves(tmp_path):
    """Writing holds one batch in memory, reading the rows asked for: 4 MiB of 24."""
    info = dataclasses.replace(INFO, length=1024, joint_attention_dim=1024)

    def one_at_a_time():
        for row in range(6):
            tokens = np.full((1, 1024, 1024), row, np.float32)
            yield EncodedPrompts(tokens, np.zeros((1, 2), np.float32), np.ones((1, 1024), np.bool_))

    def peak(action):
        tracemalloc.start()
        try:
            result = action()
            return result, tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()

    _, writing = peak(lambda: write_cache(tmp_path / "cache", PROMPTS, info, one_at_a_time()))
    cache, opening = peak(lambda: PromptCache.open(tmp_path / "cache"))
    rows, reading = peak(lambda: cache.rows([3]))
    assert (rows.tokens == 3).all()
    assert (tmp_path / "cache" / "tokens.npy").stat().st_size > 24 * 2**20
    assert writing < 10 * 2**20
    assert opening < 2 * 2**20
    assert 4 * 2**20 <= reading < 5 * 2**20


def flip(path):
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)


def change_manifest(folder, **changes):
    path = folder / "manifest.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


DAMAGE = [
    (lambda folder: (folder / "manifest.json").unlink(), "manifest.json is missing.*this is no prompt cache"),
    (lambda folder: (folder / "manifest.json").write_text("{"), "manifest.json is not valid JSON"),
    (lambda folder: (folder / "manifest.json").write_text("[]"), "manifest.json holds no JSON object"),
    (lambda folder: (folder / "manifest.json").write_text("{}"), "is no prompt cache"),
    (lambda folder: change_manifest(folder, version=2), "is of version 2, this program reads version 1"),
    (lambda folder: change_manifest(folder, strange=1), "manifest.json is damaged"),
    (lambda folder: change_manifest(folder, dtype="float64"), "manifest.json is damaged"),
    (lambda folder: change_manifest(folder, length="4"), "manifest.json is damaged, length is '4'"),
    (lambda folder: change_manifest(folder, files={name: {} for name in FILES}), "manifest.json is damaged"),
    (lambda folder: change_manifest(folder, length=5), r"tokens.npy is float32 \(6, 4, 3\) instead of <f4 \(6, 5, 3\)"),
    (lambda folder: (folder / "pooled.npy").unlink(), "pooled.npy is missing"),
    (lambda folder: (folder / "prompts.jsonl").unlink(), "prompts.jsonl is missing"),
    (lambda folder: os.truncate(folder / "tokens.npy", 300), "tokens.npy has 300 bytes instead of 416"),
    (lambda folder: flip(folder / "tokens.npy"), "tokens.npy is damaged"),
    (lambda folder: flip(folder / "prompts.jsonl"), "prompts.jsonl is damaged"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE)
def test_what_is_no_whole_cache_is_refused_in_one_line(tmp_path, damage, message):
    folder = make(tmp_path / "cache")
    damage(folder)
    with pytest.raises(ValueError, match=message) as caught:
        PromptCache.open(folder)
    assert str(caught.value).startswith(str(folder))
    assert "\n" not in str(caught.value)


def test_large_files_are_hashed_on_request(tmp_path, monkeypatch):
    folder = make(tmp_path / "cache")
    flip(folder / "tokens.npy")
    monkeypatch.setattr("jagg_jax.prompts.cache.WHOLE_LIMIT", 400)  # bytes, below those of tokens.npy alone
    PromptCache.open(folder)
    with pytest.raises(ValueError, match=r"tokens\.npy is damaged"):
        PromptCache.open(folder, verify=True)


def test_a_cache_of_other_sizes_or_prompts_than_wanted_is_refused(tmp_path):
    source = tmp_path / "p.txt"
    source.write_text("a cat\n")
    folder = make(tmp_path / "cache", dataclasses.replace(INFO, prompt_file_sha256=file_sha256(source)))
    PromptCache.open(folder, joint_attention_dim=3, pooled_projection_dim=2, prompt_file=source)
    with pytest.raises(ValueError, match="joint_attention_dim is 3, the model takes 4096"):
        PromptCache.open(folder, joint_attention_dim=4096)
    with pytest.raises(ValueError, match="pooled_projection_dim is 2, the model takes 2048"):
        PromptCache.open(folder, pooled_projection_dim=2048)
    with pytest.raises(ValueError, match=r"gone\.txt: there is no such file"):
        PromptCache.open(folder, prompt_file=tmp_path / "gone.txt")
    source.write_text("a dog\n")
    with pytest.raises(ValueError, match=r"p\.txt is not the prompt file it was made of.*--overwrite"):
        PromptCache.open(folder, prompt_file=source)


def test_a_cache_is_replaced_only_where_that_is_asked_for(tmp_path):
    folder = make(tmp_path / "cache")
    with pytest.raises(ValueError, match="exists; add --overwrite"):
        make(folder)
    make(folder, dataclasses.replace(INFO, negative_prompt="new"), overwrite=True)
    assert PromptCache.open(folder).info.negative_prompt == "new"
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "one.png").write_bytes(b"mine")
    with pytest.raises(ValueError, match="this is no prompt cache"):
        make(tmp_path / "photos", overwrite=True)
    assert (tmp_path / "photos" / "one.png").read_bytes() == b"mine"


@pytest.mark.parametrize(
    ("batches", "message"),
    [
        (
            lambda: in_batches(EncodedPrompts(*(array[:5] for array in embeddings()))),
            "5 rows were encoded instead of 6",
        ),
        (lambda: in_batches(embeddings(dataclasses.replace(INFO, length=9))), r"instead of float32 \(4, 3\)"),
        (lambda: in_batches(embeddings(dataclasses.replace(INFO, num_prompts=9))), "10 rows were encoded instead of 6"),
    ],
)
def test_a_failure_while_writing_leaves_what_was_there(tmp_path, batches, message):
    folder = make(tmp_path / "cache")
    for output in (folder, tmp_path / "other"):
        with pytest.raises(ValueError, match=message):
            write_cache(output, PROMPTS, INFO, batches(), overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]
    np.testing.assert_array_equal(PromptCache.open(folder).rows([0, 4]).tokens, embeddings().tokens[[0, 4]])


def test_a_cache_made_meanwhile_by_another_process_is_kept(tmp_path):
    def batches():
        make(tmp_path / "cache")
        yield from in_batches(EncodedPrompts(*(2 * array for array in embeddings()[:2]), embeddings().mask))

    with pytest.raises(OSError, match="not empty"):
        write_cache(tmp_path / "cache", PROMPTS, INFO, batches())
    np.testing.assert_array_equal(PromptCache.open(tmp_path / "cache").rows([1]).tokens, embeddings().tokens[[1]])
    assert [path.name for path in tmp_path.iterdir()] == ["cache"]


def test_a_full_disk_is_noticed_before_anything_is_encoded(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    with pytest.raises(ValueError, match=r"has 0\.0 GB free, the cache needs 0\.0 GB"):
        write_cache(tmp_path / "cache", PROMPTS, INFO, iter(()))
    assert not list(tmp_path.iterdir())


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from test_cache import INFO, PROMPTS, embeddings, in_batches
from jagg_jax.prompts.cache_writer import write_cache

def batches():
    yield next(in_batches(embeddings()))
    os.kill(os.getpid(), signal.SIGKILL)

write_cache("cache", PROMPTS, INFO, batches())
"""


def test_a_process_killed_while_writing_leaves_nothing_that_opens(tmp_path, request):
    command = [sys.executable, "-c", KILLED, str(request.path.parent)]
    path = {"PYTHONPATH": str(request.config.rootpath), "JAX_PLATFORMS": "cpu"}
    finished = subprocess.run(command, cwd=tmp_path, env=path, capture_output=True, timeout=120, check=False)
    assert finished.returncode == -9, finished.stderr
    (left,) = tmp_path.iterdir()
    assert left.name.startswith(".cache.")
    for folder in (left, tmp_path / "cache"):
        with pytest.raises(ValueError, match=r"manifest\.json is missing"):
            PromptCache.open(folder)
    assert PromptCache.open(make(tmp_path / "cache"), verify=True).prompts[0] == "prompt 0"
