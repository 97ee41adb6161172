"""Rewards as functions: what they are handed, what they may return, how they are found by name."""

import ast
import asyncio
import contextlib
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import partial
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

from dapo_jax.dapo.rollouts import Verdict, as_float, plain_scalar
from dapo_jax.health.stopping import StoppedError
from dapo_jax.nearest import nearest
from dapo_jax.rewards.adapters import ADAPTERS
from dapo_jax.rewards.graders import GRADERS, exact_grader
from dapo_jax.rewards.sample import Sample, handed_over
from dapo_jax.rewards.signatures import is_async, is_whole_group, name_of

Judged = Verdict | bool | float
"""A reward function's result for one response."""
RewardFunction = (
    Callable[[Sample], Judged | Awaitable[Judged]]
    | Callable[[Sequence[Sample]], Sequence[Judged] | Awaitable[Sequence[Judged]]]
)
"""A function that a user writes: of one sample or, marked by `whole_group`, of all of a group; with `def` or with `async def`."""
Rewards = RewardFunction | Sequence[tuple[str | RewardFunction, int | float]]
"""The values that `train` takes as `reward`: a function, or pairs of a function or a grader's name and its weight, which are summed."""
GradeFunction = Callable[[Sequence[Sample]], list[Verdict]]
"""The function that `grade_group` calls: all responses to one prompt in, a verdict for each out."""

_NEEDS_A_ROW = {"reasoning_gym": "dapo_jax.rewards.reasoning_gym_grader:grade"}
"""Graders by name that need more than the text and the answer; loaded when they are asked for."""

_ABSENT = object()

_OF_THE_RUN = (KeyboardInterrupt, StoppedError)
"""Raised by Ctrl-C and by signals that stop the run, while a user's code runs in the main thread. All else comes from that code."""

_FILE = "dapo_jax_file_"
"""The start of the module names of loaded files."""

MAX_SCORE = 1e30
"""The largest score, and the largest sum of several: beyond it, differences and their squares would leave the floats of training."""


class RewardError(RuntimeError):
    """A reward function raised, or returned what is no verdict; the message names the function and the place."""


class NonFiniteScoreError(ValueError):
    """A reward function returned NaN, an infinity, or a number beyond `MAX_SCORE`."""


