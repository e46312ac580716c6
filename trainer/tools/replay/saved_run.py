"""A run folder for a replay: its configuration, checkpoints, and the metrics of a step.

The folder is only read.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.loop import Trainer
from trainer.run_folder.folder import (
    CONFIG_FILE,
    committed,
    installed_versions,
    named,
    read_marker,
    saved_tree,
)
from verl_like.errors import CheckpointError, ConfigError
from verl_like.files import json_objects
from verl_like.registry import load_object

RECIPES = (
    "trainer.ppo.recipe.PPO",
    "trainer.sft.recipe.SFT",
    "trainer.reward_model.recipe.REWARD_MODEL",
    "trainer.preference.recipe.DPO",
)
"""The recipes whose steps depend only on a checkpoint."""
ASYNC = "trainer.async_training.step.AsyncTrainer"
PACKAGE = "verl-like"


@dataclass(frozen=True)
class SavedRun:
    """A run to replay."""

    folder: Path
    config: RunConfig
    trainer_cls: type[Trainer]

    @classmethod
    def read(cls, folder: Path) -> SavedRun:
        """Read a run folder; reject other folders, unknown keys and recipes without a replay."""
        tree = saved_tree(folder)
        name = OmegaConf.select(tree, "trainer.cls") if OmegaConf.is_dict(tree) else None
        if not isinstance(name, str):
            raise ConfigError(f"{folder / CONFIG_FILE} has no trainer.cls.")
        trainer_cls = load_object(name, "trainer.cls")
        recipe = _recipe_of(trainer_cls, name)
        recipe.load_registries()
        try:  # the run's own configuration, which was settled and checked when it was written
            config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(recipe.schema), tree))
        except OmegaConfBaseException as error:
            raise ConfigError(
                f"{folder / CONFIG_FILE} does not fit this version of {PACKAGE}: "
                f"{str(error).splitlines()[0]}. Replay the run with the version in "
                f"{folder}/starts.jsonl."
            ) from error
        assert isinstance(config, RunConfig), f"the schema gave a {type(config).__name__}"
        return cls(folder, config, trainer_cls)

    def metrics_of(self, step: int) -> dict[str, float]:
        """Return the run's metrics of a step."""
        entries, _ = json_objects(self.folder / "metrics.jsonl")
        lines = {line["step"]: line for line in entries if "step" in line}
        steps = sorted(number for number in lines if number > 0)
        if step not in steps:
            known = f"it made steps {steps[0]} to {steps[-1]}" if steps else "it made none"
            raise ConfigError(f"--step={step}: {self.folder} has no metrics of that step; {known}.")
        return dict(lines[step])

    def start_of(self, step: int, may_begin: bool) -> Path | None:
        """Return the newest checkpoint before a step; None means the run's beginning.

        Without such a checkpoint, step 1 is replayed from where the run began, and so is a later
        step if `may_begin`; otherwise raise an error.
        """
        steps = committed(self.folder)
        earlier = [number for number in steps if number < step]
        if earlier:
            start = self.folder / f"global_step_{earlier[-1]}"
            here = installed_versions().get(PACKAGE)
            wrote = read_marker(start)["versions"].get(PACKAGE, here)
            if wrote != here:  # loading warns of other packages
                raise CheckpointError(
                    f"{start} was written by {PACKAGE} {wrote}, and {here} is installed: a "
                    f"replay may differ. Install {PACKAGE}=={wrote} to replay the step."
                )
            return start

        trainer = self.config.trainer
        if step > 1 and not may_begin:
            raise CheckpointError(
                f"--step={step}: {self.folder} has no checkpoint of an earlier step (it has "
                f"{named(steps)}). Repeat all {step} steps with --from-start, or replay a step "
                "after a checkpoint; trainer.max_ckpt_to_keep=null keeps all checkpoints of a run."
            )
        if trainer.resume_mode == "resume_path":
            assert trainer.resume_from_path is not None, "resume_path comes with a path"
            return Path(trainer.resume_from_path)
        return None


def _recipe_of(trainer_cls: Any, name: str) -> Recipe[Any]:
    """Return the recipe of this trainer class or of its base class."""
    recipes: list[Recipe[Any]] = [load_object(path, "recipe") for path in RECIPES]
    owners = {load_object(recipe.schema().trainer.cls, recipe.name): recipe for recipe in recipes}
    ours = {*owners, load_object(ASYNC, "async")}
    base = next((base for base in getattr(trainer_cls, "__mro__", ()) if base in ours), None)
    if base not in owners:
        raise ConfigError(
            f"a run of trainer.cls={name} cannot be replayed, only runs of verl-like "
            f"{', '.join(recipe.name for recipe in recipes)}."
        )
    return owners[base]
