"""One side of `bench_scale.py`: steps over simulated ranks.

python scale_side.py RANKS TP SAMPLES STEPS FOLDER      # prints JSON
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from simulated import PROMPT, RESPONSE, FarEnds, Workers

from trainer.config.compose import load_config
from trainer.groups import cluster, worker_groups
from trainer.groups.worker_groups import WorkerGroups
from trainer.launch import show_plan
from trainer.loop import Loop
from trainer.observers.active import active_observers
from trainer.ppo.recipe import PPO
from trainer.ppo.stages import PPOTrainer
from trainer.run_folder.folder import FolderLock, note_start, open_run_folder
from trainer.run_state import Run
from verl_like import WorkerGroup
from verl_like.calls.group import ClassWithInitArgs, create_colocated_worker_cls
from verl_like.placement.plan import PoolPlan
from verl_like.placement.pools import NodeSpec, ResourcePool

ON_NODE = 8
SAMPLES_A_PROMPT = 4


class SimulatedPools(worker_groups.PoolStarter):
    """Starts pools of `Workers`, with a connection to each rank."""

    tp: ClassVar[int] = 1
    far_ends: ClassVar[FarEnds]

    def start(self, plan: PoolPlan, classes: Mapping[str, type]) -> WorkerGroup:
        classes_of_roles = {
            role: ClassWithInitArgs(cls, self.config) for role, cls in classes.items()
        }
        recipe = create_colocated_worker_cls(classes_of_roles)
        facts = ResourcePool(plan.process_on_nodes).process_infos("+".join(classes))
        places = [(rank // self.tp, rank % self.tp == 0) for rank in range(len(facts))]
        meshes = [
            {role: {"train": place, "rollout": place} for role in classes} for place in places
        ]
        workers = Workers(facts, meshes)
        self.far_ends.connect(workers)
        return WorkerGroup(workers, dict(classes), prefixed=recipe.prefixed)


class Gauge:
    """A callback that records the driver's costs per step, and the peak of its open files."""

    def __init__(self, far_ends: FarEnds) -> None:
        self.steps: list[dict[str, float]] = []
        self._far_ends, self._ended = far_ends, threading.Event()
        self._most = {"files": 0, "threads": 0}
        self._cpu_s = 0.0
        """CPU seconds of the measurements themselves."""
        self._before = self.now()
        threading.Thread(target=self._look, name="gauge", daemon=True).start()

    def now(self) -> dict[str, float]:
        """Return what the driver has used and sent so far."""
        driver_s = time.process_time() - Workers.cpu_s - self._far_ends.cpu_s - self._cpu_s
        return {
            "driver s": driver_s,
            "MB out": Workers.bytes_out / 1e6,
            "MB in": Workers.bytes_in / 1e6,
        }

    def _look(self) -> None:
        while not self._ended.wait(0.2):
            open_now = {
                "files": len(os.listdir("/proc/self/fd")) - self._far_ends.num,
                "threads": threading.active_count() - 2,
            }
            self._most = {name: max(most, open_now[name]) for name, most in self._most.items()}
            self._cpu_s = time.thread_time()

    def on_step_begin(self, trainer: Any) -> None:
        """Start the counters of the step."""
        self._before = self.now()

    def on_step_end(self, trainer: Any, metrics: dict[str, float]) -> None:
        """Record the values of the step."""
        now = self.now()
        self.steps.append({name: now[name] - before for name, before in self._before.items()})

    def end(self) -> dict[str, float]:
        """Return the median over steps, without the first."""
        self._ended.set()
        rows = self.steps[1:]
        return {name: statistics.median(row[name] for row in rows) for name in rows[0]} | self._most


class MeasuredPPO(PPOTrainer):
    """Records the driver's CPU seconds of stages, and at the end of a checkpoint."""

    gauge: ClassVar[Gauge]
    cpu_of: ClassVar[dict[str, list[float]]] = {}

    @contextmanager
    def clock(self, stage: str) -> Iterator[None]:
        before = self.gauge.now()["driver s"]
        with super().clock(stage):
            yield
        driver_s = self.gauge.now()["driver s"] - before
        self.cpu_of.setdefault(stage, []).append(driver_s)


class MeasuredLoop(Loop):
    """Records the driver's CPU seconds at the end of a checkpoint."""

    def _commit(self) -> None:
        is_written = self.trainer.run.checkpoints._written is not None
        before = MeasuredPPO.gauge.now()["driver s"]
        super()._commit()
        if is_written:
            MeasuredPPO.cpu_of["commit"] = [MeasuredPPO.gauge.now()["driver s"] - before]


