"""The open resources of a run: its folder with the lock, its checkpoints and its records."""

from collections.abc import Callable
from contextlib import ExitStack

from dapo_jax.checkpoints.checkpointer import Checkpointer
from dapo_jax.health.stalls import Watch
from dapo_jax.health.stopping import Stop
from dapo_jax.parallel.processes import is_first, tell_others
from dapo_jax.parallel.together import by_first
from dapo_jax.run.build import Run
from dapo_jax.run.disk_space import bytes_to_write, check_room
from dapo_jax.run.observers import Profile
from dapo_jax.run.records import Records, write_config
from dapo_jax.run.run_dir import remove_run, remove_steps_after
from dapo_jax.storage import AnyPath
from dapo_jax.storage.locks import Lock
from dapo_jax.trackers.progress import Progress
from dapo_jax.trackers.run_status import status_kept


class Session:
    """The open resources of a run in one process: its folder, checkpoints and records."""

    def __init__(
        self,
        run: Run,
        run_dir: AnyPath,
        lock: Lock | None,
        *,
        shown: Progress,
        stop: Stop,
        watch: Watch,
        locked: ExitStack,
        opened: ExitStack,
    ) -> None:
        """`locked` is closed after the model is written, and `opened` before. Only the first process has the `lock` of the folder."""
        self.run, self.config, self.run_dir = run, run.config, run_dir
        self.shown, self.stop, self._watch = shown, stop, watch
        self._note = "" if lock is None else lock.note
        self.check: Callable[[], None] = (lambda: None) if lock is None else lock.check
        """Raises an error if the run has lost the lock on its folder and must not write to it any more."""
        self.locked, self.opened = locked, opened
        self.records: Records | None = None
        """Writes the metrics. Only the first process has records."""

    def open(self, *, overwrite: bool) -> None:
        """Checks the free space on the disk, shows messages, and opens the folder of checkpoints. With `overwrite`, removes the files of the earlier run."""
        run, config, opened = self.run, self.config, self.opened
        little_room = check_room(bytes_to_write(config, run.policy.decoder.trained_parameters))
        if overwrite:
            by_first(lambda: remove_run(self.run_dir))  # all processes wait until the folder is empty
        opened.enter_context(self.shown)
        self.shown.listen(self._watch.phase)
        for message in filter(None, (self._note, *run.notes, little_room)):
            self.shown.message(message)
        keep, keep_best = config.checkpoint.keep, config.checkpoint.keep_best
        self.checkpointer = Checkpointer(self.run_dir / "checkpoints", keep=keep, keep_best=keep_best)
        opened.enter_context(self.checkpointer)
        opened.push(tell_others)

    def begin(self, *, resume: bool) -> None:
        """Restores the last checkpoint or starts at step 0, then opens the records, which are the first files to be written."""
        self.start = self.run.start(self.checkpointer, resume=resume, say=self.shown.message)
        step, folder = self.start.position.step, self.checkpointer.folder
        self.shown.begin(step)
        if resume:
            none = f"there is no checkpoint in {folder}: starting at step 0"
            self.shown.message(f"continuing from {folder / str(step)}" if step else none)
        if is_first():  # not earlier, because a run that fails a check must not change the folder
            self._open_records(resume=resume)
        self.profile = self.opened.enter_context(
            Profile(self.config.log.profile_steps, self.run_dir / "profile")
        )
        self.opened.enter_context(self._watch)
        self.opened.push(tell_others)
        if is_first():
            self.locked.enter_context(status_kept(self.run_dir, check=self.check))

    def _open_records(self, *, resume: bool) -> None:
        """Writes the configuration, and opens the trackers."""
        write_config(self.config, self.run_dir)
        step = self.start.position.step
        # The last step whose metrics are final. At step 0, there is no such step, because the evaluation before training is repeated.
        written = step - (self.start.unfinished is not None) if step else -1
        if resume:
            remove_steps_after(written, self.run_dir / "evaluations")
            remove_steps_after(step, self.run_dir / "rollouts")  # rollouts of an unfinished step are final
        resume_step, decode = written if resume else None, self.run.policy.tokenizer.decode
        records = Records(self.config, self.run_dir, resume_step=resume_step, decode=decode)
        self.records = self.opened.enter_context(records)
