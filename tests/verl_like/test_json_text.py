"""JSON in files: every string is preserved, and invalid JSON has an error."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl_like.files import (
    file_fault,
    fingerprint,
    json_line,
    json_objects,
    parse_json,
    text_lines,
    write_atomic,
)

STRINGS = [
    "plain",
    "a\u2028b\u2029c\x85d",
    "\ud800 alone",
    "x\udfff",
    "日本 ⚀ 😀",
    "\n\r\t\0\x0b\x1c",
    '"\\',
]


@pytest.mark.parametrize("text", STRINGS)
def test_a_string_survives_a_line_of_json(text: str, tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    line = json_line({"text": text, text: [text]})
    write_atomic(path, line * 2)
    assert len(path.read_text(encoding="utf-8").splitlines()) == 2, (
        "also for readers that split at other line ends"
    )
    assert [parse_json(row) for row in text_lines(path)] == [{"text": text, text: [text]}] * 2


def test_text_stays_readable_in_the_file() -> None:
    assert "日本" in json_line("日本")


def test_numbers_keep_every_digit() -> None:
    assert json_line({"step": 1, "x": 0.1 + 0.2}) == json.dumps({"step": 1, "x": 0.1 + 0.2}) + "\n"


@pytest.mark.parametrize("text", ["[" * 100_000, "1" * 5000, b"\xff", "{", ""])
def test_invalid_json_is_a_value_error(text: str | bytes) -> None:
    with pytest.raises(ValueError, match="."):
        parse_json(text)


def test_a_fingerprint_detects_changes_of_size_and_bytes(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abc")
    facts = fingerprint(path)
    assert file_fault(path, facts) == ""
    path.write_bytes(b"abd")
    assert file_fault(path, facts).startswith("has crc32")
    assert file_fault(path, facts, reads=False) == ""
    path.write_bytes(b"ab")
    assert file_fault(path, facts, reads=False) == "has 2 bytes, but was written with 3"
    path.unlink()
    assert file_fault(path, facts) == "is missing"


def test_json_objects_counts_lines_without_an_object(tmp_path: Path) -> None:
    path = tmp_path / "lines.jsonl"
    assert json_objects(path) == ([], 0)
    path.write_bytes(b'{"a": 1}\n[2]\n\xff\n{"b": "\xff"}\n{"c')
    assert json_objects(path) == ([{"a": 1}, {"b": "\ufffd"}], 3)
