"""The command prints the rehearsal after the check; a block that hangs is interrupted."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from tests.integration.runs import overrides
from trainer.cli.check import main
from trainer.launch import NO_ERRORS
from trainer.tools.rehearsal import time_limit
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
