"""The same numbers on any number of devices, and programs in which no device holds a stack of parameters whole."""

import dataclasses
import itertools
import math
import re
from typing import NamedTuple

import jax
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from jagg_jax.models import TENSOR_RULES, DiT, as_function, load_model, model_metadata, save_weights
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.draws import backward_plan
from jagg_jax.training.dry_run import trace
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.experiment import Experiment, build_experiment
from jagg_jax.training.sharding import gather_rows, local_rows, make_mesh, parameter_spec, put_rows

# every mesh of 2 and of 8 devices that two attention heads allow; what the gradient must not depend on goes round
MESHES = {
    (2, 1, 1): {"micro_batch_size": 2},
    (1, 2, 1): {"micro_batch_size": 16},
    (1, 1, 2): {"micro_batch_size": 1},
    (8, 1, 1): {"micro_batch_size": 8},
    (4, 2, 1): {"micro_batch_size": 16},
    (2, 4, 1): {"micro_batch_size": 8, "batch_anchors": 2},
    (1, 8, 1): {"micro_batch_size": 16},
    (4, 1, 2): {"micro_batch_size": 4},
    (2, 2, 2): {"micro_batch_size": 8, "batch_anchors": 1},
    (1, 4, 2): {"micro_batch_size": 4},
}
# five trained steps, of which each of these keeps three: one program serves them all
PLANS = {"jagg": {"steps_per_group": 4}, "hat": {"steps_per_group": 3}, "subset": {"subset_steps": 3}}


@pytest.fixture(scope="module")
def settings(tiny) -> dict:
    """A first moment that is the gradient itself: no decay, no clipping."""
    changes = {"micro_batch_size": 16, "num_steps": 6, "train_steps": 5, "fsdp_min_size": 1}
    return tiny | changes | {"beta1": 0.0, "max_grad_norm": 1e9}


class Rollout(NamedTuple):
    """An experiment on a mesh, the samples of its first rollout, and what its updates take of it."""

    experiment: Experiment
    samples: np.ndarray
    inputs: tuple

    def update(self, plan, use_cached=True, state=None):
        """The state after an optimiser update, by default the first one, and its metrics."""
        transitions, advantages, conditions, reference = self.inputs
        experiment = self.experiment
        state = experiment.initial_state() if state is None else state
        fixed = (experiment.frozen, transitions, advantages, conditions)
        state, metrics = experiment.update(state, *fixed, plan, reference, use_cached)
        return state, jax.device_get(metrics)


def roll_out(settings: dict, mesh: tuple[int, int, int], **changes) -> Rollout:
    """The first rollout on a mesh, with rewards that no reward model gave."""
    config = TrainConfig(**settings | dict(zip(("data", "fsdp", "tensor"), mesh, strict=True)) | changes)
    experiment = build_experiment(config, jax.devices()[: math.prod(mesh)])
    params, conditions, reference = experiment.initial_params, experiment.conditions(1), None
    if config.kl != "none":  # elsewhere than the trained parameters, where the penalty has no gradient
        reference = jax.tree.map(lambda array: 0.9 * array, params)
    samples, transitions, reference_velocities = experiment.roll_out(params, reference, np.int32(1), conditions)
    rewards = np.sin(np.arange(config.batch_size)).astype(np.float32)
    advantages, *_ = experiment.advantages(rewards, transitions, reference_velocities)
    return Rollout(experiment, np.asarray(samples), (transitions, advantages, conditions, reference_velocities))


def plan_of(experiment: Experiment, plan: str):
    return backward_plan(dataclasses.replace(experiment.config, plan=plan, **PLANS[plan]), 1)


def gradient(state) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(state.opt_state[1][0].mu)])


def assert_same_gradient(ours, theirs) -> None:
    """States after the same update: their gradients agree to 1e-5 of the whole gradient's norm."""
    (state, metrics), (expected_state, expected) = ours, theirs
    difference = np.linalg.norm(gradient(state) - gradient(expected_state))
    assert difference <= 1e-5 * np.linalg.norm(gradient(expected_state))
    for name in ("loss", "kl", "grad_norm"):
        np.testing.assert_allclose(metrics[name], expected[name], rtol=1e-5, atol=1e-6, err_msg=name)


