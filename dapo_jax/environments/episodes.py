"""The episodes of a run: many at a time on one event loop, each with its limits, and what they were worth.

The loop runs in a thread of this process while others are sampled. An episode that hangs, raises or answers nonsense is lost, and counted; no other suffers from it.
"""

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.in_flight import Standing
from dapo_jax.dapo.rollouts import Continuation, DrawnTurn, Lost, Prompt, Verdict
from dapo_jax.environments.calls import (
    LostError,
    answer_raises,
    called,
    checked_episode,
    checked_scores,
    checked_step,
    place_of,
)
from dapo_jax.environments.protocol import Context, Environment, Step, Turn
from dapo_jax.environments.recorded_answers import Answer, Heard, RecordedAnswers
from dapo_jax.environments.rendering import Rendering, RenderingError
from dapo_jax.rewards.async_calls import DaemonThreads, run_until
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.sample import Sample, copied, read_only

_Value = TypeVar("_Value")

HELD_S = 10.0
"""Seconds for which an environment may hold the event loop before that is reported; it is reported again whenever they have doubled."""

_PROMPTS, _EPISODES = 4, 32
"""Prompts, and episodes, at the least, of a run that ends because every episode so far was lost."""

_FAREWELLS = 4096
"""Groups whose episodes may still be at their `close`, at the most."""

_ENDING_S = 5.0
"""Seconds for which closing waits for episodes that go on after they were cancelled."""


_NO_ROOM = (
    "the episode begins{begins}, which leaves no room for a turn: an episode has up to sampling.max_response_tokens tokens after the prompt (or "
    "environment.episode_tokens), and a Context up to data.max_prompt_tokens + sampling.max_response_tokens; begin with less, or raise these"
)


@dataclass
class _Open:
    """An episode, and what is known of it."""

    prompt: Prompt
    index: int
    episode: Any = None
    unheard: list[Turn] = field(default_factory=list)
    """Turns whose answers were on record, so that the environment has not heard them in this process."""
    heard: Heard = field(default_factory=Heard)
    rewards: list[float] = field(default_factory=list)
    metrics: dict[str, float] = field(default_factory=dict)
    correct: bool | None = None
    lost: Lost | str = ""
    reason: str = ""
    begins: str = ""
    """The number of tokens that it begins with, in words; empty if this process does not know it."""


