"""Products with experts against a dense computation over all experts, which shares no code with them."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec as P

from dapo_jax.models import experts
from dapo_jax.models.experts import NO_ROUTE, arranged, as_stored, block_rows, chosen, mixture
from dapo_jax.models.presets import Experts
from dapo_jax.numerics.quantization import quantized
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.training_layout import MeshLayout
from dapo_jax.plan.topologies import devices_of, parse
from tests.plan.arguments import copied_arguments

EXPERTS, EMBED, HIDDEN = 8, 24, 12


def swiglu(gate, up):
    return jax.nn.silu(gate) * up


def dense(x, factors, routes, matrices):
    """Every expert multiplies every token."""
    gate, up, down = matrices
    hidden = jax.nn.silu(jnp.einsum("efd,dt->eft", gate, x)) * jnp.einsum("efd,dt->eft", up, x)
    outputs = jnp.einsum("edf,eft->edt", down, hidden)
    tokens = jnp.arange(len(routes), dtype=jnp.int32)[:, None]
    weights = jnp.zeros((len(routes), len(gate)), x.dtype).at[tokens, routes].add(factors)
    return jnp.einsum("edt,te->dt", outputs, weights)


def drawn(tokens, each, seed=0, dtype=np.float32):
    """Tokens, router scores, the gradient of the result, and matrices."""
    rng = np.random.default_rng(seed)
    shapes = [(EMBED, tokens), (EXPERTS, tokens), (EMBED, tokens)]
    wide, narrow = (EXPERTS, HIDDEN, EMBED), (EXPERTS, EMBED, HIDDEN)
    *given, gate, up, down = (
        jnp.asarray(rng.standard_normal(shape), dtype) for shape in (*shapes, wide, wide, narrow)
    )
    return (*given, (0.3 * gate, 0.3 * up, 0.3 * down))


def both(form, each, x, scores, cotangent, matrices):
    """The result, and the gradients of tokens, scores and matrices."""

    def made(x, scores, matrices):
        _, used, factors = chosen(scores, Experts(EXPERTS, each, normalize=True), None)
        return form(x, factors, used, matrices)

    result, backward = jax.vjp(made, x, scores, matrices)
    return result, backward(cotangent)


def assert_close(found, expected, part):
    for ours, theirs in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=part * np.abs(theirs).max())


# Slow: compiles the same products for other sizes. A size in between stays.
@pytest.mark.parametrize(
    ("tokens", "each"),
    [(40, 2), *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in ((1, 3), (200, 3)))],
)
def test_gradients_equal_a_dense_computation_in_float64(tokens, each):
    with jax.enable_x64(True):
        given = drawn(tokens, each, dtype=np.float64)
        ours = partial(mixture, hidden=swiglu, dtype="float64")
        assert_close(both(ours, each, *given), both(dense, each, *given), 1e-12)


# Slow: compiles another gradient. tests/parallel/training_layout_test.py splits the other weights over `embed`.
@pytest.mark.parametrize(
    "whole",
    [
        pytest.param(True, id="experts over fsdp"),
        pytest.param(False, id="embed over fsdp", marks=pytest.mark.slow),
    ],
)
def test_gradients_on_eight_devices_equal_a_dense_computation_in_float64(whole):
    """As in a block: tokens are split over both axes outside, and each expert's hidden features over `tensor`."""
    mesh = make_mesh(fsdp=4, tensor=2)
    layout, tokens = MeshLayout(mesh), P(None, ("fsdp", "tensor"))
    wide, narrow = (
        (P("fsdp", "tensor"), P("fsdp", None, "tensor"))
        if whole
        else (P(None, "tensor", "fsdp"), P(None, "fsdp", "tensor"))
    )

    def part(x, scores, matrices):
        _, used, factors = chosen(layout.inner(scores, "float32"), Experts(EXPERTS, 2, normalize=True), None)
        ours = partial(mixture, hidden=swiglu, dtype="float64")
        made = layout.experts(ours, layout.inner(x, "float64"), factors, used, matrices, "float64")
        return layout.outer(made, "float64")

    places = tokens, tokens, (wide, wide, narrow)
    run = jax.shard_map(part, mesh=mesh, in_specs=places, out_specs=tokens, check_vma=False)
    with jax.enable_x64(True):
        *given, cotangent, matrices = drawn(40, 2, dtype=np.float64)
        result, backward = jax.vjp(jax.jit(run), *given, matrices)
        assert_close((result, backward(cotangent)), both(dense, 2, *given, cotangent, matrices), 1e-12)


