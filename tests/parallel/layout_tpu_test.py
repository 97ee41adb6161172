"""A training pass compiled for TPU: its kernels compile, and it has only the collectives of the layout."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

pytest.importorskip("libtpu", reason="the extra tpu")

from dapo_jax.models.decoder import graph_of
from dapo_jax.models.tensors import shapes_of
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.training_layout import layout_of
from dapo_jax.plan.collectives import collectives
from dapo_jax.plan.topologies import devices_of, parse
from dapo_jax.testing import tiny_decoder_config
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.state import state_structs
from dapo_jax.training.update import Updater

CONFIG = tiny_decoder_config(
    vocab_size=2048, embed_dim=512, layers=3, heads=4, kv_heads=2, head_dim=128, mlp_dim=1024,
    tied_embeddings=False, qkv_bias=True, max_positions=1024,
)  # fmt: skip
ROWS, TOKENS, MIB = 4, 1024, 2**20


def mesh_of(topology, **axes):
    return make_mesh(**{"fsdp": 1, **axes}, devices=devices_of(parse(topology)))


# Slow: compiles an update for TPU. tests/plan/gpu_test.py checks the kinds of collectives in an update, and the test below compiles the kernels.
@pytest.mark.slow
def test_weights_are_gathered_and_gradients_reduce_scattered():
    """fsdp 2 x tensor 2. Over axes of two devices, a device receives half of the result of a gather:

    * bfloat16 weights of a layer for the forward pass, for rematerialization and for the gradient of activations; embedding
      and unembedding once: the gradient pass of the unembedding gathers nothing;
    * gradients of all weights in float32, reduce-scattered once.
    """
    mesh = mesh_of("v5p:2x2x1", fsdp=2, tensor=2)
    graph = graph_of(
        CONFIG, compute_dtype="bfloat16", remat="full", layout=layout_of(mesh, attention="splash")
    )
    params, optimizer = shapes_of(CONFIG), make_optimizer()
    state = state_structs(params, optimizer, mesh)
    updater = Updater(graph, params, optimizer, mesh)
    lower = updater.programs(state, capacity=1, rows=ROWS, lengths=[TOKENS])["update_add_longest"]
    found = {kind.kind: kind.received_bytes for kind in collectives(lower().compile().as_text())}
    assert found.keys() <= {"all-gather", "reduce-scatter", "all-reduce"}
    layers = (
        CONFIG.layers * CONFIG.embed_dim * (2 * 128 * (CONFIG.heads + CONFIG.kv_heads) + 3 * CONFIG.mlp_dim)
    )
    tables = 2 * CONFIG.vocab_size * CONFIG.embed_dim
    weights_of_a_device = (3 * 2 * layers + 2 * tables) / 2 / 2
    gradients_of_a_device = 4 * (layers + tables) / 2 / 2
    # Activations: [512, 2 rows x 1024] in bfloat16, half of it at a time.
    activation = CONFIG.embed_dim * ROWS / 2 * TOKENS / 2
    gathers, scatters = 6 * CONFIG.layers + 2, 5 * CONFIG.layers + 2
    assert found["all-gather"] == pytest.approx(weights_of_a_device + 2 * gathers * activation, rel=0.15)
    assert found["reduce-scatter"] == pytest.approx(
        gradients_of_a_device + 2 * scatters * activation, rel=0.15
    )
    assert found["all-reduce"] < 0.02 * found["reduce-scatter"]


def test_windows_caps_and_sinks_compile_with_rows_over_two_chips():
    """Heads of 256, as in Gemma, need smaller blocks. A layer chooses one of two kernels by its window; neither stores scores."""
    mesh, windows = mesh_of("v5p:2x2x1", tensor=2, context=2), (512, 0)
    compiled = compiled_attention(mesh, 4, 2, 8192, head_dim=256, windows=windows, cap=50.0)
    assert " conditional(" in compiled.as_text()
    # Scores of the two heads of a chip would be 2 x 4096 x 8192 x 2 bytes = 128 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 128 * MIB


@pytest.mark.slow
@pytest.mark.parametrize("axes", [{"tensor": 4}, {"context": 4}, {"tensor": 2, "context": 2}])
def test_splash_attention_compiles_at_the_longest_rows_of_the_paper(axes):
    """22,528 tokens of Qwen2.5-32B's heads, forward and backward: no scores in memory, and only keys and values travel."""
    compiled = compiled_attention(mesh_of("v5p:2x2x1", **axes), 40, 8, 22_528)
    # Scores of one head alone would be 22,528^2 x 2 bytes = 968 MiB.
    assert compiled.memory_analysis().temp_size_in_bytes < 968 * MIB
    if axes.get("context", 1) > 1:
        kinds = {kind.kind for kind in collectives(compiled.as_text())}
        assert kinds <= {"all-gather", "reduce-scatter", "all-reduce"}


def compiled_attention(mesh, heads, kv_heads, tokens, *, head_dim=128, windows=(), cap=None):
    """The gradients of attention in one row of `tokens` tokens. If there are `windows`, the program receives the window, and there are sinks."""
    layout = layout_of(mesh, attention="splash")
    split, by_head = PartitionSpec("tensor", None, "context"), PartitionSpec("tensor")

    def struct(shape, dtype, spec):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    def body(query, key, value, sinks, segments, window):
        how = {"near": (window, segments), "sinks": sinks} if windows else {}
        how |= {"windows": windows, "cap": cap}
        return layout.attend(query, key, value, segments, None, "bfloat16", **how)

    def loss(query, key, value, *others):
        specs = (split, split, split, by_head, PartitionSpec(None, "context"), PartitionSpec())
        mapped = jax.shard_map(body, mesh=mesh, in_specs=specs, out_specs=split, check_vma=False)
        return mapped(query, key, value, *others).sum()

    query = struct((heads, head_dim, tokens), jnp.float32, split)
    key = struct((kv_heads, head_dim, tokens), jnp.float32, split)
    segments = struct((1, tokens), jnp.int32, PartitionSpec(None, "context"))
    sinks, window = struct((heads,), jnp.float32, by_head), struct((), jnp.int32, PartitionSpec())
    gradients = jax.jit(jax.grad(loss, argnums=range(4 if windows else 3)))
    return gradients.lower(query, key, key, sinks, segments, window).compile()
