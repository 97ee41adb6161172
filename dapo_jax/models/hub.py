"""Models from the Hugging Face hub: weights, configuration and tokenizer of a repository, once for a host."""

import importlib
import os
from pathlib import Path

PATTERNS = ("*.safetensors", "*.json", "*.jinja")
"""What is fetched: never code, never pickled weights."""

_NOT_OURS = ("*/*",)
"""Repositories keep exports and checkpoints of training in subfolders."""


def download(
    name: str, *, revision: str | None = None, cache_dir: str | os.PathLike[str] | None = None
) -> Path:
    """The folder of a repository's model, fetched if it is not in the cache yet.

    A token for gated models is taken from the environment (HF_TOKEN, or what `hf auth login` left), and HF_HOME,
    HF_ENDPOINT and HF_HUB_OFFLINE are obeyed. Processes of one host that ask at the same time fetch a file once:
    huggingface_hub locks every file in its cache.

    Args:
        name: `ORG/NAME`.
        revision: a branch, a tag or a commit; None: the main branch.
        cache_dir: the cache; None: huggingface_hub's.

    Raises:
        ValueError: huggingface_hub is missing, there is no such repository, revision or permission, the hub cannot
            be reached and the model is not in the cache, or the repository has no safetensors.
    """
    try:
        hub, errors = (
            importlib.import_module(module) for module in ("huggingface_hub", "huggingface_hub.errors")
        )
    except ImportError as error:
        raise ValueError(
            "models from the hub need huggingface_hub, which is not installed: pip install 'dapo_jax[hub]'"
        ) from error
    at = f" at revision {revision!r}" if revision else ""
    try:
        folder = Path(
            hub.snapshot_download(
                name,
                revision=revision,
                cache_dir=Path(cache_dir).expanduser() if cache_dir else None,
                allow_patterns=list(PATTERNS),
                ignore_patterns=list(_NOT_OURS),
            )
        )
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
        raise ValueError(_unreachable(name, at, cache_dir)) from error
    except errors.HfHubHTTPError as error:
        raise ValueError(f"the hub does not hand out {name}{at}: {str(error).splitlines()[0]}") from error
    if not any(folder.glob("*.safetensors")):
        raise ValueError(
            f"{name}{at} has no safetensors files, and no others are read: weights as .bin or .pt are pickles, which "
            "run code when they are opened; take a repository or a revision with safetensors"
        )
    return folder


def _unreachable(name: str, at: str, cache_dir: str | os.PathLike[str] | None) -> str:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "TRUE", "YES", "ON")
    why = "HF_HUB_OFFLINE is set" if offline else "the hub cannot be reached"
    remedy = "unset it" if offline else "check the connection"
    where = f"model.cache_dir={str(cache_dir)!r}" if cache_dir else "the cache (HF_HOME)"
    return (
        f"{why}, and {name}{at} is not, or not wholly, in {where}; {remedy}, fetch the model beforehand, or name the "
        "folder of a copy"
    )
