"""Packed rows through cuDNN's calls. A plain implementation of these two calls replaces them here; with `-m gpu`, cuDNN itself runs."""

import importlib.util
import json
import math
import re
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from dapo_jax.models import cudnn
from dapo_jax.models.attention import causal_attention
from dapo_jax.models.decoder import Decoder
from dapo_jax.parallel.gpu_settings import FLAGS
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.sharding import shardings
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.testing import tiny_decoder_config
from tests.plan.repeatability import not_repeatable

HEADS, KV_HEADS = 4, 2


def scores_of(q, k, lengths, window):
    """Scores [batch, heads, room, room] of the pairs that attend, and minus infinity elsewhere."""
    at = jnp.arange(q.shape[1])[None, None]
    near = (window == 0) | (at.transpose(0, 2, 1) - at < window)
    seen = near & (at.transpose(0, 2, 1) >= at) & (at < lengths[:, None, None])
    keys = jnp.repeat(k, q.shape[2] // k.shape[2], axis=2)
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, keys) * q.shape[-1] ** -0.5
    return jnp.where(seen[:, None], scores, -jnp.inf)


def up_to_the_end(x, lengths):
    """NaN after the end of a sequence, where the results are undefined."""
    ended = jnp.arange(x.shape[1])[None] >= lengths[:, None]
    return jnp.where(ended[..., None, None], jnp.nan, x)


def attend(q, k, v, lengths, window):
    scores = scores_of(q, k, lengths, window)
    values = jnp.repeat(v, q.shape[2] // v.shape[2], axis=2)
    out = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), values)
    ended = jnp.arange(q.shape[1])[None] >= lengths[:, None]
    sums = jnp.where(ended[:, None], jnp.nan, jax.nn.logsumexp(scores, axis=-1))
    return up_to_the_end(out, lengths), sums


def attend_backward(q, k, v, sums, d_out, out, lengths, window):
    """The gradients, from the given log-sum-exps and results instead of recomputed ones. Queries after the end count for nothing."""
    here = jnp.arange(q.shape[1])[None] < lengths[:, None]
    group = q.shape[2] // k.shape[2]
    weights = jnp.exp(scores_of(q, k, lengths, window) - jnp.where(here[:, None], sums, jnp.inf)[..., None])
    d = jnp.where(here[..., None, None], d_out, 0)
    change = jnp.where(here[..., None, None], d * out, 0).sum(-1).transpose(0, 2, 1)[..., None]
    keys, values = (jnp.repeat(x, group, axis=2) for x in (k, v))
    d_scores = weights * (jnp.einsum("bqhd,bkhd->bhqk", d, values) - change) * q.shape[-1] ** -0.5
    each = jnp.einsum("bhqk,bqhd->bkhd", d_scores, q), jnp.einsum("bhqk,bqhd->bkhd", weights, d)
    others = (x.reshape(*k.shape[:3], group, k.shape[3]).sum(3) for x in each)
    grads = (jnp.einsum("bhqk,bkhd->bqhd", d_scores, keys), *others)
    return tuple(up_to_the_end(grad, lengths) for grad in grads)


def rows_of(*rows, seq):
    """Segment and prefix ids of rows. A row is a list of groups, each a tuple of a prompt's length and its responses' lengths, or of one length if nothing is shared."""
    ids, prefixes = np.zeros((2, len(rows), seq), np.int32)
    for row, groups in enumerate(rows):
        at = segment = 0
        for lengths in groups:
            head = segment + 1
            for length in lengths:
                segment += 1
                ids[row, at : at + length], prefixes[row, at : at + length] = segment, head
                at += length
        assert at <= seq
    return ids, prefixes


CASES = {
    "one room": rows_of([(10, 12, 20)], [(7,), (12, 9, 3, 1)], seq=48),
    "three rooms": rows_of([(20, 100, 5, 60), (2, 55), (4, 3)], [(256,)], seq=256),
    "short segments": rows_of([(3, 2, 1), (4,), (1, 1)] * 20, [(4, 1), (1, 64), (65, 17, 1)], seq=256),
    "a length that no room divides": rows_of([(30, 17, 20)], [(70,)], seq=70),
    "no segment": rows_of([], [(5, 6, 7)], seq=24),
}