@dataclass(frozen=True, kw_only=True)
class LoadedReward:
    """A reward function that was found, and how it is called."""

    function: Callable[..., Any]
    name: str
    """Its name in messages."""
    on_nonfinite: str = "error"
    """The outcome of a score that is NaN, infinite or beyond `MAX_SCORE`: error, or lost, which loses that response's verdict alone."""
    shipped: bool = False
    """True for a grader of this library: it changes no sample and returns a valid `Verdict`, so nothing is copied or checked."""

    @property
    def is_async(self) -> bool:
        """True if it is to be awaited: then `graded` grades, else `grade`."""
        return is_async(self.function)

    @property
    def is_whole_group(self) -> bool:
        """True if one call takes all responses to a prompt, else one."""
        return is_whole_group(self.function)

    def calls(self, samples: Sequence[Sample]) -> list[Sequence[Sample]]:
        """The samples of a group, parted as the function takes them."""
        return calls_of(samples, whole_group=self.is_whole_group)

    def grade(self, samples: Sequence[Sample]) -> list[Verdict]:
        """The verdicts on the samples of a group, in their order; see `grade_function` for what is raised."""
        try:
            return [verdict for call in self.calls(samples) for verdict in self._graded(call)]
        except (RewardError, MemoryError, *_OF_THE_RUN):
            raise
        except BaseException as error:  # of what the function left behind, such as a tracer
            raise self._failure(error, samples) from error

    async def graded(self, call: Sequence[Sample]) -> list[Verdict]:
        """The verdicts on the samples of one call of an async function."""
        try:
            result = await self.function(self._argument(call))
        except asyncio.CancelledError:
            raise  # of the event loop's, whose business it is
        except BaseException as error:  # KeyboardInterrupt among them: nobody's Ctrl-C comes to this thread
            raise self._failure(error, call) from error
        return self._verdicts(result, call)

    def _graded(self, call: Sequence[Sample]) -> list[Verdict]:
        try:
            result = self.function(self._argument(call))
        except (MemoryError, *_OF_THE_RUN):
            raise  # no memory is left for a message
        except BaseException as error:
            raise self._failure(error, call) from error
        return self._verdicts(result, call)

    def _argument(self, call: Sequence[Sample]) -> Sample | list[Sample]:
        own = list(call) if self.shipped else handed_over(call)
        return own if self.is_whole_group else own[0]

    def _failure(self, error: BaseException, call: Sequence[Sample]) -> RewardError:
        return RewardError(
            f"reward function {self.name} raised {type(error).__name__}: {_said(error):.2000}{_where(error)}; {_named(call)}"
        )

    def _verdicts(self, result: Any, call: Sequence[Sample]) -> list[Verdict]:
        try:
            return self._checked(result, call)
        except (RewardError, *_OF_THE_RUN):
            raise
        except ValueError as error:
            raise RewardError(f"{error}; {_named(call)}") from error
        except BaseException as error:  # of the result's own methods
            raise RewardError(
                f"reward function {self.name} returned a {type(result).__name__} that cannot be read: {type(error).__name__}: "
                f"{_said(error):.2000}; {_named(call)}"
            ) from error

    def _checked(self, result: Any, call: Sequence[Sample]) -> list[Verdict]:
        if not self.is_whole_group:
            return [self._judged(result, call[0])]
        found = result.tolist() if getattr(result, "ndim", None) == 1 else result  # an array of any library
        if not isinstance(found, list | tuple):
            raise ValueError(
                f"reward function {self.name} returned {result!r:.200} ({type(result).__name__}) for {len(call)} responses; one "
                "that takes a whole group must return a list, with a bool, a finite number or a Verdict for each"
            )
        if len(found) != len(call):
            raise ValueError(
                f"reward function {self.name} returned {len(found)} verdicts for {len(call)} responses; it must return one "
                "for each, in their order"
            )
        # A list of the function's own class may give another number than its length, or never end.
        held = list(islice(found, len(call) + 1))
        if len(held) != len(call):
            raise ValueError(
                f"reward function {self.name} returned a {type(found).__name__} whose length is {len(call)} and which gives "
                f"{'more' if len(held) > len(call) else len(held)}; it must return a plain list, with one verdict for each response"
            )
        return [self._judged(*pair) for pair in zip(held, call, strict=True)]

    def _judged(self, result: Any, sample: Sample) -> Verdict:
        if self.shipped:
            return result
        try:
            return as_verdict(result, name=self.name)
        except NonFiniteScoreError as error:
            if self.on_nonfinite == "lost":
                return Verdict(correct=False, reason=str(error), lost="nonfinite")
            raise RewardError(
                f"{error}; {_named([sample])}; mend it, or let such responses count as wrong: reward.on_nonfinite=lost"
            ) from error


def _named(call: Sequence[Sample]) -> str:
    """Prompt and response, or the number of responses, that a call was about."""
    prompt = call[0].prompt
    what = f"{len(call)} responses" if len(call) > 1 else f"response {call[0].response[:60]!r}"
    return f"prompt {prompt.ordinal} ({prompt.text[:60]!r}), {what}"


def _said(error: BaseException) -> str:
    """An exception's text; a user's may fail to give one."""
    try:
        return str(error)
    except _OF_THE_RUN:
        raise
    except BaseException as second:
        return f"(its text raises {type(second).__name__})"


def _where(error: BaseException) -> str:
    """The last line of the user's that the exception went through."""
    frames = [(frame.f_code.co_filename, line) for frame, line in traceback.walk_tb(error.__traceback__)]
    if len(frames) < 2:  # this module's alone
        return ""
    file, line = frames[-1]
    return f" ({Path(file).name}, line {line})"


def calls_of(samples: Sequence[Sample], *, whole_group: bool) -> list[Sequence[Sample]]:
    """The samples of a group as calls: all of them in one, or each in its own."""
    return [samples] if whole_group else [[sample] for sample in samples]


def grade_function(
    spec: str | RewardFunction, *, answer_marker: str = "=", on_nonfinite: str = "error"
) -> GradeFunction:
    """The function that grades the responses to one prompt in this process; `load_reward` says what it is made from.

    Raises:
        ValueError: the name is unknown, or the function cannot be loaded or is async.
        RewardError: when grading: the function raised, or returned what is no verdict, or not one for each response.
    """
    loaded = load_reward(spec, answer_marker=answer_marker, on_nonfinite=on_nonfinite)
    if loaded.is_async:
        raise ValueError(
            f"reward function {loaded.name} is async and needs an event loop: submit to rewards.async_calls.AsyncCalls"
        )
    return loaded.grade


