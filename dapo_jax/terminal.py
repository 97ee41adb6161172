"""Keeps a program running when its output cannot be printed, and escapes characters that control a terminal.

Printed lines may be lost, but results must not be. Without this module, `print` would raise an exception once the reader has exited
(`| head`), the terminal is closed, a descriptor is missing (`>&-`), or the terminal's encoding lacks a character.
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
"""Error codes for a write after the reading end has been closed. If a terminal has been closed, the code is EIO."""

_KEPT = "\n\t\u200c\u200d"
"""Characters that are not escaped: line feeds, tabs, and the zero-width joiners of Persian, Indic scripts and emoji."""
_HIDDEN = ("Cc", "Cf", "Cs", "Zl", "Zp")
"""Unicode categories that are escaped: control and format characters, surrogates, line and paragraph separators."""


@contextlib.contextmanager
def silent_libraries() -> Iterator[None]:
    """Discards everything that is written to standard error, such as log lines of JAX's CUDA plugin that no setting disables."""
    kept, null = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(null, 2)
        yield
    finally:
        os.dup2(kept, 2)
        for number in (kept, null):
            os.close(number)


@contextlib.contextmanager
def lasting_streams(gone: Callable[[str], None] = lambda name: None) -> Iterator[None]:
    """Makes writes to standard output and standard error always succeed. Once the reading end is closed, output is dropped.

    A character that the encoding lacks is printed as a question mark. If descriptor 0, 1 or 2 is closed, it is permanently redirected to
    the null device. Otherwise, the next file to be opened would get this descriptor, and a library could print into that file.
    Streams that are not the interpreter's own, for example in a notebook or a test, are unchanged. When the reading end of a stream is closed, `gone` is called with
    `standard output` or `standard error`. It must not print to this stream.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _discard(number)
    before = (sys.stdin, sys.stdout, sys.stderr)
    if sys.stdin is None:
        sys.stdin = open(os.devnull)  # noqa: SIM115 - must stay open as long as the program may read it
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
    """Redirects a descriptor to the null device."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    if nowhere == number:
        os.set_inheritable(number, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)


def _lasting(stream: Any, original: TextIO | None, number: int, gone: Callable[[], None]) -> Any:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8")
    if stream is not original or not isinstance(stream, io.TextIOWrapper):
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
    """A writable descriptor that is redirected to the null device once its reading end is closed."""

    def __init__(self, number: int, gone: Callable[[], None]) -> None:
        super().__init__(number, "w", closefd=False)
        self._gone = gone
        device = stat.S_ISCHR(os.fstat(number).st_mode)  # cannot be checked once the terminal is closed
        self._no_reader = (*_NO_READER, errno.EIO) if device else _NO_READER

    def write(self, data: Any) -> int | None:
        try:
            return super().write(data)
        except OSError as error:
            if error.errno not in self._no_reader:
                raise
        # Redirect the descriptor itself, because C libraries write to it too and child processes inherit it.
        _discard(self.fileno())
        self._gone()
        return len(memoryview(data).cast("B"))


def visible(text: str) -> str:
    r"""Escapes the characters of `text` that can control a terminal, or hide or reorder other characters.

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
