"""The environment in a sandbox; no run starts in it."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import pytest

from trainer import PPO, run
from verl_like.errors import ConfigError
from verl_like.process import sandbox
from verl_like.process.kernel_limits import _restrict_with_landlock, isolate_network
from verl_like.process.sandbox import MARK, visible_environment
from workers.rewards.code import run_tests


def test_the_visible_environment_has_no_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {
        "HF_TOKEN": "s",
        "WANDB_API_KEY": "s",
        "JUDGE_KEY": "k",
        "LC_ALL": "C",
        "HOME": "/h",
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    visible = visible_environment(["JUDGE_KEY"])
    assert {name: visible.get(name) for name in variables} == variables | {
        "HF_TOKEN": None,
        "WANDB_API_KEY": None,
    }


class NoNamespaces:
    """The C library of a machine without namespaces and Landlock."""

    @staticmethod
    def unshare(_: int) -> int:
        return -1

    @staticmethod
    def prctl(*_: object) -> int:
        return -1

    @staticmethod
    def syscall(*_: object) -> int:
        return -1


def test_programs_of_a_model_are_rejected_without_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sandbox, "IS_LINUX", False)
    with pytest.raises(ConfigError, match="programs that a model writes run only on Linux"):
        run_tests("code", "print(1)", {"inputs": [""], "outputs": ["1"]})


@pytest.mark.linux
def test_a_machine_without_landlock_or_namespaces_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda *_, **__: NoNamespaces)
    with pytest.raises(ConfigError, match=r"Linux 5\.13\+ with Landlock"):
        _restrict_with_landlock("/tmp")
    with pytest.raises(ConfigError, match=r"network namespace \(.*profile\)\. Set network=true\."):
        isolate_network(" Set network=true.")


@pytest.mark.parametrize("start", [run, lambda config: PPO(config, [])])
def test_no_run_starts_in_a_sandbox(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "1")
    config = SimpleNamespace(trainer=SimpleNamespace(dry_run=False))
    with pytest.raises(ConfigError, match="code in a sandbox tries to start a run"):
        start(config)
