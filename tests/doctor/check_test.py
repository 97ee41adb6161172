"""Skipped checks, the account of a device's memory, and the limits of rounding."""

import math
from dataclasses import replace

import pytest

from dapo_jax.config import ConfigError, load_config
from dapo_jax.doctor.check import Check, Found, examine
from dapo_jax.doctor.resources import memory
from dapo_jax.doctor.subject import Subject
from dapo_jax.doctor.tiny_step import agreement, shape_noise


def fails(error):
    def look(subject):
        raise error

    return look


def test_checks_that_need_a_failed_check_are_skipped_and_others_are_made():
    looked = []
    checks = [
        Check("a", fails(RuntimeError("no disk"))),
        Check("b", lambda _: looked.append("b") or Found("fine"), needs=("a",)),
        Check("c", lambda _: looked.append("c") or Found("fine"), needs=("b",)),
        Check("d", lambda _: looked.append("d") or Found("fine")),
    ]
    found = examine(checks, Subject())
    assert found["b"] == found["c"] == Found("because 'a' failed", "skipped")
    assert looked == ["d"]


def test_a_warning_skips_nothing():
    warns = Check("a", lambda _: Found("close", "warning"))
    passes = Check("b", lambda _: Found("fine"), needs=("a", "a check that is not in the list"))
    assert examine([warns, passes], Subject())["b"].state == "ok"


@pytest.mark.parametrize(
    ("error", "found"),
    [
        (RuntimeError("no\n  disk"), Found("RuntimeError: no disk", "failed", "buy one")),
        (ConfigError("x=1 must be 2; set x=2"), Found("x=1 must be 2; set x=2", "failed")),
        (ValueError("x" * 5000), Found(f"ValueError: {'x' * 685}...", "failed", "buy one")),
    ],
    ids=["an error", "with its own remedy", "a long one"],
)
def test_an_error_is_a_failure_in_one_line_with_a_remedy(error, found):
    assert examine([Check("a", fails(error), remedy="buy one")], Subject()) == {"a": found}


FLYING = ["rollout.in_flight=128", "rollout.round_tokens=16", "dynamic_sampling.surplus=discard", "parallel.data=1", "parallel.fsdp=8"]  # fmt: skip


@pytest.mark.parametrize("slots", [64, 128])
def test_memory_counts_all_responses_in_flight(slots):
    """128 responses may have pages, whatever the slots. Paused ones keep logits."""
    found = Subject(load_config("quickstart", [*FLYING, f"sampling.slots={slots}"]))
    assert found.planned.pages.holders == 128
    assert ("paused responses" in memory(found).message) == (slots < 128)


@pytest.mark.parametrize(("cache_tokens", "state"), [(0, "ok"), (4096, "failed")])
def test_a_cache_that_is_sized_to_fit_counts_as_one_sequence(cache_tokens, state, monkeypatch):
    """A million pages of 64 tokens of 2 kB are 122 GiB. Without `sampling.cache_tokens`, only the page of one full sequence must fit."""
    monkeypatch.setattr("dapo_jax.doctor.resources.host_bytes", lambda: (0, 2**30))
    subject = Subject(load_config("quickstart", [f"sampling.cache_tokens={cache_tokens}"]))
    planned = subject.planned
    pages = replace(planned.pages, holders=2 * 10**6, page_tokens=64, pools=1, pool_pages=10**6)
    cache = replace(planned.resident, decode_state=10**6 * 64 * planned.token_bytes[0])
    vars(subject)["planned"] = replace(planned, pages=pages, resident=cache)
    assert (pages.runs_out, pages.table_pages, memory(subject).state) == (True, 1, state)


@pytest.mark.parametrize(
    ("changes", "on_device", "remedy"),
    [
        ("sampling.slots=1024", None, "decode state: sampling.slots=512 (of 1024) or sampling.cache_dtype="),
        ("parallel.data=8", None, "the train state: parallel.fsdp=2 parallel.data=4;"),
        ("seed=0", None, "train state: a smaller model or lora.rank;"),
        ("parallel.data=8 lora.rank=1", None, "the frozen weights: parallel.fsdp=2 parallel.data=4;"),
        (
            "parallel.data=8",
            2**20,
            "train state: optimizer.offload=true (keeps the moments in host memory) or ",
        ),
    ],
)
def test_the_remedy_for_too_little_memory_shrinks_the_largest_part(changes, on_device, remedy, monkeypatch):
    """Options that only move arrays to the host's memory do not help if this memory is too small."""
    monkeypatch.setattr("dapo_jax.doctor.resources.host_bytes", lambda: (0, 2**20))
    monkeypatch.setattr("dapo_jax.doctor.resources.present_bytes", lambda: on_device)
    overrides = ["sampling.slots=8", "parallel.fsdp=1", *changes.split()]
    found = memory(Subject(load_config("quickstart", overrides)))
    assert found.state == "failed"
    assert remedy in found.remedy


@pytest.mark.parametrize(
    ("kl", "largest", "dtype", "platform", "state"),
    [
        (2e-9, 2e-6, "float32", "cpu", "ok"),  # measured with the quickstart
        (1e-5, 1e-4, "float32", "cpu", "failed"),
        (1e-9, 2e-3, "float32", "cpu", "failed"),  # one token of many
        (1.7e-4, 0.1, "bfloat16", "tpu", "ok"),  # SmolLM2-135M with rounded activations, see docs/metrics.md
        (1e-5, 1e-2, "float32", "gpu", "ok"),  # its float32 products round their operands
        (5e-3, 0.1, "bfloat16", "tpu", "failed"),
        (math.nan, 0.0, "bfloat16", "cpu", "failed"),
        (0.0, math.nan, "bfloat16", "cpu", "failed"),
    ],
)
def test_the_limits_depend_on_dtype_and_platform(kl, largest, dtype, platform, state):
    found = agreement(kl=kl, largest=largest, compute_dtype=dtype, platform=platform)
    assert (found.state, bool(found.remedy)) == (state, state == "failed")


@pytest.mark.parametrize(
    ("noise", "sampler", "dtype", "state"),
    [
        ({2: 1.2e-7, 4: 1.8e-7}, 1.7e-7, "float32", "ok"),  # the quickstart
        ({2: 1.2e-7, 4: 0.29}, 1.7e-7, "float32", "failed"),
        ({2: 7.1e-6, 4: 1.1e-5}, 2.4e-7, "float32", "failed"),
        (
            {2: 7.1e-6, 4: 1.1e-5},
            2.4e-7,
            "bfloat16",
            "ok",
        ),  # preset:tiny, whose sampler and trainer differ by less
        ({2: 4.7e-6, 4: 4.2e-6}, 3.3e-6, "bfloat16", "ok"),  # the quickstart
        ({2: 0.067, 4: 0.070}, 0.0113, "bfloat16", "failed"),
        ({2: 0.067}, 0.0, "bfloat16", "failed"),
        ({2: math.nan}, 0.0, "bfloat16", "failed"),
        ({}, 0.0, "float32", "skipped"),
    ],
)
def test_rows_in_a_microbatch_change_log_probabilities_by_rounding_alone(noise, sampler, dtype, state):
    assert shape_noise(noise, rows=1, sampler=sampler, compute_dtype=dtype).state == state
