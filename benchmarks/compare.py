"""Compares measurements with the baseline of this kind of machine: `python -m benchmarks.compare`.

The other benchmarks write their measurements to a folder. `--write` makes these measurements the new baseline.
"""

import argparse
import json
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.report import ratios, table
from benchmarks.workload import Workload

BASELINES = Path(__file__).parent / "baselines"
MOVED = 0.03
"""A figure moved if its median differs by more than this share, and its range does not overlap with the baseline's range."""

MEASURED = ("rollout", "update", "step", "long_tail", "gpu")
"""Names of the JSON files that this command reads."""

_OPTIONS = {
    "gpu": ("size", "rollout", "update", "rows_per_microbatch"),
    "long_tail": (
        *("prompts", "samples", "slots", "prompt_tokens", "median_tokens", "sigma", "max_tokens"),
        *("steps_per_call", "refill_frac", "dtype", "seed"),
    ),
}
"""Options of benchmarks without a workload that two comparable measurements share."""

Figures = dict[str, list[float]]
"""Maps a name such as `rollout/ours:float32/tokens_per_s` to the values of all rounds."""


def main() -> None:
    """Compares or writes the baseline."""
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m benchmarks.compare")
    parser.add_argument(
        "runs", type=Path, nargs="?", default=Path("runs/benchmarks"), help="folder with JSON files"
    )
    parser.add_argument("--write", action="store_true", help="make these measurements the baseline")
    parser.add_argument("--baselines", type=Path, default=BASELINES)
    given = parser.parse_args()
    measured = read(given.runs)
    path = given.baselines / f"{measured['kind']}.json"
    if given.write:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(measured, indent=1) + "\n")
        print(f"written to {path}")
        return
    if not path.exists():
        known = ", ".join(sorted(file.stem for file in given.baselines.glob("*.json"))) or "none"
        raise SystemExit(
            f"{path} is missing, the baselines are: {known}; --write creates it from these measurements"
        )
    print(compared(json.loads(path.read_text()), measured))


def read(folder: Path) -> dict[str, Any]:
    """Returns the figures, machine and versions in the JSON files that the other benchmarks wrote to a folder (`MEASURED`)."""
    found = {path.stem: json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))}
    found = {name: content for name, content in found.items() if name in MEASURED}
    if not found:
        names = ", ".join(f"{name}.json" for name in MEASURED)
        raise SystemExit(f"{folder} has none of {names}; run one of these benchmarks first")
    first = next(iter(found.values()))
    machine = first["machine"]
    card = found["gpu"]["card"] if "gpu" in found else None
    kind = _slug(str(card)) if card else f"{_slug(machine['processor'])}-{machine['cpus']}"
    figures: Figures = {}
    versions: dict[str, str] = {}
    workloads: dict[str, dict[str, Any]] = {}
    for name, content in found.items():
        figures |= _figures(name, content)
        if "workload" in content:
            workloads[name] = _sizes(Workload.from_json(content["workload"]))
        if name in _OPTIONS:
            workloads[name] = {key: content["options"][key] for key in _OPTIONS[name]}
        for system, result in content.get("systems", {}).items():
            if "version" in result:
                versions[system.partition(":")[0]] = result["version"]
        for key, result in content.get("results", {}).items():
            versions[key.partition(":")[2]] = result["version"]
    hardware = {key: machine[key] for key in ("processor", "cpus", "memory_gb")} | {"card": card}
    return {
        "kind": kind,
        "time": first["time"],
        "machine": hardware,
        "versions": versions,
        "workloads": workloads,
        "figures": figures,
    }


def _sizes(workload: Workload) -> dict[str, Any]:
    """Returns the properties of a workload and its model that two comparable measurements share."""
    model, given = workload.sizes(), asdict(workload)
    sizes = {key: model[key] for key in ("hidden_size", "num_hidden_layers", "vocab_size")}
    return sizes | {key: given[key] for key in ("dtype", "prompts", "samples", "prompt_tokens", "new_tokens")}


