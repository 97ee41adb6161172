"""Traces of chosen steps, for xprof or TensorBoard's profile page."""

import shutil
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import mkdtemp

import jax

from dapo_jax.storage import AnyPath, files_below, path_of, write_whole


class Profile(AbstractContextManager["Profile"]):
    """Traces each of `steps` into its folder, `FOLDER/step_000010`; every process writes its own files there."""

    def __init__(self, steps: Collection[int], folder: AnyPath) -> None:
        self._steps, self._folder = frozenset(steps), folder
        self._local: Path | None = None

    def begin(self, step: int) -> None:
        """Starts the trace if `step` is one of the steps."""
        if step in self._steps:
            # The profiler only writes local files, and the folder may be in a bucket.
            self._local = Path(mkdtemp(prefix="dapo_jax_profile_"))
            jax.profiler.start_trace(str(self._local))

    def end(self, step: int) -> None:
        """Ends the trace and copies its files; called when the last program of `step` has ended."""
        if self._local is None:
            return
        try:
            jax.profiler.stop_trace()
            for file in files_below(path_of(self._local)):
                inside = Path(str(file)).relative_to(self._local).as_posix()
                there = self._folder / f"step_{step:06d}" / inside
                there.parent.mkdir(parents=True, exist_ok=True)
                write_whole(there, file.read_bytes())
        finally:
            shutil.rmtree(self._local, ignore_errors=True)
            self._local = None

    def __exit__(self, *_: object) -> None:
        """Discards the trace of a failed step."""
        if self._local is not None:
            jax.profiler.stop_trace()
            shutil.rmtree(self._local, ignore_errors=True)
            self._local = None
