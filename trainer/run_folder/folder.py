"""The run folder (`trainer.default_local_dir`), and what is written into it when a run starts.

<run folder>/
  run.lock           whose the folder is, while it runs     (trainer.run_folder.lock)
  config.yaml        the configuration, resolved            (here, at start)
  starts.jsonl       commands, hosts, package versions      (trainer.run_folder.starts, at start)
  inputs/            model, rows, rewards of a Python run   (trainer.api)
  placement.txt      which role runs where                  (trainer.launch, at start)
  metrics.jsonl      a line a step                          (trainer.run_folder.tracking)
  wandb_run_id.txt   the W&B run, if there is one           (trainer.run_folder.tracking)
  mlflow_run_id.txt  the MLflow run, if there is one        (trainer.run_folder.mlflow_tracker)
  timeline.json      what every worker did when             (trainer.run_folder.timeline)
  chaos.jsonl        faults on purpose, if there are any    (trainer.chaos)
  restarts.jsonl     what was lost and replaced, if it was  (trainer.restarts)
  logs/              a file for every role and rank         (verl_like)
  global_step_N/     checkpoints                            (trainer.run_folder.checkpoint)
  rollouts/N.jsonl   the samples of step N                  (a recipe with samples)
  batches/N/         what went into its stages, if asked for (trainer.run_folder.batches)
  validation/N.jsonl those of the validation after step N   (a recipe with samples)
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from yaml import YAMLError  # type: ignore[import-untyped]

from trainer.config.as_yaml import in_yaml
from trainer.config.flat import config_hash, flat_config, flatten
from trainer.config.keys import keys_that_differ
from trainer.config.schema import RunConfig
from trainer.run_folder.lock import FolderLock
from verl_like.errors import ConfigError
from verl_like.files import make_private, write_whole
from verl_like.masking import masked

CONFIG_FILE = "config.yaml"


def saved_config(folder: Path) -> dict[str, Any]:
    """Dotted key -> value of what a run wrote when it started."""
    path = folder / CONFIG_FILE
    try:
        return flatten(OmegaConf.to_container(OmegaConf.load(path)))
    except (OSError, ValueError, YAMLError) as error:
        raise ConfigError(f"{path} cannot be read as a run's configuration: {error}") from error


def open_run_folder(config: RunConfig, lock: FolderLock) -> Path:
    """Make the folder, for this user alone, lock it and write `config.yaml` without secrets.

    A folder that is there keeps its mode. Refuses one that cannot be written or holds another run's
    metrics.
    """
    folder = Path(config.trainer.default_local_dir)
    _refuse_other_run(folder, config)
    try:
        make_private(folder)
        lock.take()
        tree = in_yaml(masked(asdict(config)))
        write_whole(folder / CONFIG_FILE, f"# config hash {config_hash(config)}\n{tree}")
    except OSError as err:
        raise ConfigError(
            f"trainer.default_local_dir={folder} cannot be written ({err}); give a folder that can."
        ) from err
    return folder


def _refuse_other_run(folder: Path, config: RunConfig) -> None:
    """Refuse to overwrite the metrics of a run of another configuration.

    A folder with a checkpoint is for `trainer.run_folder.checkpoint` to judge.
    """
    metrics, saved = folder / "metrics.jsonl", folder / CONFIG_FILE
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0 and saved.is_file()
    if config.trainer.resume_mode != "auto" or not has_metrics or any(folder.glob("global_step_*")):
        return
    before, now = saved_config(folder), flat_config(config)
    differs = keys_that_differ(type(config), before, now)
    if differs:
        more = f"; and {len(differs) - 5} more" if len(differs) > 5 else ""
        raise ConfigError(
            f"trainer.default_local_dir={folder} holds the metrics of a run of another "
            f"configuration: {'; '.join(differs[:5])}{more}. Choose another folder, or write over "
            "them with trainer.resume_mode=disable."
        )
