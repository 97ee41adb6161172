"""The types of a sandbox: a program with its limits, and the outcome of running it."""

from dataclasses import dataclass


class SandboxError(RuntimeError):
    """The sandbox failed, so there is no outcome. The message contains the cause and the remedy."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a program. Times are in seconds. Processor time does not depend on the load of the machine."""

    cpu_s: float = 6.0
    """Processor time of a script, or of one call."""
    idle_s: float = 5.0
    """Time in which the program neither computes nor waits for a core."""
    total_s: float = 60.0
    """Processor time of all tests of a response, or of a session, and the idle time of calls that have ended."""
    memory_mb: int = 1024
    """Address space in MiB."""
    output: int = 1 << 20
    """Size of the output, and of a result, in bytes. The error output is cut at this size."""

    @property
    def wall_s(self) -> float:
        """Time after which there is no outcome, because the machine has no free cores."""
        return 10 * self.cpu_s + 30


@dataclass(frozen=True, kw_only=True)
class Program:
    """A program, its input and its limits."""

    source: str
    stdin: bytes = b""
    limits: Limits = Limits()


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The way a program ended, and its output. It does not tell whether the output is right."""

    ended: str
    """`exit`, `signal`, a limit (`cpu`, `total`, `idle`, `memory`, `output`, or on a remote service `wall`), `syntax` (Python cannot compile it), `stopped` (this process needs no more of it), or
    `server` (it ended the sandbox's server twice)."""
    status: int = 0
    """Exit status, or the number of the signal."""
    stdout: bytes = b""
    stderr: bytes = b""
    cpu_s: float = 0.0
