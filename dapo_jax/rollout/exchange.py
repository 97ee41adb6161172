"""The exchange between the processes of a run: graded groups, the tokens of a round, and the answers of environments.

Processes sample without waiting for each other. At the end of a wave or a round every process gets the same information, so all of them decide alike. A failure or a
stop in one process reaches the others with the next exchange, so that all end alike and can save a checkpoint together.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

import jax
import numpy as np

from dapo_jax.checkpoints.manifest import pack_arrays, unpack_arrays
from dapo_jax.dapo.rollouts import Continuation, Group, Prompt, Response, Standing
from dapo_jax.health.stopping import Stop, StoppedError, first_reason
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.together import BUFFER_BYTES, all_gather_bytes
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rollout.packed import PromptAt, drawn_arrays, drawn_of, group_arrays, groups_of
from dapo_jax.rollout.response_sampler import Grade, Sampled
from dapo_jax.rollout.virtual_clock import ResponseId
from dapo_jax.sampling.rounds import Drawn

_HEAD_BYTES = 1024
"""Room in the buffer of a round besides its tokens. Longer messages, such as a long error, need further buffers."""


@dataclass(frozen=True, kw_only=True)
class Answered:
    """An environment's answer, and its account of the episode."""

    before: Continuation | None
    """The tokens before the next turn; None: the episode is over, or was lost."""
    standing: Standing


