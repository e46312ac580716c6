"""A runtime environment in which no worker could start is rejected before Ray tries it."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from verl_like.backends.ray.runtime_env import check_runtime_env
from verl_like.errors import ConfigError

PREFIX = "ray.runtime_env"
BAD: list[tuple[dict[str, Any], str]] = [
    (
        {"py_executable": "uv run --nowhere"},
        f"{PREFIX}.py_executable=uv run --nowhere: this Python",
    ),
    ({"py_executable": "/nowhere/python"}, "not found|No such file"),
    ({"py_exe": "x"}, "has no field 'py_exe'. Did you mean 'py_executable'"),
    ({"working_dir": "/nowhere"}, "/nowhere is not a valid path"),
    ({"env_vars": {"A": 1}}, "Ray rejects ray.runtime_env.*must be of type"),
]


@pytest.mark.parametrize(("env", "words"), BAD)
def test_an_environment_without_workers_is_rejected(env: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_runtime_env(env, runs_here=True)


def test_an_environment_that_imports_this_package_is_accepted() -> None:
    check_runtime_env({"py_executable": sys.executable, "env_vars": {"A": "1"}}, runs_here=True)
    check_runtime_env({"py_executable": "/nowhere/python"}, runs_here=False)
