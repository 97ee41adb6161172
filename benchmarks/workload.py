"""What every system is asked to do. Standard library only: this file is imported in every environment."""

import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups of responses to prompts of one length, each response of exactly `new_tokens` tokens."""

    model: str
    """A folder in the Hugging Face layout."""
    dtype: str = "float32"
    prompts: int = 4
    samples: int = 16
    prompt_tokens: int = 64
    new_tokens: int = 64
    threads: int = 2
    seed: int = 0
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that only one system knows, such as the rows of a microbatch."""

    @property
    def sequences(self) -> int:
        """Responses of one round."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Response tokens of one round."""
        return self.sequences * self.new_tokens

    def prompt_ids(self) -> list[list[int]]:
        """The prompts: uniform token ids without the ends of the vocabulary, where special tokens stand."""
        vocab = self.sizes()["vocab_size"]
        rng = random.Random(self.seed)
        low, high = vocab // 50, vocab - vocab // 50
        return [[rng.randrange(low, high) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]

    def responses(self) -> list[list[int]]:
        """Made-up responses for the update alone, in the prompts' order: the work does not depend on the ids."""
        vocab = self.sizes()["vocab_size"]
        rng = random.Random(self.seed + 1)
        low, high = vocab // 50, vocab - vocab // 50
        return [[rng.randrange(low, high) for _ in range(self.new_tokens)] for _ in range(self.sequences)]

    def sizes(self) -> dict[str, Any]:
        """The model's config.json."""
        return json.loads((Path(self.model) / "config.json").read_text())

    def with_(self, **changes: Any) -> "Workload":
        """A copy with other values."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """One line that `from_json` reads."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Workload":
        """The workload that `to_json` wrote."""
        return Workload(**json.loads(text))


def reward_of(response: list[int]) -> float:
    """The rule that the whole-step benchmark rewards by: +1 if more than half of the tokens are even, else -1."""
    return 1.0 if sum(token % 2 == 0 for token in response) * 2 > len(response) else -1.0
