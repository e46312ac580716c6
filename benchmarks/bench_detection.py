"""How soon a run names a worker that is killed, frozen or in a deadlock, at default settings.

    python benchmarks/bench_detection.py [--backends local,ray] [--faults kill,freeze,lock,left]
                                         [--workers actor,critic,actor@sync,rollout@sync]
                                         [--cells local/ref/lock,ray/rollout@sync/kill]

One run of the tiny model a backend, of two pools of two processes: the actor with the reference,
the rollout with the critic and a reward model. In every step from the second on one worker is hit.
The seconds run until the run names a worker: in an error if it is killed or frozen, in a warning
that explains who waits for whom if it hangs. A worker that hangs is killed then, because the run
itself would wait until the call's deadline. The run starts the lost group again, makes the step
again and goes on to the next fault: half a minute for each of them on two idle cores, and another
for the start of a backend.

    kill      SIGKILL to its last rank                          goal 5 s
    freeze    SIGSTOP to its last rank                          goal 30 s
    lock      its rank 0 waits for a lock that nobody gives     goal 20 s
    left      its rank 0 waits in a collective alone            goal 20 s

A role is hit as the step begins. `actor@sync` and `rollout@sync` are rank 0 of the sender and of
the receivers within a weight sync: before the vote that all of them take together, where `left` is
a rank that goes without it. `rollout@meet` is hit right before a sync, and never comes to it. A
line a fault is printed at once, and in the end a table.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, ClassVar

from trainer import load_config, restarts, run
from trainer.ppo.stages import PPOTrainer
from verl_like.errors import VerlLikeError

ROLES = ("actor", "ref", "rollout", "critic", "reward_model")
IN_SYNC = ("actor@sync", "rollout@sync", "rollout@meet")
GOALS = {"kill": 5.0, "freeze": 30.0, "lock": 20.0, "left": 20.0}
LABELS = {
    "reward_model": "reward model",
    "actor@sync": "actor, in a weight sync",
    "rollout@sync": "rollout, in a weight sync",
    "rollout@meet": "rollout, on its way to one",
}
HEADS = {
    "kill": "killed",
    "freeze": "frozen by SIGSTOP",
    "lock": "at a lock",
    "left": "left alone in a collective",
}
TURN_S = 5.0
"""What others get to finish after a fault, so that the next one comes soon: 60 by default."""
POOLS = (
    "resource_pool_spec={policies: [2], samples: [2]}",
    "role_mapping={actor: policies, ref: policies, rollout: samples, critic: samples, "
    "reward_model: samples}",
)
SETTINGS = [
    "trainer.device=cpu",
    "trainer.logger=[]",
    "trainer.save_freq=1",
    "trainer.n_gpus_per_node=4",
    *POOLS,
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "reward.model.enable=true",
    "data.train_batch_size=16",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
]

# ------------------------------------------------------------------------------- within the workers


def wait_for_a_lock() -> None:
    """Nobody will ever release it."""
    import threading

    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def enter_a_collective_alone() -> None:
    """The other ranks go on with their next calls."""
    import torch.distributed as dist

    dist.barrier()


def signal_itself(number: int) -> None:
    """Die, or stand still."""
    os.kill(os.getpid(), number)


def hit_before_the_vote(fault: Callable[[], None] | None) -> None:
    """Have this rank's next sync meet with a fault; without one it goes without a vote."""
    from workers.weights.channel import Channel

    vote = Channel.all_agree

    def hit(channel: Any, ok: bool) -> bool:
        Channel.all_agree = vote  # type: ignore[method-assign]
        if fault is None:
            vars(vote).setdefault("kept", []).append(
                channel.connection.group
            )  # the others see nothing
            return ok
        fault()
        return vote(channel, ok)

    Channel.all_agree = hit  # type: ignore[method-assign]


# ----------------------------------------------------------------------------------- in the driver

OF_ITSELF: dict[str, Callable[[], None] | None] = {
    "kill": partial(signal_itself, signal.SIGKILL),
    "freeze": partial(signal_itself, signal.SIGSTOP),
    "lock": wait_for_a_lock,
    "left": enter_a_collective_alone,
}


def hit(groups: Any, worker: str, fault: str) -> None:
    """Hit a role now; within a sync, as soon as it comes there."""
    role, _, where = worker.partition("@")
    group = groups[role]
    if where == "sync":
        own = None if fault == "left" else OF_ITSELF[fault]
        group.execute_func_rank_zero.remote(partial(hit_before_the_vote, own))
    elif fault in ("kill", "freeze"):
        number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        os.kill(group.transport.pid_here(group.world_size - 1), number)
    else:
        group.execute_func_rank_zero.remote(OF_ITSELF[fault])


@dataclass
class Cell:
    """One fault, and what became of it."""

    backend: str
    worker: str
    fault: str
    began: float | None = None
    seconds: float = float("nan")
    words: str = ""
    pid: int | None = None
    """Rank 0 of the worker."""

    def note(self, words: str) -> None:
        """The run names a worker; the first time counts."""
        if self.began is not None and not self.words:
            self.seconds, self.words = time.monotonic() - self.began, words
            print(self.row(), file=sys.stderr, flush=True)

    @property
    def is_within_goal(self) -> bool:
        """Not where it was never noticed."""
        return self.seconds <= GOALS[self.fault]

    def row(self) -> str:
        """A line of what is printed at once."""
        named = " ".join(self.words.split(" (")[0].split())[:120]
        facts = f"{self.seconds:.1f} | {GOALS[self.fault]:.0f} | {named}"
        return f"| {self.backend} | {self.worker} | {self.fault} | {facts} |"


