"""The micro model and the micro run of tests/run."""

from tests.run.conftest import (  # noqa: F401 - fixtures
    chat_model,
    even_sum,
    finished,
    micro,
    model,
    model_without_weights,
    rows,
    run_micro,
    same_run,
    steps_seen,
)
