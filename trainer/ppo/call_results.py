"""What calls on workers returned, taken apart: columns go into the batch, numbers to the metrics.

A method returns a batch, `(batch, metrics)`, or metrics alone; each metric is then a list of the
values of its ranks.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from trainer.run_folder.metrics import reduce_metrics
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError


def join_results(batch: DataProto, results: Iterable[Any]) -> tuple[DataProto, dict[str, float]]:
    """The batch with the columns that the calls returned, and their numbers."""
    metrics: dict[str, float] = {}
    for result in results:
        columns = result[0] if isinstance(result, tuple) else result
        metrics |= numbers_of(result)
        batch = batch.union(columns)
    return batch, metrics


def numbers_of(result: Any) -> dict[str, float]:
    """The metrics that a call returned, one number each."""
    batch, numbers = result if isinstance(result, tuple) else (result, {})
    if isinstance(batch, DataProto) and "metrics" in batch.meta_info:
        raise BatchError(
            "a role returned metrics inside meta_info['metrics'] of its batch, where nobody reads "
            "them. Let its method return (batch, metrics), or the metrics alone."
        )
    return reduce_metrics(batch if isinstance(batch, Mapping) else numbers)
