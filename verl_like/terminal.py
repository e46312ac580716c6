"""Text as wide as the terminal it is shown on.

Placement, batch sizes and dataflow draw their tables here; the commands and the start of a run
print through `fit`.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
import textwrap
from collections.abc import Sequence

NARROWEST = 20


def end_with_the_reader() -> None:
    """Let this process end without a word once nobody reads its output (`| head`): for commands
    that only show.
    """
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)


def terminal_width() -> int | None:
    """Columns of the terminal, or what the variable COLUMNS says; None where the output goes to a
    file or a pipe.
    """
    if not (os.environ.get("COLUMNS") or sys.stdout.isatty()):
        return None
    return max(shutil.get_terminal_size().columns, NARROWEST)


def fit(text: str, width: int | None, indent: str = "    ") -> str:
    """The text with its long lines wrapped to `width`; a key or a path is never cut.

    None leaves it as it is.
    """
    if width is None:
        return text
    lines = text.splitlines()
    return "\n".join(
        line if len(line) <= width else "\n".join(_wrapped(line, width, indent)) for line in lines
    )


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    return textwrap.wrap(
        line, width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
    )


def draw_table(
    rows: Sequence[Sequence[str]],
    width: int | None = None,
    num_titles: int = 1,
    flush_right: bool = False,
) -> list[str]:
    """Lines of a table whose first row is its heading, in columns where `width` has room for them.

    Elsewhere a row becomes a paragraph: its first `num_titles` cells, under them the others, each
    with its heading.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    if width is None or sum(widths) + 2 * (len(widths) - 1) <= width:
        sides = [
            str.rjust if flush_right and place >= num_titles else str.ljust
            for place in range(len(widths))
        ]
        return [
            "  ".join(
                side(cell, size) for side, cell, size in zip(sides, row, widths, strict=True)
            ).rstrip()
            for row in rows
        ]
    lines = []
    for row in rows[1:]:
        rest = "; ".join(
            f"{head} {cell}"
            for head, cell in zip(rows[0][num_titles:], row[num_titles:], strict=True)
        )
        lines += ["  ".join(row[:num_titles]), *_wrapped("  " + rest, width, "  ")]
    return lines
