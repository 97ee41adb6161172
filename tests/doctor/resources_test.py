"""What the doctor counts of a device's memory."""

import pytest

from dapo_jax.config import load_config
from dapo_jax.doctor.resources import Configured

FLYING = ["rollout.in_flight=128", "rollout.round_tokens=16", "dynamic_sampling.surplus=discard", "parallel.data=1", "parallel.fsdp=8"]  # fmt: skip


@pytest.mark.parametrize("slots", [64, 128])
def test_the_memory_is_that_of_all_that_is_in_flight(slots):
    """128 responses of up to 56 tokens may have pages, whatever the slots; of those beside 64 slots the logits of all 64 are kept, each in float32."""
    found = Configured(load_config("quickstart", [*FLYING, f"sampling.slots={slots}"]))
    waves = Configured(load_config("quickstart", [f"sampling.slots={slots}"]))
    assert found.planned.pages.holders == 128
    assert waves.planned.pages.holders == slots
    rows = found.planned.decoder.vocab_rows
    assert found.planned.resident.paused == (128 - slots) * rows * 4
    assert ("logits of responses that pause" in found.memory().message) == (slots < 128)
    assert "logits" not in waves.memory().message