class Episodes:
    """Episodes as the sampler and the grading see them. A context manager: leaving it ends the thread."""

    def __init__(
        self,
        environment: Environment,
        rendering: Rendering,
        *,
        text_of: Callable[[Int[np.ndarray, " turn"]], str],
        seed: int,
        max_turns: int,
        turn_tokens: int = 0,
        episode_tokens: int = 0,
        timeout_s: float = 30.0,
        calls: int = 64,
        name: str = "of this run",
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
            environment: makes the episodes.
            rendering: turns what they append into ids.
            text_of: the text of a turn, up to its stop string.
            seed: of the run; an episode's is made of it and the prompt's ordinal.
            max_turns: the most turns of an episode.
            turn_tokens: the most tokens of a turn; 0: as many as the episode may have.
            episode_tokens: the most tokens of an episode; 0: as many as a response may have.
            timeout_s: seconds for one call, from when it is under way.
            calls: the most that are under way at one time; the others wait.
            name: of the environment, for messages.
            on_close: called when the thread has ended.
        """
        self._environment, self._rendering, self._text_of, self._seed = environment, rendering, text_of, seed
        self.max_turns, self.turn_tokens, self.episode_tokens = max_turns, turn_tokens, episode_tokens
        self._timeout_s, self._name, self._on_close = timeout_s, name, on_close
        self._judged, self._prompts_judged, self._all_lost = 0, 0, True
        self._beats = 0
        self.answers: RecordedAnswers | None = None
        """Where answers are written down, and found again; None: nowhere."""
        self._open: dict[tuple[int, int], _Open] = {}
        self._loop = asyncio.new_event_loop()
        self._loop.set_default_executor(DaemonThreads())
        self._room = asyncio.Semaphore(calls)
        self._closing = threading.Event()
        self._farewells: deque[Future[None]] = deque(maxlen=_FAREWELLS)
        self._thread = threading.Thread(target=self._serve, daemon=True, name="environments")
        self._thread.start()
        threading.Thread(target=self._watch, daemon=True, name="environments watch").start()

    def __enter__(self) -> "Episodes":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, prompt: Prompt, index: int) -> Future[Continuation | None]:
        """Begins an episode: what stands before the first turn; None if it was lost."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt, index)

        async def begin() -> Continuation:
            found = await self._begun(opened)
            if anew := isinstance(found, Context):
                ids = self._rendering.context_ids(found)
            else:
                ids = self._rendering.ids("" if found is None else found, after=None)
            opened.begins = f" with {len(ids)} tokens"
            return Continuation(ids, anew=anew)

        return self._on_record(opened) or self._submit(opened, begin)

    def reopen(self, prompt: Prompt, index: int, turns: Sequence[DrawnTurn], standing: Standing) -> None:
        """Opens an episode of an earlier process, whose environment has answered these turns: it is told them before the next one."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt, index)
        for turn in turns:
            opened.heard.add(turn.tokens)
            opened.unheard.append(self._said(turn, number=len(opened.unheard)))
        opened.rewards, opened.metrics = list(standing.rewards), dict(standing.metrics)
        opened.correct, opened.lost, opened.reason = standing.correct, standing.lost, standing.reason

    def standing(self, prompt: Prompt, index: int) -> Standing:
        """All that the environment has said of an episode so far."""
        opened = self._open[prompt.ordinal, index]
        return Standing(
            rewards=tuple(opened.rewards),
            correct=opened.correct,
            metrics=dict(opened.metrics),
            lost=opened.lost,
            reason=opened.reason,
        )

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, episodes are others than those that are open, whatever their ordinals, and no answer is written down: those of an evaluation, say."""
        opened, answers = self._open, self.answers
        self._open, self.answers = {}, None
        try:
            yield
        finally:
            if left := list(self._open.values()):  # it was cut short
                self._farewells.append(asyncio.run_coroutine_threadsafe(self._closed(left), self._loop))
            self._open, self.answers = opened, answers

    def step(self, prompt: Prompt, index: int, turn: DrawnTurn) -> Future[Continuation | None]:
        """Hands over a turn: what stands before the next one; None: the episode is over, or was lost."""
        opened = self._open[prompt.ordinal, index]
        opened.heard.add(turn.tokens)
        said = self._said(turn, number=len(opened.rewards))
        opened.rewards.append(0.0)
        if (known := self._on_record(opened)) is not None:
            opened.unheard.append(said)
            return known

        async def answer() -> Continuation | None:
            await self._caught_up(opened)
            answered = await self._called(opened.episode.step, said)
            step = checked_step(answered)
            opened.rewards[-1] = step.reward
            opened.metrics.update(step.metrics)
            opened.correct = opened.correct if step.correct is None else step.correct
            return None if step.done else self._continuation(answered, after=turn.tokens)

        return self._submit(opened, answer)

    def verdicts(self, samples: Sequence[Sample]) -> list[Future[Verdict]]:
        """The verdicts of the episodes of one prompt, in the order of their indices: `rewards.grading.Submit`.

        A result raises RewardError if every episode so far was lost: then it is the environment that is at fault.
        """
        found: list[Future[Verdict]] = [Future() for _ in samples]
        opened = [self._open.pop((sample.prompt.ordinal, index)) for index, sample in enumerate(samples)]
        for one in opened:
            if not one.lost and not one.rewards:
                one.lost, one.reason = "raised", _NO_ROOM.format(begins=one.begins)
        group_rewards = getattr(self._environment, "group_rewards", None)
        if group_rewards is None:
            self._farewells.append(asyncio.run_coroutine_threadsafe(self._closed(opened), self._loop))
            self._judge(opened, found)
            return found
        kept = [one for one in opened if not one.lost]
        place = samples[0].prompt.ordinal, -1, " ".join(one.heard.name for one in kept)
        answers = self.answers
        known = None if answers is None else answers.find(*place)

        async def compare() -> None:
            asked = len(kept)
            scores = await self._compared(group_rewards, kept, known)
            if answers is not None and known is None and len(scores) == asked:
                answers.add(*place, Answer(tokens=None, scores=scores))
            self._judge(opened, found, dict(zip(map(id, kept), scores, strict=False)))
            await self._closed(opened)

        def settle(_: Future[None]) -> None:
            for verdict in found:  # none has, if somebody else's code cancelled the task
                if not verdict.done():
                    said = "the task that compares the rewards of a group was cancelled"
                    verdict.set_result(Verdict(correct=False, lost="raised", reason=said))

        comparing = asyncio.run_coroutine_threadsafe(compare(), self._loop)
        comparing.add_done_callback(settle)
        self._farewells.append(comparing)
        return found

    def _judge(
        self,
        opened: Sequence[_Open],
        found: Sequence[Future[Verdict]],
        scores: Mapping[int, float] | None = None,
    ) -> None:
        """Settles the verdicts of the episodes of one prompt; `scores` are compared rewards, by the identity of the episode."""
        self._judged, self._prompts_judged = self._judged + len(opened), self._prompts_judged + 1
        self._all_lost = self._all_lost and all(one.lost for one in opened)
        at_fault = self._all_lost and self._prompts_judged >= _PROMPTS and self._judged >= _EPISODES
        for one, verdict in zip(opened, found, strict=True):
            if at_fault:
                verdict.set_exception(
                    RewardError(
                        f"environment {self._name}: all {self._judged} episodes so far, of {self._prompts_judged} prompts, were lost, the last one: "
                        f"{one.reason}; mend the environment"
                    )
                )
            else:
                verdict.set_result(_verdict(one, None if scores is None else scores.get(id(one))))

    async def _compared(
        self, group_rewards: Callable[..., Any], kept: list[_Open], known: Answer | None
    ) -> list[float]:
        """The rewards of the episodes that are not lost, where none are `known` by `group_rewards`. Those that cannot be told what they missed are taken out of `kept`;
        without an answer all are lost."""
        try:
            if known is not None and known.scores is not None:
                given = known.scores
            else:
                for one in list(kept):
                    try:
                        async with self._room:
                            await self._caught_up(one)
                    except LostError as error:
                        one.lost, one.reason = error.lost, str(error)
                        kept.remove(one)
                given = await self._called(group_rewards, [one.episode for one in kept])
            return checked_scores(given, count=len(kept))
        except LostError as error:
            lost, said = error.lost, str(error)
        # An answer may raise when it is looked at, and the run would wait for ever.
        except Exception as error:
            lost, said = "raised", f"group_rewards' answer raises {type(error).__name__}"
        for one in kept:
            one.lost, one.reason = lost, said
        return []

    def close(self) -> None:
        """Ends the thread, once episodes were closed, as far as that ends soon; calls that are under way are given up."""
        if not self._closing.is_set():
            left = list(self._open.values())
            self._farewells.append(asyncio.run_coroutine_threadsafe(self._closed(left), self._loop))
            wait(self._farewells, timeout=_ENDING_S / 2)
            self._closing.set()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ENDING_S)
        self._on_close()

    def _said(self, turn: DrawnTurn, *, number: int) -> Turn:
        return Turn(
            tokens=read_only(turn.tokens),
            logprobs=read_only(turn.logprobs),
            text=self._text_of(turn.tokens),
            finish_reason=turn.finish_reason,
            number=number,
        )

    async def _begun(self, opened: _Open) -> object:
        """Makes the episode, and begins it: what it says before the first turn.

        Raises:
            LostError: it is none, raises or takes too long.
        """
        prompt = opened.prompt
        seed = int(np.random.SeedSequence((self._seed, prompt.ordinal)).generate_state(1)[0])
        own = {name: copied(value) for name, value in prompt.row.items()}
        row = {"prompt": prompt.text, "answer": prompt.answer, **own}
        opened.episode = await self._called(self._environment.episode, row, seed)
        checked_episode(opened.episode)
        start = getattr(opened.episode, "start", None)
        return None if start is None else await self._called(start)

    async def _caught_up(self, opened: _Open) -> None:
        """Tells an episode whose answers were on record the turns that it has not heard; what it says to them is on record.

        Raises:
            LostError: it raises or takes too long.
        """
        if opened.episode is None:
            await self._begun(opened)
        assert opened.episode is not None
        while opened.unheard:
            await self._called(opened.episode.step, opened.unheard[0])
            del opened.unheard[0]

    def _on_record(self, opened: _Open) -> Future[Continuation | None] | None:
        """The answer to the turns of an episode that is on record; None if there is none."""
        if self.answers is None:
            return None
        found = self.answers.find(opened.prompt.ordinal, opened.index, opened.heard.name)
        if found is None:
            return None
        if opened.rewards:
            opened.rewards[-1] = found.reward
        opened.metrics.update(found.metrics)
        opened.correct, opened.lost, opened.reason = found.correct, found.lost, found.reason
        return _done(found.continuation)

    async def _closed(self, opened: Sequence[_Open]) -> None:
        """Closes the episodes that have a `close`, whatever ended them; what it raises changes nothing any more."""

        async def close(one: _Open) -> None:
            with suppress(Exception):
                if callable(end := getattr(one.episode, "close", None)):
                    await self._called(end)

        await asyncio.gather(*map(close, opened))

    def _continuation(self, step: Step, *, after: Int[np.ndarray, " turn"] | None) -> Continuation:
        """The tokens of what a step puts before the next turn.

        Raises:
            RenderingError: there can be none.
        """
        if step.context is None:
            return Continuation(self._rendering.ids(step.append, after=after))
        if not isinstance(step.context, Context):
            raise RenderingError(f"{step.context!r:.200} ({type(step.context).__name__}) is no Context")
        return Continuation(self._rendering.context_ids(step.context), anew=True)

    def _serve(self) -> None:
        """Runs the loop until it is closed, whatever ends it in between."""
        self._loop.call_soon(self._beat)
        said = "a task of an environment raised; the episodes go on"
        run_until(self._loop, self._closing.is_set, said=said)
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        with suppress(BaseException):
            self._loop.run_until_complete(asyncio.wait(left, timeout=_ENDING_S / 2)) if left else None
        self._loop.close()

    def _beat(self) -> None:
        self._beats += 1
        self._loop.call_later(HELD_S / 30, self._beat)

    def _watch(self) -> None:
        """Reports an environment that holds the event loop. It counts its own looks and not the clock, since a process may have been suspended."""
        seen, held, due = -1, 0.0, HELD_S
        while not self._closing.wait(HELD_S / 10):
            if self._beats != seen:
                seen, held, due = self._beats, 0.0, HELD_S
                continue
            held += HELD_S / 10
            if held < due:
                continue
            due *= 2
            frame = sys._current_frames().get(self._thread.ident or 0)
            place = "" if frame is None else place_of(reversed([*traceback.walk_stack(frame)]))
            with suppress(OSError, ValueError, AttributeError):  # there may be no standard error
                print(
                    f"environment {self._name}: it has held the event loop for {held:.0f} s{place}, and no other episode can continue: await what takes "
                    "long, write a function that blocks without `async`, or set environment.workers=1 or more",
                    file=sys.stderr,
                    flush=True,
                )

    def _submit(
        self, opened: _Open, work: Callable[[], Coroutine[Any, Any, Continuation | None]]
    ) -> Future[Continuation | None]:
        heard, answers = opened.heard.name, self.answers

        async def recorded() -> Continuation | None:
            found = await kept()
            if answers is not None:
                answer = Answer(
                    tokens=None if found is None else found.tokens.tolist(),
                    anew=found is not None and found.anew,
                    reward=opened.rewards[-1] if opened.rewards else 0.0,
                    correct=opened.correct,
                    metrics=dict(opened.metrics),
                    lost=opened.lost,
                    reason=opened.reason,
                )
                answers.add(opened.prompt.ordinal, opened.index, heard, answer)
            return found

        async def kept() -> Continuation | None:
            try:
                async with self._room:
                    return await work()
            except LostError as error:
                opened.lost, opened.reason = error.lost, str(error)
            except RenderingError as error:
                opened.lost, opened.reason = "raised", str(error)
            except asyncio.CancelledError:  # by somebody else's code on this loop
                if self._closing.is_set():
                    raise
                opened.lost, opened.reason = "raised", "the environment's task was cancelled"
            except Exception as error:
                opened.lost, opened.reason = "raised", str(answer_raises(error))
            return None

        answered: Future[Continuation | None] = Future()

        def settle(done: Future[Continuation | None]) -> None:
            if done.cancelled() or done.exception() is not None:  # before it began, by somebody else's code
                opened.lost, opened.reason = "raised", "the environment's task was cancelled"
                answered.set_result(None)
            else:
                answered.set_result(done.result())

        asyncio.run_coroutine_threadsafe(recorded(), self._loop).add_done_callback(settle)
        return answered

    async def _called(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """The result of somebody else's function within the limit; what is raised is that of `called`."""
        return await called(call, *arguments, timeout_s=self._timeout_s)


def _verdict(one: _Open, score: float | None = None) -> Verdict:
    if one.lost:
        return Verdict(correct=False, lost=one.lost, reason=one.reason, parts=one.metrics)
    # A compared reward replaces the rewards by turn, and is there only once the last turn has ended.
    rewards = one.rewards if score is None else [*[0.0] * len(one.rewards[1:]), score]
    total = sum(rewards)
    correct = total > 0 if one.correct is None else one.correct
    return Verdict(correct=correct, score=total, parts=one.metrics, turn_rewards=tuple(rewards))


def _done(value: _Value) -> Future[_Value]:
    future: Future[_Value] = Future()
    future.set_result(value)
    return future
