"""Loads reward functions by their name in a configuration, calls them, and checks their results."""

import asyncio
import hashlib
import importlib
import importlib.util
import inspect
import sys
import threading
import traceback
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, fields
from functools import partial
from itertools import chain
from operator import attrgetter
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo_jax.dapo.rollouts import Verdict, as_float, plain_scalar
from dapo_jax.health.stopping import StoppedError
from dapo_jax.hints import did_you_mean, nearest
from dapo_jax.rewards.adapters import ADAPTERS
from dapo_jax.rewards.graders import GRADERS, ROW_GRADERS, UNREAD_BY, exact_grader, math_verify
from dapo_jax.rewards.sample import Sample, handed_over, is_async, is_whole_group, name_of

Judged = Verdict | bool | float
"""Types that a reward function may return for one response."""
RewardFunction = (
    Callable[[Sample], Judged | Awaitable[Judged]]
    | Callable[[Sequence[Sample]], Sequence[Judged] | Awaitable[Sequence[Judged]]]
)
"""A user-defined reward function, sync or async. It grades one sample, or a whole group if it is decorated with `whole_group`."""
Rewards = RewardFunction | Sequence[tuple[str | RewardFunction, int | float]]
"""The `reward` argument of `train`: one function, or `(function or grader name, weight)` pairs whose weighted rewards are summed."""
GradeFunction = Callable[[Sequence[Sample]], list[Verdict]]
"""The function that `grade_group` calls with all responses to one prompt. It returns a verdict for each response."""
Submit = Callable[[Sequence[Sample]], Future[list[Verdict]]]
"""A function that submits the responses to one prompt for grading. It returns a future of the verdicts, in the order of the responses."""

_ABSENT = object()

_OF_THE_RUN = (KeyboardInterrupt, StoppedError)
"""Exceptions raised by Ctrl-C and by signals that stop the run. All other exceptions come from the user's code."""

MAX_SCORE = 1e30
"""Maximum magnitude of a score, and of a sum of scores. Training squares the differences between scores, and squares of larger differences could overflow."""


class RewardError(RuntimeError):
    """A reward function raised or did not return a verdict. The message names the function and the prompt."""


