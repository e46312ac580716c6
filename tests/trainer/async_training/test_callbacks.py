"""Callbacks of an asynchronous run: their order, and their errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.integration.runs import POLICY_ALONE, overrides
from trainer import load_config, run
from trainer.async_training.config import AsyncConfig
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


def config_of(tiny: Path, folder: Path) -> AsyncConfig:
    settings = ("trainer.backend=local", "trainer.total_training_steps=2", "trainer.save_freq=2")
    more = (f"data.val_files={tiny}/val.parquet", "trainer.test_freq=2", *POLICY_ALONE)
    return load_config(
        overrides(tiny, folder, *settings, *more, "trainer.val_before_train=false"), ASYNC
    )


def test_hooks_come_in_their_order(tiny_dir: Path, tmp_path: Path) -> None:
    recorder = Recorder()
    run(config_of(tiny_dir, tmp_path), callbacks=[recorder])
    step = ["step_begin", "sample_begin", "generated", "sample_end", "update"]
    shown = [one for one in recorder.seen if not one[1].startswith(("stage_", "filter"))]
    assert shown == [
        (0, "init_end"),
        (0, "train_begin"),
        *[(1, name) for name in [*step, "step_end"]],
        *[(2, name) for name in [*step, "validate_begin", "validate_end", "step_end", "save_end"]],
        (2, "train_end"),
    ]
