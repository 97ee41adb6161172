"""A checkpoint is sealed by its manifest: each process hashes the files that it has written, and the first one writes all digests into the manifest.

In each item of a step orbax gives every process a folder of its own, `ocdbt.process_3`, in which all the data lies. Once all have
written, the first process merges the indices in these folders into one and adds descriptions: files of a few kilobytes, in other places. These
alone are left for it to hash, so that between the last byte written and the step's final name little is read, however large the state.

The digests travel as notes (`dapo_jax.parallel.notes`), not by a collective: a save goes on in threads beside training.
"""

import json
from dataclasses import asdict
from typing import Any

import jax
import orbax.checkpoint as ocp
from etils import epath

from dapo_jax.checkpoints.manifest import SealedFile, being_written, digested, write_manifest
from dapo_jax.parallel.notes import leave_note, take_notes

ITEMS = ("state", "carry")
"""The items of a step that hold arrays."""

_ALL_WRITTEN = "async_write_complete"
"""Orbax's name for the barrier to which each process of a save comes when it has written. If it is called otherwise one day, the
first process hashes everything."""


class Sealing:
    """Seals the steps in one folder, each once it is written. One step is saved at a time."""

    def __init__(self, folder: epath.Path) -> None:
        self._folder, self._step = folder, -1
        self._barrier = ocp.multihost.get_barrier_sync_fn()

    def begin(self, step: int) -> None:
        """Call it before orbax begins to save the step."""
        self._step = step

    def options(self) -> ocp.AsyncOptions:
        """Options by which orbax calls `_meet` before each of its barriers, in every process, and `_seal` in the first one, once all have written."""
        return ocp.AsyncOptions(barrier_sync_fn=self._meet, post_finalization_callback=self._seal)

    def _meet(self, *, key: str, timeout_ms: int) -> None:
        """Orbax's barrier. Of several processes each hashes what it has written before it comes to that after writing."""
        if _ALL_WRITTEN in key:
            own = {name: asdict(file) for name, file in self._own().items()}
            leave_note(self._subject, json.dumps(own))
        self._barrier(key=key, timeout_ms=timeout_ms)

    def _own(self) -> dict[str, SealedFile]:
        """The files that this process has written alone, by their path in the step."""
        step, found = being_written(self._folder / str(self._step)), {}
        for item in ITEMS:
            name = f"ocdbt.process_{jax.process_index()}"
            if (place := being_written(step / item) / name).exists():
                found |= {f"{item}/{name}/{path}": file for path, file in digested(place).items()}
        return found

    def _seal(self) -> None:
        """Writes the manifest. In the first process alone, after the last byte of the step and before it takes its final name."""
        known: dict[str, SealedFile] = {}
        for note in take_notes(self._subject).values():
            files: dict[str, dict[str, Any]] = json.loads(note)
            known |= {name: SealedFile(**file) for name, file in files.items()}
        write_manifest(being_written(self._folder / str(self._step)), known)

    @property
    def _subject(self) -> str:
        return f"digests/{self._folder}/{self._step}"
