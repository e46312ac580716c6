"""What a sandbox sees of the environment, and that no run starts in it."""

from __future__ import annotations

from typing import Any

import pytest

from trainer import PPO, run
from verl_like.errors import ConfigError
from verl_like.process.sandbox import MARK, visible_environment


def test_of_the_environment_it_sees_what_holds_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {"HF_TOKEN": "s", "WANDB_API_KEY": "s", "JUDGE_KEY": "k", "LC_ALL": "C", "HOME": "/h"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    seen = visible_environment(["JUDGE_KEY"])
    assert {name: seen.get(name) for name in given} == given | {
        "HF_TOKEN": None,
        "WANDB_API_KEY": None,
    }


@pytest.mark.parametrize("start", [run, lambda config: PPO(config, [])])
def test_no_run_starts_in_it(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, "1")
    with pytest.raises(ConfigError, match="a run is started while a reward function is loaded"):
        start("no configuration is looked at")
