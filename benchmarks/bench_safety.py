"""Measure what safety costs per step: the reward sandbox, weight hashes, and process monitoring.

    python benchmarks/bench_safety.py [--rounds 60] [--all]

The script runs PPO steps of the tiny model, with driver, actor and rollout in separate processes
(`trainer.backend=local`). In each round, every part is switched off for a few steps, and all parts
for some others, in random order. The first step after a switch does not count: it sets class
attributes, which invalidates the interpreter's caches. The script prints ratios of the CPU seconds
of all processes and of the wall time of a step: with everything on, divided by a part off. It also
prints the CPU seconds per process. `--all` only compares everything on with everything off; these
steps are then closer in time, so the ratio is more precise. The lock of the run folder is taken
once per run, so its cost is printed separately.

- sandbox off: the driver calls the reward function itself.
- hashes off: weights are sent without hashes.
- watch off: the driver does not check whether a process that it waits for is alive or late.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

from verl_like.process.machine import descendants

PARTS = ("sandbox", "hashes", "watch")
MODES: dict[str, tuple[str, ...]] = {
    "all on": (),
    **{f"{part} off": (part,) for part in PARTS},
    "all off": PARTS,
}
WARM_UP = 2
"""Rounds that do not count."""
STEPS = 4
"""Consecutive steps in one mode."""
PROCESSES = ("driver", "actor", "rollout", "rewards")
Restore = Callable[[], None]


def swap(owner: Any, name: str, stub: Any) -> Restore:
    """Replace an attribute by `stub`; return a function that restores it."""
    original = vars(owner)[name]
    setattr(owner, name, stub)
    return lambda: setattr(owner, name, original)


def without_sandbox() -> list[Restore]:
    """Make the driver call the reward function itself."""
    from verl_like.registry import load_from
    from workers.rewards.call import RewardCall, Sample
    from workers.rewards.outcome import Outcome, read_outcome
    from workers.rewards.scorer import Scorer

    calls: dict[int, RewardCall] = {}

    def score(self: Scorer, samples: list[Sample]) -> list[Outcome]:
        if id(self) not in calls:
            spec = self._function
            function = load_from(spec.path, spec.name, spec.path_key, spec.name_key)
            calls[id(self)] = RewardCall.of(function, spec.kwargs, spec.columns)
        return [read_outcome(calls[id(self)](sample)) for sample in samples]

    return [swap(Scorer, "score", score)]


def without_hashes() -> list[Restore]:
    """Make every hash of weights in a worker process a constant."""
    from workers.weights import checksum

    def copied(into: Any, source: Any) -> int:
        into.copy_(source)
        return 0

    undo: list[Restore] = []
    constants: dict[str, Any] = {
        "hash_of": lambda payload: 0,
        "hashes_of": lambda payloads: [0] * len(payloads),
        "copy_hashed": copied,
        "digest_of": lambda hashes: "0" * 64,
    }
    for name, stub in constants.items():
        original = getattr(checksum, name)
        users = [m for m in list(sys.modules.values()) if vars(m).get(name) is original]
        undo += [swap(module, name, stub) for module in users]
    return undo


def without_watch() -> list[Restore]:
    """Make the driver wait for results without monitoring processes."""
    from verl_like.backends.rpc import ProcessTransport
    from verl_like.calls.diagnose import CallTimes
    from verl_like.calls.transport import Transport

    kinds = [ProcessTransport, *ProcessTransport.__subclasses__()]
    return [
        *(swap(kind, "lost", lambda self, ranks: {}) for kind in kinds if "lost" in vars(kind)),
        swap(Transport, "check_idle", lambda self, what: None),
        swap(CallTimes, "limit_s", lambda self, name, rows, limits: limits.call_s),
        swap(CallTimes, "add", lambda self, name, seconds, rows: None),
    ]


def switch(off: tuple[str, ...]) -> None:
    """Switch these parts off in this process, and all others on."""
    # stored in `sys`, which exists in every process: this function is sent to workers by value
    undo: list[Restore] = vars(sys).setdefault("undo_of_bench_safety", [])
    while undo:
        undo.pop()()
    offs = {"sandbox": without_sandbox, "hashes": without_hashes, "watch": without_watch}
    for part in off:
        undo.extend(offs[part]())


def cpu_of(pid: int) -> float:
    """Return the CPU seconds of a process; 0 if it has ended."""
    clock = (~pid << 3) | 2  # the clock id, as computed by Linux's clock_getcpuclockid
    try:
        return time.clock_gettime(clock)
    except OSError:
        return 0.0


class Meter:
    """A callback that switches parts off, and reads the clocks in every step."""

    def __init__(self, modes: Sequence[str], rounds: int) -> None:
        """Plan every mode once per round."""
        draw = Random(1)
        self.in_a_round = len(modes)
        orders = [draw.sample(modes, len(modes)) for _ in range(rounds + WARM_UP)]
        self.modes = [mode for order in orders for mode in order for _ in range(STEPS)]
        self.steps: list[tuple[float, ...]] = []
        """Wall seconds and CPU seconds of `PROCESSES` for every step."""

    def on_step_begin(self, trainer: Any) -> None:
        """Switch if another mode begins, then read the clocks."""
        if trainer.global_step % STEPS == 1:
            off = MODES[self.modes[trainer.global_step - 1]]
            switch(off)
            for role in ("actor", "rollout"):
                trainer.groups[role].execute_func_rank_zero(switch, off)
        self._before = self._clocks(trainer)

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Read the clocks."""
        after = self._clocks(trainer)
        self.steps.append(tuple(b - a for a, b in zip(self._before, after, strict=True)))

    def _clocks(self, trainer: Any) -> tuple[float, ...]:
        """Return the wall seconds and the CPU seconds of `PROCESSES`."""
        actor, rollout = (
            trainer.groups[role].transport.pid_here(0) for role in ("actor", "rollout")
        )
        others = set(descendants(os.getpid())) - {actor, rollout}
        cpu = time.process_time(), cpu_of(actor), cpu_of(rollout), sum(map(cpu_of, others))
        return time.perf_counter(), *cpu

    def counted(self) -> dict[str, list[tuple[float, ...]]]:
        """Return the steps that count, by mode; without a sandbox, there is no reward process."""
        modes = [mode for mode in MODES if mode in self.modes]
        results: dict[str, list[tuple[float, ...]]] = {mode: [] for mode in modes}
        for number, (mode, step) in enumerate(zip(self.modes, self.steps, strict=True)):
            if number < WARM_UP * STEPS * self.in_a_round or number % STEPS == 0:
                continue
            results[mode].append((*step[:-1], 0.0) if "sandbox" in MODES[mode] else step)
        return results


