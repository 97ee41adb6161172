"""The samplers of a run: which of them samples what, and what they tell each other at the end of a wave.

While it samples none waits for another. At the end of a wave every process gets every group, those of the others in brief; so
each decides alike whether there is a further wave and what is trained on. What is trained on then travels whole. A reward function
that has failed in one of them is heard of there too, so that all fail alike and can save together.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from dapo_jax.checkpoints.manifest import pack_arrays, unpack_arrays
from dapo_jax.checkpoints.packed_groups import carry_arrays, carry_groups
from dapo_jax.dapo.dynamic_sampling import Collected
from dapo_jax.dapo.rollouts import Group, Prompt
from dapo_jax.health.stopping import Stop, StoppedError, first_reason
from dapo_jax.parallel.gather import BUFFER_BYTES, all_gather_bytes
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.rewards.functions import RewardError
from dapo_jax.run.response_sampler import Grade, Sampled

PromptAt = Callable[[int], Prompt]


class SamplerShare:
    """The share of the sampling that this process has."""

    def __init__(self, meshes: Meshes, stop: Stop) -> None:
        self.index, self.count, self._stop = meshes.index, meshes.count, stop
        members = {device.process_index for device in meshes.sampler.devices.flat}
        first = min(members)
        self._shared = len(members) > 1
        self.alone = jax.process_count() == 1
        self.grades = jax.process_index() == first
        """True in the one process that grades, of those that share a sampler and all have its responses."""
        self._failed = ""

    def takes(self, ordinal: int) -> bool:
        """True if the prompt is this sampler's."""
        return ordinal % self.count == self.index

    def cut(self) -> AbstractContextManager[None]:
        """Within, a process that is told to stop raises StoppedError, unless others share its sampler: they run its programs together, and one that
        left would leave the others waiting."""
        return self._stop.held() if self._shared else self._stop.abandonable()

    def graded(self, sampled: Sampled, grade: Grade) -> list[Group]:
        """This process's groups; none where another one of its sampler grades, or where it was told to stop.

        Raises:
            RewardError: a reward function failed, and there is no other process; if there are, `gathered` raises it.
        """
        with suppress(StoppedError), self.cut():
            try:
                if self.grades:
                    return list(grade(sampled))
            except RewardError as error:
                if self.alone:
                    raise
                self._failed = f"{error} (process {jax.process_index()})"
            if self._shared:
                for _ in sampled:
                    pass  # takes its part in the programs
        return []

    def gathered(self, groups: Sequence[Group], prompt_at: PromptAt, *, texts: int = 0) -> list[Group]:
        """The groups of all samplers by ordinal: this process's as they are, those of others in brief.

        What others' first `texts` responses of each group say comes with them.

        Raises:
            StoppedError: one of the processes was told to stop; in all of them.
            RewardError: a reward function failed in one of them; in all.
        """
        own = {group.prompt.ordinal: group for group in groups}
        received = travelled(
            groups,
            lambda ordinal: own[ordinal].prompt if ordinal in own else prompt_at(ordinal),
            brief=True,
            texts=texts,
            stop=self._stop,
            failed=self._failed,
        )
        return [own.get(group.prompt.ordinal, group) for group in received]

    def whole(self, collected: Collected, *, logged: int) -> Collected:
        """The same with what is trained on, carried, or among the `logged` first sampled groups whole in every process."""
        used = {group.prompt.ordinal for group in (*collected.groups, *collected.carry)}
        used |= {group.prompt.ordinal for group in collected.logged(logged)}
        # Carried ones of an earlier step are not among the sampled: they are whole everywhere.
        sent = [
            group
            for group in collected.sampled
            if self.grades and self.takes(group.prompt.ordinal) and group.prompt.ordinal in used
        ]
        prompts = {group.prompt.ordinal: group.prompt for group in collected.sampled}
        received = travelled(sent, prompts.__getitem__, brief=False, stop=self._stop)
        there = {group.prompt.ordinal: group for group in received}

        def whole(groups: Iterable[Group]) -> list[Group]:
            return [there.get(group.prompt.ordinal, group) for group in groups]

        return replace(
            collected,
            groups=whole(collected.groups),
            carry=whole(collected.carry),
            sampled=whole(collected.sampled),
        )


def travelled(
    groups: Sequence[Group],
    prompt_at: PromptAt,
    *,
    brief: bool,
    stop: Stop,
    texts: int = 0,
    failed: str = "",
) -> list[Group]:
    """The groups that all processes sent, by ordinal.

    In `brief` they are without tokens, and `texts` of the responses of each group, the first ones, have texts all the same. A process that has `failed` says why.

    Raises:
        StoppedError: one of the processes was told to stop; in all of them.
        RewardError: one of them has failed; in all.
    """
    packed, layout = pack_arrays(carry_arrays(groups, brief=brief, texts=texts))
    found: list[Group] = []
    for said, body in exchanged({"layout": layout}, packed.tobytes(), stop=stop, failed=failed):
        arrays = unpack_arrays(np.frombuffer(body, np.uint8), said["layout"])
        found += carry_groups(arrays, prompt_at)
    return sorted(found, key=lambda group: group.prompt.ordinal)


def exchanged(
    head: Mapping[str, Any], body: bytes, *, stop: Stop, failed: str, buffer_bytes: int = BUFFER_BYTES
) -> list[tuple[dict[str, Any], bytes]]:
    """Returns what every process says: `head`, which is JSON, and `body`.

    Raises:
        StoppedError: one of the processes was told to stop; in all of them.
        RewardError: one of them said why it has `failed`; in all.
    """
    said = json.dumps({**head, "stop": stop.reason, "failed": failed}).encode()
    message = len(said).to_bytes(8, "little") + said + body
    told: dict[int, str] = {}
    failures: list[str] = []
    found: list[tuple[dict[str, Any], bytes]] = []
    for process, received in enumerate(all_gather_bytes(message, buffer_bytes=buffer_bytes)):
        end = 8 + int.from_bytes(received[:8], "little")
        heard = json.loads(received[8:end])
        told[process] = heard["stop"]
        failures += filter(None, [heard["failed"]])
        found.append((heard, received[end:]))
    if reason := first_reason(told, jax.process_index()):
        raise StoppedError(reason)
    if failures:
        raise RewardError(failures[0])
    return found
