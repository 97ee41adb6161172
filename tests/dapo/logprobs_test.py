"""`token_logprobs` and `chunked_logprobs` compared with a float64 oracle and each other, and their memory."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from dapo_jax import chunked_logprobs, token_logprobs
from tests import oracle
from tests.plan.products import lowered_products

TOKENS, EMBED, VOCAB = 10, 4, 11


def random_head(seed, dtype=np.float32, vocab=VOCAB):
    """Hidden states, unembedding and targets; the first target is the first entry, the last the last."""
    rng = np.random.default_rng(seed)
    hidden, unembedding = rng.normal(0, 2, (TOKENS, EMBED)), rng.normal(0, 2, (vocab, EMBED))
    targets = rng.integers(0, vocab, TOKENS).astype(np.int32)
    targets[0], targets[-1] = 0, vocab - 1
    return jnp.asarray(hidden, dtype), jnp.asarray(unembedding, dtype), jnp.asarray(targets)


@functools.partial(jax.jit, static_argnames="chunk_vocab")
def chunked(hidden, unembedding, targets, temperature, chunk_vocab):
    """Log-probabilities, entropies, and the gradients of a sum of log-probabilities with unequal weights."""

    def total(hidden, unembedding):
        logprobs, entropy = chunked_logprobs(
            hidden, unembedding, targets, temperature=temperature, chunk_vocab=chunk_vocab
        )
        return weighted(logprobs), (logprobs, entropy)

    (_, scores), gradients = jax.value_and_grad(total, argnums=(0, 1), has_aux=True)(hidden, unembedding)
    return scores, gradients


@jax.jit
def unchunked(hidden, unembedding, targets, temperature):
    """The same from all logits at once, by plain differentiation."""

    def total(hidden, unembedding):
        logits = jnp.dot(hidden, unembedding.T, precision=None)
        return weighted(token_logprobs(logits, targets, temperature=temperature))

    return jax.grad(total, argnums=(0, 1))(hidden, unembedding)


def weighted(logprobs):
    return jnp.sum(logprobs * jnp.linspace(-1.0, 2.0, logprobs.shape[0], dtype=logprobs.dtype))


def test_token_logprobs_by_hand():
    """Logits ln 1, ln 2, ln 5 are probabilities 1/8, 2/8, 5/8."""
    logits = jnp.log(jnp.array([1.0, 2.0, 5.0]))
    np.testing.assert_allclose(token_logprobs(logits, jnp.array(2)), np.log(5 / 8), rtol=1e-6)


def test_temperature_is_part_of_the_policy():
    """At temperature 1/2 the probabilities of logits ln 1, ln 2, ln 5 are 1, 4, 25 in 30."""
    logits = jnp.log(jnp.array([[1.0, 2.0, 5.0], [1.0, 2.0, 5.0]]))
    logprobs = token_logprobs(logits, jnp.array([1, 2]), temperature=0.5)
    np.testing.assert_allclose(logprobs, np.log([4 / 30, 25 / 30]), rtol=1e-6)


def test_a_token_that_cannot_be_sampled_has_logprob_minus_infinity():
    logprobs = token_logprobs(jnp.array([[0.0, -jnp.inf], [0.0, -jnp.inf]]), jnp.array([0, 1]))
    np.testing.assert_array_equal(logprobs, [0.0, -np.inf])


def test_token_logprobs_takes_any_leading_axes_and_low_precision():
    logits = jnp.asarray(np.random.default_rng(0).normal(0, 3, (2, 3, 5, 7)), jnp.bfloat16)
    targets = jnp.arange(30, dtype=jnp.int32).reshape(2, 3, 5) % 7
    logprobs = token_logprobs(logits, targets)
    assert logprobs.dtype == jnp.float32
    for i, j, k in ((0, 0, 0), (1, 2, 4)):
        row = np.asarray(logits, np.float64)[i, j, k]
        expected, _ = oracle.logprob_and_entropy(row, int(targets[i, j, k]), 1.0)
        np.testing.assert_allclose(logprobs[i, j, k], expected, rtol=1e-6)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 2**32 - 1),
    temperature=st.floats(0.25, 4.0),
    vocab_and_chunk=st.sampled_from([(11, 1), (11, 4), (14, 4), (11, 11), (11, 64)]),
)
def test_chunked_matches_the_oracle_in_float64(x64, seed, temperature, vocab_and_chunk):
    """11 entries in chunks of 1, of 4 (three chunks and one entry of padding), and whole; 14 in chunks of 4 come out even
    with seven chunks of 2."""
    vocab, chunk_vocab = vocab_and_chunk
    hidden, unembedding, targets = random_head(seed, np.float64, vocab)
    (logprobs, entropy), gradients = chunked(hidden, unembedding, targets, temperature, chunk_vocab)
    logits = np.asarray(hidden) @ np.asarray(unembedding).T
    expected = [oracle.logprob_and_entropy(logits[i], int(targets[i]), temperature) for i in range(TOKENS)]
    np.testing.assert_allclose(np.stack([logprobs, entropy], axis=1), expected, rtol=1e-9, atol=1e-12)
    for gradient, plain in zip(gradients, unchunked(hidden, unembedding, targets, temperature), strict=True):
        np.testing.assert_allclose(gradient, plain, rtol=1e-9, atol=1e-10)


def test_the_gradient_is_target_minus_softmax():
    """In closed form, d logprob / d logits = (onehot - p) / T: independent of both implementations."""
    hidden, unembedding, targets = random_head(0)
    _, (d_hidden, d_unembedding) = chunked(hidden, unembedding, targets, 0.7, 4)
    h, w = np.asarray(hidden, np.float64), np.asarray(unembedding, np.float64)
    scores = np.exp(h @ w.T / 0.7)
    d_logits = (np.eye(VOCAB)[np.asarray(targets)] - scores / scores.sum(axis=1, keepdims=True)) / 0.7
    d_logits *= np.linspace(-1.0, 2.0, TOKENS)[:, None]
    np.testing.assert_allclose(d_hidden, d_logits @ w, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(d_unembedding, d_logits.T @ h, rtol=1e-4, atol=1e-5)


def test_entropy_is_a_metric_without_gradient():
    hidden, unembedding, targets = random_head(2)
    gradient = jax.grad(lambda h: chunked_logprobs(h, unembedding, targets, chunk_vocab=4)[1].sum())(hidden)
    np.testing.assert_array_equal(gradient, np.zeros_like(gradient))


def test_bfloat16_hidden_states_give_float32_scores_and_a_float32_gradient_of_the_master_weights():
    """Each bfloat16 operand is off by up to 2^-9, so a product of norms |h| |w| < 8 * 8 by about 0.25 at worst."""
    hidden, unembedding, targets = random_head(3)
    (logprobs, entropy), gradients = chunked(hidden.astype(jnp.bfloat16), unembedding, targets, 1.0, 4)
    (expected, _), plain = chunked(hidden, unembedding, targets, 1.0, 4)
    assert logprobs.dtype == entropy.dtype == jnp.float32
    assert [gradient.dtype for gradient in gradients] == [jnp.bfloat16, jnp.float32]
    np.testing.assert_allclose(logprobs, expected, atol=0.25)
    for gradient, exact in zip(gradients, plain, strict=True):
        error = np.linalg.norm(np.asarray(gradient, np.float64) - np.asarray(exact, np.float64))
        assert error < 0.05 * np.linalg.norm(np.asarray(exact, np.float64))


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_that_is_not_above_zero_is_refused(temperature):
    hidden, unembedding, targets = random_head(0)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        token_logprobs(jnp.zeros((TOKENS, VOCAB)), targets, temperature=temperature)
    with pytest.raises(ValueError, match="temperature must be above 0"):
        chunked_logprobs(hidden, unembedding, targets, temperature=temperature)


def test_an_empty_chunk_is_refused():
    with pytest.raises(ValueError, match="chunk_vocab must be 1 or more, got 0"):
        chunked_logprobs(*random_head(0), chunk_vocab=0)


def temporary_bytes(score, tokens, vocab=151_936, embed=8):
    """Scratch memory of a forward and backward pass at Qwen's vocabulary: compiled, not run."""

    def total(hidden, unembedding, targets):
        return score(hidden, unembedding, targets).sum()

    shapes = (
        jax.ShapeDtypeStruct((tokens, embed), jnp.float32),
        jax.ShapeDtypeStruct((vocab, embed), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    compiled = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).lower(*shapes).compile()
    return compiled.memory_analysis().temp_size_in_bytes


def test_memory_does_not_grow_with_tokens_times_vocabulary():
    """1,024 more tokens have 622 MB of float32 logits, which only the plain form needs."""
    more_logits = 1024 * 151_936 * 4

    def plain(hidden, unembedding, targets):
        return token_logprobs(hidden @ unembedding.T, targets)

    def in_chunks(hidden, unembedding, targets):
        return chunked_logprobs(hidden, unembedding, targets, chunk_vocab=128)[0]

    def taught(hidden, unembedding, targets):
        teacher = hidden[:, ::-1], unembedding[:, ::-1]
        return chunked_logprobs(hidden, unembedding, targets, chunk_vocab=128, teachers=[teacher])[2]

    assert temporary_bytes(plain, 2048) - temporary_bytes(plain, 1024) > 0.9 * more_logits
    short, long = temporary_bytes(in_chunks, 1024), temporary_bytes(in_chunks, 2048)
    assert long - short < 5 * 1024 * 128 * 4  # a few arrays of one chunk's logits
    assert (
        temporary_bytes(taught, 2048) - temporary_bytes(taught, 1024) < 10 * 1024 * 128 * 4
    )  # of two models
    # With a copy of the output matrix, and its gradient.
    assert long < 5 * 2048 * 128 * 4 + 2 * 151_936 * 8 * 4


VOCABULARIES = {
    "Qwen3": 151_936, "Qwen2.5": 152_064, "Llama 3": 128_256, "Gemma 3": 262_144, "SmolLM2": 49_152, "a prime number": 32_003,
    "Qwen3 on 8 devices": 18_992, "Llama 2 on 32 devices": 1_000, "bytes": 259,
}  # fmt: skip


def lowered_for(platform, score, vocab, tokens=16, embed=8):
    def total(hidden, unembedding, targets):
        return score(hidden, unembedding, targets)[0].sum()

    shapes = (
        jax.ShapeDtypeStruct((tokens, embed), jnp.float32),
        jax.ShapeDtypeStruct((vocab, embed), jnp.float32),
        jax.ShapeDtypeStruct((tokens,), jnp.int32),
    )
    traced = jax.jit(jax.value_and_grad(total, argnums=(0, 1))).trace(*shapes)
    return traced.lower(lowering_platforms=(platform,)).as_text(debug_info=True)


@pytest.mark.parametrize(
    ("platform", "chunk_vocab"), [("cuda", 2048), ("cuda", 2000), ("cuda", 50), ("tpu", 2048)]
)
@pytest.mark.parametrize("vocab", VOCABULARIES.values(), ids=VOCABULARIES)
def test_on_accelerators_the_entries_of_a_chunk_are_a_multiple_of_128(platform, chunk_vocab, vocab):
    """There are at most `chunk_vocab` entries, or 128. The matrix is not padded, and its gradient is not a scatter."""
    text = lowered_for(platform, functools.partial(chunked_logprobs, chunk_vocab=chunk_vocab), vocab)
    sizes = {size for each in lowered_products(text) for size in each[:3]} - {16, 8}
    assert len(sizes) == 1
    [entries] = sizes
    assert entries % 128 == 0 < entries <= max(chunk_vocab, 128)
    assert not re.search(r"stablehlo\.(scatter|gather|concatenate)", text)
    assert text.count("stablehlo.pad") == text.count("low = [0, 0], high = [0, 0]")
    assert entries * -(-vocab // entries) < 2 * vocab


def test_on_a_cpu_the_entries_divide_the_vocabulary():
    """151,936 = 128 x 1,187, and no smaller number of chunks of at most 2,048 entries divides it."""
    sizes = {
        size for each in lowered_products(lowered_for("cpu", chunked_logprobs, 151_936)) for size in each[:3]
    }
    assert sizes == {16, 8, 1187}


@pytest.fixture
def as_on_accelerators(monkeypatch):
    """Programs have the form for accelerators and run on the CPU."""
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *given, default, **_: default(*given))


@pytest.mark.parametrize(
    ("vocab", "chunk_vocab"),
    # Slow: compile two programs each. The quick cases have chunks that overlap, and a vocabulary in one part of a chunk.
    [
        (100, 64),
        (259, 128),
        *(
            pytest.param(*sizes, marks=pytest.mark.slow)
            for sizes in ((1, 64), (128, 64), (400, 300), (1024, 256), (1100, 512))
        ),
    ],
)
def test_chunks_of_accelerators_have_the_oracle_s_values_and_gradients(
    x64, as_on_accelerators, vocab, chunk_vocab
):
    """With 259 entries, there are three chunks of 128, and the first two have 3 x 128 - 259 = 125 entries in common. With 400, there are two chunks of 256, which have
    512 - 400 = 112 in common. A vocabulary of 1,024 fills four chunks exactly."""
    hidden, unembedding, targets = random_head(0, np.float64, vocab)
    targets = targets.at[1:-1].set(jnp.linspace(0, vocab - 1, TOKENS - 2).astype(jnp.int32))
    score = chunked.__wrapped__  # The cache of `chunked` may hold the program of the CPU.
    (logprobs, entropy), gradients = jax.jit(score, static_argnames="chunk_vocab")(
        hidden, unembedding, targets, 0.7, chunk_vocab
    )
    logits = np.asarray(hidden) @ np.asarray(unembedding).T
    expected = [oracle.logprob_and_entropy(logits[i], int(targets[i]), 0.7) for i in range(TOKENS)]
    np.testing.assert_allclose(np.stack([logprobs, entropy], axis=1), expected, rtol=1e-9, atol=1e-12)
    for gradient, plain in zip(gradients, unchunked(hidden, unembedding, targets, 0.7), strict=True):
        np.testing.assert_allclose(gradient, plain, rtol=1e-9, atol=1e-10)


def test_chunks_of_accelerators_ignore_padding_and_take_heads_and_a_teacher_on_several_devices(
    x64, as_on_accelerators
):
    """Each of four devices has 260 rows, and 1,003 of all 1,040 rows are entries. The two chunks of 256 entries on a device have 512 - 260 = 252 rows in common. A teacher has
    1,100 rows. Each position has 50 heads."""
    hidden, table, targets = random_head(0, np.float64, 1003)
    its, other, _ = random_head(1, np.float64, 1100)
    table = jnp.pad(table, ((0, 37), (0, 0)), constant_values=5.0)
    rng = np.random.default_rng(2)
    heads = jnp.asarray(np.stack([rng.permutation(1003)[:50] for _ in range(TOKENS)]), jnp.int32)
    mesh = jax.make_mesh((4,), ("part",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def scores(hidden, table, other, axis=None):
        how = {"vocab_size": 1003, "vocab_axis": axis, "chunk_vocab": 300, "teachers": [(its, other)]}
        how["heads"] = heads
        return chunked_logprobs(hidden, table, targets, **how)

    def sharded(hidden, table, other):
        whole, rows = PartitionSpec(), PartitionSpec("part")
        part = functools.partial(scores, axis="part")
        return jax.shard_map(part, mesh=mesh, in_specs=(whole, rows, rows), out_specs=whole, check_vma=False)(
            hidden, table, other
        )

    def plain(hidden, table, other):
        own, others = (jax.nn.log_softmax(x @ each[:1003].T) for x, each in ((hidden, table), (its, other)))
        chosen = jnp.take_along_axis(own, targets[:, None], axis=1)[:, 0]
        entropy = -jax.lax.stop_gradient((jnp.exp(own) * own).sum(-1))
        of_heads = jnp.take_along_axis(own, heads, axis=1)
        return chosen, of_heads, entropy, (jnp.exp(own) * (own - others)).sum(-1)

    def gradient(score):
        def total(table):
            logprobs, of_heads, _, divergence = found = score(hidden, table, other)
            return weighted(logprobs) + weighted(divergence[::-1]) + weighted(of_heads.reshape(-1)), found

        return jax.jit(jax.grad(total, has_aux=True))(table)

    expected = gradient(plain)
    for found in (gradient(scores), gradient(sharded)):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-8, atol=1e-9), found, expected)


@pytest.mark.parametrize("sharded", ["tokens", "vocabulary"])
def test_a_sharded_vocabulary_is_not_gathered(sharded):
    """Each of four devices computes a quarter of each chunk: 64 entries in four chunks."""
    mesh = jax.make_mesh((4,), ("part",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    @functools.partial(jax.value_and_grad, argnums=(0, 1))
    def score(hidden, unembedding, targets):
        return chunked_logprobs(hidden, unembedding, targets, chunk_vocab=16)[0].sum()

    def compiled(**axes):
        def shape(dims, dtype, what=None):
            sharding = NamedSharding(mesh, PartitionSpec(axes.get(what)))
            return jax.ShapeDtypeStruct(dims, dtype, sharding=sharding)

        shapes = (
            shape((64, EMBED), jnp.float32, "tokens"),
            shape((64, EMBED), jnp.float32, "vocabulary"),
            shape((64,), jnp.int32, "tokens"),
        )
        return jax.jit(score).lower(*shapes).compile()

    apart, together = compiled(**{sharded: "part"}), compiled()
    assert apart.cost_analysis()["flops"] < 0.3 * together.cost_analysis()["flops"]
    assert "all-gather" not in apart.as_text()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_from_a_teacher_equals_the_formula_in_float64(x64, temperature):
    """The policy has 11 entries, in chunks of 4 with one entry of padding. The teacher is wider and has 13 entries. The last two are ignored."""
    hidden, unembedding, targets = random_head(0, np.float64)
    its, table, _ = random_head(1, np.float64, vocab=13)
    its, table = (jnp.concatenate([array, 0.5 * array], axis=1) for array in (its, table))

    def total(hidden, unembedding, its, table):
        how = {"temperature": temperature, "chunk_vocab": 4, "teachers": [(its, table)]}
        logprobs, _, divergence = chunked_logprobs(hidden, unembedding, targets, **how)
        return weighted(logprobs) + weighted(divergence[::-1]), divergence

    def plain(hidden, unembedding):
        own, other = (
            jax.nn.log_softmax(logits / temperature)
            for logits in (hidden @ unembedding.T, its @ table[:VOCAB].T)
        )
        divergence = (jnp.exp(own) * (own - other)).sum(-1)
        chosen = token_logprobs(hidden @ unembedding.T, targets, temperature=temperature)
        return weighted(chosen) + weighted(divergence[::-1]), divergence

    gradients, divergence = jax.grad(total, argnums=(0, 1, 2, 3), has_aux=True)(
        hidden, unembedding, its, table
    )
    expected, exact = jax.grad(plain, argnums=(0, 1), has_aux=True)(hidden, unembedding)
    np.testing.assert_allclose(divergence, exact, rtol=1e-9)
    for gradient, each in zip(gradients[:2], expected, strict=True):
        np.testing.assert_allclose(gradient, each, rtol=1e-9, atol=1e-10)
    assert not any(gradient.any() for gradient in gradients[2:])
    _, _, same = chunked_logprobs(hidden, unembedding, targets, teachers=[(hidden, unembedding)])
    np.testing.assert_allclose(same, 0.0, atol=1e-12)


def test_the_caps_of_policy_and_teacher_by_hand(x64):
    """Two entries with the logits 0 and x. The policy has x = 1 tanh(2 / 1) = 0.964028, the teacher x = 2 tanh(6 / 2) = 1.990110.

    So p = 0.723927 and q = 0.879755 for the second entry, and KL = p ln(p / q) + (1 - p) ln((1 - p) / (1 - q)). Its derivative by the policy's logit is p (1 - p) times
    the difference of the logits, and by the logit before the cap 1 - tanh(2)^2 = 0.070651 times as much.
    """
    one = jnp.ones((1, 1))

    def divergence(table):
        how = {"teachers": [(one, jnp.array([[0.0], [6.0]]))], "caps": (1.0, 2.0), "chunk_vocab": 1}
        return chunked_logprobs(one, table, jnp.array([1], jnp.int32), **how)[2][0]

    found, gradient = jax.value_and_grad(divergence)(jnp.array([[0.0], [2.0]]))
    assert float(found) == pytest.approx(0.088321097, rel=1e-7)
    assert float(gradient[1, 0]) == pytest.approx(-0.014488303, rel=1e-7)


@pytest.mark.parametrize(("vocab", "chunk_vocab"), [(11, 4), (14, 4), (11, 64)])
def test_the_logprobs_of_heads_match_a_softmax_of_all_logits(x64, vocab, chunk_vocab):
    """1e-12: sums of up to 14 terms in float64. Three heads at each position; chunks as above. The gradients are of a sum over targets and heads with unequal weights."""
    hidden, unembedding, targets = random_head(5, np.float64, vocab)
    rng = np.random.default_rng(6)
    heads = jnp.asarray(np.stack([rng.permutation(vocab)[:3] for _ in range(TOKENS)]), jnp.int32)
    factors = jnp.asarray(rng.normal(size=(TOKENS, 3)))

    def in_chunks(hidden, unembedding):
        how = {"temperature": 0.7, "chunk_vocab": chunk_vocab, "heads": heads}
        logprobs, of_heads, _ = chunked_logprobs(hidden, unembedding, targets, **how)
        return weighted(logprobs) + (of_heads * factors).sum(), of_heads

    def whole(hidden, unembedding):
        every = jax.nn.log_softmax(hidden @ unembedding.T / 0.7)
        of_heads = jnp.take_along_axis(every, heads, axis=1)
        chosen = jnp.take_along_axis(every, targets[:, None], axis=1)[:, 0]
        return weighted(chosen) + (of_heads * factors).sum(), of_heads

    ways = (jax.value_and_grad(way, argnums=(0, 1), has_aux=True) for way in (in_chunks, whole))
    found, expected = (jax.jit(way)(hidden, unembedding) for way in ways)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-12 * np.abs(b).max())
