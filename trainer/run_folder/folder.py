"""The run folder (`trainer.default_local_dir`) at the start of a run, and the samples of each step.

<run folder>/
  config.yaml        the configuration, resolved            (here, at start)
  placement.txt      which role runs where                  (here, at start)
  rollouts/N.jsonl   the samples of step N                  (here, by `PPOTrainer.step`)
  validation/N.jsonl those of the validation after step N   (here, by `trainer.ppo.validation`)
  metrics.jsonl      a line a step                          (trainer.run_folder.tracking)
  wandb_run_id.txt   the W&B run, if there is one           (trainer.run_folder.tracking)
  timeline.json      what every worker did when             (trainer.run_folder.timeline)
  logs/              a file for every role and rank         (verl_like)
  global_step_N/     checkpoints                            (trainer.run_folder.checkpoint)
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from omegaconf import OmegaConf

from trainer.config.keys import may_change_on_resume
from trainer.config.schema import RunConfig
from trainer.run_folder.checkpoint import flatten
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.files import write_whole
from workers.columns import read_columns
from workers.rewards.manager import decode_responses


def open_run_folder(config: RunConfig) -> Path:
    """Make the folder and write `config.yaml`; refuses one that cannot be written or holds another
    run's metrics.
    """
    folder = Path(config.trainer.default_local_dir)
    _refuse_other_run(folder, config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / "config.yaml", OmegaConf.to_yaml(OmegaConf.create(asdict(config))))
    except OSError as err:
        raise ConfigError(
            f"trainer.default_local_dir={folder} cannot be written ({err}); give a folder that can."
        ) from err
    return folder


def _refuse_other_run(folder: Path, config: RunConfig) -> None:
    """Metrics of another configuration are not overwritten; those with a checkpoint are
    `trainer.run_folder.checkpoint`'s.
    """
    metrics, saved = folder / "metrics.jsonl", folder / "config.yaml"
    has_metrics = metrics.is_file() and metrics.stat().st_size > 0 and saved.is_file()
    if config.trainer.resume_mode != "auto" or not has_metrics or any(folder.glob("global_step_*")):
        return
    before, now = _flat_yaml(saved), flatten(config)
    differs = [
        f"{key} was {before[key]!r}, is {now[key]!r}"
        for key in sorted(before.keys() & now.keys())
        if before[key] != now[key] and not may_change_on_resume(type(config), key)
    ]
    if differs:
        more = f"; and {len(differs) - 5} more" if len(differs) > 5 else ""
        raise ConfigError(
            f"trainer.default_local_dir={folder} holds the metrics of a run of another "
            f"configuration: {'; '.join(differs[:5])}{more}. Choose another folder, or write over "
            "them with trainer.resume_mode=disable."
        )


def _flat_yaml(path: Path) -> dict[str, Any]:
    tree: Any = OmegaConf.to_container(OmegaConf.load(path))
    flat: dict[str, Any] = {}

    def walk(prefix: str, value: Any) -> None:
        if isinstance(value, dict):
            for name, inner in value.items():
                walk(f"{prefix}.{name}" if prefix else str(name), inner)
        else:
            flat[prefix] = value

    walk("", tree)
    return flat


def write_samples(folder: Path, step: int, batch: DataProto, tokenizer: Any) -> None:
    """`<folder>/<step>.jsonl`: a line a sample, with verl's names and every number of the reward
    function.
    """
    folder.mkdir(parents=True, exist_ok=True)
    read = read_columns(batch, "prompts", "attention_mask", "token_level_scores", "sample_index")
    width = read["prompts"].shape[-1]
    mask = read["attention_mask"][:, :width].bool()
    columns = batch.non_tensor_batch
    row_of = {
        uid: row for row, uid in enumerate(columns["uid"])
    }  # the samples of one uid have its prompt
    prompts = [read["prompts"][row][mask[row]].tolist() for row in row_of.values()]
    texts = dict(
        zip(row_of, tokenizer.batch_decode(prompts, skip_special_tokens=True), strict=True)
    )
    extras = {
        name.removeprefix("reward_extra/"): columns[name]
        for name in columns
        if name.startswith("reward_extra/")
    }
    fields = {
        "uid": columns["uid"].tolist(),
        "sample": read["sample_index"].tolist(),
        "data_source": columns["data_source"].tolist(),
        "input": [texts[uid] for uid in columns["uid"]],
        "output": decode_responses(batch, tokenizer),
        "gts": [rule["ground_truth"] for rule in columns["reward_model"]],
        "score": read["token_level_scores"].sum(-1).tolist(),
        **{
            name: [None if _is_nan(value) else value for value in column.tolist()]
            for name, column in extras.items()
        },
    }
    lines = [
        json.dumps(
            {"step": step, **dict(zip(fields, values, strict=True))},
            ensure_ascii=False,
            default=_plain,
        )
        for values in zip(*fields.values(), strict=True)
    ]
    write_whole(folder / f"{step}.jsonl", "".join(f"{line}\n" for line in lines), to_disk=False)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and value != value


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, np.ndarray | np.generic) else str(value)
