"""The hooks of a run: methods that do nothing, which a subclass of a trainer overrides.

`trainer.cls=my_module.MyTrainer` runs the subclass. This is their order; the indented ones come in
every step, and those of a validation wherever one is due, which may be before the first step:

    on_init_end
    on_train_begin
        on_step_begin
        on_sample_begin  on_sample_end          (in recipes that make samples)
        on_validate_begin  on_validate_end
        on_step_end
    on_train_end
"""

from __future__ import annotations

from verl_like.batch.protocol import DataProto


class Hooks:
    """What happens when: override, and look at `self`."""

    global_step: int
    """The number of the step that runs, or ran last."""

    def on_init_end(self) -> None:
        """Models are built, and the rollout has the actor's weights."""

    def on_train_begin(self) -> None:
        """Before the first step, and before the validation that may precede it."""

    def on_step_begin(self) -> None:
        """`self.global_step` is the number of the step that begins."""

    def on_sample_begin(self) -> None:
        """Before the samples of a step are made."""

    def on_sample_end(self, batch: DataProto) -> None:
        """`batch` are the samples, as they go into the score stage."""

    def on_validate_begin(self) -> None:
        """Before a validation that is due."""

    def on_validate_end(self, metrics: dict[str, float]) -> None:
        """`metrics` are those of the validation."""

    def on_step_end(self, metrics: dict[str, float]) -> None:
        """`metrics` are written next; what is added to them is written too."""

    def on_train_end(self) -> None:
        """After the last step, or after the one that failed."""
