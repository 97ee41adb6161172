"""Downloads models from the Hugging Face hub: weights, configuration and tokenizer, once per host."""

import importlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_jax.hints import how_to_install

_WEIGHTS, _OTHERS = "*.safetensors", ("*.json", "*.jinja")
"""The files that are downloaded: neither code nor pickled weights."""


def download(name: str, *, revision: str | None = None, weights: bool = True) -> Path:
    """Returns the folder of a repository's model, which is downloaded if it is not in the cache.

    The token for gated models comes from the environment (HF_TOKEN, or `hf auth login`); HF_HOME, HF_ENDPOINT and HF_HUB_OFFLINE
    apply. Processes of one host download a file only once, because huggingface_hub locks every file in its cache.

    Args:
        name: `ORG/NAME`.
        revision: a branch, a tag or a commit; None: the main branch.
        weights: False: only configuration and tokenizer are needed.

    Raises:
        ValueError: huggingface_hub is missing, there is no such repository, revision or permission, the hub cannot
            be reached and the model is not in the cache, or the repository has no safetensors but needs weights.
    """
    hub = _client()
    with _explained(name, revision):
        # Repositories keep exports and training checkpoints in subfolders.
        wanted = [*_OTHERS, _WEIGHTS] if weights else [*_OTHERS]
        folder = Path(
            hub.snapshot_download(name, revision=revision, allow_patterns=wanted, ignore_patterns=["*/*"])
        )
    if weights and not any(folder.glob(_WEIGHTS)):
        raise ValueError(_without_weights(name, revision))
    return folder


def look_up(name: str, *, revision: str | None = None) -> tuple[Path, int]:
    """Returns a folder with a repository's configuration and tokenizer, and the bytes of its weights, which are not downloaded.

    If the hub cannot be reached, both come from the model in the cache.

    Raises:
        ValueError: see `download`.
    """
    try:
        with _explained(name, revision):
            listed = _client().HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    except ValueError:
        raise
    except Exception:  # offline: each HTTP client of the hub raises its own errors
        folder = download(name, revision=revision)
        return folder, sum(file.stat().st_size for file in folder.glob(_WEIGHTS))
    sizes = [
        file.size or 0
        for file in listed
        if file.rfilename.endswith(".safetensors") and "/" not in file.rfilename
    ]
    if not sizes:
        raise ValueError(_without_weights(name, revision))
    return download(name, revision=revision, weights=False), sum(sizes)


def _client() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"models from the hub need huggingface_hub, which is not installed: {how_to_install('hub')}"
        ) from error


@contextmanager
def _explained(name: str, revision: str | None) -> Iterator[None]:
    """Turns the hub's errors into ValueErrors with a remedy."""
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is not a name of a repository ({error}); write hf:ORG/NAME") from error
    # GatedRepoError is a RepositoryNotFoundError, so it comes first.
    except errors.GatedRepoError as error:
        raise ValueError(
            f"{name} is gated: accept its terms on the hub, and set HF_TOKEN to a token of that account"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise ValueError(
            f"the hub has no repository {name}, or it is private; check the name, or set HF_TOKEN to a token that may read it"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise ValueError(f"{name} has no revision {revision!r}; name a branch, a tag or a commit") from error
    except errors.LocalEntryNotFoundError as error:
        offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
        why, remedy = (
            ("HF_HUB_OFFLINE is set", "unset it")
            if offline
            else ("the hub cannot be reached", "check the connection")
        )
        raise ValueError(
            f"{why}, and {name}{_at(revision)} is not, or not completely, in the cache (HF_HOME); {remedy}, download the model before, "
            "or name the folder of a copy"
        ) from error
    except errors.HfHubHTTPError as error:
        raise ValueError(f"the hub refuses {name}{_at(revision)}: {str(error).splitlines()[0]}") from error


def _at(revision: str | None) -> str:
    return f" at revision {revision!r}" if revision else ""


def _without_weights(name: str, revision: str | None) -> str:
    return (
        f"{name}{_at(revision)} has no safetensors files. Weights as .bin or .pt are pickles, which "
        "run code when they are opened, and are not read; use a repository or a revision with safetensors"
    )
