"""The doctor's account of a device's memory."""

import pytest

from dapo_jax.config import load_config
from dapo_jax.doctor.resources import memory
from dapo_jax.doctor.subject import Subject

FLYING = ["rollout.in_flight=128", "rollout.round_tokens=16", "dynamic_sampling.surplus=discard", "parallel.data=1", "parallel.fsdp=8"]  # fmt: skip


@pytest.mark.parametrize("slots", [64, 128])
def test_memory_counts_all_responses_in_flight(slots):
    """128 responses of up to 56 tokens may have pages, whatever the slots. Paused ones keep logits for all 64 slots, in float32."""
    found = Subject(load_config("quickstart", [*FLYING, f"sampling.slots={slots}"]))
    waves = Subject(load_config("quickstart", [f"sampling.slots={slots}"]))
    assert found.planned.pages.holders == 128
    assert waves.planned.pages.holders == slots
    rows = found.planned.decoder.vocab_rows
    assert found.planned.resident.paused == (128 - slots) * rows * 4
    assert ("paused responses" in memory(found).message) == (slots < 128)
    assert "paused" not in memory(waves).message
