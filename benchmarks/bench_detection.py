"""Measure how soon a run names a worker that is killed, frozen or deadlocked.

    python benchmarks/bench_detection.py [--backends local,ray] [--faults kill,freeze,lock,left]
                                         [--workers actor,critic,actor@sync,rollout@sync]
                                         [--cells local/ref/lock,ray/rollout@sync/kill]

All settings have their defaults. There is one run of the tiny model per backend, with two pools of
two processes: the actor with the reference, and the rollout with the critic and a reward model. In
every step after the first, a fault is injected into one worker. The time ends when the run names a
worker: in an error if it is killed or frozen, and in a warning that explains who waits for whom if
it hangs. The benchmark then kills a worker that hangs, because the run itself would wait until the
call's deadline. The run restarts the lost group, repeats the step and continues with the next
fault. On two idle cores, each fault takes half a minute, and so does the start of a backend.

    kill      SIGKILL to the last rank                          goal 5 s
    freeze    SIGSTOP to the last rank                          goal 30 s
    lock      rank 0 waits for a lock that is never released    goal 20 s
    left      rank 0 waits alone in a collective                goal 20 s

The fault is injected at the beginning of the step. `actor@sync` and `rollout@sync` are rank 0 of
the senders and of the receivers during a weight sync: the fault occurs before all of them vote, and
with `left` the rank skips the vote. `rollout@meet` gets the fault right before a sync, and never
joins it. Each fault prints a line immediately, and a table follows at the end.
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
"""Time that other processes get to finish after a fault, shortened from the default of 60 s."""
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
    """Wait for a lock that is never released."""
    import threading

    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def enter_a_collective_alone() -> None:
    """Wait in a collective that the other ranks do not join, as they continue with their calls."""
    import torch.distributed as dist

    dist.barrier()


def signal_itself(number: int) -> None:
    """Kill or stop this process."""
    os.kill(os.getpid(), number)


def hit_before_the_vote(fault: Callable[[], None] | None) -> None:
    """Inject a fault into this rank's next sync, before the vote; without one, skip the vote."""
    from workers.weights.channel import Channel

    vote = Channel.all_agree

    def hit(channel: Any, ok: bool) -> bool:
        Channel.all_agree = vote  # type: ignore[method-assign]
        if fault is None:
            vars(vote).setdefault("kept", []).append(
                channel.connection.group
            )  # keep the group, so that other ranks do not see it close
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
    """Inject a fault into a role now, or into its next weight sync."""
    role, _, where = worker.partition("@")
    group = groups[role]
    if where == "sync":
        action = None if fault == "left" else OF_ITSELF[fault]
        group.execute_func_rank_zero.remote(partial(hit_before_the_vote, action))
    elif fault in ("kill", "freeze"):
        number = signal.SIGKILL if fault == "kill" else signal.SIGSTOP
        os.kill(group.transport.pid_here(group.world_size - 1), number)
    else:
        group.execute_func_rank_zero.remote(OF_ITSELF[fault])


@dataclass
class Cell:
    """One fault and its outcome."""

    backend: str
    worker: str
    fault: str
    began: float | None = None
    seconds: float = float("nan")
    words: str = ""
    pid: int | None = None
    """Process id of rank 0 of the worker."""

    def note(self, words: str) -> None:
        """Record that the run named a worker; only the first time counts."""
        if self.began is not None and not self.words:
            self.seconds, self.words = time.monotonic() - self.began, words
            print(self.row(), file=sys.stderr, flush=True)

    @property
    def is_within_goal(self) -> bool:
        """True if the run named the worker within the goal; False if it never did."""
        return self.seconds <= GOALS[self.fault]

    def row(self) -> str:
        """Return the line that is printed immediately."""
        named = " ".join(self.words.split(" (")[0].split())[:120]
        facts = f"{self.seconds:.1f} | {GOALS[self.fault]:.0f} | {named}"
        return f"| {self.backend} | {self.worker} | {self.fault} | {facts} |"


