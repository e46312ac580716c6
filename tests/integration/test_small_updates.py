"""A run whose updates change nothing says so, wherever the rollout is."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, lines, overrides
from trainer import load_config, run


@pytest.mark.parametrize("placement", ["colocate", "standalone"])
def test_a_learning_rate_that_changes_nothing_raises_an_alarm(
    tiny_dir: Path, tmp_path: Path, placement: str, caplog: pytest.LogCaptureFixture
) -> None:
    settings = (
        *("trainer.backend=local", f"placement={placement}", "trainer.n_gpus_per_node=2"),
        *("actor_rollout_ref.actor.optim.lr=1e-12", "trainer.total_training_steps=1"),
        *(*POLICY_ALONE, *FEW_ROWS),
    )
    run(load_config(overrides(tiny_dir, tmp_path, *settings)))
    (line,) = lines(tmp_path)
    assert line["actor/weights_changed_fraction"] < 0.005
    assert [
        text for text in caplog.messages if "of its weights at a learning rate of 1e-12" in text
    ]
