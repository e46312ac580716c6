"""Train one role on rows of files: one optimizer step on the next rows.

    rows ─> update ─> next rows

A recipe's trainer defines its role, how rows are read and padded, and its validation. The loop
around a step is `trainer.loop.Loop`. In a run of epochs, the last step trains on the rows that
remain.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from trainer.config.checks import check_reads_images
from trainer.data.files import check_files
from trainer.data.lm_rows import STUB_ROW
from trainer.data.loader import RowLoader
from trainer.data.pairs import PairRow
from trainer.data.prompts import load_tokenizer
from trainer.loop import Trainer
from trainer.memory import role_models
from trainer.observers.alarms import skipped_updates, unchanged_weights
from trainer.rows.config import RowConfig
from trainer.rows.preflight import longest_row, plan_text, preflight, resolve_config
from trainer.run_folder.metrics import reduce_metrics
from trainer.run_state import Metrics, Run, RunRecipe
from verl_like.batch.protocol import DataProto
from workers.columns import count_ones

R = TypeVar("R")
MOST_NUMBERS = 3
"""Number of metrics that the console shows per step and per validation."""


def num_steps(config: RowConfig, num_rows: int) -> int:
    """Return the number of steps of a run on `num_rows` rows."""
    size = config.data.train_batch_size
    return config.trainer.num_steps(lambda epochs: -(-epochs * num_rows // size))


class RowTrainer(Trainer, Generic[R]):
    """Base class of trainers for one role, whose workers have the method `update_model`."""

    config: RowConfig
    stub_rows: ClassVar[tuple[Any, Any]] = STUB_ROW, PairRow(STUB_ROW, STUB_ROW)
    """Rows for steps on stubs (`trainer.stubs`) of recipes with one and with two sides."""

    def __init__(self, run: Run, loader: RowLoader[R], validation: Sequence[R] = ()) -> None:
        super().__init__(run)
        self.loader = loader
        self.validation = validation
        self.has_validation = bool(validation)

    # ------------------------------------------------------------------------- a recipe's rows

    @classmethod
    @abstractmethod
    def read_rows(cls, config: Any, key: str, files: Any, tokenizer: Any) -> list[R]:
        """Return the rows of `files`; errors name the configuration's `key`."""

    @staticmethod
    @abstractmethod
    def make_batch(rows: Sequence[R], uids: Sequence[str], pad_token_id: int) -> DataProto:
        """Make a batch of rows with these `uids`, padded with `pad_token_id`."""

    # --------------------------------------------------------------------------------------- a step

    def step(self) -> Metrics:
        """Make one optimizer step on the next rows, and return the metrics."""
        with self.clock("data"):
            batch = self.loader.take(self.num_rows_of_step)
        batch = self.with_columns(batch)
        with self.clock("update"):
            metrics = reduce_metrics(self.groups[self.recipe.role].update_model(batch))
        return metrics | {
            "train/num_tokens": num_tokens_in_loss(batch),
            "training/global_step": self.global_step,
            "training/epoch": self.loader.epoch,
        }

    def with_columns(self, batch: DataProto) -> DataProto:
        """Add the recipe's columns that the loss reads in addition to the rows, if any."""
        return batch

    @property
    def num_rows_of_step(self) -> int:
        """Number of rows: `data.train_batch_size`, or the remaining rows in the last step."""
        size = self.config.data.train_batch_size
        trainer = self.config.trainer
        if trainer.total_training_steps is not None and trainer.total_epochs is None:
            return size
        num_rows = (trainer.total_epochs or 1) * len(self.loader)
        return min(size, num_rows - (self.global_step - 1) * size)

    @property
    def total_steps(self) -> int:
        """Number of steps of the run, as configured or from the number of rows."""
        return num_steps(self.config, len(self.loader))

    # -------------------------------------------------------------- methods that the loop calls

    @classmethod
    def prepare(cls, config: Any, at_end: ExitStack) -> tuple[Any, ...]:
        """Check files and model; return the loader of training rows, and validation rows if any."""
        check_files(config.data)
        preflight(config)
        tokenizer = load_tokenizer(config.model.path, "model.path")
        data = config.data
        rows = cls.read_rows(config, "data.train_files", data.train_files, tokenizer)
        make_batch = partial(cls.make_batch, pad_token_id=tokenizer.pad_token_id)
        loader = RowLoader(rows, config.trainer.seed, make_batch)
        if has_images(rows):
            check_reads_images(role_models(config))
        if not data.val_files:
            return (loader,)
        return loader, cls.read_rows(config, "data.val_files", data.val_files, tokenizer)

    def init_arguments(self, role: str) -> dict[str, Any]:
        """Return the number of steps for the learning-rate schedule."""
        return {"total_steps": self.total_steps} if role == self.recipe.role else {}

    def in_order(self, rows: Sequence[R], name: str) -> Iterator[DataProto]:
        """Yield batches of the rows in order, as many as a step has; uids begin with `name`."""
        size = self.config.data.train_batch_size
        for start in range(0, len(rows), size):
            part = rows[start : start + size]
            names = [f"{name}-{start + number}" for number in range(len(part))]
            yield self.loader.make_batch(part, names)

    def state_dict(self) -> dict[str, Any]:
        """Return the driver's own state, ready for JSON."""
        return {**super().state_dict(), "loader": self.loader.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the state of `state_dict`."""
        super().load_state_dict(state)
        self.loader.load_state_dict(state["loader"])


def stub_inputs(cls: type[RowTrainer[Any]], config: RowConfig, groups: Any) -> tuple[Any, ...]:
    """Return the loader of a step on stubs."""
    row, make_batch = cls.stub_rows[config.num_sides - 1], partial(cls.make_batch, pad_token_id=0)
    return (RowLoader([row], config.trainer.seed, make_batch),)


def worker_code(config: Any) -> list[str]:
    """Return the worker's class, the optimizer, its schedule and, if it is a key, the loss."""
    optim, loss = config.optim, getattr(config, "loss", "")
    return [*config.role_workers.values(), optim.optimizer, optim.lr_scheduler_type, loss]


def describe(config: RowConfig, trainer_cls: type, brief: bool = False) -> list[str]:
    """Describe the sizes of a step, and its memory."""
    return [plan_text(config, brief), f"Step: {step_sizes(config)}"]


def describe_inputs(config: Any, *inputs: Any) -> list[str]:
    """Describe the number of rows and of steps."""
    loader, *validation = inputs
    return [
        f"rows to train on: {len(loader)}, to validate on: {sum(map(len, validation))}; "
        f"steps: {num_steps(config, len(loader)):,}"
    ]


def headline(metrics: Mapping[str, float]) -> Sequence[str]:
    """Return the first training metric, the validation metrics, and other training metrics."""
    names = [name for name in metrics if name.startswith("train/")][:MOST_NUMBERS]
    names[1:1] = [name for name in metrics if name.startswith("val/")][:MOST_NUMBERS]
    return [f"{name} {metrics[name]:.4g}" for name in names]


def has_images(rows: Sequence[Any]) -> bool:
    """True if any row has images; rows may be numbered."""
    unnumbered = (row[-1] if isinstance(row, tuple) else row for row in rows)
    return any(getattr(row, "images", ()) for row in unnumbered)


def step_sizes(config: RowConfig) -> str:
    """Describe the number of rows or pairs per step, and the size of a rank's passes."""
    data = config.data
    items = "rows" if config.num_sides == 1 else "pairs of two rows"
    pass_of = f"{data.micro_batch_size_per_gpu} rows"
    if data.use_dynamic_bsz:
        pass_of = f"{data.max_token_len_per_gpu:,} tokens"
    return (
        f"{data.train_batch_size} {items} of at most {longest_row(config):,} tokens; at most "
        f"{pass_of} per forward pass and rank"
    )


def num_tokens_in_loss(batch: DataProto) -> float:
    """Return the number of tokens in the loss."""
    return float(count_ones(batch, "response_mask").sum())


ROWS_RUN = RunRecipe(
    stages=("data", "update"),
    alarm_rules=(skipped_updates, unchanged_weights),
    resolve=resolve_config,
    worker_code=worker_code,
    describe=describe,
    stub_inputs=stub_inputs,
    describe_inputs=describe_inputs,
    headline=headline,
)
"""The shared part of recipes on rows; a recipe adds its role."""
