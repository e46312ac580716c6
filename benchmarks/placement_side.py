"""Measure placements, the driver and calls, one of them per process.

    python benchmarks/placement_side.py split|colocate|passes|driver|memory|calls FOLDER

The script prints its results as JSON; `bench_ppo.py` runs it. FOLDER was written by `grpo_side.py
make`. On two cores, `split` has a pool of one process for the policy and one for the critic;
`colocate` has one pool of two processes.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

from verl_like import Dispatch, Worker, register

NUM_PROMPTS = 64
NUM_STEPS = 20
"""Steps of a run. The first two do not count, because they touch memory the first time."""


def overrides(folder: Path, run_folder: str, *settings: str) -> list[str]:
    """Return the settings of PPO with a critic of the policy's size and 4 samples per prompt."""
    return [
        "trainer.device=cpu",
        "trainer.logger=[]",
        f"trainer.default_local_dir={run_folder}",
        f"actor_rollout_ref.model.path={folder}/fixed",
        f"data.train_files={folder}/train.parquet",
        f"data.train_batch_size={NUM_PROMPTS}",
        "data.max_prompt_length=16",
        "data.max_response_length=32",
        f"actor_rollout_ref.actor.ppo_mini_batch_size={NUM_PROMPTS}",
        "actor_rollout_ref.rollout.n=4",
        *settings,
    ]


def steps_of(
    folder: Path, num_steps: int, *settings: str
) -> tuple[list[dict[str, float]], list[dict[str, Any]]]:
    """Return the metrics of all steps except the first two, and all calls in the trace."""
    from trainer import load_config, run

    with tempfile.TemporaryDirectory() as run_folder:
        length = f"trainer.total_training_steps={num_steps}"
        run(load_config(overrides(folder, run_folder, length, *settings)))
        lines = (Path(run_folder) / "metrics.jsonl").read_text().splitlines()
        events = json.loads((Path(run_folder) / "timeline.json").read_text())["traceEvents"]
    calls = [event for event in events if event["ph"] == "X"]
    return [json.loads(line) for line in lines][2:], calls


def median(lines: list[dict[str, float]], name: str) -> float:
    """Return the median of a metric over steps."""
    return statistics.median(line[name] for line in lines)


def split(folder: Path) -> dict[str, float]:
    """Measure two pools of one core: the update phase, and actor and critic alone on one core."""
    lines, _ = steps_of(folder, NUM_STEPS, "placement=split", "trainer.n_gpus_per_node=2")
    alone, _ = steps_of(folder, NUM_STEPS, "placement=colocate", "trainer.n_gpus_per_node=1")
    actor, critic = median(alone, "timing_s/update_actor"), median(alone, "timing_s/update_critic")
    return {
        "update_s": median(lines, "timing_s/update"),
        "actor_alone_s": actor,
        "critic_alone_s": critic,
        "update_over_alone": median(lines, "timing_s/update") / (actor + critic),
        "overlap_ratio_update": median(lines, "perf/overlap_ratio_update"),
        "step_s": median(lines, "timing_s/step"),
    }


def colocate(folder: Path) -> dict[str, float]:
    """Measure one pool of two processes, on the same cores as `split`."""
    lines, _ = steps_of(folder, NUM_STEPS, "placement=colocate", "trainer.n_gpus_per_node=2")
    return {"step_s": median(lines, "timing_s/step")}


BY_ROWS = "actor_rollout_ref.actor.use_dynamic_bsz=false"


def passes(folder: Path) -> dict[str, float]:
    """Return the CPU seconds of a step with passes by tokens, as by default, and by 8 samples.

    Both run alternately in this process, so other work on the cores does not affect the comparison.
    """
    from trainer import load_config, run
    from trainer.ppo.stages import PPOTrainer
    from trainer.record import Metrics

    ends: list[float] = []

    class Metered(PPOTrainer):
        def on_step_end(self, metrics: Metrics) -> None:
            ends.append(time.process_time())

    in_process = (
        "trainer.backend=local",
        "trainer.n_gpus_per_node=1",
        "trainer.total_training_steps=6",
    )
    steps: dict[str, list[float]] = {"tokens": [], "rows": []}
    for cut in ("tokens", "rows") * 2:
        ends.clear()
        cut_settings = (BY_ROWS,) if cut == "rows" else ()
        with tempfile.TemporaryDirectory() as run_folder:
            run(load_config(overrides(folder, run_folder, *in_process, *cut_settings)), Metered)
        steps[cut] += [after - before for before, after in pairwise(ends)][1:]
    by_tokens, by_rows = (statistics.median(steps[cut]) for cut in ("tokens", "rows"))
    return {
        "tokens_cpu_s": by_tokens,
        "rows_cpu_s": by_rows,
        "tokens_over_rows": by_tokens / by_rows,
    }


