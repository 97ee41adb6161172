"""DAPO in JAX. Each name is imported on first use. `train` imports the whole library; all other names import only jax, numpy and jaxtyping."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dapo_jax.dapo.advantages import group_advantages
    from dapo_jax.dapo.aggregation import token_weights
    from dapo_jax.dapo.logprobs import chunked_logprobs, token_logprobs
    from dapo_jax.dapo.losses import dapo_loss, kl_penalty
    from dapo_jax.dapo.metrics import Max, Mean, add_metrics, to_scalars
    from dapo_jax.dapo.overlong import overlong_penalty
    from dapo_jax.run import train

__version__ = "0.1.0"

__all__ = [
    "Max",
    "Mean",
    "add_metrics",
    "chunked_logprobs",
    "dapo_loss",
    "group_advantages",
    "kl_penalty",
    "overlong_penalty",
    "to_scalars",
    "token_logprobs",
    "token_weights",
    "train",
]

_HOMES = {
    "dapo.advantages": ("group_advantages",),
    "dapo.logprobs": ("chunked_logprobs", "token_logprobs"),
    "dapo.aggregation": ("token_weights",),
    "dapo.losses": ("dapo_loss", "kl_penalty"),
    "dapo.metrics": ("Max", "Mean", "add_metrics", "to_scalars"),
    "dapo.overlong": ("overlong_penalty",),
    "run": ("train",),
}


def __getattr__(name: str) -> Any:
    # Imports are lazy, because grading workers are started often and do not need jax, which takes a second and 130 MB to import.
    for home, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{home}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
