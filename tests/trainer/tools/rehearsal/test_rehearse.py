"""The command prints the rehearsal after the check; a block that hangs is interrupted."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from tests.trainer.tools.rehearsal.jobs import settings_of
from trainer import load_config
from trainer.cli.check import main
from trainer.launch import NO_ERRORS
from trainer.tools.rehearsal import describe_ends, rehearse, time_limit
from verl_like.errors import WaitTimeoutError


def test_the_command_rehearses_after_the_check(
    tiny_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def rehearse(config: Any) -> list[str]:
        return [f"rehearsed {config.data.train_batch_size}"]

    monkeypatch.setattr("trainer.tools.rehearsal.rehearse", rehearse)
    main(["--rehearse", *overrides(tiny_dir, tmp_path / "run", "trainer.backend=local")])
    text = capsys.readouterr().out
    assert text.index(NO_ERRORS) < text.index("rehearsed 8") < text.index("Next: start the run")


def test_a_block_that_hangs_is_interrupted_with_its_place() -> None:
    with pytest.raises(WaitTimeoutError, match=r"within 0\.2 s; it was at .*test_rehearse\.py"):
        with time_limit(0.2):
            time.sleep(30)


def test_the_shares_of_the_ends_of_trajectories_are_shown() -> None:
    line = describe_ends(Counter(max_turns=6, terminated=2))
    assert line == (
        "environment: 8 trajectories ended, 75% by environment.max_turns, 25% by the environment"
    )


@pytest.mark.long
def test_an_environment_that_only_the_limit_of_turns_ends_gets_a_warning(
    tiny_dir: Path, tmp_path: Path
) -> None:
    more = ("environment=<file>:NeverEnds", "environment.max_turns=2", "algorithm=grpo")
    settings = settings_of("ppo", tiny_dir, tmp_path, *more, "data.max_response_length=64")
    (line,) = {line for line in rehearse(load_config(settings)) if "trajectories ended" in line}
    assert "trajectories ended, 100% by environment.max_turns. warning: the environment" in line