QUICK = ("three rooms", "a length that no room divides")


def positions_of(ids, prefixes):
    """The position of each token in its sequence. A response follows its prompt."""
    found = np.zeros_like(ids)
    for row, segment in {
        (row, segment) for row, segments in enumerate(ids) for segment in segments if segment
    }:
        own = ids[row] == segment
        prompt = prefixes[row][own][0]
        shared = (ids[row] == prompt).sum() if prompt != segment else 0
        found[row, own] = shared + np.arange(own.sum())
    return found


def both(packed, width, dtype, seed=0, window=0):
    """Result and gradients with cuDNN's calls and with XLA in float32, on the same rounded inputs. The cotangent of padding is 0."""
    ids, prefixes = map(jnp.asarray, packed)
    rng = np.random.default_rng(seed)
    real = packed[0][None, None] > 0
    *parts, along = (
        jnp.asarray(rng.normal(size=(heads, width, *ids.shape)), dtype).astype(jnp.float32)
        for heads in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )

    if window:
        parts.append(jnp.linspace(-1.0, 3.0, HEADS))

    def by_cudnn(*parts):
        how = {"window": window, "dtype": dtype, "sinks": parts[3] if window else None}
        return cudnn.packed_attention(*parts[:3], ids, prefixes, **how)

    near = (jnp.int32(window), jnp.asarray(positions_of(*packed)))

    def plainly(*parts):
        flat = (part.reshape(*part.shape[:2], -1) for part in parts[:3])
        how = {"near": near, "sinks": parts[3] if window else None}
        return jnp.where(real, causal_attention(*flat, ids, prefixes, **how).reshape(parts[0].shape), 0)

    def all_of(attention):
        out, back = jax.vjp(attention, *parts)
        return out, *back(jnp.where(real, along, 0))

    with jax.default_matmul_precision("highest"):
        return jax.jit(lambda: all_of(by_cudnn))(), jax.jit(lambda: all_of(plainly))()


@pytest.mark.parametrize(
    ("case", "tokens", "window"),
    [
        *((case, 64, 0) for case in QUICK), ("one room", 64, 5), ("three rooms", 16_384, 30),
        # Slow: other programs. The quick cases have all copies of a prompt in one batch, several rooms, and a part of a room.
        *(pytest.param(case, 64, 0, marks=pytest.mark.slow) for case in CASES if case not in QUICK),
        *(pytest.param(case, 16_384, 0, marks=pytest.mark.slow) for case in ("three rooms", "short segments")),
    ],
)  # fmt: skip
def test_packed_rows_attend_as_with_xla(case, tokens, window, monkeypatch):
    """In float32, only the order of sums differs. With 64 tokens, the copies of a prompt are in several batches. Windows end in a prompt and in a response."""
    monkeypatch.setattr(cudnn, "BATCH_TOKENS", tokens)
    monkeypatch.setattr(cudnn, "_SHORTEST", 16)
    monkeypatch.setattr(cudnn, "attend", attend)
    monkeypatch.setattr(cudnn, "attend_backward", attend_backward)
    found, expected = both(CASES[case], 8, "float32", window=window)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)
    assert not np.asarray(found[0])[:, :, CASES[case][0] == 0].any()


@pytest.mark.gpu
@pytest.mark.parametrize("window", [0, 250])
def test_on_a_gpu_packed_rows_attend_as_with_xla(window):
    """Weights, results and their cotangents are rounded by 2^-8 each, which is 2^-6 of a gradient's norm in total."""
    rows = [(200, 700, 300, 40), (31, 9), (500,)], [(2048,)]
    found, expected = both(rows_of(*rows, seq=2048), 128, "bfloat16", window=window)
    for one, other in zip(found, expected, strict=True):
        assert np.linalg.norm(one - other) < 2**-6 * np.linalg.norm(other)