def driver(folder: Path) -> dict[str, float]:
    """Return the fraction of a GRPO step without a busy worker: dispatch, rewards, metrics, ..."""
    grpo = ("algorithm.adv_estimator=grpo", "trainer.n_gpus_per_node=1")
    shares = {}
    for backend in ("local", "ray"):
        lines, events = steps_of(folder, 10, *grpo, f"trainer.backend={backend}")
        busy: dict[int, float] = defaultdict(float)
        for event in events:
            busy[event["args"].get("step", 0)] += event["dur"] / 1e6
        driver_shares = [1 - busy[int(line["step"])] / line["timing_s/step"] for line in lines]
        shares[f"driver_share_{backend}"] = statistics.median(driver_shares)
    return shares


def memory(folder: Path) -> dict[str, float]:
    """Return the driver's resident MiB in steps 50 and 200; workers are other processes."""
    import psutil

    from trainer import load_config, run
    from trainer.ppo.stages import PPOTrainer
    from trainer.record import Metrics

    resident = {}

    class Metered(PPOTrainer):
        def on_step_end(self, metrics: Metrics) -> None:
            resident[self.global_step] = psutil.Process().memory_info().rss / 2**20

    small = (
        "data.train_batch_size=16",
        "actor_rollout_ref.actor.ppo_mini_batch_size=16",
        "trainer.n_gpus_per_node=1",
    )
    with tempfile.TemporaryDirectory() as run_folder:
        settings = ("algorithm.adv_estimator=grpo", "trainer.total_training_steps=200", *small)
        run(load_config(overrides(folder, run_folder, *settings)), Metered)
    return {
        "rss_50_mib": resident[50],
        "rss_200_mib": resident[200],
        "growth_mib": resident[200] - resident[50],
    }


class Idle(Worker):
    """Returns immediately."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def nothing(self) -> None:
        """Do nothing."""


class Bare:
    """An actor without a framework."""

    def nothing(self) -> None:
        """Do nothing."""


def milliseconds(call: Callable[[], Any]) -> float:
    """Return the median of 40 calls, after 20 that do not count."""
    times = []
    for _ in range(60):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return statistics.median(times[20:]) * 1e3


def calls(folder: Path) -> dict[str, float]:
    """Return the milliseconds of an empty call on 2, 8 and 64 actors, and on as many bare ones."""
    import ray

    from verl_like.backends.ray import (
        RayClassWithInitArgs,
        RayResourcePool,
        RayWorkerGroup,
        connect,
    )

    connect(num_cpus=64)
    bare_class = ray.remote(num_cpus=0.5)(Bare)
    figures = {}
    for num_workers in (2, 8, 64):
        pool = RayResourcePool([num_workers], use_gpu=False, cpus_per_process=0.5)
        group: Any = RayWorkerGroup(pool, RayClassWithInitArgs(Idle))
        figures[f"call_ms_{num_workers}"] = milliseconds(group.nothing)
        group.shutdown()
        pool.release()
        actors = [bare_class.remote() for _ in range(num_workers)]
        figures[f"bare_ms_{num_workers}"] = milliseconds(
            lambda a=actors: ray.get([actor.nothing.remote() for actor in a])
        )
        for actor in actors:
            ray.kill(actor)
        ours, bare = figures[f"call_ms_{num_workers}"], figures[f"bare_ms_{num_workers}"]
        figures[f"over_bare_{num_workers}"] = ours / bare
    return figures


def main() -> None:
    """Parse the command line, and run the benchmark."""
    sides = {
        "split": split,
        "colocate": colocate,
        "passes": passes,
        "driver": driver,
        "memory": memory,
        "calls": calls,
    }
    print(json.dumps(sides[sys.argv[1]](Path(sys.argv[2]))), flush=True)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
