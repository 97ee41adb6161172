"""Measures decoding and updates on one GPU relative to the GPU's limits, and compares them with vLLM and TRL: `python -m benchmarks.gpu`.

The model has Qwen3-0.6B's shapes and random weights, so nothing is downloaded. The systems run one after another, each in its own
process with exclusive use of the GPU. A system without an environment in `--peers` is skipped. Our system runs with the flags of a
run, which give equal results (`repeatable`), and with kernels that XLA chooses by their measured times (`timed`). After `--minutes`,
no further measurement starts, so the most important ones come first.

A decode step takes at least as long as reading the weights and the cached keys and values once. The table shows this limit as a share
of the measured time. For an update, it shows the share of peak FLOP/s that its matrix products reach (model FLOPs utilisation). Both
count the minimum work: prompts are counted once per group, and padding and recomputation are not counted.
"""

import argparse
import json
import os
import time
from collections.abc import Sequence
from itertools import chain, zip_longest
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from benchmarks import report, systems
from benchmarks.pool import WorkerError, end_workers_on_sigterm
from benchmarks.workload import Workload
from dapo_jax.parallel import gpu_settings

if TYPE_CHECKING:
    from dapo_jax.models.presets import DecoderConfig
    from dapo_jax.plan.chips import Chip

SYSTEMS = {"rollout": ("ours", "vllm"), "update": ("ours", "trl")}
LIMITS = {"rollout": "memory bandwidth", "update": "FLOP/s"}
FLAGS = {"repeatable": "true", "timed": "false"}
"""Values of `--xla_gpu_exclude_nondeterministic_ops` for our system."""
DTYPE = "bfloat16"
VLLM = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.85, "skip_tokenizer_init": True}


def main(words: Sequence[str] | None = None) -> None:
    """Measures every system, prints the table, and writes the JSON file."""
    arguments, began = _arguments(words), time.monotonic()
    end_workers_on_sigterm()
    # Set before jax is imported. Our worker inherits the GPU settings of a run, but this process creates the model on the CPU.
    os.environ["JAX_PLATFORMS"] = arguments.platforms
    gpu_settings.apply()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from dapo_jax.models.presets import PRESETS

    decoder, card = PRESETS[arguments.size], arguments.card
    rows, results = list[list[str]](), dict[str, Any]()
    with TemporaryDirectory() as folder:
        write_model(Path(folder), decoder)
        for what, sizes, name, flags in _cases(arguments):
            case = f"{what} {'x'.join(map(str, sizes))}:{name}{' timed' if flags == 'timed' else ''}"
            if time.monotonic() - began > 60 * arguments.minutes:
                print(f"{case} is left out: {arguments.minutes:g} minutes have passed", flush=True)
                continue
            workload = _workload(what, sizes, folder, arguments)
            found = measured(name, what, workload, arguments, flags)
            if found is None:
                continue
            card = card or found["card"]
            least = least_seconds(what, workload, decoder, _chip(card))
            share = [least / seconds for seconds in found["seconds"]]
            results[case] = {**found, "share": share}
            tokens = [workload.tokens / seconds for seconds in found["seconds"]]
            said = [report.spread(found["seconds"], 2), report.spread(tokens)]
            peak = f"{found['peak_gib']:.1f}" if found["peak_gib"] else ""
            limit = [LIMITS[what], report.spread([100 * one for one in share], 1) + "%"]
            rows.append([*case.split(":"), *said, *limit, peak])
    header = ["what", "system", "seconds, median (range)", "response tokens/s", "limit", "share of the limit", "peak GiB"]  # fmt: skip
    print(f"\n{arguments.size}, {DTYPE}, card {card}\n\n" + report.table(header, rows))
    options = {name: str(value) for name, value in vars(arguments).items()}
    report.write(arguments.out / "gpu.json", {"options": options, "card": card, "results": results})


def _cases(arguments: argparse.Namespace) -> list[tuple[str, tuple[int, ...], str, str]]:
    """Returns the measurements as (what, sizes, system, flags). The first sizes of rollouts and updates come before the second, and our system before others."""
    pairs = chain.from_iterable(zip_longest(*([(what, one) for one in getattr(arguments, what)] for what in SYSTEMS)))  # fmt: skip
    measured = [pair for pair in pairs if pair is not None]
    ours = [(*pair, "ours", flags) for pair in measured for flags in arguments.flags]
    others = [(*pair, name, "") for pair in measured for name in SYSTEMS[pair[0]][1:]]
    return [case for case in (*ours, *others) if case[2] in arguments.systems]


def write_model(folder: Path, decoder: "DecoderConfig") -> None:
    """Writes a model folder that transformers and vLLM can load, with random weights, and a tokenizer in which token i is the number i."""
    import jax
    import tokenizers
    from flax import nnx

    from dapo_jax.models.decoder import Decoder
    from dapo_jax.models.folder import save_model

    params = jax.jit(lambda: nnx.state(Decoder(decoder, rngs=nnx.Rngs(0))))()
    save_model(folder, decoder, params, dtype=DTYPE, token_ids={"eos_token_id": 1, "pad_token_id": 0})
    words = {str(index): index for index in range(decoder.vocab_size)}
    tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="0")).save(
        str(folder / "tokenizer.json")
    )
    kinds = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "1", "pad_token": "0"}
    (folder / "tokenizer_config.json").write_text(json.dumps(kinds))


