"""Reading and writing a batch's tensor columns on the driver; `trainer.{ppo,advantages,kl,metrics}` call it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from workers.batch_keys import require

if TYPE_CHECKING:
    from verl_like.protocol import DataProto


def read_columns(batch: DataProto, *names: str) -> dict[str, Tensor]:
    """These columns; a missing one is an error that says who writes it."""
    require(batch, *names)
    tensors: Any = batch.batch
    return {name: tensors[name] for name in names}


def has_column(batch: DataProto, name: str) -> bool:
    """Whether the batch has this tensor column."""
    return batch.batch is not None and name in batch.batch.keys()


def write_columns(batch: DataProto, **columns: Tensor) -> DataProto:
    """The same batch, with these columns added or replaced."""
    assert batch.batch is not None, "columns are only ever written beside those they were computed from"
    batch.batch.update(columns)
    return batch
