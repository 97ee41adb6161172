"""Runs episodes concurrently on one event loop, enforces their limits and determines their rewards.

The loop runs in a thread, in parallel with sampling. If an episode hangs, raises or returns invalid values, only this episode is lost.
"""

import asyncio
import math
import sys
import threading
import traceback
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
from jaxtyping import Int

from dapo_jax.config import ConfigError
from dapo_jax.dapo.rollouts import Continuation, DrawnTurn, Prompt, Standing, Verdict
from dapo_jax.environments.calls import (
    NOT_REPEATED,
    LostError,
    begun,
    called,
    checked_episode,
    checked_scores,
    checked_step,
    ended,
    lost_by,
    place_of,
)
from dapo_jax.environments.protocol import Context, Environment, Step, Turn
from dapo_jax.environments.rendering import Rendering
from dapo_jax.rewards.async_calls import ENDING_S, EventLoop
from dapo_jax.rewards.functions import RewardError, Submit
from dapo_jax.rewards.sample import Sample, copied, read_only

_Value = TypeVar("_Value")

HELD_S = 10.0
"""Number of seconds that an environment may block the event loop before a warning is printed."""

_PROMPTS, _EPISODES = 4, 32
"""If every episode so far was lost, the run stops, but only after at least this many prompts and episodes."""

_NO_ROOM = (
    "the episode begins{begins}, which leaves no room for a turn: an episode has at most sampling.max_response_tokens tokens after the prompt (or "
    "environment.episode_tokens), and a Context has at most data.max_prompt_tokens + sampling.max_response_tokens; begin with fewer tokens, or raise these"
)

_NO_REWARD = (
    "no reward: the episode ended, and neither its environment nor a grader gave a reward: return it, post it to /v1/reward, or set reward.grader to a grader "
    "other than the default"
)


@dataclass
class _Open:
    """An episode and its state."""

    prompt: Prompt
    standing: Standing = field(default_factory=Standing)
    episode: Any = None
    """The environment's episode object, or None if the episode has not begun in this process."""
    unheard: list[Turn] = field(default_factory=list)
    """Turns from an earlier process that must be replayed to the episode before its next turn."""
    turns: list[tuple[Continuation | None, Int[np.ndarray, " turn"]]] = field(default_factory=list)
    """The tokens before each turn, and the tokens of the turn."""
    score: float | None = None
    """The episode's reward from `group_rewards`, if the environment has this method."""
    verdict: Verdict | None = None
    """The grader's verdict on the last turn, if the environment left the reward to the grader."""
    every: bool = False
    """Whether the episode was lost for a reason that loses every episode."""
    begins: str = ""
    """Phrase for an error message, with the number of tokens before the first turn. Empty if this process does not know the number."""

    def lose(self, error: LostError) -> None:
        """Ends the episode without a reward."""
        self.standing.lost, self.standing.reason, self.every = error.lost, str(error), error.every

    def take(self, step: Step) -> None:
        """Adds the results of the last turn. The reward is 0 while the grader decides about it."""
        standing, last = self.standing, len(self.standing.rewards) - 1
        standing.rewards = (*standing.rewards[:-1], standing.rewards[-1] + (step.reward or 0.0))
        standing.metrics = {**standing.metrics, **step.metrics}
        standing.correct = standing.correct if step.correct is None else step.correct
        standing.over, standing.ungraded = step.done, step.reward is None
        if step.forget:
            standing.forgotten = (*standing.forgotten, last)

    def context(self, number: int) -> Int[np.ndarray, " context"]:
        """Returns the tokens of the context at the end of a turn."""
        parts = list[np.ndarray]()
        for before, turn in reversed(self.turns[: number + 1]):
            parts = [*([] if before is None else [before.tokens]), turn, *parts]
            if before is not None and before.new_context:
                return np.concatenate(parts)
        return np.concatenate([self.prompt.tokens, *parts])


