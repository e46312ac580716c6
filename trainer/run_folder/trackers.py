"""Trackers of other packages: TensorBoard, W&B and trackio (`trainer.logger`)."""

from __future__ import annotations

import html
import re
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from trainer.config.schema import RunConfig
from trainer.run_folder.resume import TRACKIO_RUN, WANDB_ID
from verl_like.errors import ConfigError
from verl_like.files import write_atomic
from verl_like.masking import masked

Rows = Sequence[Mapping[str, Any]]
"""Samples, with the fields of a line of `validation/N.jsonl` or `rollouts/N.jsonl`."""


class TensorBoard:
    """Event files in `tensorboard/` of the run folder."""

    def __init__(self, config: RunConfig, total_steps: int):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(Path(config.trainer.default_local_dir) / "tensorboard"))

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def write_samples(self, name: str, rows: Rows, step: int) -> None:
        table = [list(rows[0]), ["---"] * len(rows[0]), *(row.values() for row in rows)]
        lines = ("| " + " | ".join(map(_in_markdown, cells)) + " |" for cells in table)
        self._writer.add_text(f"samples/{name}", "\n".join(lines), step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


def _in_markdown(cell: Any) -> str:
    """Return a table cell on one line, with all markup escaped."""
    text = html.escape(str(cell)).replace("\n", "<br>")
    return re.sub(r"([\\`*_{}\[\]|#~$!])", r"\\\1", text)


class OnlineRun:
    """A run of W&B, or of trackio, which copies W&B's interface."""

    def __init__(self, run: Any, module: Any, **table_options: Any):
        self._run, self._module, self._table_options = run, module, table_options

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def write_samples(self, name: str, rows: Rows, step: int) -> None:
        cells = [list(row.values()) for row in rows]
        table = self._module.Table(list(rows[0]), cells, **self._table_options)
        self._run.log({f"samples/{name}": table}, step=step)

    def close(self) -> None:
        """Finish the run, and send everything that is not sent yet."""
        self._run.finish()


def start_wandb(config: RunConfig, total_steps: int) -> OnlineRun:
    """Start a Weights & Biases run with the configuration, or resume the run of the run folder."""
    import wandb

    trainer = config.trainer
    # `ResumePoint.discard_later_steps` deletes this file if the run starts from the beginning
    file = Path(trainer.default_local_dir) / WANDB_ID
    try:
        run = wandb.init(
            project=trainer.project_name,
            name=trainer.experiment_name,
            dir=trainer.default_local_dir,
            config=masked(asdict(config)),
            id=file.read_text(encoding="utf-8") if file.is_file() else None,
            resume="allow",
        )
    except wandb.errors.Error as error:
        raise ConfigError(
            "trainer.logger includes wandb, but W&B could not start a run: "
            f"{str(error).rstrip('.')}. Log in with `wandb login` or set WANDB_API_KEY; set "
            "WANDB_MODE=offline to log locally; or remove wandb from trainer.logger."
        ) from error
    write_atomic(file, run.id)
    return OnlineRun(run, wandb, allow_mixed_types=True)


def start_trackio(config: RunConfig, total_steps: int) -> OnlineRun:
    """Start a run of trackio with the configuration, or resume the run of the run folder.

    trackio finds a run by its name, so each new run gets a unique name.
    """
    import trackio

    trainer = config.trainer
    file = Path(trainer.default_local_dir) / TRACKIO_RUN
    is_resumed = file.is_file()
    name = f"{trainer.experiment_name}-{uuid.uuid4().hex[:6]}"
    if is_resumed:
        name = file.read_text(encoding="utf-8")
    try:
        run = trackio.init(
            project=trainer.project_name,
            name=name,
            config=masked(asdict(config)),
            resume="allow" if is_resumed else "never",
            embed=False,  # no dashboard in a notebook's cell
        )
    except (OSError, ValueError) as error:
        raise ConfigError(
            "trainer.logger includes trackio, but trackio could not start a run: "
            f"{str(error).rstrip('.')}. Unset TRACKIO_SPACE_ID and TRACKIO_SERVER_URL to log "
            "locally, or remove trackio from trainer.logger."
        ) from error
    write_atomic(file, name)
    return OnlineRun(run, trackio)


START: dict[str, Callable[[RunConfig, int], Any]] = {
    "tensorboard": TensorBoard,
    "trackio": start_trackio,
    "wandb": start_wandb,
}
"""By name: starts the tracker, with the configuration and the number of steps."""
