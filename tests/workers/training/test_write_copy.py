"""A copy in shared memory written into a file: by the program of its own, in parts, and refused."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path
from typing import Any

import pytest

from verl_like.files import fingerprint
from workers.training import write_copy
from workers.training.write_copy import ALIGNMENT, write_rest

CONTENTS = memoryview(os.urandom(3 * ALIGNMENT + 100))


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_copy, "BLOCK_BYTES", ALIGNMENT)


def test_a_file_is_written_in_aligned_blocks_and_what_is_left(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"of a longer file" * ALIGNMENT)
    said = list(write_rest(path, CONTENTS))
    assert [done for done, _ in said] == [ALIGNMENT * n for n in (1, 2, 3)] + [len(CONTENTS)]
    assert path.read_bytes() == CONTENTS
    assert fingerprint(path) == dict(zip(("bytes", "crc32"), said[-1], strict=True))


def test_another_goes_on_where_one_has_stopped(tmp_path: Path) -> None:
    path = tmp_path / "file"
    first = write_rest(path, CONTENTS)
    next(first)
    before = next(first)
    first.close()
    *_, (_, crc) = write_rest(path, CONTENTS, before)
    assert path.read_bytes() == CONTENTS
    assert crc == fingerprint(path)["crc32"]
    assert list(write_rest(path, CONTENTS, (len(CONTENTS), crc))) == []
    assert path.read_bytes() == CONTENTS


@pytest.mark.parametrize("refuses", ["when it is opened", "when it is written"])
def test_a_file_system_that_wants_its_page_cache_gets_it(
    refuses: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_flags, write = fcntl.fcntl, os.pwrite
    refused = OSError(errno.EINVAL, "no writes past the cache")

    def on_flags(descriptor: int, command: int, value: int = 0) -> Any:
        if refuses == "when it is opened" and value & os.O_DIRECT:
            raise refused
        return set_flags(descriptor, command, value)

    def on_write(descriptor: int, block: memoryview, offset: int) -> int:
        if set_flags(descriptor, fcntl.F_GETFL) & os.O_DIRECT:
            raise refused
        return write(descriptor, block, offset)

    monkeypatch.setattr(fcntl, "fcntl", on_flags)
    monkeypatch.setattr(os, "pwrite", on_write)
    assert list(write_rest(tmp_path / "file", CONTENTS))
    assert (tmp_path / "file").read_bytes() == CONTENTS
