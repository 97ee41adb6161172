"""The options that all kinds of serving share. Imports no server."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from dapo_jax.config import ConfigError
from dapo_jax.sampling.decoding import DecodingOptions

_LONGEST_FOLLOW_S = 86_400
"""A day."""


@dataclass(frozen=True, kw_only=True)
class ServingOptions:
    """The options of serving besides the model.

    Raises:
        ConfigError: one is out of its range.
    """

    least_length: ClassVar[int] = 1

    host: str = "127.0.0.1"
    """The interface; [::] is every one."""
    port: int = 9000
    """0 lets the system choose."""
    slots: int = 16
    """Responses that are decoded side by side."""
    max_prompt_tokens: int = 64
    max_response_tokens: int = 64
    temperature: float = 0.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    chat_template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    steps_per_call: int = 4
    """Tokens that are drawn before the host looks at them: more are faster, fewer come sooner."""
    page_tokens: int = 0
    """Tokens of a page of the cache; 0: as `sampling.page_tokens` has it."""
    compute_dtype: str = "float32"
    follow_s: float | None = None
    """Seconds between looks for a new checkpoint of the run; None: its weights stay."""
    compilation_cache: str = "~/.cache/dapo_jax/xla"

    def __post_init__(self) -> None:
        for name in ("slots", "steps_per_call"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least 1")
        for name in ("max_prompt_tokens", "max_response_tokens"):
            if getattr(self, name) < self.least_length:
                raise ConfigError(f"{name}={getattr(self, name)} must be at least {self.least_length}")
        if not 0 <= self.seed < 1 << 32:
            raise ConfigError(f"seed={self.seed} must be from 0 to 2**32 - 1")
        try:
            DecodingOptions(temperature=self.temperature, top_p=self.top_p, top_k=self.top_k)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        if self.page_tokens < 0:
            raise ConfigError(
                f"page_tokens={self.page_tokens} must be 0, which is what suits the platform, or more"
            )
        if not 0 <= self.port < 1 << 16:
            raise ConfigError(f"port={self.port} must be from 0, which takes a free one, to {(1 << 16) - 1}")
        if self.compute_dtype not in ("float32", "bfloat16"):
            raise ConfigError(f"compute_dtype={self.compute_dtype!r} must be float32 or bfloat16")
        if self.follow_s is not None and not 0 < self.follow_s <= _LONGEST_FOLLOW_S:
            raise ConfigError(
                f"follow={self.follow_s} must be more than 0 seconds, and at most {_LONGEST_FOLLOW_S}"
            )