class Struck(PPOTrainer):
    """A run with one fault in every step after the first."""

    waiting: ClassVar[list[Cell]] = []
    under_way: ClassVar[Cell | None] = None

    def on_step_begin(self) -> None:
        """Inject the next fault, unless the step is repeated."""
        if self.global_step > 1 and Struck.under_way is None and self.waiting:
            Struck.under_way = self.waiting.pop(0)
            if "@" not in Struck.under_way.worker:
                self.strike()

    def sync(self) -> dict[str, float]:
        """Inject the fault while the weights of a step are sent."""
        if Struck.under_way is not None and Struck.under_way.began is None:
            self.strike()
        return super().sync()

    def strike(self) -> None:
        """Inject the current fault."""
        cell = Struck.under_way
        assert cell is not None, "asked for by whoever has seen one"
        cell.began = time.monotonic()
        cell.pid = self.groups[cell.worker.partition("@")[0]].transport.pid_here(0)
        hit(self.groups, cell.worker, cell.fault)

    def on_step_end(self, metrics: Any) -> None:
        """Print the fault if it was never noticed; the step was completed."""
        if Struck.under_way is not None and not Struck.under_way.words:
            print(Struck.under_way.row(), file=sys.stderr, flush=True)
        Struck.under_way = None


class Explanations(logging.Handler):
    """Records when a hang is explained, and ends the hang."""

    def emit(self, record: logging.LogRecord) -> None:
        """Kill the worker that hangs."""
        cell, words = Struck.under_way, record.getMessage()
        if cell is None or cell.fault not in ("lock", "left") or "stood still" not in words:
            return
        cell.note(words)
        if cell.pid is not None:
            os.kill(cell.pid, signal.SIGKILL)


class Noting(restarts.Restarts):
    """Records when a run decides what to do about a failure."""

    def wait_for_next(self, error: VerlLikeError, step: int) -> None:
        """Record the failure before the run waits."""
        if Struck.under_way is not None:
            Struck.under_way.note(str(error))
        super().wait_for_next(error, step)


def measure(backend: str, cells: list[Cell], tiny: Path, folder: Path) -> None:
    """Make one run with all these faults, one after the other."""
    import trainer.launch

    logging.getLogger("verl_like.calls.diagnose").addHandler(Explanations())
    restarts.FIRST_WAIT_S, trainer.launch.TURN_S = 0.0, TURN_S
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
    # the run's own output goes to stderr, and the table to stdout
    with redirect_stdout(sys.stderr):
        run(load_config(settings), Struck)


def make_judge(tiny: Path) -> None:
    """Write a sequence classifier with random weights and the tiny model's tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tiny / "judge")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tiny / "judge")


def print_table(cells: list[Cell]) -> None:
    """Print a row for each worker."""
    goals = (f"{HEADS[fault]} (goal {GOALS[fault]:.0f})" for fault in HEADS)
    print("| backend | one worker of |", " | ".join(goals), "|\n|---|---|---|---|---|---|")
    results = {(cell.backend, cell.worker, cell.fault): cell.seconds for cell in cells}
    for backend, worker in dict.fromkeys((cell.backend, cell.worker) for cell in cells):
        seconds = (results.get((backend, worker, fault), float("nan")) for fault in HEADS)
        shown = (f"{number:.1f}" if number == number else "-" for number in seconds)
        print(f"| {backend} | {LABELS.get(worker, worker)} |", " | ".join(shown), "|")


def cells_of(options: argparse.Namespace) -> list[Cell]:
    """Return all selected cells, in the order in which they run."""
    if options.cells:
        return [Cell(*cell.split("/")) for cell in options.cells.split(",")]
    parts = (options.backends.split(","), options.workers.split(","), options.faults.split(","))
    return [Cell(*cell) for cell in product(*parts)]


def main() -> None:
    """Measure, print a row per fault, and print how many goals are met."""
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
