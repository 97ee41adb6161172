"""Streams prompts in order; threads read and tokenize them ahead of the sampler."""

from collections.abc import Iterator

import grain

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.data.prompts import PromptSource

THREADS = 2
AHEAD = 128
"""Number of prompts that are tokenized ahead."""


class PromptStream:
    """One host's share of a run's prompts: ordinals h, h + H, h + 2H, ... from a cursor on.

    The cursor is the only state. It is the same integer on every host: the first ordinal that no host has taken. So a run
    can be resumed with another number of hosts.
    """

    def __init__(
        self,
        source: PromptSource,
        *,
        cursor: int = 0,
        host: int = 0,
        hosts: int = 1,
        threads: int = THREADS,
        ahead: int = AHEAD,
    ) -> None:
        """Opens the stream without reading a row.

        Raises:
            ValueError: the cursor is below 0, or the host is not in 0 .. hosts - 1.
        """
        if cursor < 0 or not 0 <= host < hosts:
            raise ValueError(
                f"need cursor >= 0 and 0 <= host < hosts; got {cursor=}, {host=}, {hosts=}: hosts count from 0"
            )
        self._source, self._host, self._hosts = source, host, hosts
        self._options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
        self._next = cursor + (host - cursor) % hosts
        self._ahead: Iterator[Prompt] | None = None

    def __iter__(self) -> "PromptStream":
        return self

    def __next__(self) -> Prompt:
        """Returns the host's next prompt.

        Raises:
            ValueError: its row cannot be turned into a prompt.
        """
        if self._ahead is None:
            share = self._source.dataset[self._next :: self._hosts]
            self._ahead = iter(share.to_iter_dataset(self._options))
        prompt = next(self._ahead)
        self._next += self._hosts
        return prompt

    def at(self, ordinal: int) -> Prompt:
        """Returns the prompt at `ordinal` and continues after it; the next prompt is ready without waiting.

        Raises:
            ValueError: the ordinal is negative or another host's, or its row cannot be turned into a prompt.
        """
        if ordinal != self._next:
            if ordinal < 0 or ordinal % self._hosts != self._host:
                raise ValueError(
                    f"ordinal {ordinal} is not for host {self._host} of {self._hosts}, which takes ordinals with "
                    f"ordinal mod {self._hosts} = {self._host}"
                )
            self._next, self._ahead = ordinal, None
        return next(self)

    @property
    def state(self) -> dict[str, int]:
        """The next ordinal of this host. If every host has taken the same number of prompts, the minimum over all hosts is
        the cursor to resume from."""
        return {"next_ordinal": self._next}
