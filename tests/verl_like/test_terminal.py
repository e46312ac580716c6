"""Wrapping and tables for a terminal, and prints that it cannot show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from verl_like.terminal import draw_table, printable

ROWS = [("pool", "processes", "CPUs"), ("main", "2", "1.5"), ("critic_pool", "1", "1")]


def test_a_table_that_fits_is_drawn_in_columns() -> None:
    assert draw_table(ROWS) == [
        "pool         processes  CPUs",
        "main         2          1.5",
        "critic_pool  1          1",
    ]


def test_numbers_can_be_aligned_to_the_right() -> None:
    assert draw_table(ROWS, flush_right=True)[1:] == [
        "main                 2   1.5",
        "critic_pool          1     1",
    ]


def test_rows_of_a_table_wider_than_100_columns_become_paragraphs() -> None:
    path = "/a/very/long/path" * 5
    rows = [("pool", "processes", "log"), ("main", "2", path), ("critic_pool", "1", "none")]
    assert draw_table(rows) == [
        "main",
        "  processes 2; log",
        f"  {path}",
        "critic_pool",
        "  processes 1; log none",
    ]
    assert draw_table(rows, zero="2")[:2] == ["main", f"  log {path}"]


PRINTS = """
import os, sys
from verl_like.terminal import survive_broken_pipes
survive_broken_pipes()
with open(sys.argv[1], "w") as file:
    print("\u2016" * 100_000, flush=True)
    print("\u2016", file=sys.stderr)
    file.write(str(file.fileno()))
"""


@pytest.mark.parametrize(
    "shell",
    [
        'PYTHONIOENCODING=ascii "$@"',
        'set -o pipefail; "$@" | true',
        '"$@" > /dev/full 2>&1',
        '"$@" <&- >&- 2>&-',
    ],
)
def test_a_program_survives_a_console_that_cannot_print(shell: str, tmp_path: Path) -> None:
    program = [sys.executable, "-c", PRINTS, tmp_path / "file"]
    done = subprocess.run(
        ["bash", "-c", shell, "bash", *program],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert int((tmp_path / "file").read_text()) > 2, "what is printed goes nowhere else"
    assert set(done.stdout + done.stderr) <= set("\u2016\\u2016\n")


def test_control_characters_are_escaped() -> None:
    name = "a\x1b[2J\rb\x9b"
    assert printable(f"{name}\n\tc") == "a\\x1b[2J\\x0db\\x9b\n\tc"
    assert draw_table([["metric"], [name]]) == ["metric", "a\\x1b[2J\\x0db\\x9b"]
