"""Collectives counted from the text of compiled programs."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from dapo_jax.plan.collectives import Traffic, array_bytes, collectives

LOOP = """HloModule jit_f, is_scheduled=true, num_partitions=8

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter.1 (input: f32[8,128]) -> f32[8,32] {
  %input = f32[8,128]{1,0:T(8,128)} parameter(0)
  %all-reduce.9 = f32[8,128]{1,0:T(8,128)} all-reduce(%input), channel_id=5, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %zero = s32[] constant(0)
  ROOT %own = f32[8,32]{1,0} dynamic-slice(%all-reduce.9, %zero, %zero), dynamic_slice_sizes={8,32}
}

%body (carried: (s32[], f32[8,128])) -> (s32[], f32[8,128]) {
  %carried = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %i = s32[] get-tuple-element(%carried), index=0
  %x = f32[8,128]{1,0} get-tuple-element(%carried), index=1
  %all-reduce.1 = f32[8,128]{1,0:T(8,128)S(1)} all-reduce(%x), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0), to_apply=%add
  %fusion = f32[8,32]{1,0} fusion(%all-reduce.1), kind=kCustom, calls=%all-reduce-scatter.1
  %all-gather.1 = f32[8,128]{1,0} all-gather(%fusion), replica_groups=mesh['axis_0'=4,'axis_1'=2] {'axis_0'}, dimensions={1}
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  ROOT %tuple = (s32[], f32[8,128]{1,0}) tuple(%next, %all-gather.1)
}

%condition (carried.1: (s32[], f32[8,128])) -> pred[] {
  %bound = s32[]{:T(128)} constant(7)
  %carried.1 = (s32[]{:T(128)}, f32[8,128]{1,0:T(8,128)}) parameter(0)
  %j = s32[]{:T(128)} get-tuple-element(%carried.1), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %bound), direction=LT
}

