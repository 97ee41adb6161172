"""Standard streams that cannot end a program, and text that cannot control a terminal.

Printed lines may be lost; results must not be. A reader that exits (`| head`), a closed terminal, a missing descriptor (`>&-`) and a character
that the terminal's encoding lacks would each raise an exception at the next line that is printed.
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
"""Errors of a write without a reader; for a closed terminal it is EIO."""

_KEPT = "\n\t\u200c\u200d"
"""Line ends and tabs; and the zero-width joiners of Persian, Indic scripts and emoji."""
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories: control and format characters, surrogates, line and paragraph separators."""


@contextlib.contextmanager
def lasting_streams(gone: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Within, standard output and standard error accept all writes, and drop them once there is no reader.

    A character that the encoding lacks becomes a question mark. Closed descriptors 0 to 2 are opened on the null device, permanently:
    otherwise the next file to be opened would get such a number, and a library's output would be written into it.
    Streams that are not the interpreter's own (in a notebook or a test) are unchanged.

    Args:
        gone: called once with `standard output` or `standard error` when it has no reader any more. It must not print there.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _discard(number)
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


def _discard(number: int) -> None:
    """Opens the null device as this descriptor."""
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
        errors="replace" if stream.errors in ("strict", "surrogateescape") else stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


class _Descriptor(io.FileIO):
    """A descriptor for writing, which becomes the null device once it has no reader."""

    def __init__(self, number: int, gone: Callable[[], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._gone = gone
        device = stat.S_ISCHR(os.fstat(number).st_mode)  # a closed terminal does not count as one any more
        self._no_reader = (*_NO_READER, errno.EIO) if device else _NO_READER

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._no_reader:
                raise
        # The descriptor itself: C libraries write to it too, and child processes inherit it.
        _discard(self.fileno())
        self._gone()
        return len(memoryview(data).cast("B"))


def visible(text: str) -> str:
    r"""Escapes each character of `text` that controls a terminal, or that hides or reorders others.

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
