"""Train one role on rows of files: one optimizer step on the next rows, after checks.

    rows ─> update ─> next rows

A recipe's trainer defines its role, how rows are read and padded, and its validation. The loop
around a step is `trainer.loop.Loop`. In a run of epochs, the last step trains on the rows that
remain. Models and memory are checked before any process starts.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any, ClassVar, Generic, TypeVar

from trainer.config.checks import (
    check_axes_of,
    check_checkpoint_of,
    check_passes,
    check_ranks,
    check_reads_images,
)
from trainer.config.devices import check_offload, run_devices
from trainer.data.files import check_files
from trainer.data.lm_rows import STUB_ROW
from trainer.data.loader import RowLoader
from trainer.data.model_config import num_positions, read_model_config
from trainer.data.pairs import PairRow
from trainer.data.prompts import load_tokenizer
from trainer.loop import Trainer
from trainer.memory import (
    UNKNOWN,
    check_fit,
    memory_table,
    model_memory,
    role_models,
    with_fewest_recomputed_layers,
)
from trainer.observers.alarms import skipped_updates, unchanged_weights
from trainer.rows.config import RowConfig
from trainer.run_folder.metrics import reduce_metrics
from trainer.run_state import Metrics, Run, RunRecipe
from verl_like.batch.protocol import DataProto
from verl_like.errors import ConfigError
from verl_like.placement.pools import expand_roles
from workers.columns import count_ones
from workers.config.rows import LONGEST_ROW
from workers.memory import LargestPass, RoleMemory
from workers.models.load import check_weights
from workers.models.memory_shapes import check_adapter
from workers.parallel.sharding import ParallelDims, dims_of
from workers.training.role_model_spec import RoleModelSpec

C = TypeVar("C", bound=RowConfig)

REMEDIES = {
    "activations": "use smaller passes (data.max_token_len_per_gpu, or "
    "data.micro_batch_size_per_gpu and data.max_length), or set "
    "model.enable_gradient_checkpointing=true if it is false",
    "model states": "set model.strategy=fsdp+offload, or use more devices",
}
"""Advice if the devices of a pool have too little memory."""


def preflight(config: RowConfig) -> None:
    """Reject models that are missing, too large, or whose context is too short for the rows.

    Also reject shardings and adapters that do not fit the model, and offloading on CPUs.
    """
    models, sections = role_models(config), {}
    for model in models.values():
        section = model.key.removesuffix(".path").removesuffix(".model")
        sections[section] = (model.strategy if model.trains else "", section, model.fsdp)
    check_offload(config.trainer, sections)
    longest = longest_row(config)
    for role, model in models.items():
        path = model.model.path
        check_ranks(config, role, model.sharding)
        if config.trainer.simulate is None:
            check_weights(model.key, path, model.model)
        limit = num_positions(read_model_config(model.key, path))
        if limit is not None and longest > limit:
            raise ConfigError(
                f"data.max_length={config.data.max_length or 'null'}: rows have up to {longest} "
                f"tokens, but {model.key}={path} has {limit} positions. Set data.max_length to "
                f"{limit} or less."
            )
        check_axes_of(config, role, model)
        if model.trains:
            check_checkpoint_of(config, role, model)
            data = config.data
            at_once = None if data.use_dynamic_bsz else data.micro_batch_size_per_gpu
            rows = "data.train_batch_size", data.train_batch_size
            check_passes(config, role, model, rows, ("data.micro_batch_size_per_gpu", at_once))
        check_adapter(model.model, model.head)

    devices = run_devices(config.trainer)
    if devices.bytes is not None:
        roles = role_memories(config, devices.type)
        check_fit(roles, devices.type, devices.bytes, REMEDIES)


def resolve_config(config: C) -> C:
    """Return the configuration with as few recomputed layers as the memory of GPUs allows."""
    devices = run_devices(config.trainer)
    return with_fewest_recomputed_layers(
        config, devices, role_models(config), lambda tried: role_memories(tried, devices.type)
    )


def role_memories(config: RowConfig, device_type: str) -> list[RoleMemory]:
    """Return the memory of every role."""
    memories = []
    for role, model in role_models(config).items():
        ranks = sum(config.resource_pool_spec[expand_roles(config.role_mapping)[role]])
        dims = dims_of(ranks, model.sharding)
        largest = largest_pass(config, model, dims)
        memories.append(model_memory(config, role, model, device_type, largest))
    return memories


def largest_pass(config: RowConfig, model: RoleModelSpec, dims: ParallelDims) -> LargestPass:
    """Return the largest pass of a rank, which never has more than the rank's rows of a step."""
    length = -(-longest_row(config) // dims.sp)
    num_rows = -(-config.data.train_batch_size // dims.data_size) * config.num_sides
    tokens = min(num_rows * length, pass_tokens(config, length))
    return LargestPass(tokens, tokens if model.head == "token" else num_rows)


def pass_tokens(config: RowConfig, length: int) -> int:
    """Return the limit of a pass over rows of this length."""
    data = config.data
    of_items = data.micro_batch_size_per_gpu * config.num_sides * length
    return data.max_token_len_per_gpu if data.use_dynamic_bsz else of_items


def longest_row(config: RowConfig) -> int:
    """Return the maximum tokens per row; by default, the model's limit, at most `LONGEST_ROW`."""
    if config.data.max_length is not None:
        return config.data.max_length
    limit = num_positions(read_model_config("model.path", config.model.path))
    return min(LONGEST_ROW, limit or LONGEST_ROW)


def plan_text(config: RowConfig, brief: bool = False, heading: str = "Memory") -> str:
    """Return the memory table for this run's devices, or the reason why there is none."""
    devices = run_devices(config.trainer)
    try:
        roles = role_memories(resolve_config(config), devices.type)
    except (ConfigError, OSError, ValueError) as error:
        return f"{UNKNOWN}: {error}"
    return memory_table(roles, devices, brief, heading)


R = TypeVar("R")
MAX_NUMBERS = 3
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
            batch = self.loader.next_batch(self.num_rows_of_step)
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
        val_rows: Sequence[R] = ()
        if data.val_files:
            val_rows = cls.read_rows(config, "data.val_files", data.val_files, tokenizer)
        if has_images([*rows, *val_rows]):
            check_reads_images(role_models(config))
        return (loader, val_rows) if data.val_files else (loader,)

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
    from workers.training.schedule_notes import schedule_notes  # only plans import it

    loader, *validation = inputs
    total_steps = num_steps(config, len(loader))
    return [
        f"rows to train on: {len(loader)}, to validate on: {sum(map(len, validation))}; "
        f"steps: {total_steps:,}",
        *schedule_notes("optim", config.optim, total_steps),
    ]


def headline(metrics: Mapping[str, float]) -> Sequence[str]:
    """Return the first training metric, the validation metrics, and other training metrics."""
    names = [name for name in metrics if name.startswith("train/")][:MAX_NUMBERS]
    names[1:1] = [name for name in metrics if name.startswith("val/")][:MAX_NUMBERS]
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
