"""What a role returns: columns and numbers, side by side."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from trainer.rollouts.trainer import join_results, numbers_of
from verl_like.batch.protocol import DataProto
from verl_like.errors import BatchError


def column(name: str, **meta_info: Any) -> DataProto:
    return DataProto.from_dict({name: torch.zeros(2)}, meta_info=meta_info)


def test_columns_go_into_the_batch_and_the_numbers_of_ranks_are_reduced() -> None:
    results = [column("values"), (column("ref_log_prob"), {"ref/x": [1.0, 3.0]})]
    batch, metrics = join_results(column("responses"), results)
    assert set(batch.batch.keys()) == {"responses", "values", "ref_log_prob"}
    assert metrics == {"ref/x": 2.0}
    assert numbers_of({"actor/x": [1.0, 2.0]}) == {"actor/x": 1.5}
    assert numbers_of(None) == {}


@pytest.mark.parametrize("beside", [(), ({"actor/x": [1.0]},)])
def test_metrics_hidden_in_the_meta_info_of_a_batch_are_refused(beside: tuple[Any, ...]) -> None:
    hidden = column("values", metrics={"critic/x": 1.0})
    with pytest.raises(BatchError, match="nobody reads them"):
        join_results(column("responses"), [(hidden, *beside) if beside else hidden])
