"""The exchange of processes whose rollouts are in flight: at the end of a round, what each response has drawn; the verdicts that are due, and what environments have said."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from dapo_jax.dapo.in_flight import FINISH_REASONS, Drawn, Standing
from dapo_jax.dapo.rollouts import Continuation, Group, Response
from dapo_jax.dapo.virtual_clock import ResponseId
from dapo_jax.health.stopping import Stop, StoppedError
from dapo_jax.rewards.functions import RewardError
from dapo_jax.run.group_exchange import PromptAt, SamplerShare, exchanged, travelled

_HEAD_BYTES = 1024
"""For what is said beside the tokens. What does not fit, such as a long error, travels in further buffers."""


@dataclass(frozen=True, kw_only=True)
class Said:
    """The answer of an environment, and what it has said of the episode."""

    before: Continuation | None
    """The tokens before the next turn; None: the episode is over, or was lost."""
    standing: Standing


class FlightExchange:
    """Tells the processes of a run, round by round, what the others have drawn."""

    def __init__(self, share: SamplerShare, stop: Stop, *, in_flight: int, round_tokens: int) -> None:
        """The buffer of a round has room for all that one sampler's share of `in_flight` responses may draw: a shape that is always the same."""
        self._share, self._stop = share, stop
        most = -(-in_flight // share.count)
        self._buffer_bytes = _HEAD_BYTES + most * (8 + 8 * round_tokens)
        self._failed = ""

    def drawn(self, draw: Callable[[], Sequence[Drawn]]) -> Sequence[Drawn]:
        """Returns the result of `draw`; nothing where this process was told to stop meanwhile, which `round` then says to all.

        Raises:
            StoppedError: it was told to stop, and there is no other process.
        """
        if self._share.alone:
            with self._stop.abandonable():
                return draw()
        with suppress(StoppedError), self._share.cut():
            return draw()
        return ()

    @contextmanager
    def grading(self) -> Iterator[None]:
        """Within, a reward function may fail, or be waited for, as an environment may. Of several processes all hear at the next exchange that it has failed.

        Raises:
            StoppedError: this process was told to stop, and there is no other.
            RewardError: a reward function failed, and there is no other process.
        """
        if self._share.alone:
            with self._stop.abandonable():
                yield
            return
        try:
            with suppress(StoppedError), self._share.cut():
                yield
        except RewardError as error:
            self._failed = self._failed or f"{error} (process {jax.process_index()})"

    def round(self, asked: Sequence[Sequence[ResponseId]], drawn: Sequence[Drawn]) -> dict[ResponseId, Drawn]:
        """Returns what every response in flight has drawn.

        Args:
            asked: those of each sampler, in order.
            drawn: what those of this process's sampler have drawn.

        Raises:
            StoppedError: one of the processes was told to stop; in all of them.
            RewardError: a reward function failed in one of them; in all.
        """
        if self._share.alone:
            return dict(zip(asked[0], drawn, strict=True))
        sends = self._share.grades  # of those who share a sampler one
        found: dict[ResponseId, Drawn] = {}
        for said, body in exchanged(
            {"sampler": self._share.index if sends else -1},
            _packed(drawn) if sends else b"",
            stop=self._stop,
            failed=self._failed,
            buffer_bytes=self._buffer_bytes,
        ):
            if said["sampler"] >= 0:
                found.update(zip(asked[said["sampler"]], _unpacked(body), strict=True))
        return found

    def answers(self, said: Mapping[ResponseId, Said]) -> dict[ResponseId, Said]:
        """The answers of the environments of all processes.

        Raises:
            StoppedError: one of the processes was told to stop; in all of them.
            RewardError: a reward function failed in one of them; in all.
        """
        if self._share.alone:
            return dict(said)
        head = {"answers": [[*one, *_told(answer)] for one, answer in said.items()]}
        found: dict[ResponseId, Said] = {}
        for heard, _ in exchanged(head, b"", stop=self._stop, failed=self._failed):
            for ordinal, index, tokens, anew, standing in heard["answers"]:
                found[ResponseId(ordinal, index)] = _heard(tokens, anew, standing)
        return found

    def verdicts(
        self,
        groups: Sequence[Group],
        prompt_at: PromptAt,
        responses_to: Callable[[int], tuple[Response, ...]],
    ) -> list[Group]:
        """The graded groups of all processes, by ordinal; tokens do not travel again: `responses_to` an ordinal has them here.

        Raises:
            StoppedError: one of the processes was told to stop; in all of them.
            RewardError: a reward function failed in one of them; in all.
        """
        if self._share.alone:
            return list(groups)
        texts = max((len(group.rollouts) for group in groups), default=0)
        found = travelled(groups, prompt_at, brief=True, texts=texts, stop=self._stop, failed=self._failed)
        return [_with(group, responses_to(group.prompt.ordinal)) for group in found]


def _told(said: Said) -> tuple[list[int] | None, bool, dict[str, Any]]:
    tokens, anew = (None, False) if said.before is None else (said.before.tokens.tolist(), said.before.anew)
    return tokens, anew, asdict(said.standing)


def _heard(tokens: list[int] | None, anew: bool, standing: dict[str, Any]) -> Said:
    before = None if tokens is None else Continuation(np.array(tokens, np.int32), anew)
    return Said(before=before, standing=Standing.of(standing))


def _with(group: Group, responses: Sequence[Response]) -> Group:
    """The group with its responses whole."""
    rollouts = zip(group.rollouts, responses, strict=True)
    return replace(
        group, rollouts=tuple(replace(rollout, response=response) for rollout, response in rollouts)
    )


def _packed(drawn: Sequence[Drawn]) -> bytes:
    """For each response the number of new tokens and why it ended, then all tokens, then all log-probabilities."""
    heads = np.array(
        [[len(part.tokens), FINISH_REASONS.index(part.finish_reason)] for part in drawn], np.int32
    )
    tokens = [part.tokens.astype(np.int32).tobytes() for part in drawn]
    logprobs = [part.logprobs.astype(np.float32).tobytes() for part in drawn]
    return b"".join([len(drawn).to_bytes(8, "little"), heads.tobytes(), *tokens, *logprobs])


def _unpacked(body: bytes) -> list[Drawn]:
    count = int.from_bytes(body[:8], "little")
    heads = np.frombuffer(body, np.int32, 2 * count, 8).reshape(count, 2)
    total, start = int(heads[:, 0].sum()), 8 + 8 * count
    tokens = np.frombuffer(body, np.int32, total, start)
    logprobs = np.frombuffer(body, np.float32, total, start + 4 * total)
    ends = np.cumsum(heads[:, 0])
    return [
        Drawn(
            tokens=tokens[end - length : end],
            logprobs=logprobs[end - length : end],
            finish_reason=FINISH_REASONS[reason],
        )
        for (length, reason), end in zip(heads.tolist(), ends.tolist(), strict=True)
    ]
