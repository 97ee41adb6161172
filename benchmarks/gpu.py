"""Measures decoding and updates on one GPU relative to the GPU's limits, and compares them with vLLM and TRL: `python -m benchmarks.gpu`.

The model has Qwen3-0.6B's shapes and random weights, so nothing is downloaded. The systems run one after another, each in its own
process with exclusive use of the GPU. A system without an environment in `--peers` is skipped.

A decode step takes at least as long as reading the weights and the cached keys and values once. The table shows this limit as a share
of the measured time. For an update, it shows the share of peak FLOP/s that its matrix products reach (model FLOPs utilisation). Both
count the minimum work: prompts are counted once per group, and padding and recomputation are not counted.
"""

import argparse
import json
import os
from collections.abc import Sequence
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
DTYPE = "bfloat16"
VLLM = {"kv_cache_memory_bytes": None, "gpu_memory_utilization": 0.85, "skip_tokenizer_init": True}


def main(words: Sequence[str] | None = None) -> None:
    """Measures every system, prints the table, and writes the JSON file."""
    arguments = _arguments(words)
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
        for what, names in SYSTEMS.items():
            workload = _workload(what, folder, arguments)
            for name in (name for name in names if name in arguments.systems):
                found = _measured(name, what, workload, arguments)
                if found is None:
                    continue
                card = card or found["card"]
                least = least_seconds(what, workload, decoder, _chip(card))
                share = [least / seconds for seconds in found["seconds"]]
                results[f"{what}:{name}"] = {**found, "share": share}
                tokens = [workload.tokens / seconds for seconds in found["seconds"]]
                said = [report.spread(found["seconds"], 2), report.spread(tokens)]
                rows.append(
                    [what, name, *said, LIMITS[what], report.spread([100 * one for one in share], 1) + "%"]
                )
    header = ["what", "system", "seconds, median (range)", "response tokens/s", "limit", "share of the limit"]
    print(f"\n{arguments.size}, {DTYPE}, card {card}\n\n" + report.table(header, rows))
    options = {name: str(value) for name, value in vars(arguments).items()}
    report.write(arguments.out / "gpu.json", {"options": options, "card": card, "results": results})


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
    from dapo_jax.config import ModelConfig, TrainConfig
    from dapo_jax.plan import roofline

    prompt, new, responses = workload.prompt_tokens, workload.new_tokens, workload.sequences
    if what == "rollout":
        config = TrainConfig(run_dir="none", model=ModelConfig(compute_dtype=DTYPE))
        cached = responses * (prompt + (new - 1) / 2) * roofline.cache_bytes_per_token(config, decoder)
        weights = roofline.decode_weight_parameters(decoder) * roofline.item(DTYPE)
        return new * (weights + cached) / chip.device_hbm_bytes_s
    pairs = workload.prompts * prompt * (prompt + 1) / 2 + responses * new * (prompt + (new + 1) / 2)
    tokens = workload.prompts * prompt + workload.tokens
    return (
        3
        * roofline.forward_flops(decoder, tokens=tokens, pairs=pairs, logits=workload.tokens)
        / chip.device_flops
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
        "--rollout", type=_sizes, default=(16, 16, 128, 256),
        help="prompts, responses to each, tokens of a prompt, tokens of a response (default 16,16,128,256)",
    )  # fmt: skip
    parser.add_argument(
        "--update", type=_sizes, default=(2, 8, 256, 768), help="the same (default 2,8,256,768)"
    )
    parser.add_argument(
        "--rows-per-microbatch", type=int, default=8, help="responses in one forward and backward pass"
    )
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


def _workload(what: str, folder: str, arguments: argparse.Namespace) -> Workload:
    prompts, samples, prompt_tokens, new_tokens = getattr(arguments, what)
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


def _measured(
    name: str, what: str, workload: Workload, arguments: argparse.Namespace
) -> dict[str, Any] | None:
    """Returns a system's version and the seconds of each round. If the system is missing or fails, prints the reason and returns None."""
    venv = systems.SYSTEMS[name].venv
    if venv and not (python := arguments.peers.expanduser() / venv / "bin" / "python").exists():
        print(f"{name} is left out: {python} is missing; see benchmarks/README.md", flush=True)
        return None
    try:
        worker, known = systems.start(name, workload, arguments, {"JAX_PLATFORMS": arguments.platforms})
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
            if lengths != [workload.new_tokens] * workload.sequences:
                raise WorkerError(
                    f"{name} returned responses of {sorted(set(lengths))} tokens, not {workload.new_tokens}"
                )
        card = worker.call("card").result if name == "ours" else None
        return {**known, "card": card, "seconds": [answer.seconds for answer in answers[arguments.warmups :]]}
    except WorkerError as error:
        print(f"{name} is left out: {error}", flush=True)
        return None
    finally:
        worker.close()


if __name__ == "__main__":
    main()
