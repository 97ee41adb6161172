"""The paged caches against attention in float64 and against the cache of whole slots.

The kernels are interpreted here; with `-m tpu` or `-m gpu` the same tests run on the accelerator.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from dapo_jax.models.layer_kinds import Paged
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.sampling import cache as dense
from dapo_jax.sampling import gpu_cache, tpu_cache
from dapo_jax.sampling.cache_sizes import slot_pages
from dapo_jax.sampling.caches import cache_for, kind_for, page_tokens_for, sizes_for, without_kernel
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.testing import tiny_decoder_config

KINDS = [
    pytest.param(("pages", "cpu"), id="xla"),
    pytest.param(("tpu", "cpu"), id="tpu's kernel interpreted"),
    pytest.param(("gpu", "cpu"), id="gpu's kernel interpreted"),
    pytest.param(("tpu", "tpu"), marks=pytest.mark.tpu, id="tpu"),
    pytest.param(("gpu", "gpu"), marks=pytest.mark.gpu, id="gpu"),
]


def decoder_with(kv_heads, head_dim, windows=(), cap=None):
    sizes = {"heads": kv_heads, "kv_heads": kv_heads, "head_dim": head_dim, "layers": len(windows) or 1}
    return tiny_decoder_config(**sizes, windows=windows, score_cap=cap)


class Filled:
    """A cache whose pages are all filled, with page tables in random order. Keys and values are kept apart."""

    def __init__(
        self, kind, slots, kv_heads, capacity, head_dim, dtype, *, page_tokens=32, spare=3, seed=0, **masks
    ):
        name, platform = kind
        self.mesh = make_mesh(devices=jax.devices(platform)[:1])
        sizes = sizes_for(name, self.mesh, holders=slots, capacity=capacity, page_tokens=page_tokens)
        self.kind, self.sizes, self.slots = name, sizes, slots
        self.config = decoder_with(kv_heads, head_dim, **masks)
        self.functions = cache_for(
            name, self.mesh, sizes, self.config, cache_dtype=dtype, compute_dtype=dtype
        )
        rng, count = np.random.default_rng(seed), slots * sizes.table_pages + spare
        self.tables = rng.permutation(count)[: slots * sizes.table_pages].reshape(slots, -1).astype(np.int32)

        def some():
            drawn = rng.normal(size=(count, kv_heads, page_tokens, head_dim)).astype(np.float32)
            return np.array(jnp.asarray(drawn).astype(dtype).astype(jnp.float32))

        self.keys, self.values, self.dtype = some(), some(), dtype

    def extended(self, new, lengths, live=None, *, dtype=None, window=None, **only):
        """One step: (attention, keys, values), with keys and values times their scales. `dtype` is the cache's, if it has eight bits."""
        functions, dtype = self.functions, dtype or self.dtype
        only |= {} if window is None else {"window": window}
        if dtype != self.dtype:
            how = {"cache_dtype": dtype, "compute_dtype": "float32"}
            functions = cache_for(self.kind, self.mesh, self.sizes, self.config, **how)
        count, kv_heads, page_tokens, head_dim = self.keys.shape
        live = np.ones(self.slots, bool) if live is None else np.asarray(live)

        @jax.jit
        def step(keys, values, tables, lengths, live, *new):
            read = functions.of_rows(keys, values, count, dtype)
            layer = functions.empty(count, kv_heads, page_tokens, head_dim, dtype)
            layer = jax.lax.fori_loop(
                0, count, lambda page, layer: functions.fill(layer, read, page, page, jnp.int32(0)), layer
            )
            return functions.extend(layer, functions.reading(tables, lengths, live), *new, **only)

        rows = [
            part.transpose(1, 3, 0, 2).reshape(kv_heads, head_dim, -1) for part in (self.keys, self.values)
        ]
        # A GPU would otherwise round float32 operands to TF32.
        with jax.default_matmul_precision("highest" if self.kind == "gpu" else None):
            found = step(*rows, self.tables, np.asarray(lengths, np.int32), live, *new)
        out, grown = jax.device_get(found)
        if isinstance(grown, tpu_cache.Pairs):
            parts = np.split(np.asarray(grown.pairs, np.float32), 2, axis=-1)
            scales = (None, None) if grown.scales is None else (grown.scales[:, :, 0], grown.scales[:, :, 1])
        else:
            keys, values = np.asarray(grown.keys, np.float32), np.asarray(grown.values, np.float32)
            parts = keys if functions.empty is gpu_cache.empty else keys.swapaxes(2, 3), values
            scales = grown.key_scales, grown.value_scales
        return out, *(
            part if by is None else part * by[..., None] for part, by in zip(parts, scales, strict=True)
        )

    def of_slot(self, array, slot):
        """[kv_heads, tokens, head_dim] of a slot's pages, in order."""
        return np.concatenate(list(array[self.tables[slot]]), axis=1)


