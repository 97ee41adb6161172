"""Refusals of the compiler."""

import pytest

from dapo_jax.plan.compiled import needed_bytes


@pytest.mark.parametrize(
    ("message", "needed"),
    [
        # 32.12 x 2^30 = 34488587386.9
        ("Ran out of memory on HBM, the total memory required for HLO temporaries (32.12G) exceeds available HBM (15.75G).", 34488587387),
        # 17.63 x 2^30 = 18930068357.1
        ("Ran out of memory in memory space hbm. Used 17.63G of 15.75G hbm. Exceeded hbm capacity by 1.88G.", 18930068358),
        ("Ran out of memory in memory space smem. Used 512 of 256 smem.", 512),
        ("RESOURCE_EXHAUSTED: something else", None),
    ],
)  # fmt: skip
def test_the_needed_bytes_are_in_both_forms_of_a_refusal(message, needed):
    assert needed_bytes(message) == needed
