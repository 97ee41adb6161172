"""Checks whether the trackers of a configuration can be opened: their packages, and the key of Weights & Biases. It opens no tracker.

A run checks before it makes its folder, and `dapo-jax doctor` reports the result.
"""

import importlib.util
import netrc
import os
from urllib.parse import urlsplit

from dapo_jax.config import ConfigError
from dapo_jax.config.schema import LogConfig
from dapo_jax.extras import how_to_install


def missing(log: LogConfig) -> tuple[str, str]:
    """The thing that a tracker lacks, and the remedy; two empty texts if nothing is missing."""
    for key, wanted, package, extra in (
        ("log.tensorboard", log.tensorboard, "tensorboardX", "tensorboard"),
        ("log.wandb", log.wandb, "wandb", "wandb"),
    ):
        if wanted and importlib.util.find_spec(package) is None:
            return (
                f"{key}=true needs the package {package}, which is not installed",
                f"{how_to_install(extra)}, or set {key}=false",
            )
    if log.wandb and wandb_mode() == "online" and not _has_key():
        return (
            "log.wandb=true, and there is no API key of Weights & Biases",
            "run `wandb login`, set WANDB_API_KEY, or set WANDB_MODE=offline",
        )
    return "", ""


def check_trackers(log: LogConfig) -> None:
    """Refuses a configuration whose trackers cannot be opened.

    Raises:
        ConfigError: names the key, and the remedy.
    """
    what, remedy = missing(log)
    if what:
        raise ConfigError(f"{what}: {remedy}")


def wandb_mode() -> str:
    """The mode that the environment sets; online is the default."""
    return os.environ.get("WANDB_MODE") or "online"


def _has_key() -> bool:
    """True if the environment or the netrc file holds a key. The key itself is not tried."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    host = urlsplit(os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")).hostname or ""
    try:
        return netrc.netrc(os.environ.get("NETRC")).authenticators(host) is not None
    except (OSError, netrc.NetrcParseError):
        return False
