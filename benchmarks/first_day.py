"""Measures one GPU or TPU in about twenty minutes, without a network: `python -m benchmarks.first_day`.

The parts run in the order of their value. Each part has a limit of time, and each result is written when it is there: to `first_day.json`, and to `first_day.md`, a page of one
screen. So a part that is cut short leaves its results so far. Without an accelerator, a tiny model is measured, with few optimizations, to try the command.

| part | measures |
|---|---|
| machine | versions, settings and memory, by `dapo-jax doctor` |
| profile | where a decoding round and an update spend their time, and the time without any kernel |
| mixed | 256 sequences whose prompts and responses have 100 to 1,024 tokens, as in nano-vllm's benchmark; with vLLM where it is installed |
| updates | packed rows of 16,384 tokens: tokens per second, share of the card's FLOP/s, peak memory |
| choices | kernels chosen by their times, command buffers, rematerialization, attention, the chunk of the vocabulary, and 64 to 1,024 slots |
| repeats | two equal runs of the quickstart, and a resumed run |
| shapes | log-probabilities of one batch in bfloat16 with more rows in a microbatch |
| kinds | whether sampler and trainer agree, for the tiny model of each family |
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks import gpu, report
from benchmarks.workload import Workload
from dapo_jax.parallel import gpu_settings

SIZES = {
    "accelerator": {
        "size": "qwen3-0.6b", "mixed": (256, 100, 1024), "rollout": (16, 16, 128, 256), "update": (2, 8, 384, 2000), "slots": (4, 64), "run": ("eval.every_steps=0",),
    },
    "cpu": {
        "size": "tiny", "mixed": (4, 4, 12), "rollout": (2, 2, 8, 8), "update": (1, 2, 8, 8), "slots": (1, 4),
        "run": (
            "eval.every_steps=0", "eval.prompts=4", "eval.samples_per_prompt=1", "data.train_split=train[:500]", "dynamic_sampling.prompts_per_wave=4",
            "batch.prompts_per_step=4", "batch.group_size=8", "batch.groups_per_update=2", "batch.rows_per_microbatch=16", "sampling.slots=32",
        ),
    },
}  # fmt: skip
"""Sizes with and without an accelerator. `rollout` and `update` have prompts, responses to each, tokens of a prompt, and tokens of a response. `slots` has other numbers of responses to each prompt, and `run` has overrides of the quickstart."""

DOCTOR = ("quickstart", "model.tokenizer=char:0123456789+=:,?", "data.train_split=train[:500]")
CLOCKS = ("time/", "speed/", "memory/")
"""Prefixes of the metrics in which equal runs differ."""


class CutShortError(Exception):
    """Raised when a part has used its time."""


class Day:
    """The results so far. Each change is written at once."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments, self.folder = arguments, folder
        self.platform, self.card = "cpu", arguments.card
        self.parts = dict[str, dict[str, Any]]()

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes for this machine."""
        return SIZES["cpu" if self.platform == "cpu" else "accelerator"]

    def add(self, what: str, value: str, **data: Any) -> None:
        """Adds one result to the current part."""
        print(f"  {what}: {value}", flush=True)
        list(self.parts.values())[-1]["results"].append({"what": what, "value": value, **data})
        self.write()

    @contextmanager
    def part(self, name: str, minutes: float) -> Iterator[None]:
        """Runs a part. After `minutes`, or if it fails, the reason is recorded and the next part follows."""
        print(name, flush=True)
        entry: dict[str, Any] = {"results": [], "ended": "running"}
        self.parts[name], began = entry, time.monotonic()

        def cut(*_: Any) -> None:
            raise CutShortError(f"cut short after {minutes:g} minutes")

        before = signal.signal(signal.SIGALRM, cut)
        signal.setitimer(signal.ITIMER_REAL, 60 * minutes)
        try:
            yield
            entry["ended"] = "whole"
        except (
            CutShortError,
            SystemExit,
            OSError,
            RuntimeError,
            ValueError,
            subprocess.SubprocessError,
        ) as error:
            entry["ended"] = str(error) or type(error).__name__
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
            entry["seconds"] = round(time.monotonic() - began, 1)
            self.write()

    def write(self) -> None:
        """Writes the JSON file and the page."""
        out = self.arguments.out
        out.mkdir(parents=True, exist_ok=True)
        options = {name: str(value) for name, value in vars(self.arguments).items()}
        data = {"time": time.strftime("%Y-%m-%dT%H:%M:%S%z"), "machine": report.machine(), "card": self.card, "options": options, "parts": self.parts}  # fmt: skip
        (out / "first_day.json").write_text(json.dumps(data, indent=1) + "\n")
        lines = [f"# First day on {self.card or self.platform}: {self.sizes['size']}"]
        for name, part in self.parts.items():
            ending = [] if part["ended"] == "whole" else [{"what": "ended early", "value": part["ended"]}]
            lines += ["", f"**{name}**", "", *(f"* {one['what']}: {one['value']}" for one in [*part["results"], *ending])]  # fmt: skip
        (out / "first_day.md").write_text("\n".join(lines) + "\n")

    def command(self, *words: str, environment: dict[str, str] | None = None, each: Callable[[str], object] = str) -> None:  # fmt: skip
        """Runs a module of Python in a process of its own, and calls `each` with every line that it prints. Its children end with it."""
        print(f"  python -m {' '.join(words)}", flush=True)
        env = {**os.environ, "JAX_PLATFORMS": self.arguments.platforms, **(environment or {})}
        if not env["JAX_PLATFORMS"]:
            del env["JAX_PLATFORMS"]
        with tempfile.TemporaryFile("w+") as errors, subprocess.Popen(
            [sys.executable, "-m", *words], env=env, text=True, stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        ) as process:  # fmt: skip
            lines = list[str]()
            try:
                for line in process.stdout or ():
                    lines.append(line)
                    each(line.strip())
                process.wait()
            except BaseException:
                os.killpg(process.pid, signal.SIGKILL)
                raise
            errors.seek(0)
            if process.returncode:
                said = errors.read() or "".join(lines)
                raise RuntimeError(f"{words[0]} failed: {' '.join(said.split()[-40:])}")

    def doctor(self, *changes: str) -> dict[str, str]:
        """Returns the messages of `dapo-jax doctor` by check."""
        path = self.folder / "doctor.json"
        path.unlink(missing_ok=True)
        try:
            self.command("dapo_jax", "doctor", *DOCTOR, *changes, f"run_dir={self.folder / 'doctor'}", "--json", str(path))  # fmt: skip
        except RuntimeError:
            # A failed check is a result, too.
            if not path.exists():
                raise
        checks = json.loads(path.read_text())["checks"]
        return {
            one["name"]: ("" if one["state"] == "ok" else f"{one['state']}: ") + one["message"]
            for one in checks
        }


@dataclass(frozen=True)
class Measurement:
    """One variant of a rollout or an update: other sizes, options of the workload, or environment variables."""

    name: str
    what: str
    workload: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    flags: str = "repeatable"
    environment: dict[str, str] = field(default_factory=dict)


def measured(day: Day, one: Measurement) -> None:
    """Adds the tokens per second of our system, its share of the card's limit and its peak memory."""
    from dapo_jax.models.presets import PRESETS
    from dapo_jax.plan.chips import CHIPS

    workload = _workload(day, one)
    arguments = argparse.Namespace(platforms=day.arguments.platforms, peers=day.arguments.peers, out=day.arguments.out, warmups=1, rounds=2)  # fmt: skip
    before = dict(os.environ)
    os.environ.update(one.environment)
    try:
        for system in ("ours", "vllm") if one.what == "mixed" else ("ours",):
            what = "rollout" if one.what == "mixed" else one.what
            found = gpu.measured(system, what, workload, arguments, one.flags if system == "ours" else "")
            if found is None:
                day.add(f"{one.name}, {system}", "not measured")
                continue
            rate = workload.tokens / min(found["seconds"])
            said = f"{rate:,.0f} response tokens/s, {min(found['seconds']):.3f} s"
            day.card = day.card or found["card"]
            if day.card in CHIPS and one.what != "mixed":
                least = gpu.least_seconds(what, workload, PRESETS[day.sizes["size"]], CHIPS[day.card])
                found["share"] = least / min(found["seconds"])
                said += f", {100 * found['share']:.1f}% of the card's {gpu.LIMITS[what]}"
            if found["peak_gib"]:
                said += f", {found['peak_gib']:.1f} GiB"
            day.add(one.name if system == "ours" else f"{one.name}, {system}", said, tokens_s=rate, **found)
    finally:
        os.environ.clear()
        os.environ.update(before)


