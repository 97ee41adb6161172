"""The chunked forms of Gated DeltaNet and Mamba-2 against their recurrences, token by token in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.mamba import Mamba
from dapo_jax.models.recurrent import Mixed, RecurrentState, ancestors, one_token, over_rows
from dapo_jax.testing import tiny_decoder_config

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 8, 6, 4
DELTA = GatedDelta(KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, taps=TAPS)
MAMBA = Mamba(VALUE_HEADS, VALUE_DIM, KEY_HEADS, KEY_DIM, taps=TAPS)
SHAPES = (KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM)
KINDS = pytest.mark.parametrize("kind", [DELTA, MAMBA], ids=["delta", "mamba"])


def inputs(kind, tokens, seed=0, dtype=np.float64, strong=False):
    """With `strong`, most tokens keep the state, and one in 16 erases it, by a factor from e^-10 to e^-50.

    In Mamba-2, one step determines both the decay and the write strength. Its filters are half as large, because keys and queries are not normalized.
    """
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape).astype(dtype)

    # Decays of 1 % to 90 % a token, as in released models.
    decay = -np.exp(normal(VALUE_HEADS, tokens) - 2)
    if strong:
        erased = random.random(decay.shape) < 1 / 16
        decay = np.where(erased, -random.integers(10, 51, decay.shape), decay / 64).astype(dtype)
    size, more = 0.5 if kind == MAMBA else 1.0, {}
    if kind == MAMBA:
        more = {"biases": tuple(0.1 * normal(*shape) for shape in SHAPES), "skip": normal(VALUE_HEADS)}
    return Mixed(
        query=normal(KEY_HEADS, KEY_DIM, tokens), key=normal(KEY_HEADS, KEY_DIM, tokens), value=normal(VALUE_HEADS, VALUE_DIM, tokens),
        decay=decay, write=np.minimum(-decay, 1) if kind == MAMBA else 1 / (1 + np.exp(-normal(VALUE_HEADS, tokens))),
        filters=tuple(size * normal(heads, dim, 1, TAPS) for heads, dim in SHAPES), **more,
    )  # fmt: skip


def recurrence(kind, mixed, columns):
    """Outputs and final state of one sequence, which consists of the tokens `columns`: the formulas of the papers, token by token in float64."""
    delta = kind == DELTA
    biases = mixed.biases or [np.zeros(shape) for shape in SHAPES]

    def convolved(x, filters, bias):
        x = np.concatenate([np.zeros((*x.shape[:2], TAPS - 1)), x[:, :, columns]], axis=2)
        y = sum(filters[:, :, 0, i, None] * x[:, :, i : i + len(columns)] for i in range(TAPS))
        y = y + np.asarray(bias, np.float64)[..., None]
        return y / (1 + np.exp(-y)), x[:, :, -(TAPS - 1) :]

    (query, q), (key, k), (value, v) = (
        convolved(np.asarray(x, np.float64), np.asarray(f, np.float64), bias)
        for x, f, bias in zip(mixed[:3], mixed.filters, biases, strict=True)
    )
    if delta:
        query, key = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (query, key))
        query = query / np.sqrt(KEY_DIM)
    out, memory = [], np.zeros((VALUE_HEADS, KEY_DIM, VALUE_DIM))
    for t, column in enumerate(columns):
        for head in range(VALUE_HEADS):
            its_key = key[head // (VALUE_HEADS // KEY_HEADS), :, t]
            decayed = np.exp(np.float64(mixed.decay[head, column])) * memory[head]
            kept = decayed.T @ its_key if delta else 0.0
            change = np.float64(mixed.write[head, column]) * (value[head, :, t] - kept)
            memory[head] = decayed + np.outer(its_key, change)
        of_head = query[np.arange(VALUE_HEADS) // (VALUE_HEADS // KEY_HEADS), :, t]
        skip = 0.0 if mixed.skip is None else np.asarray(mixed.skip, np.float64)[:, None] * value[:, :, t]
        out.append(np.einsum("hde,hd->he", memory, of_head) + skip)
    return np.stack(out, axis=-1), memory, (q, k, v)


def blank(kind, sequences, dtype="float32"):
    return kind.state(tiny_decoder_config(), 0).empty(sequences, dtype)


def narrow(mixed):
    return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), mixed)


# Row 0: a prompt of 37 with three responses, and one sequence alone. Row 1: two prompts with responses, then padding.
SEGMENTS = ((1, 37, 1), (2, 20, 1), (3, 41, 1), (4, 9, 1), (5, 43, 5)), ((1, 5, 1), (2, 66, 1), (3, 2, 3), (4, 3, 3), (5, 1, 3), (0, 73, 0))  # fmt: skip


def packed():
    ids = np.array([np.concatenate([[own] * size for own, size, _ in row]) for row in SEGMENTS], np.int32)
    prefix = np.array([np.concatenate([[of] * size for _, size, of in row]) for row in SEGMENTS], np.int32)
    return ids, prefix


def sequences(ids, prefix):
    """The flat columns of each sequence that ends with a segment."""
    for row in range(len(ids)):
        for own in np.unique(ids[row]):
            mine = np.flatnonzero(ids[row] == own)
            of = prefix[row, mine[0]]
            before = np.flatnonzero(ids[row] == of) if of != own else []
            yield own, np.concatenate([before, mine]).astype(int) + row * ids.shape[1], len(mine)


@pytest.mark.parametrize("strong", [False, True])
# Slow: each size compiles another program. The tests below have chunks of 64, and 7 does not divide the tokens.
@pytest.mark.parametrize(
    "chunk", [7, 256, *(pytest.param(chunk, marks=pytest.mark.slow) for chunk in (1, 64))]
)
@KINDS
def test_chunks_of_any_size_are_the_recurrence_over_2000_tokens(kind, chunk, strong):
    """1e-5 in float32. In Gated DeltaNet, outputs are at most about 3, and a chunk adds up to 256 terms of rounding error 6e-8. In Mamba-2, outputs are up to 29.
    Between 16 and 32, one rounding changes a number by up to 2^-20 = 0.95e-6, so 1e-5 is ten roundings of the largest output. Partial sums and terms are smaller."""
    tokens = 2000
    mixed = inputs(kind, tokens, strong=strong)
    out, state = jax.jit(partial(over_rows, kind), static_argnames="chunk")(
        narrow(mixed), jnp.ones((1, tokens), jnp.int32), ends=jnp.array([tokens - 1]), chunk=chunk
    )
    expected, memory, tails = recurrence(kind, mixed, np.arange(tokens))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state.memory[0], memory, rtol=0, atol=1e-5)
    for ours, theirs in zip(state.tails, tails, strict=True):
        np.testing.assert_allclose(ours[0].reshape(theirs.shape), theirs, rtol=0, atol=1e-6)


@KINDS
def test_one_token_at_a_time_is_the_recurrence_and_slots_that_are_not_live_keep_their_state(kind):
    tokens = 300
    mixed = inputs(kind, tokens)

    def one(state, column):
        column = [jnp.stack([part, part], -1) for part in column]
        out, state = one_token(kind, Mixed(*column, *rest), state, jnp.array([True, False]))
        return state, out[..., 0]

    parts, rest = narrow(mixed)[:5], narrow(mixed)[5:]
    start = blank(kind, 2)
    end, out = jax.lax.scan(one, start, [jnp.moveaxis(part, -1, 0) for part in parts])
    expected, memory, _ = recurrence(kind, mixed, np.arange(tokens))
    np.testing.assert_allclose(jnp.moveaxis(out, 0, -1), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(end.memory[0], memory, rtol=0, atol=1e-5)
    assert not any(np.any(leaf[1]) for leaf in jax.tree.leaves(end))


# Slow: compiles another program. The gradients below have chunks of 64.
@pytest.mark.parametrize("chunk", [5, pytest.param(64, marks=pytest.mark.slow)])
@KINDS
def test_responses_in_a_row_continue_the_state_of_their_prompt(kind, chunk):
    ids, prefix = packed()
    mixed = inputs(kind, ids.size)
    out = shared(kind, narrow(mixed), ids, prefix, chunk)
    for own, columns, last in sequences(ids, prefix):
        expected = recurrence(kind, mixed, columns)[0]
        np.testing.assert_allclose(out[..., columns[-last:]], expected[..., -last:], rtol=0, atol=1e-5, err_msg=str(own))  # fmt: skip


@partial(jax.jit, static_argnames=("kind", "chunk"))
def shared(kind, mixed, ids, prefix, chunk=64):
    places = ancestors(ids, prefix, TAPS - 1)
    return over_rows(kind, mixed, ids, prefix, places=places, chunk=chunk)[0]


@KINDS
def test_no_bit_of_a_segment_depends_on_other_segments(kind):
    ids, prefix = packed()
    mixed = narrow(inputs(kind, ids.size))
    out = shared(kind, mixed, ids, prefix)
    other = narrow(inputs(kind, ids.size, seed=1))
    for own in range(6):
        mine = np.asarray(ids == own).reshape(-1)
        changed = Mixed(*(jnp.where(mine, b, a) for a, b in zip(mixed[:5], other[:5], strict=True)), *mixed[5:])  # fmt: skip
        again = shared(kind, changed, ids, prefix)
        depends = ((ids == own) | (prefix == own)).reshape(-1)
        np.testing.assert_array_equal(again[..., ~depends], out[..., ~depends])
        assert own == 0 or (again[..., mine] != out[..., mine]).any()


@KINDS
def test_a_row_in_parts_and_the_states_at_the_ends_of_packed_prompts_are_those_of_whole_rows(kind):
    tokens, width = 150, 48
    mixed, ids = narrow(inputs(kind, tokens)), np.zeros((1, tokens), np.int32)
    ids[0, :70], ids[0, 70:140] = 1, 2
    rows = jax.jit(partial(over_rows, kind))
    out, ends = rows(mixed, jnp.asarray(ids), ends=jnp.array([69, 139, 70]))
    for place, (begin, end) in enumerate(((0, 70), (70, 140), (70, 71))):
        _, memory, tails = recurrence(kind, mixed, np.arange(begin, end))
        np.testing.assert_allclose(ends.memory[place], memory, rtol=0, atol=1e-5)
        for ours, theirs in zip(ends.tails, tails, strict=True):
            np.testing.assert_allclose(ours[place].reshape(theirs.shape), theirs, rtol=0, atol=1e-6)
    state = blank(kind, 1)
    for begin in range(0, 70, width):
        size = min(width, 70 - begin)
        part = [jnp.pad(each[..., begin : begin + size], [(0, 0)] * (each.ndim - 1) + [(0, width - size)]) for each in mixed[:5]]  # fmt: skip
        real = jnp.arange(width)[None] < size
        some, state = rows(
            Mixed(*part, *mixed[5:]), real.astype(jnp.int32), start=state, ends=jnp.array([size - 1])
        )
        np.testing.assert_allclose(some[..., :size], out[..., begin : begin + size], rtol=0, atol=1e-5)
    assert isinstance(state, RecurrentState)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-5), state, ends
    )


@pytest.mark.parametrize("strong", [False, True])
@KINDS
def test_gradients_in_float32_are_those_of_the_token_by_token_form_in_float64(kind, strong):
    """The token-by-token form is differentiated by jax in float64, through scan. Tolerance: 1e-5 of the largest entry."""
    ids, prefix = packed()
    mixed = inputs(kind, ids.size, strong=strong)
    weights = np.random.default_rng(2).normal(size=(VALUE_HEADS, VALUE_DIM, ids.size))
    places = ancestors(jnp.asarray(ids), jnp.asarray(prefix), TAPS - 1)

    def chunked(mixed):
        out = over_rows(kind, mixed, jnp.asarray(ids), jnp.asarray(prefix), places=places)[0]
        return (out * weights.astype(out.dtype)).sum()

    # One slot for each sequence. The sequences are padded, and their slots are live while they last.
    found = list(sequences(ids, prefix))
    longest = max(len(columns) for _, columns, _ in found)
    columns = np.array([np.pad(columns, (0, longest - len(columns))) for _, columns, _ in found])
    live = np.array([np.arange(longest) < len(columns) for _, columns, _ in found])
    counted = np.array([np.arange(longest) >= len(columns) - last for _, columns, last in found]) & live

    def stepped(mixed):
        parts, rest = mixed[:5], mixed[5:]
        given = [jnp.moveaxis(part[..., columns.T], -2, 0) for part in parts]

        def each(state, column):
            out, state = one_token(kind, Mixed(*column[:-1], *rest), state, column[-1])
            return state, out

        out = jax.lax.scan(each, blank(kind, len(found), "float64"), (*given, jnp.asarray(live.T)))[1]
        return (
            jnp.moveaxis(out, 0, -1) * weights[..., columns] * counted[None, None].astype(np.float64)
        ).sum()

    ours = jax.jit(jax.grad(chunked))(narrow(mixed))
    with jax.enable_x64(True):
        theirs = jax.jit(jax.grad(stepped))(jax.tree.map(jnp.asarray, mixed))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert other.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())
