"""Find the trained model of a run: its folder, its role, and its training configuration.

`verl-like export`, `eval` and `chat` find it by a run folder, a checkpoint, or a role's folder in a
checkpoint:

    saved = find_saved_model("runs/sums")        # the policy after the last step
    saved.export(Path("out"))                    # a folder for `from_pretrained`
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.run_folder.folder import (
    MODEL,
    marker_of_model,
    read_marker,
    reject_damaged,
    saved_steps,
)
from trainer.run_folder.result import EXPORT
from verl_like.errors import CheckpointError, DamagedCheckpointError, nearest
from workers.config import ModelConfig
from workers.models.folder import is_on_hub, model_folder
from workers.training.checkpoints.manifest import (
    ADAPTER,
    MANIFEST,
    MARKER,
    read_manifest,
    reject_changed,
)

SECTIONS = ("{role}.model", "actor_rollout_ref.model", "model")
"""Sections where a configuration may have the model of a role; the first existing one counts."""
COPIED = (
    *("path", "random_init_seed", "dtype"),
    *("lora_rank", "lora_alpha", "target_modules", "quantization", "freeze_vision_tower"),
)
"""Keys of the model that determine its weights; others only affect how passes compute."""


@dataclass(frozen=True)
class SavedModel:
    """A trained role in a checkpoint, or the final model of a run."""

    run: Path
    """The run folder."""
    step: int
    folder: Path
    """`global_step_N/<role>`, or the run's `model`."""
    model: ModelConfig
    config: Mapping[str, Any]
    """Dotted key -> value of the run that wrote it."""

    def export(self, out: Path, *, as_adapter: bool = False, of_average: bool = False) -> None:
        """Write the folder `out` for `from_pretrained` or peft.

        The options are those of `export_checkpoint`. A run's final model is copied as it is.
        """
        if self.folder.name == MODEL:
            reject_damaged(self.folder)
            adapter = self.folder / ADAPTER
            if as_adapter:
                shutil.copytree(adapter, out, dirs_exist_ok=True)
                return
            for name in read_marker(self.folder)["files"]:
                if adapter not in (self.folder / name).parents:
                    (out / name).parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(self.folder / name, out / name)
            return
        from workers.training.checkpoints.export import export_checkpoint

        settings = {name: self.config[name] for name in ("score_at",) if self.config.get(name)}
        export_checkpoint(
            self.folder,
            self.model,
            out,
            as_adapter=as_adapter,
            of_average=of_average,
            settings=settings,
        )

    def loadable(self, scratch: Path) -> Path:
        """Return the folder that the run exported, or `scratch` after an export into it.

        Raise DamagedCheckpointError if a file of the folder has changed.
        """
        if self.folder.name == MODEL:
            _reject_changed_model(self.folder)
            return self.folder
        if (self.folder / EXPORT / "config.json").is_file():
            reject_changed(self.folder, f"{EXPORT}/")
            return self.folder / EXPORT
        self.export(scratch)
        return scratch


def find_loadable(name: str, scratch: Path) -> tuple[Path, SavedModel | None]:
    """Return the folder to load for a model's folder, its name on the hub, or a run's path.

    Also return the run's model if the path is of a run. A checkpoint without an export is exported
    into `scratch`. Raise DamagedCheckpointError if a file differs from its checksum.
    """
    if is_on_hub(name) or Path(name, "config.json").is_file():
        folder = model_folder(name)
        if (folder / MARKER).is_file():
            _reject_changed_model(folder)
        return folder, None
    saved = find_saved_model(name, or_model=True)
    return saved.loadable(scratch), saved


def _reject_changed_model(folder: Path) -> None:
    try:
        reject_damaged(folder)
    except DamagedCheckpointError as error:
        raise DamagedCheckpointError(
            f"{error}. Restore the file. If you changed it on purpose, remove {folder / MARKER}."
        ) from None


