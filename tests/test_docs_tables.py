"""The tables in the docs match the code; `python docs/make_tables.py` writes them."""

from __future__ import annotations

import pytest

from tests.conftest import load


@pytest.mark.parametrize("name", load("docs/make_tables.py").TABLES)
def test_a_table_is_current(name: str) -> None:
    path, text = load("docs/make_tables.py").filled(name)
    assert path.read_text(encoding="utf-8") == text, "run: python docs/make_tables.py"
