"""The same numbers on any number of devices: placements, independence, and a batch that spans the mesh."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from jagg_jax.models import TENSOR_RULES
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.errors import ConfigError
from jagg_jax.training.experiment import build_experiment
from jagg_jax.training.sharding import gather_rows, local_rows, make_mesh, parameter_spec

MESHES = [(1, 2, 1), (1, 1, 2), (8, 1, 1), (1, 8, 1), (2, 2, 2)]


def one_update(settings: dict, mesh: tuple[int, int, int], **changes):
    """Samples, first moments (the clipped gradient, scaled) and metrics of the first update on a mesh."""
    data, fsdp, tensor = mesh
    config = TrainConfig(**settings | {"data": data, "fsdp": fsdp, "tensor": tensor, "fsdp_min_size": 1} | changes)
    experiment = build_experiment(config, jax.devices()[: data * fsdp * tensor])
    state = experiment.initial_state()
    tokens = experiment.on_mesh(experiment.task.encode(experiment.prompts(1)))
    reference = experiment.initial_params if config.kl != "none" else None
    samples, transitions, ref = experiment.roll_out(state.params, reference, np.int32(1), tokens)
    rewards = np.sin(np.arange(config.batch_size)).astype(np.float32)
    advantages, _ = experiment.advantages(rewards)
    state, metrics = experiment.update(state, transitions, advantages, tokens, experiment.plan(1), ref, True)
    return np.asarray(samples), state, jax.device_get(metrics)


def moments(state) -> np.ndarray:
    return np.concatenate([np.asarray(leaf).ravel() for leaf in jax.tree.leaves(state.opt_state[1][0].mu)])


@pytest.fixture(scope="module")
def on_one_device(tiny):
    settings = tiny | {"batch_size": 16, "micro_batch_size": 16, "updates": 1}
    return {plan: one_update(settings, (1, 1, 1), plan=plan, subset_steps=2) for plan in ("exact", "jagg", "subset")}


@pytest.mark.parametrize(
    ("mesh", "micro_batch_size"), [*((mesh, 16) for mesh in MESHES), ((1, 1, 1), 4), ((2, 2, 2), 8)]
)
def test_every_mesh_and_micro_batch_gives_the_same_samples_and_gradient(tiny, on_one_device, mesh, micro_batch_size):
    settings = tiny | {"batch_size": 16, "micro_batch_size": micro_batch_size, "updates": 1}
    samples, state, metrics = one_update(settings, mesh)
    expected_samples, expected_state, expected = on_one_device["jagg"]
    np.testing.assert_allclose(samples, expected_samples, rtol=1e-5, atol=1e-5)
    assert metrics["ratio_max_deviation"] == 0.0
    ours, theirs = moments(state), moments(expected_state)
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)
    np.testing.assert_allclose(metrics["grad_norm"], expected["grad_norm"], rtol=1e-5)


@pytest.mark.parametrize("plan", ["exact", "subset"])
def test_other_plans_on_eight_devices(tiny, on_one_device, plan):
    settings = tiny | {"batch_size": 16, "micro_batch_size": 8, "updates": 1}
    _, state, _ = one_update(settings, (2, 2, 2), plan=plan, subset_steps=2, batch_anchors=1)
    ours, theirs = moments(state), moments(on_one_device[plan][1])
    assert np.linalg.norm(ours - theirs) <= 1e-5 * np.linalg.norm(theirs)


def test_parameters_moments_and_averages_are_split_alike(tiny):
    _, state, _ = one_update(tiny | {"batch_size": 16, "micro_batch_size": 16}, (2, 2, 2))
    kernel = lambda tree: tree["blocks"]["0"]["attention"]["qkv"]["kernel"]  # noqa: E731
    for tree in (state.params, state.ema_params, state.opt_state[1][0].mu, state.opt_state[1][0].nu):
        assert kernel(tree).sharding.spec == PartitionSpec("fsdp", "tensor")
        assert kernel(tree).addressable_shards[0].data.size == kernel(tree).size // 4
    assert state.updates.sharding.is_fully_replicated


def test_a_groups_samples_may_span_devices(tiny):
    """16 samples of 2 prompts on 8 devices: each prompt's group lies on four of them."""
    settings = tiny | {"batch_size": 16, "num_generations": 8, "micro_batch_size": 16}
    whole, _, _ = one_update(settings, (1, 1, 1))
    split, _, _ = one_update(settings, (8, 1, 1))
    np.testing.assert_allclose(split, whole, rtol=1e-5, atol=1e-5)


def test_specs():
    mesh = make_mesh(2, 2, 2)
    spec = lambda name, shape, size=1: parameter_spec(name, shape, mesh, TENSOR_RULES, size)  # noqa: E731
    assert spec("blocks.0.mlp_in.kernel", (32, 128)) == PartitionSpec("fsdp", "tensor")
    assert spec("blocks.0.mlp_out.kernel", (128, 32)) == PartitionSpec("tensor", "fsdp")
    assert spec("patch_in.kernel", (3, 8)) == PartitionSpec(None, "fsdp")
    assert spec("patch_in.kernel", (3, 8), 1000) == PartitionSpec(None, None)
    assert spec("patch_in.kernel", (3, 5)) == PartitionSpec(None, None)
    with pytest.raises(ValueError, match=r"mlp_in.*axis 1.*tensor 2"):
        spec("blocks.0.mlp_in.kernel", (32, 3))


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
    array = jax.device_put(np.arange(24.0).reshape(8, 3), jax.NamedSharding(mesh, PartitionSpec(("data", "fsdp"))))
    rows, values = local_rows(array)
    assert rows.tolist() == list(range(8))
    np.testing.assert_array_equal(gather_rows(rows, values, 8), array)