class Exchange:
    """This process's share of the sampling, and what it exchanges with the others."""

    def __init__(self, meshes: Meshes, stop: Stop, *, in_flight: int = 0, round_tokens: int = 0) -> None:
        """The buffer of a round has room for all tokens of one sampler's share of `in_flight` responses, so its shape never changes."""
        self.index, self.count, self._stop = meshes.index, meshes.count, stop
        members = {device.process_index for device in meshes.sampler.devices.flat}
        self._shared = len(members) > 1
        self.alone = jax.process_count() == 1
        self.grades = jax.process_index() == min(members)
        """True in the one process that grades, of the processes that share a sampler and have all its responses."""
        self._buffer_bytes = _HEAD_BYTES + -(-in_flight // self.count) * (8 + 8 * round_tokens)
        self._failed = ""

    def takes(self, ordinal: int) -> bool:
        """Returns whether this sampler samples, in waves, and grades the prompt."""
        return ordinal % self.count == self.index

    def _interruptible(self) -> AbstractContextManager[None]:
        """Within, a stop raises StoppedError at once, unless other processes share the sampler and would wait for this one in its programs."""
        return self._stop.held() if self._shared else self._stop.abandonable()

    @contextmanager
    def working(self) -> Iterator[None]:
        """Within, this process samples, grades, or waits for environments. With several processes, a stop or a failed reward function ends the block
        without an error, and the next exchange raises it in all of them.

        Raises:
            StoppedError: the run was told to stop, and this is the only process.
            RewardError: a reward function failed, and this is the only process.
        """
        if self.alone:
            with self._stop.abandonable():
                yield
            return
        try:
            with suppress(StoppedError), self._interruptible():
                yield
        except RewardError as error:
            self._failed = self._failed or f"{error} (process {jax.process_index()})"

    def graded(self, sampled: Sampled, grade: Grade) -> list[Group]:
        """Returns this process's graded groups; none where another process of its sampler grades, or after a stop or a failure (see `working`)."""
        groups: list[Group] = []
        with self.working():
            if self.grades:
                groups = list(grade(sampled))
        if self._shared:
            with self.working():
                for _ in sampled:
                    pass  # takes part in the sampler's programs
        return groups

    def groups(
        self,
        groups: Sequence[Group],
        prompt_at: PromptAt,
        *,
        whole: Callable[[Group], bool] = lambda group: False,
        texts: int = 0,
    ) -> list[Group]:
        """Returns the groups of all processes by ordinal: this process's as they are, others' in brief, unless they are `whole`.

        A group in brief has no tokens. The first `texts` responses of each group keep their texts.

        Raises:
            StoppedError: one of the processes was told to stop; in all of them.
            RewardError: a reward function failed in one of them; in all.
        """
        if self.alone:
            return sorted(groups, key=lambda group: group.prompt.ordinal)
        own = {group.prompt.ordinal: group for group in groups}
        arrays = group_arrays(groups, whole=[whole(group) for group in groups], texts=texts)
        packed, layout = pack_arrays(arrays)

        def prompt(ordinal: int) -> Prompt:
            return own[ordinal].prompt if ordinal in own else prompt_at(ordinal)

        found: list[Group] = []
        for message, body in self._exchanged({"layout": layout}, packed.tobytes(), BUFFER_BYTES):
            found += groups_of(unpack_arrays(np.frombuffer(body, np.uint8), message["layout"]), prompt)
        found = [own.get(group.prompt.ordinal, group) for group in found]
        return sorted(found, key=lambda group: group.prompt.ordinal)

    def verdicts(
        self,
        groups: Sequence[Group],
        prompt_at: PromptAt,
        responses_to: Callable[[int], tuple[Response, ...]],
    ) -> list[Group]:
        """Returns the graded groups of all processes by ordinal. Their tokens do not travel again: every process has the responses to each ordinal.

        Raises: as `groups`.
        """
        texts = max((len(group.rollouts) for group in groups), default=0)
        return [
            _with(group, responses_to(group.prompt.ordinal))
            for group in self.groups(groups, prompt_at, texts=texts)
        ]

    def round(self, asked: Sequence[Sequence[ResponseId]], drawn: Sequence[Drawn]) -> dict[ResponseId, Drawn]:
        """Returns the new tokens of every response in flight.

        Args:
            asked: the responses of each sampler, in order.
            drawn: the new tokens of this process's sampler.

        Raises: as `groups`.
        """
        if self.alone:
            return dict(zip(asked[0], drawn, strict=True))
        sampler, sent = (self.index, drawn) if self.grades else (-1, ())
        packed, layout = pack_arrays(drawn_arrays(sent))
        head, found = {"sampler": sampler, "layout": layout}, dict[ResponseId, Drawn]()
        for message, body in self._exchanged(head, packed.tobytes(), self._buffer_bytes):
            if (sampler := message["sampler"]) >= 0:
                parts = drawn_of(unpack_arrays(np.frombuffer(body, np.uint8), message["layout"]))
                found.update(zip(asked[sampler], parts, strict=True))
        return found

    def answers(self, answers: Mapping[ResponseId, Answered]) -> dict[ResponseId, Answered]:
        """Returns the answers of the environments of all processes.

        Raises: as `groups`.
        """
        if self.alone:
            return dict(answers)
        head = {"answers": [[*one, *_as_json(answer)] for one, answer in answers.items()]}
        return {
            ResponseId(ordinal, index): _answered(*answer)
            for message, _ in self._exchanged(head, b"", BUFFER_BYTES)
            for ordinal, index, *answer in message["answers"]
        }

    def _exchanged(
        self, head: Mapping[str, Any], body: bytes, buffer_bytes: int
    ) -> list[tuple[dict[str, Any], bytes]]:
        """Returns the messages of all processes: `head`, which is JSON, and `body`.

        Raises: as `groups`.
        """
        text = json.dumps({**head, "stop": self._stop.reason, "failed": self._failed}).encode()
        message = len(text).to_bytes(8, "little") + text + body
        found: list[tuple[dict[str, Any], bytes]] = []
        for received in all_gather_bytes(message, buffer_bytes=buffer_bytes):
            end = 8 + int.from_bytes(received[:8], "little")
            found.append((json.loads(received[8:end]), received[end:]))
        stops = {process: heard["stop"] for process, (heard, _) in enumerate(found)}
        if reason := first_reason(stops, jax.process_index()):
            raise StoppedError(reason)
        for heard, _ in found:
            if heard["failed"]:
                raise RewardError(heard["failed"])
        return found


def _as_json(answer: Answered) -> tuple[list[int] | None, bool, dict[str, Any]]:
    before = answer.before
    tokens, anew = (None, False) if before is None else (before.tokens.tolist(), before.anew)
    return tokens, anew, asdict(answer.standing)


def _answered(tokens: list[int] | None, anew: bool, standing: dict[str, Any]) -> Answered:
    before = None if tokens is None else Continuation(np.array(tokens, np.int32), anew)
    return Answered(before=before, standing=Standing.of(standing))


def _with(group: Group, responses: Sequence[Response]) -> Group:
    """Returns the group with these responses."""
    rollouts = zip(group.rollouts, responses, strict=True)
    return replace(
        group, rollouts=tuple(replace(rollout, response=response) for rollout, response in rollouts)
    )
