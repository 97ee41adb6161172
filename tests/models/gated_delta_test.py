"""The chunked form of Gated DeltaNet against the recurrence, token by token in float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dapo_jax.models import recurrent
from dapo_jax.models.gated_delta import GatedDelta, unit_inverse
from dapo_jax.models.recurrent import Mixed, RecurrentState, ancestors

KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS = 2, 4, 8, 6, 4
KIND = GatedDelta(KEY_HEADS, VALUE_HEADS, KEY_DIM, VALUE_DIM, TAPS)
one_token, over_rows = partial(recurrent.one_token, KIND), partial(recurrent.over_rows, KIND)


def inputs(tokens, seed=0, dtype=np.float64, strong=False):
    """With `strong`, most tokens keep the state, and one in 16 erases it, by a factor from e^-10 to e^-50."""
    random = np.random.default_rng(seed)

    def normal(*shape):
        return random.normal(size=shape).astype(dtype)

    # Decays of 1 % to 90 % a token, as in released models.
    decay = -np.exp(normal(VALUE_HEADS, tokens) - 2)
    if strong:
        erased = random.random(decay.shape) < 1 / 16
        decay = np.where(erased, -random.integers(10, 51, decay.shape), decay / 64).astype(dtype)
    return Mixed(
        query=normal(KEY_HEADS, KEY_DIM, tokens), key=normal(KEY_HEADS, KEY_DIM, tokens), value=normal(VALUE_HEADS, VALUE_DIM, tokens),
        decay=decay, write=1 / (1 + np.exp(-normal(VALUE_HEADS, tokens))),
        filters=tuple(normal(heads, dim, 1, TAPS) for heads, dim in ((KEY_HEADS, KEY_DIM), (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM))),
    )  # fmt: skip


def recurrence(mixed, columns):
    """Outputs and final state of one sequence, which consists of the tokens `columns`: the formulas of the paper, token by token in float64."""

    def convolved(x, filters):
        x = np.concatenate([np.zeros((*x.shape[:2], TAPS - 1)), x[:, :, columns]], axis=2)
        y = sum(filters[:, :, 0, i, None] * x[:, :, i : i + len(columns)] for i in range(TAPS))
        return y / (1 + np.exp(-y)), x[:, :, -(TAPS - 1) :]

    (query, q), (key, k), (value, v) = (
        convolved(np.asarray(x, np.float64), np.asarray(f, np.float64))
        for x, f in zip(mixed[:3], mixed.filters, strict=True)
    )
    query, key = (x / np.sqrt((x * x).sum(1, keepdims=True) + 1e-6) for x in (query, key))
    out, memory = [], np.zeros((VALUE_HEADS, KEY_DIM, VALUE_DIM))
    for t, column in enumerate(columns):
        for head in range(VALUE_HEADS):
            its_key = key[head // (VALUE_HEADS // KEY_HEADS), :, t]
            decayed = np.exp(np.float64(mixed.decay[head, column])) * memory[head]
            change = np.float64(mixed.write[head, column]) * (value[head, :, t] - decayed.T @ its_key)
            memory[head] = decayed + np.outer(its_key, change)
        of_head = query[np.arange(VALUE_HEADS) // (VALUE_HEADS // KEY_HEADS), :, t] / np.sqrt(KEY_DIM)
        out.append(np.einsum("hde,hd->he", memory, of_head))
    return np.stack(out, axis=-1), memory, (q, k, v)


def blank(sequences, dtype=jnp.float32):
    return recurrent.empty(sequences, (KEY_HEADS, KEY_DIM), (VALUE_HEADS, VALUE_DIM), TAPS, dtype)


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
@pytest.mark.parametrize("chunk", [1, 7, 64, 256])
def test_chunks_of_any_size_are_the_recurrence_over_2000_tokens(chunk, strong):
    """1e-5 in float32: outputs are at most about 3, and a chunk adds up to 256 terms of rounding error 6e-8."""
    tokens = 2000
    mixed = inputs(tokens, strong=strong)
    out, state = jax.jit(over_rows, static_argnames="chunk")(
        narrow(mixed), jnp.ones((1, tokens), jnp.int32), ends=jnp.array([tokens - 1]), chunk=chunk
    )
    expected, memory, tails = recurrence(mixed, np.arange(tokens))
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(state.memory[0], memory, rtol=0, atol=1e-5)
    for ours, theirs in zip(state.tails, tails, strict=True):
        np.testing.assert_allclose(ours[0], theirs, rtol=0, atol=1e-6)


def test_one_token_at_a_time_is_the_recurrence_and_slots_that_are_not_live_keep_their_state():
    tokens = 300
    mixed = inputs(tokens)

    def one(state, column):
        column = [jnp.stack([part, part], -1) for part in column]
        out, state = one_token(Mixed(*column, filters), state, jnp.array([True, False]))
        return state, out[..., 0]

    (*parts, filters) = narrow(mixed)[:6]
    start = blank(2)
    end, out = jax.lax.scan(one, start, [jnp.moveaxis(part, -1, 0) for part in parts])
    expected, memory, _ = recurrence(mixed, np.arange(tokens))
    np.testing.assert_allclose(jnp.moveaxis(out, 0, -1), expected, rtol=0, atol=1e-5)
    np.testing.assert_allclose(end.memory[0], memory, rtol=0, atol=1e-5)
    assert not any(np.any(leaf[1]) for leaf in jax.tree.leaves(end))


@pytest.mark.parametrize("chunk", [5, 64])
def test_responses_in_a_row_continue_the_state_of_their_prompt(chunk):
    ids, prefix = packed()
    mixed = inputs(ids.size)
    out = shared(narrow(mixed), ids, prefix, chunk)
    for own, columns, last in sequences(ids, prefix):
        expected = recurrence(mixed, columns)[0]
        np.testing.assert_allclose(out[..., columns[-last:]], expected[..., -last:], rtol=0, atol=1e-5, err_msg=str(own))  # fmt: skip


def shared(mixed, ids, prefix, chunk=64):
    places = ancestors(jnp.asarray(ids), jnp.asarray(prefix), TAPS - 1)
    run = jax.jit(lambda mixed: over_rows(mixed, jnp.asarray(ids), jnp.asarray(prefix), places=places, chunk=chunk)[0])  # fmt: skip
    return np.asarray(run(mixed))


def test_no_bit_of_a_segment_depends_on_other_segments():
    ids, prefix = packed()
    mixed = narrow(inputs(ids.size))
    out = shared(mixed, ids, prefix)
    other = narrow(inputs(ids.size, seed=1))
    for own in range(6):
        mine = np.asarray(ids == own).reshape(-1)
        changed = Mixed(*(jnp.where(mine, b, a) for a, b in zip(mixed[:5], other[:5], strict=True)), mixed.filters)  # fmt: skip
        again = shared(changed, ids, prefix)
        depends = ((ids == own) | (prefix == own)).reshape(-1)
        np.testing.assert_array_equal(again[..., ~depends], out[..., ~depends])
        assert own == 0 or (again[..., mine] != out[..., mine]).any()


def test_a_row_in_parts_and_the_states_at_the_ends_of_packed_prompts_are_those_of_whole_rows():
    tokens, width = 150, 48
    mixed, ids = narrow(inputs(tokens)), np.zeros((1, tokens), np.int32)
    ids[0, :70], ids[0, 70:140] = 1, 2
    rows = jax.jit(over_rows)
    out, ends = rows(mixed, jnp.asarray(ids), ends=jnp.array([69, 139, 70]))
    for place, (begin, end) in enumerate(((0, 70), (70, 140), (70, 71))):
        _, memory, tails = recurrence(mixed, np.arange(begin, end))
        np.testing.assert_allclose(ends.memory[place], memory, rtol=0, atol=1e-5)
        for ours, theirs in zip(ends.tails, tails, strict=True):
            np.testing.assert_allclose(ours[place], theirs, rtol=0, atol=1e-6)
    state = blank(1)
    for begin in range(0, 70, width):
        size = min(width, 70 - begin)
        part = [jnp.pad(each[..., begin : begin + size], [(0, 0)] * (each.ndim - 1) + [(0, width - size)]) for each in mixed[:5]]  # fmt: skip
        real = jnp.arange(width)[None] < size
        some, state = rows(
            Mixed(*part, mixed.filters), real.astype(jnp.int32), start=state, ends=jnp.array([size - 1])
        )
        np.testing.assert_allclose(some[..., :size], out[..., begin : begin + size], rtol=0, atol=1e-5)
    assert isinstance(state, RecurrentState)
    jax.tree.map(
        lambda ours, theirs: np.testing.assert_allclose(ours[0], theirs[0], rtol=0, atol=1e-5), state, ends
    )


@pytest.mark.parametrize("strong", [False, True])
def test_gradients_in_float32_are_those_of_the_token_by_token_form_in_float64(strong):
    """The token-by-token form is differentiated by jax in float64, through scan. Tolerance: 1e-5 of the largest entry."""
    ids, prefix = packed()
    mixed = inputs(ids.size, strong=strong)
    weights = np.random.default_rng(2).normal(size=(VALUE_HEADS, VALUE_DIM, ids.size))
    places = ancestors(jnp.asarray(ids), jnp.asarray(prefix), TAPS - 1)

    def chunked(mixed):
        out = over_rows(mixed, jnp.asarray(ids), jnp.asarray(prefix), places=places)[0]
        return (out * weights.astype(out.dtype)).sum()

    # One slot for each sequence. The sequences are padded, and their slots are live while they last.
    found = list(sequences(ids, prefix))
    longest = max(len(columns) for _, columns, _ in found)
    columns = np.array([np.pad(columns, (0, longest - len(columns))) for _, columns, _ in found])
    live = np.array([np.arange(longest) < len(columns) for _, columns, _ in found])
    counted = np.array([np.arange(longest) >= len(columns) - last for _, columns, last in found]) & live

    def stepped(mixed):
        *parts, filters = mixed[:6]
        given = [jnp.moveaxis(part[..., columns.T], -2, 0) for part in parts]

        def each(state, column):
            out, state = one_token(Mixed(*column[:-1], filters), state, column[-1])
            return state, out

        out = jax.lax.scan(each, blank(len(found), jnp.float64), (*given, jnp.asarray(live.T)))[1]
        return (
            jnp.moveaxis(out, 0, -1) * weights[..., columns] * counted[None, None].astype(np.float64)
        ).sum()

    ours = jax.jit(jax.grad(chunked))(narrow(mixed))
    with jax.enable_x64(True):
        theirs = jax.jit(jax.grad(stepped))(jax.tree.map(jnp.asarray, mixed))
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert other.dtype == np.float64
        np.testing.assert_allclose(one, other, rtol=0, atol=1e-5 * np.abs(other).max())


def test_the_inverse_keeps_its_digits_for_equal_keys():
    """With equal keys and full writes, L has ones below the diagonal, so powers of L up to 1e18 cancel. The inverse has 1 and -1 on two diagonals."""
    lower = np.tri(64, k=-1, dtype=np.float32)
    np.testing.assert_allclose(
        unit_inverse(jnp.asarray(lower)), np.eye(64) - np.eye(64, k=-1), rtol=0, atol=1e-6
    )
