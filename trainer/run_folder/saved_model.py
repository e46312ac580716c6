"""The model in a run's checkpoint: which role's it is, and what it was trained with.

`verl-like export`, `eval` and `chat` find it here, by a run folder, a checkpoint, or a role's
folder in one:

    saved = find_saved_model("runs/letters")        # the newest checkpoint, the policy
    saved.export(Path("out"))                       # what `from_pretrained` loads
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer.run_folder.marker import MARKER, committed, read_marker
from trainer.run_folder.result import EXPORT
from verl_like.errors import CheckpointError, nearest
from workers.config import ModelConfig
from workers.training.manifest import MANIFEST, read_manifest

SECTIONS = ("{role}.model", "actor_rollout_ref.model", "model")
"""Where a configuration may have the model of a role, the first that is there."""
COPIED = ("path", "random_init_seed", "dtype", "lora_rank", "lora_alpha", "target_modules")
"""The keys of the model that decide what its weights are; others say how passes compute."""


@dataclass(frozen=True)
class SavedModel:
    """A trained role in a checkpoint."""

    folder: Path
    """`global_step_N/<role>`."""
    model: ModelConfig
    config: Mapping[str, Any]
    """Dotted key -> value of the run that wrote it."""

    def export(self, out: Path, **how: bool) -> None:
        """Write the folder `out`, for `from_pretrained` or peft, as `export_checkpoint` says."""
        from workers.training.checkpoint_export import export_checkpoint

        settings = {name: self.config[name] for name in ("score_at",) if self.config.get(name)}
        export_checkpoint(self.folder, self.model, out, settings=settings, **how)

    def loadable(self, scratch: Path) -> Path:
        """The folder that the run exported, else an export into `scratch`."""
        exported = self.folder / EXPORT
        if exported.is_dir():
            return exported
        self.export(scratch)
        return scratch


def find_saved_model(path: str | Path, role: str = "", base: str = "") -> SavedModel:
    """The model of `role` (empty: the policy, or the only one) in what is at `path`.

    `base` stands for the model that it was trained from, where that is elsewhere now.
    """
    checkpoint, inside = find_checkpoint(Path(path))
    roles = trained_roles(checkpoint)
    role = role or inside or _usual_role(checkpoint, roles)
    if role not in roles:
        raise CheckpointError(
            f"{checkpoint} has no weights of {role!r}; there are {', '.join(roles) or 'none'}."
            f"{nearest(role, roles)}"
        )
    config = read_marker(checkpoint)["config"]
    return SavedModel(checkpoint / role, _model_config(config, role, base), config)


def find_checkpoint(path: Path) -> tuple[Path, str]:
    """(the `global_step_N` folder, the role) that a path means; no role is an empty name."""
    if (path / MARKER).is_file():
        return path, ""
    if (path / MANIFEST).is_file() and (path.parent / MARKER).is_file():
        return path.parent, path.name
    steps = committed(path)
    if not steps:
        what = "holds no completed checkpoint" if path.is_dir() else "is no folder"
        runs = {found.parent.parent for found in path.glob(f"*/global_step_*/{MARKER}")}
        near = sorted(map(str, runs))
        hint = f" Runs in it: {', '.join(near[:5])}." if near else ""
        raise CheckpointError(
            f"{path} {what}; give a run folder, a global_step_N in it, or a role's folder in that."
            f"{hint}"
        )
    return path / f"global_step_{steps[-1]}", ""


def trained_roles(checkpoint: Path) -> list[str]:
    """The roles whose weights a checkpoint holds."""
    folders = [manifest.parent for manifest in sorted(checkpoint.glob(f"*/{MANIFEST}"))]
    return [folder.name for folder in folders if "model" in read_manifest(folder)["contents"]]


def _usual_role(checkpoint: Path, roles: list[str]) -> str:
    if "actor" in roles:
        return "actor"
    if len(roles) == 1:
        return roles[0]
    raise CheckpointError(
        f"{checkpoint} has weights of {', '.join(roles) or 'no role (save_contents lacked model)'};"
        " say which with --role."
    )


def _model_config(config: Mapping[str, Any], role: str, base: str) -> ModelConfig:
    """What the role's model was built from."""
    sections = [section.format(role=role) for section in SECTIONS]
    found = next((section for section in sections if f"{section}.path" in config), None)
    if found is None:
        if not base:
            raise CheckpointError(
                f"the configuration of the run does not say what {role!r} was trained from; name "
                "its folder with --model."
            )
        return ModelConfig(path=base)
    keys = {name: config[f"{found}.{name}"] for name in COPIED if f"{found}.{name}" in config}
    if base:
        keys["path"] = base
    return ModelConfig(**keys)
