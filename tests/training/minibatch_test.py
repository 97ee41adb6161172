"""Microbatches of one row length become one array on the mesh."""

import jax
import numpy as np

from dapo_jax.dapo.batching import Example
from dapo_jax.dapo.tokens import Tokens
from dapo_jax.training.minibatch import MinibatchTransfer
from dapo_jax.training.row_packing import pack


def microbatches(count, row_tokens):
    row = Example(prompt=Tokens([5]), response=Tokens([6, 7], logprobs=[-1.0, -2.0]))
    return pack(
        [row] * count, np.ones(count), row_tokens=row_tokens, rows_per_microbatch=1, share_prompts=False
    )


def placing():
    return MinibatchTransfer(jax.sharding.SingleDeviceSharding(jax.devices()[0]))


def test_the_unused_capacity_of_a_stack_is_zero():
    parts = microbatches(3, row_tokens=4)
    [[stack]] = placing().put([parts])
    assert stack.count == 3
    assert stack.microbatches.tokens.shape == (4, 1, 4)
    for whole, *each in zip(*map(jax.tree.leaves, (stack.microbatches, *parts)), strict=True):
        np.testing.assert_array_equal(whole[:3], each)
        assert whole.dtype == each[0].dtype
        assert not np.asarray(whole[3]).any()


def test_each_row_length_has_a_stack_whose_capacity_only_grows():
    first = placing()
    minibatch = [*microbatches(1, row_tokens=4), *microbatches(3, row_tokens=5)]
    assert [s.microbatches.tokens.shape for [*stacks] in first.put([minibatch]) for s in stacks] == [
        (4, 1, 5),
        (1, 1, 4),
    ]
    [[again]] = first.put([microbatches(1, row_tokens=5)])
    assert again.microbatches.tokens.shape == (4, 1, 5)
    assert again.count == 1