def load_reward(
    spec: str | RewardFunction, *, answer_marker: str = "=", on_nonfinite: str = "error"
) -> LoadedReward:
    """A reward function: from a name in `GRADERS`, from `module:function`, from a file, or as given.

    `trl:` or `verl:` before `module:function` or a file says for which trainer it was written, see `rewards.adapters`.

    Args:
        spec: the value of `reward.grader`, or a function.
        answer_marker: for the grader `exact` only, see `exact_grader`.
        on_nonfinite: what a score that is NaN, infinite or beyond `MAX_SCORE` comes to: `error`, which names it, or `lost`: the
            response has no verdict and counts as wrong, the others of its group keep theirs.

    Raises:
        ValueError: the name is unknown or the function cannot be loaded.
    """
    if not isinstance(spec, str):
        return LoadedReward(function=spec, name=name_of(spec), on_nonfinite=on_nonfinite)
    place = _NEEDS_A_ROW.get(spec, spec)
    kind, _, rest = place.partition(":")
    if kind in ADAPTERS:
        return LoadedReward(
            function=ADAPTERS[kind](load_function(rest)), name=spec, on_nonfinite=on_nonfinite
        )
    if ":" in place:
        return LoadedReward(function=load_function(place), name=spec, on_nonfinite=on_nonfinite)
    if spec not in GRADERS:
        names = [*GRADERS, *_NEEDS_A_ROW]
        near = nearest(spec, names)
        hint = f"did you mean {near[0]!r}?" if near else f"there are {sorted(names)}"
        raise ValueError(
            f"no grader is named {spec!r}; {hint} An own one is module:function or path/to/file.py:function"
        )
    grader = exact_grader(answer_marker) if spec == "exact" else GRADERS[spec]
    return LoadedReward(
        function=lambda sample: grader(sample.response, sample.answer), name=spec, shipped=True
    )


def as_verdict(result: Any, *, name: str) -> Verdict:
    """The verdict that a reward function's result means; numpy scalars and arrays without dimensions count as Python's.

    A `Verdict` is copied and its fields are checked, since a subclass may have set them without; what else a subclass holds is left
    out. A bool says correct or not, and the configured rewards apply. A number, fractions and decimals among them, is a score that
    becomes the reward as it is; it counts as correct if it is above 0.

    Raises:
        NonFiniteScoreError: a ValueError: NaN, an infinity or a number beyond `MAX_SCORE`; `name` is the function that returned it.
        ValueError: anything else.
    """
    if isinstance(result, Verdict):
        return _checked_copy(result, name)
    value = plain_scalar(result)
    if isinstance(value, bool):
        return Verdict(correct=value)
    try:
        score = as_float(value)
    except ValueError:
        raise ValueError(_no_verdict(result, name)) from None
    _check_size(score, f"reward function {name} returned", "a score must be a finite number")
    return Verdict(correct=score > 0, score=score)


def _checked_copy(given: Verdict, name: str) -> Verdict:
    try:
        verdict = Verdict(**{field.name: getattr(given, field.name) for field in fields(Verdict)})
    except ValueError as error:
        raise ValueError(
            f"reward function {name} returned a {type(given).__name__} with a field that is none; {error}"
        ) from None
    if verdict.correct and verdict.lost and not verdict.parts:
        raise ValueError(
            f"reward function {name} returned a verdict with correct=True and lost={verdict.lost!r}; a lost verdict is none, and "
            "counts as wrong: leave one of the two out"
        )
    for field, score in {"score": verdict.score or 0.0, **verdict.parts}.items():
        _check_size(score, f"reward function {name} returned a verdict with {field}", "scores are finite")
    return verdict


def _check_size(score: float, said: str, need: str) -> None:
    if not math.isfinite(score):
        raise NonFiniteScoreError(f"{said} {score}; {need}")
    if abs(score) > MAX_SCORE:
        raise NonFiniteScoreError(
            f"{said} {score:g}; a score is at most {MAX_SCORE:g} in size, or advantages would overflow: scale it down"
        )


def _no_verdict(result: Any, name: str) -> str:
    if inspect.iscoroutine(result):
        result.close()
        return f"reward function {name} returned a coroutine; it is awaited only if `async def` defines it"
    return (
        f"reward function {name} returned {result!r:.200} ({type(result).__name__}); it must return a bool, a finite "
        "number or a Verdict"
    )


def load_function(spec: str) -> Callable[..., Any]:
    """The function named by `module:function` or `path/to/file.py:function`.

    Raises:
        ValueError: no such file, module or function, or the name is not a function; or the module itself fails
            to import.
    """
    place, colon, name = spec.rpartition(":")
    if not colon or not place or not name:
        raise ValueError(f"{spec!r} names no function; write module:function or path/to/file.py:function")
    module = (
        _load_file(Path(place).expanduser(), spec) if place.endswith(".py") else _load_module(place, spec)
    )
    found = loading(spec, place, lambda: getattr(module, name, _ABSENT))
    if found is _ABSENT:
        near = nearest(name, [known for known in vars(module) if known[0] != "_"])
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"{spec}: {place} has no {name!r}{hint}")
    if not callable(found):
        raise ValueError(f"{spec}: {name!r} is of type {type(found).__name__}, which cannot be called")
    return found


