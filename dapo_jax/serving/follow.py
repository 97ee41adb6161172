"""Following a run: its checkpoints are served as they are completed."""

import threading
from collections.abc import Callable
from functools import partial
from types import TracebackType

from flax import nnx

from dapo_jax.checkpoints.checkpointer import Checkpointer, Restored
from dapo_jax.config import ConfigError, ParallelConfig, load_config
from dapo_jax.run.folders import place_of
from dapo_jax.run.policy import Policy, check_of_readers, mesh_of, optimizer_of, state_structs
from dapo_jax.storage import AnyPath
from dapo_jax.terminal import visible

Take = Callable[[nnx.State, int], None]
"""Serves parameters of the version (steps done) from now on."""


def checkpoints_of(source: str) -> AnyPath:
    """The folder in which a run's checkpoints lie.

    Raises:
        ConfigError: `source` is no run's folder.
    """
    checkpoints = place_of(source, key="model", write=False) / "checkpoints"
    if not checkpoints.is_dir():
        raise ConfigError(
            f"--follow looks for new checkpoints of a run; {source} has no folder `checkpoints`"
        )
    return checkpoints


class Follower:
    """Serves each new checkpoint of a run as it is completed, in a thread; a context manager, whose end stops it."""

    def __init__(self, checkpoints: AnyPath, say: Callable[[str], None]) -> None:
        """Looks which one is the last. Made before the weights are read: should a checkpoint come in between, it is read twice rather than never."""
        self._run, self._say = checkpoints.parent, say
        self._checkpointer = Checkpointer(checkpoints)
        self._served = self._checkpointer.latest_step()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, policy: Policy, take: Take, every_s: float) -> None:
        """Looks every so often from now on."""
        config = load_config(self._run / "config.yaml")
        target = state_structs(policy, optimizer_of(config.optimizer), mesh_of(ParallelConfig()))
        restore = partial(self._checkpointer.restore, target, check=check_of_readers(config, policy))
        self._thread = threading.Thread(target=self._follow, args=(restore, take, every_s))
        self._thread.start()

    def _follow(self, restore: Callable[[], Restored], take: Take, every_s: float) -> None:
        told = ""
        while not self._stopping.wait(every_s):
            try:
                if self._checkpointer.latest_step() == self._served:
                    continue
                found = restore()
                take(found.state.params, found.step)
            except Exception as error:  # whatever it is, what is served now goes on being served
                if str(error) != told and not self._stopping.is_set():
                    told = str(error)
                    self._say(visible(f"no new weights: {error}"))
                continue
            self._served, told = found.step, ""
            self._say(f"now serving step {found.step}")

    def __enter__(self) -> "Follower":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._thread is not None:
            self._thread.join()
        self._checkpointer.close()
