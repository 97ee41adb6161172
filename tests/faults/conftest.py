"""The micro run of tests/run, and what it prints."""

import io

import pytest
from rich.console import Console

from dapo_jax.trackers.progress import Progress
from tests.run.conftest import even_sum, micro, model, on_disk, rows, run_micro, same_run  # noqa: F401


@pytest.fixture
def shown():
    """Where a run prints: pass `progress=shown.progress(config)`, then read `shown.text()`."""
    return _Shown()


class _Shown:
    def __init__(self):
        self._file = io.StringIO()

    def progress(self, config):
        return Progress(config.steps, console=Console(file=self._file, width=10_000))

    def text(self):
        return self._file.getvalue()