def _figures(name: str, content: dict[str, Any]) -> Figures:
    if name == "gpu":
        made: Figures = {}
        for key, result in content["results"].items():
            made |= {f"gpu/{key}/seconds": result["seconds"], f"gpu/{key}/share_of_limit": result["share"]}
            what, _, system = key.partition(":")
            ours = content["results"].get(f"{what}:ours")
            if ours and system != "ours":
                made[f"gpu/{key}/seconds_relative_to_ours"] = ratios(result["seconds"], ours["seconds"])
        return made
    if name == "long_tail":
        ways = content["systems"]
        counted = {
            f"long_tail/{way}/{key}": [result[key]]
            for way, result in ways.items()
            for key in ("steps", "live_frac")
        }
        waiting = {
            "long_tail/continuous/live_while_waiting_frac": [ways["continuous"]["live_while_waiting_frac"]]
        }
        seconds = ratios(ways["static"]["seconds"], ways["continuous"]["seconds"])
        return counted | waiting | {"long_tail/static/seconds_relative_to_continuous": seconds}
    workload = Workload.from_json(content["workload"])
    systems = {
        key: value for key, value in content["systems"].items() if key not in content.get("failed", {})
    }
    figures: Figures = {}
    for key, result in systems.items():
        seconds = result["seconds"]
        figures[f"{name}/{key}/seconds"] = seconds
        figures[f"{name}/{key}/peak_gb"] = [result["peak_gb"]]
        if name == "rollout":
            limits = [one[key.partition(":")[2]]["tokens_per_s"] for one in content["limits"]]
            rates = [workload.tokens / each for each in seconds]
            figures[f"{name}/{key}/tokens_per_s"] = rates
            figures[f"{name}/{key}/share_of_limit"] = ratios(rates, limits)
        ours = systems.get(f"ours:{workload.dtype}" if name == "rollout" else "ours")
        if ours and not key.startswith("ours") and len(seconds) == len(ours["seconds"]):
            figures[f"{name}/{key}/seconds_relative_to_ours"] = ratios(seconds, ours["seconds"])
    return figures


def compared(before: dict[str, Any], now: dict[str, Any]) -> str:
    """Returns a table of all figures, and below it the figures that moved and the versions that changed.

    Raises:
        SystemExit: a benchmark was run with another model or other sizes than the baseline.
    """
    old_sizes, new_sizes = before.get("workloads", {}), now["workloads"]
    for name in old_sizes.keys() & new_sizes.keys():
        if old_sizes[name] != new_sizes[name]:
            raise SystemExit(
                f"{name}.json was measured with {new_sizes[name]}, the baseline with {old_sizes[name]}; repeat the benchmark "
                "with the model and the sizes of the baseline"
            )
    rows, moved = [], []
    for name in sorted(before["figures"].keys() | now["figures"].keys()):
        old, new = before["figures"].get(name), now["figures"].get(name)
        if not old or not new:
            rows.append([name, _spread(old), _spread(new), "", "not measured" if old else "no baseline"])
            continue
        change = statistics.median(new) / statistics.median(old)
        apart = min(new) > max(old) or max(new) < min(old)
        has_moved = apart and abs(change - 1) > MOVED
        rows.append([name, _spread(old), _spread(new), f"{change:.2f}", "moved" if has_moved else ""])
        if has_moved:
            moved.append(f"{name}: {change:.2f} times the baseline")
    lines = [table(["figure", f"baseline, {before['time'][:10]}", "now", "now / baseline", ""], rows), ""]
    lines += moved or ["Nothing moved."]
    for system in sorted(before["versions"].keys() & now["versions"].keys()):
        old, new = before["versions"][system], now["versions"][system]
        if old != new:
            lines.append(f"{system}: {old} before, {new} now")
    return "\n".join(lines)


def _spread(values: list[float] | None) -> str:
    if not values:
        return "-"
    low, middle, high = (f"{value:.4g}" for value in (min(values), statistics.median(values), max(values)))
    return f"{middle} ({low}-{high})"


def _slug(text: str) -> str:
    """Returns a file name for a processor or card.

    >>> _slug("AMD EPYC 9R14 (Zen 4)")
    'amd_epyc_9r14_zen_4'
    """
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


if __name__ == "__main__":
    main()
