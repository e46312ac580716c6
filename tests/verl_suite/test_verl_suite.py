"""The names that verl's tests import exist here, and failed and passed tests are counted."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from tests.verl_suite.__main__ import read_report
from tests.verl_suite.names import MODULES, RENAMED, write_alias
from tests.verl_suite.stand_ins import absent_names, errors_are_assertions
from verl_like import Worker
from verl_like.errors import BatchError


def test_every_imported_name_exists() -> None:
    for imports in MODULES.values():
        for source, names in imports.items():
            module = importlib.import_module(source)
            assert [name for name in names if not hasattr(module, name)] == []
    for names in RENAMED.values():
        assert all(hasattr(importlib.import_module("verl_like"), ours) for ours in names.values())


def test_the_alias_package_exports_our_names(tmp_path: Path) -> None:
    write_alias(tmp_path)
    path = tmp_path / "verl" / "single_controller" / "base" / "__init__.py"
    space: dict[str, object] = {}
    exec(path.read_text(encoding="utf-8"), space)
    assert space["Worker"] is Worker
    assert "verl" not in sys.modules


def test_a_missing_name_raises_when_it_is_called() -> None:
    absent = absent_names("verl.utils", ["verl.utils.device"])
    call = absent("shared_memory")
    with pytest.raises(NotImplementedError, match=r"verl\.utils\.shared_memory is not here"):
        call()
    with pytest.raises(AttributeError):
        absent("device")


def test_our_errors_count_as_assertion_errors() -> None:
    raises = errors_are_assertions(pytest.raises)
    with raises(AssertionError, match="in other words"):
        raise BatchError("wrong")
    with pytest.raises(BatchError), raises(KeyError):
        raise BatchError("wrong")


def test_read_report_counts_passed_and_other_tests(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(
        '<testsuites><testsuite><testcase name="a"/><testcase name="b"><failure message="wrong\n'
        'more"/></testcase><testcase name="c"><skipped message="no GPU"/></testcase></testsuite>'
        "</testsuites>",
        encoding="utf-8",
    )
    outcome = read_report(report)
    assert outcome.passed == 1
    assert outcome.others == ["b: failure: wrong more", "c: skipped: no GPU"]
