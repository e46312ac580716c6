"""Files and folders that appear whole, also where a stranger has planted links."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from verl_like.files import atomic_folder, why_not_writable, write_atomic


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_file_is_written_past_planted_links(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    victim.write_text("unchanged")
    folder.mkdir()
    for name in ("page", "page.part", "page.tmp", ".page.part"):
        (folder / name).symlink_to(victim)
    write_atomic(folder / "page", "new")
    assert victim.read_text() == "unchanged"
    assert (folder / "page").read_text() == "new"
    assert not (folder / "page").is_symlink()
    assert names_in(folder) == [".page.part", "page", "page.part", "page.tmp"]


def test_a_draft_cannot_be_planted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    victim = tmp_path / "victim"
    victim.write_text("unchanged")
    monkeypatch.setattr("secrets.token_hex", lambda *_: "known")
    (tmp_path / ".draft-known").symlink_to(victim)
    with pytest.raises(FileExistsError):
        write_atomic(tmp_path / "page", "new")
    with pytest.raises(FileExistsError), atomic_folder(tmp_path / "model"):
        pass
    assert victim.read_text() == "unchanged"
    assert (tmp_path / ".draft-known").is_symlink()


def test_a_file_that_cannot_be_replaced_leaves_no_draft(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    with pytest.raises(OSError, match="directory"):
        write_atomic(tmp_path / "page", "new")
    assert names_in(tmp_path) == ["page"]


def test_a_new_file_has_the_mode_of_other_new_files(tmp_path: Path) -> None:
    (tmp_path / "plain").touch()
    for name in ("page", "long" * 63):
        write_atomic(tmp_path / name, "new")
        assert os.stat(tmp_path / name).st_mode == os.stat(tmp_path / "plain").st_mode


def test_a_folder_is_written_past_planted_links(tmp_path: Path) -> None:
    victim, folder = tmp_path / "victim", tmp_path / "folder"
    for path in (victim, folder):
        path.mkdir()
    (folder / "model.part").symlink_to(victim)
    with atomic_folder(folder / "model") as draft:
        (draft / "weights").write_text("new")
        assert stat.S_ISDIR(os.lstat(draft).st_mode)
    with pytest.raises(KeyError), atomic_folder(folder / "model"):
        raise KeyError
    assert names_in(victim) == []
    assert names_in(folder) == ["model", "model.part"]
    assert (folder / "model" / "weights").read_text() == "new"


def test_a_folder_that_takes_no_file_is_found_by_writing_one(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "file is not a folder" in why_not_writable(tmp_path / "file" / "run")
    # root passes every check of permissions, also here
    assert "/proc takes no new file" in why_not_writable(Path("/proc/run/a"))
    assert why_not_writable(tmp_path / "a" / "b") == ""
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
