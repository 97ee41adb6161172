"""Metrics as TensorBoard scalars, through tensorboardX (which needs no TensorFlow)."""

from collections.abc import Mapping
from os import PathLike


class TensorBoardTracker:
    """Writes event files into a folder.

    Args:
        folder: where TensorBoard is pointed to; created if needed.
        resume_step: the step of the checkpoint a run goes on from: TensorBoard then drops what an earlier
            event file says of later steps. None for a new run.

    Raises:
        ImportError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | PathLike[str], resume_step: int | None = None) -> None:
        try:
            from tensorboardX import SummaryWriter
        except ImportError as error:
            raise ImportError(
                "log.tensorboard needs the package tensorboardX: pip install 'dapo_jax[tensorboard]'"
            ) from error
        purge_step = None if resume_step is None else resume_step + 1
        self._writer = SummaryWriter(logdir=str(folder), purge_step=purge_step)

    def log(self, step: int, metrics: Mapping[str, float | int]) -> None:
        """Adds one scalar per metric; nan and infinity are drawn as gaps by TensorBoard."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, float(value), global_step=step)
        self._writer.flush()

    def close(self) -> None:
        """Closes the event file."""
        self._writer.close()
