"""Text for the terminal: tables, escaped characters, and streams that nobody reads."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

WIDTH = 100
"""The columns of the widest table."""
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""Characters that move the cursor, change colors or end lines, except tab and newline."""


def usage_text(help_text: str | None) -> str:
    """Return the usage at the start of a command's help, as argparse takes it."""
    usage = (help_text or "").partition("\n\n")[0]
    return usage.removeprefix("usage: ").replace("%", "%%")


def exit_on_broken_pipe() -> None:
    """End this process silently when the reader of its output is gone (`| head`)."""
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def survive_broken_pipes() -> None:
    """Keep prints of this process from failing: output that cannot be written is dropped.

    A standard stream that other code has replaced is not changed.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        stream = getattr(sys, name)
        if stream is not getattr(sys, f"__{name}__"):
            continue
        with suppress(AttributeError, OSError, ValueError):
            stream.flush()
        if stream is None:  # closed: the next opened file would receive the prints
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
        if name != "stdin":
            console = io.BufferedWriter(_Console(number, "wb", closefd=False))
            encoding = stream.encoding if stream else "utf-8"
            text = io.TextIOWrapper(console, encoding, "backslashreplace", line_buffering=True)
            setattr(sys, name, text)


@contextmanager
def surviving_broken_pipes() -> Iterator[None]:
    """Apply `survive_broken_pipes` inside the block, and restore the streams after it."""
    before = sys.stdin, sys.stdout, sys.stderr
    survive_broken_pipes()
    try:
        yield
    finally:
        sys.stdin, sys.stdout, sys.stderr = before


class _Console(io.FileIO):
    """A standard stream whose reader may be gone, disk full, or terminal closed."""

    def write(self, data: ReadableBuffer, /) -> int:
        size = memoryview(data).nbytes
        try:
            return super().write(data) or size
        except OSError:
            return size


def print_or_exit(text: str) -> None:
    """Print the text at once, and end silently if its reader is gone.

    Unlike `exit_on_broken_pipe`, this suits a process with other pipes that may also break.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # no later flush fails
        sys.exit(128 + signal.SIGPIPE)


def printable(text: str) -> str:
    """Return the text with control characters escaped, since a file's name may contain any."""
    return CONTROL.sub(lambda match: f"\\x{ord(match[0]):02x}", text)


def draw_table(
    rows: Sequence[Sequence[str]],
    num_titles: int = 1,
    flush_right: bool = False,
    zero: str | None = None,
) -> list[str]:
    """Return the lines of a table whose first row is its heading, in columns if they fit `WIDTH`.

    If they do not fit, each row becomes a paragraph: its first `num_titles` cells, then the others,
    each with its heading. A paragraph leaves out cells that equal `zero`, and a table leaves out
    columns with only such cells. `flush_right` aligns the columns after the titles to the right.
    """
    columns = [[printable(cell) for cell in column] for column in zip(*rows, strict=True)]
    rows = [*zip(*(column for column in columns if {*column[1:]} != {zero}), strict=True)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if sum(widths) + 2 * (len(widths) - 1) <= WIDTH:
        lines = []
        for row in rows:
            num_left = num_titles if flush_right else len(row)
            padded = [
                cell.ljust(size) if place < num_left else cell.rjust(size)
                for place, (cell, size) in enumerate(zip(row, widths, strict=True))
            ]
            lines.append("  ".join(padded).rstrip())
        return lines

    heading, *others = rows
    lines = []
    for row in others:
        cells = zip(heading[num_titles:], row[num_titles:], strict=True)
        rest = "; ".join(f"{head} {cell}" for head, cell in cells if cell != zero)
        lines.append("  ".join(row[:num_titles]))
        lines += textwrap.wrap(
            rest,
            WIDTH,
            initial_indent="  ",
            subsequent_indent="  ",
            break_long_words=False,
            break_on_hyphens=False,
        )
    return lines
