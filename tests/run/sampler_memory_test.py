"""The size of a KV cache that the configuration does not set: it depends on the memory of a device and the other arrays there."""

from dataclasses import replace

import jax
import pytest

from dapo_jax.config import ConfigError, ModelConfig, SamplingConfig
from dapo_jax.models.presets import preset
from dapo_jax.parallel.device_memory import bytes_on_device
from dapo_jax.parallel.mesh import make_mesh, make_meshes
from dapo_jax.run.policy import load_policy
from dapo_jax.run.sampler_setup import KNOWN_SHARE, response_sampler, room_for_cache, sampler_spec
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.prompt_packing import PrefillShape

TINY = preset("tiny")
"""4 layers of 2 key heads of 32 dimensions: a token's keys and values are 2 x 4 x 2 x 32 x 4 = 2,048 bytes in float32."""
SHAPE = PrefillShape(rows=2, width=64, longest=16)


def room(*, shape=SHAPE, memory=1 << 23, resident=0, fsdp=1, tensor=1, page_tokens=16, **options):
    mesh = make_mesh(devices=jax.devices()[: fsdp * tensor], fsdp=fsdp, tensor=tensor)
    spec = EngineSpec(
        slots=8, capacity=64, steps_per_call=1, stop_ids=(), prefill=shape, page_tokens=page_tokens, **options
    )
    return room_for_cache(TINY, mesh, spec, resident=resident, memory=memory)


def test_the_cache_gets_what_all_else_leaves_of_nine_tenths_of_a_device():
    """8 slots' logits of 32 entries four times over, and twice a prefix of 2 rows: 64 tokens and the logits of 16 prompts each."""
    logits, prefix = 4 * 8 * 32 * 4, 2 * (64 * 2048 + 16 * 32 * 4)
    assert room(resident=1000) == int(KNOWN_SHARE * (1 << 23)) - 1000 - logits - 2 * prefix


def test_a_mesh_spreads_slots_and_heads():
    """Over 4 devices by slots a device has 2 slots' logits; over 2 by heads a token is half as many bytes."""
    spread, heads, alone = room(fsdp=4), room(tensor=2), room()
    assert spread - alone == 4 * (8 - 2) * 32 * 4
    assert heads - alone == 2 * 2 * 64 * 1024


def test_what_is_read_again_has_its_room_unless_all_slots_fit():
    """A prefill of a row of 16 tokens takes 16 x 2,048 + 2,048 bytes. A sequence of 64 tokens is kept twice at its end. All 8 slots need 1 MiB."""
    narrow, prefix, again = PrefillShape(rows=1, width=16, longest=16), 16 * 2048 + 2048, 64 * 2 * 2048 + 2048
    known = int(KNOWN_SHARE * (1 << 20)) - 4 * 8 * 32 * 4
    assert room(shape=narrow, memory=1 << 20) == known - prefix - again
    assert room(shape=narrow, memory=1 << 21) == known + int(KNOWN_SHARE * (1 << 20)) - 2 * prefix
    assert (
        room(shape=replace(narrow, longest=17), memory=1 << 21)
        == known + int(KNOWN_SHARE * (1 << 20)) - prefix - again
    )


def test_eight_bits_are_counted_with_their_scales():
    """32 bytes and a scale of 4 where 128 bytes were, for each of 2 x 4 x 2 heads."""
    small = room(cache_dtype="int8")
    assert small - room() == 2 * 2 * 64 * (2048 - 16 * 36)


@pytest.mark.parametrize(
    "options",
    [{"memory": None}, {"cache_tokens": 512}, {"page_tokens": 0}],
    ids=["a device without a report", "a size that is set", "whole slots, on CPU"],
)
def test_memory_does_not_decide_if_the_size_is_set_or_the_device_does_not_report_it(options):
    assert room(**options) is None


@pytest.fixture(scope="module")
def sampler():
    mesh = make_mesh(devices=jax.devices()[:1], fsdp=1)
    policy = load_policy(ModelConfig(source="preset:tiny", tokenizer="char:0123456789+="), mesh=mesh)

    def made(memory, **options):
        sampling = SamplingConfig(slots=8, max_response_tokens=48, **options)
        spec = sampler_spec(
            sampling, max_prompt_tokens=16, compute_dtype="float32", group_size=4, page_tokens=16
        )
        resident = bytes_on_device(policy.params, mesh.shape)
        return response_sampler(policy, make_meshes(mesh), spec, seed=0, memory=memory, resident=resident)

    return made


def test_a_run_says_how_large_a_cache_it_chose(sampler):
    """All slots may need 8 x 64 = 512 tokens of 2,048 bytes. Of nine tenths of 6,000,000 bytes, trainer and sampler use 2 x 592,768 x 4, the logits of
    8 slots 4 x 8 x 14 x 4, a prefill of 2 x 16 tokens 65,536 + 1,792, and a re-prefilled sequence 2 x 64 x 2,048 + 896: 325,696 are left, for 9 pages."""
    [large] = sampler(1 << 30).notes
    assert large.startswith(
        "the KV cache has room for all 8 responses of up to 64 tokens; 0.90 of a device's 1.00 GiB were available for it"
    )
    [small] = sampler(6_000_000).notes
    assert all(number in small for number in ("144 tokens", "all 8 responses", "512"))
    assert "sampling.cache_tokens" in small
    assert sampler(None).notes == sampler(1 << 30, cache_tokens=256).notes == []


def test_a_device_with_no_room_for_one_sequence_is_refused_with_what_would_help(sampler):
    with pytest.raises(
        ConfigError, match=r"room for 0 pages of 16 tokens .* up to 64 tokens need 4: .*sampling\.slots"
    ):
        sampler(1 << 20)
