"""From a prompt file to a cache, with tiny text encoders: the embeddings are those of diffusers' own pipeline."""

import dataclasses
import json
import logging
import shutil
import sys

import ml_dtypes
import numpy as np
import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from safetensors.torch import load_file, save_file
from sd3_pipeline import CLIP_LENGTH, CLIP_PROJECTIONS, T5_WIDTH, write_tiny_pipeline

from jagg_jax.prompts.cache import PromptCache
from jagg_jax.prompts.sd3_folder import encoder_folders, encoders_digest
from jagg_jax.training.cli import main
from jagg_jax.training.encode_prompts import EncodeConfig, encode_prompts
from jagg_jax.training.errors import ConfigError, TrainingError

PROMPTS = ["a cat", "a dog and a cat", "cat " * 20, "zebras! on a blue sea"]
NEGATIVE, T5_LENGTH = "an ugly cat", 12


@pytest.fixture(scope="module", params=[True, False], ids=["with T5", "without T5"])
def pipeline(request, tmp_path_factory):
    return write_tiny_pipeline(tmp_path_factory.mktemp("pipeline") / "model", with_t5=request.param)


@pytest.fixture(scope="module")
def whole_pipeline(tmp_path_factory):
    return write_tiny_pipeline(tmp_path_factory.mktemp("pipeline") / "model")


@pytest.fixture
def settings(tmp_path, whole_pipeline):
    path = tmp_path / "prompts.txt"
    path.write_text("\n".join(PROMPTS))
    return EncodeConfig(
        prompts=str(path), model=str(whole_pipeline), output=str(tmp_path / "cache"), negative_prompt=NEGATIVE,
        max_length=T5_LENGTH, batch_size=3, device="cpu", dtype="float32",
    )  # fmt: skip


def reference(folder):
    """Prompt and negative embeddings, then their pooled ones, by diffusers."""
    without = {} if (folder / "text_encoder_3").exists() else {"text_encoder_3": None, "tokenizer_3": None}
    pipe = StableDiffusion3Pipeline.from_pretrained(folder, local_files_only=True, **without)
    logging.getLogger("diffusers").setLevel(logging.ERROR)  # it warns of the prompts that it cuts
    with torch.no_grad():
        arrays = pipe.encode_prompt(
            PROMPTS, None, None, negative_prompt=NEGATIVE, max_sequence_length=T5_LENGTH, device="cpu"
        )
    return [array.numpy() for array in arrays]


def test_the_cache_holds_what_the_pipeline_computes(pipeline, settings):
    cache = PromptCache.open(encode_prompts(dataclasses.replace(settings, model=str(pipeline))), model=pipeline)
    tokens, negative_tokens, pooled, negative_pooled = reference(pipeline)
    ours = cache.rows(range(4))
    assert ours.tokens.shape == (4, CLIP_LENGTH + T5_LENGTH, T5_WIDTH)
    assert np.abs(tokens[0] - tokens[1]).max() > 0.5
    np.testing.assert_allclose(ours.tokens, tokens, rtol=0, atol=2e-6)
    np.testing.assert_allclose(ours.pooled, pooled, rtol=0, atol=2e-6)
    np.testing.assert_allclose(cache.negative.tokens, negative_tokens[:1], rtol=0, atol=2e-6)
    np.testing.assert_allclose(cache.negative.pooled, negative_pooled[:1], rtol=0, atol=2e-6)
    assert (ours.tokens[:, :CLIP_LENGTH, sum(CLIP_PROJECTIONS) :] == 0).all()
    with_t5 = "text_encoder_3" in encoder_folders(pipeline)
    assert (ours.tokens[:, CLIP_LENGTH:] != 0).any() == with_t5
    # start, "a", "cat", end; then "a", "cat", end
    counts = cache.mask([0, 2]).reshape(2, -1)
    assert counts[:, :CLIP_LENGTH].sum(axis=1).tolist() == [4, CLIP_LENGTH]
    assert counts[:, CLIP_LENGTH:].sum(axis=1).tolist() == ([3, T5_LENGTH] if with_t5 else [0, 0])
    assert cache.mask([0])[0, :4].all()


def test_the_command_reports_what_it_cut_and_stores_bfloat16(settings, tmp_path, capsys):
    path = tmp_path / "prompts.jsonl"
    path.write_text("\n".join(json.dumps({"prompt": text, "words": [text[:5]]}) for text in PROMPTS))
    options = {"prompts": path, "model": settings.model, "output": tmp_path / "cache", "max-length": T5_LENGTH}
    options |= {"negative-prompt": NEGATIVE, "batch-size": 3, "device": "cpu", "dtype": "bfloat16"}
    assert (
        main(["encode_prompts", *(part for name, value in options.items() for part in (f"--{name}", str(value)))]) == 0
    )
    captured = capsys.readouterr()
    assert "4 prompts, 28 tokens of 32 elements in bfloat16" in captured.out
    assert "prompts cut to the 16 tokens that the clip part takes: 2" in captured.out
    assert "prompts cut to the 12 tokens that the t5 part takes: 2" in captured.out
    assert "prompt 3/5" in captured.err
    assert "prompt 5/5" in captured.err
    cache = PromptCache.open(tmp_path / "cache", prompt_file=path)
    assert cache.metadata[1] == {"words": ["a dog"]}
    assert cache.info.truncated == {"clip": 2, "t5": 2}
    exact = PromptCache.open(encode_prompts(dataclasses.replace(settings, output=str(tmp_path / "exact"))))
    for ours, theirs in zip(cache.rows([3, 1]), exact.rows([3, 1]), strict=True):
        np.testing.assert_array_equal(ours, theirs.astype(ml_dtypes.bfloat16))


