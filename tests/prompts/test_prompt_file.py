import json

import pytest

from jagg_jax.prompts.prompt_file import Prompt, read_prompts


def written(folder, name, content):
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_a_text_file_has_a_prompt_a_line(tmp_path):
    path = written(tmp_path, "p.txt", "\ufeffa cat\r\n\n  ein Hündchen \n\t\na cat\rthe last, with\u2028a separator")
    texts = ["a cat", "ein Hündchen", "a cat", "the last, with\u2028a separator"]
    assert read_prompts(path) == [Prompt(text, {}) for text in texts]


def test_objects_keep_what_they_say_besides(tmp_path):
    lines = [
        {"prompt": " a sign that says 'GRPO'", "words": ["GRPO"], "tag": {"n": 1.5, "x": None}},
        {"prompt": "日本"},
    ]
    path = written(tmp_path, "p.jsonl", "\n\n".join(map(json.dumps, lines)))
    first, second = read_prompts(path)
    assert first == (" a sign that says 'GRPO'", {"words": ["GRPO"], "tag": {"n": 1.5, "x": None}})
    assert second == ("日本", {})


WRONG = [
    ("p.csv", "a cat", "is no prompt file; name a .txt"),
    ("p.txt", "", "holds no prompt; write one a line"),
    ("p.txt", "\n \n", "holds no prompt; write one a line"),
    ("p.txt", b"a cat\nGr\xfc\xdfe\n", "line 2: is not UTF-8"),
    ("p.jsonl", "\n", "holds no prompt"),
    ("p.jsonl", '{"prompt": "a"}\n\n{"prompt": "b"', "line 3: is not valid JSON"),
    ("p.jsonl", '["a cat"]', "line 1: is no JSON object"),
    ("p.jsonl", '{"text": "a cat"}', 'line 1: has no "prompt"; write an object such as {"prompt": "a cat"}'),
    ("p.jsonl", '{"prompt": 7}', 'line 1: "prompt" is 7; write a text'),
    ("p.jsonl", '{"prompt": " "}', 'line 1: "prompt" is " "; write a text'),
    ("p.jsonl", '{"prompt": "\\ud83d"}', "line 1: \"prompt\" holds half of a surrogate pair"),
    ("p.jsonl", '{"prompt": "a", "score": NaN}', "line 1: holds NaN, which is no JSON"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "content", "message"), WRONG)
def test_an_error_names_the_file_the_line_and_the_fix(tmp_path, name, content, message):
    path = written(tmp_path, name, content)
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        read_prompts(path)
    assert str(caught.value).startswith(str(path))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no\.txt: there is no such file"):
        read_prompts(tmp_path / "no.txt")
