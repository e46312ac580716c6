"""A PPO run on text imports no tool and nothing of agents at once."""

from __future__ import annotations

import pytest

from tests import ROOT
from tests.conftest import load

counts = load("tools/counts.py")
MAX_LINES, MAX_FILES = 23_250, 200
"""Limits that may only fall."""
NOT_NEEDED = ("trainer/tools", "workers/agents")


@pytest.mark.long
def test_a_ppo_run_imports_little_at_once() -> None:
    imported = counts.closure()
    assert counts.total(imported) <= MAX_LINES
    assert len(imported) <= MAX_FILES
    for path in (str(path.relative_to(ROOT)) for path in imported):
        if not path.endswith("__init__.py"):
            assert not path.startswith(NOT_NEEDED), path


def test_comments_docstrings_and_blank_lines_are_not_code() -> None:
    text = '"""Doc."""\n\n# comment\ndef f(\n    x,\n):\n    """Doc.\n\n    More."""\n'
    assert counts.code_lines(text + '    return """a\nb"""\n') == 5
