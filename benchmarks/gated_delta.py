"""Compares a random model with Gated DeltaNet layers (Qwen3.5) and a Qwen3 of about the same size: decoding, training, and the mismatch in bfloat16.

    JAX_PLATFORMS=cpu python -m benchmarks.gated_delta [--contexts 256 1024 4096 8192] [--row-tokens 2048] [--repeats 3]

`decode` prints the seconds of a decoding step with 4 slots after prompts of several lengths. `train` prints the seconds per token of a forward and backward pass over one
row. `mismatch` prints the differences of the sampler's and the trainer's log-probabilities in float32 and in bfloat16, with activations rounded as on accelerators.
"""

import argparse
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks.routing_replay import measure, rounded_activations
from dapo_jax.models.attention_mixer import ATTENTION
from dapo_jax.models.decoder import Decoder, graph_of
from dapo_jax.models.gated_delta import GatedDelta
from dapo_jax.models.presets import DecoderConfig
from dapo_jax.models.rope import Rope
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.sampling.interface import Insertion
from dapo_jax.sampling.page_tables import Pages

SLOTS, STEPS = 4, 16


def decoder_of(*, delta: bool, layers: int = 4) -> DecoderConfig:
    """Returns the sizes of a model. With `delta`, three of four layers are Gated DeltaNet layers."""
    sizes: dict[str, Any] = {"vocab_size": 512, "embed_dim": 256, "layers": layers, "heads": 8, "kv_heads": 2, "head_dim": 32, "mlp_dim": 704}  # fmt: skip
    if not delta:
        return DecoderConfig(family="qwen3", qk_norm="head", max_positions=16_384, **sizes)
    return DecoderConfig(
        family="qwen3_5_text", qk_norm="head", norm_offset=1.0, attention_gate=True, ropes=(Rope(share=0.25),),
        mixers=tuple(ATTENTION if layer % 4 == 3 else GatedDelta(4, 4, 32, 32) for layer in range(layers)), max_positions=16_384, **sizes,
    )  # fmt: skip


def parameters_of(decoder: DecoderConfig) -> nnx.State:
    return nnx.state(nnx.jit(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))())


def least_seconds(run: Callable[[], Any], repeats: int) -> float:
    """Returns the shortest of several times of `run`, after one call that compiles."""
    jax.block_until_ready(run())
    found = []
    for _ in range(repeats):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        found.append(time.perf_counter() - begin)
    return min(found)


def step_seconds(decoder: DecoderConfig, contexts: Sequence[int], repeats: int) -> dict[int, float]:
    """Returns the seconds of a decoding step in which each slot has `contexts` tokens."""
    mesh, found = make_mesh(devices=jax.devices()[:1]), {}
    params = parameters_of(decoder)
    weights = WeightTransfer(params, mesh, dtype="float32", places=decoder.places)(params)
    limit = STEPS * (repeats + 1)
    engine = DecoderEngine(
        decoder,
        mesh,
        EngineSpec(
            slots=SLOTS, capacity=max(contexts) + limit, steps_per_call=STEPS, stop_ids=[], page_tokens=64
        ),
    )
    random = np.random.default_rng(0)
    for context in contexts:
        pages, state = Pages(engine.page_sizes), engine.init_decode_state()
        prompt = random.integers(0, decoder.vocab_size, context).astype(np.int32)
        for part in engine.prefill(weights, [prompt]):
            for _, prefix, place in part:
                fills = [
                    (place, fill)
                    for slot in range(SLOTS)
                    for fill in pages.start(slot, engine.capacity, read=context) or ()
                ]
                rows = np.arange(SLOTS, dtype=np.int32)
                same = np.zeros(SLOTS, np.int32)
                insertion = Insertion(
                    slots=rows, prompts=same + place, ordinals=same, indices=rows, limits=same + limit, drawn=same, turns=same, fills=fills
                )  # fmt: skip
                state = engine.insert(prefix, state, insertion, jax.random.key(0))
        held = [state]

        def step(held: list[Any] = held, pages: Pages = pages) -> Any:
            held[0], result = engine.generate(weights, held[0], decoding(), 1, pages.rows(slice(SLOTS)))
            return result.tokens

        found[context] = least_seconds(step, repeats) / STEPS
    return found


def token_seconds(decoder: DecoderConfig, tokens: int, repeats: int) -> float:
    """Returns the seconds per token of a forward and backward pass over one row."""
    graph, params = graph_of(decoder), parameters_of(decoder)
    ids, column = jnp.ones((1, tokens), jnp.int32), jnp.arange(tokens, dtype=jnp.int32)[None]
    given = ids, column, ids, ids
    run = jax.jit(jax.grad(lambda params: jnp.square(nnx.merge(graph, params)(*given)).mean()))
    return least_seconds(lambda: run(params), repeats) / tokens


def main() -> None:
    """Prints one line per measurement."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 4096, 8192])
    parser.add_argument("--row-tokens", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=3)
    asked = parser.parse_args()
    for name, decoder in (("qwen3.5", decoder_of(delta=True)), ("qwen3", decoder_of(delta=False))):
        print(f"{name}: {decoder.parameters:,} parameters")
        for context, seconds in step_seconds(decoder, asked.contexts, asked.repeats).items():
            print(f"{name} decode, {context} tokens: {seconds:.3g} s per step")
        print(f"{name} train: {token_seconds(decoder, asked.row_tokens, asked.repeats):.3g} s per token")
        for dtype in ("float32", "bfloat16"):
            with rounded_activations() if dtype == "bfloat16" else nullcontext():
                found = measure(decoder, prompts=4, tokens=64, dtype=dtype)["off"]
            numbers = {key: found[f"sync/{key}"] for key in ("logprob_diff_mean", "logprob_diff_max")}
            print(
                f"{name} mismatch, {dtype}: "
                + ", ".join(f"{key} {value:.3g}" for key, value in numbers.items())
            )


if __name__ == "__main__":
    main()