class Struck(PPOTrainer):
    """A run that is hit once in every step from the second on."""

    waiting: ClassVar[list[Cell]] = []
    under_way: ClassVar[Cell | None] = None

    def on_step_begin(self) -> None:
        """A step that is made again is spared."""
        if self.global_step > 1 and Struck.under_way is None and self.waiting:
            Struck.under_way = self.waiting.pop(0)
            if "@" not in Struck.under_way.worker:
                self.strike()

    def sync(self) -> dict[str, float]:
        """Strike while the weights of a step are sent."""
        if Struck.under_way is not None and Struck.under_way.began is None:
            self.strike()
        return super().sync()

    def strike(self) -> None:
        """The fault that it is the turn of."""
        cell = Struck.under_way
        assert cell is not None, "asked for by whoever has seen one"
        cell.began = time.monotonic()
        cell.pid = self.groups[cell.worker.partition("@")[0]].transport.pid_here(0)
        hit(self.groups, cell.worker, cell.fault)

    def on_step_end(self, metrics: Any) -> None:
        """The step was made, after a failure or although it was hit."""
        if Struck.under_way is not None and not Struck.under_way.words:
            print(Struck.under_way.row(), file=sys.stderr, flush=True)
        Struck.under_way = None


class Explanations(logging.Handler):
    """Takes the time at which a hang is explained, and ends it."""

    def emit(self, record: logging.LogRecord) -> None:
        """Kill the worker that hangs."""
        cell, words = Struck.under_way, record.getMessage()
        if cell is None or cell.fault not in ("lock", "left") or "stood still" not in words:
            return
        cell.note(words)
        if cell.pid is not None:
            os.kill(cell.pid, signal.SIGKILL)


class Noting(restarts.Restarts):
    """Takes the time at which a run decides what to do about a failure."""

    def wait_for_next(self, error: VerlLikeError, step: int) -> None:
        """At once."""
        if Struck.under_way is not None:
            Struck.under_way.note(str(error))
        super().wait_for_next(error, step)


def measure(backend: str, cells: list[Cell], tiny: Path, folder: Path) -> None:
    """One run that is hit by all of them, one after the other."""
    import trainer.launch

    logging.getLogger("verl_like.calls.diagnose").addHandler(Explanations())
    restarts.FIRST_WAIT_S, restarts.TURN_S = 0.0, TURN_S
    trainer.launch.Restarts = Noting  # type: ignore[misc]
    Struck.waiting, Struck.under_way = list(cells), None
    settings = [
        *SETTINGS,
        f"trainer.backend={backend}",
        f"trainer.default_local_dir={folder}",
        f"trainer.total_training_steps={len(cells) + 2}",
        f"trainer.max_restarts={2 * len(cells)}",
        f"actor_rollout_ref.model.path={tiny}/model",
        f"reward.model.path={tiny}/judge",
        f"data.train_files={tiny}/train.parquet",
    ]
    with redirect_stdout(sys.stderr):  # what a run says of itself goes beside the table
        run(load_config(settings), Struck)


def make_judge(tiny: Path) -> None:
    """A sequence classifier of random weights on the tiny model's tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tiny / "judge")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tiny / "judge")


def print_table(cells: list[Cell]) -> None:
    """A row for each worker."""
    goals = (f"{HEADS[fault]} (goal {GOALS[fault]:.0f})" for fault in HEADS)
    print("| backend | one worker of |", " | ".join(goals), "|\n|---|---|---|---|---|---|")
    results = {(cell.backend, cell.worker, cell.fault): cell.seconds for cell in cells}
    for backend, worker in dict.fromkeys((cell.backend, cell.worker) for cell in cells):
        seconds = (results.get((backend, worker, fault), float("nan")) for fault in HEADS)
        shown = (f"{each:.1f}" if each == each else "-" for each in seconds)
        print(f"| {backend} | {LABELS.get(worker, worker)} |", " | ".join(shown), "|")


def cells_of(asked: argparse.Namespace) -> list[Cell]:
    """All that are asked for, in the order in which they come."""
    if asked.cells:
        return [Cell(*cell.split("/")) for cell in asked.cells.split(",")]
    parts = (asked.backends.split(","), asked.workers.split(","), asked.faults.split(","))
    return [Cell(*cell) for cell in product(*parts)]


def main() -> None:
    """Measure, print a row at a time, and say how many goals are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="local,ray")
    parser.add_argument("--faults", default=",".join(GOALS))
    parser.add_argument("--workers", default=",".join(ROLES + IN_SYNC))
    parser.add_argument("--cells", help="backend/worker/fault,... instead of all of these")
    cells = cells_of(parser.parse_args())
    with tempfile.TemporaryDirectory() as folder:
        from trainer.cli.make_tiny import make

        tiny = make(Path(folder) / "tiny")
        make_judge(tiny)
        try:
            for backend in dict.fromkeys(cell.backend for cell in cells):
                of_backend = [cell for cell in cells if cell.backend == backend]
                measure(backend, of_backend, tiny, Path(folder) / backend)
        finally:
            print_table(cells)
    print(f"{sum(cell.is_within_goal for cell in cells)} of {len(cells)} within their goals")


if __name__ == "__main__":
    main()
