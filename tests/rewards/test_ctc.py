"""Tests of connectionist temporal classification against the sum over all alignments, and against Optax."""

import itertools

import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jagg_jax.rewards import ctc


def random_log_probabilities(seed: int, batch: int, columns: int, classes: int) -> np.ndarray:
    logits = np.random.default_rng(seed).normal(0, 2, (batch, columns, classes))
    return logits - np.log(np.exp(logits).sum(-1, keepdims=True))


def collapse(alignment) -> tuple[int, ...]:
    return tuple(symbol for symbol, _ in itertools.groupby(alignment) if symbol != 0)


def sum_over_alignments(log_probabilities: np.ndarray, target) -> float:
    """The definition: add the probabilities of all K ** T alignments that collapse to the target."""
    columns, classes = log_probabilities.shape
    total = 0.0
    for alignment in itertools.product(range(classes), repeat=columns):
        if collapse(alignment) == tuple(target):
            total += np.exp(log_probabilities[np.arange(columns), alignment].sum())
    return np.log(total) if total else -np.inf


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    columns=st.integers(1, 5),
    targets=st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=4), min_size=1, max_size=4),
)
def test_log_probability_is_the_sum_over_all_alignments(seed, columns, targets):
    log_probabilities = random_log_probabilities(seed, len(targets), columns, 4)
    found = ctc.log_probability(log_probabilities, [np.array(target) for target in targets])
    expected = [sum_over_alignments(*pair) for pair in zip(log_probabilities, targets, strict=True)]
    np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-12)


def test_probabilities_of_all_strings_sum_to_one():
    columns, classes = 3, 3
    log_probabilities = random_log_probabilities(0, 1, columns, classes)
    strings = [s for n in range(1, columns + 1) for s in itertools.product(range(1, classes), repeat=n)]
    found = ctc.log_probability(np.repeat(log_probabilities, len(strings), 0), [np.array(s) for s in strings])
    nothing = np.exp(log_probabilities[0, :, 0].sum())
    assert np.exp(found).sum() + nothing == pytest.approx(1, abs=1e-12)


def test_log_probability_agrees_with_optax_at_the_size_in_use():
    log_probabilities = random_log_probabilities(1, 8, 24, 11).astype(np.float32)
    targets = np.random.default_rng(2).integers(1, 11, (8, 4)).astype(np.int32)
    loss = optax.ctc_loss(log_probabilities, np.zeros((8, 24), np.float32), targets, np.zeros((8, 4), np.float32))
    np.testing.assert_allclose(ctc.log_probability(log_probabilities, list(targets)), -loss, rtol=1e-4)


def test_impossible_targets_have_no_probability():
    log_probabilities = random_log_probabilities(3, 2, 3, 3)
    found = ctc.log_probability(log_probabilities, [np.array([1, 1]), np.array([1, 1, 2])])
    assert np.isfinite(found[0])  # 1, blank, 1
    assert found[1] == -np.inf  # needs four columns
    certain = np.full((1, 2, 2), -np.inf)
    certain[..., 0] = 0.0
    assert ctc.log_probability(certain, [np.array([1])])[0] == -np.inf


@settings(max_examples=60)
@given(alignments=st.lists(st.lists(st.integers(0, 3), min_size=4, max_size=4), min_size=1, max_size=5))
def test_greedy_read_collapses_the_best_alignment(alignments):
    probabilities = np.eye(4, dtype=np.float32)[np.array(alignments)]
    expected = ["".join("abc"[k - 1] for k in collapse(alignment)) for alignment in alignments]
    assert ctc.greedy_read(probabilities, "abc") == expected
