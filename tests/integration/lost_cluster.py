"""A run whose cluster loses its head in mid-run; run by `test_lost_cluster.py`.

python -m tests.integration.lost_cluster RUN_DIR        tells what happened
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

STEPS, LOST_IN = 4, 3
SETTINGS = ("trainer.logger=[]", f"trainer.total_training_steps={STEPS}", "trainer.save_freq=1")


class LosesCluster(RegressionTrainer):
    """In its third step the head of the cluster is gone."""

    heads: ClassVar[list[int]] = []
    """The process of the head, as a step begins."""

    def step(self) -> dict[str, float]:
        self.heads.append(daemon("gcs_server"))
        if self.global_step == LOST_IN and len(set(self.heads)) == 1:
            os.kill(self.heads[-1], signal.SIGKILL)
            self.groups["student"].execute_func_rank_zero(time.sleep, 60)  # a long call
        return super().step()


def main(folder: Path) -> dict[str, Any]:
    """The run, and the heads that its steps have seen."""
    here = ("trainer.backend=ray", "trainer.device=cpu", f"trainer.default_local_dir={folder}")
    run(load_config([*here, *SETTINGS], REGRESSION), LosesCluster)
    return {"heads": LosesCluster.heads}


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    wait_less(patch)
    patch.setattr(restarts, "FIRST_WAIT_S", 0.01)
    logging.basicConfig(level=logging.WARNING)
    tell(main(Path(sys.argv[1])))