def _workload(day: Day, one: Measurement) -> Workload:
    if one.what == "mixed":
        count, low, high = day.sizes["mixed"]
        sizes = {"prompts": count, "samples": 1, "prompt_tokens": high, "new_tokens": high, "mixed": [low, high]}  # fmt: skip
    else:
        names = ("prompts", "samples", "prompt_tokens", "new_tokens")
        sizes = dict(zip(names, day.sizes[one.what], strict=True))
    training = {"for_training": True, "remat": "full", "rows_per_microbatch": 8} if one.what == "update" else {}  # fmt: skip
    return Workload(
        model=str(day.folder / "model"), dtype=gpu.DTYPE, threads=len(os.sched_getaffinity(0)), **sizes | one.workload,
        options={"gpu": True, "vllm": gpu.VLLM, **training, **one.options},
    )  # fmt: skip


def machine(day: Day) -> None:
    """Versions, settings and memory. Its line `devices` decides whether there is an accelerator."""
    checks = day.doctor("model.source=preset:tiny", "--quick")
    for name in ("versions", "devices", "settings", "host memory", "memory"):
        day.add(name, checks[name])
    devices = checks["devices"].removeprefix("warning: ")
    day.platform = "cpu" if " x cpu" in devices else devices
    if day.platform == "cpu":
        os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"


