"""Exchanges data between the processes of a run: graded groups, the tokens of a round, and the answers of environments.

Processes sample without waiting for each other. At the end of a wave or a round, all processes receive the same data, so they all make the same decisions. A failure or a
stop in one process reaches the others with the next exchange. So all of them end at the same point and can save a checkpoint together.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import Any, TypeVar

import jax
import numpy as np

from dapo_jax.checkpoints.manifest import pack_arrays, unpack_arrays
from dapo_jax.dapo.rollouts import Continuation, Group, Prompt, Response, Standing
from dapo_jax.dapo.tokens import Shapes, bytes_per_token
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop, StoppedError, first_reason
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.together import BUFFER_BYTES, all_gather_bytes
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rollout.checkpoint_arrays import Arrays, drawn_arrays, drawn_of, group_arrays, groups_of
from dapo_jax.rollout.response_sampler import Grade, Sampled
from dapo_jax.rollout.virtual_clock import ResponseId
from dapo_jax.sampling.round_sampler import Drawn

_HEAD_BYTES = 1024
"""Number of bytes in a round's buffer in addition to the tokens. Longer messages, for example with a long error text, are sent in several buffers."""

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

Answered = tuple[Continuation | None, Standing]
"""An environment's answer, and the episode's rewards and metrics so far. The answer is the tokens before the next turn, or None if the episode is over or lost."""


