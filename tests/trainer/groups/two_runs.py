"""A run of a pool of two and a generator; `test_two_runs.py` starts two at the same time.

python -m tests.trainer.groups.two_runs BACKEND RUN_DIR       prints the sums of the ranks
"""

from __future__ import annotations

import sys
from pathlib import Path

from tests.trainer.groups.reporting_role import reporting
from trainer.groups.worker_groups import WorkerGroups

ROLES = {"rollout": "generator_0_pool", "actor": "trainer_pool"}


def main(backend: str, folder: Path) -> None:
    config = reporting(folder, ROLES, backend, generator_0_pool=1, trainer_pool=2)
    with WorkerGroups(config) as groups:
        print("sums", groups["actor"].sum_of_ranks(), groups["rollout"].sum_of_ranks(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
