"""The order of the callbacks of an asynchronous run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.runs import FEW_ROWS, POLICY_ALONE, overrides
from trainer import load_config, run
from trainer.async_training.recipe import ASYNC
from trainer.hooks import Hooks

HOOKS = [name for name in vars(Hooks) if name.startswith("on_")]


class Recorder:
    """Records every hook with its step."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, str]] = []
        for hook in HOOKS:
            setattr(self, hook, lambda trainer, *_, hook=hook: self.note(trainer, hook))

    def note(self, trainer: Any, hook: str) -> None:
        self.seen.append((trainer.global_step, hook.removeprefix("on_")))


def test_hooks_are_called_in_order(tiny_dir: Path, tmp_path: Path, few_validated: str) -> None:
    settings = (
        "trainer.backend=local",
        "trainer.total_training_steps=2",
        "trainer.save_freq=2",
        few_validated,
        "trainer.test_freq=2",
        "trainer.val_before_train=false",
        *(*POLICY_ALONE, *FEW_ROWS),
    )
    recorder = Recorder()
    run(load_config(overrides(tiny_dir, tmp_path, *settings), ASYNC), callbacks=[recorder])
    step = ["step_begin", "sample_begin", "generated", "sample_end", "update"]
    hooks = [seen for seen in recorder.seen if not seen[1].startswith(("stage_", "filter"))]
    assert hooks == [
        (0, "init_end"),
        (0, "train_begin"),
        *[(1, name) for name in [*step, "step_end"]],
        *[(2, name) for name in [*step, "validate_begin", "validate_end", "step_end", "save_end"]],
        (2, "train_end"),
    ]
