"""Measure what the loss of one worker costs a PPO run on the tiny model, for each role.

    python benchmarks/bench_restart.py [--backend local,ray] [--roles rollout,ref,critic,actor]

Every role has its own processes: two for the rollout, one for each other role. At the beginning of
a step, the last process of a role is killed with SIGKILL, one role per step. A line of JSON has the
times since the kill in seconds: when the run noticed (`detected`), when the group was restored with
its state (`back`), and when the next step ended (`next_step`). For a rollout, it also has the
numbers of samples that were kept and generated again. `cpu` is the CPU seconds of the driver and
the new process since the kill, which other work on the machine affects least. The pause before a
restart (2 s for the first) is not counted.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import signal
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

from trainer import load_config, restarts, run
from trainer.cli.make_tiny import make
from trainer.ppo.config import PPOConfig
from trainer.ppo.recipe import PPO
from trainer.ppo.stages import PPOTrainer

PROCESSES = {"rollout": 2, "ref": 1, "critic": 1, "actor": 1}
ROLES = tuple(PROCESSES)
FIRST_KILL = 2
"""Step of the first kill; by then, every process has its normal speed."""


def cpu_s_of(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@dataclass(kw_only=True)
class ChildConfig(PPOConfig):
    """Gives every role its own process, also on the local backend."""

    @property
    def child_pools(self) -> frozenset[str]:
        """Return all pools."""
        return frozenset(self.resource_pool_spec)


class Clock(logging.Handler):
    """Reads from the log when a loss was noticed, and when the group was restored."""

    def __init__(self) -> None:
        super().__init__()
        self.at: dict[str, float] = {}
        self.samples: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Record the times of the messages that count, and the numbers of samples."""
        text = record.getMessage()
        for name, words in (("detected", " failed: "), ("back", " restarted after ")):
            if words in text:
                self.at.setdefault(name, record.created)
        if results := re.search(r"(\d+) samples .* are kept, (\d+) are regenerated", text):
            self.samples = {"kept": int(results[1]), "made_again": int(results[2])}


class Killed(PPOTrainer):
    """Kills a role at the start of every step from `FIRST_KILL` on, and records what follows."""

    left: ClassVar[list[str]] = []
    """Roles that are not killed yet."""
    clock_of_log: ClassVar[Clock] = Clock()
    under_way: ClassVar[tuple[str, float, float] | None] = None
    """The role that was killed last, when, and the driver's CPU seconds at that time."""

    def on_step_begin(self) -> None:
        """Kill the next role if the previous one has been replaced."""
        if Killed.under_way is None and self.left and self.global_step >= FIRST_KILL:
            role = self.left.pop(0)
            self.clock_of_log.at.clear()
            self.clock_of_log.samples = {}
            Killed.under_way = role, time.time(), time.process_time()
            os.kill(self._pid(role), signal.SIGKILL)

    def on_step_end(self, metrics: Any) -> None:
        """Print what the last kill cost."""
        if Killed.under_way is None:
            return
        role, killed_at, cpu = Killed.under_way
        Killed.under_way = None
        moments = self.clock_of_log.at | {"next_step": time.time()}
        seconds = {name: round(at - killed_at, 2) for name, at in moments.items()}
        cpu = time.process_time() - cpu + cpu_s_of(self._pid(role))
        backend = self.config.trainer.backend
        facts = {**seconds, "cpu": round(cpu, 2), **self.clock_of_log.samples}
        print(json.dumps({"backend": backend, "lost": role, **facts}))

    def _pid(self, role: str) -> int:
        return int(self.groups[role].transport.started[-1].pid)


def measure(backend: str, roles: list[str], tiny: Path, folder: Path) -> None:
    """Make one run in which each of these roles is killed once."""
    Killed.left = list(roles)
    pools = ", ".join(f"{role}_pool: [{count}]" for role, count in PROCESSES.items())
    settings = [
        f"actor_rollout_ref.model.path={tiny}/model",
        f"data.train_files={tiny}/train.parquet",
        f"trainer.default_local_dir={folder}",
        f"trainer.backend={backend}",
        f"resource_pool_spec={{{pools}}}",
        f"role_mapping={{{', '.join(f'{role}: {role}_pool' for role in ROLES)}}}",
        *("trainer.n_gpus_per_node=5", "trainer.device=cpu", "trainer.logger=[]"),
        *("data.train_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8"),
        *("data.max_prompt_length=16", "data.max_response_length=8"),
        *("algorithm.use_kl_in_reward=true", "trainer.save_freq=1"),
        f"trainer.total_training_steps={FIRST_KILL + len(roles)}",
        f"trainer.max_restarts={len(roles)}",
    ]
    if backend == "ray":
        settings.append("cpus_per_process=0.2")
    run(load_config(settings, replace(PPO, schema=ChildConfig)), Killed)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--backend", default="local,ray")
    parser.add_argument("--roles", default=",".join(ROLES))
    options = parser.parse_args()

    restarts.FIRST_WAIT_S = 0.0
    logging.basicConfig()
    logging.getLogger("trainer").addHandler(Killed.clock_of_log)
    with tempfile.TemporaryDirectory() as folder:
        tiny = make(Path(folder, "tiny"))
        for backend in options.backend.split(","):
            measure(backend, options.roles.split(","), tiny, Path(folder, backend))


if __name__ == "__main__":
    main()
