"""Notes from process to process without a collective: in a thread beside training, one would get between those of training.

They lie in the key-value store of JAX's coordination service, which all processes of a run reach.
"""

from typing import Any

import jax

_PLACE = "dapo_jax/notes/"


def leave_note(subject: str, text: str) -> None:
    """Leaves a note of this process for the others; an earlier one on the same subject is replaced."""
    if jax.process_count() > 1:
        _service().key_value_set(f"{_PLACE}{subject}/{jax.process_index()}", text, allow_overwrite=True)


def take_notes(subject: str) -> dict[int, str]:
    """Returns each process's note on the subject, by the process's number, and deletes them. It waits for nobody: a process that has left none is
    missing in the result."""
    if jax.process_count() == 1:
        return {}
    found = _service().key_value_dir_get(f"{_PLACE}{subject}/")
    _service().key_value_delete(f"{_PLACE}{subject}")
    return {int(key.rpartition("/")[2]): text for key, text in found}


def _service() -> Any:
    from jax._src import distributed  # JAX has no public name for its coordination service

    return distributed.global_state.client