ENTRY %main (p: f32[8,128]) -> f32[8,128] {
  %p = f32[8,128]{1,0} parameter(0)
  %start = s32[] constant(0)
  %t = (s32[], f32[8,128]{1,0}) tuple(%start, %p)
  %while = (s32[], f32[8,128]{1,0}) while(%t), condition=%condition, body=%body
  ROOT %out = f32[8,128]{1,0} get-tuple-element(%while), index=1
}
"""


def test_a_loop_on_a_tpu_is_counted_by_the_constant_in_its_condition():
    """An array of 8 x 128 x 4 = 4096 bytes, groups of 4, 7 trips. All-gather: 3/4 of it, 3072 each time. The all-reduce
    receives it as parts and as sums: 6144. The fusion keeps a part of an all-reduce: a reduce-scatter of 3072."""
    assert collectives(LOOP) == [
        Traffic(kind="all-gather", count=7, received_bytes=7 * 3072),
        Traffic(kind="all-reduce", count=7, received_bytes=7 * 6144),
        Traffic(kind="reduce-scatter", count=7, received_bytes=7 * 3072),
    ]


@pytest.mark.parametrize(
    ("old", "new", "trips", "count"),
    [
        ("%start = s32[] constant(0)", "%start = s32[] constant(2)", (), 5),
        ("constant(7)", "parameter(1)", (), 1),
        ("constant(7)", "parameter(1)", (12,), 12),
    ],
    ids=["begins later", "no known end", "the caller knows the end"],
)
def test_the_number_of_trips_is_in_the_text_or_the_callers(old, new, trips, count):
    assert [kind.count for kind in collectives(LOOP.replace(old, new), trips=trips)] == [count] * 3


@pytest.mark.parametrize(
    ("line", "kind", "received"),
    [
        # Both halves of an asynchronous all-gather are in its type: 32 of the operand, 128 of the result; 96 are received.
        ("(f32[8]{0}, f32[32]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}", "all-gather", 96),
        # In GPU programs, other collectives are asynchronous too: 128 bytes of the operand, 32 of the result; 3 x 32 are received.
        ("((f32[32]{0}), f32[8]{0}) reduce-scatter-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%add", "reduce-scatter", 96),
        ("((f32[8]{0}), f32[8]{0}) all-to-all-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}", "all-to-all", 24),
        ("f32[8]{0} all-reduce-start(%p), replica_groups={{0,1}}, to_apply=%add", "all-reduce", 32),
        ("(f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), source_target_pairs={{0,1}}",
         "collective-permute", 36),
        ("f32[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}", "collective-permute", 32),
        # A result of 32 bytes is the sum of the parts of 8 devices; 7 parts are received.
        ("f32[8]{0} reduce-scatter(%p), replica_groups={}, dimensions={0}, to_apply=%add", "reduce-scatter", 224),
        ("(f32[4]{0}, f32[4]{0}) all-reduce(%p, %p), replica_groups={{0,1},{2,3}}, to_apply=%add", "all-reduce", 32),
        ("bf16[16]{0} all-to-all(%p), replica_groups=[1,8]<=[8], dimensions={0}", "all-to-all", 28),
        ("f32[8]{0} all-reduce(%p), replica_groups={{0},{1}}, to_apply=%add", "all-reduce", 0),
        ("f32[8]{0} all-reduce(%p), replica_groups=mesh['a'=2,'b'=4] {'b':(1)2}, to_apply=%add", "all-reduce", 32),
    ],
)  # fmt: skip
def test_each_kind_and_notation_by_hand(line, kind, received):
    """A group of one device receives nothing."""
    text = f"HloModule m, num_partitions=8\n\nENTRY %main (p: f32[8]) -> f32[8] {{\n  %x = {line}\n}}\n"
    expected = [Traffic(kind=kind, count=1, received_bytes=received)] if received else []
    assert collectives(text) == expected


@pytest.mark.parametrize(
    ("line", "per_machine", "network"),
    [
        # 84 of 96 bytes are received in an all-gather of 8; half of the others are on another machine: 96 x 4/8 = 48, shared by 4.
        ("f32[24]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}", 4, 12),
        ("f32[24]{0} all-gather(%p), replica_groups=[1,8]<=[8], dimensions={0}", 8, 0),
        # 96 x 6/8 = 72 bytes from 3 other machines, shared by 2 devices.
        ("f32[24]{0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}", 2, 36),
        # Groups of 4 with one device on each of 4 machines.
        ("f32[24]{0} all-gather(%p), replica_groups=[2,4]<=[4,2]T(1,0), dimensions={0}", 2, 72),
        ("f32[24]{0} all-gather(%p), replica_groups=mesh['a'=4,'b'=2] {'a'}, dimensions={0}", 2, 72),
        # The order of the devices is 0, 4, 1, 5, ...: pairs of 0 and 4, 1 and 5.
        ("f32[24]{0} all-gather(%p), replica_groups=mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}, dimensions={0}", 4, 48),
        # Of 4 devices along 'a', pairs 0, 2 (stride 4).
        ("f32[24]{0} all-gather(%p), replica_groups=mesh['a'=4,'b'=2] {'a':(1)2}, dimensions={0}", 4, 48),
        # An all-reduce receives twice as much; the devices of a machine do not share the parts of an all-to-all.
        ("f32[24]{0} all-reduce(%p), replica_groups=[1,8]<=[8], to_apply=%add", 4, 24),
        ("f32[24]{0} all-to-all(%p), replica_groups=[1,8]<=[8], dimensions={0}", 4, 48),
        ("f32[24]{0} collective-permute(%p), source_target_pairs={{0,1},{3,4}}", 4, 96),
    ],
)  # fmt: skip
def test_bytes_from_other_machines_follow_from_the_groups(line, per_machine, network):
    text = f"HloModule m, num_partitions=8\n\nENTRY %main (p: f32[3]) -> f32[24] {{\n  %x = {line}\n}}\n"
    [found] = collectives(text, per_machine=per_machine)
    assert found.network_bytes == network


def test_types_are_counted_in_bytes():
    assert array_bytes("(f32[8,4]{1,0:T(8,128)}, bf16[2]{0}, pred[3]{0}, s32[], u8[0]{0})") == 128 + 4 + 3 + 4


def test_a_compiled_program_has_the_collectives_that_were_written():
    """On 8 devices: in 5 steps an all-gather of 8 x 4 floats, 7/8 of 128 bytes received; then in n steps an all-reduce of 4
    floats, 2 x 7/8 of 16 bytes. n is an argument, so the program does not know it."""
    mesh = Mesh(np.array(jax.devices()), ("x",))

    def inside(weights, total, n):
        def gather(total, weight):
            return total + jax.lax.all_gather(weight, "x", tiled=True).sum(), None

        total, _ = jax.lax.scan(gather, total, weights)
        return jax.lax.fori_loop(0, n, lambda i, x: jax.lax.psum(x * 0.5, "x"), jnp.full(4, total))

    split, whole = PartitionSpec(None, "x"), PartitionSpec()
    mapped = jax.shard_map(
        inside, mesh=mesh, in_specs=(split, whole, whole), out_specs=whole, check_vma=False
    )
    text = jax.jit(mapped).lower(jnp.ones((5, 32)), jnp.float32(0), jnp.int32(3)).compile().as_text()
    assert collectives(text, trips=(3,)) == [
        Traffic(kind="all-gather", count=5, received_bytes=5 * 112),
        Traffic(kind="all-reduce", count=3, received_bytes=3 * 28),
    ]
