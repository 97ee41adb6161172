"""Samples and grades groups for the training steps and evaluations of a run, in one process or several.

In waves, each response is sampled to its end by the weights of one step. With rollouts in flight, responses continue from step to step, round by round. Both modes follow
the virtual clock, which is identical in every process.
"""

import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from itertools import chain, islice
from typing import Protocol, runtime_checkable

from jaxtyping import PyTree

from dapo_jax.config import ConfigError, TrainConfig
from dapo_jax.dapo.dynamic_sampling import Collected, Solved
from dapo_jax.dapo.rollouts import Group, Prompt, Response
from dapo_jax.dapo.tokens import Shapes, Tokens
from dapo_jax.data.prompts import PromptSource, PromptStream
from dapo_jax.environments import Episodes
from dapo_jax.evaluation import responses_kept
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel.mesh import Meshes
from dapo_jax.parallel.weights import SamplerWeights, not_arrived_frac
from dapo_jax.rewards.async_calls import DaemonThreads
from dapo_jax.rewards.grading import NOT_GRADED, Grading, immediately
from dapo_jax.rewards.shaping import Shaping
from dapo_jax.rollout.collector import Collector, Position
from dapo_jax.rollout.exchange import Answered, Exchange
from dapo_jax.rollout.response_sampler import TRAINING, ResponseSampler
from dapo_jax.rollout.virtual_clock import ClockSizes, ResponseId
from dapo_jax.sampling.continuous_batching import Answer
from dapo_jax.sampling.decoding import decoding
from dapo_jax.sampling.requests import Request
from dapo_jax.sampling.round_sampler import Drawn
from dapo_jax.trackers.rollout_log import LOGGED_GROUPS

_LOOK_S = 1.0
"""Interval in seconds between progress notes while environments work."""


@runtime_checkable
class Rounds(Protocol):
    """Samples in rounds with one set of weights: a `RoundSampler`, or an object that asks sample workers."""

    def draw(self, requests: Sequence[Request], tokens: int) -> list[Drawn]:
        """Samples one round (see `RoundSampler.draw`)."""

    def close(self) -> None:
        """Ends the use of the weights."""


@runtime_checkable
class SampleWorkers(Protocol):
    """The sample workers of this process: samplers in other processes (`cluster.remote_rounds`)."""

    def begin(self, params: PyTree, version: int) -> Rounds:
        """Sends the trainer's parameters to all workers. Returns an object that samples with them."""

    def metrics(self) -> dict[str, float | int]:
        """Returns the metrics of the rounds since the last call."""

    def close(self) -> None:
        """Ends all workers."""