def profile(day: Day) -> None:
    """The largest parts of a profile."""
    for what in ("rollout", "update"):
        prompts, samples, prompt, new = day.sizes[what]
        sizes = {"prompts": prompts, "samples": samples, "prompt-tokens": prompt, "new-tokens": new, "remat": "full", "dtype": gpu.DTYPE, "warmups": 1}  # fmt: skip
        words = [word for name, value in sizes.items() for word in (f"--{name}", str(value))]
        out = day.folder / "profile"
        # A program that is loaded from the cache has no text, which names the functions.
        day.command("benchmarks.profiling", day.sizes["size"], "--what", what, "--out", str(out), *words, environment={"JAX_COMPILATION_CACHE_DIR": ""})  # fmt: skip
        result = json.loads((out / "profile.json").read_text())[what]
        parts = sorted(result["parts"].items(), key=lambda pair: -pair[1])
        total = sum(seconds for _, seconds in parts)
        said = ", ".join(f"{name} {100 * seconds / total:.0f}%" for name, seconds in parts[:6])
        day.add(what, f"{result['seconds_without_profiler']:.3f} s: {said}", **result)


def mixed(day: Day) -> None:
    """The workload of nano-vllm's benchmark."""
    measured(day, Measurement("prompts and responses of mixed lengths", "mixed"))


def updates(day: Day) -> None:
    """Packed updates with the flags of a run."""
    measured(day, Measurement("packed rows", "update"))