def copied(whole_pipeline, tmp_path):
    return shutil.copytree(whole_pipeline, tmp_path / "copy")


def rewrite(path, change):
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def drop_a_tensor(folder):
    path = folder / "text_encoder_3" / "model.safetensors"
    tensors = load_file(path)
    del tensors[min(name for name in tensors if "wo" in name)]
    save_file(tensors, path, {"format": "pt"})


BROKEN = [
    (lambda model: (model / "model_index.json").unlink(), "model_index.json is missing; name the folder"),
    (lambda model: rewrite(model / "model_index.json", lambda c: c.update(_class_name="FluxPipeline")), "FluxPipeline"),
    (
        lambda model: rewrite(model / "model_index.json", lambda c: c.update(text_encoder_2=[None, None])),
        "has None as its text_encoder_2; only CLIPTextModelWithProjection is supported",
    ),
    (lambda model: shutil.rmtree(model / "tokenizer"), "has no folder tokenizer; download the whole pipeline"),
    (lambda model: shutil.rmtree(model / "text_encoder_3"), r"no folder text_encoder_3.*make it and its pair \[null"),
    (lambda model: (model / "text_encoder" / "model.safetensors").unlink(), r"text_encoder: can't be loaded \("),
    (lambda model: (model / "text_encoder" / "model.safetensors").write_bytes(b"damaged"), "text_encoder: can't be"),
    (drop_a_tensor, r"text_encoder_3: has no weights for encoder\.block\.0.* and 0 others; download it again"),
    (
        lambda model: rewrite(model / "tokenizer" / "tokenizer_config.json", lambda c: c.update(model_max_length=99)),
        "its tokenizer makes 99 tokens, its CLIP encoders take 16",
    ),
]


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_a_folder_that_is_no_whole_pipeline_is_refused(settings, whole_pipeline, tmp_path, damage, message):
    model = copied(whole_pipeline, tmp_path)
    damage(model)
    with pytest.raises(ConfigError, match=message) as caught:
        encode_prompts(dataclasses.replace(settings, model=str(model)))
    assert str(caught.value).startswith(f"--model {model}")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "cache").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": ""}, "--prompts : name a prompt file"),
        ({"model": ""}, "--model : name a pipeline's folder"),
        ({"output": ""}, "--output : name a folder to write"),
        ({"prompts": "none.txt"}, "--prompts none.txt: there is no such file"),
        ({"model": "nowhere"}, "--model nowhere: model_index.json is missing"),
        ({"max_length": 0}, "--max-length 0: must lie in 1 to 512"),
        ({"max_length": 513}, "--max-length 513: must lie in 1 to 512"),
        ({"batch_size": 0}, "--batch-size 0: must be at least 1"),
        ({"output": "."}, r"--output \.: exists; add --overwrite"),
        ({"output": "prompts.txt/cache"}, r"--output prompts\.txt/cache: can't be written \("),
        ({"output": ".", "overwrite": True}, r"--output \.: manifest\.json is missing"),
        *([] if torch.cuda.is_available() else [({"device": "cuda"}, "--device cuda: PyTorch finds no such device")]),
    ],
)
def test_bad_settings_are_refused_in_one_line(settings, tmp_path, monkeypatch, changes, message):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=message) as caught:
        encode_prompts(dataclasses.replace(settings, **changes))
    assert "\n" not in str(caught.value)
    assert [path.name for path in tmp_path.iterdir()] == ["prompts.txt"]


def test_what_is_not_installed_is_named(settings, monkeypatch):
    monkeypatch.delitem(sys.modules, "jagg_jax.prompts.encode", raising=False)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(ConfigError, match=r"encode_prompts: .*transformers.*pip install '\.\[encode\]'"):
        encode_prompts(settings)


def test_damaged_weights_end_the_command_without_a_cache(settings, whole_pipeline, tmp_path):
    model = copied(whole_pipeline, tmp_path)
    path = model / "text_encoder" / "model.safetensors"
    save_file({name: tensor * np.nan for name, tensor in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(TrainingError, match="prompts 1 to 3: embeddings are not finite"):
        encode_prompts(dataclasses.replace(settings, model=str(model)))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy", "prompts.txt"]


def test_other_encoders_make_a_cache_stale(settings, whole_pipeline, tmp_path):
    cache = encode_prompts(settings)
    model = copied(whole_pipeline, tmp_path)
    (model / "text_encoder" / "model.fp16.safetensors").write_bytes(b"a variant that isn't read")
    (model / "README.md").write_text("nor is this")
    PromptCache.open(cache, model=model)
    path = model / "text_encoder_2" / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(ValueError, match="was made with other text encoders than those in"):
        PromptCache.open(cache, model=model)


def test_the_digest_samples_large_files(whole_pipeline, tmp_path, monkeypatch):
    """Every part of a small file counts; of a large one, its size, its ends and what lies evenly between."""
    model = copied(whole_pipeline, tmp_path)
    path = model / "text_encoder" / "model.safetensors"
    monkeypatch.setattr("jagg_jax.prompts.sd3_folder.WHOLE_LIMIT", 1000)
    monkeypatch.setattr("jagg_jax.prompts.sd3_folder._SAMPLE_BYTES", 10)
    before, data = encoders_digest(model), path.read_bytes()
    for changed in (data[:-1] + b"?", b"?" + data[1:], data + b"?"):
        path.write_bytes(changed)
        assert encoders_digest(model) != before
    path.write_bytes(data)
    assert encoders_digest(model) == before
