"""The micro run of `tests/run`, whose compiled programs these tests share."""

from tests.run.conftest import (
    compiled,
    data_dir,
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
    "compiled",
    "data_dir",
    "even_sum",
    "micro",
    "model",
    "moe_model",
    "on_disk",
    "rows",
    "run_micro",
    "same_run",
]
