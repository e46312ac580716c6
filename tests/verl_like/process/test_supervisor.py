"""Folders of untrusted code are removed at any depth; no console stops the supervisor."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from verl_like.process.sandbox import remove_folder
from verl_like.process.supervisor import _memory_of_descriptors, _OutputForwarder

DEPTH = 1100
"""More levels than `shutil.rmtree` of Python 3.11 can recurse into."""


@pytest.fixture
def folder(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file and a link outside, in a folder at every hundredth level.

    It is not in pytest's folder, whose leftovers pytest removes by recursion.
    """
    place = Path(tempfile.mkdtemp())
    outside = place / "outside"
    outside.mkdir()
    (outside / "kept").touch()
    folder = place / "folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    for level in range(DEPTH):
        if level % 100 == 0:
            Path("file").touch()
            Path("link").symlink_to(outside)
        os.mkdir("in")
        os.chdir("in")
    os.chdir(place)
    yield folder
    monkeypatch.undo()
    remove_folder(str(place))


def test_a_deep_folder_is_removed_without_the_targets_of_its_links(folder: Path) -> None:
    remove_folder(str(folder))
    assert not folder.exists()
    assert (folder.parent / "outside" / "kept").exists()
    remove_folder(str(folder))


def test_output_that_the_console_rejects_is_dropped() -> None:
    with open("/dev/full", "wb") as console:
        _OutputForwarder().forward(console.fileno(), b"printed")


@pytest.mark.linux
def test_memory_files_and_pipes_count_as_memory() -> None:
    before = _memory_of_descriptors([os.getpid()])
    memory, pipe = os.memfd_create("test"), os.pipe()
    try:
        os.write(memory, bytes(2**20))
        assert _memory_of_descriptors([os.getpid()]) == before + 2**20 + 2**16
    finally:
        for descriptor in (memory, *pipe):
            os.close(descriptor)
    assert _memory_of_descriptors([2**30]) == 0, "a process that is gone"
