"""Defines the workload of every system. Uses only the standard library, because every environment imports this file."""

import json
import random
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Groups of responses. Unless `mixed` is set, each prompt has `prompt_tokens` tokens, and each response exactly `new_tokens`."""

    model: str
    """The path of a model folder in the Hugging Face layout."""
    dtype: str = "float32"
    prompts: int = 4
    samples: int = 16
    prompt_tokens: int = 64
    new_tokens: int = 64
    threads: int = 2
    seed: int = 0
    mixed: list[int] | None = None
    """The smallest and the largest length of the prompts and of the responses, one to each prompt. The lengths are uniform, and are drawn in the order of nano-vllm's benchmark,
    which has 256 sequences of 100 to 1,024 tokens, seed 0 and tokens of up to 10,000: 142,827 tokens of prompts and 133,966 of responses."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings that only one system has, such as the number of rows in a microbatch."""

    @property
    def sequences(self) -> int:
        """Number of responses per round."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """Number of response tokens per round."""
        return sum(self.lengths())

    def lengths(self) -> list[int]:
        """Returns the number of tokens of each response, in the order of the prompts."""
        return self._mixed()[1] if self.mixed else [self.new_tokens] * self.sequences

    def _mixed(self) -> tuple[list[list[int]], list[int]]:
        assert self.mixed is not None
        rng, most = random.Random(self.seed), min(10_000, self.sizes()["vocab_size"] - 1)
        prompts = [
            [rng.randint(0, most) for _ in range(rng.randint(*self.mixed))] for _ in range(self.prompts)
        ]
        return prompts, [rng.randint(*self.mixed) for _ in range(self.prompts)]

    def prompt_ids(self) -> list[list[int]]:
        """Returns prompts of uniformly random token ids. The ends of the vocabulary are excluded, because special tokens are there."""
        if self.mixed:
            return self._mixed()[0]
        vocab = self.sizes()["vocab_size"]
        rng = random.Random(self.seed)
        low, high = vocab // 50, vocab - vocab // 50
        return [[rng.randrange(low, high) for _ in range(self.prompt_tokens)] for _ in range(self.prompts)]

    def responses(self) -> list[list[int]]:
        """Returns synthetic responses for the update, in the order of the prompts. The amount of work does not depend on the ids."""
        vocab = self.sizes()["vocab_size"]
        rng = random.Random(self.seed + 1)
        low, high = vocab // 50, vocab - vocab // 50
        return [[rng.randrange(low, high) for _ in range(self.new_tokens)] for _ in range(self.sequences)]

    def sizes(self) -> dict[str, Any]:
        """Returns the contents of the model's config.json."""
        return json.loads((Path(self.model) / "config.json").read_text())

    def with_(self, **changes: Any) -> "Workload":
        """Returns a copy with changed values."""
        return replace(self, **changes)

    def to_json(self) -> str:
        """Returns one line of JSON for `from_json`."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> "Workload":
        """Restores the workload that `to_json` returned."""
        return Workload(**json.loads(text))


def reward_of(response: list[int]) -> float:
    """Returns the reward in the whole-step benchmark: +1 if more than half of the tokens are even, otherwise -1."""
    return 1.0 if sum(token % 2 == 0 for token in response) * 2 > len(response) else -1.0


def exact_reward(text: str, answer: str, *, tokens: int, limit: int, buffer: int, marker: str = "=") -> float:
    """Returns the reward of the grader `exact`: +1 or -1, with the soft overlong punishment (DAPO Eq. 13) if `buffer` is not 0.

    The text after the last `marker` is compared with the answer, or the whole text if `marker` is empty.

    A test compares it with the grader and the penalty of the library, which other environments cannot import.

    >>> exact_reward("7+5=12=132", "132", tokens=10, limit=48, buffer=16), exact_reward("=9", "8", tokens=40, limit=48, buffer=16)
    (1.0, -1.5)
    """
    _, there, found = text.rpartition(marker) if marker else ("", "whole", text)
    correct = bool(there) and found.strip() == answer
    over = min(max((tokens - (limit - buffer)) / buffer, 0.0), 1.0) if buffer else 0.0
    return (1.0 if correct else -1.0) - over
