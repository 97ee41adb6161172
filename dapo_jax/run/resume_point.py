"""The state from which a run can resume, its form in a checkpoint, and the identity by which a run recognises its own checkpoints."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import Any

from etils import epath

from dapo_jax.checkpoints.checkpointer import Restored
from dapo_jax.checkpoints.manifest import DamagedError, step_folders
from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.config.algorithms import algorithm_name
from dapo_jax.config.former_keys import converted_leaves
from dapo_jax.config.keys import shown
from dapo_jax.config.loading import leaf_values
from dapo_jax.config.schema import FREE_TO_CHANGE
from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.models.folder import CONFIG
from dapo_jax.parallel.together import broadcast_from_first
from dapo_jax.rollout.checkpoint_arrays import flight_of, groups_of
from dapo_jax.rollout.collector import Position
from dapo_jax.storage import AnyPath, entries, files_of, ranges_bytes, size_of
from dapo_jax.text.huggingface import TOKENIZER_FILES
from dapo_jax.training.state import TrainState

UNFINISHED = "unfinished_metrics"
"""Key in a checkpoint's progress. Its value contains, as JSON, the metrics of a step that has not been evaluated. They are not yet in metrics.jsonl."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """A state between two steps from which training can start or resume."""

    state: TrainState
    position: Position
    unfinished: Mapping[str, float | int] | None = None
    """The metrics of the last step, if its evaluation has not run yet."""

    def progress(self, identity: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the JSON data for a checkpoint, with the run's `identity`. Carried groups and responses in flight are stored separately, as arrays."""
        progress: dict[str, Any] = {"cursor": self.position.cursor, IDENTITY: dict(identity)}
        if self.position.streaks:
            progress["streaks"] = [list(item) for item in self.position.streaks.items()]
        if self.unfinished is not None:
            progress[UNFINISHED] = json.dumps(self.unfinished)  # as text, because NaN is not valid JSON
        return progress


def has_checkpoint(folder: AnyPath) -> bool:
    """Returns whether the folder contains a checkpoint, which may be damaged. All processes return the answer of the first process. Raises CheckpointError if
    the folder cannot be listed."""
    return bool(broadcast_from_first(b"checkpoints" if step_folders(epath.Path(folder)) else b""))


def resume_point(restored: Restored, where: str, *, prompt_at: Callable[[int], Prompt]) -> ResumePoint:
    """Converts a restored checkpoint to a resume point. Errors name it `where`, and `prompt_at` maps an ordinal to its prompt.

    Raises:
        ConfigError: the checkpoint was not saved by `train`.
        DamagedError: its groups or its responses in flight are inconsistent.
    """
    if IDENTITY not in restored.progress:
        raise ConfigError(f"{where} was not saved by `dapo-jax train` and cannot be resumed: move it away")
    cursor, unfinished = restored.progress["cursor"], restored.progress.get(UNFINISHED)
    try:
        groups, in_flight = groups_of(restored.carry, prompt_at), flight_of(restored.carry, prompt_at)
    except ValueError as error:
        raise DamagedError(f"{where} is damaged in its groups or responses in flight: {error}") from error
    kept = {"cursor": cursor, "streaks": dict(restored.progress.get("streaks", []))}
    return ResumePoint(
        state=restored.state,
        position=Position(step=restored.step, carry=groups, in_flight=in_flight, **kept),
        unfinished=None if unfinished is None else json.loads(unfinished),
    )


IDENTITY = "run"
"""Key in a checkpoint's progress. Its value is the result of `identity_of`."""

CHECKPOINT = "checkpoint"
"""Key of the checkpoint from which the initial weights were loaded, among the digests of the initial model's files."""

_WEIGHTS = ".safetensors"
_BLOCKS, _BLOCK_BYTES = 64, 1 << 12


def identity_of(
    config: TrainConfig, *, prompts: Sequence[Mapping[str, Any]] | None, model: Mapping[str, str]
) -> dict[str, Any]:
    """Returns the identity of a run as JSON-serializable values: the keys that may not change when a run resumes, the prompts of each training dataset (number and
    sha256; if None, they are not compared), and the result of `model_files`. The name of the algorithm is for readers; its keys are compared."""
    kept = {key: value for key, value in leaf_values(config).items() if not key.startswith(FREE_TO_CHANGE)}
    identity = {"algorithm": algorithm_name(config), "config": kept, "prompts": prompts, "model": dict(model)}
    return json.loads(json.dumps(identity, default=repr), parse_constant=str)


def model_files(folder: AnyPath | None, *, weights: bool) -> dict[str, str]:
    """Returns the digest of each file in a model folder that affects training. Empty for a preset. Weight files are included only if `weights` is True.

    To avoid reading gigabytes, the digest of a weight file covers only its size and 64 blocks of 4 KiB. This suffices because training changes every block.
    """
    if folder is None:
        return {}
    files = files_of(folder, (CONFIG, *TOKENIZER_FILES))
    digests = {name: hashlib.sha256(content).hexdigest() for name, content in files.items()}
    stored = [path for path in entries(folder) if weights and fnmatch(path.name, f"model*{_WEIGHTS}")]
    for path in stored:
        size = size_of(path)
        starts = [max(0, size - _BLOCK_BYTES) * number // (_BLOCKS - 1) for number in range(_BLOCKS)]
        blocks = ranges_bytes(path, [(start, min(start + _BLOCK_BYTES, size)) for start in starts])
        digests[path.name] = hashlib.sha256(b"".join([str(size).encode(), *blocks])).hexdigest()
    return digests


def with_weights_of(own: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    """Adds to `own` the digests of the initial weights in the checkpoint's `progress`, because a resumed run does not always load those weights."""
    files = progress[IDENTITY]["model"].items()
    began = {name: digest for name, digest in files if name.endswith(_WEIGHTS) or name == CHECKPOINT}
    return {**own, "model": {**began, **own["model"]}}


def check_identity(where: str, progress: Mapping[str, Any], own: Mapping[str, Any]) -> None:
    """Checks that the checkpoint `where` with this `progress` belongs to the run with the identity `own`. A checkpoint without an identity, from a user's own training
    loop, is accepted. Prompts are compared only if `own` contains them. Of the model's files, only the files listed in `own` are compared. Raises ConfigError
    if the checkpoint belongs to another run. The message contains the differences and a remedy."""
    if (kept := progress.get(IDENTITY)) is None:
        return
    # A key that is newer than the checkpoint had its default.
    defaults = identity_of(TrainConfig(run_dir="."), prompts=None, model={})["config"]
    began, now = defaults | converted_leaves(kept["config"], defaults), own["config"]
    problems = [
        f"{key} was {shown(value)}, is {shown(now.get(key))}"
        for key, value in began.items()
        if value != now.get(key)
    ]
    if own["prompts"] is not None and kept["prompts"] != own["prompts"]:
        problems.append(f"the prompts were {_described(kept['prompts'])}, are {_described(own['prompts'])}")
    else:  # the prompts are the same, so the date in chat templates does not matter
        problems = [problem for problem in problems if not problem.startswith("data.template_date ")]
    for name, digest in own["model"].items():
        if (before := kept["model"].get(name)) != digest:
            which = f" (it was {before}, is {digest})" if name == CHECKPOINT else ""
            problems.append(f"the model's {name} has changed since the run began{which}")
    if problems:
        raise ConfigError(
            f"{where} belongs to another run, or the run was changed since: {'; '.join(problems)}. Restore the old values, or choose "
            "another run_dir; if the checkpoint is there by mistake, move it away"
        )


def _described(prompts: Sequence[Mapping[str, Any]]) -> str:
    return " and ".join(
        f"{dataset['count']:,} of {dataset['source']} (sha256 {dataset['sha256'][:12]}...)"
        for dataset in prompts
    )
