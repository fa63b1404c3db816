"""Every prompt once an epoch, anew in each, and any part of the order without the rest."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jagg_jax.prompts.order import PromptOrder


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 40), st.integers(0, 2**32 - 1), st.integers(0, 90), st.integers(1, 30))
def test_epochs_are_permutations_and_parts_agree_with_the_whole(num_prompts, seed, start, count):
    whole = PromptOrder(num_prompts, seed).rows(0, 3 * num_prompts)
    for epoch in whole.reshape(3, num_prompts):
        np.testing.assert_array_equal(np.sort(epoch), np.arange(num_prompts))
    order = PromptOrder(num_prompts, seed)
    np.testing.assert_array_equal(order.rows(start, count), order.rows(0, start + count)[start:])


def test_epochs_and_seeds_differ():
    first = PromptOrder(100, 0).rows(0, 200)
    assert (first[:100] != first[100:]).any()
    assert (first != PromptOrder(100, 1).rows(0, 200)).any()
