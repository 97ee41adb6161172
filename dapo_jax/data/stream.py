"""Prompts in order, read and tokenized ahead of the sampler by threads."""

from collections.abc import Iterator

import grain

from dapo_jax.dapo.rollouts import Prompt
from dapo_jax.data.prompts import PromptSource

THREADS = 2
AHEAD = 128
"""Prompts kept ready; tokenized ones are small."""


class PromptStream:
    """One host's share of a run's prompts: ordinals h, h + H, h + 2H, ... from a position on.

    The position is the only state, and it is the same integer on every host: the first ordinal that no host has taken. So a run
    may go on with another number of hosts.
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
        """Nothing is read yet.

        Raises:
            ValueError: a cursor below 0, or a host that is none of 0 .. hosts - 1.
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
        """The host's next prompt.

        Raises:
            ValueError: its row cannot be made a prompt.
        """
        if self._ahead is None:
            share = self._source.dataset[self._next :: self._hosts]
            self._ahead = iter(share.to_iter_dataset(self._options))
        prompt = next(self._ahead)
        self._next += self._hosts
        return prompt

    def at(self, ordinal: int) -> Prompt:
        """The prompt at `ordinal`; without waiting if it is the next one, else the stream goes on from there.

        Raises:
            ValueError: the ordinal is negative or another host's, or its row cannot be made a prompt.
        """
        if ordinal != self._next:
            if ordinal < 0 or ordinal % self._hosts != self._host:
                raise ValueError(
                    f"ordinal {ordinal} is not for host {self._host} of {self._hosts}, which takes those with ordinal mod "
                    f"{self._hosts} = {self._host}"
                )
            self._next, self._ahead = ordinal, None
        return next(self)

    @property
    def state(self) -> dict[str, int]:
        """Where the stream stands: the next ordinal of this host. The least over all hosts is the cursor to go on from
        when every host has taken the same number of prompts."""
        return {"next_ordinal": self._next}
