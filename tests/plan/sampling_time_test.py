"""Times of single decode steps, which add up to the roofline of a phase."""

import numpy as np
import pytest

from dapo_jax.plan.chips import CHIPS
from dapo_jax.plan.collectives import Traffic
from dapo_jax.plan.roofline import bound, decode_steps, in_flight
from dapo_jax.plan.sampling_time import IN_STEPS, READ_UTILISATION, sampling_time
from dapo_jax.sampling.pages import slot_pages
from tests.plan.roofline_test import CONFIG, LAYOUT, SMALL, works

CHIP = CHIPS["v5e"]


@pytest.mark.parametrize("received", [0, 10**9])
def test_steps_with_the_mean_in_the_slots_add_up_to_the_phase(received):
    """8 responses of the mean context in every step; memory bounds it, or the interconnect."""
    traffic = {"generate": [Traffic(kind="all-reduce", count=1, received_bytes=received)]}
    work, phases = works(traffic=traffic)
    steps = decode_steps(work, 2, in_flight(CONFIG, work, slot_pages(8, 16), 2))
    time = sampling_time(CONFIG, SMALL, LAYOUT, CHIP, step_ici_bytes=received / 5)
    one = time.decode(np.array([8.0]), np.array([8 * work.context]))
    assert steps * one == pytest.approx(bound(phases["decode"], CHIP).seconds)


def test_a_step_of_much_compute_is_bound_by_it():
    """6272 operations a token and 288 a pair, over 4 devices of 197e12 a second."""
    time = sampling_time(CONFIG, SMALL, LAYOUT, CHIP, step_ici_bytes=0)
    assert time.decode(np.array([1e6]), np.array([0.0])) == pytest.approx(1e6 * 6272 / 4 / 197e12)


def test_reading_takes_its_operations_at_a_share_of_the_peak():
    """5760 operations a token, 288 a pair, 512 for the logits of a sequence."""
    time = sampling_time(CONFIG, SMALL, LAYOUT, CHIP, step_ici_bytes=0)
    read = time.read(np.array([60.0]), np.array([210.0]), np.array([10.0]))
    assert read == pytest.approx((60 * 5760 + 210 * 288 + 10 * 512) / 4 / (READ_UTILISATION * 197e12))


def test_without_a_chip_steps_are_counted():
    assert IN_STEPS.decode(np.array([3, 1]), np.array([9.0, 1.0])).tolist() == [1, 1]
    assert IN_STEPS.read(np.array([7.0]), np.array([1.0]), np.array([1.0])).tolist() == [0]
