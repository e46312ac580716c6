"""Results of roles: columns go into the batch, numbers to the metrics."""

from __future__ import annotations

from typing import Any

import torch

from trainer.rollouts.rollouts import join_results
from verl_like import CallResult, DataProto


def column(name: str, **meta_info: Any) -> DataProto:
    return DataProto.from_dict({name: torch.zeros(2)}, meta_info=meta_info)


def test_columns_go_into_the_batch_and_metrics_of_ranks_are_reduced() -> None:
    results = [column("values"), CallResult(column("ref_log_prob"), {"ref/x": [1.0, 3.0]})]
    batch, metrics = join_results(column("responses"), [*results, {"actor/x": [1.0, 2.0]}])
    assert set(batch.batch.keys()) == {"responses", "values", "ref_log_prob"}
    assert metrics == {"ref/x": 2.0, "actor/x": 1.5}


def test_metrics_are_read_from_where_workers_of_verl_put_them() -> None:
    results = [column("values", metrics={"critic/x": [1.0, 2.0]}), (column("y"), {"actor/x": 3.0})]
    assert join_results(column("responses"), results)[1] == {"critic/x": 1.5, "actor/x": 3.0}
