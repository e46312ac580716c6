"""A long asynchronous run that is disturbed all the time; run by `test_soak.py`.

    python -m tests.integration.soak TINY_DIR RUN_DIR SEED        prints what happened

Generators join and leave, nodes of generators and of the trainer are drained, and the bucket of the
run folder is cut off or slow.
"""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests import waiting
from tests.forked_ray import ask_for_forks
from tests.integration.drained_nodes import announce_end
from tests.integration.joining_generators import GENERATORS, SETTINGS, Comings
from tests.integration.lost_nodes import Losing, losing_cluster
from tests.integration.runs import lines, overrides
from tests.object_store import BUCKET, Proxy, s3_through_proxy
from tests.programs import tell
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training import generators
from trainer.async_training.recipe import ASYNC
from trainer.run_folder import remote
from trainer.run_folder.folder import saved_steps

STEPS, QUIET = 200, 5
"""The steps of the run, and the last of them without a disturbance."""
DISTURBED = 0.3
"""The share of the steps with a disturbance."""
URL = f"s3://{BUCKET}/soak"


class Soak(Comings):
    """A callback that disturbs steps at random."""

    def __init__(self, seed: int, proxy: Proxy) -> None:
        super().__init__(None)
        self.random, self.proxy = random.Random(seed), proxy

    def on_stage_begin(self, trainer: Any, stage: str, batch: Any) -> None:
        step, buffer = trainer.global_step, trainer.buffer
        if stage != "score" or step < self.first or self.random.random() > DISTURBED:
            return
        if step > STEPS - QUIET:
            self.proxy.is_cut, self.proxy.bytes_per_s = False, None
            return
        event = self.random.choice(["generators", "generators", "trainer", "cut", "slow", "open"])
        if event == "generators":
            before = buffer.generators
            event = self.chosen(before)
            if event == "join":
                Losing.add_node()
            else:
                self.lose(trainer, self.random.choice(before), event)
            change = 1 if event == "join" else -1
            wait_until(lambda: len(buffer.generators) == len(before) + change)
        elif event == "trainer":  # so many nodes that no generator takes the trainer's
            for _ in range(GENERATORS - len(buffer.generators)):
                Losing.add_node()
            wait_until(lambda: len(buffer.generators) == GENERATORS)
            Losing.add_node()
            placement = trainer.groups.placement
            (node,) = placement.pools[placement.role_mapping["actor"]].nodes
            announce_end(node.key)
        else:
            self.proxy.is_cut = event == "cut"
            self.proxy.bytes_per_s = 1 << 16 if event == "slow" else None
        self.seen.append((step, event, buffer.generators))
        print(step, event, buffer.generators, flush=True)


def main(tiny: Path, folder: Path, seed: int, patch: pytest.MonkeyPatch) -> dict[str, Any]:
    patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
    steps = f"trainer.total_training_steps={STEPS}"
    more = (*SETTINGS, "data.train_batch_size=4", steps, "trainer.save_freq=10")
    with s3_through_proxy(patch) as proxy, losing_cluster(2, folder / "logs") as here:
        soak, nodes = Soak(seed, proxy), f"trainer.nnodes={GENERATORS + 1}"
        url = f"trainer.default_local_dir={URL}"
        run(load_config(overrides(tiny, folder, *more, *here, nodes, url), ASYNC), callbacks=[soak])
        here_folder = remote.local_copy_of(URL)
        patch.setenv("XDG_CACHE_HOME", str(folder / "another machine"))
        there = remote.RemoteRun(URL)
        there.close()
        return {
            "events": Counter(event for _, event, _ in soak.seen),
            "metrics": lines(here_folder),
            "async": json.loads((here_folder / "async.json").read_text()),
            "saved": [saved_steps(here_folder), saved_steps(there.folder)],
            "log": (folder / "logs" / "log").read_text(),
        }


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    ask_for_forks(patch)
    for module, name, seconds in (
        (generators, "JOIN_EVERY_S", 0.5),
        (waiting, "LIMIT_S", 300.0),
        (remote, "SCAN_EVERY_S", 1.0),
        (remote, "HEARTBEAT_S", 1.0),
        (remote, "LOCK_TIMEOUT_S", 5.0),
    ):
        patch.setattr(module, name, seconds)
    tell(main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), patch))
