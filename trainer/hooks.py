"""Hooks of a run: methods that do nothing until a subclass of a trainer overrides them.

`trainer.cls=my_module.MyTrainer` runs the subclass. `run(config, callbacks=[...])` also calls the
hooks of objects: each hook right after the trainer's own, with the trainer as first argument. The
observers of `trainer.observers` are such objects, and are called first.

    class Best:
        def on_step_end(self, trainer, metrics): ...

The hooks are called in this order, the indented hooks in every step. The hooks of a validation are
called whenever a validation is due, which may be before the first step:

    on_init_end
    on_train_begin
        on_step_begin
        on_stage_begin  on_stage_end            (around every stage of PPO)
            on_sample_begin  on_generated  on_sample_end     (in the stage that generates)
            on_filter  on_update             (in the update stage; with dynamic sampling, on_filter
                                              comes before on_sample_end)
        on_validate_begin  on_validate_end
        on_step_end
        on_save_end                             (after a step, once a checkpoint is committed)
    on_train_end
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from verl_like.batch.protocol import DataProto
from verl_like.errors import CallbackError, ConfigError, nearest
from verl_like.registry import CallSignature, call_of, check_method


class Hooks:
    """Hooks of a run, which a trainer's subclass can override; `self` is then the trainer.

    An object in `callbacks` needs only some of these methods, and gets the trainer as first
    argument: `on_step_end(self, trainer, metrics)`.

    Example:

        class PrintReward:
            def on_step_end(self, trainer, metrics):
                print(trainer.global_step, metrics["critic/score/mean"])

        callbacks = [PrintReward()]         # of GRPO(...), or of run(config, callbacks=...)
    """

    run: Any
    """The state that the loop and the stages share (`trainer.run_state`)."""

    def call_hook(self, name: str, *arguments: Any) -> None:
        """Call the observers' hooks of that name, then the trainer's own, then the callbacks'."""
        for observer in self.run.observers:
            hook = getattr(observer, name, None)
            if hook is not None:
                hook(self, *arguments)
        getattr(self, name)(*arguments)
        for callback in self.run.callbacks:
            hook = getattr(callback, name, None)
            if hook is None:
                continue
            try:
                hook(self, *arguments)
            except Exception as error:
                raise CallbackError(
                    f"the callback {type(callback).__qualname__}.{name} failed at step "
                    f"{self.run.step}: {type(error).__name__}: {error}"
                ) from error

    def on_init_end(self) -> None:
        """Called in each attempt, when models have their initial weights or a checkpoint's."""

    def on_train_begin(self) -> None:
        """Called in each attempt before its first step, and before a validation ahead of step 1."""

    def on_step_begin(self) -> None:
        """Called before a step, whose number is `self.global_step`."""

    def on_stage_begin(self, stage: str, batch: DataProto | None) -> None:
        """Called before a stage, such as "score"; `batch` is its input, or None if it has none."""

    def on_stage_end(self, stage: str, result: Any) -> None:
        """Called after a stage with its result."""

    def on_sample_begin(self) -> None:
        """Called before the samples of a step are generated."""

    def on_generated(self, batch: DataProto) -> None:
        """Called after each generation, with its samples; a step may generate several times."""

    def on_sample_end(self, batch: DataProto) -> None:
        """Called with all samples of the step before the score stage."""

    def on_filter(self, name: str, before: DataProto, after: DataProto) -> None:
        """Called with the samples before a filter of that name, and those that remain after it."""

    def on_update(self, batch: DataProto) -> None:
        """Called when the update of this batch is launched, before the driver waits for it."""

    def on_validate_begin(self) -> None:
        """Called before a validation."""

    def on_validate_end(self, metrics: dict[str, float]) -> None:
        """Called with the metrics of a validation."""

    def on_step_end(self, metrics: dict[str, float]) -> None:
        """Called with the metrics of a step before they are written; a hook may add some."""

    def on_save_end(self, folder: Path) -> None:
        """Called when the checkpoint in `folder` is committed, so a resume can find it."""

    def on_train_end(self) -> None:
        """Called when an attempt ends, even if it failed before `on_train_begin`."""


def check_callbacks(callbacks: Sequence[object]) -> None:
    """Reject objects without a hook, and methods that are not hooks or have other parameters."""
    hooks = [name for name in vars(Hooks) if name.startswith("on_")]
    for callback in callbacks:
        name = f"the callback {type(callback).__qualname__}"
        if isinstance(callback, type):
            raise ConfigError(f"the callback {callback.__qualname__} is a class. Pass an instance.")
        for method in dir(callback):
            if method.startswith("on_") and method not in hooks:
                raise ConfigError(
                    f"{name} has {method!r}, which is not a hook.{nearest(method, hooks)} Hooks: "
                    f"{', '.join(hooks)}."
                )
            if method in hooks:
                hook = call_of(getattr(Hooks, method))
                check_method(callback, method, name, CallSignature("trainer", *hook.by_position))
        if not any(hasattr(callback, hook) for hook in hooks):
            raise ConfigError(f"{name} has no hook. Define one of {', '.join(hooks)}.")