def report(of_mode: dict[str, list[tuple[float, ...]]]) -> None:
    """Print ratios of lower quartiles (other work only adds time), and ratios within rounds."""
    on = of_mode["all on"]
    on_cpu = [sum(cpu) for _, *cpu in on]
    on_wall = lower_quartile([wall for wall, *_ in on])
    names = "".join(f"{name:>9}" for name in PROCESSES)
    print(f"{'':12}{'CPU ms':>8}{'wall ms':>9}  all on over it: CPU    in a round     wall {names}")
    for mode, steps in of_mode.items():
        cpu = [sum(cpu) for _, *cpu in steps]
        wall, *parts = map(lower_quartile, zip(*steps, strict=True))
        mean, error = ratio_in_a_round(on_cpu, cpu)
        ratio = lower_quartile(on_cpu) / lower_quartile(cpu)
        of_parts = "".join(f"{1e3 * part:9.2f}" for part in parts)
        print(
            f"{mode:12}{1e3 * lower_quartile(cpu):8.1f}{1e3 * wall:9.1f}"
            f"{ratio:20.3f} {mean:8.3f} ± {error:.3f} {on_wall / wall:6.3f} {of_parts}"
        )


def ratio_in_a_round(on: Sequence[float], off: Sequence[float]) -> tuple[float, float]:
    """Return the mean ratio of two modes' steps over the rounds, and its standard error.

    The largest and the smallest tenth of the ratios are left out.
    """
    counted = STEPS - 1
    ratios = sorted(
        sum(on[first : first + counted]) / sum(off[first : first + counted])
        for first in range(0, len(on), counted)
    )
    cut = len(ratios) // 10
    middle = ratios[cut : len(ratios) - cut]
    return statistics.mean(middle), statistics.pstdev(middle) / len(middle) ** 0.5


def lower_quartile(values: Sequence[float]) -> float:
    """Return the value below which a quarter of the values are."""
    return statistics.quantiles(values, n=4)[0]


def ms_of_lock(folder: Path) -> float:
    """Return the milliseconds for taking and releasing the lock of a run folder."""
    from trainer.run_folder.lock import FolderLock

    began = time.perf_counter()
    for _ in range(100):
        with FolderLock(folder):
            pass
    return 1e3 * (time.perf_counter() - began) / 100


def main() -> None:
    """Parse the command line, and run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--all", action="store_true", help="only everything on, everything off")
    options = parser.parse_args()
    modes = ["all on", "all off"] if options.all else list(MODES)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"

    from trainer import load_config, run
    from trainer.cli.make_tiny import make as make_tiny
    from trainer.ppo.config import PPOConfig
    from trainer.ppo.recipe import PPO

    @dataclass(kw_only=True)
    class ChildConfig(PPOConfig):
        @property
        def child_pools(self) -> frozenset[str]:
            return frozenset({"actor_pool", "rollout_pool"})

    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        make_tiny(scratch)
        meter = Meter(modes, options.rounds)
        overrides = [
            f"actor_rollout_ref.model.path={scratch}/model",
            f"data.train_files={scratch}/train.parquet",
            *("trainer.backend=local", "trainer.device=cpu", "placement=standalone"),
            *("trainer.n_gpus_per_node=2", f"trainer.default_local_dir={scratch}/run"),
            *("data.train_batch_size=8", "data.max_prompt_length=16", "data.max_response_length=8"),
            *("actor_rollout_ref.actor.ppo_mini_batch_size=8", "actor_rollout_ref.rollout.n=2"),
            *("algorithm.adv_estimator=grpo", "algorithm.use_kl_in_reward=false"),
            *(f"trainer.total_training_steps={len(meter.modes)}", "trainer.logger=[]"),
        ]
        recipe = replace(PPO, schema=ChildConfig)
        run(load_config(overrides, recipe), callbacks=[meter])
        report(meter.counted())
        print(f"lock of the run folder, once per run: {ms_of_lock(scratch):.2f} ms")


if __name__ == "__main__":
    main()