def places(state):
    return jax.tree.map(lambda leaf: leaf.sharding, state)


@pytest.fixture(scope="module")
def one_device(settings) -> dict:
    """The rollout on one device in one micro-batch, and the update after it by each of `PLANS`."""
    rollout = roll_out(settings, (1, 1, 1))
    return {"rollout": rollout} | {plan: rollout.update(plan_of(rollout.experiment, plan)) for plan in PLANS}


def test_every_mesh_that_the_heads_allow_is_tried(settings):
    heads = load_model(settings["weights"]).config.num_heads
    meshes = itertools.product(range(1, 9), repeat=3)
    assert set(MESHES) == {mesh for mesh in meshes if math.prod(mesh) in (2, 8) and heads % mesh[2] == 0}


@pytest.mark.parametrize("mesh", MESHES)
def test_every_mesh_gives_the_samples_and_the_gradient_of_one_device(settings, one_device, mesh):
    rollout = roll_out(settings, mesh, **MESHES[mesh])
    noise, expected_noise = (np.asarray(r.inputs[0].latents[0]) for r in (rollout, one_device["rollout"]))
    np.testing.assert_array_equal(noise, expected_noise)  # bit for bit, as no model has touched it
    np.testing.assert_allclose(rollout.samples, one_device["rollout"].samples, rtol=1e-5, atol=1e-5)
    for plan in PLANS:
        state, metrics = rollout.update(plan_of(rollout.experiment, plan))
        assert metrics["ratio_max_deviation"] == 0.0
        assert_same_gradient((state, metrics), one_device[plan])
        assert places(state) == places(rollout.experiment.initial_state())


def test_exact_gradients_and_the_penalty_on_two_and_eight_devices(settings):
    changes = {"plan": "exact", "kl": "exact", "kl_weight": 0.1}
    rollouts = [roll_out(settings, mesh, **changes) for mesh in ((1, 1, 1), (1, 2, 1), (2, 2, 2))]
    expected, *others = [rollout.update(rollout.experiment.plan(1)) for rollout in rollouts]
    assert expected[1]["kl"] > 0.0
    for other in others:
        assert_same_gradient(other, expected)


def test_a_second_update_recomputes_alike_on_two_and_eight_devices(settings):
    """From the same state: Adam would have made an element's sign of what its gradient's rounding was."""
    first, *others = (
        roll_out(settings, mesh, plan="jagg", updates_per_rollout=2) for mesh in ((1, 1, 1), (2, 1, 1), (2, 2, 2))
    )
    state = jax.device_get(first.update(first.experiment.plan(1, 0))[0])

    def second(rollout):
        placed = jax.tree.map(jax.device_put, state, places(rollout.experiment.initial_state()))
        return rollout.update(rollout.experiment.plan(1, 1), use_cached=False, state=placed)

    expected = second(first)
    assert expected[1]["ratio_max_deviation"] > 0.0
    for other in others:
        assert_same_gradient(second(other), expected)


def test_a_groups_samples_may_span_devices(settings):
    """All 16 samples are of one prompt, two on each of eight devices; their mean reward is the baseline of all."""
    groups = [roll_out(settings | {"num_generations": 16}, mesh) for mesh in ((1, 1, 1), (8, 1, 1))]
    np.testing.assert_allclose(groups[1].samples, groups[0].samples, rtol=1e-5, atol=1e-5)
    rewards = np.sin(np.arange(16))
    for group in groups:
        advantages = group.inputs[1]
        np.testing.assert_allclose(advantages, (rewards - rewards.mean()) / rewards.std(), rtol=1e-3, atol=1e-5)
    assert len({str(shard.index) for shard in advantages.addressable_shards}) == 8


@pytest.fixture(scope="module")
def deep(tiny_weights, tmp_path_factory) -> str:
    """Three blocks, so that their stack has a shape that nothing else has."""
    config = dataclasses.replace(load_model(tiny_weights).config, depth=3)
    path = tmp_path_factory.mktemp("deep") / "deep.safetensors"
    save_weights(path, as_function(DiT(config, rngs=nnx.Rngs(0)))[1], model_metadata(config, "digits"))
    return str(path)


