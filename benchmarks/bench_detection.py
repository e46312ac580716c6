"""How soon a run names a worker that is killed, frozen or in a deadlock, at default settings.

    python benchmarks/bench_detection.py [--backends local,ray] [--faults kill,freeze,lock,left]

prints a table. Each figure is a run of its own on the tiny model, with two pools of two processes:
the actor with the reference, the rollout with the critic. In its second step one worker of a role
is hit, and the seconds run until the step raises its error, which must name the worker:

    kill      SIGKILL to its last rank                          goal 5 s
    freeze    SIGSTOP to its last rank                          goal 30 s
    lock      its rank 0 waits for a lock that nobody gives     goal 30 s
    left      its rank 0 waits in a collective alone            goal 30 s
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from pathlib import Path
from typing import Any

from verl_like.errors import VerlLikeError

ROLES = ("actor", "ref", "rollout", "critic")
GOALS = {"kill": 5.0, "freeze": 30.0, "lock": 30.0, "left": 30.0}
SETTINGS = [
    "trainer.device=cpu",
    "trainer.logger=[]",
    "trainer.save_freq=-1",
    "trainer.max_restarts=0",
    "trainer.total_training_steps=3",
    "trainer.n_gpus_per_node=4",
    "resource_pool_spec={policies: [2], samples: [2]}",
    "role_mapping={actor: policies, ref: policies, rollout: samples, critic: samples}",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.ppo_mini_batch_size=16",
    "data.train_batch_size=16",
    "data.max_prompt_length=16",
    "data.max_response_length=8",
]


def send(number: int) -> Callable[[Any], None]:
    """A fault: this signal to the last rank of a group."""

    def hit(group: Any) -> None:
        os.kill(group.transport.pid_here(group.world_size - 1), number)

    return hit


def make_call(method: Callable[[], None]) -> Callable[[Any], None]:
    """A fault: rank 0 of a group makes this call, before all that come later."""

    def hit(group: Any) -> None:
        group.execute_func_rank_zero.remote(method)

    return hit


def wait_for_a_lock() -> None:
    """In a worker: nobody will ever release it."""
    import threading

    lock = threading.Lock()
    lock.acquire()
    lock.acquire()


def enter_a_collective_alone() -> None:
    """In a worker: the other ranks go on with their next calls."""
    import torch.distributed as dist

    dist.barrier()


FAULTS = {
    "kill": send(signal.SIGKILL),
    "freeze": send(signal.SIGSTOP),
    "lock": make_call(wait_for_a_lock),
    "left": make_call(enter_a_collective_alone),
}


class Hit:
    """A callback that hits a role as the second step begins, and takes the time until it raises."""

    def __init__(self, role: str, fault: str) -> None:
        self.role, self.fault = role, fault
        self.seconds = float("nan")
        self.words = ""

    def on_step_begin(self, trainer: Any) -> None:
        """The step itself is timed from here on."""
        if trainer.global_step != 2:
            return
        step = trainer.step

        def timed(*arguments: Any) -> Any:
            began = time.monotonic()
            FAULTS[self.fault](trainer.groups[self.role])
            try:
                return step(*arguments)
            except VerlLikeError as error:
                self.seconds, self.words = time.monotonic() - began, str(error)
                raise

        trainer.step = timed


def measure(backend: str, role: str, fault: str, tiny: Path) -> Hit:
    """One run that is hit."""
    from trainer import load_config, run

    hit = Hit(role, fault)
    with tempfile.TemporaryDirectory() as folder:
        settings = [
            *SETTINGS,
            f"trainer.backend={backend}",
            f"trainer.default_local_dir={folder}",
            f"actor_rollout_ref.model.path={tiny}/model",
            f"data.train_files={tiny}/train.parquet",
        ]
        # what a run says of itself goes beside the table
        with redirect_stdout(sys.stderr), suppress(VerlLikeError):
            run(load_config(settings), callbacks=[hit])
    return hit


def main() -> None:
    """Measure, print a row at a time, and say how many goals are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backends", default="local,ray")
    parser.add_argument("--faults", default=",".join(FAULTS))
    parser.add_argument("--roles", default=",".join(ROLES))
    options = parser.parse_args()
    print("| backend | fault | worker of | seconds | goal | named |\n|---|---|---|---|---|---|")
    met = []
    with tempfile.TemporaryDirectory() as folder:
        from trainer.cli.make_tiny import make

        tiny = make(Path(folder) / "tiny")
        for backend in options.backends.split(","):
            for fault in options.faults.split(","):
                for role in options.roles.split(","):
                    hit = measure(backend, role, fault, tiny)
                    met.append(hit.seconds <= GOALS[fault])
                    named = hit.words.split(" (")[0]
                    row = f"{hit.seconds:.1f} | {GOALS[fault]:.0f} | {named} |"
                    print(f"| {backend} | {fault} | {role} | {row}", flush=True)
    print(f"{sum(met)} of {len(met)} within their goals")


if __name__ == "__main__":
    main()