def least_seconds(what: str, workload: Workload, decoder: "DecoderConfig", chip: "Chip") -> float:
    """Returns the minimum duration of a round in seconds, computed from the GPU's data sheet.

    A rollout has one decode step per response token. Each step reads the weights, and the keys and values of all earlier tokens.
    An update has three matrix products per weight: one in the forward pass, and two in the backward pass.
    """
    import jax.numpy as jnp

    from dapo_jax.config import ModelConfig, TrainConfig
    from dapo_jax.plan import roofline

    prompt, new, responses = workload.prompt_tokens, workload.new_tokens, workload.sequences
    if what == "rollout":
        config = TrainConfig(run_dir="none", model=ModelConfig(compute_dtype=DTYPE))
        cached = responses * (prompt + (new - 1) / 2) * roofline.cache_bytes_per_token(config, decoder)
        weights = roofline.decode_weight_parameters(decoder) * jnp.dtype(DTYPE).itemsize
        return new * (weights + cached) / chip.device_hbm_bytes_s
    pairs = workload.prompts * prompt * (prompt + 1) / 2 + responses * new * (prompt + (new + 1) / 2)
    tokens = workload.prompts * prompt + workload.tokens
    return (
        3
        * roofline.forward_flops(decoder, tokens=tokens, pairs=pairs, logits=workload.tokens)
        / chip.peak_flops
    )


def _chip(card: str | None) -> "Chip":
    from dapo_jax.plan.chips import CHIPS

    if card not in CHIPS:
        raise SystemExit(f"the card is {card}, and --card needs one of {', '.join(CHIPS)}")
    return CHIPS[card]


def _arguments(words: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.gpu")
    parser.add_argument("--size", default="qwen3-0.6b", help="a preset of the library")
    parser.add_argument(
        "--systems", nargs="+", choices=("ours", "vllm", "trl"), default=["ours", "vllm", "trl"]
    )
    parser.add_argument(
        "--peers", type=Path, default=Path("~/.cache/dapo_jax/gpu_peers"),
        help="folder with the environments `vllm` and `trl`",
    )  # fmt: skip
    parser.add_argument("--rounds", type=int, default=3, help="measured rounds of each system")
    parser.add_argument(
        "--warmups", type=systems.positive, default=1, help="rounds before these, which compile"
    )
    parser.add_argument(
        "--rollout", type=_sizes, nargs="+", default=[(16, 16, 128, 256), (16, 64, 128, 256), (16, 4, 128, 256)],
        help="prompts, responses to each, tokens of a prompt, tokens of a response (default 16,16,128,256 16,64,128,256 16,4,128,256: 256, 1,024 and 64 slots)",
    )  # fmt: skip
    parser.add_argument(
        "--update", type=_sizes, nargs="+", default=[(2, 8, 384, 2000), (2, 8, 256, 768)],
        help="the same (default 2,8,384,2000 2,8,256,768). Our system packs up to 8 responses and their prompt into a row: 16,384 tokens in the first",
    )  # fmt: skip
    parser.add_argument(
        "--rows-per-microbatch", type=int, default=16, help="responses in one forward and backward pass"
    )
    parser.add_argument("--flags", nargs="+", choices=tuple(FLAGS), default=list(FLAGS), help="flags of our system")  # fmt: skip
    parser.add_argument("--minutes", type=float, default=9.0, help="time after which no further measurement starts")  # fmt: skip
    parser.add_argument("--card", help="name of the card (default: the device's card)")
    parser.add_argument("--platforms", default="cuda,cpu", help="JAX_PLATFORMS of our worker")
    parser.add_argument(
        "--out", type=Path, default=Path("runs/benchmarks"), help="folder for the JSON file and the logs"
    )
    return parser.parse_args(words)


def _sizes(text: str) -> tuple[int, ...]:
    found = tuple(map(systems.positive, text.split(",")))
    if len(found) != 4:
        raise argparse.ArgumentTypeError(f"{text}: needs four numbers, as 16,16,128,256")
    return found


def _workload(what: str, sizes: tuple[int, ...], folder: str, arguments: argparse.Namespace) -> Workload:
    prompts, samples, prompt_tokens, new_tokens = sizes
    rows, for_training = arguments.rows_per_microbatch, {"for_training": True, "remat": "full"}
    return Workload(
        model=folder,
        dtype=DTYPE,
        prompts=prompts,
        samples=samples,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        threads=len(os.sched_getaffinity(0)),
        options={"gpu": True, "vllm": VLLM, "rows_per_microbatch": rows, "gradient_checkpointing": True}
        | (for_training if what == "update" else {}),
    )


def measured(
    name: str, what: str, workload: Workload, arguments: argparse.Namespace, flags: str
) -> dict[str, Any] | None:
    """Returns a system's version and the seconds of each round. If the system is missing or fails, prints the reason and returns None."""
    venv = systems.SYSTEMS[name].venv
    if venv and not (python := arguments.peers.expanduser() / venv / "bin" / "python").exists():
        print(f"{name} is left out: {python} is missing; see benchmarks/README.md", flush=True)
        return None
    environment = {"JAX_PLATFORMS": arguments.platforms}
    if flags:
        chosen = f"--xla_gpu_exclude_nondeterministic_ops={FLAGS[flags]}"
        environment["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {chosen}".strip()
    try:
        worker, known = systems.start(name, workload, arguments, environment)
    except WorkerError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None
    try:
        answers = [
            worker.call(what, **({"seed": seed} if what == "rollout" else {}))
            for seed in range(arguments.warmups + arguments.rounds)
        ]
        if what == "rollout":
            lengths = [len(tokens) for tokens in answers[-1].result]
            if lengths != workload.lengths():
                raise WorkerError(f"{name} returned responses of {lengths} tokens, not {workload.lengths()}")
        card, peak = (worker.call(each).result if name == "ours" else None for each in ("card", "peak_gib"))
        seconds = [answer.seconds for answer in answers[arguments.warmups :]]
        return {**known, "card": card, "peak_gib": peak, "seconds": seconds}
    except WorkerError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None
    finally:
        worker.close()


if __name__ == "__main__":
    main()
