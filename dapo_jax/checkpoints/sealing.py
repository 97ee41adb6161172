"""Seals the checkpoints in a folder: each process hashes the files that it has written, and the first writes all digests into the manifest.

In each item of a step orbax gives every process its own folder, `ocdbt.process_3`, which holds the data. Then the first process
merges the indices of these folders and adds descriptions: files of a few kilobytes, the only ones that it reads to seal the step.
So the time between the last byte written and the step's final name does not grow with the state.

The digests travel through the key-value store of JAX's coordination service. A collective would get between the collectives of
training, since a save runs in threads next to it.
"""

import json
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dapo_jax.checkpoints.manifest import SealedFile, being_written, digested, write_manifest

_ALL_WRITTEN = "async_write_complete"
"""Orbax's name for the barrier that each process of a save reaches after writing. If it is renamed, the first process hashes everything."""


class Sealing:
    """Seals the steps in one folder, one step at a time."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder, self._step = folder, -1
        self._barrier = ocp.multihost.get_barrier_sync_fn()

    def begin(self, step: int) -> None:
        """Must be called before orbax begins to save the step."""
        self._step = step

    def options(self) -> ocp.AsyncOptions:
        """Returns options by which orbax calls `_meet` before each of its barriers and, in the first process, `_seal` after the last byte."""
        return ocp.AsyncOptions(barrier_sync_fn=self._meet, post_finalization_callback=self._seal)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        if _ALL_WRITTEN in key and jax.process_count() > 1:
            own = json.dumps({name: vars(file) for name, file in self._own().items()})
            _store().key_value_set(f"{self._place}{jax.process_index()}", own, allow_overwrite=True)
        self._barrier(key=key, timeout_ms=timeout_ms)

    def _own(self) -> dict[str, SealedFile]:
        """Returns the entries of the files that this process has written alone, by their path in the step."""
        step, found = being_written(self._folder / str(self._step)), {}
        for item in ("state", "carry"):
            name = f"ocdbt.process_{jax.process_index()}"
            if (place := being_written(step / item) / name).exists():
                found |= {f"{item}/{name}/{path}": file for path, file in digested(place).items()}
        return found

    def _seal(self) -> None:
        known: dict[str, SealedFile] = {}
        if jax.process_count() > 1:
            for _, text in _store().key_value_dir_get(self._place):
                files: dict[str, dict[str, Any]] = json.loads(text)
                known |= {name: SealedFile(**file) for name, file in files.items()}
            _store().key_value_delete(self._place)
        write_manifest(being_written(self._folder / str(self._step)), known)

    @property
    def _place(self) -> str:
        return f"dapo_jax/digests/{self._folder}/{self._step}/"


def _store() -> Any:
    from jax._src import distributed  # JAX has no public name for its coordination service

    return distributed.global_state.client