class GroupSampling:
    """Samples responses to prompts and grades them, for the steps and evaluations of one run."""

    def __init__(
        self,
        config: TrainConfig,
        *,
        sampler: ResponseSampler,
        grading: Grading,
        prompts: PromptSource,
        held_out: Mapping[str, Sequence[Prompt]],
        meshes: Meshes,
        stop: Stop,
        watch: Watch,
        episodes: Episodes | None = None,
        recorded: Shapes = (),
        workers: SampleWorkers | None = None,
    ) -> None:
        """`watch` is notified of progress. With `episodes`, responses have several turns. `recorded` has the optional values of tokens that the sampler records. With
        `workers`, they sample the rounds, and `sampler` samples evaluations only."""
        self._config, self._sampler, self._grading, self._episodes = config, sampler, grading, episodes
        self._evaluating = grading
        if not config.learnt_metric and episodes is None:  # an environment must see the end of each episode
            ungraded = immediately(lambda samples: [NOT_GRADED] * len(samples))
            self._grading = replace(grading, submit=ungraded, shaping=Shaping())
        self._prompts, self._held_out = prompts, held_out
        self._stream = PromptStream(prompts, hosts=meshes.count)
        self._stop, self._watch = stop, watch
        batch, rollout = config.batch, config.rollout
        self._in_rounds = rollout.in_flight > 0
        wave = config.prompts_per_wave if config.dynamic_sampling.enabled else batch.prompts_per_step
        self._sizes = ClockSizes(
            in_flight=rollout.in_flight or wave * batch.group_size,
            samples_per_prompt=batch.group_size,
            needed=batch.prompts_per_step,
            answer_rounds=rollout.answer_rounds if self._in_rounds else 0,
            max_staleness=rollout.max_staleness if self._in_rounds else 0,
            waves=not self._in_rounds,
        )
        sizes = {"in_flight": rollout.in_flight, "round_tokens": rollout.round_tokens}
        self._exchange = Exchange(meshes, stop, watch, **sizes, recorded=recorded)
        self._pending: dict[int, Future[Group]] = {}
        """Groups in flight whose verdicts this process waits for, by ordinal."""
        self._workers = workers
        self._flying: tuple[Rounds, Assignment] | None = None
        """The sampler and the responses of each sampler, for `more_rounds`."""
        self._waited_s = 0.0
        """Seconds for which the last step waited for its further rounds after its updates."""
        self._turns: TurnsInFlight | None = None
        if episodes is not None and self._in_rounds:
            self._turns = TurnsInFlight(episodes, self._exchange, watch)

    def transfer(self, params: PyTree) -> SamplerWeights | PyTree:
        """Converts the trainer's parameters to the weights for `groups`. With sample workers, these are the parameters, and `groups` sends them to the workers."""
        return self._sampler.transfer(params) if self._workers is None else params

    def not_arrived_frac(self, params: PyTree, weights: SamplerWeights | PyTree) -> float:
        """Returns the share of the trainer's layers whose weights the samplers lack (see `parallel.weights.not_arrived_frac`). A sample worker refuses to sample without all
        weights, so the share is 0."""
        return 0.0 if self._workers else not_arrived_frac(self._sampler.transfer, params, weights)

    def compile(self) -> None:
        """Compiles the programs for sampling, and for evaluation if there are held-out prompts."""
        config, cut = self._config, self._config.eval
        options: list[dict[str, float | int]] = [{"temperature": config.sampling.temperature}]
        if self._workers is not None:
            options = []
        if self._held_out:
            options.append({"temperature": cut.temperature, "top_p": cut.top_p, "top_k": cut.top_k})
        self._sampler.compile(*options)

    def close(self) -> None:
        """Stops the sample workers, the grading workers and their event loop."""
        if self._workers is not None:
            self._workers.close()
        self._grading.close()

    def collector(self, position: Position) -> Collector:
        """Returns the collector for the step after `position`."""
        config, dynamic, prompts = self._config, self._config.dynamic_sampling, self._prompts
        rows = {"rows": prompts.rows_per_epoch, "row_of": prompts.row_index, "streaks": position.streaks}
        return Collector.after(
            position,
            self._sizes,
            prompt_at=self._prompt_at,
            limits=self._sampler.limits(self._episodes),
            max_groups=config.prompts_per_wave * dynamic.max_waves if dynamic.enabled else None,
            metric=dynamic.metric,
            enabled=dynamic.enabled,
            trains_fewer=dynamic.on_shortfall == "train_fewer",
            keeps_surplus=self._in_rounds or dynamic.surplus == "carry",
            best=lambda group: group.best(config.batch.kept, by=config.batch.kept_by),
            solved=Solved(visits=dynamic.skip_solved, **rows) if dynamic.skip_solved else Solved(),
        )

    def groups(self, weights: PyTree, collector: Collector) -> Iterator[Group]:
        """Yields the graded groups of a step as their verdicts arrive. In waves, the order is arbitrary. With rollouts in flight, groups are sorted by round and ordinal.

        Raises:
            StoppedError: the run was asked to stop. Raised in every process.
            RewardError: a reward function failed. Raised in every process.
        """
        self._exchange.phases.taken()  # begins the measurement of this step
        return (self._rounds if self._in_rounds else self._waves)(weights, collector)

    def seconds(self) -> dict[str, float]:
        """Returns the time that the last call of `groups` spent in each phase, in seconds: sample, grade, and wait (for other processes)."""
        return self._exchange.phases.taken()

    def evaluate(self, params: PyTree, step: int) -> dict[str, list[Group]]:
        """Samples and grades the held-out prompts after step `step`. Returns the groups of each held-out dataset.

        Raises:
            StoppedError: the run was asked to stop. Raised in every process.
        """
        weights, evaluated = self._sampler.transfer(params), dict[str, list[Group]]()
        grade = partial(self._exchange.graded, grade=self._evaluating.groups)
        with nullcontext() if self._episodes is None else self._episodes.kept_separate():
            for name, prompts in self._held_out.items():
                assigned = [prompt for prompt in prompts if self._exchange.takes(prompt.ordinal)]
                evaluate = partial(self._sampler.evaluate, name=name, step=step, environments=self._episodes)
                groups = evaluate(weights, assigned, grade, self._config.eval)
                by_ordinal = {prompt.ordinal: prompt for prompt in prompts}
                texts = max(responses_kept(len(prompts)), default=0)
                self._stop.check() if self._exchange.alone else None
                evaluated[name] = self._exchange.groups(groups, by_ordinal.__getitem__, texts=texts)
        return evaluated

    def _waves(self, weights: PyTree, collector: Collector) -> Iterator[Group]:
        alone, begun, phases = self._exchange.alone, list[int](), self._exchange.phases

        def certain() -> list[int]:
            """Starts all waves that are certain to be needed. Returns the ordinals of their prompts."""
            started = chain.from_iterable(iter(collector.start, []))
            return [response.ordinal for response in started if response.index == 0]

        def whole(group: Group) -> bool:
            """Returns whether other processes need the group's tokens, because it may be trained on or is logged."""
            return collector.informative(group) or group.prompt.ordinal in begun[:LOGGED_GROUPS]

        mine = deque[int]()

        def prompts(count: int) -> list[Prompt]:
            if alone and not mine:
                mine.extend(certain())  # so that the next wave overlaps the last responses of this wave
            self._watch.note("reading prompts")
            return [self._stream.at(mine.popleft()) for _ in range(min(count, len(mine)))]

        while ordinals := certain():
            begun += ordinals
            mine.extend(filter(self._exchange.takes, ordinals))
            if self._config.rollout.saved:
                most = self._config.sampling.max_response_tokens
                sampled = (
                    (found[0], (saved_response(found[0], most),)) for found in iter(partial(prompts, 1), [])
                )
            else:
                sampled = self._sampler.sample(
                    weights,
                    prompts,
                    decoding=decoding(temperature=self._config.sampling.temperature),
                    samples=self._config.batch.group_size,
                    domain=TRAINING,
                    version=collector.clock.version,
                    environments=self._episodes,
                )
            sampled = phases.each("sample", sampled)
            if alone:
                groups = phases.each("grade", self._stop.watched(self._grading.groups(sampled)))
            else:
                with phases.phase("grade"):
                    graded = self._exchange.graded(sampled, self._grading.groups)
                groups = iter(self._exchange.groups(graded, self._prompts.__getitem__, whole=whole))
            for group in groups:
                collector.end_group(group)
                yield group

    def _rounds(self, weights: PyTree, collector: Collector) -> Iterator[Group]:
        lengths = {response: collector.responses[response].drawn for response in collector.clock.in_flight()}
        assignment = Assignment(self._sizes.in_flight, self._exchange.count, lengths)
        if self._turns is not None:
            self._turns.ask(collector)  # reopens episodes from a checkpoint, so that they can be graded
        for ordinal in collector.clock.whole(collector.clock.groups):
            self._grade(ordinal, collector)
        further = self._config.rollout.weight_rounds
        if not (collector.goes_on or further):
            return
        with ExitStack() as opened:
            sampler = self._begin(weights, collector)
            opened.callback(sampler.close)
            while collector.goes_on:
                yield from self._next_round(sampler, collector, assignment)
            if further:
                opened.pop_all()
                self._flying = sampler, assignment

    def more_rounds(self, collector: Collector) -> Callable[[], Collected]:
        """Samples `rollout.weight_rounds` further rounds with the weights of the step, after `groups` and `Collector.choose`. Returns a function that waits for their end and
        ends the step (`Collector.finish`).

        With sample workers and one training process, the rounds run in another thread, while the caller changes the weights. Otherwise, they have ended when this method returns.
        """
        flying, self._flying, self._waited_s = self._flying, None, 0.0
        if flying is None:
            return collector.finish
        sampler, assignment = flying

        def sample() -> None:
            with ExitStack() as opened:
                opened.callback(sampler.close)
                for _ in range(self._config.rollout.weight_rounds):
                    self._next_round(sampler, collector, assignment)

        if self._workers is None or not self._exchange.alone:
            sample()
            return collector.finish
        self._exchange.interruptible = False
        ended = DaemonThreads().submit(sample)

        def join() -> Collected:
            began = time.perf_counter()
            ended.result()
            self._exchange.interruptible, self._waited_s = True, time.perf_counter() - began
            return collector.finish()

        return join

    def worker_metrics(self) -> dict[str, float | int]:
        """Returns the metrics of the sample workers in the last step. Without sample workers, it is empty, or the speed if nothing was sampled."""
        if self._workers is None:
            return {"speed/sampled_tokens_per_s": 0.0} if self._config.rollout.saved else {}
        return {**self._workers.metrics(), "cluster/rounds_wait_s": self._waited_s}

    def _begin(self, weights: PyTree, collector: Collector) -> Rounds:
        if self._workers is not None:
            return self._workers.begin(weights, collector.clock.version)
        options = decoding(temperature=self._config.sampling.temperature)
        return self._sampler.rounds(weights, decoding=options, limits=collector.limits)

    def _next_round(self, sampler: Rounds, collector: Collector, assignment: "Assignment") -> list[Group]:
        """Samples a round. Returns the graded groups whose verdicts are due, after they were added to the collector."""
        assignment.give(collector.start())
        self._converse(collector)
        drawn = self._round(sampler, collector, assignment)
        collector.take(drawn, assignment.of(self._exchange.index))
        self._converse(collector)
        ended, whole, due = collector.end_round()
        assignment.leave(ended)
        for ordinal in whole:
            self._grade(ordinal, collector)
        groups = self._await_verdicts(due, collector)
        for group in groups:
            collector.end_group(group)
        return groups

    def _converse(self, collector: Collector) -> None:
        """Sends new turns to environments, and applies the answers that are due."""
        if self._turns is not None:
            with self._exchange.phases.phase("grade"):
                self._turns.ask(collector)
                self._turns.hear(collector)

    def _round(
        self, sampler: Rounds, collector: Collector, assignment: "Assignment"
    ) -> dict[ResponseId, Drawn]:
        """Samples a round. Returns the new tokens of the responses in flight, from all processes."""
        samplers = range(self._exchange.count)
        assigned = [list(filter(collector.draws, assignment.of(sampler))) for sampler in samplers]
        requests = [collector.responses[response] for response in assigned[self._exchange.index]]
        drawn = self._exchange.attempt(lambda: sampler.draw(requests, self._config.rollout.round_tokens))
        return self._exchange.round(assigned, drawn or ())

    def _grade(self, ordinal: int, collector: Collector) -> None:
        """Passes a complete group to the graders, if this process grades it."""
        if self._exchange.grades_group(ordinal) and ordinal not in self._pending:
            prompt, responses = collector.prompt_of(ordinal), collector.responses_to(ordinal)
            with self._exchange.phases.phase("grade"):
                begun = self._exchange.attempt(lambda: self._grading.begin(prompt, responses))
            if begun is not None:
                self._pending[ordinal] = begun

    def _await_verdicts(self, due: Sequence[int], collector: Collector) -> list[Group]:
        """Waits for the verdicts that are due, and returns their graded groups in every process."""
        if not due:
            return []
        pending = self._pending
        with self._exchange.phases.phase("grade"):
            groups = self._exchange.attempt(lambda: [pending.pop(at).result() for at in due if at in pending])
        return self._exchange.verdicts(groups or [], collector.prompt_of, collector.responses_to)

    def _prompt_at(self, ordinal: int) -> Prompt:
        self._watch.note("reading prompts")
        return self._prompts[ordinal]


