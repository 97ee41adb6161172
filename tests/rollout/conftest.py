"""The micro run of `tests/run`, whose compiled programs these tests share."""

from tests.run.conftest import (
    even_sum,
    micro,
    model,
    moe_model,
    on_disk,
    rows,
    run_micro,
    same_run,
)

__all__ = [
    "even_sum",
    "micro",
    "model",
    "moe_model",
    "on_disk",
    "rows",
    "run_micro",
    "same_run",
]
