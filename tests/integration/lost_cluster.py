"""A run whose cluster loses its head, and whose next one its node; run by `test_lost_cluster.py`.

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
from trainer import load_config, recovery, run
from verl_like.backends.ray.cluster import DAEMONS

STEPS = 4
LOST_IN = {"gcs_server": 3, "raylet": 4}
"""The step in which each daemon is lost."""
SETTINGS = ("trainer.logger=[]", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1")


class LosesCluster(RegressionTrainer):
    """Loses a daemon of its cluster in the third step, and another one in the fourth."""

    left: ClassVar[list[str]] = list(LOST_IN)
    seen: ClassVar[list[int]] = []
    """The head's process, as a step begins."""

    def step(self) -> dict[str, float]:
        self.seen.append(daemon("gcs_server"))
        if self.left and self.global_step == LOST_IN[self.left[0]]:
            os.kill(daemon(self.left.pop(0)), signal.SIGKILL)
            self.groups["student"].execute_func_rank_zero(time.sleep, 60)  # a long call
        return super().step()


def main(folder: Path) -> dict[str, Any]:
    """Return the heads' processes that the steps saw."""
    assert set(LOST_IN) == set(DAEMONS)
    here = ("trainer.backend=ray", "trainer.device=cpu", f"trainer.default_local_dir={folder}")
    run(load_config([*here, *SETTINGS], REGRESSION), LosesCluster)
    return {"heads": LosesCluster.seen}


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    wait_less(patch)
    patch.setattr(recovery, "FIRST_WAIT_S", 0.01)
    logging.basicConfig(level=logging.WARNING)
    tell(main(Path(sys.argv[1])))
