"""200 asynchronous steps with joins, leaves, drains and failures of the bucket lose no sample."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.soak import STEPS
from tests.programs import found_by


@pytest.mark.ray
@pytest.mark.slow
def test_a_disturbed_run_accounts_for_every_sample(
    tmp_path: Path, tiny_dir: Path, forked_python: Path
) -> None:
    seed = random.randrange(2**32)
    print("seed", seed)
    script = "tests.integration.soak"
    report = found_by(forked_python, script, tiny_dir, tmp_path / "runs", str(seed), limit_s=7200)
    assert min(Counter(report["events"]).values()) > 0
    metrics = report["metrics"]
    assert [line["training/global_step"] for line in metrics] == [*range(1, STEPS + 1)]
    assert max(line["async/staleness/max"] for line in metrics) <= 1
    for row in report["async"]["ledger"]["generators"].values():
        dropped = sum(row["dropped"].values())
        assert row["made"] == row["trained"] + row["queued"] + row["in_flight"] + dropped
    rows = report["async"]["ledger"]["generators"].values()
    assert sum(row["trained"] for row in rows) == STEPS * 4 * 2
    here, there = report["saved"]
    assert here == there == [190, 200]
