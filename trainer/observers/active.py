"""The observers of a run.

    observers = active_observers(config, recipe)      # once per run; its attempts share them
    trainer = MyTrainer(Run(config, groups, observers), *inputs)

An observer is an object with some of the hooks in `trainer.hooks`. It can also define:

- `name`, `state_dict` and `load_state_dict`: its state goes into checkpoints
- `write_files`: writes its files into a checkpoint
- `at_end`: is called after a completed run
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from trainer.observers.alarms import Alarms


def active_observers(config: Any, recipe: Any) -> list[Any]:
    """Return the observers of a run of this `RunRecipe`, in the order in which they are called."""
    observers: list[Any] = [Alarms(recipe.alarm_rules)]
    # Ray tells the use of its store only over grpcio, which `ray[default]` installs
    if config.trainer.backend == "ray" and find_spec("grpc") is not None:
        from trainer.observers.object_store import ObjectStore

        observers.insert(0, ObjectStore())
    if recipe.sample_metrics is None:
        return observers

    from trainer.observers.sample_log import SampleWatch
    from trainer.observers.saved_batches import DrawCheck, SavedBatches, WrittenSamples

    observers = [SavedBatches(config), SampleWatch(), DrawCheck(), WrittenSamples(), *observers]
    if config.trainer.record != "0":
        from trainer.observers.saved_batches import RecordedSteps

        observers.append(RecordedSteps(config))
    return observers


def end_of_run(observers: Sequence[Any]) -> None:
    """Call `at_end` of the observers that have it, after a completed run."""
    for observer in observers:
        if hasattr(observer, "at_end"):
            observer.at_end()
