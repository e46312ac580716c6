"""Workers import our packages from where the driver found them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ray


def test_folders_that_shadow_our_packages_move_behind_ours(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from verl_like.backends.ray.transport import local_packages, prefer_local_packages
    from verl_like.process.child import ROOT

    for name in ("package", "module", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "package" / "verl_like").mkdir()
    (tmp_path / "module" / "tests.py").touch()
    names = local_packages()
    assert "verl_like" in names
    assert "torch" not in names
    package, module, other = (str(tmp_path / name) for name in ("package", "module", "other"))
    monkeypatch.setattr(sys, "path", [package, other, ROOT, module])
    prefer_local_packages(["verl_like", "tests"])
    assert sys.path == [other, ROOT, package, module]
