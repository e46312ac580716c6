"""A run folder as a replay reads it: configuration, checkpoints, the metrics of a step.

Nothing in the folder is written. What makes a replay impossible is refused here, in words.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError  # type: ignore[import-untyped]

from trainer.config.recipe import Recipe
from trainer.config.schema import RunConfig
from trainer.launch import trainer_class
from trainer.loop import Trainer
from trainer.run_folder.folder import CONFIG_FILE, installed_versions
from trainer.run_folder.marker import committed, named, read_marker
from verl_like.errors import CheckpointError, ConfigError
from verl_like.files import json_objects
from verl_like.registry import load_object

RECIPES = {
    "ppo": "trainer.ppo.recipe.PPO",
    "sft": "trainer.sft.recipe.SFT",
    "reward-model": "trainer.reward_model.recipe.REWARD_MODEL",
    "dpo": "trainer.preference.recipe.DPO",
}
"""Command -> the recipe whose steps follow from a checkpoint alone."""
DETACHED = "trainer.detached.step.DetachedTrainer"
PACKAGE = "verl-like"


@dataclass(frozen=True)
class SavedRun:
    """A run that has been made."""

    folder: Path
    config: RunConfig
    trainer_cls: type[Trainer]

    @classmethod
    def read(cls, folder: Path) -> SavedRun:
        """Read a run folder; other folders, and runs of other versions or recipes, are refused."""
        tree = _tree(folder / CONFIG_FILE)
        trainer_cls = _trainer_class(tree, folder)
        return cls(folder, _typed(tree, _recipe_of(trainer_cls), folder), trainer_cls)

    def metrics_of(self, step: int) -> dict[str, float]:
        """The run's line of metrics of a step that it has made."""
        found, _ = json_objects(self.folder / "metrics.jsonl")
        lines = {line["step"]: line for line in found if "step" in line}
        steps = sorted(number for number in lines if number > 0)
        if step not in steps:
            made = f"it made steps {steps[0]} to {steps[-1]}" if steps else "it made none"
            raise ConfigError(f"--step={step}: {self.folder} has no metrics of that step; {made}.")
        return dict(lines[step])

    def start_of(self, step: int, may_begin: bool) -> Path | None:
        """The newest checkpoint from which a step can be made again; None: the run's beginning.

        That is taken for step 1, and for later ones where it `may_begin`.
        """
        steps = committed(self.folder)
        earlier = [number for number in steps if number < step]
        if earlier:
            start = self.folder / f"global_step_{earlier[-1]}"
            _refuse_other_version(start)
            return start

        trainer = self.config.trainer
        if step > 1 and not may_begin:
            raise CheckpointError(
                f"--step={step}: {self.folder} has no checkpoint of an earlier step (it has "
                f"{named(steps)}). Make all {step} steps again with --from-start, or replay a step "
                "after one of these; trainer.max_ckpt_to_keep=null keeps all of a run's."
            )
        if trainer.resume_mode == "resume_path":
            assert trainer.resume_from_path is not None, "resume_path comes with a path"
            return Path(trainer.resume_from_path)
        return None


def _tree(path: Path) -> Any:
    if not path.is_file():
        raise ConfigError(f"{path.parent} is not a run folder: it has no {path.name}.")
    try:
        return OmegaConf.load(path)
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a run's configuration: {error}") from error


def _trainer_class(tree: Any, folder: Path) -> type[Trainer]:
    """The class that made the steps."""
    try:
        name = str(tree.trainer.cls)
    except (OmegaConfBaseException, AttributeError) as error:
        raise ConfigError(f"{folder / CONFIG_FILE} names no trainer.cls.") from error
    named_alone = RunConfig()
    named_alone.trainer.cls = name
    return trainer_class(named_alone)


def _recipe_of(trainer_cls: type[Trainer]) -> Recipe[Any]:
    """The recipe whose trainer it is, or a subclass of."""
    recipes = {name: load_object(path, name) for name, path in RECIPES.items()}
    owners = {load_object(each.schema().trainer.cls, name): each for name, each in recipes.items()}
    owners[load_object(DETACHED, "detached")] = None
    found = next((owners[base] for base in trainer_cls.__mro__ if base in owners), None)
    if found is None:
        raise ConfigError(
            f"a run of {trainer_cls.__module__}.{trainer_cls.__qualname__} cannot be replayed: its "
            "steps do not follow from a checkpoint alone. Those of verl-like "
            f"{', '.join(RECIPES)} do."
        )
    return found  # type: ignore[no-any-return]


def _typed(tree: Any, recipe: Recipe[Any], folder: Path) -> RunConfig:
    """The run's own configuration, which was settled and checked when it was written."""
    recipe.load_registries()
    try:
        config = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(recipe.schema), tree))
    except OmegaConfBaseException as error:
        raise ConfigError(
            f"{folder / CONFIG_FILE} was written by another version of {PACKAGE}: "
            f"{str(error).splitlines()[0]}. Replay it with the version of {folder}/starts.jsonl."
        ) from error
    assert isinstance(config, RunConfig), f"the schema gave a {type(config).__name__}"
    return config


def _refuse_other_version(start: Path) -> None:
    """Refuse steps of another version of ours; a checkpoint warns of other packages itself."""
    here = installed_versions().get(PACKAGE)
    wrote = read_marker(start)["versions"].get(PACKAGE, here)
    if wrote != here:
        raise CheckpointError(
            f"{start} was written by {PACKAGE} {wrote}, here is {here}: its steps may be others. "
            f"Install {PACKAGE}=={wrote} to replay them."
        )
