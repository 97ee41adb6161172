"""The identity of a run that a checkpoint keeps (configuration, prompts, model), and whether a run may go on from it."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatch
from typing import Any

from dapo_jax.checkpoints.manifest import DamagedError
from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.config.loading import leaf_values
from dapo_jax.config.schema import FREE_TO_CHANGE
from dapo_jax.config.values import shown
from dapo_jax.models.folder import CONFIG
from dapo_jax.storage import AnyPath, entries, files_of, ranges_bytes, size_of
from dapo_jax.text.huggingface import TOKENIZER_FILES

IDENTITY = "run"
"""In a checkpoint's progress: what `identity_of` gives."""

_DAY = "data.template_date"

_WEIGHTS = ".safetensors"

_BLOCKS, _BLOCK_BYTES = 64, 1 << 12


def identity_of(
    config: TrainConfig, *, prompts: Sequence[Mapping[str, Any]], model: Mapping[str, str]
) -> dict[str, Any]:
    """The identity of a run, as JSON has it.

    Args:
        config: of the run; the keys that are free to change are left out.
        prompts: of each dataset that is trained on, its name, the number of its prompts and a sha256 of them.
        model: file -> digest of the model that the run began with; see `model_files`.
    """
    kept = {key: value for key, value in leaf_values(config).items() if not key.startswith(FREE_TO_CHANGE)}
    text = json.dumps({"config": kept, "prompts": list(prompts), "model": dict(model)}, default=repr)
    return json.loads(text, parse_constant=str)


def model_files(folder: AnyPath | None, *, weights: bool) -> dict[str, str]:
    """A digest of each file of a model folder that decides what a run learns; none of a preset, which the configuration has.

    Of weights that is one of size and 64 blocks of 4 KiB spread over a file: training changes them all, and gigabytes are not read
    twice.
    """
    if folder is None:
        return {}
    found = {
        name: hashlib.sha256(content).hexdigest()
        for name, content in files_of(folder, (CONFIG, *TOKENIZER_FILES)).items()
    }
    if weights:
        stored = [path for path in entries(folder) if fnmatch(path.name, f"model*{_WEIGHTS}")]
        found |= {path.name: _sampled(path) for path in stored}
    return found


def with_weights_of(own: Mapping[str, Any], progress: Mapping[str, Any]) -> dict[str, Any]:
    """The identity `own` of a run that goes on from a checkpoint with `progress`, with the digests of the weights that the run began with.

    A run that goes on reads no weights, so that of these the checkpoint alone knows.
    """
    kept = progress.get(IDENTITY) or {"model": {}}
    began = {name: digest for name, digest in kept["model"].items() if name.endswith(_WEIGHTS)}
    return {**own, "model": {**began, **own["model"]}}


def check_identity(
    where: str, progress: Mapping[str, Any], own: Mapping[str, Any], *, say: Callable[[str], None]
) -> None:
    """Refuses a checkpoint of another run.

    Args:
        where: the checkpoint, for messages.
        progress: what it holds.
        own: the run that asks, by `identity_of`. What it leaves out of `prompts` (None) and `model` is not compared.
        say: told of a checkpoint that knows too little of its run.

    Raises:
        ConfigError: says what differs, and what to do.
        DamagedError: what the checkpoint says of its run is not as it was written.
    """
    kept = progress.get(IDENTITY)
    if kept is None:
        say(
            f"{where} is of an earlier version of dapo_jax, which kept no more of its run than the seed: that its configuration, "
            "prompts and model are those of this run was not checked"
        )
        kept = {"config": {"seed": progress.get("seed", own["config"]["seed"])}, "prompts": None, "model": {}}
        own = {"config": {"seed": own["config"]["seed"]}, "prompts": None, "model": {}}
    if (
        not isinstance(kept, dict)
        or not isinstance(kept.get("config"), dict)
        or not isinstance(kept.get("model"), dict)
    ):
        raise DamagedError(f"{where} is damaged: what it keeps of its run is not as it was written")
    prompts = own["prompts"] is not None and kept.get("prompts") != own["prompts"]
    keys = _changed_keys(kept["config"], own["config"])
    if not prompts:
        keys.pop(_DAY, None)  # no template prints it
    problems = [f"{key} was {shown(old)}, is {shown(new)}" for key, (old, new) in keys.items()]
    if prompts:
        problems.append(
            f"the prompts were {_described(kept.get('prompts'))}, are {_described(own['prompts'])}"
        )
    for name, digest in own["model"].items():
        # Of the weights that a run began with, the KL penalty alone still asks, and adapters, which are nothing without their base.
        asks = own["config"]["loss.kl_coef"] or own["config"]["lora.rank"]
        if name.endswith(_WEIGHTS) and not asks:
            continue
        if kept["model"].get(name) != digest:
            problems.append(f"the model's {name} is not the one that the run began with")
    if problems:
        raise ConfigError(
            f"{where} is of another run, or the run was changed since: {'; '.join(problems)}. Bring back what was changed, or "
            "choose another run_dir; a checkpoint that was put there by mistake is to be moved away"
        )


def _changed_keys(kept: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Key -> value kept and own one. A key that the checkpoint does not know had the effect of its default."""
    defaults = identity_of(TrainConfig(run_dir="-"), prompts=(), model={})["config"]
    before = {key: kept.get(key, defaults.get(key)) for key in own}
    changed = {key: (old, own[key]) for key, old in before.items() if old != own[key]}
    unknown = {
        key: (old, "no key of this version")
        for key, old in kept.items()
        if key not in own and not key.startswith(FREE_TO_CHANGE)
    }
    return changed | unknown


def _described(prompts: Any) -> str:
    try:
        return " and ".join(
            f"{each['count']:,} of {each['source']} (sha256 {each['sha256'][:12]}...)" for each in prompts
        )
    except (TypeError, KeyError, ValueError):
        return shown(prompts)


def _sampled(path: AnyPath) -> str:
    """A digest of a file's size and of blocks that are spread evenly over it."""
    size = size_of(path)
    digest = hashlib.sha256(str(size).encode())
    starts = [max(0, size - _BLOCK_BYTES) * number // (_BLOCKS - 1) for number in range(_BLOCKS)]
    for block in ranges_bytes(path, [(start, min(start + _BLOCK_BYTES, size)) for start in starts]):
        digest.update(block)
    return digest.hexdigest()
