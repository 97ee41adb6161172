"""The answers of environments on disk: a step that was interrupted hears again what it heard, and asks for nothing twice.

An environment may be slow, dear, or never the same twice. So what it answers in a step is written down, and kept until a checkpoint has the
step. A run that goes on samples the step again, draws the same turns, and finds their answers here.
"""

import hashlib
import json
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Int

from dapo_jax.dapo.rollouts import Continuation
from dapo_jax.storage import AnyPath, entries, file_bytes, write_whole

_PIECE_S = 1.0
"""Seconds between two times that new answers are written."""
_ENDING_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The outcome of one call of an environment."""

    tokens: list[int] | None
    """The tokens before the next turn; None: the episode is over."""
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

    A thread writes what is new each second; a step that is sampled to its end is one file. Where something cannot be written, answers are only not
    found again; `failed` says why.
    """

    def __init__(self, folder: AnyPath, *, process: int = 0) -> None:
        """Reads what is there; files that are damaged count as not written."""
        self._folder, self._process, self._step = folder, process, 0
        self._known: dict[tuple[int, int, str], Answer] = {}
        self._files: list[tuple[int, AnyPath]] = []
        """Files of earlier steps."""
        self._of_step: list[dict[str, Any]] = []
        self._new: list[dict[str, Any]] = []
        self._pieces: list[AnyPath] = []
        """Files of this step, which become one at its end."""
        self._lock, self._writing = threading.Lock(), threading.Lock()
        self.failed = ""
        try:
            found = entries(folder)
        except Exception as error:  # a bucket's library has errors of its own kinds
            found, self.failed = [], str(error)
        for path in found:
            with suppress(Exception):
                self._read(path)
        self._last = max((step for step, _ in self._files), default=0)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._write_on, daemon=True, name="answers")
        self._thread.start()

    def begin(self, step: int, *, keep_from: int) -> None:
        """Begins a step; answers of steps before `keep_from` are removed."""
        # In the first step an episode in flight may wait for an answer of long ago.
        if self._step and step > self._last:
            self._known = {}
        with self._writing, self._lock:
            # Answers that came after the end of the step before are in pieces of their own.
            self._files += [(self._step, piece) for piece in self._pieces]
            self._step, self._pieces = step, []
        for _, path in [file for file in self._files if file[0] < keep_from]:
            self._remove(path)
        self._files = [file for file in self._files if file[0] >= keep_from]

    def find(self, ordinal: int, index: int, heard: str) -> Answer | None:
        """The answer to these turns of an episode; None if there is none. `index` is -1 for what concerns a whole group."""
        return self._known.get((ordinal, index, heard))

    def add(self, ordinal: int, index: int, heard: str, answer: Answer) -> None:
        """Takes a new answer, which is on disk about a second later. That an episode was lost is written at the end of the step alone: what
        ended the run may be what lost it."""
        said = {"ordinal": ordinal, "index": index, "heard": heard, **asdict(answer)}
        with self._lock:
            self._of_step.append(said)
            if not answer.lost:
                self._new.append(said)

    def end(self) -> None:
        """The step is sampled: all its answers become one file."""
        with self._writing:
            with self._lock:
                some, self._of_step, self._new = self._of_step, [], []
            path = self._folder / f"step_{self._step:06d}.p{self._process}.{time.time_ns():x}.jsonl"
            if some and self._written(path, some):
                self._files.append((self._step, path))
                for piece in self._pieces:
                    self._remove(piece)
            else:
                self._files += [(self._step, piece) for piece in self._pieces]
            self._pieces = []

    def flush(self) -> None:
        """Writes what is not on disk yet."""
        with self._writing:
            with self._lock:
                some, self._new = self._new, []
            path = self._folder / f"step_{self._step:06d}.p{self._process}.{time.time_ns():x}.jsonl"
            if some and self._written(path, some):
                self._pieces.append(path)

    def close(self) -> None:
        """Writes what is not on disk yet, and ends the thread."""
        self._closing.set()
        self._thread.join(_ENDING_S)
        self.flush()

    def _write_on(self) -> None:
        while not self._closing.wait(_PIECE_S):
            self.flush()

    def _read(self, path: AnyPath) -> None:
        step = int(path.name.split(".")[0].removeprefix("step_"))
        self._files.append((step, path))
        for said in map(json.loads, file_bytes(path).splitlines()):
            key = said.pop("ordinal"), said.pop("index"), said.pop("heard")
            self._known[key] = Answer(**said)

    def _written(self, path: AnyPath, some: Sequence[Mapping[str, Any]]) -> bool:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            write_whole(path, "".join(json.dumps(each) + "\n" for each in some).encode())
        except Exception as error:  # of any kind, see above
            self.failed = str(error)
            return False
        return True

    def _remove(self, path: AnyPath) -> None:
        try:
            path.unlink(missing_ok=True)  # another process may have been first
        except Exception as error:
            self.failed = str(error)
