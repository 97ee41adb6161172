"""The episodes of a run: many at a time on one event loop, each with its limits and rewards.

The loop runs in a thread of this process, in parallel with sampling. An episode that hangs, raises or returns nonsense is lost, and counted; the others are not affected.
"""

import asyncio
import sys
import threading
import traceback
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.rollouts import Continuation, DrawnTurn, Lost, Prompt, Standing, Verdict
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
from dapo_jax.environments.rendering import Rendering, RenderingError
from dapo_jax.rewards.async_calls import DaemonThreads, run_until
from dapo_jax.rewards.functions import RewardError
from dapo_jax.rewards.sample import Sample, copied, read_only

_Value = TypeVar("_Value")

HELD_S = 10.0
"""Seconds for which an environment may hold the event loop before a warning; the next warning follows when they have doubled."""

_PROMPTS, _EPISODES = 4, 32
"""The least numbers of prompts and episodes after which a run ends because all episodes were lost."""

_FAREWELLS = 4096
"""The most groups whose episodes may be closing at the same time."""

_ENDING_S = 5.0
"""Seconds for which closing waits for episodes that continue after they were cancelled."""


_NO_ROOM = (
    "the episode begins{begins}, which leaves no room for a turn: an episode has up to sampling.max_response_tokens tokens after the prompt (or "
    "environment.episode_tokens), and a Context up to data.max_prompt_tokens + sampling.max_response_tokens; begin with less, or raise these"
)


@dataclass
class _Open:
    """An episode and its state."""

    prompt: Prompt
    index: int
    standing: Standing = field(default_factory=Standing)
    episode: Any = None
    """Object of the environment; None: it has not begun in this process."""
    unheard: list[Turn] = field(default_factory=list)
    """Turns of an earlier process, which the environment has not heard in this one."""
    begins: str = ""
    """The number of tokens that it begins with, in words; empty if this process does not know it."""

    def lose(self, lost: Lost, reason: str) -> None:
        """Ends the episode without a reward."""
        self.standing.lost, self.standing.reason = lost, reason


