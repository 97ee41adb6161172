"""Measures the mismatch between sampler and trainer of a random model with experts, with and without routing replay.

    JAX_PLATFORMS=cpu python -m benchmarks.routing_replay [--layers 6] [--experts 128] [--chosen 8] [--prompts 4] [--tokens 64]

The sampler has 8 slots and pages of 64 tokens, and the trainer packs the responses into rows. Both have the same weights. Accelerators round activations to
the compute dtype in every product. On a CPU, the products of this benchmark do so, too; with `--own-rounding`, it rounds only weights,
keys and values, as the library does.
"""

import argparse
import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from flax import nnx

from dapo_jax.dapo.batching import training_examples
from dapo_jax.dapo.metrics import to_scalars
from dapo_jax.dapo.rollouts import Group, Prompt, Rollout, Verdict
from dapo_jax.models import experts as experts_module
from dapo_jax.models.decoder import Decoder, graph_of
from dapo_jax.models.gated import GATED
from dapo_jax.models.presets import DecoderConfig, Experts
from dapo_jax.numerics import precision
from dapo_jax.parallel.mesh import make_mesh
from dapo_jax.parallel.weights import WeightTransfer
from dapo_jax.sampling.continuous_batching import Sampler
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.engine import DecoderEngine
from dapo_jax.sampling.engine_spec import EngineSpec
from dapo_jax.training.optimizer import make_optimizer
from dapo_jax.training.row_packing import pack
from dapo_jax.training.state import init_state
from dapo_jax.training.update import UpdateOptions, Updater

PROMPT, GROUP = 32, 4


def decoder_of(*, layers: int = 6, experts: int = 128, chosen: int = 8) -> DecoderConfig:
    """Returns the sizes of the model. Without `experts`, it has an MLP as wide as the chosen experts."""
    mlp = Experts(experts, chosen, normalize=True) if experts else GATED
    return DecoderConfig(
        family="qwen3", vocab_size=512, embed_dim=128, layers=layers, heads=4, kv_heads=2, head_dim=32,
        mlp_dim=64 if experts else 64 * chosen, mlps=(mlp,), qk_norm="head", max_positions=4096,
    )  # fmt: skip


@contextmanager
def rounded_activations() -> Iterator[None]:
    """Rounds both operands of every product on a CPU, as accelerators do. Sums stay in float32."""
    einsum, grouped = precision._einsum, experts_module.grouped

    def rounds(spec: str, left: Any, right: Any, dtype: str, in_parts: bool = False) -> Any:
        return einsum(spec, precision.rounded(left, dtype), precision.rounded(right, dtype), dtype, in_parts)

    def rounds_grouped(stored: Any, x: Any, *how: Any) -> Any:
        return grouped(stored, precision.rounded(x, "bfloat16"), *how)

    precision._einsum, experts_module.grouped = rounds, rounds_grouped
    try:
        yield
    finally:
        precision._einsum, experts_module.grouped = einsum, grouped


def measure(
    decoder: DecoderConfig, *, prompts: int, tokens: int, dtype: str = "bfloat16"
) -> dict[str, dict[str, float]]:
    """Samples `prompts` groups of 4 responses with `tokens` tokens, and returns the metrics of the trainer with its own choice of experts (`off`) and with the
    sampler's choice (`sampler`)."""
    mesh, random = make_mesh(devices=jax.devices()[:1]), np.random.default_rng(0)
    params = nnx.state(nnx.jit(lambda: Decoder(decoder, rngs=nnx.Rngs(0)))())
    engine = DecoderEngine(
        decoder,
        mesh,
        EngineSpec(
            slots=8,
            capacity=PROMPT + tokens,
            steps_per_call=16,
            stop_ids=[],
            compute_dtype=dtype,
            page_tokens=64,
            records_routes=True,
        ),
    )
    asked = iter(
        Prompt(ordinal=at, tokens=random.integers(0, 512, PROMPT).astype(np.int32), text="", answer="")
        for at in range(prompts)
    )
    sampled = Sampler(engine).sample(
        WeightTransfer(jax.eval_shape(lambda: params), mesh, dtype=dtype, places=decoder.places)(params),
        lambda count: list(itertools.islice(asked, count)),
        key=jax.random.key(1), decoding=decoding(), samples_per_prompt=GROUP, max_response_tokens=tokens,
    )  # fmt: skip
    verdict = Verdict(correct=True)
    groups = [
        Group(
            prompt=prompt,
            rollouts=tuple(Rollout(response=one, text="", verdict=verdict, reward=1.0) for one in responses),
        )
        for prompt, responses in sampled
    ]
    examples = training_examples(groups, [[0.0] * GROUP] * len(groups))
    found = {}
    for replay in ("off", "sampler") if decoder.experts else ("off",):
        rows = (
            [replace(one, prompt=one.prompt.sampled, response=one.response.sampled) for one in examples]
            if replay == "off"
            else examples
        )
        packed = pack(rows, np.ones(len(rows)), row_tokens=PROMPT + GROUP * tokens, rows_per_microbatch=1)
        updater = Updater(
            graph_of(decoder, compute_dtype=dtype), params, make_optimizer(), mesh, options=UpdateOptions()
        )
        state = init_state(params, make_optimizer(), mesh)
        [minibatch] = updater.prepare(state, [packed])
        found[replay] = to_scalars(updater.update(state, minibatch, learning_rate=0.0, first=True)[1])
    return found


def main() -> None:
    """Prints one line per way of training."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, size in {"layers": 6, "experts": 128, "chosen": 8, "prompts": 4, "tokens": 64}.items():
        parser.add_argument(f"--{name}", type=int, default=size)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--own-rounding", action="store_true")
    asked = vars(parser.parse_args())
    own, how = asked.pop("own_rounding"), {name: asked.pop(name) for name in ("prompts", "tokens", "dtype")}
    for named in ({**asked}, {**asked, "experts": 0}):
        if own or how["dtype"] != "bfloat16":
            found = measure(decoder_of(**named), **how)
        else:
            with rounded_activations():
                found = measure(decoder_of(**named), **how)
        for replay, metrics in found.items():
            numbers = [
                f"{name} {metrics[name]:.3g}"
                for name in (
                    "sync/logprob_diff_mean",
                    "sync/logprob_diff_max",
                    "sync/sampler_trainer_kl",
                    "routing/flipped_frac",
                )
                if name in metrics
            ]
            print(
                f"{'experts' if named['experts'] else 'dense'}, replay {replay}: {', '.join(numbers)}",
                flush=True,
            )


if __name__ == "__main__":
    main()