class Episodes(AbstractContextManager["Episodes"]):
    """The episodes of a run, used by the sampler and for grading. A context manager that stops the thread on exit."""

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
        grade: Submit | None = None,
        on_close: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts the thread.

        Args:
            environment: creates the episodes.
            rendering: tokenizes the values that episodes append.
            text_of: decodes a turn's tokens to text, up to the stop string.
            seed: the run's seed. The seed of an episode depends on this seed and on the prompt's ordinal.
            max_turns, turn_tokens, episode_tokens: limits of an episode. 0 tokens: the limit of the episode, or of a response, applies.
            timeout_s: time limit of one call in seconds, not including the wait for other calls to finish.
            calls: maximum number of concurrent calls; further calls wait.
            name: the environment's name in error messages.
            grade: grades the last turn of episodes whose environment leaves the reward to the grader. Without it, these episodes are lost.
            on_close: called after the thread has ended.
        """
        self._environment: Any = environment
        self._rendering, self._text_of, self._seed = rendering, text_of, seed
        self.max_turns, self.turn_tokens, self.episode_tokens = max_turns, turn_tokens, episode_tokens
        self._name, self._grade, self._on_close = name, grade, on_close
        self._called = partial(called, timeout_s=timeout_s)
        self._judged, self._prompts_judged, self._all_lost = 0, 0, True
        self._open: dict[tuple[int, int], _Open] = {}
        self._room = asyncio.Semaphore(calls)
        self._closings = set[Future[None]]()
        """The groups whose episodes are being closed."""
        self._loop = EventLoop("a task of an environment raised; the episodes continue")
        threading.Thread(target=self._watch, daemon=True, name="environments watch").start()

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, prompt: Prompt, index: int) -> Future[Continuation | None]:
        """Begins an episode. The future returns the tokens to insert before the first turn, or None if the episode was lost."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt)

        async def begin() -> Continuation:
            before = self._continuation(opened, await self._begun(opened), 0)
            opened.begins = f" with {len(before.tokens)} tokens"
            return before

        return self._submit(opened, begin)

    def check(self, prompt: Prompt, *, limit: int) -> str:
        """Begins an episode of at most `limit` tokens and closes it. Returns the reason if it was lost or has no room for a turn. Raises ConfigError if the
        chat template would lose every episode, for example because it has no place for tools."""
        with self.kept_separate():
            before = self.start(prompt, 0).result()
            opened = self._open[prompt.ordinal, 0]
        if opened.every:
            raise ConfigError(f"environment {self._name}: {opened.standing.reason}")
        full = before is not None and len(before.tokens) >= limit
        return _NO_ROOM.format(begins=opened.begins) if full else opened.standing.reason

    def reopen(self, prompt: Prompt, index: int, turns: Sequence[DrawnTurn], standing: Standing) -> None:
        """Reopens an episode that an earlier process started. `turns` are the answered turns, which are replayed before the next turn."""
        opened = self._open[prompt.ordinal, index] = _Open(prompt, replace(standing))
        opened.unheard = [self._turn(opened, turn) for turn in turns]

    def standing(self, prompt: Prompt, index: int) -> Standing:
        """Returns a copy of an episode's rewards, metrics and correctness so far."""
        return replace(self._open[prompt.ordinal, index].standing)

    @contextmanager
    def kept_separate(self) -> Iterator[None]:
        """Context manager, for example for an evaluation. Episodes inside are kept separate from outer episodes with the same prompt ordinals."""
        opened, self._open = self._open, {}
        try:
            yield
        finally:
            if self._open:  # the evaluation was interrupted
                self._soon(self._closed([*self._open.values()]))
            self._open = opened

    def step(self, prompt: Prompt, index: int, turn: DrawnTurn) -> Future[Continuation | None]:
        """Sends a turn to the episode. The returned future resolves to the tokens to insert before the next turn, or to None if the episode has ended."""
        opened = self._open[prompt.ordinal, index]
        standing = opened.standing
        policy_turn = self._turn(opened, turn)
        standing.rewards = (*standing.rewards, 0.0)

        async def answer() -> Continuation | None:
            await self._catch_up(opened)
            answered = await self._called(opened.episode.step, policy_turn)
            step, follows = checked_step(answered), _follows(answered)
            opened.take(step)
            return None if step.done else self._continuation(opened, follows, policy_turn.number + 1)

        return self._submit(opened, answer)

    def verdicts(self, samples: Sequence[Sample]) -> Future[list[Verdict]]:
        """Returns the verdicts on the episodes of one prompt, in the order of their indices.

        If every episode of the run so far was lost, the environment must be at fault, so the future raises RewardError.
        """
        verdicts: Future[list[Verdict]] = Future()
        opened = [self._open.pop((sample.prompt.ordinal, index)) for index, sample in enumerate(samples)]
        for state in opened:
            if not state.standing.lost and not state.standing.rewards:
                state.lose(LostError(_NO_ROOM.format(begins=state.begins)))
        group_rewards = getattr(self._environment, "group_rewards", None)
        finish = getattr(self._environment, "finish", None)
        cut = [state for state in opened if finish is not None and not state.standing.over]
        ungraded = any(state.standing.ungraded for state in opened)
        if group_rewards is None and not cut and not ungraded:
            self._judge(opened, verdicts)
            self._soon(self._closed(opened))
            return verdicts

        async def compare() -> None:
            await asyncio.gather(*(self._guarded(state, partial(self._finish, state)) for state in cut))
            await self._graded(opened, samples)
            if group_rewards is not None:
                await self._compare(group_rewards, opened)
            self._judge(opened, verdicts)
            await self._closed(opened)

        def settle(ended: Future[None]) -> None:
            if verdicts.done():
                return
            if not ended.cancelled() and isinstance(error := ended.exception(), RewardError):
                verdicts.set_exception(error)
            else:  # environment code cancelled the task
                reason = "the task that compares the rewards of a group was cancelled"
                verdicts.set_result([Verdict(correct=False, lost="raised", reason=reason)] * len(opened))

        self._soon(compare()).add_done_callback(settle)
        return verdicts

    def _soon(self, closing: Coroutine[Any, Any, None]) -> Future[None]:
        """Schedules a coroutine that closes episodes when it ends. `Episodes.close` waits for this coroutine."""
        self._closings.add(closed := self._loop.submit(closing))
        closed.add_done_callback(self._closings.discard)
        return closed

    def _judge(self, opened: Sequence[_Open], verdicts: Future[list[Verdict]]) -> None:
        """Sets the result of the future `verdicts` to the verdicts on the episodes of one prompt."""
        self._judged, self._prompts_judged = self._judged + len(opened), self._prompts_judged + 1
        self._all_lost = self._all_lost and all(state.standing.lost for state in opened)
        if self._all_lost and self._prompts_judged >= _PROMPTS and self._judged >= _EPISODES:
            verdicts.set_exception(
                RewardError(
                    f"environment {self._name}: all {self._judged} episodes so far, of {self._prompts_judged} prompts, were lost, the last one "
                    f"because: {opened[-1].standing.reason}; fix the environment"
                )
            )
        else:
            verdicts.set_result([_verdict(state) for state in opened])

    async def _finish(self, opened: _Open) -> None:
        """Ends an episode that was cut off, and adds the reward that its environment returns."""
        await self._catch_up(opened)
        reason = "max_turns" if len(opened.turns) >= self.max_turns else "context_length_exceeded"
        opened.take(checked_step(await self._called(self._environment.finish, opened.episode, reason)))

    async def _graded(self, opened: Sequence[_Open], samples: Sequence[Sample]) -> None:
        """Grades the last turns of the episodes whose environment left the reward to the grader. Raises RewardError if the grader fails."""
        answers = dict[int, Sample]()
        for at, state in enumerate(opened):
            if state.standing.ungraded and not state.standing.lost and self._grade is None:
                state.lose(LostError(_NO_REWARD))
            elif state.standing.ungraded and not state.standing.lost:
                tokens = state.turns[-1][1]
                answers[at] = replace(samples[at], response=self._text_of(tokens), tokens=tokens)
        if answers and self._grade is not None:
            verdicts = await asyncio.wrap_future(self._grade([*answers.values()]))
            for at, verdict in zip(answers, verdicts, strict=True):
                opened[at].verdict = verdict

    async def _compare(self, group_rewards: Callable[..., Any], opened: Sequence[_Open]) -> None:
        """Sets the rewards from `group_rewards` for the episodes that are not lost. If the call fails, these episodes are all lost."""
        for state in opened:
            await self._guarded(state, partial(self._catch_up, state))
        kept = [state for state in opened if not state.standing.lost]
        try:
            rewards = await self._called(group_rewards, [state.episode for state in kept])
            for state, score in zip(kept, checked_scores(rewards, count=len(kept)), strict=True):
                state.score = score
        except Exception as error:
            for state in kept:
                state.lose(lost_by(error))

    def close(self) -> None:
        """Closes the open episodes and ends the thread. Waits only a few seconds; calls that are still in progress are abandoned."""
        if not self._loop.closing.is_set():
            self._soon(self._closed([*self._open.values()]))
            wait([*self._closings], timeout=ENDING_S / 2)
        self._loop.close(ENDING_S / 2)
        self._on_close()

    def _turn(self, opened: _Open, turn: DrawnTurn) -> Turn:
        """Adds a turn to an episode, and returns it in the form that its environment receives."""
        tokens, tokenizer = turn.record.ids, self._rendering.tokenizer
        opened.turns.append((turn.before, tokens))
        number = len(opened.turns) - 1
        text, marked = self._text_of(tokens), getattr(tokenizer, "marked_text", tokenizer.decode)(tokens)
        rest = tokenizer.decode(tokens)[len(text) :]
        return Turn(
            tokens=read_only(tokens),
            logprobs=read_only(turn.record.logprobs),
            text=text,
            marked_text=self._rendering.opening + marked.removesuffix(rest),
            stop_text=rest,
            finish_reason=turn.finish_reason,
            number=number,
            context_tokens=len(opened.context(number)) - len(tokens),
        )

    async def _begun(self, opened: _Open) -> object:
        """Creates the episode, calls its `start` and returns the result. Raises LostError if either call fails."""
        prompt = opened.prompt
        seed = int(np.random.SeedSequence((self._seed, prompt.ordinal)).generate_state(1)[0])
        row = {"prompt": prompt.text, "answer": prompt.answer, **copied(dict(prompt.row))}
        opened.episode = checked_episode(await self._called(self._environment.episode, row, seed))
        return await begun(opened.episode, self._called)

    async def _catch_up(self, opened: _Open) -> None:
        """If an earlier process started the episode, starts it again in this process and replays its turns. Raises LostError if an answer is not repeated."""
        if opened.episode is None:
            self._check_repeats(opened, await self._begun(opened), 0)
        assert opened.episode is not None
        while opened.unheard:
            turn = opened.unheard[0]
            answered = await self._called(opened.episode.step, turn)
            checked_step(answered)
            self._check_repeats(opened, _follows(answered), turn.number + 1)
            del opened.unheard[0]

    def _check_repeats(self, opened: _Open, follows: Any, number: int) -> None:
        """Raises LostError if a replayed answer does not give the tokens before turn `number`, which was sampled after the original answer."""
        before = opened.turns[number][0] if number < len(opened.turns) else None
        if before is None:
            return
        again = self._continuation(opened, follows, number)
        if again.new_context != before.new_context or not np.array_equal(again.tokens, before.tokens):
            raise LostError(NOT_REPEATED.format(number))

    async def _closed(self, opened: Sequence[_Open]) -> None:
        """Calls the `close` method of each episode that has one. Errors are ignored."""

        async def close(state: _Open) -> None:
            with suppress(Exception):
                await ended(state.episode, self._called)

        await asyncio.gather(*map(close, opened))

    def _continuation(self, opened: _Open, follows: Any, number: int) -> Continuation:
        """Renders an appended value or a new context before turn `number` as tokens. Raises LostError if it cannot be rendered."""
        turns, last = opened.turns[:number], number - 1
        if not isinstance(follows, Context):
            return Continuation(self._rendering.ids(follows, after=turns[-1][1] if turns else None))
        after, limit = follows.after, follows.max_tokens
        for name, value, least, most in (("after", after, -1, last), ("max_tokens", limit, 0, math.inf)):
            if value is not None and not (type(value) is int and least <= value <= most):
                raise LostError(
                    f"a Context has {name}={value!r:.80}; it must be an integer from {least} to {most}"
                )
        if after is None or after < 0:
            ids = self._rendering.context_ids(follows)
            is_prompt = after is not None and not turns and np.array_equal(ids, opened.prompt.tokens)
            return Continuation(ids[:0] if is_prompt else ids, new_context=not is_prompt, limit=limit)
        ids = self._rendering.ids(follows.contents, after=turns[after][1])
        if after == last:
            return Continuation(ids, limit=limit)
        return Continuation(np.concatenate([opened.context(after), ids]), new_context=True, limit=limit)

    def _watch(self) -> None:
        """Prints a warning each time an environment blocks the event loop."""
        while not self._loop.closing.wait(HELD_S / 10):
            answered = threading.Event()
            with suppress(RuntimeError):  # the loop was closed
                self._loop.loop.call_soon_threadsafe(answered.set)
            # Waits twice: if the process was suspended, the loop answers during the second wait.
            if answered.wait(HELD_S) or answered.wait(HELD_S / 10) or self._loop.closing.is_set():
                continue
            frame = sys._current_frames().get(self._loop.thread.ident or 0)
            place = "" if frame is None else place_of(reversed([*traceback.walk_stack(frame)]))
            with suppress(OSError, ValueError, AttributeError):  # stderr may be closed or missing
                print(
                    f"environment {self._name}: it has blocked the event loop for {HELD_S:g} s{place}, so no other episode can continue: await slow "
                    "operations, define blocking functions without `async`, or set workers.count=1 or more",
                    file=sys.stderr,
                    flush=True,
                )
            answered.wait()

    async def _guarded(self, opened: _Open, work: Callable[[], Coroutine[Any, Any, _Value]]) -> _Value | None:
        """Returns the result of `work`, or None if the episode was already lost or is lost during `work`."""
        if opened.standing.lost:
            return None
        try:
            async with self._room:
                return await work()
        except (Exception, asyncio.CancelledError) as error:  # environment code may cancel tasks
            if isinstance(error, asyncio.CancelledError) and self._loop.closing.is_set():
                raise
            opened.lose(lost_by(error))
        return None

    def _submit(
        self, opened: _Open, work: Callable[[], Coroutine[Any, Any, Continuation | None]]
    ) -> Future[Continuation | None]:
        answered: Future[Continuation | None] = Future()

        def settle(done: Future[Continuation | None]) -> None:
            if done.cancelled() or done.exception() is not None:  # environment code cancelled it
                opened.lose(lost_by(asyncio.CancelledError()))
                answered.set_result(None)
            else:
                answered.set_result(done.result())

        self._loop.submit(self._guarded(opened, work)).add_done_callback(settle)
        return answered


def _follows(step: Step) -> Any:
    return step.append if step.context is None else step.context


def _verdict(opened: _Open) -> Verdict:
    standing, score = opened.standing, opened.score
    if standing.lost:
        return Verdict(correct=False, lost=standing.lost, reason=standing.reason, parts=standing.metrics)
    if (graded := opened.verdict) is not None:
        return replace(graded, parts={**standing.metrics, **graded.parts}, forgotten=standing.forgotten)
    # A reward from `group_rewards` replaces the rewards of the turns, and is assigned to the last turn.
    rewards = standing.rewards if score is None else (*[0.0] * len(standing.rewards[1:]), score)
    correct = sum(rewards) > 0 if standing.correct is None else standing.correct
    of_turns = {"turn_rewards": rewards, "forgotten": standing.forgotten}
    return Verdict(correct=correct, score=sum(rewards), parts=standing.metrics, **of_turns)