class Episodes:
    """The episodes of a run, for the sampler and for grading. A context manager: leaving it ends the thread."""

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
            rendering: tokenizes what they append.
            text_of: gives the text of a turn, up to its stop string.
            seed: of the run; an episode's seed depends on it and on the prompt's ordinal.
            max_turns: the most turns of an episode.
            turn_tokens: the most tokens of a turn; 0: as many as the episode may have.
            episode_tokens: the most tokens of an episode; 0: as many as a response may have.
            timeout_s: time limit of one call, without the wait before it.
            calls: the most calls at the same time; the others wait.
            name: of the environment, for messages.
            on_close: called when the thread has ended.
        """
        self._environment, self._rendering, self._text_of, self._seed = environment, rendering, text_of, seed
        self.max_turns, self.turn_tokens, self.episode_tokens = max_turns, turn_tokens, episode_tokens
        self._timeout_s, self._name, self._on_close = timeout_s, name, on_close
        self._judged, self._prompts_judged, self._all_lost = 0, 0, True
        self._beats = 0
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
        """Begins an episode. The result is put before the first turn; None if the episode was lost."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt, index)

        async def begin() -> Continuation:
            found = await self._begun(opened)
            if anew := isinstance(found, Context):
                ids = self._rendering.context_ids(found)
            else:
                ids = self._rendering.ids("" if found is None else found, after=None)
            opened.begins = f" with {len(ids)} tokens"
            return Continuation(ids, anew=anew)

        return self._submit(opened, begin)

    def reopen(self, prompt: Prompt, index: int, turns: Sequence[DrawnTurn], standing: Standing) -> None:
        """Opens an episode of an earlier process, whose environment has answered `turns`: it hears them again before the next turn."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt, index, replace(standing))
        opened.unheard = [self._turn(turn, number) for number, turn in enumerate(turns)]

    def standing(self, prompt: Prompt, index: int) -> Standing:
        """Returns a copy of the environment's account of an episode so far."""
        return replace(self._open[prompt.ordinal, index].standing)

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Within, all episodes are new ones, whatever their ordinals, as in an evaluation."""
        opened, self._open = self._open, {}
        try:
            yield
        finally:
            self._farewell(list(self._open.values()))  # some are left if it was cut short
            self._open = opened

    def step(self, prompt: Prompt, index: int, turn: DrawnTurn) -> Future[Continuation | None]:
        """Hands over a turn. The result is put before the next turn; None: the episode is over, or was lost."""
        opened = self._open[prompt.ordinal, index]
        standing = opened.standing
        given = self._turn(turn, len(standing.rewards))
        standing.rewards = (*standing.rewards, 0.0)

        async def answer() -> Continuation | None:
            await self._catch_up(opened)
            answered = await self._called(opened.episode.step, given)
            step = checked_step(answered)
            standing.rewards = (*standing.rewards[:-1], step.reward)
            standing.metrics = {**standing.metrics, **step.metrics}
            standing.correct = standing.correct if step.correct is None else step.correct
            return None if step.done else self._continuation(answered, after=turn.tokens)

        return self._submit(opened, answer)

    def verdicts(self, samples: Sequence[Sample]) -> list[Future[Verdict]]:
        """Returns the verdicts of the episodes of one prompt, in the order of their indices: `rewards.grading.Submit`.

        A result raises RewardError if every episode so far was lost: then the environment is at fault.
        """
        found: list[Future[Verdict]] = [Future() for _ in samples]
        opened = [self._open.pop((sample.prompt.ordinal, index)) for index, sample in enumerate(samples)]
        for one in opened:
            if not one.standing.lost and not one.standing.rewards:
                one.lose("raised", _NO_ROOM.format(begins=one.begins))
        group_rewards = getattr(self._environment, "group_rewards", None)
        if group_rewards is None:
            self._farewell(opened)
            self._judge(opened, found)
            return found

        async def compare() -> None:
            self._judge(opened, found, await self._compared(group_rewards, opened))
            await self._closed(opened)

        def settle(_: Future[None]) -> None:
            for verdict in found:  # left without a verdict if the environment's code cancelled the task
                if not verdict.done():
                    reason = "the task that compares the rewards of a group was cancelled"
                    verdict.set_result(Verdict(correct=False, lost="raised", reason=reason))

        comparing = asyncio.run_coroutine_threadsafe(compare(), self._loop)
        comparing.add_done_callback(settle)
        self._farewells.append(comparing)
        return found

    def _farewell(self, opened: Sequence[_Open]) -> None:
        """Closes episodes on the event loop."""
        if opened:
            self._farewells.append(asyncio.run_coroutine_threadsafe(self._closed(opened), self._loop))

    def _judge(
        self,
        opened: Sequence[_Open],
        found: Sequence[Future[Verdict]],
        scores: Mapping[int, float] | None = None,
    ) -> None:
        """Settles the verdicts of the episodes of one prompt; `scores` are compared rewards, by the identity of the episode."""
        self._judged, self._prompts_judged = self._judged + len(opened), self._prompts_judged + 1
        self._all_lost = self._all_lost and all(one.standing.lost for one in opened)
        at_fault = self._all_lost and self._prompts_judged >= _PROMPTS and self._judged >= _EPISODES
        for one, verdict in zip(opened, found, strict=True):
            if at_fault:
                verdict.set_exception(
                    RewardError(
                        f"environment {self._name}: all {self._judged} episodes so far, of {self._prompts_judged} prompts, were lost, the last one: "
                        f"{one.standing.reason}; mend the environment"
                    )
                )
            else:
                verdict.set_result(_verdict(one.standing, None if scores is None else scores.get(id(one))))

    async def _compared(self, group_rewards: Callable[..., Any], opened: Sequence[_Open]) -> dict[int, float]:
        """Returns the compared rewards of the episodes that are not lost, by the identity of the episode. Without an answer all of them are lost."""
        for one in opened:
            await self._guarded(one, partial(self._catch_up, one))
        kept = [one for one in opened if not one.standing.lost]
        try:
            given = await self._called(group_rewards, [one.episode for one in kept])
            scores = checked_scores(given, count=len(kept))
            return {id(one): score for one, score in zip(kept, scores, strict=True)}
        except LostError as error:
            lost, reason = error.lost, str(error)
        except Exception as error:  # an answer may raise when it is looked at
            lost, reason = "raised", f"group_rewards' answer raises {type(error).__name__}"
        for one in kept:
            one.lose(lost, reason)
        return {}

    def close(self) -> None:
        """Closes the episodes, as far as that ends soon, and ends the thread; calls in progress are given up."""
        if not self._closing.is_set():
            self._farewell(list(self._open.values()))
            wait(self._farewells, timeout=_ENDING_S / 2)
            self._closing.set()
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_ENDING_S)
        self._on_close()

    def _turn(self, turn: DrawnTurn, number: int) -> Turn:
        return Turn(
            tokens=read_only(turn.tokens),
            logprobs=read_only(turn.logprobs),
            text=self._text_of(turn.tokens),
            finish_reason=turn.finish_reason,
            number=number,
        )

    async def _begun(self, opened: _Open) -> object:
        """Makes the episode, and calls its `start`, whose result it returns.

        Raises:
            LostError: the environment returns no episode, raises or takes too long.
        """
        prompt = opened.prompt
        seed = int(np.random.SeedSequence((self._seed, prompt.ordinal)).generate_state(1)[0])
        own = {name: copied(value) for name, value in prompt.row.items()}
        row = {"prompt": prompt.text, "answer": prompt.answer, **own}
        opened.episode = await self._called(self._environment.episode, row, seed)
        checked_episode(opened.episode)
        start = getattr(opened.episode, "start", None)
        return None if start is None else await self._called(start)

    async def _catch_up(self, opened: _Open) -> None:
        """Tells an episode of an earlier process the turns that it has not heard in this one.

        Raises:
            LostError: it raises or takes too long.
        """
        if opened.episode is None:
            await self._begun(opened)
        assert opened.episode is not None
        while opened.unheard:
            await self._called(opened.episode.step, opened.unheard[0])
            del opened.unheard[0]

    async def _closed(self, opened: Sequence[_Open]) -> None:
        """Calls the `close` of the episodes that have one; an error in it changes nothing any more."""

        async def close(one: _Open) -> None:
            with suppress(Exception):
                if callable(end := getattr(one.episode, "close", None)):
                    await self._called(end)

        await asyncio.gather(*map(close, opened))

    def _continuation(self, step: Step, *, after: Int[np.ndarray, " turn"] | None) -> Continuation:
        """Returns the tokens that a step puts before the next turn.

        Raises:
            RenderingError: they cannot be rendered.
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
        """Warns about an environment that holds the event loop. It counts its own looks instead of seconds, since a process may be suspended."""
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

    async def _guarded(self, opened: _Open, work: Callable[[], Coroutine[Any, Any, _Value]]) -> _Value | None:
        """Returns the result of `work`, or None if the episode is lost in it, or was lost before."""
        if opened.standing.lost:
            return None
        try:
            async with self._room:
                return await work()
        except LostError as error:
            opened.lose(error.lost, str(error))
        except RenderingError as error:
            opened.lose("raised", str(error))
        except asyncio.CancelledError:  # by the environment's code on this loop
            if self._closing.is_set():
                raise
            opened.lose("raised", "the environment's task was cancelled")
        except Exception as error:  # an answer may raise when it is looked at
            lost = answer_raises(error)
            opened.lose(lost.lost, str(lost))
        return None

    def _submit(
        self, opened: _Open, work: Callable[[], Coroutine[Any, Any, Continuation | None]]
    ) -> Future[Continuation | None]:
        answered: Future[Continuation | None] = Future()

        def settle(done: Future[Continuation | None]) -> None:
            if done.cancelled() or done.exception() is not None:  # before it began, by the environment's code
                opened.lose("raised", "the environment's task was cancelled")
                answered.set_result(None)
            else:
                answered.set_result(done.result())

        asyncio.run_coroutine_threadsafe(self._guarded(opened, work), self._loop).add_done_callback(settle)
        return answered

    async def _called(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the result of the environment's function, within the time limit; raises as `called`."""
        return await called(call, *arguments, timeout_s=self._timeout_s)


def _verdict(one: Standing, score: float | None = None) -> Verdict:
    if one.lost:
        return Verdict(correct=False, lost=one.lost, reason=one.reason, parts=one.metrics)
    # A compared reward replaces the rewards by turn, and counts as the reward of the last turn.
    rewards = one.rewards if score is None else (*[0.0] * len(one.rewards[1:]), score)
    correct = sum(rewards) > 0 if one.correct is None else one.correct
    return Verdict(correct=correct, score=sum(rewards), parts=one.metrics, turn_rewards=rewards)
