"""Downloads models (weights, configuration and tokenizer) from the Hugging Face hub, once per host."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_jax.hints import needing

_WEIGHTS, _OTHERS = "*.safetensors", ("*.json", "*.jinja")
"""Patterns of the files that are downloaded. They include neither code nor pickled weights."""
_COPY = "consolidated"
"""The beginning of the names of files that repeat the weights in the layout of Mistral's own library."""


def download(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Returns the local folder of a model on the hub, and downloads the model if it is not in the cache.

    The token for gated models is taken from HF_TOKEN or from a login with `hf auth login`. HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE have their usual
    effects. The processes of a host download a file only once, because huggingface_hub locks every file in its cache.

    Args:
        name: repository name, `ORG/NAME`.
        revision: a branch, a tag or a commit. None: the main branch.
        weights: whether to download weights. If False, only configuration and tokenizer are downloaded.

    Raises:
        ValueError: huggingface_hub is not installed; the repository or revision does not exist or is not accessible; the hub cannot
            be reached and the model is not in the cache; or weights are requested and the repository has no safetensors files.
    """
    hub = _client()
    with _explained(name, revision):
        # Subfolders are skipped, because they contain other exports and training checkpoints. Only additional_chat_templates is not.
        wanted = [*_OTHERS, _WEIGHTS] if weights else [*_OTHERS]
        ignored = ["[!a]*/*", "a[!d]*/*", "ad[!d]*/*", f"{_COPY}*"]
        patterns = {"allow_patterns": wanted, "ignore_patterns": ignored}
        folder = Path(hub.snapshot_download(name, revision=revision, **patterns))
    if weights and not any(folder.glob(_WEIGHTS)):
        raise ValueError(_without_weights(name, revision))
    return folder


def look_up(name: str, *, revision: str | None = None) -> tuple[Path, int]:
    """Returns a local folder with a model's configuration and tokenizer, and the size of its weights in bytes. The weights are not downloaded.

    If the hub cannot be reached, the folder and the size are taken from the cached model. Raises ValueError for the same reasons as `download`."""
    try:
        with _explained(name, revision):
            listed = _client().HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    except ValueError:
        raise
    except Exception:  # raised if the hub cannot be reached; the type depends on the HTTP client
        folder = download(name, revision=revision)
        return folder, sum(file.stat().st_size for file in folder.glob(_WEIGHTS))
    sizes = {file.rfilename: file.size or 0 for file in listed}
    own = [
        size
        for file, size in sizes.items()
        if file.endswith(".safetensors") and "/" not in file and not file.startswith(_COPY)
    ]
    if not own:
        raise ValueError(_without_weights(name, revision))
    return download(name, revision=revision, weights=False), sum(own)


def _client() -> Any:
    with needing("hub", "models from the hub need huggingface_hub"):
        return importlib.import_module("huggingface_hub")


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Converts errors of huggingface_hub to ValueErrors whose messages contain a remedy."""
    errors = importlib.import_module("huggingface_hub.errors")
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    unreached = (
        "HF_HUB_OFFLINE is set: unset it" if offline else "the hub cannot be reached: check the connection"
    )
    # GatedRepoError is a subclass of RepositoryNotFoundError, so it must come first.
    known = {
        errors.GatedRepoError: f"{name} is a gated model: accept its terms on the hub, and set HF_TOKEN to a token of the same account",
        errors.RepositoryNotFoundError: f"the hub has no repository {name}, or it is private; check the name, or set HF_TOKEN to a token with access to it",
        errors.RevisionNotFoundError: f"{name} has no revision {revision!r}; use a branch, a tag or a commit",
        errors.LocalEntryNotFoundError: f"{name}{_at(revision)} is not in the cache (HF_HOME), or is incomplete there, and {unreached}, "
        "download the model first, or use a local folder with a copy of the model",
    }
    try:
        yield
    except tuple(known) as error:
        why = next(why for kind, why in known.items() if isinstance(error, kind))
        raise ValueError(why) from error
    except errors.HfHubHTTPError as error:
        raise ValueError(f"hub error for {name}{_at(revision)}: {str(error).splitlines()[0]}") from error


def _at(revision: str | None) -> str:
    return f" at revision {revision!r}" if revision else ""


def _without_weights(name: str, revision: str | None) -> str:
    return (
        f"{name}{_at(revision)} has no safetensors files. Weights in .bin or .pt files are not supported, because they are "
        "pickles, which can run code when they are loaded; use a repository or a revision with safetensors"
    )
