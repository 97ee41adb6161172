"""Programs compiled for an H100 add in a fixed order. This needs the CUDA plugin and no GPU."""

import importlib.util

import jax
import jax.numpy as jnp
import pytest

from dapo_jax.config import load_config
from dapo_jax.models import device_layout
from dapo_jax.numerics.segments import looked_up
from dapo_jax.parallel.gpu_settings import FLAGS
from dapo_jax.plan.decoder import decoder_of
from dapo_jax.plan.programs import Programs
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.plan.workload import Assumptions, workload_of
from dapo_jax.sampling import cache
from tests.plan.repeatability import not_repeatable

compiles = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="the extra cuda-plan"
)

COMPUTATIONS = """HloModule m

%add.1 (a: {dtype}[], b: {dtype}[]) -> {dtype}[] {{
  %a = {dtype}[] parameter(0)
  %b = {dtype}[] parameter(1)
  ROOT %r = {dtype}[] {root}
}}

ENTRY %main (p: {dtype}[4], i: s32[2,1], u: {dtype}[2]) -> {dtype}[4] {{
  ROOT %s = {dtype}[4]{{0}} scatter(%p, %i, %u), update_window_dims={{}}, inserted_window_dims={{0}}, {more}to_apply=%add.1
}}
"""


@pytest.mark.parametrize(
    ("dtype", "root", "more", "bad"),
    [
        ("f32", "add(%a, %b)", "", True),
        ("f32", "add(%a, %b)", "unique_indices=true, ", False),
        ("bf16", "maximum(%a, %b)", "", True),
        ("f32", "parameter(1)", "", True),
        ("s32", "parameter(1)", "", True),
        ("s32", "add(%a, %b)", "", False),
    ],
)
def test_a_scatter_to_equal_places_is_found(dtype, root, more, bad):
    text = COMPUTATIONS.format(dtype=dtype, root=root, more=more)
    assert len(not_repeatable(text, flags=FLAGS)) == bad


def test_the_gradient_of_cudnn_s_attention_needs_the_flag():
    text = '  %c = (bf16[2]{0}, u8[0]{0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmaxBackward"\n'
    assert not_repeatable(text, flags={}) == [text.rstrip()]
    assert not_repeatable(text, flags=FLAGS) == []


def compiled(function, *shapes):
    placed = jax.sharding.SingleDeviceSharding(devices_of(parse("h100:1"))[0])
    given = [jax.ShapeDtypeStruct(shape, dtype, sharding=placed) for shape, dtype in shapes]
    return jax.jit(function).lower(*given).compile().as_text()


def pulled(lookup):
    return lambda table, index, cotangent: jax.vjp(lambda table: lookup(table, index), table)[1](cotangent)[0]


LOOKUP = [((96, 64), jnp.float32), ((256,), jnp.int32), ((256, 64), jnp.float32)]


@compiles
def test_the_gradient_of_a_lookup_is_repeatable_and_the_plain_gradient_is_found():
    assert not_repeatable(compiled(pulled(looked_up), *LOOKUP), flags=FLAGS) == []
    plain = compiled(pulled(lambda table, index: table[index]), *LOOKUP)
    assert len(not_repeatable(plain, flags=FLAGS)) == 1


@compiles
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_the_places_of_new_keys_and_values_are_different(dtype):
    def appended(tables, lengths, live, key, value):
        made = cache.empty(8, 2, 16, 32, dtype)
        page = cache.page_of_new(tables, lengths, live, page_tokens=16)
        return cache.append_to_pages(made, page, lengths, key, value)

    text = compiled(
        appended, ((4, 2), jnp.int32), ((4,), jnp.int32), ((4,), jnp.bool_), *[((2, 32, 4), jnp.float32)] * 2
    )
    assert "scatter(" in text
    assert not_repeatable(text, flags=FLAGS) == []


# Slow: compiles two updates. tests/plan/gpu_test.py reads all programs.
@compiles
@pytest.mark.slow
@pytest.mark.parametrize("plain", [False, True])
def test_an_update_with_the_plain_gradient_of_the_embedding_is_found(plain, monkeypatch):
    if plain:
        monkeypatch.setattr(device_layout, "looked_up", lambda table, index: table[index])
    config = load_config("quickstart")
    devices, work = devices_of(parse("h100:1")), workload_of(config, Assumptions())
    programs = Programs(config, decoder_of(config.model), work, devices, memory=2**36)
    text = programs.lowered()["update_add_longest"]().compile().as_text()
    assert len(not_repeatable(text, flags=FLAGS)) == plain
