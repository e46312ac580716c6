"""usage: verl-like eval MODEL [key=value ...]

MODEL is a model folder, a name on the Hugging Face hub, a run folder (its
trained model), or a global_step_N in one. The command samples every prompt of
data.val_files, scores the samples, and prints mean@n, best@n and maj@n of each
data source, as a run's validation does. If MODEL is a run of `verl-like ppo` or
`async`, its prompts, rewards, sampling and seed are reused; your settings
override them.

  verl-like eval runs/verl_like/ppo data.val_files=[a.parquet,b.jsonl]

  reward=FILE.py:FUNCTION           default: the run's, or a data_source's rule
  actor_rollout_ref.rollout.val_kwargs.n=8  responses per prompt (default: 1)
  actor_rollout_ref.rollout.val_kwargs.do_sample=true  default: greedy
  trainer.default_local_dir=FOLDER  samples, metrics and report (default:
                                    eval/global_step_N in the run, or
                                    runs/eval/NAME for other models)
  verl-like eval --cfg all          every key with its meaning
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trainer.config.keys import leaf_keys
from trainer.config.settings import overrides_of
from trainer.ppo.verl_keys import our_key
from trainer.recipe_command import run_command
from trainer.run_folder.saved_model import SavedModel, find_loadable
from trainer.tools.evaluation.recipe import EVAL, EvaluationConfig
from verl_like.errors import ConfigError

READ_PREFIXES = ("data.", "actor_rollout_ref.rollout.", "reward.", "environment.", "trainer.seed")
"""Prefixes of the keys of a run's configuration that its validation reads."""
EXCLUDED_KEYS = ("data.train_files", "data.total_prompts")
POLICY = "actor_rollout_ref.model.path"
FOLDER = "trainer.default_local_dir"


def main(arguments: Sequence[str]) -> None:
    """Evaluate, or print the keys (`--cfg job`)."""
    if arguments and arguments[0].startswith("-"):
        run_command(EVAL, arguments)
        return
    if not arguments or "=" in arguments[0]:
        raise ConfigError(
            "verl-like eval needs a model as its first argument: a model folder, a name on the "
            "hub, a run folder, or a global_step_N in one."
        )
    with tempfile.TemporaryDirectory(prefix="verl-like-eval-") as scratch:
        model, settings = model_and_settings(arguments[0], Path(scratch))
        run_command(EVAL, arguments[1:], overrides_of({**settings, POLICY: str(model)}))


def model_and_settings(name: str, scratch: Path) -> tuple[Path, dict[str, Any]]:
    """Return the folder to load, and the validation settings of its run.

    A checkpoint without an export is exported into `scratch`; a model on the hub is downloaded.
    """
    model, saved = find_loadable(name, scratch / "model")
    if saved is None:
        return model, {FOLDER: f"runs/eval/{Path(name).resolve().name}"}
    folder = {FOLDER: str(saved.run / "eval" / f"global_step_{saved.step}")}
    return model, settings_of_run(saved) | folder


def settings_of_run(saved: SavedModel) -> dict[str, Any]:
    """Return the keys of a PPO run that an evaluation also has; none for other recipes."""
    if POLICY not in saved.config:
        return {}
    saved_config = {our_key(name) or name: value for name, value in saved.config.items()}
    settings: dict[str, Any] = {}
    for name in (key.name for key in leaf_keys(EvaluationConfig)):
        if not name.startswith(READ_PREFIXES) or name in EXCLUDED_KEYS:
            continue
        below = [key for key in saved_config if key.startswith(f"{name}.")]
        inside = {key.removeprefix(f"{name}."): saved_config[key] for key in below}
        if name in saved_config or inside:
            settings[name] = inside or saved_config[name]
    return settings
