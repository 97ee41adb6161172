"""The configuration of a supervised warm start. Imports no jax."""

from dataclasses import dataclass

from dapo_jax.config.keys import SIZE, key
from dapo_jax.config.schema import PackedRowsConfig, RunConfig


@dataclass(frozen=True, kw_only=True)
class SftBatchConfig(PackedRowsConfig):
    """The size of one supervised update."""

    pairs_per_step: int = key(256, range=SIZE)
    """Demonstrations in one update, which is a step."""


@dataclass(frozen=True, kw_only=True)
class SftConfig(RunConfig):
    """A supervised warm start from prompt / response pairs."""

    max_response_tokens: int = key(64, range=SIZE)
    """Most tokens of a demonstration, including its end token; a longer one is an error."""
    batch: SftBatchConfig = key(default_factory=SftBatchConfig)

    @property
    def row_tokens(self) -> int:
        """Tokens in a packed row: `batch.row_tokens`, or the longest possible pair."""
        return self.batch.row_tokens or self.data.max_prompt_tokens + self.max_response_tokens

    def check_together(self) -> None:
        self.check_shared(self.max_response_tokens, "max_response_tokens")
