"""Runs whose cluster loses its head, then its node; run by `test_lost_cluster.py`.

python -m tests.integration.lost_cluster RUN_DIR        prints what happened
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.programs import tell
from tests.trainer.recipes.regression import REGRESSION, RegressionTrainer
from tests.verl_like.broken_cluster import daemon, wait_less
from trainer import load_config, restarts, run
from verl_like.backends.ray.cluster import DAEMONS

STEPS, LOST_IN = 4, 3
SETTINGS = ("trainer.logger=[]", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1")


class LosesCluster(RegressionTrainer):
    """Loses a daemon of the cluster in its third step."""

    kind: ClassVar[str]
    seen: ClassVar[list[int]]
    """The process of the daemon, as a step begins."""

    def step(self) -> dict[str, float]:
        self.seen.append(daemon(self.kind))
        if self.global_step == LOST_IN and len(set(self.seen)) == 1:
            os.kill(self.seen[-1], signal.SIGKILL)
            self.groups["student"].execute_func_rank_zero(time.sleep, 60)  # a long call
        return super().step()


def main(folder: Path) -> dict[str, Any]:
    """Print the daemon's processes that each run's steps saw."""
    found = {}
    for kind in DAEMONS:
        LosesCluster.kind, LosesCluster.seen = kind, []
        here = f"trainer.default_local_dir={folder / kind}"
        settings = ("trainer.backend=ray", "trainer.device=cpu", here, *SETTINGS)
        run(load_config(settings, REGRESSION), LosesCluster)
        found[kind] = LosesCluster.seen
    return found


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    wait_less(patch)
    patch.setattr(restarts, "FIRST_WAIT_S", 0.01)
    logging.basicConfig(level=logging.WARNING)
    tell(main(Path(sys.argv[1])))
