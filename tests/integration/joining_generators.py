"""Asynchronous runs whose generators join and leave; run by `test_joining_generators.py`.

    python -m tests.integration.joining_generators TINY_DIR RUN_DIR        prints what happened

Every node has room for one process. A generator leaves because Ray drains its node, or because the
node is lost.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forked_ray import ask_for_forks
from tests.integration.drained_nodes import announce_end
from tests.integration.lost_nodes import Losing, losing_cluster
from tests.integration.runs import POLICY_ALONE, overrides
from tests.programs import tell
from tests.waiting import wait_until
from trainer import load_config, run
from trainer.async_training import generators
from trainer.async_training.recipe import ASYNC

GENERATORS = 3
SETTINGS = (
    *(f"async_training.generators={GENERATORS}", "async_training.min_generators=1"),
    "async_training.on_generator_failure=restart",
    *("async_training.prompts_per_call=1", "data.max_response_length=4", *POLICY_ALONE),
)
SYNCHRONOUS = ("async_training.max_staleness=0", "trainer.total_training_steps=5")
STEPS, EVENTS = 14, 10


class Comings:
    """A callback that lets generators join and leave in steps, in this order or at random."""

    def __init__(self, events: list[str] | None, first: int = 2) -> None:
        self.events, self.first, self.random = events, first, random.Random(1)
        self.seen: list[tuple[int, str, list[int]]] = []

    def on_stage_begin(self, trainer: Any, stage: str, batch: Any) -> None:
        place = trainer.global_step - self.first
        # after a batch was taken, the generators have room for further samples
        if stage != "score" or not 0 <= place < (
            EVENTS if self.events is None else len(self.events)
        ):
            return
        buffer = trainer.buffer
        before = buffer.generators
        event = self.chosen(before) if self.events is None else self.events[place]
        if event == "join":
            Losing.add_node()
            wait_until(lambda: len(buffer.generators) == len(before) + 1)
        else:
            self.lose(trainer, self.random.choice(before), event)
            wait_until(lambda: len(buffer.generators) == len(before) - 1)
        self.seen.append((trainer.global_step, event, buffer.generators))

    def chosen(self, living: list[int]) -> str:
        if len(living) == 1:
            return "join"
        leaves = ["drain", "kill"]
        return self.random.choice(leaves if len(living) == GENERATORS else ["join", *leaves])

    def lose(self, trainer: Any, generator: int, event: str) -> None:
        (node,) = trainer.groups.placement.pools[f"generator_{generator}_pool"].nodes
        if event == "kill":
            Losing.cluster.remove_node(Losing.nodes.pop(node.key), allow_graceful=False)
            return
        announce_end(node.key)


def main(tiny: Path, folder: Path) -> dict[str, Any]:
    callbacks = {
        "equal": Comings(["join", "drain", "join"]),
        "random": Comings(None),
    }
    settings = {"equal": SYNCHRONOUS, "random": (f"trainer.total_training_steps={STEPS}",)}
    nodes = f"trainer.nnodes={GENERATORS + 1}"
    with losing_cluster(2, folder) as here:
        for name, callback in callbacks.items():
            more = (*SETTINGS, *settings[name], *here, nodes)
            config = load_config(overrides(tiny, folder / name, *more), ASYNC)
            run(config, callbacks=[callback])
        seen = {name: callback.seen for name, callback in callbacks.items()}
        return {"seen": seen, "log": (folder / "log").read_text()}


if __name__ == "__main__":
    patch = pytest.MonkeyPatch()
    ask_for_forks(patch)
    patch.setattr(generators, "JOIN_EVERY_S", 0.5)
    tell(main(Path(sys.argv[1]), Path(sys.argv[2])))
