"""Operations counted in programs, against counts made by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from jagg_jax.models import DiT, DiTConfig, as_function
from jagg_jax.models.layers import REMATS
from jagg_jax.plans import exact_plan, jagg_plan
from jagg_jax.training.config import TrainConfig
from jagg_jax.training.experiment import build_experiment
from jagg_jax.training.flops import PEAKS, count_flops, model_flops, peak_flops

X, W = jnp.ones((3, 5)), jnp.ones((5, 5))
ONE = 2 * 3 * 5 * 5


def loop(step, length):
    return lambda x, w: jax.lax.scan(lambda carry, _: (step(carry, w), None), x, length=length)[0]


@jax.custom_vjp
def product(x, w):
    return x @ w


product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

CASES = {
    "product": (lambda x, w: x @ w, 1),
    "no product": (lambda x, w: x * 2 + w[:3], 0),
    "compiled": (jax.jit(lambda x, w: jnp.tanh(x @ w)), 1),
    "scan": (loop(lambda x, w: x @ w, 7), 7),
    "scan in scan": (loop(loop(lambda x, w: x @ w, 7), 2), 14),
    "vmap over both": (lambda x, w: jax.vmap(jnp.matmul)(jnp.stack([x] * 4), jnp.stack([w] * 4)), 4),
    "vmap over one": (lambda x, w: jax.vmap(jnp.matmul, (0, None))(jnp.stack([x] * 4), w), 4),
    "cond": (lambda x, w: jax.lax.cond(x[0, 0] > 0, lambda: x @ w @ w, lambda: x @ w), 2),
    "while": (lambda x, w: jax.lax.while_loop(lambda c: c[0, 0] < 9, lambda c: c @ w, x), 1),
    "custom derivative": (product, 1),
    "its gradient": (jax.grad(lambda x, w: jnp.sum(jnp.sin(product(x, w))), argnums=(0, 1)), 3),
    "gradient": (jax.grad(lambda x, w: jnp.sum(jnp.sin(x @ w)), argnums=(0, 1)), 3),
    # the backward pass makes the first product again, and needs the second one's value not at all
    "rematerialised": (jax.grad(jax.checkpoint(lambda x, w: jnp.sum(jnp.sin(x @ w) @ w)), argnums=(0, 1)), 7),
}


@pytest.mark.parametrize("case", CASES)
def test_counts_by_hand(case):
    function, products = CASES[case]
    assert count_flops(function, X, W) == products * ONE


def test_contractions_over_several_axes_and_batches():
    query = jax.ShapeDtypeStruct((2, 7, 3, 4), jnp.bfloat16)
    logits = lambda q, k: jnp.einsum("bqhd,bkhd->bhqk", q, k)  # noqa: E731
    assert count_flops(logits, query, query) == 2 * 2 * 3 * 7 * 7 * 4
    whole = lambda q, k: jnp.einsum("bqhd,bqhd->b", q, k)  # noqa: E731
    assert count_flops(whole, query, query) == 2 * 2 * 7 * 3 * 4


def test_convolutions():
    images, kernel = jnp.ones((2, 8, 8, 6)), jnp.ones((3, 3, 6, 10))
    layout = ("NHWC", "HWIO", "NHWC")
    convolve = lambda x, k: jax.lax.conv_general_dilated(x, k, (2, 2), "SAME", dimension_numbers=layout)  # noqa: E731
    assert count_flops(convolve, images, kernel) == 2 * 2 * 4 * 4 * 10 * 3 * 3 * 6
    depthwise = lambda x, k: jax.lax.conv_general_dilated(  # noqa: E731
        x, k, (1, 1), "SAME", dimension_numbers=layout, feature_group_count=6
    )
    assert count_flops(depthwise, images, jnp.ones((3, 3, 1, 6))) == 2 * 2 * 8 * 8 * 6 * 3 * 3


def test_a_shard_map_counts_once_a_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")
    run = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(spec, PartitionSpec()), out_specs=spec)
    assert count_flops(run, jnp.ones((24, 5)), W) == 8 * ONE


CONFIG = DiTConfig(
    image_shape=(16, 24, 1), vocab_size=11, prompt_length=3, patch_shape=(8, 4), width=32, depth=2, num_heads=4
)


def forward_by_hand(config, batch):
    """Multiply-adds twice, linear map after linear map, then attention's two products; also the first maps' alone."""
    images, width, hidden = 2 * 6, config.width, config.mlp_ratio * config.width
    tokens, patch = images + config.prompt_length, 8 * 4
    block = width * 6 * width + tokens * (4 * width * width + 2 * width * hidden) + 2 * tokens * tokens * width
    time, last = 2 * width * width, width * 2 * width + images * width * patch
    first = images * patch * width + width * width
    total = images * patch * width + time + config.depth * block + last
    return 2 * batch * total, 2 * batch * first


@pytest.mark.parametrize("remat", REMATS)
@pytest.mark.parametrize("scan_layers", [False, True])
def test_the_packaged_model_against_its_formula(scan_layers, remat):
    config, batch = dataclasses.replace(CONFIG, remat=remat, scan_layers=scan_layers), 6
    velocity_fn, params = as_function(DiT(config, rngs=nnx.Rngs(0)))
    latents = jax.ShapeDtypeStruct((batch, *config.image_shape), jnp.float32)
    inputs = (latents, jax.ShapeDtypeStruct((batch,), jnp.float32), jax.ShapeDtypeStruct((batch, 3), jnp.int32))
    forward, first = forward_by_hand(config, batch)
    assert count_flops(velocity_fn, params, *inputs) == forward

    # forward-mode: two products more for each one, but one where the input is the data
    run = lambda p, t, *x: jax.jvp(lambda p: velocity_fn(p, *x), (p,), (t,))  # noqa: E731
    assert count_flops(run, params, params, *inputs) == 3 * forward - first
    # and the backward pass itself needs the same, plus what it makes again
    pull = lambda p, g, *x: jax.vjp(lambda p: velocity_fn(p, *x), p)[1](g)  # noqa: E731
    backward = count_flops(pull, params, latents, *inputs)
    if remat == "none":
        assert backward == 3 * forward - first
    else:
        assert 3 * forward - first < backward < 4 * forward


def test_an_experiments_model(tiny):
    experiment = build_experiment(TrainConfig(**tiny | {"guidance": 2.0, "kl": "v", "kl_weight": 0.1}))
    flops = model_flops(experiment)
    batch, tokens = 16, experiment.conditions(1)[0]
    inputs = (np.zeros((batch, *experiment.pipeline.latent_shape), np.float32), np.ones(batch, np.float32), tokens)
    once = count_flops(experiment.pipeline.velocity_fn, experiment.initial_params, *inputs)
    # guidance: everything twice but what does not depend on the prompt
    assert 1.8 * once < flops.forward < 2 * once
    # five steps, and the reference's velocities at the four trained ones
    assert flops.rollout == 9 * flops.forward
    assert 2.9 * flops.forward < flops.linearised < 3 * flops.forward
    plan = jagg_plan(np.linspace(1, 0.2, 4, dtype=np.float32), 4)
    assert flops.update(plan, first=True) == 2 * flops.linearised
    assert flops.update(plan, first=False) == 2 * flops.linearised + 2 * flops.forward
    assert flops.update(exact_plan(4), first=False) == 4 * flops.linearised


def test_adapters_have_a_cheaper_backward_pass(tiny):
    """Frozen weights have no gradient: two thirds of the products of an ordinary backward pass at most."""
    whole = model_flops(build_experiment(TrainConfig(**tiny)))
    adapted = model_flops(build_experiment(TrainConfig(**tiny | {"lora_rank": 2, "lora_alpha": 2.0})))
    assert adapted.forward > whole.forward
    assert adapted.linearised - adapted.forward < 0.75 * (whole.linearised - whole.forward)


@pytest.mark.parametrize(
    ("device_kind", "peak"),
    [
        ("TPU v4", 275e12),
        ("TPU v5 lite", 197e12),
        ("TPU v5e", 197e12),
        ("TPU v5", 459e12),
        ("TPU v5p", 459e12),
        ("TPU v6 lite", 918e12),
        ("NVIDIA A100-SXM4-40GB", 312e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100-PCIE-40GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H200", 989e12),
        # other forms, parts of a device, devices of which the table knows nothing
        ("NVIDIA H100 PCIe", None),
        ("NVIDIA H100 NVL", None),
        ("NVIDIA H200 NVL", None),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", None),
        ("TPU v4 lite", None),
        ("TPU v2", None),
        ("NVIDIA GeForce RTX 4090", None),
        ("cpu", None),
        ("", None),
    ],
)
def test_peaks(device_kind, peak):
    assert peak_flops(device_kind) == peak
    assert peak_flops(f" {device_kind.lower()} ") == peak


def test_every_entry_of_the_table_is_in_use():
    kinds = ["TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite", "NVIDIA A100-SXM4-80GB", "NVIDIA H100 80GB HBM3"]
    assert [peak_flops(kind) for kind in [*kinds, "NVIDIA H200"]] == list(PEAKS.values())
