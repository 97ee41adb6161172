"""Records profiler traces of selected steps, for xprof or TensorBoard's profile page."""

from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

import jax

from dapo_jax.storage import AnyPath, files_below, write_whole


class Profile(AbstractContextManager["Profile"]):
    """Traces each step in `steps` to its own folder, such as `FOLDER/step_000010`. Every process writes its own files there."""

    def __init__(self, steps: Collection[int], folder: AnyPath) -> None:
        self._steps, self._folder = frozenset(steps), folder
        self._local: TemporaryDirectory[str] | None = None

    def begin(self, step: int) -> None:
        """Starts the trace if `step` is one of the selected steps."""
        if step in self._steps:
            # The profiler can only write local files, but the folder may be in a bucket.
            self._local = TemporaryDirectory(prefix="dapo_jax_profile_", ignore_cleanup_errors=True)
            jax.profiler.start_trace(self._local.name)

    def end(self, step: int) -> None:
        """Stops the trace and copies its files to the folder. Call it after the last program of `step` has finished."""
        if self._local is None:
            return
        local, self._local = self._local, None
        with local as folder:
            jax.profiler.stop_trace()
            for file in files_below(Path(folder)):
                there = self._folder / f"step_{step:06d}" / file.relative_to(folder).as_posix()
                there.parent.mkdir(parents=True, exist_ok=True)
                write_whole(there, file.read_bytes())

    def __exit__(self, *_: object) -> None:
        """Discards the trace of a failed step."""
        if self._local is not None:
            with self._local:
                jax.profiler.stop_trace()
