"""Wrapping and tables for a terminal, and prints that it cannot show."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from verl_like.terminal import draw_table, fit

ROWS = [("pool", "processes", "CPUs"), ("main", "2", "1.5"), ("critic_pool", "1", "1")]


def test_text_for_a_file_is_not_wrapped() -> None:
    assert fit("a  b\n" * 50, None) == "a  b\n" * 50


def test_a_long_line_is_wrapped_and_indented() -> None:
    assert fit("one two three\nfour", 9, indent="  ") == "one two\n  three\nfour"


def test_a_path_is_never_cut() -> None:
    assert fit("see /a/very/long/path-to/a/file", 10).splitlines() == [
        "see",
        "    /a/very/long/path-to/a/file",
    ]


def test_a_table_that_fits_is_drawn_in_columns() -> None:
    assert draw_table(ROWS, 40) == [
        "pool         processes  CPUs",
        "main         2          1.5",
        "critic_pool  1          1",
    ]


def test_numbers_can_be_aligned_to_the_right() -> None:
    assert draw_table(ROWS, flush_right=True)[1:] == [
        "main                 2   1.5",
        "critic_pool          1     1",
    ]


def test_a_table_that_does_not_fit_becomes_paragraphs() -> None:
    assert draw_table(ROWS, 20) == [
        "main",
        "  processes 2; CPUs",
        "  1.5",
        "critic_pool",
        "  processes 1; CPUs",
        "  1",
    ]
    assert draw_table(ROWS, 20, zero="2")[:2] == ["main", "  CPUs 1.5"]


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
    assert fit(f"{name}\n\tc", None) == "a\\x1b[2J\\x0db\\x9b\n\tc"
    assert draw_table([["metric"], [name]]) == ["metric", "a\\x1b[2J\\x0db\\x9b"]