# Slow: a gradient each. Three key heads are in several calls, too.
@pytest.mark.parametrize(
    ("heads", "kv_heads"),
    [(6, 3), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((4, 2), (14, 2), (7, 1), (1, 1)))],
)
def test_gradients_of_some_heads_at_a_time_are_the_gradients_of_all_heads(heads, kv_heads, monkeypatch):
    """At most two heads fit into the workspace. A single key head is in several calls."""
    calls = []

    def call(name, operands, like, others, products, window):
        *given, lengths, _ = operands
        calls.append(given[0].shape[2])
        return attend_backward(*given, lengths, window), None

    rng = np.random.default_rng(0)
    q, k, v, d_out = (
        jnp.asarray(rng.normal(size=(2, 16, n, 4)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    lengths = jnp.array([11, 16], jnp.int32)
    out, logs = (jnp.nan_to_num(x) for x in attend(q, k, v, lengths, 5))
    monkeypatch.setattr(cudnn, "_call", call)
    expected = cudnn.attend_backward(q, k, v, logs, d_out, out, lengths, 5)
    assert calls == [heads]
    monkeypatch.setattr(cudnn, "WORKSPACE_BYTES", cudnn.workspace_bytes(2, 2, 16))
    found = cudnn.attend_backward(q, k, v, logs, d_out, out, lengths, 5)
    assert sum(calls[1:]) == heads
    assert max(calls[1:]) <= 2
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-5)


compiles = pytest.mark.skipif(
    importlib.util.find_spec("jax_cuda12_plugin") is None, reason="the extra cuda-plan"
)


def lowered(attention, rows, seq, heads, kv_heads, width):
    """The result and the gradients, for a described H100."""
    placed = jax.sharding.SingleDeviceSharding(devices_of(parse("h100:1"))[0])
    ids = jax.ShapeDtypeStruct((rows, seq), jnp.int32, sharding=placed)
    parts = [
        jax.ShapeDtypeStruct((count, width, rows * seq), jnp.float32, sharding=placed)
        for count in (heads, kv_heads, kv_heads, heads)
    ]

    def all_of(q, k, v, along, ids, prefixes):
        out, back = jax.vjp(lambda *parts: attention(*parts, ids, prefixes, dtype="bfloat16"), q, k, v)
        return out, *back(along)

    return jax.jit(all_of).lower(*parts, ids, ids)


def by_cudnn(query, key, value, ids, prefixes, dtype, window=0):
    parts = (part.reshape(*part.shape[:2], *ids.shape) for part in (query, key, value))
    return cudnn.packed_attention(*parts, ids, prefixes, window=window, dtype=dtype).reshape(query.shape)


def largest(text):
    """The number of elements of the largest array in a compiled program."""
    return max(
        math.prod(map(int, sizes.split(","))) for sizes in re.findall(r"[a-z]+[0-9]+\[([0-9,]+)\]", text)
    )


@compiles
def test_compiled_for_an_h100_it_has_cudnn_s_calls_and_no_array_of_scores():
    """The scores of a single head would have 1024^2 elements, four times as many as the queries."""
    text = lowered(partial(by_cudnn, window=256), 1, 1024, 4, 2, 64).compile().as_text()
    targets = re.findall(r'custom_call_target="(\S+)"', text)
    assert {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"} == set(targets)
    assert largest(text) == 1024 * 4 * 64
    assert not_repeatable(text, flags=FLAGS) == []


@compiles
def test_compiled_for_an_h100_layers_share_what_follows_from_segments_and_no_branch_stops_the_host():
    """Sequences are sorted once, also for the backward pass. The other sort is part of the embedding's gradient. Before a branch, the host waits for the device."""
    config = replace(tiny_decoder_config(), head_dim=64, layers=2)
    mesh = make_mesh(devices=devices_of(parse("h100:2")), tensor=2)
    how = {"compute_dtype": "bfloat16", "remat": "full", "layout": layout_of(mesh, attention="cudnn")}
    graph, params = nnx.split(nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(0), **how)))
    whole = NamedSharding(mesh, PartitionSpec())
    ids = jax.ShapeDtypeStruct((2, 512), jnp.int32, sharding=whole)
    params = jax.tree.map(lambda x, place: x.update(sharding=place), params, shardings(params, mesh))

    def loss(params, *ids):
        def program(params, ids):
            hidden = nnx.merge(graph, params)(*ids)
            return ((hidden * hidden).sum(-1),)

        return how["layout"].shard(program)(params, ids)[0].sum()

    text = jax.jit(jax.grad(loss)).lower(params, *[ids] * 4).compile().as_text()
    assert text.count(" sort(") == 2
    assert " conditional(" not in text


def test_layers_that_share_their_sequences_have_the_gradients_of_xla_s_attention(monkeypatch):
    """All layers are recomputed in the backward pass. In float32, the gradients differ only in the order of sums."""
    monkeypatch.setattr(cudnn, "_SHORTEST", 16)
    monkeypatch.setattr(cudnn, "attend", attend)
    monkeypatch.setattr(cudnn, "attend_backward", attend_backward)
    ids, prefixes = CASES["one room"]
    config, mesh = tiny_decoder_config(), make_mesh(devices=jax.devices()[:1])
    tokens = np.random.default_rng(0).integers(2, config.vocab_size, ids.shape).astype(np.int32)

    def gradients(attention):
        layout = layout_of(mesh, attention=attention)
        graph, params = nnx.split(Decoder(config, rngs=nnx.Rngs(0), remat="full", layout=layout))

        def program(params, given):
            hidden = nnx.merge(graph, params)(*given)
            return (jnp.where(given[2] > 0, jnp.sin(hidden).sum(-1), 0.0),)

        def loss(params):
            given = jax.tree.map(jnp.asarray, (tokens, positions_of(ids, prefixes), ids, prefixes))
            return layout.shard(program)(params, given)[0].sum()

        with jax.default_matmul_precision("highest"):
            return jax.tree.leaves(jax.jit(jax.grad(loss))(params))

    for one, other in zip(gradients("cudnn"), gradients("xla"), strict=True):
        assert np.linalg.norm(one - other) <= 1e-5 * np.linalg.norm(other)


def test_a_shared_prompt_is_computed_with_its_first_response():
    """Sequences are 10 + 12, 10 + 20 and 7 tokens in the first row, and 5, 5 + 1 and 5 + 2 in the second. None is the prompt of 10 or 5 with responses."""
    ids, prefixes = rows_of([(10, 12, 20), (7,)], [(5,), (5, 1, 2)], seq=64)
    found = cudnn.packed(jnp.asarray(ids), jnp.asarray(prefixes))
    first, *_, last = found.ends.tolist()
    assert sorted(found.length[first:last].tolist()) == [5, 6, 7, 7, 22, 30]


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        # Batches have 2 sequences of 512, 8 of 128, or 32 of 32 tokens.
        ([300, 400, 500, 100, 20, 20], [2, 0, 1]),
        ([300, 400, 100, 20, 20], [1, 1, 0]),
        ([20], [0, 0, 1]),
        ([100] * 9 + [20] * 40, [0, 2, 2]),
        ([], [0, 0, 0]),
    ],
)
def test_shorter_sequences_fill_the_last_batch_of_a_longer_padded_length(lengths, batches, monkeypatch):
    monkeypatch.setattr(cudnn, "_SHORTEST", 32)
    monkeypatch.setattr(cudnn, "BATCH_TOKENS", 1024)
    ids, prefixes = rows_of(*([(length,)] for length in lengths), *[[]] * (50 - len(lengths)), seq=512)
    ends = cudnn.packed(jnp.asarray(ids), jnp.asarray(prefixes)).ends.tolist()
    assert ends[-1] - ends[0] == len(lengths)
    assert [-(-(b - a) // size) for a, b, size in zip(ends, ends[1:], (2, 8, 32), strict=False)] == batches


def test_only_cudnn_multiplies_and_no_array_is_larger_than_the_queries():
    """In particular, the sum over the copies of a prompt is no product, and does not store a float32 copy of each gradient. The gradients of keys and values are
    one float32 array, here as large as the queries. A batch has 16,384 tokens, like these rows."""
    ids, prefixes = map(jnp.asarray, rows_of([(300, *[700] * 10)], [(8192,)], seq=8192))

    def gradients(q, k, v):
        out, back = jax.vjp(
            lambda *parts: cudnn.packed_attention(*parts, ids, prefixes, dtype="bfloat16"), q, k, v
        )
        return back(out)

    text = str(jax.make_jaxpr(gradients)(*(jnp.zeros((n, 8, *ids.shape)) for n in (4, 2, 2))))
    assert "dot_general" not in text
    assert largest(text) == 4 * 8 * 16_384


@compiles
@pytest.mark.slow  # XLA's attention takes minutes to compile.
def test_at_long_rows_temporaries_are_a_fifth_of_xla_s():
    """The heads of Qwen3-0.6B. cuDNN's workspace is not compiled: 8 bytes for each element of a batch's queries, as measured on one H100 80GB with jax 0.11.2."""
    shape = 2, 16_384, 16, 8, 128
    programs = {
        name: lowered(each, *shape).compile()
        for name, each in (("xla", causal_attention), ("cudnn", by_cudnn))
    }
    found = {name: each.memory_analysis().temp_size_in_bytes for name, each in programs.items()}
    workspace = 8 * 16_384 * 16 * 128
    assert 5 * (found["cudnn"] + workspace) <= found["xla"]
    assert largest(programs["cudnn"].as_text()) == 2 * 16_384 * 16 * 128


def calls(text):
    """The names, the descriptions, the operands and the results of cuDNN's calls in a lowered program."""
    found = []
    for line in text.splitlines():
        if "@__cudnn" in line:
            config = json.loads(re.search(r'backend_config = "(.*?)"', line)[1].replace("\\22", '"'))
            layouts = re.findall(r"dense<\S+> : tensor<\S+>", line)
            found.append((re.search(r"@(\S+)\(%", line)[1], config, layouts, line.split("} : ")[1]))
    return found


@compiles
def test_the_workspace_of_gradients_of_long_rows_is_bounded():
    """The 16 heads of one row of 16,384 tokens together would need 16 x 16,384^2 x 2 bytes = 8 GiB, and four sequences of 4,096 tokens 2 GiB."""
    text = lowered(by_cudnn, 1, 16_384, 16, 8, 128).as_text()
    dims = [
        list(map(int, config["cudnn_fmha_backend_config"]["intermediate_tensor_shape"]["dimensions"]))
        for name, config, *_ in calls(text)
        if "Backward" in name
    ]
    assert {16_384, 4096, 1024, 256} == {room for *_, room in dims}
    assert {(heads, room) for _, heads, room, _ in dims} == {(2, 16_384), (8, 4096), (16, 1024), (16, 256)}
    assert max(2 * math.prod(each) for each in dims) == cudnn.WORKSPACE_BYTES


@compiles
@pytest.mark.skipif(
    not (importlib.util.find_spec("nvidia") and importlib.util.find_spec("nvidia.cudnn")),
    reason="nvidia-cudnn-cu12",
)
@pytest.mark.parametrize("window", [0, 20])
def test_its_calls_are_those_of_jax(window):
    placed = jax.sharding.SingleDeviceSharding(devices_of(parse("h100:1"))[0])
    q, k, d = (jax.ShapeDtypeStruct((3, 96, n, 64), jnp.bfloat16, sharding=placed) for n in (4, 2, 4))
    lengths = jax.ShapeDtypeStruct((3,), jnp.int32, sharding=placed)

    def by_jax(q, k, v, d_out, lengths):
        how = {"query_seq_lengths": lengths, "key_value_seq_lengths": lengths, "implementation": "cudnn"}
        how |= {"local_window_size": (window - 1, 0)} if window else {}
        out, back = jax.vjp(partial(jax.nn.dot_product_attention, is_causal=True, **how), q, k, v)
        return out, *back(d_out)

    def ours(q, k, v, d_out, lengths):
        out, logs = cudnn.attend(q, k, v, lengths, window)
        return out, *cudnn.attend_backward(q, k, v, logs, d_out, out, lengths, window)

    expected, found = (calls(jax.jit(each).lower(q, k, k, d, lengths).as_text()) for each in (by_jax, ours))
    assert [call[0] for call in found] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert found == expected
