import ast
import dataclasses
import inspect
import itertools
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import configs
from jagg_jax.training.config import TrainConfig, closest, option, resolve_weights, validate
from jagg_jax.training.errors import ConfigError

QUICKSTART = configs.load("quickstart")


def test_the_presets_are_valid_and_each_file_is_listed():
    validate(QUICKSTART)
    files = {path.stem for path in Path(configs.__file__).parent.glob("*.py")}
    assert files - {"__init__"} == configs.PRESETS.keys()


def test_every_field_is_explained():
    body = ast.parse(inspect.getsource(TrainConfig)).body[0].body
    explained = {
        field.target.id
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    assert explained == {field.name for field in dataclasses.fields(TrainConfig)}


WRONG = [
    ({"seed": -1}, "--seed -1: "),
    ({"seed": 2**32}, f"--seed {2**32}: "),
    ({"task": "digit"}, "did you mean 'digits'?"),
    ({"weights": ""}, "--weights '': "),
    ({"weights": "digts"}, "did you mean 'digits'?"),
    ({"weights": "nowhere/model.safetensors"}, "--weights nowhere/model.safetensors: there is no such file"),
    ({"updates": 0}, "--updates 0: "),
    ({"updates": 2.0}, "--updates 2.0: must be a whole number"),
    ({"updates": True}, "--updates True: must be a whole number"),
    ({"updates": None}, "--updates None: must be a whole number"),
    ({"batch_size": 0}, "--batch-size 0: "),
    ({"batch_size": 60}, "--num-generations 8: must divide --batch-size 60, e.g. 6"),
    ({"batch_size": 32}, "--micro-batch-size 64: must divide --batch-size 32, e.g. 32"),
    ({"batch_size": 9000, "micro_batch_size": 10}, "--batch-size 9000: makes 1125 prompts a rollout"),
    ({"num_generations": 1}, "--num-generations 1: must be at least 2"),
    ({"num_generations": 7}, "--num-generations 7: must divide --batch-size 64, e.g. 8"),
    ({"micro_batch_size": 0}, "--micro-batch-size 0: "),
    ({"updates_per_rollout": 0}, "--updates-per-rollout 0: "),
    ({"num_steps": 1}, "--num-steps 1: "),
    ({"train_steps": 0}, "--train-steps 0: "),
    ({"train_steps": 10}, "--train-steps 10: must lie in 1 to 9, or in -8 to -1"),
    ({"train_steps": -9}, "--train-steps -9: must lie in 1 to 9, or in -8 to -1"),
    ({"train_steps": 2.5}, "--train-steps 2.5: must be a whole number or a share"),
    ({"train_steps": True}, "--train-steps True: must be a whole number or a share"),
    ({"train_steps": None}, "--train-steps None: must be a whole number or a share"),
    ({"train_steps": "8"}, "--train-steps 8: must be a count such as 8 or -2, or a share up to 100%"),
    ({"train_steps": "half"}, "--train-steps half: must be a count such as 8 or -2, or a share up to 100%"),
    ({"train_steps": "%"}, "--train-steps %: must be a count such as 8 or -2, or a share up to 100%"),
    ({"train_steps": "nan%"}, "--train-steps nan%: must be a count such as 8 or -2, or a share up to 100%"),
    ({"train_steps": "0%"}, "--train-steps 0%: must be a count such as 8 or -2, or a share up to 100%"),
    ({"train_steps": "-20%"}, "--train-steps -20%: must be a count such as 8 or -2, or a share up to 100%"),
    ({"train_steps": "101%"}, "--train-steps 101%: must be a count such as 8 or -2, or a share up to 100%"),
    ({"train_steps": "5%"}, "--train-steps 5%: is less than one step: --num-steps 10 has 9"),
    ({"train_steps": "40%", "steps_per_group": 5}, "--steps-per-group 5: must be at most 4, the number of trained"),
    ({"train_window": "last"}, "--train-window last: must be one of first, random"),
    ({"train_window": "random", "train_steps": 9}, "--train-window random: has no room to move: --train-steps 9"),
    ({"train_window": "random", "train_steps": "100%"}, "--train-window random: has no room to move"),
    ({"hat_phase": "random"}, "--hat-phase random: has no effect with --plan jagg"),
    ({"hat_phase": "free", "plan": "hat"}, "--hat-phase free: must be one of fixed, random"),
    ({"eval_steps": 0}, "--eval-steps 0: "),
    ({"shift": 0.0}, "--shift 0.0: "),
    ({"noise_level": 0.0}, "--noise-level 0.0: "),
    ({"noise_level": math.nan}, "--noise-level nan: must be a finite number"),
    ({"noise_level": 1.5, "sampler": "cps"}, "--noise-level 1.5: must be at most 1"),
    ({"sampler": "ode"}, "--sampler ode: must be one of flow_sde, dance_sde, cps"),
    ({"guidance": -1.0}, "--guidance -1.0: "),
    ({"plan": "jag"}, "--plan jag: must be one of exact, jagg, hat, subset"),
    ({"steps_per_group": 0}, "--steps-per-group 0: must be at least 1"),
    ({"steps_per_group": 0, "plan": "exact"}, "--steps-per-group 0: must be at least 1"),
    ({"steps_per_group": 9}, "--steps-per-group 9: must be at most 8, the number of trained steps"),
    ({"steps_per_group": 1, "plan": "hat"}, "--steps-per-group 1: must be at least 2"),
    ({"jagg_frac": 1.5}, "--jagg-frac 1.5: must lie in 0 to 1"),
    ({"jagg_frac": -0.1}, "--jagg-frac -0.1: must lie in 0 to 1"),
    ({"alpha": "time"}, "--alpha time: must be one of sigma, index"),
    ({"subset_steps": 0}, "--subset-steps 0: "),
    ({"subset_steps": 9, "plan": "subset"}, "--subset-steps 9: must be at most 8, the number of trained steps"),
    ({"batch_anchors": 0}, "--batch-anchors 0: "),
    ({"rewards": {}}, "--rewards: name at least one of"),
    ({"rewards": {"ocr": 1.0}}, "--rewards ocr: there is no such reward"),
    ({"rewards": {"ocr_edit": 0.0}}, "--rewards ocr_edit=0: "),
    ({"rewards": {"ocr_edit": math.inf}}, "--rewards ocr_edit=inf: "),
    ({"eval_rewards": ()}, "--eval-rewards: name at least one of"),
    ({"eval_rewards": ("ocr_edits",)}, "did you mean 'ocr_edit'?"),
    ({"eval_rewards": ("ocr_edit", "ocr_edit")}, "--eval-rewards ocr_edit ocr_edit: name each reward once"),
    ({"reward_threads": 0}, "--reward-threads 0: "),
    ({"advantage_std": "all"}, "--advantage-std all: "),
    ({"advantage_clip": 0.0}, "--advantage-clip 0.0: "),
    ({"clip_low": 1.0}, "--clip-low 1.0: "),
    ({"clip_high": 0.0}, "--clip-high 0.0: "),
    ({"kl": "exact"}, "--kl-weight 0.0: must be above 0 with --kl exact"),
    ({"kl_weight": 0.1}, "--kl-weight 0.1: has no effect with --kl none"),
    ({"learning_rate": 0.0}, "--learning-rate 0.0: "),
    ({"learning_rate": math.inf}, "--learning-rate inf: must be a finite number"),
    ({"learning_rate": "fast"}, "--learning-rate fast: must be a finite number"),
    ({"warmup_updates": -1}, "--warmup-updates -1: "),
    ({"warmup_updates": 100, "schedule": "cosine"}, "--warmup-updates 100: must be below --updates 100"),
    ({"weight_decay": -1.0}, "--weight-decay -1.0: "),
    ({"beta1": 1.0}, "--beta1 1.0: "),
    ({"beta2": -0.1}, "--beta2 -0.1: "),
    ({"max_grad_norm": 0.0}, "--max-grad-norm 0.0: "),
    ({"ema_decay": 1.0}, "--ema-decay 1.0: "),
    ({"storage_dtype": "float16"}, "--storage-dtype float16: "),
    ({"remat": 1}, "--remat 1: must be one of none, dots, full"),
    ({"scan_layers": 1}, "--scan-layers 1: must be a bool"),
    ({"eval_every": -1}, "--eval-every -1: "),
    ({"eval_prompts": 0}, "--eval-prompts 0: "),
    ({"eval_prompts": 101}, "--eval-prompts 101: task digits has 100 held-out prompts"),
    ({"keep_checkpoints": 0}, "--keep-checkpoints 0: "),
    ({"max_skipped_updates": 0}, "--max-skipped-updates 0: "),
]


@pytest.mark.parametrize(("changes", "message"), WRONG, ids=[str(changes) for changes, _ in WRONG])
def test_a_value_that_can_not_be_used_is_named_in_one_line(changes, message):
    with pytest.raises(ConfigError) as caught:
        validate(dataclasses.replace(QUICKSTART, **changes))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


RIGHT = [
    {"train_steps": 9, "steps_per_group": 9},
    {"steps_per_group": 9, "plan": "exact"},
    {"train_steps": 3, "steps_per_group": 3, "num_steps": 4, "plan": "hat"},
    {"plan": "subset", "subset_steps": 8},
    {"train_steps": -5, "steps_per_group": 4},
    {"train_steps": "100%", "steps_per_group": 9},
    {"train_steps": -1, "train_window": "random", "plan": "hat", "hat_phase": "random"},
    {"num_steps": 2, "train_steps": 1, "steps_per_group": 1},
    {"jagg_frac": 0},
    {"kl": "exact", "kl_weight": 0.01},
    {"rewards": {"ocr_edit": 1, "jpeg_compressibility": -0.1}},
    {"eval_every": 0, "sample_every": 0, "checkpoint_every": 0},
    {"batch_anchors": 1, "reward_threads": 2},
    {"num_generations": 64, "batch_size": 64, "micro_batch_size": 1},
    {"updates": 1, "warmup_updates": 5},
]


@pytest.mark.parametrize("changes", RIGHT, ids=str)
def test_values_at_the_limits_are_taken(changes):
    validate(dataclasses.replace(QUICKSTART, **changes))


@pytest.mark.parametrize(
    ("train_steps", "num_steps", "resolved"),
    [(8, 10, 8), (9, 10, 9), (-2, 10, 7), (-8, 10, 1), ("50%", 11, 5), ("100%", 10, 9), ("12.5%", 9, 1), ("34%", 4, 1)],
)
def test_trained_steps_are_a_count_or_a_share(train_steps, num_steps, resolved):
    assert dataclasses.replace(QUICKSTART, train_steps=train_steps, num_steps=num_steps).num_train_steps == resolved


@given(batch_size=st.integers(2, 400), num_generations=st.integers(2, 400))
def test_the_suggested_number_of_generations_is_taken(batch_size, num_generations):
    config = dataclasses.replace(
        QUICKSTART, batch_size=batch_size, micro_batch_size=batch_size, num_generations=num_generations
    )
    try:
        validate(config)
    except ConfigError as error:
        assert batch_size % num_generations
        suggestion = int(str(error).rpartition("e.g. ")[2])
        validate(dataclasses.replace(config, num_generations=suggestion))
    else:
        assert batch_size % num_generations == 0


def test_weights_are_a_packaged_name_or_a_path(tmp_path):
    assert resolve_weights("digits").name == "digits.safetensors"
    path = tmp_path / "digits"
    path.write_bytes(b"")
    assert resolve_weights(str(path)) == path
    with pytest.raises(ConfigError, match="no such file"):
        resolve_weights("digits.safetensors")


def test_suggestions():
    assert closest("stepz", ["steps", "shift"]) == "; did you mean 'steps'?"
    assert closest("qqq", ["steps"]) == ""
    assert option("steps_per_group") == "--steps-per-group"
