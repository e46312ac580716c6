"""Wrapping and tables for a terminal."""

from __future__ import annotations

from verl_like.terminal import draw_table, fit

ROWS = [("pool", "processes", "CPUs"), ("main", "2", "1.5"), ("critic_pool", "1", "1")]


def test_text_for_a_file_is_left_as_it_is() -> None:
    assert fit("a  b\n" * 50, None) == "a  b\n" * 50


def test_a_long_line_is_wrapped_and_indented() -> None:
    assert fit("one two three\nfour", 9, indent="  ") == "one two\n  three\nfour"


def test_a_path_is_never_cut() -> None:
    assert fit("see /a/very/long/path-to/a/file", 10).splitlines() == [
        "see",
        "    /a/very/long/path-to/a/file",
    ]


def test_a_table_that_fits_stands_in_columns() -> None:
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