def saved_response(prompt: Prompt, most: int) -> Response:
    """Returns the response in a prompt's row (`rollout.saved`). Raises ConfigError if the row was not saved with the prompt's tokens, or if it has no response of 1 to `most` tokens."""
    row = prompt.row
    if row.get("prompt_token_ids") != prompt.tokens.tolist():
        raise ConfigError(
            f"rollout.saved: row {prompt.ordinal} has prompt_token_ids={row.get('prompt_token_ids')}, needs the tokens of its prompt, {prompt.tokens.tolist()}: "
            "use a file that `dapo-jax eval --keep` wrote, with the same tokenizer, and name the question by data.source_options={prompt: row.prompt, answer: answer}"
        )
    ids, logprobs = (row.get(name) or [] for name in ("response_token_ids", "logprobs"))
    if not 0 < len(ids) == len(logprobs) <= most:
        raise ConfigError(
            f"rollout.saved: row {prompt.ordinal} has {len(ids)} response_token_ids and {len(logprobs)} logprobs, needs 1 to {most} of each: leave the row out, or raise "
            "sampling.max_response_tokens"
        )
    record = Tokens(ids, logprobs=logprobs)
    return Response(record=record, finish_reason=row["finish_reason"])


class Assignment:
    """Assigns each response in flight to a sampler. The assignment does not affect any result."""

    def __init__(self, in_flight: int, samplers: int, lengths: Mapping[ResponseId, int]) -> None:
        """Assigns the responses that continue from the last step to samplers. All of them must be re-prefilled. `lengths` maps each response to its number of tokens.

        The longest responses are dealt out first, back and forth, so that all samplers hold and prefill about the same number of tokens. If responses were assigned by
        ordinal, the first sampler would get all the old, long responses. They would not fit in its pages, and the other samplers would wait for it at the end of each
        round. If responses do not divide evenly, the first samplers get one more.
        """
        self._in_flight = in_flight
        self._at: list[set[ResponseId]] = [set() for _ in range(samplers)]
        self._most = self._shares(range(samplers))
        longest = sorted(lengths, key=lambda response: (-lengths[response], response))
        for index, response in enumerate(longest):
            lap, at = divmod(index, samplers)
            back = lap % 2 == 1 and lap < len(lengths) // samplers
            self._at[samplers - 1 - at if back else at].add(response)

    def give(self, started: Sequence[ResponseId]) -> None:
        """Assigns new responses, in order, to samplers with free slots."""
        waiting = iter(started)
        for at, most in zip(self._at, self._most, strict=True):
            at.update(islice(waiting, max(0, most - len(at))))

    def leave(self, ended: Sequence[ResponseId]) -> None:
        """Frees the places of responses that have ended."""
        for at in self._at:
            at.difference_update(ended)

    def use(self, samplers: Collection[int]) -> None:
        """Assigns responses only to these samplers from now on. The responses of other samplers move to them."""
        self._most = self._shares(samplers)
        left = [response for sampler, at in enumerate(self._at) if sampler not in samplers for response in at]
        self.leave(left)
        self.give(sorted(left))

    def _shares(self, samplers: Collection[int]) -> list[int]:
        each, more = divmod(self._in_flight, len(samplers))
        shares = {sampler: each + (place < more) for place, sampler in enumerate(sorted(samplers))}
        return [shares.get(sampler, 0) for sampler in range(len(self._at))]

    def of(self, sampler: int) -> list[ResponseId]:
        """Returns the responses that are assigned to a sampler, in order."""
        return sorted(self._at[sampler])


