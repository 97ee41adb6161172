"""Standard streams that cannot end a program, and text of others that cannot command a terminal.

What is printed may be lost; what is computed and saved must not be.

A reader that has left (`| head`), a terminal that was closed, a descriptor that was never there (`>&-`) and a character that the
terminal does not know would each be an exception at the next line that anything prints.
"""

import contextlib
import errno
import io
import os
import stat
import sys
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any, TextIO

_NO_READER = (errno.EPIPE, errno.ECONNRESET, errno.EBADF)
"""The system's errors for a write for which there is no reader; of a terminal that was closed it says EIO."""

_RAISE = ("strict", "surrogateescape")
"""Ways of encoding by which a character can raise."""

_KEPT = "\n\t\u200c\u200d"
"""Line ends and tabs; and the joiners without width that Persian, Indic scripts and emoji are written with."""
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Categories of Unicode: control characters, formats such as marks of direction, halves of surrogate pairs, line and paragraph separators."""


@contextlib.contextmanager
def lasting_streams(gone: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Within, standard output and standard error take whatever is written, and drop it once nobody reads them.

    A character that the encoding does not have becomes a question mark. Descriptors 0 to 2 that are closed are opened on the null
    device, for good: the next file to be opened would else get such a number, and what a library prints would be written into it.
    Streams that are not the interpreter's own (a notebook's, a test's) stay as they are.

    Args:
        gone: called once with `standard output` or `standard error` when nobody reads it any more. It must not print there.
    """
    _fill_descriptors()
    before = (sys.stdin, sys.stdout, sys.stderr)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - for as long as the program may read it
    sys.stdout = _lasting(sys.stdout, sys.__stdout__, 1, lambda: gone("standard output"))
    sys.stderr = _lasting(sys.stderr, sys.__stderr__, 2, lambda: gone("standard error"))
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError):
                stream.flush()
        sys.stdin, sys.stdout, sys.stderr = before


def _fill_descriptors() -> None:
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _discard(number)


def _discard(number: int) -> None:
    """Makes the descriptor the null device's."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)


def _lasting(stream: Any, own: TextIO | None, number: int, gone: Callable[[], None]) -> Any:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if stream is not own or not isinstance(stream, io.TextIOWrapper):
        return stream
    lasting = _Descriptor(number, gone)
    with contextlib.suppress(OSError):
        stream.flush()
    return io.TextIOWrapper(
        lasting if stream.write_through else io.BufferedWriter(lasting),
        encoding=stream.encoding,
        errors="replace" if stream.errors in _RAISE else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Descriptor(io.FileIO):
    """A descriptor to write to, which becomes the null device's once nobody reads."""

    def __init__(self, number: int, gone: Callable[[], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._gone = gone
        device = stat.S_ISCHR(
            os.fstat(number).st_mode
        )  # a terminal that is closed by now is no terminal any more
        self._none = (*_NO_READER, errno.EIO) if device else _NO_READER

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._none:
                raise
        # The descriptor itself: libraries that are not Python's write to it too, and programs inherit it.
        _discard(self.fileno())
        self._gone()
        return len(memoryview(data).cast("B"))


def visible(text: str) -> str:
    r"""`text` with each character that a terminal would obey, or that hides or reorders others, written as Python writes it.

    >>> visible("red: \x1b[31m")
    'red: \\x1b[31m'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        char
        if char in _KEPT or unicodedata.category(char) not in _HIDDEN
        else char.encode("unicode_escape").decode("ascii")
        for char in text
    )
