"""Every path that `docs/layout.md` names is there."""

from __future__ import annotations

import re

from tests import ROOT

PAGE = (ROOT / "docs" / "layout.md").read_text(encoding="utf-8")
PATH = re.compile(r"`((?:verl_like|workers|trainer|tests)/[\w/.]+)`")


def test_every_path_of_the_page_is_there() -> None:
    paths = PATH.findall(PAGE)
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).exists()] == []