def test_no_device_ever_holds_a_stack_of_parameters_whole(settings, deep):
    """No buffer of the compiled programs has a stack's shape: of parameters, gradients, moments or averages."""
    changes = {"weights": deep, "scan_layers": True, "data": 1, "fsdp": 8, "plan": "jagg"}
    experiment = build_experiment(TrainConfig(**settings | changes))
    state = experiment.initial_state()
    stacks = {leaf.shape for leaf in jax.tree.leaves(state.params["blocks"]) if leaf.ndim == 3}
    assert len(stacks) == 5
    for name, program in trace(experiment).items():
        compiled = program.lower().compile()
        buffers = {tuple(map(int, sizes.split(","))) for sizes in re.findall(r"f32\[([\d,]+)\]", compiled.as_text())}
        assert not stacks & buffers, name
        if name == "first update":
            assert compiled.output_shardings[0] == compiled.input_shardings[0][0] == places(state)
            # the donated state becomes the new one, in place
            text = compiled.as_text()
            assert text.count("may-alias") + text.count("must-alias") >= len(jax.tree.leaves(state))


def test_parameters_moments_and_averages_are_split_alike(settings):
    experiment = build_experiment(TrainConfig(**settings | {"data": 2, "fsdp": 2, "tensor": 2}))
    state = experiment.initial_state()
    for tree in (state.params, state.ema_params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        kernel = tree["blocks"]["attention"]["qkv"]["kernel"]
        assert kernel.sharding.spec == PartitionSpec(None, "fsdp", "tensor")
        assert kernel.addressable_shards[0].data.size == kernel.size // 4
    assert state.updates.sharding.is_fully_replicated


def test_specs():
    mesh = make_mesh(2, 2, 2)
    spec = lambda name, shape, size=1: parameter_spec(name, shape, mesh, TENSOR_RULES, size)  # noqa: E731
    assert spec("blocks.mlp_in.kernel", (64, 32, 128)) == PartitionSpec(None, "fsdp", "tensor")
    assert spec("blocks.mlp_out.kernel", (2, 128, 32)) == PartitionSpec(None, "tensor", "fsdp")
    assert spec("blocks.mlp_in.bias", (64, 32)) == PartitionSpec(None, "tensor")
    assert spec("blocks.attention.out.lora_a", (2, 32, 4)) == PartitionSpec(None, "tensor", "fsdp")
    assert spec("patch_in.kernel", (3, 8)) == PartitionSpec(None, "fsdp")
    assert spec("patch_in.kernel", (3, 8), 1000) == PartitionSpec(None, None)
    assert spec("patch_in.kernel", (3, 5)) == PartitionSpec(None, None)
    with pytest.raises(ValueError, match=r"mlp_in.*axis -1.*tensor 2"):
        spec("blocks.mlp_in.kernel", (1, 32, 3))


def test_meshes_that_fit_nothing_are_refused_before_anything_is_compiled(tiny):
    with pytest.raises(ConfigError, match="does not fit 8 devices"):
        build_experiment(TrainConfig(**tiny, data=3))
    with pytest.raises(ConfigError, match="at most one of them -1"):
        build_experiment(TrainConfig(**tiny, data=-1, fsdp=-1))
    with pytest.raises(ConfigError, match="--micro-batch-size 4: must be a multiple of data x fsdp, which is 8"):
        build_experiment(TrainConfig(**tiny | {"micro_batch_size": 4}))
    with pytest.raises(ConfigError, match="tensor 8"):
        build_experiment(TrainConfig(**tiny, data=1, tensor=8))


def test_local_rows_and_gathering_put_a_batch_back_together():
    mesh = make_mesh(2, 2, 2)
    values = np.arange(24.0, dtype=np.float32).reshape(8, 3)
    asked = []

    def read(rows):
        asked.append(rows.tolist())
        return values[rows]

    array = put_rows(read, 8, mesh)
    assert asked == [list(range(8))]
    assert array.sharding.spec == PartitionSpec(("data", "fsdp"))
    rows, local = local_rows(array)
    assert rows.tolist() == list(range(8))
    np.testing.assert_array_equal(gather_rows(rows, local, 8), values)
