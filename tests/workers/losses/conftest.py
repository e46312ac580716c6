"""A batch for all losses."""

from __future__ import annotations

import pytest
import torch

from tests.workers.losses.plain_python import ROWS, WIDTH, Columns


@pytest.fixture
def batch() -> Columns:
    """Rows of 5, 3, 1, 0, 4 and 2 tokens in float64, one with a hole; NaN outside the mask."""
    torch.manual_seed(0)
    mask = (torch.arange(WIDTH) < torch.tensor([[5], [3], [1], [0], [4], [2]])).to(torch.int64)
    mask[4, 1] = 0
    names = ("old_log_prob", "log_prob", "advantages", "values", "vpreds", "returns", "weights")
    columns = {name: torch.randn(ROWS, WIDTH, dtype=torch.float64) for name in names}
    columns["log_prob"] = columns["old_log_prob"] + 0.5 * torch.randn(
        ROWS, WIDTH, dtype=torch.float64
    )
    columns = {
        name: torch.where(mask.bool(), column, torch.nan) for name, column in columns.items()
    }
    return columns | {"response_mask": mask}
