"""Models from the Hugging Face hub: weights, configuration and tokenizer of a repository, once for a host."""

import importlib
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from dapo_jax.extras import how_to_install

PATTERNS = ("*.safetensors", "*.json", "*.jinja")
"""The files that are fetched: never code, never pickled weights."""

_SMALL = ("*.json", "*.jinja")

_NOT_OURS = ("*/*",)
"""Repositories keep exports and checkpoints of training in subfolders."""


def download(
    name: str,
    *,
    revision: str | None = None,
    cache_dir: str | os.PathLike[str] | None = None,
    weights: bool = True,
) -> Path:
    """The folder of a repository's model, fetched if it is not in the cache yet.

    A token for gated models is taken from the environment (HF_TOKEN, or what `hf auth login` left), and HF_HOME,
    HF_ENDPOINT and HF_HUB_OFFLINE are obeyed. Processes of one host that ask at the same time fetch a file once:
    huggingface_hub locks every file in its cache.

    Args:
        name: `ORG/NAME`.
        revision: a branch, a tag or a commit; None: the main branch.
        cache_dir: the cache; None: huggingface_hub's.
        weights: False: its configuration and tokenizer are all that is asked for; weights lie beside them if they were fetched before.

    Raises:
        ValueError: huggingface_hub is missing, there is no such repository, revision or permission, the hub cannot
            be reached and the model is not in the cache, or the repository has no safetensors, where weights are asked for.
    """
    hub = _client()
    with _explained(name, revision, cache_dir):
        folder = _snapshot(hub, name, revision, cache_dir, PATTERNS if weights else _SMALL)
    if weights and not any(folder.glob("*.safetensors")):
        raise ValueError(_without_weights(name, revision))
    return folder


def look_up(
    name: str, *, revision: str | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> tuple[Path, int]:
    """A folder with a repository's configuration and tokenizer, and the bytes of its weights, which are not fetched.

    Where the hub is not asked or cannot be reached, both are of the model in the cache; else as `download`.

    Raises:
        ValueError: as `download`.
    """
    hub = _client()
    try:
        with _explained(name, revision, cache_dir):
            listed = hub.HfApi().model_info(name, revision=revision, files_metadata=True).siblings or []
    except ValueError:
        raise
    except (
        Exception
    ):  # no connection, or one that is not to be made: each client of the hub's has its own kinds
        folder = download(name, revision=revision, cache_dir=cache_dir)
        return folder, sum(file.stat().st_size for file in folder.glob("*.safetensors"))
    weights = [
        file for file in listed if file.rfilename.endswith(".safetensors") and "/" not in file.rfilename
    ]
    if not weights:
        raise ValueError(_without_weights(name, revision))
    with _explained(name, revision, cache_dir):
        return _snapshot(hub, name, revision, cache_dir, _SMALL), sum(file.size or 0 for file in weights)


def _client() -> Any:
    try:
        return importlib.import_module("huggingface_hub")
    except ImportError as error:
        raise ValueError(
            f"models from the hub need huggingface_hub, which is not installed: {how_to_install('hub')}"
        ) from error


def _snapshot(
    hub: Any,
    name: str,
    revision: str | None,
    cache_dir: str | os.PathLike[str] | None,
    patterns: Sequence[str],
) -> Path:
    return Path(
        hub.snapshot_download(
            name,
            revision=revision,
            cache_dir=Path(cache_dir).expanduser() if cache_dir else None,
            allow_patterns=list(patterns),
            ignore_patterns=list(_NOT_OURS),
        )
    )


@contextmanager
def _explained(name: str, revision: str | None, cache_dir: str | os.PathLike[str] | None) -> Iterator[None]:
    """The hub's errors as ValueErrors that say what to do."""
    errors = importlib.import_module("huggingface_hub.errors")
    try:
        yield
    except errors.HFValidationError as error:
        raise ValueError(f"{name!r} is no name of a repository ({error}); write hf:ORG/NAME") from error
    # A gated repository counts as one that was not found, so it comes first.
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
        raise ValueError(_unreachable(name, _at(revision), cache_dir)) from error
    except errors.HfHubHTTPError as error:
        raise ValueError(
            f"the hub does not hand out {name}{_at(revision)}: {str(error).splitlines()[0]}"
        ) from error


def _at(revision: str | None) -> str:
    return f" at revision {revision!r}" if revision else ""


def _without_weights(name: str, revision: str | None) -> str:
    return (
        f"{name}{_at(revision)} has no safetensors files, and no others are read: weights as .bin or .pt are pickles, which "
        "run code when they are opened; take a repository or a revision with safetensors"
    )


def _unreachable(name: str, at: str, cache_dir: str | os.PathLike[str] | None) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
    remedy = "unset it" if offline else "check the connection"
    where = f"the cache {cache_dir}" if cache_dir else "the cache (HF_HOME)"
    return (
        f"{why}, and {name}{at} is not, or not wholly, in {where}; {remedy}, fetch the model beforehand, or name the "
        "folder of a copy"
    )