class NonFiniteScoreError(ValueError):
    """A reward function returned NaN, an infinity, or a number larger than `MAX_SCORE` in magnitude."""


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    """A loaded reward function, with the methods that call it."""

    function: Callable[..., Any]
    name: str
    """Name of the function in messages."""

    def __post_init__(self) -> None:
        names = list[str]()
        with suppress(TypeError, ValueError):  # some callables have no signature
            names += inspect.signature(self.function).parameters
        library = "trl" if "completions" in names else "verl" if "solution_str" in names else ""
        if library and len(names) > 1:
            remedy = f"write {library}:{self.name}, or pass rewards.adapters.{library}_reward(function)"
            raise ValueError(
                f"{self.name} is a reward function for {library}, with ({', '.join(names)}): {remedy}"
            )

    @property
    def is_async(self) -> bool:
        """Whether the function is async. An async function is called with `graded`, any other function with `grade`."""
        return is_async(self.function)

    @property
    def is_whole_group(self) -> bool:
        """Whether one call grades all responses to a prompt instead of a single response."""
        return is_whole_group(self.function)

    def calls(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """Splits a group's samples into calls: one call with all samples, or one call per sample."""
        return [samples] if self.is_whole_group else [[sample] for sample in samples]

    def grade(self, samples: Sequence[Sample]) -> list[Verdict]:
        """Returns the verdicts on a group's samples, in the order of the samples. Raises the exceptions of `grade_function`."""
        verdicts = []
        for call in self.calls(samples):
            try:
                result = self.function(self._argument(call))
            except (MemoryError, *_OF_THE_RUN):
                raise  # after a MemoryError, there may be no memory left to build an error message
            except BaseException as error:
                raise self._failure(error, call) from error
            verdicts += self._verdicts(result, call)
        return verdicts

    async def graded(self, call: Sequence[Sample]) -> list[Verdict]:
        """Calls an async function once, with the samples in `call`, and returns the verdicts on them."""
        try:
            result = await self.function(self._argument(call))
        except asyncio.CancelledError:
            raise  # a cancelled call is not a failure of the function
        except BaseException as error:  # even KeyboardInterrupt, as Ctrl-C only reaches the main thread
            raise self._failure(error, call) from error
        return self._verdicts(result, call)

    def _argument(self, call: Sequence[Sample]) -> Sample | list[Sample]:
        copies = handed_over(call)
        return copies if self.is_whole_group else copies[0]

    def _failure(self, error: BaseException, call: Sequence[Sample]) -> RewardError:
        frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
        where = f" ({Path(frames[-1][0]).name}, line {frames[-1][1]})" if len(frames) > 1 else ""
        return RewardError(
            f"reward function {self.name} raised {type(error).__name__}: {error!s:.2000}{where}; {_named(call)}"
        )

    def _verdicts(self, result: Any, call: Sequence[Sample]) -> list[Verdict]:
        try:
            if not self.is_whole_group:
                return [self._judged(result, call[0])]
            # Arrays from any library are accepted as lists.
            verdicts = result.tolist() if getattr(result, "ndim", None) == 1 else result
            is_list = isinstance(verdicts, list | tuple)
            if not is_list or len(verdicts) != len(call):
                shown = (
                    f"{len(verdicts)} verdicts" if is_list else f"{result!r:.200} ({type(result).__name__})"
                )
                raise ValueError(
                    f"reward function {self.name} returned {shown} for {len(call)} responses; a function marked whole_group must return "
                    "a list with a bool, a finite number or a Verdict for each response, in the same order"
                )
            return [self._judged(*pair) for pair in zip(verdicts, call, strict=True)]
        except ValueError as error:
            raise RewardError(f"{error}; {_named(call)}") from error

    def _judged(self, result: Any, sample: Sample) -> Verdict:
        try:
            return as_verdict(result, name=self.name)
        except NonFiniteScoreError as error:
            raise RewardError(f"{error}; {_named([sample])}; correct the function") from error


def joined(
    futures: Sequence[Future[list[Verdict]]],
    join: Callable[[list[list[Verdict]]], Any] = lambda verdicts: [*chain(*verdicts)],
) -> Future[Any]:
    """Returns a future whose result is `join` of the list of all futures' results. If a future raises or is cancelled, this future does the same."""
    whole: Future[Any] = Future()
    lock, waiting = threading.Lock(), len(futures)

    def done(_: Future[list[Verdict]]) -> None:
        nonlocal waiting
        with lock:
            waiting -= 1
            last = waiting == 0
        if last and any(future.cancelled() for future in futures):
            whole.cancel()
        elif last:
            try:
                whole.set_result(join([future.result() for future in futures]))
            except Exception as error:
                whole.set_exception(error)

    for future in futures:
        future.add_done_callback(done)
    return whole


def _named(call: Sequence[Sample]) -> str:
    """Returns a description of a call for messages, with its prompt, and its response or number of responses."""
    prompt = call[0].prompt
    responses = f"{len(call)} responses" if len(call) > 1 else f"response {call[0].response[:60]!r}"
    return f"prompt {prompt.ordinal} ({prompt.text[:60]!r}), {responses}"


def grade_function(spec: str | RewardFunction, *, answer_marker: str = "=") -> GradeFunction:
    """Returns a function that grades the responses to one prompt in this process. See `load_reward` for the arguments.

    Raises ValueError if the function cannot be loaded or is async. Grading raises RewardError if the function fails.
    """
    loaded = load_reward(spec, answer_marker=answer_marker)
    if loaded.is_async:
        raise ValueError(
            f"reward function {loaded.name} is async and needs an event loop: submit it to rewards.async_calls.AsyncCalls"
        )
    return loaded.grade


def load_reward(spec: str | RewardFunction, *, answer_marker: str = "=") -> LoadedReward:
    """Loads a reward function from its name (a built-in grader, `module:function` or `path/to/file.py:function`), or wraps a given function.

    Names of functions that were written for TRL or verl have the prefix `trl:` or `verl:` (see `rewards.adapters`). `answer_marker` is
    only used by the `exact` grader. Raises ValueError if the name is unknown or the function cannot be loaded.
    """
    if not isinstance(spec, str):
        return LoadedReward(function=spec, name=name_of(spec))
    if ":" in spec:
        kind, _, rest = spec.partition(":")
        function = ADAPTERS[kind](load_function(rest)) if kind in ADAPTERS else load_function(spec)
        return LoadedReward(function=function, name=spec)
    if spec in ROW_GRADERS:
        return LoadedReward(function=ROW_GRADERS[spec], name=spec)
    if spec not in GRADERS:
        hint = did_you_mean(spec, [*GRADERS, *ROW_GRADERS])
        raise ValueError(
            f"no grader is named {spec!r}; {hint} (for your own function, write module:function or path/to/file.py:function)"
        )
    if spec == "math_verify":
        math_verify()  # raises ValueError if the package is missing
    grader = exact_grader(answer_marker) if spec == "exact" else GRADERS[spec]
    said = attrgetter("after_thoughts" if spec in UNREAD_BY else "response")
    return LoadedReward(function=lambda sample: grader(said(sample), sample.answer), name=spec)


def as_verdict(result: Any, *, name: str) -> Verdict:
    """Converts the result of the reward function `name` to a verdict. NumPy scalars and 0-dimensional arrays are accepted, too.

    A `Verdict` is copied, so the function may modify its own object later. A bool becomes a verdict without a score, so the
    configured rewards for correct and incorrect responses apply. A number is a score that becomes the reward, and a score above 0 is correct.

    Raises:
        NonFiniteScoreError: the score is NaN, infinite or larger than `MAX_SCORE` in magnitude. This is a subclass of ValueError.
        ValueError: the result has any other type, or is a lost verdict that is marked as correct.
    """
    if isinstance(result, Verdict):
        verdict = Verdict(**{field.name: getattr(result, field.name) for field in fields(Verdict)})
        if verdict.correct and verdict.lost and not verdict.parts:
            raise ValueError(
                f"reward function {name} returned a verdict with correct=True and lost={verdict.lost!r}; a lost verdict counts as wrong, "
                "so set only one of the two"
            )
        for field, score in {"score": verdict.score or 0.0, **verdict.parts}.items():
            _check_size(score, f"reward function {name} returned a verdict with {field}")
        return verdict
    value = plain_scalar(result)
    if isinstance(value, bool):
        return Verdict(correct=value)
    try:
        score = as_float(value)
    except ValueError:
        raise ValueError(
            f"reward function {name} returned {result!r:.200} ({type(result).__name__}); it must return a bool, a finite "
            "number or a Verdict"
        ) from None
    _check_size(score, f"reward function {name} returned")
    return Verdict(correct=score > 0, score=score)


def _check_size(score: float, source: str) -> None:
    if not abs(score) <= MAX_SCORE:  # also true for NaN
        raise NonFiniteScoreError(
            f"{source} {score:g}; a score must be finite and at most {MAX_SCORE:g} in magnitude"
        )


def load_function(spec: str) -> Callable[..., Any]:
    """Returns the function named by `module:function` or `path/to/file.py:function`.

    Raises:
        ValueError: the file, module or function does not exist, the name is not callable, or the module fails to import.
    """
    source, _, name = spec.rpartition(":")
    if not source or not name:
        raise ValueError(f"{spec!r} must have the form module:function or path/to/file.py:function")
    if source.endswith(".py"):
        module = _load_file(Path(source).expanduser(), spec)
    else:
        remedy = "; a module must be on Python's import path, and a file must be written as path/to/file.py:function"
        module = loading(spec, f"the module {source!r}", lambda: importlib.import_module(source), remedy)
    function = loading(spec, source, lambda: getattr(module, name, _ABSENT))
    if function is _ABSENT:
        similar = nearest(name, [known for known in vars(module) if known[0] != "_"])
        hint = f"; did you mean {similar[0]!r}?" if similar else ""
        raise ValueError(f"{spec}: {source} has no {name!r}{hint}")
    if not callable(function):
        raise ValueError(f"{spec}: {name!r} is of type {type(function).__name__}, which cannot be called")
    return function


def loading(spec: str, source: str, load: Callable[[], Any], remedy: str = "") -> Any:
    """Returns the result of `load()`, which runs user code. If the code raises or calls sys.exit, raises ValueError.

    The message names `spec` (the configured value) and `source` (the file, module or call that ran), and ends with `remedy`.
    """
    try:
        return load()
    except _OF_THE_RUN:
        raise
    except SystemExit as error:
        raise ValueError(
            f"{spec}: {source} calls sys.exit({error.code!r:.200}) while it is loaded; put code that runs as a program after "
            '`if __name__ == "__main__":`'
        ) from error
    except BaseException as error:  # some exceptions, such as pytest's Skipped, do not derive from Exception
        raise ValueError(f"{spec}: {source} fails with {type(error).__name__}: {error}{remedy}") from error


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{spec}: there is no file {path} (current folder: {Path.cwd()})")
    # The module's name includes a hash of the path, so two files with the same name become two modules.
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    name = f"dapo_jax_file_{path.stem}_{digest}"
    file = importlib.util.spec_from_file_location(name, path)
    assert file is not None
    assert file.loader is not None
    module = importlib.util.module_from_spec(file)
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.append(folder)  # so that the file can import files next to it
    sys.modules[name] = module  # dataclasses look up their module in sys.modules while the file runs
    try:
        loading(spec, str(path), partial(file.loader.exec_module, module))
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module
