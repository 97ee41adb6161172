"""Modules that moved and names that changed: an import of an old name fails with the new one in its message."""

import sys
from collections.abc import Callable
from importlib.abc import MetaPathFinder
from typing import Any

MOVED = {
    "advantages": "dapo.advantages",
    "batching": "dapo.batching",
    "checkpoint_files": "checkpoints.manifest",
    "checkpoint_keeping": "checkpoints.retention",
    "filtering": "dapo.dynamic_sampling",
    "logprobs": "dapo.logprobs",
    "losses": "dapo.losses",
    "metrics": "dapo.metrics",
    "microbatch": "dapo.microbatch",
    "packing": "training.row_packing",
    "parallel.exchange": "parallel.gather",
    "parallel.layout": "parallel.training_layout",
    "products": "dapo.precision",
    "rewards.overlong": "dapo.overlong",
    "rollouts": "dapo.rollouts",
    "run.assembly": "run.build",
    "run.boundaries": "run.end_of_step",
    "run.serve": "serving.serve",
    "sampling.sampler": "sampling.continuous_batching",
    "data.pairs": "data.sft_pairs",
    "training.loop": "run.loop",
    "sampling.packing": "sampling.prompt_packing",
    "sampling.paired_cache": "sampling.tpu_cache",
    "stalls": "health.stalls",
    "stopping": "health.stopping",
    "streams": "terminal",
    "training.mismatch": "training.sync_metrics",
    "visible": "terminal",
    "watchdogs": "health.watchdogs",
}
"""Old name -> new name, both within the package."""


class _Answer(MetaPathFinder):
    """Asked for a module after all other finders, so only for one that is not there."""

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> None:
        package, _, name = fullname.partition(".")
        if package == __package__ and name in MOVED:
            raise ModuleNotFoundError(
                f"{fullname} is {package}.{MOVED[name]} now; names that `import {package}` offers stay where they are",
                name=fullname,
            )


def answer_old_names() -> None:
    """Makes imports of old names say the new ones. Called once, when the package is imported."""
    sys.meta_path.append(_Answer())


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module in which some names are others now: old name -> new name."""

    def answer(name: str) -> Any:
        if name in names:
            raise ImportError(f"{module}.{name} is {names[name]} now", name=module)
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return answer