def find_saved_model(
    path: str | Path,
    role: str = "",
    base: str = "",
    *,
    in_checkpoint: bool = False,
    or_model: bool = False,
) -> SavedModel:
    """Return the model of `role` at `path`; without a role, the policy or the only model.

    For a run folder it is the final model of the run, or the newest checkpoint's. `base` replaces
    the path of the model that training started from, if that model has moved.
    With `or_model`, the error says that a model folder or name is accepted, too.
    """
    final = None if in_checkpoint else _model_left(Path(path), role, base)
    if final is not None:
        return final
    checkpoint, inside = find_checkpoint(Path(path), or_model)
    roles = trained_roles(checkpoint)
    role = role or inside or _usual_role(checkpoint, roles)
    if role not in roles:
        raise CheckpointError(
            f"{checkpoint} has no weights of {role!r}; it has {', '.join(roles) or 'none'}."
            f"{nearest(role, roles)}"
        )
    marker = read_marker(checkpoint)
    config = marker["config"]
    model = _model_config(config, role, base)
    return SavedModel(checkpoint.parent, marker["step"], checkpoint / role, model, config)


def _model_left(run: Path, role: str, base: str) -> SavedModel | None:
    """Return the run's final model if it is of that role and no checkpoint is newer, or None."""
    marker = marker_of_model(run)
    if marker is None:
        return None
    config = marker["config"]
    if SECTIONS[1] + ".path" in config and role not in ("", "actor"):
        return None
    model = _model_config(config, role, base)
    return SavedModel(run, marker["step"], run / MODEL, model, config)


def find_checkpoint(path: Path, or_model: bool = False) -> tuple[Path, str]:
    """Return (the `global_step_N` folder, the role) that a path names; the role may be ""."""
    if (path / MARKER).is_file():
        return path, ""
    if (path / MANIFEST).is_file() and (path.parent / MARKER).is_file():
        return path.parent, path.name
    steps = saved_steps(path)
    if not steps:
        reason = "holds no completed checkpoint" if path.is_dir() else "is not a folder"
        runs = {marker.parent.parent for marker in path.glob(f"*/global_step_*/{MARKER}")}
        near = sorted(map(str, runs))
        hint = f" Runs in it: {', '.join(near[:5])}." if near else ""
        models = "a model folder, a name on the hub (ORG/NAME), " if or_model else ""
        raise CheckpointError(
            f"{path} {reason}. Use {models}a run folder, a global_step_N in it, or a role's folder "
            f"in a global_step_N.{hint}"
        )
    return path / f"global_step_{steps[-1]}", ""


def trained_roles(checkpoint: Path) -> list[str]:
    """Return the roles whose weights are in a checkpoint."""
    folders = [manifest.parent for manifest in sorted(checkpoint.glob(f"*/{MANIFEST}"))]
    return [folder.name for folder in folders if "model" in read_manifest(folder)["contents"]]


def _usual_role(checkpoint: Path, roles: list[str]) -> str:
    if "actor" in roles:
        return "actor"
    if len(roles) == 1:
        return roles[0]
    if not roles:
        raise CheckpointError(
            f"{checkpoint} has no weights: its run trains no model, or checkpoint.save_contents "
            "lacked 'model'. Use the checkpoint of a run that saves them."
        )
    raise CheckpointError(
        f"{checkpoint} has weights of {', '.join(roles)}. Choose one with --role."
    )


def _model_config(config: Mapping[str, Any], role: str, base: str) -> ModelConfig:
    """Return the configuration that the role's model was built from."""
    sections = [section.format(role=role) for section in SECTIONS]
    section_of_role = next((section for section in sections if f"{section}.path" in config), None)
    if section_of_role is None:
        if not base:
            raise CheckpointError(
                f"the configuration of the run does not say which model {role!r} was trained "
                "from. Set the folder of this model with --model."
            )
        return ModelConfig(path=base)
    keys = {
        name: config[f"{section_of_role}.{name}"]
        for name in COPIED
        if f"{section_of_role}.{name}" in config
    }
    if base:
        keys["path"] = base
    return ModelConfig(**keys)
