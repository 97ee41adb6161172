"""The answers of environments on disk: a step that was interrupted hears again what it heard, and asks for nothing twice.

An environment may be slow, dear, or never the same twice. So what it answers in a step is written down, piece by piece, until a checkpoint has the
step. A run that goes on samples the step again, draws the same turns, and finds their answers here.
"""

import hashlib
import json
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.rollouts import Continuation
from dapo_jax.storage import AnyPath, entries, file_bytes, write_whole

_PIECE, _PIECE_S = 256, 1.0
"""A piece is written when it has so many answers, or is so many seconds old."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What became of one call of an environment."""

    tokens: list[int] | None
    """What stands before the next turn; None: the episode is over."""
    anew: bool = False
    reward: float = 0.0
    correct: bool | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    lost: str = ""
    reason: str = ""
    scores: list[float] | None = None
    """Rewards that compare, of the kept episodes of a group."""

    @property
    def continuation(self) -> Continuation | None:
        """Its tokens, as the sampler takes them."""
        if self.tokens is None:
            return None
        return Continuation(np.array(self.tokens, np.int32), anew=self.anew)


class Heard:
    """All turns of an episode so far, in a few bytes: an answer is to them, and to no others."""

    def __init__(self) -> None:
        self._digest = hashlib.blake2b(digest_size=12)

    def add(self, tokens: Int[np.ndarray, " turn"]) -> None:
        """Takes a turn."""
        self._digest.update(len(tokens).to_bytes(8, "little") + np.asarray(tokens, np.int32).tobytes())

    @property
    def name(self) -> str:
        """The same for the same turns, and for no others."""
        return self._digest.hexdigest()


class RecordedAnswers:
    """The answers of the steps since the last checkpoint, in a folder that the processes of a run share.

    What cannot be written costs nothing but that it is not there: `failed` says why.
    """

    def __init__(self, folder: AnyPath, *, process: int = 0) -> None:
        """Reads what is there; pieces that are damaged count as not written."""
        self._folder, self._process, self._step = folder, process, 0
        self._known: dict[tuple[int, int, str], Answer] = {}
        self._pieces: list[tuple[int, AnyPath]] = []
        self._new: list[dict[str, Any]] = []
        self._since, self._count = time.monotonic(), 0
        self._lock = threading.Lock()
        self.failed = ""
        try:
            found = entries(folder)
        except OSError as error:
            found, self.failed = [], str(error)
        for path in found:
            with suppress(ValueError, TypeError, KeyError, AttributeError, OSError):
                self._read(path)
        self._last = max((step for step, _ in self._pieces), default=0)

    def _read(self, path: AnyPath) -> None:
        step = int(path.name.split(".")[0].removeprefix("step_"))
        self._pieces.append((step, path))
        for said in map(json.loads, file_bytes(path).splitlines()):
            key = said.pop("ordinal"), said.pop("index"), said.pop("heard")
            self._known[key] = Answer(**said)

    def begin(self, step: int, *, keep_from: int) -> None:
        """Begins a step; answers of steps before `keep_from` are removed."""
        self.flush()
        self._step = step
        if step > self._last:
            self._known = {}
        for _, path in [piece for piece in self._pieces if piece[0] < keep_from]:
            try:
                path.unlink()
            except OSError as error:
                self.failed = str(error)
        self._pieces = [piece for piece in self._pieces if piece[0] >= keep_from]

    def find(self, ordinal: int, index: int, heard: str) -> Answer | None:
        """The answer to these turns of an episode; None if there is none. `index` is -1 for what concerns a whole group."""
        return self._known.get((ordinal, index, heard))

    def add(self, ordinal: int, index: int, heard: str, answer: Answer) -> None:
        """Takes a new answer, which is on disk within about a second."""
        with self._lock:
            self._new.append({"ordinal": ordinal, "index": index, "heard": heard, **asdict(answer)})
            due = len(self._new) >= _PIECE or time.monotonic() - self._since >= _PIECE_S
        if due:
            self.flush()

    def flush(self) -> None:
        """Writes what is not on disk yet."""
        with self._lock:
            some, self._new, self._since = self._new, [], time.monotonic()
            self._count += 1
            path = (
                self._folder
                / f"step_{self._step:06d}.p{self._process}.{self._count:06d}.{time.time_ns():x}.jsonl"
            )
        if not some:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(json.dumps(each) + "\n" for each in some).encode())
        except (OSError, ValueError) as error:
            self.failed = str(error)
            return
        self._pieces.append((self._step, path))
