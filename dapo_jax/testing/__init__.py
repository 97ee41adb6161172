"""Test doubles, which are imported on first use, and `check_objective`, which tests losses and needs only jax and numpy."""

import importlib
from typing import TYPE_CHECKING, Any

from dapo_jax.testing.objectives import check_objective

if TYPE_CHECKING:
    from dapo_jax.testing.doubles import ScriptedEngine, tiny_decoder_config, tiny_params

__all__ = ["ScriptedEngine", "check_objective", "tiny_decoder_config", "tiny_params"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.doubles"), name)
