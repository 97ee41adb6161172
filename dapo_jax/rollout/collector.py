"""Tracks the sampling of one step under the virtual clock: which responses start, which groups are complete, and which groups the step trains on. This bookkeeping runs on
the host and is identical in every process."""

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from dapo_jax.dapo.dynamic_sampling import (
    Collected,
    ShortfallError,
    Solved,
    Tally,
    is_informative,
    nothing_to_learn,
)
from dapo_jax.dapo.rollouts import Continuation, Group, Prompt, Response, Standing
from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId, VirtualClock
from dapo_jax.sampling.requests import EpisodeLimits, Request
from dapo_jax.sampling.round_sampler import Drawn


@dataclass(frozen=True, kw_only=True)
class InFlight:
    """Rollouts in flight between two steps, as a checkpoint stores them. Groups that are ready for training are stored separately."""

    clock: VirtualClock
    """Do not modify this clock; `Collector.after` copies it."""
    responses: Mapping[ResponseId, Request]
    """The started responses of groups without a verdict, as copies from `Request.rest`. Do not modify these copies."""


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run between two steps: everything that a checkpoint needs in addition to the train state."""

    step: int = 0
    """Number of completed training steps."""
    cursor: int = 0
    """The ordinal of the next prompt to sample."""
    carry: Sequence[Group] = ()
    """Informative groups from earlier steps that are ready for training."""
    in_flight: InFlight | None = None
    """None if the run samples in waves, or if nothing has started."""
    streaks: Mapping[int, int] = field(default_factory=dict)
    """The solved visits of each row, see `Solved.streaks`."""


@dataclass(kw_only=True)
class Collector:
    """Tracks the sampling of one step. In rounds: while `goes_on` is True, call `start`, sample a round, call `take` and `end_round`, and call `end_group` for each group
    whose verdict is due. If responses are episodes, also call `answer` for each of `answers_due`, after `start` and after `take`.

    In waves: call `start` until it returns an empty list, and `end_group` for each group when its verdict arrives. In both modes, call `finish` last. To sample further rounds
    with the same weights after the groups of the step are known, call `choose` before these rounds.
    """

    clock: VirtualClock
    prompt_at: Callable[[int], Prompt] | None = None
    """Maps an ordinal to its prompt. Not used if the run samples in waves."""
    limits: EpisodeLimits | None = None
    """None if responses have no environment."""
    responses: dict[ResponseId, Request] = field(default_factory=dict)
    """The started responses of groups without a verdict; empty if the run samples in waves."""
    ready: dict[int, Group]
    """Informative groups that wait for training, by ordinal."""
    max_groups: int | None = None
    """In waves, the maximum number of groups that a step samples. In rounds, the number of verdicts after which a step samples no further round. None means no limit."""
    metric: str = "correct"
    enabled: bool = True
    """Whether dynamic sampling is enabled. If False, all groups are trained on, informative or not."""
    trains_fewer: bool = False
    """Whether a step with too few informative groups trains on the groups that it has."""
    keeps_surplus: bool = True
    """If False, ready groups that the step does not train on are discarded when it ends."""
    best: Callable[[Group], Group] = lambda group: group
    """Returns a group with only those responses that may be trained on, see `Group.best`."""
    solved: Solved = field(default_factory=Solved)
    """The rows that rest in this step."""
    tally: Tally = field(default_factory=Tally)
    """Counts of the groups whose verdicts arrived in this step."""
    waves: int = 0
    """Number of waves in this step."""
    rounds: int = 0
    """Number of rounds in this step; 0 if the run samples in waves."""
    drawn_tokens: int = 0
    """Number of tokens sampled in this step; 0 if the run samples in waves."""
    _judged: list[Group] = field(default_factory=list)
    _ended: list[ResponseId] = field(default_factory=list)
    """Responses that ended since the last `end_round`."""
    _taken: bool = False
    """Whether the current round has been sampled."""
    _chosen: list[Group] | None = None
    """The groups to train on, after `choose`."""

    @classmethod
    def after(cls, position: Position, sizes: ClockSizes, **options: Any) -> "Collector":
        """Returns the collector for the step after `position`. `options` are values for other fields."""
        ready = {group.prompt.ordinal: group for group in position.carry}
        if (before := position.in_flight) is not None:
            responses = {response: request.rest() for response, request in before.responses.items()}
            for request in responses.values():
                request.version = before.clock.version
            return cls(clock=deepcopy(before.clock), ready=ready, responses=responses, **options)
        oldest = {ordinal: group.oldest for ordinal, group in ready.items()}
        first = ResponseId(position.cursor, 0)
        clock = VirtualClock(sizes, version=position.step, following=first, ready=oldest)
        return cls(clock=clock, ready=ready, **options)

    @property
    def needed(self) -> int:
        """Number of groups that the step trains on."""
        return self.clock.sizes.needed

    @property
    def kept(self) -> int:
        """Number of informative groups that are ready."""
        return len(self.ready)

    @property
    def cursor(self) -> int:
        """The ordinal of the first prompt for which no response has started."""
        return self.clock.following.ordinal + (self.clock.following.index > 0)

    @property
    def stage(self) -> str:
        """The progress of the step, for the progress bar."""
        if not self.clock.sizes.waves:
            return f"round {self.rounds}"
        return f"wave {self.waves}" if self.enabled else ""

    @property
    def _wave(self) -> int:
        """Number of prompts in a wave."""
        return self.clock.sizes.in_flight // self.clock.sizes.samples_per_prompt

    @property
    def goes_on(self) -> bool:
        """Whether to sample another round."""
        within = self.max_groups is None or self.tally.groups < self.max_groups
        return within and not self.clock.step_ends

    def start(self) -> list[ResponseId]:
        """Returns the responses that start now, in order. Episodes first wait for their environment's first answer. For waves, see `VirtualClock.start`."""
        if self.clock.sizes.waves:
            within = self.max_groups is None or (self.waves + 1) * self._wave <= self.max_groups
            started = self.clock.start(self.solved.awake) if within else []
            self.waves += bool(started)
            return started
        started = self.clock.start(self.solved.awake)
        assert self.prompt_at is not None
        for response in started:
            prompt = self.prompt_of(response.ordinal) if response.index else self.prompt_at(response.ordinal)
            request = Request(prompt, response.index, 0, version=self.clock.version)
            if response.index:
                request.prompt_values = self.responses[ResponseId(response.ordinal, 0)].prompt_values
            if self.limits is not None:
                request.due = self._now + self.clock.sizes.answer_rounds
            self.responses[response] = request
        return started

    def draws(self, response: ResponseId) -> bool:
        """Returns whether a response in flight samples in the next round. It does not sample while it waits for its environment, or once it has ended, for example
        because the episode was lost."""
        return self.responses[response].finish_reason is None and not self.responses[response].waits

    def take(self, drawn: Mapping[ResponseId, Drawn], here: Collection[ResponseId]) -> None:
        """Adds the new tokens of a round. The responses in `here` were sampled by this process and already have their tokens."""
        self.rounds += 1
        self._taken = True
        for response, sampled in drawn.items():
            request = self.responses[response]
            self.drawn_tokens += sampled.new
            if response not in here:
                sampled.append_to(request)
            if sampled.finish_reason is None:
                continue
            if self.limits is None:
                request.finish_reason = sampled.finish_reason
                self._ended.append(response)
            else:
                request.end_turn(sampled.finish_reason)
                request.due = self._now + self.clock.sizes.answer_rounds

    def answers_due(self) -> list[ResponseId]:
        """Returns the episodes to which an environment's answer must be applied now, in order."""
        due = ((response, self.responses[response].due) for response in self.clock.in_flight())
        return [response for response, at in due if at is not None and at <= self._now]

    def answer(self, response: ResponseId, before: Continuation | None, standing: Standing) -> None:
        """Applies an environment's answer: the next turn begins after the tokens `before`, or the episode ends. `standing` contains the rewards so far."""
        request = self.responses[response]
        assert self.limits is not None
        request.standing = standing
        request.take_answer(before, self.limits)
        if request.finish_reason is not None:
            self._ended.append(response)

    def end_round(self) -> tuple[list[ResponseId], list[int], list[int]]:
        """Ends a round, after `take`. Returns the responses that ended, and the ordinals of two kinds of groups: those that are now complete and can be graded,
        and those whose verdicts are due."""
        ended, self._ended, self._taken = self._ended, [], False
        due = self.clock.end_round(ended)
        return ended, self.clock.whole(response.ordinal for response in ended), due

    @property
    def _now(self) -> int:
        """Number of rounds that have been sampled."""
        return self.clock.rounds + self._taken

    def prompt_of(self, ordinal: int) -> Prompt:
        """Returns the prompt of a group in flight."""
        return self.responses[ResponseId(ordinal, 0)].prompt

    def responses_to(self, ordinal: int) -> tuple[Response, ...]:
        """Returns the responses of a complete group."""
        version = self.clock.groups[ordinal].version
        indices = range(self.clock.sizes.samples_per_prompt)
        return tuple(self.responses[ResponseId(ordinal, index)].response(version) for index in indices)

    def informative(self, group: Group) -> bool:
        """Returns whether a step may train on a graded group."""
        return not self.enabled or is_informative(self.best(group), metric=self.metric)

    def end_group(self, group: Group) -> None:
        """Adds a graded group. In rounds, the group's verdict must be due."""
        ordinal, informative = group.prompt.ordinal, self.informative(group)
        self.clock.end_group(ordinal, informative=informative)
        self._judged.append(group)
        self.tally.add(self.best(group))
        if informative:
            self.ready[ordinal] = group
        for index in range(self.clock.sizes.samples_per_prompt):
            self.responses.pop(ResponseId(ordinal, index), None)

    def choose(self) -> Collected:
        """Returns the groups to train on, which are the first informative groups by ordinal, and the groups that are left. Raises ShortfallError
        if there are too few informative groups and `trains_fewer` is False, or there is not a single informative group. The message counts the groups by
        kind, because too easy and too hard prompts need opposite remedies."""
        if len(self.ready) < self.needed and not (self.trains_fewer and self.ready):
            waves = f" in {self.waves} waves of {self._wave} prompts" if self.clock.sizes.waves else ""
            fewer = "" if self.trains_fewer else ", or set dynamic_sampling.on_shortfall=train_fewer"
            raise ShortfallError(
                f"dynamic sampling found {self.kept} of the {self.needed} informative groups it needs among the {self.tally.groups} groups of this step"
                f"{waves}: {nothing_to_learn(self.tally, [*map(self.best, self._judged)], self.metric)}, or raise "
                f"dynamic_sampling.max_waves{fewer}"
            )
        self._chosen = [self.ready.pop(ordinal) for ordinal in self.clock.choose()]
        return self._collected(self._chosen)

    def finish(self) -> Collected:
        """Ends the step, and calls `choose` before if necessary. Returns the groups of the step, including the groups whose verdicts arrived after `choose`."""
        if self._chosen is None:
            self.choose()
        assert self._chosen is not None
        collected = self._collected(self._chosen)
        self.clock.end_step()
        return collected

    def _collected(self, whole: list[Group]) -> Collected:
        surplus = [self.ready[ordinal] for ordinal in sorted(self.ready)]
        self._judged.sort(key=lambda group: group.prompt.ordinal)
        return Collected(
            groups=[self.best(group) for group in whole],
            whole=whole,
            carry=surplus if self.keeps_surplus else [],
            sampled=list(self._judged),
            cursor=self.cursor,
            waves=self.waves,
            surplus=len(surplus),
            version=self.clock.version,
            rounds=self.rounds,
            drawn_tokens=None if self.clock.sizes.waves else self.drawn_tokens,
            solved=self.solved.after(self._judged),
        )

    def going_on(self) -> InFlight | None:
        """Returns the rollouts in flight after `finish`, or None in waves. The collector must not be used afterwards."""
        if self.clock.sizes.waves:
            return None
        left = {response: request.rest() for response, request in self.responses.items()}
        return InFlight(clock=self.clock, responses=left)
