"""Where a step's numbers go. A run opens one `Tracking`:

    with make_tracking(config, total_steps, headline) as tracking:
        tracking.log({"train/loss": 0.5}, step=1)

A tracker is a class with `write(metrics, step)` and `close()`. `trainer.logger` names built-in
ones, those registered in `TRACKERS`, and others by their dotted path.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any, Protocol

from trainer.config.schema import TRACKERS, RunConfig, check_tracker_methods
from trainer.run_folder.checkpoint import WANDB_ID
from trainer.run_folder.progress import Console, Headline, no_headline
from verl_like.errors import ConfigError
from verl_like.files import json_line, write_whole
from verl_like.masking import masked

logger = logging.getLogger(__name__)


class Tracker(Protocol):
    """What writes metrics somewhere."""

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """The numbers of one step."""

    def close(self) -> None:
        """After the last step, or after the one that failed."""


class JsonLines:
    """`metrics.jsonl`: a line a step, on disk when `write` returns.

    Numbers have every digit, times those of microseconds.
    """

    def __init__(self, folder: str | Path):
        """Go on with the file in `folder`; what is not there is made."""
        self._path = Path(folder) / "metrics.jsonl"
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.open("a").close()
        except OSError as err:
            raise ConfigError(
                f"trainer.default_local_dir={folder} cannot be written ({err}); give a folder "
                "that can."
            ) from err

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        """Append a line, to what has that name now: a resume may have cut the file back."""
        numbers = {name: _in_microseconds(name, value) for name, value in metrics.items()}
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json_line({"step": step, **numbers}))

    def close(self) -> None:
        """Nothing is open."""


def _in_microseconds(name: str, value: float) -> float:
    """A time without the digits that no clock has; another number as it is."""
    return round(value, 6) if name.startswith("timing_") else value


class TensorBoard:
    """Event files in `tensorboard/` of the run folder."""

    def __init__(self, folder: Path):
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / "tensorboard"))

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class WandB:
    """A Weights & Biases run, with the configuration.

    A resumed run goes on in the one that the run folder names.
    """

    def __init__(self, config: RunConfig):
        import wandb

        trainer = config.trainer
        folder = Path(trainer.default_local_dir)
        folder.mkdir(parents=True, exist_ok=True)
        # `Checkpoints.cut_back` has taken it away where the run begins anew
        name = folder / WANDB_ID
        try:
            self._run = wandb.init(
                project=trainer.project_name,
                name=trainer.experiment_name,
                dir=str(folder),
                config=masked(asdict(config)),
                id=name.read_text(encoding="utf-8") if name.is_file() else None,
                resume="allow",
            )
        except wandb.errors.Error as error:
            raise ConfigError(
                f"trainer.logger names wandb, which starts no run: {error}. Log in by `wandb "
                "login` or WANDB_API_KEY, keep the numbers here by WANDB_MODE=offline, or take "
                "wandb out."
            ) from error
        write_whole(name, self._run.id)

    def write(self, metrics: Mapping[str, float], step: int) -> None:
        self._run.log(dict(metrics), step=step)

    def close(self) -> None:
        """Finish the run: what is not sent yet is sent."""
        self._run.finish()


def _mlflow(config: RunConfig) -> Tracker:
    from trainer.run_folder.mlflow_tracker import MLflow

    return MLflow(config)


def _tensorboard(config: RunConfig) -> Tracker:
    return TensorBoard(Path(config.trainer.default_local_dir))


BUILT_IN: dict[str, Callable[[RunConfig, int, Headline], Tracker]] = {
    "console": lambda config, total_steps, headline: Console(total_steps, headline),
    "tensorboard": lambda config, *_: _tensorboard(config),
    "wandb": lambda config, *_: WandB(config),
    "mlflow": lambda config, *_: _mlflow(config),
}
"""The trackers that need not be registered, by their names in `TRACKERS`."""


class Tracking:
    """Writes a step's metrics to every tracker."""

    def __init__(self, trackers: Iterable[Tracker]):
        self.trackers = list(trackers)

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        plain = {name: float(value) for name, value in metrics.items()}
        for tracker in self.trackers:
            tracker.write(plain, step)

    def close(self) -> None:
        for tracker in self.trackers:
            tracker.close()

    def __enter__(self) -> Tracking:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def make_tracking(
    config: RunConfig, total_steps: int, headline: Headline = no_headline
) -> Tracking:
    """metrics.jsonl and what `trainer.logger` names; the console shows the `headline` of a step.

    Of those, one that is not installed is left out with a warning.
    """
    tracking = Tracking([JsonLines(config.trainer.default_local_dir)])
    with ExitStack() as if_one_fails:
        if_one_fails.callback(tracking.close)
        for name in dict.fromkeys(config.trainer.logger):
            try:
                if name in BUILT_IN:
                    tracker = BUILT_IN[name](config, total_steps, headline)
                else:
                    tracker = TRACKERS.look_up(name)(config, total_steps)
                check_tracker_methods(tracker, f"what trainer.logger={name} makes")
                tracking.trackers.append(tracker)
            except ImportError as err:
                logger.warning(
                    "trainer.logger names %s, which is not installed (%s): pip install "
                    "'verl-like[%s]'. Going on without.",
                    name, err, name,
                )  # fmt: skip
        if_one_fails.pop_all()
    return tracking