def make_inputs(folder: Path, num_prompts: int) -> Path:
    """Write a tiny model with character tokens, and prompts of 100 to 500 characters."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    from trainer.cli import make_tiny

    tiny = make_tiny.make(folder / "tiny")
    sizes = json.loads((tiny / "model/config.json").read_text())
    sizes["max_position_embeddings"] = PROMPT + RESPONSE
    (tiny / "model/config.json").write_text(json.dumps(sizes))
    make_judge(tiny)
    rows = make_tiny.make_rows(num_prompts, "train")
    for number, row in enumerate(rows):
        row["prompt"][0]["content"] += " a" * (50 + number * 37 % 190)
    pq.write_table(pa.Table.from_pylist(rows), tiny / "train.parquet")
    return tiny


def on_two_pools(nodes: int) -> list[str]:
    """Return the settings for two pools, each on half of the nodes."""
    half = str([ON_NODE] * (nodes // 2))
    return [
        f"resource_pool_spec={{policy: {half}, value: {half}}}",
        "role_mapping={actor_rollout: policy, ref: policy, critic: value, reward_model: value}",
    ]


def settings(folder: Path, tiny: Path, num_prompts: int, steps: int) -> list[str]:
    """Return the settings of the run, except for its pools."""
    policy = "actor_rollout_ref"
    return [
        *("trainer.backend=ray", "ray.address=simulated", "trainer.device=cpu"),
        *(f"{policy}.model.path={tiny}/model", f"data.train_files={tiny}/train.parquet"),
        *(f"data.max_prompt_length={PROMPT}", f"data.max_response_length={RESPONSE}"),
        *(f"data.train_batch_size={num_prompts}", f"{policy}.rollout.n={SAMPLES_A_PROMPT}"),
        f"{policy}.actor.ppo_mini_batch_size={num_prompts // 2}",
        *("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true"),
        *("reward.model.enable=true", f"reward.model.path={tiny}/judge"),
        *("data.val_files=null", f"trainer.default_local_dir={folder}"),
        *(f"trainer.total_training_steps={steps}", f"trainer.save_freq={steps}"),
        "trainer.save_final=false",
    ]


def run(
    num_ranks: int, tp: int, num_prompts: int, steps: int, folder: Path, tiny: Path
) -> dict[str, float]:
    """Run the steps; return the values per step, and those of the run."""
    keys = settings(folder, tiny, num_prompts, steps)
    config = load_config([*keys, *on_two_pools(num_ranks // ON_NODE)], PPO)
    SimulatedPools.tp, SimulatedPools.far_ends = tp, FarEnds()
    nodes = [NodeSpec(f"node-{n}", ON_NODE, 64.0, key=f"{n}") for n in range(num_ranks // ON_NODE)]
    pretended = {
        "require_shared_folder": lambda *_: None,
        "PoolStarter": SimulatedPools,
    }
    with ExitStack() as at_end:
        at_end.enter_context(mock.patch.multiple(worker_groups, **pretended))
        at_end.enter_context(mock.patch.object(cluster, "find_nodes", return_value=nodes))
        lock = at_end.enter_context(FolderLock(folder))
        inputs = MeasuredPPO.prepare(config, at_end)
        config = MeasuredPPO.recipe.resolve(config)
        open_run_folder(config, lock)
        note_start(folder)
        before_mib = rss_mib()
        groups = at_end.enter_context(WorkerGroups(config))
        groups.note_placement()
        show_plan(groups.placement, config, MeasuredPPO)
        MeasuredPPO.gauge = gauge = Gauge(SimulatedPools.far_ends)
        run = Run(config, groups, active_observers(config, MeasuredPPO.recipe), [gauge])
        MeasuredLoop(MeasuredPPO(run, *inputs)).run()
    results = gauge.end()
    stages = {
        f"{stage} s": statistics.median(cpu_s[1:])
        for stage, cpu_s in MeasuredPPO.cpu_of.items()
        if cpu_s[1:]
    }
    saved = MeasuredPPO.cpu_of["save_checkpoint"][-1] + MeasuredPPO.cpu_of["commit"][-1]
    return results | stages | {"checkpoint s": saved, "MiB": rss_mib() - before_mib}


def rss_mib() -> float:
    """Return the peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def make_judge(tiny: Path) -> None:
    """Write a sequence classifier with random weights and the tiny model's tokenizer."""
    from transformers import AutoConfig, AutoTokenizer, LlamaForSequenceClassification

    config = AutoConfig.from_pretrained(tiny / "model", num_labels=1)
    LlamaForSequenceClassification(config).save_pretrained(tiny / "judge")
    AutoTokenizer.from_pretrained(tiny / "model").save_pretrained(tiny / "judge")


def main() -> None:
    """Print the values as JSON in the last line."""
    num_ranks, tp, samples, steps = map(int, sys.argv[1:5])
    folder = sys.argv[5]
    num_prompts = num_ranks * samples // SAMPLES_A_PROMPT
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as scratch:
        tiny = make_inputs(Path(scratch), 2 * num_prompts)
        results = run(num_ranks, tp, num_prompts, steps, Path(folder or f"{scratch}/run"), tiny)
    print(json.dumps(results))


if __name__ == "__main__":
    main()