class TurnsInFlight:
    """Passes turns and answers between episodes in flight and their environments. The process that grades a group communicates with its environments. Every process
    applies an answer a fixed number of rounds after the turn. So tokens depend on the answers, but not on how long an environment takes."""

    def __init__(self, episodes: Episodes, exchange: Exchange, watch: Watch) -> None:
        """`watch` is notified at least every second while environments work."""
        self._episodes, self._exchange, self._watch = episodes, exchange, watch
        self._asked: dict[ResponseId, Answer] = {}
        self._known: set[ResponseId] = set()
        """Episodes that this process has opened in their environments."""

    def ask(self, collector: Collector) -> None:
        """Starts new episodes in the environments and sends finished turns to them. Reopens episodes that are not open in this process, for example after a resume."""
        for response, request in collector.responses.items():
            is_known = response in self._known
            has_nothing_new = is_known and (not request.waits or response in self._asked)
            if has_nothing_new or not self._exchange.grades_group(response.ordinal):
                continue
            prompt, turns = request.prompt, request.drawn_turns
            if not is_known and (turns or not request.waits):
                answered = turns[:-1] if request.waits else turns
                self._episodes.reopen(prompt, response.index, answered, request.standing)
            self._known.add(response)
            if request.waits and turns:
                self._asked[response] = self._episodes.step(prompt, response.index, turns[-1])
            elif request.waits:
                self._asked[response] = self._episodes.start(prompt, response.index)
        self._known &= collector.responses.keys()

    def hear(self, collector: Collector) -> None:
        """Applies the answers that are due now, in every process.

        Raises:
            StoppedError: one of the processes was asked to stop. Raised in all of them.
            RewardError: a reward function failed in one of the processes. Raised in all of them.
        """
        if not (due := collector.answers_due()):
            return
        of_this_process = [response for response in due if self._exchange.grades_group(response.ordinal)]
        asked = {response: self._asked[response] for response in of_this_process}

        def heard() -> dict[ResponseId, Answered]:
            while wait(asked.values(), timeout=_LOOK_S).not_done:
                self._watch.note("waiting for environments")
            answers = dict[ResponseId, Answered]()
            for response, answer in asked.items():
                prompt = collector.responses[response].prompt
                answers[response] = answer.result(), self._episodes.standing(prompt, response.index)
            return answers

        answers = self._exchange.answers(self._exchange.attempt(heard) or {})
        for response in due:
            self._asked.pop(response, None)
            collector.answer(response, *answers[response])