def choices(day: Day) -> None:
    """Each choice by itself. The first measurement of each kind has the flags of a run."""
    buffers = {"XLA_FLAGS": f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_enable_command_buffer="}
    few, many = day.sizes["slots"]
    for one in (
        Measurement("rollout", "rollout"),
        Measurement("rollout, timed kernels", "rollout", flags="timed"),
        Measurement("rollout, 4 times as many slots", "rollout", {"samples": many}),
        Measurement("rollout, a quarter of the slots", "rollout", {"samples": few}),
        Measurement("rollout, no command buffers", "rollout", environment=buffers),
        Measurement("update, timed kernels", "update", flags="timed"),
        Measurement("update, remat none", "update", options={"remat": "none"}),
        Measurement("update, remat dots", "update", options={"remat": "dots"}),
        Measurement("update, attention xla", "update", options={"attention": "xla"}),
        Measurement("update, chunks of 8,192 entries", "update", options={"logprob_chunk_vocab": 8192}),
    ):
        measured(day, one)


def repeats(day: Day) -> None:
    """Whether two runs of three steps, and one that is resumed after two, have the same metrics."""
    runs = {name: day.folder / name for name in ("first", "second", "resumed")}
    for name, steps, *options in (("first", 3), ("second", 3), ("resumed", 2), ("resumed", 3, "--resume")):
        day.command("dapo_jax", "train", "quickstart", *options, f"steps={steps}", f"run_dir={runs[name]}", *day.sizes["run"])  # fmt: skip
    lines = {name: _learned(run / "metrics.jsonl") for name, run in runs.items()}
    for name in ("second", "resumed"):
        pairs = zip(lines["first"], lines[name], strict=True)
        differing = sorted({key for a, b in pairs for key in a.keys() | b.keys() if a.get(key) != b.get(key)})
        day.add(f"{name} run", f"differs in {', '.join(differing)}" if differing else "equal in every metric")


def _learned(path: Path) -> list[dict[str, Any]]:
    """Returns the metrics of each step without clocks. Values are texts, so that nan equals nan."""
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    steps = {line["step"]: {} for line in lines}
    for line in lines:
        steps[line["step"]] |= {name: str(value) for name, value in line.items() if not name.startswith((*CLOCKS, "eval/"))}  # fmt: skip
    return list(steps.values())


def shapes(day: Day) -> None:
    """Rounding by the number of rows in a microbatch, in bfloat16."""
    checks = day.doctor("model.source=preset:tiny", f"model.compute_dtype={gpu.DTYPE}")
    for name in ("shapes", "agreement"):
        day.add(f"{name}, {gpu.DTYPE}", checks[name])


def kinds(day: Day) -> None:
    """Sampler and trainer of each tiny preset."""
    from dapo_jax.models.presets import PRESETS

    names = (name for name in PRESETS if name.startswith("tiny"))
    day.command("benchmarks.kinds", *names, each=lambda line: day.add(*line.split(": ", 1)))


PARTS: dict[str, tuple[float, Callable[[Day], None]]] = {
    "machine": (1.5, machine), "profile": (4.0, profile), "mixed": (3.0, mixed), "updates": (2.0, updates), "choices": (6.0, choices),
    "repeats": (3.0, repeats), "shapes": (1.0, shapes), "kinds": (4.0, kinds),
}  # fmt: skip
"""Minutes and function of each part."""


def main() -> None:
    """Runs the parts one after the other."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.first_day", formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--minutes", type=float, default=1.0, help="factor of the limits of time")
    parser.add_argument("--card", help="name of the card (default: the device's card)")
    parser.add_argument("--peers", type=Path, default=Path("~/.cache/dapo_jax/gpu_peers"), help="folder with vLLM's environment")  # fmt: skip
    parser.add_argument("--out", type=Path, default=Path("runs/first_day"))
    arguments = parser.parse_args()
    arguments.platforms = os.environ.get("JAX_PLATFORMS", "")
    # This process writes the model on the CPU. The device belongs to the processes that measure, which get the GPU settings of a run.
    gpu_settings.apply()
    os.environ["JAX_PLATFORMS"] = "cpu"
    from dapo_jax.models.presets import PRESETS

    with tempfile.TemporaryDirectory() as folder:
        # The processes share what they compile: modules of Python, which some environments do not store, and programs.
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ |= {"PYTHONPYCACHEPREFIX": f"{folder}/bytecode", "JAX_COMPILATION_CACHE_DIR": f"{folder}/xla", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}  # fmt: skip
        day = Day(arguments, Path(folder))
        for name in ("machine", *(name for name in arguments.parts if name != "machine")):
            minutes, run = PARTS[name]
            with day.part(name, minutes * arguments.minutes):
                run(day)
            if name == "machine":
                (day.folder / "model").mkdir()
                gpu.write_model(day.folder / "model", PRESETS[day.sizes["size"]])
    print(f"\n{(arguments.out / 'first_day.md').read_text()}\nwritten to {arguments.out}")


if __name__ == "__main__":
    main()