def new_token(slots, heads, kv_heads, head_dim, dtype, seed=1):
    """Query, key and value, [heads, head_dim, slots], representable in the dtype."""
    rng = np.random.default_rng(seed)
    shapes = [(count, head_dim, slots) for count in (heads, kv_heads, kv_heads)]
    drawn = [jnp.asarray(rng.normal(size=shape).astype(np.float32)) for shape in shapes]
    return [part.astype(dtype).astype(jnp.float32) for part in drawn]


def attend(query, keys, values, cap=None, sink=-np.inf):
    """softmax(query keys) values in float64, and the same with absolute values. `cap` caps the scores. `sink` is the score of a further key, whose value is 0."""
    scores = keys.astype(np.float64) @ query.astype(np.float64)
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    top = max(scores.max(), sink)
    weights = np.exp(scores - top)
    weights /= weights.sum() + np.exp(sink - top)
    return weights @ values, weights @ np.abs(values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_that_reads_the_cache_of_an_earlier_layer_does_not_write_to_it(kind):
    """The earlier layer has appended the token. Attention is the same, bit for bit, and the cache does not change, not even if the keys and values are others."""
    there = Filled(kind, 3, 2, 60, 8, "float32", page_tokens=16)
    query, key, value = new_token(3, 4, 2, 8, "float32")
    expected, *grown = there.extended((query, key, value), lengths := [0, 17, 59])
    there.keys, there.values = grown
    found, *_ = there.extended((query, key, value), lengths, appends=False)
    np.testing.assert_array_equal(found, expected)
    _, *after = there.extended((query, key + 1.0, value + 1.0), lengths, appends=False)
    np.testing.assert_array_equal(after, grown)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "capacity", "page_tokens", "dtype"),
    [
        (10, 2, 128, 1300, 128, "bfloat16"),
        (7, 1, 64, 600, 64, "bfloat16"),
        (6, 3, 32, 40, 16, "float32"),
        (4, 2, 8, 300, 16, "bfloat16"),
    ],
    ids=[
        "halves of the heads, 11 pages",
        "one head of 64",
        "three heads, three pages",
        "narrow heads, 19 pages",
    ],
)
def test_a_live_slot_attends_to_its_tokens_and_the_new_one(
    kind, heads, kv_heads, head_dim, capacity, page_tokens, dtype
):
    """Slots: full except for one token, with a new token at the start of a page, with a single token, and not live.

    In float32 sums differ by their order. In bfloat16 a weight is rounded by at most 2^-9 of itself, and so is the result of the kernel
    on GPU: together by 2^-8 of the sum of |weight x value|.
    """
    lengths = np.array([capacity - 1, capacity // 2 // page_tokens * page_tokens, 1, 7], np.int32)
    live = np.array([True, True, True, False])
    there = Filled(kind, 4, kv_heads, capacity, head_dim, dtype, page_tokens=page_tokens)
    query, key, value = new_token(4, heads, kv_heads, head_dim, dtype)
    found, grown_keys, grown_values = there.extended((query, key, value), lengths, live)
    scaled = np.asarray((query * head_dim**-0.5).astype(dtype).astype(jnp.float32))
    for slot, length in enumerate(lengths[:3]):
        page = there.tables[slot, length // page_tokens]
        for array, new in ((there.keys, key), (there.values, value)):
            array[page, :, length % page_tokens] = np.asarray(new)[:, :, slot]
        keys, values = there.of_slot(there.keys, slot), there.of_slot(there.values, slot)
        for head in range(heads):
            seen = head // (heads // kv_heads), slice(0, length + 1)
            exact, summed = attend(scaled[head, :, slot], keys[seen], values[seen])
            slack = (2**-8 if dtype == "bfloat16" else 0) * summed + 1e-5
            assert (np.abs(found[head, :, slot] - exact) <= slack).all(), (slot, head)
    assert not found[:, :, 3].any()
    # No other page has changed.
    np.testing.assert_array_equal(grown_keys, there.keys)
    np.testing.assert_array_equal(grown_values, there.values)


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_live_slot_nothing_is_written(kind):
    there = Filled(kind, 3, 2, 40, 8, "float32", page_tokens=16)
    out, keys, values = there.extended(new_token(3, 4, 2, 8, "float32"), [40, 3, 0], np.zeros(3, bool))
    assert not out.any()
    np.testing.assert_array_equal(keys, there.keys)
    np.testing.assert_array_equal(values, there.values)


@pytest.mark.parametrize("kind", KINDS)
def test_a_slots_result_does_not_depend_on_its_neighbours_to_the_last_bit(kind):
    there, new = Filled(kind, 3, 2, 600, 8, "float32"), new_token(3, 4, 2, 8, "float32")

    def second(first, third, *, live=(True, True, True)):
        return there.extended(new, [first, 550, third], live)[0][..., 1]

    alone = second(0, 0, live=(False, True, False))
    np.testing.assert_array_equal(second(599, 3), alone)
    np.testing.assert_array_equal(second(5, 512), alone)


@pytest.mark.parametrize("kind", KINDS)
def test_old_contents_of_a_page_never_show_not_even_nan(kind):
    """After the tokens of a slot, and in the pages of others."""
    there, new, lengths = (
        Filled(kind, 3, 2, 100, 8, "float32"),
        new_token(3, 4, 2, 8, "float32"),
        [70, 31, 32],
    )
    clean, _, _ = there.extended(new, lengths)
    there.keys, there.values = there.keys.copy(), there.values.copy()
    own = np.zeros((len(there.keys), 32), bool)
    for slot, length in enumerate(lengths):
        for page in range(length // 32 + 1):
            own[there.tables[slot, page], : min(32, length - 32 * page)] = True
    for array in (there.keys, there.values):
        array.transpose(0, 2, 1, 3)[~own] = np.nan
    poisoned, _, _ = there.extended(new, lengths)
    np.testing.assert_array_equal(poisoned, clean)


@pytest.mark.parametrize("kind", KINDS)
# Slow: compiles every cache again. int8 has scales, too.
@pytest.mark.parametrize("dtype", ["int8", pytest.param("float8_e4m3fn", marks=pytest.mark.slow)])
def test_a_cache_in_eight_bits_attends_to_its_scaled_values(kind, dtype):
    """Compared with attention in float64 over keys and values times their scales, including the rounded new token.

    int8 rounds by at most half of 1 / 127 of the largest. float8 has 3 bits after the leading one: it rounds by 2^-4 of a number, or
    of the smallest normal one, 2^-6 of 448. Products in float32 add 1e-5.
    """
    slots, kv_heads, head_dim, lengths = 3, 2, 64, [130, 0, 255]
    there = Filled(kind, slots, kv_heads, 300, head_dim, "float32", page_tokens=128)
    query, key, value = new_token(slots, 4, kv_heads, head_dim, "float32")
    exact = there.keys.copy(), there.values.copy()
    found, *grown = there.extended((query, key, value), lengths, dtype=dtype)
    scaled = np.asarray(query) * head_dim**-0.5
    for array, original, new in zip(grown, exact, (key, value), strict=True):
        for slot, length in enumerate(lengths):
            original[there.tables[slot, length // 128], :, length % 128] = np.asarray(new)[:, :, slot]
        largest = np.abs(original).max(-1, keepdims=True)
        off = largest / 127 / 2
        if dtype != "int8":
            off = np.maximum(np.abs(original) / 16, largest / 448 / 2**6 / 16)
        assert (np.abs(array - original) <= off * 1.001).all()
    for slot, length in enumerate(lengths):
        keys, values = (there.of_slot(array, slot) for array in grown)
        for head in range(4):
            seen = head // 2, slice(0, length + 1)
            expected, _ = attend(scaled[head, :, slot], keys[seen], values[seen])
            np.testing.assert_allclose(found[head, :, slot], expected, rtol=0, atol=1e-5)


def test_prompts_are_written_to_pages_as_in_the_other_caches():
    """Two rows of 3 tokens; the second, from its second token on, goes into the last of three pages of 16."""
    tokens = np.arange(1, 2 * 4 * 6 + 1, dtype=np.float32).reshape(2, 4, 6)
    where = [jnp.int32(number) for number in (2, 1, 1)]

    def filled_by(kind):
        read = kind.of_rows(jnp.asarray(tokens), -jnp.asarray(tokens), 2, "float32")
        return kind.fill(kind.empty(3, 2, 16, 4, "float32"), read, *where)

    pairs, apart = filled_by(tpu_cache), filled_by(dense)
    expected = np.concatenate([apart.keys.swapaxes(2, 3), apart.values], axis=-1)
    np.testing.assert_array_equal(pairs.pairs, expected)


def test_the_cache_is_the_one_for_the_meshs_platform():
    """On a CPU, pages are slower than slots of up to 256 tokens, so they are used only on request or for longer slots."""
    mesh = make_mesh(devices=jax.devices("cpu")[:1])
    how = {"config": decoder_with(2, 8), "cache_dtype": "float32", "compute_dtype": "float32"}
    assert kind_for(mesh) == kind_for(mesh, capacity=256) == "slots"
    assert kind_for(mesh, capacity=257) == "pages"
    assert kind_for(mesh, paged=True) == kind_for(mesh, dtype="int8") == "pages"
    for accelerator, kind in ((GPU, "gpu"), (TPU, "tpu")):
        assert (kind_for(accelerator, dtype="int8"), without_kernel(accelerator, "int8")) == (kind, "")
    assert cache_for("slots", mesh, slot_pages(4, 24), **how) is dense.DENSE
    sizes = sizes_for("tpu", mesh, holders=4, capacity=24, page_tokens=128)
    assert cache_for("tpu", mesh, sizes, **how).empty is tpu_cache.empty


def test_a_pool_has_room_for_all_slots_by_default():
    """Capacity 100 in pages of 32 is 4 pages a slot; 1,000 tokens are 31 pages; of two devices each has half."""
    one, two = (make_mesh(data=n, fsdp=1, devices=jax.devices("cpu")[:n]) for n in (1, 2))
    how = {"holders": 10, "capacity": 100, "page_tokens": 32}
    for mesh, tokens, pools, pages in (
        (one, 0, 1, 40),
        (one, 1000, 1, 31),
        (two, 1000, 2, 15),
        (one, 10**6, 1, 40),
    ):
        sizes = sizes_for("pages", mesh, **how, cache_tokens=tokens)
        assert (sizes.table_pages, sizes.pools, sizes.pool_pages) == (4, pools, pages)


def test_a_cache_that_cannot_hold_one_sequence_is_refused():
    mesh = make_mesh(devices=jax.devices("cpu")[:1])
    with pytest.raises(ValueError, match=r"cache_tokens=100 is 3 pages of 32 .* need 4: set it to 128"):
        sizes_for("pages", mesh, holders=10, capacity=100, page_tokens=32, cache_tokens=100)


@pytest.mark.parametrize(
    ("kind", "page_tokens", "message"),
    [
        ("tpu", 20, r"page_tokens=20 must be a multiple of 16 .* 32$"),
        ("gpu", 48, r"page_tokens=48 must be a power of two.* 64$"),
        *((kind, 512, r"page_tokens=512 must be at most 128") for kind in ("pages", "tpu", "gpu")),
    ],
)
def test_sizes_of_pages_that_do_not_fit_are_refused(kind, page_tokens, message):
    mesh, sizes = make_mesh(devices=jax.devices("cpu")[:1]), {"slots": 10, "capacity": 100}
    spec = EngineSpec(**sizes, steps_per_call=4, stop_ids=[], cache=kind, page_tokens=page_tokens)
    with pytest.raises(ValueError, match=message):
        spec.page_sizes(decoder_with(2, 128), mesh, holders=10, call_tokens=4)


def test_pages_double_until_the_page_tables_fit_in_a_tpus_scalar_memory():
    """The kernel reads blocks of 2,048 tokens: 1 MiB of one head's 128 numbers of 2 bytes, for keys and values. 32,768 tokens are 16 blocks, and 256 pages of 128 tokens.
    So a slot has 2 + 16 + 256 = 274 numbers of 4 bytes, and 1,032,192 // 1,096 = 941 slots fit. With pages of 256 tokens, a row has 128 entries:
    1,032,192 // 584 = 1,767."""
    config = decoder_with(2, 128)

    def found(kind, slots, devices=1):
        mesh = make_mesh(data=devices, fsdp=1, devices=jax.devices("cpu")[:devices])
        return page_tokens_for(kind, mesh, config, slots=slots, capacity=32768, dtype="bfloat16")

    assert [found("tpu", slots) for slots in (1, 941, 942, 1767)] == [128, 128, 256, 256]
    assert [found("tpu", slots, devices=2) for slots in (1882, 1884)] == [128, 256]
    assert found("gpu", 1768) == found("pages", 1768) == 64
    with pytest.raises(ValueError, match=r"sampling\.slots=1768 .* 1767 or less"):
        found("tpu", 1768)


class Gpu:
    platform, device_kind, process_index, id = "gpu", "NVIDIA H100", 0, 0


class Tpu:
    platform, device_kind, process_index, id = "tpu", "TPU v5e", 0, 0


GPU, TPU = (Mesh(np.array([device]), ("data",)) for device in (Gpu(), Tpu()))


def test_a_cache_of_latents_is_read_with_xla():
    states = (Paged(1, 24, value_dim=16),)
    for accelerator in (GPU, TPU):
        assert kind_for(accelerator, dtype="bfloat16", states=states) == "pages"
        assert "stores only a latent" in without_kernel(accelerator, "bfloat16", states)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("window", "dtype"), [(1, "float32"), (40, "float32"), (400, "float32"), (200, "int8")]
)
def test_a_window_a_cap_and_sinks_limit_what_a_new_token_attends_to(kind, dtype, window, monkeypatch):
    """Against attention in float64, in blocks of two pages of 128 tokens.

    The windows begin in the first block, at and within pages, and in a later block. All tokens before the window and after the slot's last are NaN, so none of
    them is used; eight-bit caches have no NaN. Tolerances are as in the tests above: products in float32.
    """
    cap, head_dim, page_tokens, lengths = 1.5, 64, 128, [639, 0, 39, 384, 255]
    monkeypatch.setattr(tpu_cache, "_BLOCK_BYTES", 2 * page_tokens * 2 * head_dim * jnp.dtype(dtype).itemsize)
    masks = {"windows": (window, 0), "cap": cap}
    there = Filled(kind, 5, 1, 640, head_dim, "float32", page_tokens=page_tokens, **masks)
    query, key, value = new_token(5, 2, 1, head_dim, "float32")
    if dtype == "float32":
        first = [length + 1 - window for length in lengths]
        for slot, length in enumerate(lengths):
            for place, page in enumerate(there.tables[slot]):
                token = place * page_tokens + np.arange(page_tokens)
                there.keys[page, :, (token < first[slot]) | (token >= length)] = np.nan
                there.values[page, :, (token < first[slot]) | (token >= length)] = np.nan
    sinks = [jnp.array([0.5, 4.0])] if window > 1 else []
    found, keys, values = there.extended((query, key, value, *sinks), lengths, dtype=dtype, window=window)
    scaled = np.asarray(query) * head_dim**-0.5
    for slot, length in enumerate(lengths):
        seen = slice(max(length + 1 - window, 0), length + 1)
        for head in range(2):
            own_keys, own_values = (there.of_slot(array, slot)[0, seen] for array in (keys, values))
            sink = float(sinks[0][head]) if sinks else -np.inf
            exact, _ = attend(scaled[head, :, slot], own_keys, own_values, cap=cap, sink=sink)
            np.testing.assert_allclose(found[head, :, slot], exact, rtol=0, atol=1e-5)


def test_without_the_kernels_compiler_decoding_on_a_gpu_uses_xla_and_reports_it(monkeypatch):
    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.triton", None)
    assert kind_for(GPU, dtype="bfloat16") == "pages"
    assert f"jax {jax.__version__} no longer includes" in without_kernel(GPU, "bfloat16")


@pytest.mark.parametrize(
    ("capability", "kind"), [("8.0", "pages"), ("8.9", "gpu"), ("12.0", "gpu"), ("gfx942", "gpu")]
)
def test_a_float8_cache_uses_xla_on_a_gpu_for_which_triton_cannot_convert_it(capability, kind):
    """The compiler ends the process if it is asked to."""
    device = Gpu()
    device.compute_capability = capability
    mesh = Mesh(np.array([device]), ("data",))
    assert kind_for(mesh, dtype="float8_e4m3fn") == kind
    assert (f"this GPU has {capability}" in without_kernel(mesh, "float8_e4m3fn")) == (kind == "pages")
    assert kind_for(mesh, dtype="int8") == "gpu"
