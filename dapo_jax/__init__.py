"""DAPO in JAX. These names load jax and numpy and nothing else; `train` loads the rest when it is first used."""

from typing import Any

from dapo_jax.advantages import group_advantages
from dapo_jax.logprobs import chunked_logprobs, token_logprobs
from dapo_jax.losses import dapo_loss, kl_penalty, token_weights
from dapo_jax.metrics import Max, Mean, add_metrics, to_scalars
from dapo_jax.rewards.overlong import overlong_penalty

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


def __getattr__(name: str) -> Any:
    if name == "train":
        from dapo_jax.run import train

        return train
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