# Slow: the kernel is interpreted. The tests above compute with the form for a CPU.
@pytest.mark.slow
@pytest.mark.parametrize("platform", ["tpu", "default"])
@pytest.mark.parametrize("part", [slice(None), slice(4, 8)], ids=["all", "half"])
def test_the_forms_for_other_platforms_compute_the_same(platform, part, monkeypatch):
    """Megablox runs interpreted. With half of the experts, rows of the others have no expert, and megablox does not write them."""
    x, scores, cotangent, matrices = drawn(50, 2)
    given = x, scores, cotangent, tuple(matrix[part] for matrix in matrices)
    ours = partial(mixture, hidden=swiglu, dtype="float32", first=part.start or 0)
    expected = both(ours, 2, *given)
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *operands, **forms: forms[platform](*operands))
    with pltpu.force_tpu_interpret_mode():
        # The sums have up to 24 terms in another order.
        assert_close(both(ours, 2, *given), expected, 1e-6)


def test_a_block_of_rows_has_one_expert_and_few_rows_are_empty():
    """The number of rows is what the products compute: at most the choices, and less than one block for each expert."""
    rng = np.random.default_rng(0)
    routes = np.stack([rng.permutation(128)[:8] for _ in range(512)]).astype(np.int32)
    block = block_rows(routes.size, 128)
    assert block == 16, "half of the mean number of choices per expert, 32"
    token, place, sizes = map(np.asarray, arranged(jnp.asarray(routes), 0, 128, block))
    counts = np.bincount(routes.reshape(-1), minlength=128)
    np.testing.assert_array_equal(sizes, -(-counts // block) * block)
    assert sizes.sum() <= routes.size + 128 * (block - 1) == len(token) == 6016
    np.testing.assert_array_equal(token[place], np.arange(512)[:, None].repeat(8, 1))
    np.testing.assert_array_equal(np.repeat(np.arange(128), sizes)[place], routes)
    assert (np.sort(token)[routes.size :] == 512).all(), "the number of tokens marks empty rows"


def test_no_bit_of_a_tokens_result_depends_on_other_tokens():
    """So `sampling.batch_invariant` holds: the same token with other neighbours, which move it to other rows and other blocks."""
    ours = jax.jit(partial(mixture, hidden=swiglu, dtype="float32"))
    x, _, _, matrices = drawn(8, 2)
    found = set()
    for seed in range(6):
        others, scores, *_ = drawn(8, 2, seed=1 + seed)
        at = seed % 8
        _, routes, factors = chosen(scores, Experts(EXPERTS, 2, normalize=True), None)
        routes, factors = routes.at[at].set(jnp.array([3, 5])), factors.at[at].set(jnp.array([0.7, 0.3]))
        found.add(np.asarray(ours(others.at[:, at].set(x[:, 0]), factors, routes, matrices))[:, at].tobytes())
    assert len(found) == 1


def test_matrices_in_eight_bits_have_a_scale_for_each_row_of_each_expert():
    x, scores, _, matrices = drawn(40, 2)
    small = tuple(quantized(matrix, (2,)) for matrix in matrices)
    assert small[2].scale.shape == (EXPERTS, EMBED, 1)
    _, routes, factors = chosen(scores, Experts(EXPERTS, 2, normalize=True), None)
    ours = mixture(x, factors, routes, small, hidden=swiglu, dtype="float32")
    assert_close(ours, dense(x, factors, routes, tuple(each.whole for each in small)), 1e-6)


def test_factors_of_forced_choices_are_the_routers_own_scores():
    """Scores by hand: softmax of (ln 1, ln 2, ln 3, ln 4) is (0.1, 0.2, 0.3, 0.4)."""
    logits = jnp.log(jnp.array([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]))
    forced = jnp.array([[0, 2], [NO_ROUTE, NO_ROUTE]], jnp.int32)
    own, used, factors = chosen(logits, Experts(4, 2, normalize=False), forced)
    assert own.tolist() == [[3, 2], [3, 2]]
    assert used.tolist() == [[0, 2], [3, 2]]
    np.testing.assert_allclose(factors, [[0.1, 0.3], [0.4, 0.3]], rtol=1e-6)
    *_, factors = chosen(logits, Experts(4, 2, normalize=True), forced)
    np.testing.assert_allclose(factors, [[0.25, 0.75], [4 / 7, 3 / 7]], rtol=1e-6)


@pytest.mark.slow  # compiles for a TPU
@pytest.mark.parametrize(
    ("chosen_in_a_loop", "turned"), [(True, True), (False, True), (False, False), (True, False)]
)
def test_no_matrix_is_copied_for_the_kernel_of_a_tpu(chosen_in_a_loop, turned, monkeypatch):
    """A TPU stores down matrices [128, 2048, 192] by columns, because 192 would be padded to 256. Without a transpose or a given order, they are copied.

    In training with adapters, a loop over layers chooses the matrices of a layer from separate arrays.
    """
    pytest.importorskip("libtpu", reason="the extra tpu")
    if not turned:
        monkeypatch.setattr(experts, "_is_turned", lambda *sizes: False)
    sharding = jax.sharding.SingleDeviceSharding(devices_of(parse("v6e-1"))[0])
    struct = partial(jax.ShapeDtypeStruct, sharding=sharding)
    wide, narrow = struct((128, 192, 2048), jnp.bfloat16), struct((128, 2048, 192), jnp.bfloat16)
    given = struct((2048, 64), jnp.float32), struct((64, 2), jnp.float32), struct((64, 2), jnp.int32)
    ours = partial(mixture, hidden=swiglu, dtype="bfloat16")

    def total(x, factors, routes, layers):
        def layer(x, index):
            branches = [lambda each=each: jax.tree.map(as_stored, each) for each in layers]
            matrices = jax.lax.switch(index, branches) if chosen_in_a_loop else layers[0]
            return ours(x, factors, routes, matrices), None

        return jax.lax.scan(layer, x, jnp.arange(2, dtype=jnp.int32))[0]

    program = jax.jit(total).trace(*given, [(wide, wide, narrow)] * 2).lower(lowering_platforms=("tpu",))
    sizes = [size for _, size in copied_arguments(program.compile().as_text())]
    assert (max(sizes, default=0) >= 128 * 2048 * 192 * 2) != turned


@pytest.mark.slow  # compiles for a TPU
def test_products_compile_for_a_tpu_and_do_not_multiply_by_all_experts():
    """1,024 tokens, 8 of 128 experts: a product over all experts needs 16 times the operations. Padding to blocks of 32 rows adds at most half."""
    sharding = jax.sharding.SingleDeviceSharding(devices_of(parse("v5p-8"))[0])
    struct = partial(jax.ShapeDtypeStruct, sharding=sharding)
    tokens, each, count, embed, hidden = 1024, 8, 128, 512, 256
    wide, narrow = struct((count, hidden, embed), jnp.float32), struct((count, embed, hidden), jnp.float32)
    routes = struct((tokens, each), jnp.int32)
    ours = partial(mixture, hidden=swiglu, dtype="bfloat16")

    def total(x, factors, matrices, routes):
        return ours(x, factors, routes, matrices).sum()

    given = (
        struct((embed, tokens), jnp.float32),
        struct((tokens, each), jnp.float32),
        (wide, wide, narrow),
        routes,
    )
    program = jax.jit(jax.grad(total, argnums=(0, 1, 2))).trace(*given)
    compiled = program.lower(lowering_platforms=("tpu",)).compile()
    needed = 3 * 6 * tokens * each * embed * hidden
    assert needed <= compiled.cost_analysis()["flops"] < 2 * needed