def loading(spec: str, place: str, load: Callable[[], Any], *, fails: str = "", remedy: str = "") -> Any:
    """The result of `load`, which runs a user's code before anything is sampled.

    Args:
        spec: the value of the configuration, for the message.
        place: the file, module or call whose code runs, for the message.
        load: called without arguments.
        fails: the words before the exception; "" is `place` with "fails with".
        remedy: the words after it.

    Raises:
        ValueError: the code raised, or called sys.exit.
    """
    try:
        return load()
    except _OF_THE_RUN:
        raise
    except SystemExit as error:
        code = "" if error.code is None else repr(error.code)[:200]
        raise ValueError(
            f"{spec}: {place} calls sys.exit({code}) while it is loaded; put code that runs as a program after "
            '`if __name__ == "__main__":`'
        ) from error
    except BaseException as error:  # an exception of a library may be no Exception, such as pytest's Skipped
        said = f"{fails or f'{place} fails with'} {type(error).__name__}: {_said(error)}{remedy}"
        raise ValueError(f"{spec}: {said}") from error


def _load_module(name: str, spec: str) -> ModuleType:
    return loading(
        spec,
        f"the module {name!r}",
        lambda: importlib.import_module(name),
        fails=f"cannot import the module {name!r}:",
        remedy="; a module must be on Python's path, a file is given as path/to/file.py:function",
    )


def _load_file(path: Path, spec: str) -> ModuleType:
    if not path.is_file():
        raise ValueError(f"{spec}: there is no file {path} (looked from {Path.cwd()})")
    # The name is derived from the path: two files of one name stay two modules.
    digest = hashlib.blake2b(str(path.resolve()).encode(), digest_size=6).hexdigest()
    name = f"{_FILE}{path.stem}_{digest}"
    found = importlib.util.spec_from_file_location(name, path)
    assert found is not None
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    neighbours = _neighbours(path.resolve(), {})
    _check_names(neighbours, spec)
    sys.modules[name] = module  # dataclasses in the file look their module up while it runs
    try:
        with _folder_on_path(str(path.resolve().parent), first=bool(neighbours)):
            loading(spec, str(path), partial(found.loader.exec_module, module), fails=f"{path} fails to run:")
    except BaseException:
        sys.modules.pop(name, None)
        raise
    return module


def _neighbours(path: Path, found: dict[str, Path]) -> dict[str, Path]:
    """The modules in a file's folder that the file imports, by name, with the modules that these import from the folder."""
    imported: list[str] = []
    with contextlib.suppress(OSError, SyntaxError, ValueError):  # importing the file raises it again
        for node in ast.walk(ast.parse(path.read_bytes())):
            if isinstance(node, ast.Import):
                imported += [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                imported.append(node.module)
    for name in {each.partition(".")[0] for each in imported} - found.keys():
        places = (path.parent / name / "__init__.py", path.parent / f"{name}.py")
        if place := next((each for each in places if each.is_file() and each != path), None):
            found[name] = place
            _neighbours(place if place.parent == path.parent else path, found)
    return found


def _check_names(neighbours: dict[str, Path], spec: str) -> None:
    """Refuses a neighbour whose name another module has: Python has one module for a name, so a function would compute with the wrong one."""
    taken: dict[str, Path] = {}
    for module, one in list(sys.modules.items()):
        if module.startswith(_FILE) and one.__file__:  # it may import a neighbour later, when it is called
            _neighbours(Path(one.__file__).resolve(), taken)
        elif module in neighbours and getattr(one, "__file__", None):
            taken[module] = Path(one.__file__).resolve()
    for name, place in neighbours.items():
        if taken.get(name, place) != place and name not in sys.stdlib_module_names:
            raise ValueError(
                f"{spec}: it imports {name!r}, which is {place}, but {taken[name]} has this name in this process already; rename one of "
                "the two, or start a new process"
            )


@contextlib.contextmanager
def _folder_on_path(folder: str, *, first: bool) -> Iterator[None]:
    """Puts a folder at the end of Python's path, where it hides no module, and, if `first`, meanwhile at its front, as of a script."""
    if folder not in sys.path:
        sys.path.append(folder)
    if first:
        sys.path.insert(0, folder)
    try:
        yield
    finally:
        if first:
            sys.path.remove(folder)