class PhaseTimes:
    """Measures how long the main thread is in each phase of sampling. Phases may be nested; time counts only for the innermost phase."""

    def __init__(self) -> None:
        self._seconds, self._phase, self._since = dict[str, float](), "sample", time.perf_counter()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Counts the time in the block as phase `name`."""
        outer = self._enter(name)
        try:
            yield
        finally:
            self._enter(outer)

    def each(self, name: str, items: Iterable[_Item]) -> Iterator[_Item]:
        """Yields the items. Counts the time in which `items` computes them as phase `name`."""
        iterator, end = iter(items), object()
        while True:
            with self.phase(name):
                item: Any = next(iterator, end)
            if item is end:
                return
            yield item

    def taken(self) -> dict[str, float]:
        """Returns the seconds in each phase since the last call."""
        self._enter(self._phase)
        seconds, self._seconds = self._seconds, {}
        return seconds

    def _enter(self, name: str) -> str:
        """Starts a phase, and returns the phase that it interrupts."""
        now, outer = time.perf_counter(), self._phase
        self._seconds[outer] = self._seconds.get(outer, 0.0) + now - self._since
        self._phase, self._since = name, now
        return outer


class Exchange:
    """Decides which prompts this process samples and grades, and exchanges data with the other processes."""

    def __init__(
        self,
        meshes: Meshes,
        stop: Stop,
        watch: Watch,
        *,
        in_flight: int,
        round_tokens: int,
        recorded: Shapes = (),
    ) -> None:
        """The buffer of a round has room for all tokens of one sampler's share of `in_flight` responses, each with the optional values `recorded`, so the buffer's
        shape never changes."""
        self.index, self.count, self._stop, self._watch = meshes.index, meshes.count, stop, watch
        members = {device.process_index for device in meshes.sampler.devices.flat}
        self._shared = len(members) > 1
        self.alone = jax.process_count() == 1
        self.grades = jax.process_index() == min(members)
        """Whether this process grades. All processes that share a sampler have all of the sampler's responses, but only one process grades them."""
        of_response = 12 + bytes_per_token(recorded) * round_tokens
        self._buffer_bytes = _HEAD_BYTES + -(-in_flight // self.count) * of_response
        self._failed = ""
        self.interruptible = True
        """Whether a request to stop may interrupt `attempt`. False while another thread samples and the main thread changes the weights."""
        self.phases = PhaseTimes()

    def takes(self, ordinal: int) -> bool:
        """Returns whether the prompt is assigned to this process's sampler. The sampler's processes then grade the responses and, in waves, also sample them."""
        return ordinal % self.count == self.index

    def grades_group(self, ordinal: int) -> bool:
        """Returns whether this process grades the group and communicates with the group's environments."""
        return self.grades and self.takes(ordinal)

    def attempt(self, work: Callable[[], _Result]) -> _Result | None:
        """Runs `work`, which samples, grades or waits for environments, and returns its result. With several processes, a stop or a failed reward function ends
        `work`. The result is then None, and the next exchange raises the error in all processes.

        Raises:
            StoppedError: the run was asked to stop, and this is the only process.
            RewardError: a reward function failed, and this is the only process.
        """
        if not self.interruptible:
            return work()
        # A process that shares its sampler does not stop at once, because the sampler's other processes would wait for it in their programs.
        interruptible = self._stop.held() if self._shared else self._stop.abandonable()
        try:
            with interruptible:
                return work()
        except StoppedError:
            if self.alone:
                raise
        except RewardError as error:
            if self.alone:
                raise
            self._failed = self._failed or f"{error} (process {jax.process_index()})"
        return None

    def graded(self, sampled: Sampled, grade: Grade) -> list[Group]:
        """Returns the groups that this process graded. The list is empty if another process of the same sampler grades, or after a stop or a failure (see `attempt`)."""
        groups = self.attempt(lambda: list(grade(sampled)) if self.grades else [])
        if self._shared:
            self.attempt(lambda: deque(sampled, maxlen=0))  # all processes must run the sampler's programs
        return groups or []

    def groups(
        self,
        groups: Sequence[Group],
        prompt_at: Callable[[int], Prompt],
        *,
        whole: Callable[[Group], bool] = lambda group: False,
        texts: int = 0,
    ) -> list[Group]:
        """Returns the groups of all processes, sorted by ordinal. Groups of this process are unchanged; groups of other processes are brief unless `whole` returns True.

        A brief group has no tokens. The first `texts` responses of each group keep their texts.

        Raises:
            StoppedError: one of the processes was asked to stop. Raised in all of them.
            RewardError: a reward function failed in one of the processes. Raised in all of them.
        """
        if self.alone:
            return sorted(groups, key=lambda group: group.prompt.ordinal)
        sent = group_arrays(groups, whole=[whole(group) for group in groups], texts=texts)
        gathered = list(groups)
        for process, (_, arrays) in enumerate(self._exchanged({}, sent)):
            if process != jax.process_index():
                gathered += groups_of(arrays, prompt_at)
        return sorted(gathered, key=lambda group: group.prompt.ordinal)

    def verdicts(
        self,
        groups: Sequence[Group],
        prompt_at: Callable[[int], Prompt],
        responses_to: Callable[[int], tuple[Response, ...]],
    ) -> list[Group]:
        """Returns the graded groups of all processes, sorted by ordinal. Their tokens are not sent again, because every process already has the responses.

        Raises the same errors as `groups`.
        """
        texts = max((len(group.rollouts) for group in groups), default=0)
        graded = []
        for group in self.groups(groups, prompt_at, texts=texts):
            pairs = zip(group.rollouts, responses_to(group.prompt.ordinal), strict=True)
            rollouts = tuple(replace(rollout, response=response) for rollout, response in pairs)
            graded.append(replace(group, rollouts=rollouts))
        return graded

    def round(self, assigned: list[list[ResponseId]], sampled: Sequence[Drawn]) -> dict[ResponseId, Drawn]:
        """Exchanges the tokens of a round. Returns the new tokens of every response in flight, and raises the same errors as `groups`.

        `assigned` has the responses that each sampler samples in this round, and `sampled` the new tokens of this process's responses in the same order.
        """
        if self.alone:
            return dict(zip(assigned[0], sampled, strict=True))
        sent = drawn_arrays(sampled if self.grades else ())
        head, drawn = {"sampler": self.index if self.grades else None}, dict[ResponseId, Drawn]()
        for message, arrays in self._exchanged(head, sent, self._buffer_bytes):
            if (sampler := message["sampler"]) is not None:
                drawn.update(zip(assigned[sampler], drawn_of(arrays), strict=True))
        return drawn

    def answers(self, answers: Mapping[ResponseId, Answered]) -> dict[ResponseId, Answered]:
        """Exchanges the environments' answers that each process received. Returns the answers from all processes.

        Raises the same errors as `groups`.
        """
        if self.alone:
            return dict(answers)
        head = {"answers": [[response, _as_json(answer)] for response, answer in answers.items()]}
        return {
            ResponseId(*response): _answered(*answer)
            for message, _ in self._exchanged(head, {})
            for response, answer in message["answers"]
        }

    def _exchanged(
        self, head: Mapping[str, Any], arrays: Arrays, buffer_bytes: int = BUFFER_BYTES
    ) -> list[tuple[dict[str, Any], Arrays]]:
        """Gathers one message from each process, in process order. A message is `head` (JSON-serializable) and arrays.

        Raises the same errors as `groups`.
        """
        self._watch.note("waiting for the groups of the other processes", for_others=True)
        packed, layout = pack_arrays(arrays)
        head = {**head, "layout": layout, "stop": self._stop.reason, "failed": self._failed}
        text = json.dumps(head).encode()
        message = len(text).to_bytes(8, "little") + text + packed.tobytes()
        messages: list[tuple[dict[str, Any], Arrays]] = []
        with self.phases.phase("wait"):
            gathered = all_gather_bytes(message, buffer_bytes=buffer_bytes)
        for received in gathered:
            end = 8 + int.from_bytes(received[:8], "little")
            head = json.loads(received[8:end])
            messages.append((head, unpack_arrays(np.frombuffer(received[end:], np.uint8), head["layout"])))
        if reason := first_reason(dict(enumerate(head["stop"] for head, _ in messages)), jax.process_index()):
            raise StoppedError(reason)
        if failed := next(filter(None, (head["failed"] for head, _ in messages)), ""):
            raise RewardError(failed)
        return messages


def _as_json(answer: Answered) -> list[Any]:
    before, standing = answer
    return [None if before is None else [before.tokens.tolist(), *before[1:]], asdict(standing)]


def _answered(before: list[Any] | None, standing: dict[str, Any]) -> Answered:
    continuation = None if before is None else Continuation(np.array(before[0], np.int32), *before[1:])
    return continuation, Standing.of(standing)
